"""The law of virtual replicas: a run has the same bits on any number of devices, and when it moves between them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.checkpoints.checkpoint import load
from distloop.distributed import collectives
from distloop.model.layers import SEED_STRIDE
from distloop.workdir.records import OF_THE_MACHINE
from tests.problems import (
    assert_close,
    assert_equal,
    classification,
    classifier,
    cross_entropy,
    everything,
    mostly_wide,
    on,
    rows_of,
    weights,
)
from tests.step_fn.test_gradient_step import sam

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_of_other_tests_are_optimized")]

V = 4


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


# models -----------------------------------------------------------------------------------------------------------


class LastSum(keras.layers.Layer):
    """A layer with integers and a boolean of its own, which depend on the rows and change the outputs."""

    def build(self, shape):
        self.last = self.add_weight(shape=(2,), dtype="int32", trainable=False, initializer="zeros", name="last")
        is_off = lambda shape, dtype: tf.constant(False)  # noqa: E731
        self.flag = self.add_weight(shape=(), dtype="bool", trainable=False, initializer=is_off, name="flag")

    def call(self, rows, training=False):
        outputs = rows * tf.where(self.flag.value, 0.9, 1.1) + tf.cast(self.last.value[0] % 7, rows.dtype) / 10
        if training:
            total = tf.cast(tf.reduce_sum(rows) * 1000, tf.int32)
            self.last.assign(tf.stack([total, self.last.value[1] + 1]))
            self.flag.assign(total % 2 == 0)
        return outputs


def digits():
    """A convnet as in experiments/digits.py, with dropout, and with statistics of each virtual replica's rows."""
    layers = [
        keras.layers.Conv2D(4, 3, padding="same", use_bias=False),
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.ReLU(),
        keras.layers.Conv2D(4, 3, use_bias=False),
        keras.layers.GlobalAveragePooling2D(),
        LastSum(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers], name="convnet")

    def loss_fn(batch, training):
        logits = model(batch["image"], training=training)
        hit = keras.metrics.sparse_categorical_accuracy(batch["label"], logits)
        return {"loss": cross_entropy(batch["label"], logits), "accuracy": hit}

    optimizer = keras.optimizers.AdamW(0.002, weight_decay=0.05)
    return distloop.ModelSpec(model, optimizer, loss_fn, predict_fn=lambda batch: model(batch["image"], training=False))


def language_model():
    """The transformer of experiments/language_model.py, tiny: embedding, causal attention, weights per token."""
    text = keras.Input((12,), dtype="int32")
    hidden = keras.layers.Embedding(32, 16)(text)
    normed = keras.layers.LayerNormalization()(hidden)
    hidden = hidden + keras.layers.MultiHeadAttention(2, 8, dropout=0.1)(normed, normed, use_causal_mask=True)
    hidden = hidden + keras.layers.Dense(16, activation="gelu")(keras.layers.LayerNormalization()(hidden))
    model = keras.Model(text, keras.layers.Dense(32, dtype="float32")(hidden), name="gpt")

    def loss_fn(batch, training):
        logits = model(batch["text"][:, :-1], training=training)
        return {"loss": distloop.weighted(cross_entropy(batch["text"][:, 1:], logits), batch["weight"])}

    return distloop.ModelSpec(model, momentum(), loss_fn)


