"""step_fn: several looks at the gradients of a step, under the laws."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.training.step import GRADIENT_NORM
from tests.problems import assert_close, assert_equal, classification, everything, mostly_wide, on, weights


def sam(step):
    gradients = step.gradients()
    norm = tf.linalg.global_norm(list(gradients.values()))
    with step.moved({path: tf.math.divide_no_nan(0.05 * g, norm) for path, g in gradients.items()}):
        return step.gradients()


def pcgrad(step):
    first, second = step.gradients("easy"), step.gradients("hard")
    dot = tf.add_n([tf.reduce_sum(first[path] * second[path]) for path in first])
    square = tf.add_n([tf.reduce_sum(g * g) for g in second.values()])
    share = tf.math.divide_no_nan(tf.minimum(dot, 0.0), square)
    return {path: g - share * second[path] + second[path] for path, g in first.items()}


def lookahead(step):
    start = step.weights
    with contextlib.ExitStack() as moves:
        for _ in range(2):
            moves.enter_context(step.moved({path: -0.1 * g for path, g in step.gradients().items()}))
        return {path: start[path] - weight for path, weight in step.weights.items()}


def model_fn_with(step_fn, optimizer=lambda: keras.optimizers.SGD(0.5), dropout=0.0, batch_norm=False, **arguments):
    def model_fn():
        layers = [keras.layers.Dense(6, "tanh", kernel_regularizer=keras.regularizers.L2(0.01), name="hidden")]
        layers += [keras.layers.BatchNormalization(name="norm")] if batch_norm else []
        layers += [keras.layers.Dropout(dropout)] if dropout else []
        net = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(4, name="logits")], name="net")

        def loss_fn(batch, training):
            logits = net(batch["x"], training=training)
            loss = keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)
            loss = distloop.weighted(loss, batch["weight"])
            hard = tf.square(tf.cast(logits[:, 0], tf.float32) - batch["x"][:, 0])
            return {"loss": loss, "easy": loss, "hard": hard}

        return distloop.ModelSpec(net, optimizer(), loss_fn, step_fn=step_fn, **arguments)

    return model_fn


def train(step_fn, replicas, steps=3, rows=None, of_model=(), **settings):
    trainer = distloop.Trainer(model_fn_with(step_fn, **dict(of_model)), on(replicas, **settings))
    numbers = trainer.fit(distloop.make_dataset(rows or classification(21), 8), steps=steps)  # the last one is odd
    return trainer, numbers


def by_hand(step_fn, steps=3):
    """Trains on one device with a tape and plain loops: what `step_fn` means."""
    spec = model_fn_with(None)()
    net, rate = spec.model, 0.5

    class Step:
        @property
        def weights(self):
            return {v.path: tf.identity(v) for v in net.trainable_variables}

        def gradients(self, value="loss"):
            with tf.GradientTape() as tape:
                found = spec.loss_fn(batch, True)[value]
                values, w = found if isinstance(found, tuple) else (found, tf.ones_like(found))
                total = tf.reduce_sum(values * w) / tf.reduce_sum(w) + (sum(net.losses) if value == "loss" else 0.0)
            gradients = tape.gradient(total, net.trainable_variables)
            return {v.path: g for v, g in zip(net.trainable_variables, gradients, strict=True)}

        @contextlib.contextmanager
        def moved(self, by):
            before = self.weights
            for v in net.trainable_variables:
                v.assign_add(by[v.path])
            yield
            for v in net.trainable_variables:
                v.assign(before[v.path])

    rows = classification(21)
    for i in range(steps):
        batch = {name: tf.constant(value[8 * i : 8 * i + 8]) for name, value in rows.items()}
        gradients = step_fn(Step())
        for v in net.trainable_variables:
            v.assign_sub(rate * gradients[v.path])
    return {v.path: v.numpy() for v in net.variables}


@pytest.mark.slow
@pytest.mark.parametrize("step_fn, replicas", mostly_wide([(sam, 3), (pcgrad, 2), (lookahead, 1)]))
def test_a_step_fn_trains_as_by_hand_on_replicas_with_microbatches(step_fn, replicas):
    keras.utils.set_random_seed(0)
    expected = by_hand(step_fn)
    trainer, _ = train(step_fn, replicas, microbatches=2)
    assert_close(weights(trainer), expected)


@pytest.mark.wide
@pytest.mark.slow
def test_all_looks_draw_the_same_and_the_first_alone_writes():
    def twice(step):
        first = step.gradients()
        with step.moved({"net/hidden/kernel": tf.ones([8, 6])}):
            step.gradients("hard")
        return {path: (g + first[path]) / 2 for path, g in step.gradients().items()}

    of_model = dict(dropout=0.5, batch_norm=True)
    runs = [train(step_fn, 2, of_model=of_model, microbatches=2) for step_fn in (None, twice)]
    assert_equal(*(everything(trainer) for trainer, _ in runs))
    assert runs[0][1]["loss"] == runs[1][1]["loss"]


@pytest.mark.wide
@pytest.mark.slow
def test_float16_an_overflow_in_the_second_pass_changes_only_the_scale():
    def far(step):
        is_bad = step.weights["net/logits/bias"][0] != 0.0  # in the second step, as the first one changed the weights
        with step.moved({path: tf.where(is_bad, 1e30, 0.0) + 0.0 * g for path, g in step.gradients().items()}):
            return step.gradients()

    of_model = dict(batch_norm=True, dropout=0.5, optimizer=lambda: keras.optimizers.Adam(0.1))
    settings = dict(precision="mixed_float16", average_decay=0.9)
    trainer = distloop.Trainer(model_fn_with(far, **of_model), on(2, **settings))
    data = distloop.make_dataset(classification(16), 8)
    trainer.fit(data, steps=1)
    before = everything(trainer)
    trainer.fit(data, steps=2)
    after = everything(trainer)
    changed = [path for path in before if before[path].tobytes() != after[path].tobytes()]
    kinds = {path.partition("@")[0].partition("/")[0] for path in changed}
    assert kinds == {"loss_scale", "streak", "step", "skipped_steps"}
    assert after["loss_scale/@0"] == before["loss_scale/@0"] / 2


@pytest.mark.slow
def test_float16_gradients_are_unscaled_before_a_step_fn_sees_them():
    def tenfold(step):
        return {path: 10.0 * g for path, g in step.gradients().items()}

    for precision in ("float32", "mixed_float16"):
        trainer = distloop.Trainer(model_fn_with(tenfold), on(1, precision=precision, clip_norm=0.25))
        before = weights(trainer)
        numbers = trainer.fit(distloop.make_dataset(classification(21), 8), steps=1)
        assert numbers[GRADIENT_NORM] > 1.0
        size = np.sqrt(sum(np.sum((w - before[path]) ** 2) for path, w in weights(trainer).items()))
        assert size == pytest.approx(0.5 * 0.25, rel=1e-3)


@pytest.mark.slow
def test_what_a_step_fn_keeps_in_variables_is_undone_with_the_step():
    def model_fn():
        spec = model_fn_with(None)()
        kept = tf.Variable(0.0, trainable=False, name="kept")

        def step_fn(step):
            gradients = step.gradients()
            kept.assign_add(1.0)
            return {path: g * tf.where(kept > 1.0, np.inf, 1.0) for path, g in gradients.items()}

        holder = tf.Module()
        holder.kept = kept
        return distloop.ModelSpec({"net": spec.model, "state": holder}, spec.optimizer, spec.loss_fn, step_fn=step_fn)

    trainer = distloop.Trainer(model_fn, on(2, on_nonfinite="skip"))
    trainer.fit(distloop.make_dataset(classification(16), 8), steps=2)
    assert trainer.model["state"].kept.numpy() == 1.0 and int(trainer.state.skipped_steps) == 1


class Scaled(keras.layers.Layer):
    """Multiplies by a weight, by a scale that nothing trains, and by how often it was called."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(), initializer="zeros", name="weight")
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False, name="scale")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x):
        self.calls.assign_add(1.0)
        return x * self.weight * self.scale * self.calls


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", mostly_wide([{"virtual_replicas": 2, "microbatches": 2}, {"eager": True}, {"microbatches": 2}])
)
def test_each_pass_sees_what_a_step_fn_assigned(settings):
    def model_fn():
        layer = Scaled(name="scaled")
        net = keras.Sequential([keras.Input((1,)), layer], name="net")

        def step_fn(step):
            first = step.gradients()
            layer.scale.assign(layer.scale * 2.0)
            layer.calls.assign_add(10.0 * layer.calls)  # what the first pass has written
            second = step.gradients()
            return {path: first[path] + second[path] for path in first}

        def loss_fn(batch, training):
            return {"loss": net(batch["x"])[:, 0]}

        return distloop.ModelSpec(net, keras.optimizers.SGD(1.0), loss_fn, step_fn=step_fn)

    trainer = distloop.Trainer(model_fn, on(2, **settings))
    trainer.fit(distloop.make_dataset({"x": np.ones((8, 1), np.float32)}, 4), steps=2)
    # A pass of the first step is called once, one of the second for the 12th time.
    expected = {"weight": -(1.0 + 2.0) - 12.0 * (2.0 + 4.0), "scale": 4.0, "calls": 11.0 * 12.0}
    assert weights(trainer) == {f"net/scaled/{name}": value for name, value in expected.items()}


