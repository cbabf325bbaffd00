"""Tests the audit: each planted bug is found by name, models without one pass, and nothing is left changed."""

import random
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.audit.audit import audit
from distloop.distributed.devices import Replicas
from distloop.model.state import TrainState
from tests.problems import assert_equal, batches, classification, classifier, everything, mostly_wide, on, refused

pytestmark = pytest.mark.slow

OUTSIDE = tf.Variable(0.0, name="outside")
CALLS = []  # of the functions below that Python keeps count of


def loss_of(batch, logits):
    return keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)


def planted(change=lambda loss, batch: loss, layers=(), unused=(), **spec):
    """A `model_fn` in whose loss there may be a bug, and whose model may have layers that the loss does not use."""

    def model_fn():
        layer = keras.layers.Dense(4, name="logits")
        model = keras.Sequential([keras.Input((8,)), *(make() for make in layers), layer], name="net")
        others = [make() for make in unused]

        def loss_fn(batch, training):
            return {"loss": change(loss_of(batch, model(batch["x"], training=training)), batch)}

        return distloop.ModelSpec([model, *others] if others else model, keras.optimizers.SGD(0.1), loss_fn, **spec)

    return model_fn


class Centered(keras.layers.Layer):
    """Subtracts the mean over the rows that it sees."""

    def call(self, x):
        return x - tf.reduce_mean(x, 0)


class Noise(keras.layers.Layer):
    """Adds the same noise in each replica and each step."""

    def __init__(self, seed=(1, 2), **settings):
        super().__init__(**settings)
        self.seed = seed

    def call(self, x):
        return x + tf.random.stateless_normal(tf.shape(x), seed=self.seed)


class Counter(keras.layers.Layer):
    """Counts positive entries as whole numbers."""

    def build(self, shape):
        self.count = self.add_weight(name="count", dtype="int32", initializer="zeros", trainable=False)

    def call(self, x):
        self.count.assign_add(tf.reduce_sum(tf.cast(x > 0, tf.int32)))
        return x


class Largest(keras.layers.Layer):
    """Keeps the largest value seen, of which a mean over the replicas is another one."""

    def build(self, shape):
        self.largest = self.add_weight(name="largest", initializer="zeros", trainable=False)

    def call(self, x):
        self.largest.assign(tf.reduce_max(x))
        return x


