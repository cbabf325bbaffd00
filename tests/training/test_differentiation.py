"""The gradients of one value over some rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.model.state import TrainState
from distloop.training.differentiation import tally_outputs
from distloop.training.forward_backward import ForwardBackward


def test_padding_counts_in_no_tally():
    tallies, _ = tally_outputs({"loss": tf.constant([1.0, np.nan])}, tf.zeros([2]), tf.constant([1.0, 0.0]), {})
    assert [float(t) for t in tallies["loss"][:2]] == [1.0, 1.0]


@pytest.mark.parametrize("is_part_first", [False, True])
def test_a_part_of_another_model_counts_its_losses_once(is_part_first):
    def model_fn():
        l2 = keras.regularizers.L2(0.1)
        encoder = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, kernel_regularizer=l2)])
        activity = keras.layers.ActivityRegularization(l2=0.01)
        model = keras.Sequential([keras.Input((3,)), encoder, activity, keras.layers.Dense(1, kernel_regularizer=l2)])
        models = {"encoder": encoder, "model": model}
        return distloop.ModelSpec(
            models if is_part_first else [model, encoder, activity],
            keras.optimizers.SGD(0.1),
            lambda batch, training: {"loss": model(batch["x"], training=training)},
        )

    state = TrainState(model_fn, tf.distribute.get_strategy())
    rows = {"x": tf.ones([2, 3])}
    _, tallies = ForwardBackward(state, state.spec.updates[0]).differentiate.by_path(rows, None, training=True)
    total, weight, *_ = tallies["regularization"]
    model = state.model["model"] if is_part_first else state.model[0]
    np.testing.assert_allclose(total / weight, sum(model.losses), rtol=1e-6)
    assert len(model.losses) == 3 and state.num_parameters() == model.count_params()
