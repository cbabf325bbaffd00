"""The forward and backward pass of one update on one replica, and the gradients of one value over some rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.shards import Batch, BatchLayout
from distloop.model.state import TrainState
from distloop.training.differentiation import tally_outputs
from distloop.training.forward_backward import ForwardBackward
from tests.problems import classification, classifier, on


def test_other_names_than_before_are_refused():
    outputs = [
        lambda x, w: {"double": 2 * x, "loss": w * x},
        lambda x, w: {"loss": 0 * x},
        lambda x, w: {"loss": w * x},
    ]

    def model_fn():
        weight = tf.Variable(2.0)
        loss_fn = lambda batch, training: outputs[0](batch["x"], weight)  # noqa: E731
        return distloop.ModelSpec([weight], keras.optimizers.SGD(0.1), loss_fn)

    def run():
        layout = BatchLayout(is_padded=False)

        def step(x):
            return update_pass.all_reduce(update_pass(Batch({"x": x}, None), tf.constant(4.0), layout))

        tf.function(step, autograph=False)(tf.ones(4))

    state = TrainState(model_fn, tf.distribute.get_strategy())
    update_pass = ForwardBackward(state, state.spec.updates[0])
    run()
    for sentence in ("does not depend on any variable", r"returned \['loss'\], and \['loss', 'double'\] before"):
        outputs.pop(0)
        with pytest.raises(ValueError, match=sentence):
            run()


@pytest.mark.slow
def test_a_model_that_talks_to_other_replicas_is_refused():
    trainer = distloop.Trainer(classifier(batch_norm="synchronized"), on(2, jit_compile=True))
    sentence = r"^jit_compile=pass was given with a model that talks .*use jit_compile=none.$"
    with pytest.raises(ValueError, match=sentence):
        trainer.fit(distloop.make_dataset(classification(16), 16), steps=1)


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
        models = {"encoder": encoder, "model": model} if is_part_first else [model, encoder, activity]
        loss_fn = lambda batch, training: {"loss": model(batch["x"], training=training)}  # noqa: E731
        return distloop.ModelSpec(models, keras.optimizers.SGD(0.1), loss_fn)

    state = TrainState(model_fn, tf.distribute.get_strategy())
    rows = {"x": tf.ones([2, 3])}
    _, tallies = ForwardBackward(state, state.spec.updates[0]).differentiate.by_path(rows, None, training=True)
    total, weight, *_ = tallies["regularization"]
    model = state.model["model"] if is_part_first else state.model[0]
    np.testing.assert_allclose(total / weight, sum(model.losses), rtol=1e-6)
    assert len(model.losses) == 3 and state.num_parameters() == model.count_params()
