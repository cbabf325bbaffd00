"""The compiled steps between two boundaries: which rows they return, how often they are traced, and the warning."""

import functools
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.shards import Batch, BatchLayout
from distloop.graph_functions import MOST_TRACES, Traces, compiled
from distloop.keras_models.fit_arguments import read_arguments
from distloop.run.assembly import make_training_source
from distloop.training.compiled_loop import CompiledLoop
from distloop.training.step import TrainStep
from tests.problems import classification, classifier, on, refused


def looping(replicas):
    """Returns a trainer, its step, and a function that runs a loop."""
    trainer = distloop.Trainer(classifier(), on(replicas))
    data = distloop.make_dataset(classification(64), 16)
    trainer.build(data)
    step = TrainStep(trainer.state)
    loop = CompiledLoop(trainer.state, step)
    source = make_training_source(read_arguments(data, None, {}), trainer.state, trainer.config)
    loop.trace(source, executor="")
    return trainer, step, functools.partial(loop.run, source, executor="")


@pytest.mark.slow
def test_rows_end_at_logs_and_hold_what_their_steps_added_up():
    trainer, step, run = looping(2)
    assert [row.steps for row in run(5, 2, is_single=False)] == [2, 2, 1]
    second = run(3, 2, is_single=False)  # a log is due at step 6, which is its first
    assert [(row.steps, row.examples) for row in second] == [(1, 16), (2, 32)]
    row = second[-1]
    assert row.tallies.shape == (2 * len(step.names),) and row.replica_secs.shape == (2,)
    assert len(row.step_secs) == 2 and np.isclose(row.step_secs.sum(), row.seconds, atol=0.05)
    assert row.diagnosis is None and set(row.numbers) == {"skipped_steps", "learning_rate", "weight_norm"}
    assert trainer.step == 8
    for deadline in (0.0, -100.0):  # in the past: the first step is run all the same
        (row,) = run(50, 20, is_single=False, secs=deadline)
        assert row.steps == 1 and len(row.step_secs) == 1
    (row,) = run(1, 0, is_single=True)  # without a loop of TensorFlow
    assert row.steps == 1 and row.examples == 16 and trainer.step == 11


@pytest.mark.slow
@pytest.mark.parametrize("is_at_start", [True, False])
def test_a_clock_that_is_set_back_ends_a_loop_no_later(is_at_start, monkeypatch):
    calls = []

    def now():  # set back between the host's look at the clock and the graph's, or after 50 looks
        calls.append(len(calls))
        return np.float64(time.time() - (3600.0 if is_at_start or len(calls) > 50 else 0.0))

    monkeypatch.setattr(tf, "timestamp", lambda: tf.ensure_shape(tf.numpy_function(now, [], tf.float64), []))
    *_, run = looping(1)
    began_at = time.monotonic()
    rows = run(100_000, 5, is_single=False, secs=0.3)
    ended_at = time.monotonic()
    assert ended_at - began_at < 5.0
    assert all(0.0 < row.seconds < 5.0 and 0.0 <= row.input_secs <= row.seconds for row in rows)
    assert all((row.step_secs >= 0.0).all() and began_at <= row.end <= ended_at for row in rows)


def test_tensorflow_does_not_warn_of_traces_for_many_kinds_of_data(caplog, monkeypatch):
    monkeypatch.setattr(tf.get_logger(), "propagate", True)
    function = compiled(lambda x: x + 1)
    for size in range(8):
        function(tf.zeros([size]))
    assert {record.name for record in caplog.records} == {"distloop"}  # its own warning


@pytest.mark.slow
def test_no_row_is_without_steps_wherever_the_time_of_a_loop_ends(monkeypatch):
    monkeypatch.setattr("distloop.training.loop._LOOP_SECS", 3e-3)  # a few steps: between two logs as well
    run, loops = CompiledLoop.run, []
    monkeypatch.setattr(CompiledLoop, "run", lambda *args, **kwargs: loops.append(run(*args, **kwargs)) or loops[-1])
    trainer = distloop.Trainer(classifier(), on(1, log_every=1))
    trainer.fit(distloop.make_dataset(classification(64), 16), steps=1_500)
    assert all(row.steps == 1 for rows in loops for row in rows)
    assert 1 < len(loops) < 1_500


def test_the_warning_names_what_changed_and_comes_again_at_double(caplog):
    traces = Traces("train step")
    for length in range(4 * MOST_TRACES):
        traces.add((Batch({"x": tf.zeros([2, length]), "y": tf.zeros([2])}, None), BatchLayout(is_padded=False)))
    counts = [int(record.getMessage().split()[5]) for record in caplog.records]
    assert counts == [MOST_TRACES + 1, 2 * (MOST_TRACES + 1)]
    assert "changed x from float32 [2, 4] to float32 [2, 5]. Give" in caplog.text


def one_batch(rows):
    return tf.data.Dataset.from_tensors({name: np.asarray(v) for name, v in classification(rows).items()})


def test_more_traces_than_allowed_are_an_error_that_names_what_changed():
    trainer = distloop.Trainer(classifier(), on(1, max_traces=1))
    trainer.fit(one_batch(8), steps=2)
    trainer.evaluate(one_batch(8))
    for call in (lambda: trainer.evaluate(one_batch(9)), lambda: trainer.fit(one_batch(9), steps=4)):
        refused(call, "to be traced 2 times", "max_traces=1", "[8, 8] to float32 [9, 8]", "give batches of one shape")
    assert trainer.step == 2


def test_evaluating_one_shape_after_another_warns(caplog, monkeypatch):
    monkeypatch.setattr("distloop.graph_functions.MOST_TRACES", 1)
    trainer = distloop.Trainer(classifier(), on(1))
    for rows in (2, 3):
        trainer.evaluate(one_batch(rows))
    assert "The evaluation was traced 2 times" in caplog.text and "[2, 8] to float32 [3, 8]" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("is_host_first", [True, False])  # else the first replica is on another device, as on GPUs
def test_an_operation_that_fails_in_another_thread_fails_nothing_here(is_host_first, monkeypatch, tmp_path):
    """In TensorFlow it fails other eager operations whose shape is sent to another device, as of `tf.zeros`."""
    has_ended, num_failed = threading.Event(), 0

    def fail():
        nonlocal num_failed
        with tf.device("CPU:0"):
            while not has_ended.is_set():
                with pytest.raises(tf.errors.InvalidArgumentError):
                    tf.raw_ops.FloorDiv(x=1, y=0)
                num_failed += 1

    init = TrainStep.__init__
    monkeypatch.setattr(TrainStep, "__init__", lambda *args, **options: init(*args, **options, runs_ahead=True))
    names = ["CPU:0", "CPU:1"] if is_host_first else ["CPU:1", "CPU:2"]
    strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=tf.distribute.ReductionToOneDevice())
    with tf.device(names[0]):
        config = on(1, workdir=str(tmp_path), checkpoint_every=1, eval_every=1, histograms_every=1)
        trainer = distloop.Trainer(classifier(metrics=True), config, strategy=strategy)
        data = distloop.make_dataset(classification(32), 16)
        trainer.evaluate(data)  # creates the variables of metrics
        thread = threading.Thread(target=fail)
        thread.start()
        try:
            trainer.fit(data, steps=2, evals={"val": data})
        finally:
            has_ended.set()
            thread.join()
    assert num_failed > 100
