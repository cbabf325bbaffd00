"""Event files for tests: what TensorBoard reads from them, and a run that writes every kind of media."""

import contextlib
import glob

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import distloop
from tests import problems


def read_scalars(directory):
    """Returns {(tag, step): value} of all event files in a directory."""
    scalars = {}
    for path in sorted(glob.glob(f"{directory}/events.*")):
        for event in tf.compat.v1.train.summary_iterator(path):
            for value in event.summary.value:
                number = value.simple_value if value.HasField("simple_value") else tf.make_ndarray(value.tensor)
                scalars[value.tag, event.step] = float(number)
    return scalars


def steps_in_tensorboard(directory, tag):
    """Returns the steps of a tag that TensorBoard shows."""
    events = EventAccumulator(str(directory), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    if tag in events.Tags()["scalars"]:
        return [event.step for event in events.Scalars(tag)]
    return [event.step for event in events.Tensors(tag)]


def train_with_media(workdir, steps, *, crash_at=None, **settings):
    """Trains a small classifier with media of every kind; raises RuntimeError at step `crash_at`."""
    data = tf.data.Dataset.from_tensor_slices(problems.classification()).batch(16)
    rng = np.random.default_rng(0)

    def show(state):
        return {
            "pictures": distloop.Images(rng.random((2, 4, 5, 3))),
            "tone": distloop.Audio(np.sin(np.arange(200) / 9), 8000),
            "words": distloop.Text("some **words**"),
            "spread": distloop.Histogram(rng.normal(size=50)),
            "curve": distloop.PRCurve([0, 1, 1], [0.2, 0.7, 0.4]),
            "half": 0.5,
        }

    def crash(report):
        if report.step == crash_at:
            raise RuntimeError("on purpose")

    crash.every = 1
    matrix = distloop.Summary("test/confusion", lambda state: distloop.Images(np.eye(2)[None, ..., None]))
    config = problems.on(2, workdir=str(workdir), log_every=2, eval_every=2, checkpoint_every=4, **settings)
    trainer = distloop.Trainer(problems.classifier(), config)
    actions = [distloop.Summary("shown", show, every=2), matrix, crash]
    with pytest.raises(RuntimeError, match="on purpose") if crash_at else contextlib.nullcontext():
        trainer.fit(data, steps=steps, evals={"test": data}, actions=actions)
    return trainer