def of_reached_and_not(step_fn, optimizer):
    def model_fn():
        reached, other = tf.Variable(0.0, name="reached"), tf.Variable(10.0, name="other")
        model, loss_fn = {"reached": reached, "other": other}, lambda x, training: {"loss": 4.0 * reached * x}
        return distloop.ModelSpec(model, optimizer(), loss_fn, step_fn=step_fn)

    return model_fn


@pytest.mark.slow
@pytest.mark.parametrize("settings", mostly_wide([{}, {"eager": True}, {"virtual_replicas": 2, "microbatches": 2}]))
def test_what_a_step_fn_makes_for_an_unreached_variable_is_applied(settings, caplog):
    def decayed(step):
        return {path: g + 0.3 * step.weights[path] for path, g in step.gradients().items()}

    model_fn = of_reached_and_not(decayed, functools.partial(keras.optimizers.SGD, 1.0))
    trainer = distloop.Trainer(model_fn, on(2, clip_norm=1.0, **settings))
    numbers = trainer.fit(distloop.make_dataset(np.ones([4], np.float32), 4), steps=1)
    assert numbers[GRADIENT_NORM] == 5.0
    assert_close(weights(trainer), {"reached": np.float32(-0.8), "other": np.float32(9.4)})
    assert "does not depend" not in caplog.text


