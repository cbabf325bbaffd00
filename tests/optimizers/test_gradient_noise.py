"""The gradient noise scale, next to gradients of single examples and to estimates by hand."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.actions.built_in import SCALE, GradientNoise
from distloop.optimizers import gradient_noise
from distloop.optimizers.gradient_noise import SQUARE, TRACE
from distloop.training.action import Report
from tests.problems import batches, classification, classifier, mostly_wide, on

ROWS = 24


def still(**arguments):
    """A `model_fn` whose weights stay as they are."""
    return classifier(optimizer=lambda: keras.optimizers.SGD(0.0), **arguments)


def gradients_of(model_fn, weights, parts):
    """The mean gradient of each part of a batch, a vector, and the weights of the parts."""
    spec = model_fn()
    for variable, value in zip(spec.model.trainable_variables, weights, strict=True):
        variable.assign(value)

    @tf.function(autograph=False, reduce_retracing=True)
    def gradient(part):
        with tf.GradientTape() as tape:
            loss = spec.loss_fn(part, True)["loss"]
            is_weighted = isinstance(loss, tuple)
            values, of = loss if is_weighted else (loss, tf.ones_like(loss))
            mean = tf.reduce_sum(values * of) / tf.reduce_sum(of)
        pieces = tape.gradient(mean, spec.model.trainable_variables)
        return tf.concat([tf.reshape(piece, [-1]) for piece in pieces], 0), tf.reduce_sum(of)

    found = [gradient({name: tf.constant(value) for name, value in part.items()}) for part in parts]
    gradients, of = zip(*found, strict=True)
    return np.stack(gradients).astype(np.float64), np.array(of)


def by_hand(gradients, of):
    whole, total = of @ gradients / of.sum(), of.sum()
    trace = (of @ (gradients**2).sum(1) - total * (whole**2).sum()) / (len(of) - 1)
    return trace, (whole**2).sum() - trace / total


def cut(rows, *counts):
    """Cuts rows into parts, and those again."""
    parts, size = [], len(rows["label"])
    for i in range(counts[0]):
        part = {name: value[i * size // counts[0] : (i + 1) * size // counts[0]] for name, value in rows.items()}
        parts += cut(part, *counts[1:]) if counts[1:] else [part]
    return parts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "settings", "parts"),
    mostly_wide(
        [
            (3, {}, [3]),
            (1, {"microbatches": 5}, [5]),
            (2, {"microbatches": 2}, [2, 2]),
            (2, {"virtual_replicas": 4, "microbatches": 2}, [4, 2]),
            (2, {"precision": "mixed_bfloat16"}, [2]),
            (2, {"precision": "mixed_float16"}, [2]),
            (2, {"shard_optimizer": True, "clip_norm": 1e-3}, [2]),
            (2, {"jit_compile": True}, [2]),
        ],
        (2, {"virtual_replicas": 4, "microbatches": 2}, [4, 2]),
    ),
)
def test_the_estimates_are_those_of_the_gradients_of_the_parts(replicas, settings, parts):
    size = 23  # parts of two sizes
    model_fn = still(is_weighted=True)
    trainer = distloop.Trainer(model_fn, on(replicas, gradient_noise_every=1, log_every=1, **settings))
    trainer.build(batches(size, ROWS))
    weights = [value.numpy() for value in trainer.model.trainable_variables]
    found = trainer.fit(batches(size, ROWS), steps=1)
    rows = {name: np.asarray(value)[:size] for name, value in classification(ROWS).items()}
    trace, square = by_hand(*gradients_of(model_fn, weights, cut(rows, *parts)))
    tolerance = 0.1 if "precision" in settings else 1e-4
    assert found[TRACE] == pytest.approx(trace, rel=tolerance)
    assert found[SQUARE] == pytest.approx(square, rel=tolerance, abs=tolerance * trace / size)
    if square > 0:
        assert found[SCALE] == pytest.approx(found[TRACE] / found[SQUARE], rel=1e-6)


@pytest.mark.slow
def test_over_many_batches_it_is_the_noise_scale_of_the_examples():
    rows, model_fn = classification(512), still()
    trainer = distloop.Trainer(model_fn, on(1, microbatches=4, gradient_noise_every=400, log_every=400))
    dataset = distloop.make_dataset(rows, 16, shuffle=True)
    trainer.build(dataset)
    weights = [value.numpy() for value in trainer.model.trainable_variables]
    found = trainer.fit(dataset, steps=400)
    gradients, _ = gradients_of(model_fn, weights, cut(rows, 512))
    trace, square = gradients.var(0, ddof=1).sum(), (gradients.mean(0) ** 2).sum()
    assert found[TRACE] == pytest.approx(trace, rel=0.05)
    assert found[SCALE] == pytest.approx(trace / square, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", mostly_wide([2, 4]))
def test_it_has_the_same_bits_on_any_number_of_devices(replicas):
    def numbers(replicas):
        config = on(replicas, virtual_replicas=4, gradient_noise_every=2, log_every=2)
        found = distloop.Trainer(classifier(), config).fit(batches(8, ROWS), steps=6)
        return found[TRACE], found[SQUARE], found[SCALE]

    assert numbers(replicas) == numbers(1)


@pytest.mark.slow
def test_a_run_that_is_resumed_goes_on_with_its_averages(tmp_path):
    def run():
        config = on(2, workdir=str(tmp_path), gradient_noise_every=1, log_every=1, checkpoint_every=3)
        return distloop.Trainer(classifier(), config).fit(batches(8, ROWS), steps=9)[SCALE]

    straight = run()
    for step in ("6", "9"):
        shutil.rmtree(tmp_path / "checkpoints" / step)
    assert run() == straight


@pytest.mark.slow
def test_one_device_replays_a_run_of_two_that_measured_it(tmp_path):
    config = {"workdir": str(tmp_path), "gradient_noise_every": 2, "log_every": 2}
    distloop.Trainer(classifier(), on(2, **config)).fit(batches(8, ROWS), steps=6)
    result = distloop.Trainer(classifier(), on(1, steps=6, **config)).replay(batches(8, ROWS), step=5)
    assert result.differences == []


@pytest.mark.slow
def test_a_table_counts_each_of_its_rows_once():
    segment = gradient_noise.Rows(tf.constant([3, 1, 3], tf.int64), tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    total, count = gradient_noise.of_microbatch([segment], tf.constant(2.0)).numpy()
    assert total == pytest.approx((6**2 + 8**2 + 3**2 + 4**2) / 2) and count == 1.0


def test_averages_are_smoothed_before_the_division():
    action = GradientNoise(1, [""])
    scales = []
    for trace, square in ((4.0, 1.0), (8.0, 3.0), (float("nan"), 1.0)):
        scales.append(action(Report(1, 9, {TRACE: trace, SQUARE: square}, None)).get(SCALE))
    assert scales == [pytest.approx(4.0), pytest.approx((0.9 * 4 + 8) / (0.9 * 1 + 3)), None]
    assert GradientNoise(1, [""])(Report(1, 9, {TRACE: 1.0, SQUARE: -1.0}, None)) == {}


@pytest.mark.slow
def test_a_step_that_measures_nothing_computes_nothing_for_it(monkeypatch):
    monkeypatch.setattr(gradient_noise, "of_microbatch", None)
    found = distloop.Trainer(classifier(), on(2)).fit(batches(8, ROWS), steps=1)
    assert not {TRACE, SQUARE, SCALE} & found.keys()
