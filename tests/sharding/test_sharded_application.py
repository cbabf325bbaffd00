"""Tests how updates of a sharded run are applied: several in a step, undone, and by optimizers that cut no variable."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.problems import assert_close, classification
from tests.sharding.test_sharding import ROWS, all_of, train


def two_updates():
    """Two nets that train in turn, one by an optimizer that is not by element, under a constraint and a gradient_fn."""
    constraint = keras.constraints.MaxNorm(0.8, axis=0)
    first = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(n) for n in (60, 4, 8))], name="first")
    second = keras.Sequential([keras.Input((8,)), keras.layers.Dense(9, kernel_constraint=constraint)], name="second")

    def first_loss(batch, training):
        return {"loss": tf.reduce_mean(tf.square(first(batch["x"]) - batch["x"]), -1)}

    def second_loss(batch, training):
        loss = keras.losses.sparse_categorical_crossentropy(batch["label"], second(first(batch["x"])), from_logits=True)
        return {"loss": tf.where(batch["x"][:, 0] > 1e3, np.inf, loss)}

    momentum = keras.optimizers.SGD(0.2, momentum=0.9, nesterov=True)
    updates = [
        distloop.Update("a", first_loss, momentum, "^first/"),
        distloop.Update(
            "b",
            second_loss,
            keras.optimizers.Lamb(0.02),
            "^second/",
            gradient_fn=lambda g: {p: 2 * v for p, v in g.items()},
        ),
    ]
    return distloop.ModelSpec({"first": first, "second": second}, updates=updates)


@pytest.fixture(scope="module")
def several_updates(tmp_path_factory):
    """Runs of two updates, of which the second one fails in one step, clipped by the norm: whole, and sharded."""
    rows = classification(ROWS)
    rows["x"][33, 0] = 1e4
    settings = dict(on_nonfinite="skip", clip_norm=0.05, histograms_every=3)
    trainers = []
    for is_sharded in (False, True):
        workdir = str(tmp_path_factory.mktemp("run"))
        trainers.append(train(two_updates, rows, shard_optimizer=is_sharded, workdir=workdir, **settings))
    return trainers


@pytest.mark.wide
@pytest.mark.slow
def test_an_update_is_undone_and_its_slots_too(several_updates):
    whole, sharded = several_updates
    assert int(sharded.state.skipped_steps) == int(whole.state.skipped_steps) == 2
    parts = sharded.state.slot_placement.parts(sharded.state.trained_variables)
    assert [tuple(part.view.shape) for part in parts if part.view is not part.replica] == [(384,), (96,)]
    assert_close(all_of(sharded), all_of(whole))


@pytest.mark.wide
def test_histograms_show_whole_gradients(several_updates):
    found = [trainer._train_loop.histograms._read_all() for trainer in several_updates]
    flat = [
        {f"{name}/{i}": tensor.numpy() for name, tensors in read.items() for i, tensor in enumerate(tensors)}
        for read in found
    ]
    assert all(np.any(values) for values in flat[0].values())
    assert {name.rpartition("/")[0] for name in flat[0]} == {"weights/a", "weights/b", "gradients/a", "gradients/b"}
    assert_close(flat[1], flat[0])
