"""Threads that read a user's data ahead: none runs the user's code when a call has ended, and no batch is lost."""

import contextlib
import functools
import itertools
import time

import keras
import numpy as np
import pytest

import distloop
from distloop import threads
from tests.problems import classifier, mostly_wide, on, refused

SECS = 0.25  # in which the user's code makes a batch
SIZE = 4
SHUT_SECS = threads._SHUT_SECS


@pytest.fixture(autouse=True)
def enough_time(monkeypatch):
    monkeypatch.setattr(threads, "_SHUT_SECS", 60)  # for the end of a call: a busy machine takes more than a second


class Batches:
    """Makes batches slowly, each from its number; `made` lists them, and `num_running` counts calls under way."""

    def __init__(self):
        self.made, self.num_running = [], 0

    def make(self, number):
        self.num_running += 1
        time.sleep(SECS)
        random = np.random.default_rng(number)
        self.made.append(number)
        self.num_running -= 1
        return {"x": random.normal(size=[SIZE, 8]).astype(np.float32), "label": random.integers(0, 4, [SIZE])}

    def generate(self):
        yield from map(self.make, range(60))

    def assert_is_at_rest(self):
        assert self.num_running == 0
        made = list(self.made)
        time.sleep(2 * SECS)
        assert self.made == made and self.num_running == 0

    def __iter__(self):
        return self.generate()


class Numbered(keras.utils.PyDataset):
    def __init__(self, batches, **settings):
        super().__init__(**settings)
        self.batches = batches

    def __len__(self):
        return 60

    def __getitem__(self, number):
        return self.batches.make(number)


KINDS = {
    "a generator": lambda batches: batches.generate(),
    "a function": lambda batches: batches.generate,
    "an iterable": lambda batches: batches,
    "a PyDataset": Numbered,
}


def trainer_of(**settings):
    return distloop.Trainer(classifier(), on(1, **settings))


def stop(report):
    raise distloop.StopTraining("enough")


def fail(report):
    raise OSError("disk is gone")


def leave_stream(data):
    stream = trainer_of().stream_predictions(data)
    next(stream)
    stream.close()


def fit_with_action(data, action):
    action.every = 2
    with contextlib.suppress(OSError):
        trainer_of().fit(data, steps=9, actions=[action])


CALLS = {
    "fit": lambda data: trainer_of().fit(data, steps=3),
    "fit that an action stops": lambda data: fit_with_action(data, stop),
    "fit that an action fails": lambda data: fit_with_action(data, fail),
    "evaluate": lambda data: trainer_of(limit_eval_batches=2).evaluate(data),
    "predict": lambda data: trainer_of().predict(data, batches=2),
    "a stream that is left": leave_stream,
    "a dry run": lambda data: trainer_of(fast_dev_run=True).fit(data),
}


CASES = itertools.product(KINDS, CALLS)
CASES = [case for case in CASES if case != ("a generator", "a dry run")]  # which reads the data twice
KEPT = [("a generator", "fit that an action fails"), ("a function", "fit"), ("an iterable", "fit that an action stops")]
KEPT += [("an iterable", "evaluate"), ("a generator", "predict"), ("a function", "a stream that is left")]
KEPT += [("a PyDataset", "fit"), ("a PyDataset", "a dry run")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "call"), mostly_wide(CASES, *KEPT))
def test_after_a_call_no_thread_runs_the_code_of_the_data(kind, call):
    batches = Batches()
    CALLS[call](KINDS[kind](batches))
    batches.assert_is_at_rest()


@pytest.mark.slow
def test_evaluations_of_a_run_end_their_reading_too():
    train, test = Batches(), Batches()
    evaluation = distloop.Evaluation(Numbered(test), batches=1)
    trainer_of().fit(Numbered(train), steps=2, evals={"test": evaluation})
    test.assert_is_at_rest()
    train.assert_is_at_rest()


@pytest.mark.slow
@pytest.mark.parametrize("call", mostly_wide(["evaluate", "predict"]))
def test_the_workers_of_a_py_dataset_end_with_a_pass(call):
    batches = Batches()
    CALLS[call](Numbered(batches, workers=2, max_queue_size=2))
    batches.assert_is_at_rest()


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_wide(KINDS, "a generator", "a PyDataset"))
def test_the_next_fit_goes_on_without_losing_a_batch(kind):
    batches, seen = Batches(), []
    data = KINDS[kind](batches)
    model_fn = classifier()

    def spec():
        built = model_fn()

        def loss_fn(batch, training):
            return {**built.loss_fn(batch, training), "sum_of_x": keras.ops.sum(batch["x"], axis=1)}

        return distloop.ModelSpec(built.model, built.optimizer, loss_fn)

    def note(report):
        seen.append(report.metrics["sum_of_x"])

    note.every = 1
    trainer = distloop.Trainer(spec, on(1))
    for steps in (2, 3, 6):
        trainer.fit(data, steps=steps, actions=[note])
        batches.assert_is_at_rest()
    expected = [np.random.default_rng(n).normal(size=[SIZE, 8]).astype(np.float32).sum(1).mean() for n in range(60)]
    order = batches.made[-6:] if kind == "a PyDataset" else range(6)
    if kind != "a PyDataset":  # whose batches are shuffled
        np.testing.assert_allclose(seen, [expected[n] for n in order], rtol=1e-5)
    assert len(seen) == 6 and len({round(float(value), 6) for value in seen}) == 6


@pytest.mark.slow
def test_a_generator_that_was_trained_on_is_refused_while_it_runs_too():
    generator = Batches().generate()
    trainer_of().fit(generator, steps=3)
    for call in ("evaluate", "predict", "fit"):
        refused(functools.partial(CALLS[call], generator), "was read before and cannot start again: give the function")


@pytest.mark.slow
def test_data_without_a_next_batch_holds_up_a_call_for_a_second(monkeypatch):
    monkeypatch.setattr(threads, "_SHUT_SECS", SHUT_SECS)

    def generate():
        yield from (Batches().make(n) for n in range(3))
        time.sleep(60)

    began = time.monotonic()
    trainer_of().fit(generate, steps=3)
    assert time.monotonic() - began < 45
