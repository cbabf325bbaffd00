"""Steps that run ahead of the host, as on GPUs, here on CPUs: the bits, rows and errors of steps that wait."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.keras_models.fit_arguments import read_arguments
from distloop.run.assembly import make_training_source
from distloop.training.compiled_loop import CompiledLoop
from distloop.training.step import TrainStep
from tests.problems import assert_equal, classification, classifier, every, everything, mostly_wide, on

SIZE, STEPS = 8, 12
TIMES = ("secs", "per_sec", "input_wait", "host_share", "memory", "imbalance", "time", "utilization")


def two_models():
    """A `model_fn` with two updates, of which the second has no finite loss where an `x` is not finite."""
    first, second = (
        keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, name="out")], name=name) for name in "ab"
    )

    def loss_fn_of(model, limit):
        def loss_fn(batch, training):
            x = tf.where(tf.math.is_finite(batch["x"]), batch["x"], limit)
            return {"loss": tf.cast(model(x, training=training)[:, 0], tf.float32) ** 2}

        return loss_fn

    updates = [
        distloop.Update("first", loss_fn_of(first, 1.0), keras.optimizers.Adam(0.1), "^a/"),
        distloop.Update("second", loss_fn_of(second, np.inf), keras.optimizers.Adam(0.1), "^b/"),
    ]
    return distloop.ModelSpec({"a": first, "b": second}, updates=updates)


MODEL_FNS = {
    "plain": classifier(optimizer=lambda: keras.optimizers.Adam(0.01)),
    "everything": classifier(batch_norm="local", dropout=0.5, l2=0.1, metrics=True),
    "two updates": two_models,
}


def run(monkeypatch, is_ahead, model_fn, bad_rows, replicas, settings):
    """Trains with `inf` in some rows.

    Returns:
        The numbers of each log and the error as a text, all that training changes, the trainer and the data.
    """
    init = TrainStep.__init__
    monkeypatch.setattr(TrainStep, "__init__", lambda *args, **options: init(*args, **options, runs_ahead=is_ahead))
    rows, logged, text = classification(64), [], None
    rows["x"][list(bad_rows), 0] = np.inf
    trainer = distloop.Trainer(MODEL_FNS[model_fn], on(replicas, **{"log_every": 5, **settings}))
    data = distloop.make_dataset(rows, settings.get("batch_size", SIZE))

    def keep(report):
        logged.append({k: v for k, v in report.metrics.items() if not any(part in k for part in TIMES)})

    keep.every = None
    try:
        trainer.fit(data, steps=STEPS, actions=[keep])
    except FloatingPointError as error:
        text = str(error)
    monkeypatch.undo()
    return f"{logged} {text}", everything(trainer), trainer, data


CASES = [
    ("plain", (), 1, {}),
    ("plain", (SIZE * 6 + 1,), 1, {}),  # the first pass over the data is 8 steps
    ("plain", (SIZE * 4 + 1,), 1, {}),  # the last step before a log
    ("plain", (SIZE * 3 + 1,), 2, {"clip_norm": 0.1, "average_decay": 0.9}),
    ("everything", (SIZE * 2 + 1, SIZE * 3), 2, {"on_nonfinite": "skip"}),
    ("everything", (SIZE * 4 + 1,), 1, {}),
    ("everything", (SIZE * 1 + 1, SIZE * 5), 1, {"precision": "mixed_float16", "average_decay": 0.9}),
    ("two updates", (SIZE * 2 + 1,), 1, {"on_nonfinite": "skip"}),
    ("two updates", (SIZE * 2 + 1,), 2, {"precision": "mixed_float16"}),
    ("plain", (SIZE * 2 + 1,), 2, {"shard_optimizer": True, "precision": "mixed_float16"}),
    ("plain", (SIZE * 2 + 1,), 2, {"virtual_replicas": 4, "on_nonfinite": "skip"}),
    ("everything", (SIZE * 2 + 1,), 1, {"microbatches": 2, "on_nonfinite": "skip"}),
    ("plain", (SIZE * 3 + 1,), 1, {"eager": True}),
    ("everything", (), 3, {"batch_size": 7, "microbatches": 2}),  # the last batch of a pass has one row
    ("everything", (), 2, {"batch_size": 7, "virtual_replicas": 4, "microbatches": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("model_fn, bad_rows, replicas, settings", mostly_wide(CASES, CASES[2], CASES[6], CASES[8]))
def test_the_numbers_are_those_of_steps_that_wait(monkeypatch, model_fn, bad_rows, replicas, settings):
    expected_text, expected, *_ = run(monkeypatch, False, model_fn, bad_rows, replicas, settings)
    text, found, trainer, _ = run(monkeypatch, True, model_fn, bad_rows, replicas, settings)
    assert text == expected_text
    assert_equal(found, expected)
    assert not bad_rows or "is the first that was not finite" in text or int(trainer.state.skipped_steps) > 0


@pytest.mark.slow
def test_after_a_step_that_failed_the_data_goes_on_with_the_next_batch(monkeypatch):
    numbers = []
    for is_ahead in (False, True):
        *_, trainer, data = run(monkeypatch, is_ahead, "plain", (SIZE * 4 + 1,), 1, {})
        assert trainer.step == 5
        trainer.fit(data, steps=8)
        numbers.append(everything(trainer))
    assert_equal(*numbers)


@pytest.mark.slow
def test_a_loop_that_runs_out_of_time_has_taken_no_batch_of_a_later_step():
    weights = []
    for is_ahead, secs in ((False, np.inf), (True, 0.0)):
        trainer, data = distloop.Trainer(classifier(), on(2)), distloop.make_dataset(classification(64), SIZE)
        trainer.build(data)
        loop = CompiledLoop(trainer.state, TrainStep(trainer.state, runs_ahead=is_ahead))
        source = make_training_source(read_arguments(data, None, {}), trainer.state, trainer.config)
        loop.trace(source, executor="")
        counts = []
        while trainer.step < STEPS:
            rows = loop.run(source, STEPS - trainer.step, 0, executor="", is_single=False, secs=secs)
            counts.append(sum(row.steps for row in rows))
        assert counts == ([1] * STEPS if is_ahead else [STEPS])
        weights.append(everything(trainer))
    assert_equal(*weights)


@pytest.mark.slow
def test_a_step_whose_next_batch_is_an_error_changes_nothing(monkeypatch):
    def batches():
        rows = classification(64)
        for number in range(5):
            yield {name: values[number * SIZE : (number + 1) * SIZE] for name, values in rows.items()}
        raise OSError("no disk")

    init = TrainStep.__init__
    monkeypatch.setattr(TrainStep, "__init__", lambda *args, **options: init(*args, **options, runs_ahead=True))
    trainer = distloop.Trainer(classifier(), on(1))
    with pytest.raises(OSError, match="no disk"):
        trainer.fit(batches, steps=STEPS)
    other = distloop.Trainer(classifier(), on(1))
    other.fit(batches, steps=4)
    assert trainer.step == 4
    assert_equal(everything(trainer), everything(other))


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_run_that_waits_for_data_says_so(monkeypatch, is_ahead):
    init = TrainStep.__init__
    monkeypatch.setattr(TrainStep, "__init__", lambda *args, **options: init(*args, **options, runs_ahead=is_ahead))
    rows = classification(SIZE)

    def slow():
        for _ in range(STEPS):
            time.sleep(0.05)
            yield rows

    waits = []
    trainer = distloop.Trainer(MODEL_FNS["plain"], on(1, log_every=3))
    keep = every(3, lambda report: waits.append(report.metrics["input_wait"]))
    trainer.fit(slow, steps=STEPS, actions=[keep])
    assert all(wait > 0.5 for wait in waits[1:]), waits
