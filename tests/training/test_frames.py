"""What a debugger shows between `Trainer.fit` and the user's `loss_fn`: few frames, in few files."""

import os
import traceback

import keras
import numpy as np
import pytest

import distloop
from tests.problems import on

PACKAGE = os.path.dirname(distloop.__file__)


def stack():
    """Returns file and function of each frame of the package that is running, the outermost first."""
    shown = [(os.path.relpath(frame.filename, PACKAGE), frame.name) for frame in traceback.extract_stack()]
    return [(path, name) for path, name in shown if not path.startswith("..")]


def stacks(replicas=1, **settings):
    """Returns the frames above `loss_fn`, and above the optimizer's update of a weight, in their last traces."""
    above = {}

    class Optimizer(keras.optimizers.SGD):
        def update_step(self, *arguments):
            above["update"] = stack()
            return super().update_step(*arguments)

    def model_fn():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

        def loss_fn(batch, training):
            above["loss_fn"] = stack()
            return {"loss": keras.ops.mean(model(batch, training=training) ** 2, -1)}

        return distloop.ModelSpec(model, Optimizer(0.1), loss_fn)

    distloop.Trainer(model_fn, on(replicas, batch_size=8, **settings)).fit(np.ones((16, 3), np.float32), steps=1)
    return above


def frames(replicas=1, **settings):
    return stacks(replicas, **settings)["loss_fn"]


def below(found, file, function):
    return found[found.index((file, function)) + 1 :]


def size(found):
    return len(found), len({file for file, _ in found})


@pytest.mark.parametrize(
    ("settings", "most"), [({}, 16), ({"microbatches": 2}, 18), ({"virtual_replicas": 2}, 20)], ids=str
)
def test_few_frames_are_between_fit_and_loss_fn(settings, most):
    found = frames(**settings)
    from_fit = found[found.index(("trainer.py", "fit")) :]
    assert len(from_fit) <= most and (settings or size(from_fit)[1] <= 9)


def test_few_frames_are_between_a_step_and_loss_fn():
    frames_below, files = size(below(frames(), "training/step.py", "__call__"))
    assert frames_below <= 6 and files <= 4


def test_few_frames_of_a_replica_are_above_loss_fn():
    assert len(frames(2)) <= 5  # each replica is traced in a thread of its own


def test_few_files_are_between_fit_and_new_weights():
    above = stacks()
    files = {path for path, _ in above["loss_fn"] + above["update"]}
    assert {"trainer.py", "training/step.py", "training/application.py"} <= files and len(files) <= 12