class Sampling(keras.layers.Layer):
    """Draws around the mean that it is given, in training and without, as in a variational autoencoder."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), seed=self.seed_generator)


def unused_layer():
    layer = keras.layers.Dense(2, name="unused")
    layer.build((None, 8))
    return layer


def dead_layer():
    return keras.layers.Dense(8, "relu", bias_initializer=keras.initializers.Constant(-100.0), name="dead")


def write_outside(loss, batch):
    OUTSIDE.assign_add(1.0)
    return loss


@tf.function
def scaled_by(loss, factor):
    return loss * factor


def call_with_a_new_number(loss, batch):
    CALLS.append(1)
    return scaled_by(loss, 1.0 + len(CALLS))


def count_in_python(loss, batch):
    CALLS.append(1)
    return loss * (1.0 + len(CALLS))


def trained_in_one_mode():
    layers = keras.layers
    model = keras.Sequential([keras.Input((8,)), layers.Dropout(0.5, name="drop"), layers.Dense(4)], name="net")
    frozen = keras.Sequential([keras.Input((8,)), layers.Dropout(0.5), layers.Dense(8)], name="frozen")
    frozen.trainable = False

    def loss_fn(batch, training):
        return {"loss": loss_of(batch, model(frozen(batch["x"], training=False)))}

    return distloop.ModelSpec([model, frozen], keras.optimizers.SGD(0.1), loss_fn)


STOPS = "stops with an error"
BUGS = {
    "labels from 1": (
        planted(lambda loss, batch: loss * tf.reduce_sum(tf.one_hot(batch["label"] + 1, 4), -1)),
        ("labels out of range", "OneHot (test_audit.py:", "from 1 to 4", "4 classes, 0 to 3"),
    ),
    "training that is not passed on": (trained_in_one_mode, ("fit warns", "drop", "training=training")),
    "labels without the axis of the predictions": (
        planted(lambda loss, batch: (batch["weight"] - loss[:, None]) ** 2),
        (STOPS, 'loss_fn returned "loss" of shape [B, B]'),
    ),
    "a loss for one number of rows": (
        planted(lambda loss, batch: tf.reshape(loss, [16])),
        (STOPS, "loss_fn", "[16]", "drop_remainder=True"),
    ),
    "a division by the rows of a share": (
        planted(lambda loss, batch: loss / tf.cast(tf.shape(loss)[0], tf.float32)),
        ("depends on the number of replicas", "loss", "RealDiv", "test_audit.py"),
    ),
    "a division by the replicas": (
        planted(lambda loss, batch: loss / tf.distribute.get_replica_context().num_replicas_in_sync),
        ("depends on the number of replicas", "loss", "test_audit.py"),
    ),
    "a mean over the rows in a layer": (
        planted(layers=[lambda: Centered(name="centered")]),
        ("depends on the number of replicas", "in layer net/centered", "on 1 and", "on 2"),
    ),
    "BatchNormalization that is not synchronized": (
        planted(layers=[lambda: keras.layers.BatchNormalization(name="norm")]),
        ("statistics of one replica", "net/norm", "synchronized=True"),
    ),
    "a statistic that is no mean": (
        planted(layers=[lambda: Largest(name="largest")]),
        ("statistics of one replica", "net/largest/largest"),
    ),
    "a count of each replica's own": (
        planted(layers=[lambda: Counter(name="counter")]),
        ("replicas apart", "net/counter/count", "aggregation"),
    ),
    "random numbers from a fixed seed": (
        planted(layers=[lambda: Noise(name="noise")]),
        ("fit warns", "in layer net/noise", "test_audit.py", "SeedGenerator"),
    ),
    "a variable outside the model": (planted(write_outside), (STOPS, "writes", "outside (test_audit.py:")),
    "Keras's random stream outside the model": (
        planted(lambda loss, batch: loss + keras.random.normal(tf.shape(loss))),
        (STOPS, "test_audit.py", "seed_generator_state", "SeedGenerator"),
    ),
    "TensorFlow's own random numbers": (
        planted(lambda loss, batch: loss + tf.random.normal(tf.shape(loss))),
        (STOPS, "RandomStandardNormal (test_audit.py", "SeedGenerator"),
    ),
    "a layer made in the loss": (
        planted(lambda loss, batch: loss + keras.layers.Dense(1, name="late")(batch["x"])[:, 0]),
        (STOPS, "test_audit.py", "kernel", "with the model"),
    ),
    "a Python number for a tf.function": (
        planted(call_with_a_new_number),
        ("traced again and again", "scaled_by(factor)", "give it a tensor"),
    ),
    "a count that Python keeps": (planted(count_in_python), ("Python value that changes", "test_audit.py:")),
    "random numbers that are the same on each replica": (
        planted(layers=[lambda: Noise(tf.Variable([1, 2], trainable=False), name="noise")]),
        ("identical random numbers", "in layer net/noise", "test_audit.py", "SeedGenerator"),
    ),
    "a loss that is not finite": (
        planted(lambda loss, batch: tf.math.log(-1.0 - loss)),
        (STOPS, "Step 1 is the first that was not finite", "Log", "test_audit.py"),
    ),
    "a layer that the loss does not use": (planted(unused=[unused_layer]), ("fit warns", "unused/kernel")),
    "texts on the way to the loss": (
        planted(lambda loss, batch: loss + 0 * tf.strings.to_number(tf.strings.as_string(loss))),
        ("runs on the host when this model is on a GPU", "AsString(float32) (test_audit.py:", "GPU kernel"),
    ),
    "a mask that leaves out the whole batch": (
        planted(lambda loss, batch: distloop.weighted(loss, tf.zeros_like(loss))),
        ("zero gradient", "net/logits/kernel"),
    ),
    "units that are dead": (planted(layers=[dead_layer]), ("zero gradient", "net/dead/kernel")),
}
# Bugs whose traces differ where a model has variables on several replicas; any bug is found on any number of them.
SEVERAL = ["a division by the rows of a share", "BatchNormalization that is not synchronized"]
SEVERAL += ["a count of each replica's own", "random numbers from a fixed seed", "a variable outside the model"]
WARNED_OF = "a count of each replica's own", 2  # by a run on several replicas, too


FURTHER = ["a loss for one number of rows", "a division by the replicas", "a statistic that is no mean"]
FURTHER += ["Keras's random stream outside the model", "labels without the axis of the predictions"]
FURTHER += ["a division by the rows of a share", "a layer made in the loss", "TensorFlow's own random numbers"]
FURTHER += ["random numbers from a fixed seed", "a layer that the loss does not use"]
FURTHER += ["a mask that leaves out the whole batch"]


def wide(*values, is_wide=True):
    return pytest.param(*values, marks=[pytest.mark.wide] if is_wide else [])


@pytest.mark.parametrize(
    ("bug", "replicas"),
    [*(wide(bug, 1, is_wide=bug in FURTHER) for bug in BUGS), *(wide(b, 2, is_wide=b != SEVERAL[0]) for b in SEVERAL)],
)
def test_a_planted_bug_is_found_by_name(bug, replicas):
    model_fn, parts = BUGS[bug]
    result = distloop.Trainer(model_fn, on(replicas)).audit(batches())
    found = [
        finding for finding in result.findings if not (finding.what == "fit warns" and (bug, replicas) == WARNED_OF)
    ]
    assert {finding.what for finding in found} == {parts[0]}, str(result)
    line = str(found[0])
    assert all(part in line for part in parts) and "\n" not in line, line
    assert OUTSIDE.numpy() == 0.0  # restored


CLEAN = {
    "dropout, weights and L2 terms": dict(dropout=0.3, is_weighted=True, l2=0.1),
    "synchronized BatchNormalization and a Keras metric": dict(batch_norm="synchronized", metrics=True, dropout=0.1),
}


@pytest.mark.parametrize(("case", "replicas"), mostly_wide([*zip(CLEAN, (1, 2), strict=True)]))
def test_a_clean_model_passes_and_stays_as_it_is(case, replicas):
    trainer = distloop.Trainer(classifier(**CLEAN[case]), on(replicas, average_decay=0.9))
    dataset = batches(shuffle=True)
    before, streams = everything(trainer), (random.getstate(), np.random.get_state()[1].tolist())
    result = trainer.audit(dataset)
    assert str(result) == "nothing found." and not result.findings
    assert_equal(everything(trainer), before)
    assert streams == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_step_of_the_users_own_is_audited_as_far_as_there_is_no_loss_fn():
    def model_fn(value=1.0):
        model = classifier()().model

        def step_fn(step):
            step.report("loss", value)
            return {path: value * tf.ones_like(weight) for path, weight in step.weights.items()}

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), step_fn=step_fn)

    result = distloop.Trainer(model_fn, on(1)).audit(batches())
    assert str(result).startswith("nothing found.\nnot checked: loss and gradients on several replicas, as a step_fn")
    result = distloop.Trainer(lambda: model_fn(np.nan), on(1)).audit(batches())
    assert len(result.findings) == 1 and "Step 1 is the first that was not finite: loss is nan" in str(result)


@pytest.mark.parametrize("precision", ["mixed_float16", wide("mixed_bfloat16")])
def test_a_clean_model_passes_in_half_precision(precision):
    trainer = distloop.Trainer(classifier(), on(1, precision=precision))
    assert not trainer.audit(batches()).findings


@pytest.mark.wide
def test_a_layer_that_draws_for_each_row_passes_and_a_mean_beside_it_not():
    def audit(*layers):
        return distloop.Trainer(planted(layers=layers), on(1)).audit(batches())

    assert str(audit(Sampling)) == "nothing found."
    (finding,) = audit(Sampling, lambda: Centered(name="centered")).findings
    assert finding.what == "depends on the number of replicas" and "in layer net/centered" in finding.name


def test_an_audit_changes_no_bit_of_the_run_after_it():
    runs = []
    for is_audited in (False, True):
        trainer = distloop.Trainer(classifier(dropout=0.3), on(2))
        dataset = batches(shuffle=True, seed=3)
        if is_audited:
            trainer.audit(dataset)
        trainer.fit(dataset, steps=7)
        runs.append(everything(trainer))
    assert_equal(*runs)


def shuffled_without_seed():
    tf.random.set_seed(None)
    dataset = tf.data.Dataset.from_tensor_slices(classification()).shuffle(67).batch(16)
    tf.random.set_seed(0)
    return dataset


def generated_by_chance():
    rng = np.random.default_rng()

    def rows():
        for _ in range(4):
            yield {name: value[rng.permutation(67)[:16]] for name, value in classification().items()}

    spec = {name: tf.TensorSpec([16, *v.shape[1:]], v.dtype) for name, v in classification().items()}
    return tf.data.Dataset.from_generator(rows, output_signature=spec)


@pytest.mark.parametrize(
    ("make", "is_found"),
    [
        (shuffled_without_seed, True),
        wide(generated_by_chance, True),
        (lambda: batches().map(lambda rows: rows | {"x": rows["x"] + tf.random.uniform([])}), False),
        wide(lambda: lambda context: batches(shuffle=True), False),
    ],
    ids=["no seed", "a generator", "random numbers from TensorFlow's seed", "a function of InputContext"],
)
def test_data_in_another_order_is_found(make, is_found):
    result = distloop.Trainer(classifier(), on(1)).audit(make())
    found = [(finding.what, finding.name) for finding in result.findings]
    assert found == ([("data in another order", "batch 0")] if is_found else [])


def test_what_talks_to_other_replicas_is_not_compared_and_that_is_told():
    def gathered(loss, batch):
        everyone = tf.distribute.get_replica_context().all_gather(loss, axis=0)
        return loss * tf.stop_gradient(tf.reduce_mean(everyone))

    trainer = distloop.Trainer(planted(gathered), on(1))
    result = trainer.audit(batches())
    assert not result.findings
    assert "not checked: loss and gradients" in str(result) and "all_gather" in str(result)
    refused(lambda: trainer.audit(batches(1)), "less than 2 rows", "larger batches")


def test_the_setting_tells_the_findings_and_leaves(capsys, tmp_path):
    workdir = tmp_path / "run"
    model_fn = planted(layers=[lambda: keras.layers.BatchNormalization(name="norm")])
    trainer = distloop.Trainer(model_fn, on(1, audit=True, workdir=str(workdir)))
    with pytest.raises(SystemExit) as left:
        trainer.fit(batches(), steps=5)
    assert left.value.code == 1 and trainer.step == 0 and not workdir.exists()
    printed = capsys.readouterr().out
    assert "distloop: audit: 1 finding\n" in printed and "distloop: statistics of one replica: net/norm: " in printed


def writes_a_variable():
    spec, seen = classifier()(), tf.Variable(0.0, trainable=False, name="seen")

    def loss_fn(batch, training):
        seen.assign_add(1.0)
        return spec.loss_fn(batch, training)

    return distloop.ModelSpec({"net": spec.model, "seen": seen}, spec.optimizer, loss_fn)


in_replica = tf.distribute.get_replica_context
OF_VIRTUAL_REPLICAS = {
    "nothing": (classifier(batch_norm="plain", dropout=0.3), ()),
    "a sum over replicas": (
        planted(lambda loss, batch: loss + in_replica().all_reduce("SUM", tf.reduce_mean(loss))),
        ("talks to other replicas", "all_reduce", "use plain BatchNormalization"),
    ),
    "gathered rows": (planted(lambda loss, batch: loss + tf.reduce_mean(distloop.gather_rows(loss)[0])), ()),
    "the number of a replica": (
        planted(lambda loss, batch: loss + tf.cast(in_replica().replica_id_in_sync_group, tf.float32)),
        ("asks where it runs", "replica_id_in_sync_group", "counts devices"),
    ),
    "a tf.Variable": (
        writes_a_variable,
        ("stops with an error", "", "the forward pass writes 'seen', of which virtual"),
    ),
    "whole numbers of the rows": (planted(layers=[Counter]), ()),
}


@pytest.mark.parametrize("case", mostly_wide(OF_VIRTUAL_REPLICAS, "the number of a replica", "a tf.Variable"))
def test_what_breaks_the_same_bits_of_virtual_replicas_is_found(case):
    model_fn, expected = OF_VIRTUAL_REPLICAS[case]
    state = TrainState(model_fn, tf.distribute.get_strategy(), replicas=Replicas(1, 4))
    if not state.is_built:
        state.build(next(iter(batches())))
    settings = distloop.Config(batch_size=8)
    trainer = types.SimpleNamespace(state=state, strategy=state.strategy, config=settings, build=lambda data: None)
    findings = audit(trainer, batches()).findings
    told = [(finding.what, finding.name, finding.hint) for finding in findings]
    is_told = any(all(a in b for a, b in zip(expected, texts, strict=True)) for texts in told if expected)
    assert is_told if expected else not told, told