def gan():
    """Two models, two updates and a gradient penalty, as in experiments/gan.py."""
    layers = [keras.layers.Dense(64), keras.layers.LeakyReLU(0.2), keras.layers.Reshape((8, 8, 1))]
    generator = keras.Sequential([keras.Input((4,)), *layers], name="generator")
    layers = [keras.layers.Conv2D(4, 3, strides=2), keras.layers.LeakyReLU(0.2), keras.layers.Flatten()]
    discriminator = keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dense(1)], name="discriminator")

    def discriminator_loss(batch, training):
        with tf.GradientTape() as tape:
            tape.watch(batch["image"])
            real = discriminator(batch["image"], training=training)[:, 0]
        slope = tape.gradient(real, batch["image"])
        penalty = tf.reduce_sum(slope**2, [1, 2, 3])
        fake = discriminator(generator(batch["noise"], training=training), training=training)[:, 0]
        return {"loss": tf.nn.softplus(-real) + tf.nn.softplus(fake) + penalty, "penalty": penalty, "real": real > 0}

    def generator_loss(batch, training):
        fake = discriminator(generator(batch["noise"], training=training), training=training)[:, 0]
        return {"loss": tf.nn.softplus(-fake)}

    losses = {"discriminator": discriminator_loss, "generator": generator_loss}
    updates = [distloop.Update(name, loss_fn, momentum(), f"^{name}/") for name, loss_fn in losses.items()]
    models = {"generator": generator, "discriminator": discriminator}
    return distloop.ModelSpec(models, updates=updates, predict_fn=lambda batch: generator(batch["noise"]))


class LargestLogit(keras.metrics.Metric):
    """A metric whose state is no sum."""

    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_weight(initializer=keras.initializers.Constant(-1e9), name="largest")

    def update_state(self, values, sample_weight=None):
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(values)))

    def result(self):
        return self.largest

    def reset_state(self):
        self.largest.assign(-1e9)


def of_everything():
    """A regularizer of activations, batch statistics, dropout, metrics that are sums and not."""
    hidden = keras.layers.Dense(16, "tanh", activity_regularizer=keras.regularizers.L2(0.01), kernel_regularizer="l2")
    layers = [hidden, keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((8,)), *layers], name="net")

    def loss_fn(batch, training):
        logits = model(batch["x"], training=training)
        return {"loss": cross_entropy(batch["label"], logits), "mean": (logits[:, 1],), "largest": (logits,)}

    metrics = {"mean": keras.metrics.Mean(), "largest": LargestLogit()}
    predict_fn = lambda batch: model(batch["x"], training=False)  # noqa: E731
    return distloop.ModelSpec(model, keras.optimizers.Adam(0.01), loss_fn, predict_fn=predict_fn, metrics=metrics)


def contrast():
    """A model whose outputs are compared with those of all rows, of another that trains by way of them alone."""
    # A bias that starts at 0 has no size that rounding could be compared with.
    hidden = keras.layers.Dense(16, "tanh", bias_initializer="random_normal")
    layers = [hidden, keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)]
    left = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(4)], name="left")
    right = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, use_bias=False)], name="right")

    def loss_fn(batch, training):
        own, other = left(batch["x"], training=training), right(batch["x"], training=training)
        everyone, place = distloop.gather_rows(other)
        labels, _ = distloop.gather_rows(batch["label"])
        logits = tf.cast(tf.matmul(own, everyone, transpose_b=True), tf.float32)  # [b, B]
        same = tf.reduce_mean(tf.cast(labels[tf.newaxis] == batch["label"][:, tf.newaxis], tf.float32), 1)
        return {"loss": tf.nn.sparse_softmax_cross_entropy_with_logits(place, logits), "same": same}

    models = {"left": left, "right": right}
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    return distloop.ModelSpec(models, optimizer, loss_fn, predict_fn=lambda batch: left(batch["x"]))


def with_sam():
    spec = SMALL()
    return distloop.ModelSpec(spec.model, spec.optimizer, spec.loss_fn, step_fn=sam)


# data -------------------------------------------------------------------------------------------------------------


def images(rows=150):
    random = np.random.default_rng(0)
    return {
        "image": random.random((rows, 8, 8, 1), np.float32),
        "noise": random.normal(size=(rows, 4)).astype(np.float32),
        "label": random.integers(0, 10, rows).astype(np.int32),
    }


def texts(rows=50):
    random = np.random.default_rng(0)
    text = random.integers(0, 32, (rows, 13)).astype(np.int32)
    return {"text": text, "weight": (random.random((rows, 12)) < 0.8).astype(np.float32)}


def with_overflow():
    rows = classification(67)
    rows["x"][31] = np.inf
    return rows