@pytest.mark.slow
def test_an_unreached_variable_for_which_a_step_fn_makes_nothing_stays(caplog):
    def last_of_two(step):
        step.gradients()
        return dict(step.gradients())

    optimizer = functools.partial(keras.optimizers.AdamW, 1.0, weight_decay=0.1)
    trainer = distloop.Trainer(of_reached_and_not(last_of_two, optimizer), on(1))
    trainer.fit(distloop.make_dataset(np.ones([4], np.float32), 4), steps=1)
    assert weights(trainer)["other"] == 10.0 and weights(trainer)["reached"] != 0.0
    assert "does not depend on other" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "step_fn, message",
    [
        (lambda step: {}, "without gradients"),
        (lambda step: step.gradients("x"), 'gradients of "x".*easy'),
        (lambda step: list(step.gradients()), "step_fn returned list"),
        (lambda step: dict(list(step.gradients().items())[:1]), "step_fn returned .'net/hidden/kernel'"),
        (lambda step: step.moved({"y": 1.0}).__enter__(), "step.moved was given .'y'"),
        (lambda step: tf.cond(tf.constant(True), step.gradients, step.gradients), "inside a tf.cond"),
        ("assigns weights", "step_fn assigned net/hidden/kernel"),
    ],
)
def test_a_wrong_step_fn_is_refused_in_a_sentence(step_fn, message):
    def model_fn():
        spec = model_fn_with(None)()

        def assigns_weights(step):
            with step.moved({"net/logits/bias": tf.ones([4])}):
                spec.model.layers[0].kernel.assign_add(tf.ones([8, 6]))
                return step.gradients()

        wrong = assigns_weights if step_fn == "assigns weights" else step_fn
        return distloop.ModelSpec(spec.model, spec.optimizer, spec.loss_fn, step_fn=wrong)

    with pytest.raises(ValueError, match=message):
        replicas = 1 if step_fn == "assigns weights" else 2
        distloop.Trainer(model_fn, on(replicas)).fit(distloop.make_dataset(classification(21), 8), steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before", "inside", "after"])
@pytest.mark.parametrize("settings", mostly_wide([{"virtual_replicas": 2, "microbatches": 2}, {"eager": True}, {}]))
@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_a_weight_that_a_step_fn_moves_and_assigns_is_refused(replicas, settings, where):
    def model_fn():
        spec = model_fn_with(None)()
        kernel = spec.model.layers[0].kernel

        def shrink(now):
            if now == where:
                kernel.assign(0.99 * kernel)

        def step_fn(step):
            shrink("before")
            move = {"net/hidden/kernel": tf.ones([8, 6])}
            with step.moved(move), step.moved(move):
                gradients = step.gradients()
                shrink("inside")
            shrink("after")
            return gradients

        return distloop.ModelSpec(spec.model, spec.optimizer, spec.loss_fn, step_fn=step_fn)

    # Eagerly a step sees values alone, and the end of a move restores them.
    is_taken = where == "inside" and "eager" in settings
    refused = pytest.raises(ValueError, match="step_fn assigned net/hidden/kernel")
    with contextlib.nullcontext() if is_taken else refused:
        distloop.Trainer(model_fn, on(replicas, **settings)).fit(distloop.make_dataset(classification(8), 8), steps=1)
