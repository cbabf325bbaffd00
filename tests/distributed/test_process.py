"""What distloop does with what belongs to the whole process: changed for good, given back, or left alone."""

import concurrent.futures
import logging
import os
import random
import signal
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import custom_gradient

import distloop
from distloop.distributed import collectives
from tests import forked
from tests.keras_models.compiled_models import X, Y
from tests.problems import batches, classifier, mostly_wide, on


def slow_model_fn():
    hidden = keras.layers.Dense(4)
    time.sleep(0.02)  # while another thread makes its model
    model = keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    return distloop.supervised(model, "mse", keras.optimizers.SGD(0.1))


def trained(seed):
    """Returns the weights of a run before and after its steps."""
    trainer = distloop.Trainer(slow_model_fn, on(2, seed=seed, console="quiet", batch_size=16))
    before = trainer.model.get_weights()
    trainer.fit((X, Y), steps=3)
    return [*before, *trainer.model.get_weights()]


@pytest.mark.slow
def test_runs_in_threads_begin_and_end_with_the_weights_of_their_seeds():
    original = custom_gradient._get_dependent_variables
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = list(pool.map(trained, range(3)))
    assert custom_gradient._get_dependent_variables is original  # which tracing a step replaces
    np.testing.assert_equal(found, [trained(seed) for seed in range(3)])


def state_of_the_process():
    """Returns what a program may have set, and what distloop has no business with."""
    logger = tf.get_logger()
    return {
        "hooks": (sys.excepthook, sys.displayhook, sys.unraisablehook, sys.getprofile(), sys.gettrace()),
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)},
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "levels of loggers": (logging.root.level, logger.level, logging.getLogger("absl").level),
        "handlers": (list(logging.root.handlers), list(logger.handlers)),
        "switches": (tf.config.functions_run_eagerly(), tf.config.optimizer.get_jit()),
        "policy": (keras.config.dtype_policy().name, keras.config.floatx(), keras.config.image_data_format()),
        "scope": tf.distribute.get_strategy(),
        "arguments": sys.argv[:],
    }


@pytest.mark.slow
def test_what_a_program_has_set_is_as_it_was_after_a_run(tmp_path):
    tf.get_logger().setLevel("ERROR")
    try:
        before = state_of_the_process()
        trainer = distloop.Trainer(slow_model_fn, on(2, batch_size=16, workdir=tmp_path / "run", console="quiet"))
        trainer.fit((X, Y), steps=2, evals={"test": (X, Y)})
        trainer.predict(X)
        trainer.export(str(tmp_path / "model.keras"))
        with pytest.raises(ValueError, match="evals"):
            trainer.fit((X, Y), steps=3, evals=(X, Y))
        assert state_of_the_process() == before
    finally:
        tf.get_logger().setLevel(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("settings", mostly_wide([{}, {"precision": "mixed_float16", "microbatches": 2}]))
def test_a_sound_model_trains_under_check_numerics(settings):
    tf.debugging.enable_check_numerics()
    try:
        trainer = distloop.Trainer(slow_model_fn, on(2, batch_size=16, console="quiet", **settings))
        assert trainer.fit((X, Y), steps=3, evals={"test": (X, Y)})["test/loss"] > 0
        trainer.predict(X)
    finally:
        tf.debugging.disable_check_numerics()


@pytest.mark.slow
def test_evaluating_and_predicting_draw_no_global_random_number():
    trainer = distloop.Trainer(slow_model_fn, on(1, batch_size=16, console="quiet"))
    trainer.build((X, Y))
    before = random.getstate(), np.random.get_state()[1].tolist()
    trainer.evaluate((X, Y))
    trainer.predict(X)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_details_of_strategies_are_not_logged_and_other_lines_are(caplog):
    distloop.prepare(on(1))
    with caplog.at_level(logging.INFO, "tensorflow"):
        tf.distribute.MirroredStrategy(["CPU:0"])
        tf.get_logger().info("of the program")
    assert [record.getMessage() for record in caplog.records] == ["of the program"]


def steps_that_others_hear():
    """Returns the steps of one of two trainers that this worker sends to the others; a function of `forked`."""
    heard = []

    def listen(report):
        heard.append((report.step, collectives.heartbeat_of(student.strategy).step()))
        teacher.evaluate(batches())
        heard.append(collectives.heartbeat_of(student.strategy).step())

    listen.every = 1
    student, teacher = (distloop.Trainer(classifier(), on(1, console="quiet")) for _ in range(2))
    teacher.predict(batches())
    student.fit(batches(), steps=3, actions=[listen])
    return heard


@pytest.mark.slow
def test_workers_hear_the_step_of_the_trainer_that_computes():
    for heard in forked.run_in_workers(steps_that_others_hear, 2):
        assert heard == [(1, 1), 0, (2, 2), 0, (3, 3), 0]
