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

    def doubled(gradients):
        return {path: 2 * gradient for path, gradient in gradients.items()}

    momentum, lamb = keras.optimizers.SGD(0.2, momentum=0.9, nesterov=True), keras.optimizers.Lamb(0.02)
    updates = [distloop.Update("a", first_loss, momentum, "^first/")]
    updates += [distloop.Update("b", second_loss, lamb, "^second/", gradient_fn=doubled)]
    return distloop.ModelSpec({"first": first, "second": second}, updates=updates)


@pytest.mark.wide
def test_an_update_is_undone_with_its_slots_and_histograms_are_complete(tmp_path):
    rows = classification(ROWS)
    rows["x"][33, 0] = 1e4  # the second update fails in one step
    settings = dict(on_nonfinite="skip", clip_norm=0.05, histograms_every=3)
    whole, sharded = (
        train(two_updates, rows, shard_optimizer=is_sharded, workdir=str(tmp_path / str(is_sharded)), **settings)
        for is_sharded in (False, True)
    )
    assert int(sharded.state.skipped_steps) == int(whole.state.skipped_steps) == 2
    shards = sharded.state.slot_placement.shards(sharded.state.trained_variables)
    assert [tuple(shard.view.shape) for shard in shards if shard.view is not shard.replica] == [(384,), (96,)]
    assert_close(all_of(sharded), all_of(whole))
    expected, found = (
        {
            f"{name}/{i}": tensor.numpy()
            for name, tensors in trainer._train_loop.histograms._read_all().items()
            for i, tensor in enumerate(tensors)
        }
        for trainer in (whole, sharded)
    )
    assert all(np.any(values) for values in expected.values())
    assert {name.rpartition("/")[0] for name in expected} == {"weights/a", "weights/b", "gradients/a", "gradients/b"}
    assert_close(found, expected)