# the law ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A short run; `devices` are the numbers of them that are compared."""

    model_fn: Callable[[], Any]
    rows: dict[str, np.ndarray]
    batch_size: int = 16
    steps: int = 20
    settings: dict[str, Any] = field(default_factory=dict)
    devices: tuple[int, ...] = (1, 2, 4)
    evaluates: bool = False  # and predicts
    moves: bool = False  # from devices to others in the middle
    skipped: int = 0  # steps
    poisoned: int = -1  # the number of a batch that has an infinite loss

    def data(self):
        data = distloop.make_dataset(self.rows, self.batch_size, shuffle=True)
        return data.repeat().enumerate().map(self._poison) if self.poisoned >= 0 else data

    def _poison(self, number, batch):
        return {**batch, "x": tf.where(tf.equal(number, self.poisoned), np.inf, batch["x"])}


SMALL = classifier(optimizer=momentum, dropout=0.2, batch_norm="local")
CASES = {
    "convolution, statistics, dropout": Case(
        digits, images(), settings=dict(average_decay=0.9, clip_norm=0.5), devices=(1, 4)
    ),
    "convolution on two devices": Case(
        digits, images(), settings=dict(average_decay=0.9, clip_norm=0.5), devices=(1, 2)
    ),
    "bfloat16, attention, clipping": Case(
        language_model, texts(), settings=dict(precision="mixed_bfloat16", clip_norm=0.5), devices=(1, 2)
    ),
    "two updates": Case(gan, images(70), devices=(1, 2)),
    # Batches of 14 rows, and a last one of 2: fewer than the virtual replicas.
    "microbatches, metrics, a small last batch": Case(
        of_everything,
        classification(58),
        14,
        settings=dict(microbatches=2, clip_value=0.05, checkpoint_every=4),
        devices=(1,),  # 4 and 2 when it moves
        evaluates=True,
        moves=True,
    ),
    "float16, an overflow": Case(
        SMALL, with_overflow(), settings=dict(precision="mixed_float16"), skipped=4, devices=(1, 2)
    ),
    "a step that is skipped": Case(SMALL, with_overflow(), settings=dict(on_nonfinite="skip"), skipped=4),
    "gathered rows": Case(
        contrast, classification(58), 14, settings=dict(precision="mixed_bfloat16"), devices=(1, 2), evaluates=True
    ),
    "two looks": Case(with_sam, classification(67), settings=dict(clip_variable_norm=0.5), devices=(1, 2)),
    "going back": Case(
        SMALL,
        classification(64),
        settings=dict(on_divergence="rollback", checkpoint_every=5),
        devices=(1, 2),
        poisoned=13,
    ),
    "eager": Case(of_everything, classification(18), steps=4, settings=dict(eager=True), devices=(1, 2)),
}


def fit(case, devices, workdir, steps=None, **settings):
    keras.utils.clear_session(free_memory=False)  # layers without a name get the same ones again
    settings = {"log_every": 7, "console": "quiet", "virtual_replicas": V, **case.settings, **settings}
    trainer = distloop.Trainer(case.model_fn, on(devices, workdir=str(workdir), **settings))
    evals = {"test": distloop.Evaluation(distloop.make_dataset(case.rows, 9), every=7)} if case.evaluates else {}
    trainer.fit(case.data(), steps=steps or case.steps, evals=evals)
    return trainer


def state_of(trainer):
    """Returns what training changed, as one value of each variable: all replicas hold it, random streams aside."""
    values = {}
    per_device, first = trainer.state.replicas.per_device, collectives.first_replica(trainer.strategy)
    for name, value in everything(trainer).items():
        name, _, replica = name.partition("@")
        if "seeds/" in name:
            value = value - np.array([(first + int(replica)) * per_device * SEED_STRIDE, 0], value.dtype)
        assert value.tobytes() == values.setdefault(name, value).tobytes(), name
    return values


