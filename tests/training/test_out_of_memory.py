"""Out of memory: the sentence, and steps taken again with smaller microbatches."""

import re

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.model.state import TrainState
from distloop.training import out_of_memory
from distloop.training.compiled_loop import CompiledLoop
from distloop.training.out_of_memory import Halving
from distloop.training.step import TrainStep
from tests.problems import assert_equal, classification, classifier, everything, mostly_wide, on

OOM = (
    "OOM when allocating tensor with shape[4096,1024] and type float on "
    "/job:localhost/replica:0/task:0/device:GPU:1 by allocator GPU_1_bfc [Op:MatMul]"
)


def exhausted(message=OOM):
    return tf.errors.ResourceExhaustedError(None, None, message)


def fail(monkeypatch, fits=lambda microbatches: False, *, after=0, runs=True):
    """Makes loops fail unless `fits`, as one whose last step finds no memory; returns the microbatches of each loop."""
    run = CompiledLoop.run
    tried = []

    def failing(self, *args, **kwargs):
        rows = run(self, *args, **kwargs) if runs else None
        tried.append(self._step.microbatches)
        if len(tried) > after and not fits(self._step.microbatches):
            raise exhausted()
        return rows

    monkeypatch.setattr(CompiledLoop, "run", failing)
    return tried


def test_the_sentence_says_what_was_in_memory_and_what_to_try(monkeypatch):
    used = {"current": 70_120_000_000, "peak": 78_900_000_000}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda device: {"GPU:1": used}[device])
    state = TrainState(classifier(), tf.distribute.get_strategy())
    text = str(out_of_memory.explain_step(exhausted(), state, 12, microbatches=2))
    assert text.startswith(
        "GPU:1 ran out of memory in step 12 or soon after (70.1 GB in use, 78.9 at most), for a tensor of shape "
        "[4096,1024] and type float; weights take "
    )
    parts = ["optimizer slots take", "microbatches=4 or more (it is 2", "precision=mixed_bfloat16", "a smaller batch"]
    assert all(part in text for part in parts)


@pytest.mark.parametrize(
    "replicas, microbatches, sentence, expected",
    [
        (1, 1, "try microbatches=2 or more .it is 1", [1]),
        pytest.param(2, "auto", "it is 4", [1, 2, 4], marks=[pytest.mark.wide, pytest.mark.slow]),  # of one row
    ],
)
def test_a_step_without_memory_ends_the_run_in_one_sentence(monkeypatch, replicas, microbatches, sentence, expected):
    tried = fail(monkeypatch, runs=False)
    trainer = distloop.Trainer(classifier(), on(replicas, microbatches=microbatches))
    with pytest.raises(tf.errors.ResourceExhaustedError, match=sentence) as raised:
        trainer.fit(distloop.make_dataset(classification(16), 8), steps=2)
    assert raised.value.__cause__ is None  # TensorFlow's own message, of many lines
    assert tried == expected


CALLS = {"evaluating": distloop.Trainer.evaluate, "predicting": distloop.Trainer.predict}
CALLS |= {"auditing": distloop.Trainer.audit}  # TensorFlow looks for memory for ten seconds, and an audit four times


@pytest.mark.slow
@pytest.mark.parametrize("doing", mostly_wide(CALLS))
def test_evaluation_prediction_and_audit_without_memory_say_so_in_one_sentence(doing):
    def model_fn():
        spec = classifier()()

        def predict_fn(batch):
            outputs = spec.model(batch["x"], training=False)
            huge = tf.fill([tf.shape(outputs)[0], 10**7, 10**7], outputs[0, 0])  # more than any machine has
            return outputs + tf.reduce_sum(huge, [1, 2])[:, tf.newaxis]

        loss_fn = lambda batch, training: {"loss": predict_fn(batch)[:, 0]}  # noqa: E731
        return distloop.ModelSpec(spec.model, spec.updates[0].optimizer, loss_fn, predict_fn=predict_fn)

    trainer = distloop.Trainer(model_fn, on(1))
    data = distloop.make_dataset(classification(16), 8)
    try:
        text = str(CALLS[doing](trainer, data))
    except tf.errors.ResourceExhaustedError as error:
        text = str(error)
    what = "" if doing == "auditing" else " batches of 8 rows, for a tensor .*; weights take .*: try smaller batches"
    assert re.search(f"CPU:0 ran out of memory while {doing}{what}", text)


@pytest.mark.slow
def test_auto_halves_the_microbatch_and_takes_the_steps_again_from_the_same_state(monkeypatch):
    model_fn = classifier(dropout=0.5, batch_norm="local")
    settings = dict(average_decay=0.9, log_every=2)
    rows = distloop.make_dataset(classification(35), 16, shuffle=True)
    expected = distloop.Trainer(model_fn, on(2, microbatches=2, **settings))
    numbers = expected.fit(rows, steps=4)
    tried = fail(monkeypatch, lambda microbatches: microbatches >= 2)
    trainer = distloop.Trainer(model_fn, on(2, microbatches="auto", **settings))
    reported = trainer.fit(rows, steps=4)
    assert tried[:2] == [1, 2]
    assert_equal(everything(trainer), everything(expected))
    assert reported["loss"] == numbers["loss"]


@pytest.mark.slow
def test_once_batches_of_one_shape_have_fit_nothing_is_copied(monkeypatch):
    trainer = distloop.Trainer(classifier(), on(1, microbatches="auto"))
    data = tf.data.Dataset.from_tensor_slices(classification(16)).batch(8, drop_remainder=True)
    fail(monkeypatch, after=1)
    trainer.fit(data, steps=1)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="it is 1"):
        trainer.fit(data, steps=2)


@pytest.mark.slow
def test_several_workers_agree_on_what_fits_on_all(monkeypatch):
    strategy = tf.distribute.get_strategy()
    state = TrainState(classifier(batch_norm="local"), strategy)
    step, data = TrainStep(state), distloop.make_dataset(classification(16), 8)
    source = distloop.data.source.Source(data, strategy, may_go_back=True)
    monkeypatch.setattr(out_of_memory.workers, "num_workers", lambda strategy: 2)
    halving = Halving(state, step)
    monkeypatch.undo()
    others = iter([False, True])
    monkeypatch.setattr(out_of_memory.workers, "gather", lambda strategy, fits: np.array([fits, next(others)]))
    before = [v.numpy() for v in state.model_variables()]
    assert halving.keep(source) and (step.microbatches, source.info.min_rows) == (2, 2)
    assert all(np.array_equal(v.numpy(), value) for v, value in zip(state.model_variables(), before, strict=True))
    assert not halving.keep(source)  # once