def outcome(trainer, case, workdir):
    """Returns all that a run leaves behind, by name."""
    found = dict(state_of(trainer))
    if case.evaluates:
        data = distloop.make_dataset(case.rows, 9)
        found |= {f"evaluation/{name}": np.array(value) for name, value in trainer.evaluate(data).items()}
        found["predictions"] = trainer.predict(data)
    saved = load(str(workdir / "checkpoints" / str(case.steps)))
    for name, value in saved.values.items():
        found[f"checkpoint/{name}"] = np.frombuffer(memoryview(value.numpy()), np.uint8)
    found |= {f"row/{row['step']}": np.array(json.dumps(row)) for row in rows_of(workdir)}
    return found


def assert_same(found, expected):
    """Compares two outcomes bit for bit; where numbers of one are rows of text, says which differ."""
    assert sorted(found.keys() ^ expected.keys()) == []
    for name in expected:
        if name.startswith("row/"):
            assert str(found.get(name)) == str(expected[name])
    assert_equal(found, expected)


@pytest.mark.parametrize("name", mostly_wide(CASES, "convolution, statistics, dropout"))
def test_a_run_has_the_same_bits_on_any_number_of_devices(name, tmp_path):
    case, expected = CASES[name], {}
    for devices in case.devices:
        found = outcome(fit(case, devices, tmp_path / str(devices)), case, tmp_path / str(devices))
        expected = expected or found
        assert_same(found, expected)
    assert json.loads(str(expected[f"row/{case.steps}"]))["skipped_steps"] == case.skipped
    if case.moves:
        move(case, tmp_path / "moved", expected)


def move(case, workdir, expected):
    """Checks a run that goes on with other devices, from a checkpoint between two logs."""
    fit(case, 4, workdir, steps=15)
    shutil.rmtree(workdir / "checkpoints" / "15")  # as if it had been killed before
    assert_same(outcome(fit(case, 2, workdir), case, workdir), expected)


@pytest.mark.wide
@pytest.mark.parametrize("model_fn", mostly_wide([of_everything, contrast], of_everything))
def test_virtual_replicas_train_as_real_ones_to_rounding(model_fn, tmp_path):
    case = Case(model_fn, classification(62), steps=8)  # the last batch is odd
    virtual = fit(case, 1, tmp_path / "1", virtual_replicas=V)
    real = fit(case, V, tmp_path / str(V), virtual_replicas=0)
    assert_close(weights(virtual), weights(real))
    for name, value in state_of(real).items():
        if "seeds/" in name:
            assert np.array_equal(state_of(virtual)[name], value)
    rows = [distloop.read_metrics(tmp_path / str(devices))[-1] for devices in (1, V)]
    for name in rows[1].keys() - OF_THE_MACHINE - {"time"}:
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-5)


@pytest.mark.wide
def test_without_virtual_replicas_the_bits_differ(tmp_path):
    case = Case(classifier(optimizer=momentum), classification(67), steps=20)
    one, two = (weights(fit(case, devices, tmp_path / str(devices), virtual_replicas=0)) for devices in (1, 2))
    assert_close(one, two, 1e-4)
    assert any(one[name].tobytes() != two[name].tobytes() for name in one)


@pytest.mark.parametrize("several", mostly_wide([4, 2]))
def test_virtual_replicas_draw_different_numbers(several):
    def model_fn():
        spec = classifier(dropout=0.5)()
        dropout = spec.model.get_layer("dropout")
        predict_fn = lambda batch: dropout(tf.ones_like(batch["x"]), training=True)  # noqa: E731
        return distloop.ModelSpec(spec.model, spec.optimizer, spec.loss_fn, predict_fn=predict_fn)

    drawn = []
    for devices in (1, several):
        trainer = distloop.Trainer(model_fn, on(devices, virtual_replicas=V))
        drawn.append(trainer.predict(distloop.make_dataset(classification(16), 8)))
    assert drawn[0].tobytes() == drawn[1].tobytes()
    masks = drawn[0].reshape(2 * V, 2, 8)  # of two rows each: the virtual replicas of two batches
    assert len({mask.tobytes() for mask in masks}) == 2 * V
