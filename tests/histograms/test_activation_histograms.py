"""What layers compute: histograms, means and deviations of their outputs."""

import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.histograms.histograms import recorded_outputs
from distloop.training.action import Report
from tests import problems

pytestmark = pytest.mark.slow


class Block(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.inner = keras.layers.Dense(3, name="inner")
        self.recurrent = keras.layers.SimpleRNN(2, name="recurrent")

    def call(self, inputs):
        return self.recurrent(self.inner(self.inner(inputs)))


def test_all_calls_of_a_layer_are_recorded_and_of_a_recurrent_one_once():
    block = Block(name="block")
    block(tf.zeros([1, 4, 3]))
    drop = keras.layers.Dropout(0.5, name="drop")
    twin = keras.layers.Dense(3, name="drop")
    twin.build([1, 2])
    counts, call = {}, block.call

    def trace(inputs):
        with recorded_outputs({"block": block, "drop": drop, "twin": twin}) as outputs:
            twin(drop(block(inputs), training=False))
        counts.update({name: len(tensors) for name, tensors in outputs.items()})

    tf.function(trace, autograph=False).get_concrete_function(tf.TensorSpec([None, 4, 3]))
    assert counts == {"block/inner": 2, "block/recurrent": 1, "drop#2": 1}
    assert "call" not in vars(block) and block.call == call


def test_outputs_have_a_mean_a_deviation_and_a_histogram_of_the_first_rows():
    layer = keras.layers.Dense(2, kernel_initializer="ones", name="sum")
    layer(tf.zeros([1, 2]))
    loss_fn = lambda batch, training: {"loss": layer(batch["x"])[:, 0]}  # noqa: E731
    spec = types.SimpleNamespace(updates=[types.SimpleNamespace(loss_fn=loss_fn)])
    state = types.SimpleNamespace(spec=spec, model=layer, untrained_variables=())
    rows = np.float32([[1, 2], [3, 4], [5, 6]])
    found = distloop.ActivationHistograms({"x": rows}, rows=2)(Report(1, 1, {}, state))
    assert found.pop("activations/sum").values.tolist() == [3, 3, 7, 7]
    assert found == {"sum/activation_mean": 5.0, "sum/activation_deviation": 2.0}
    with pytest.raises(ValueError, match=r"layers='conv'\) saw no such layer of Keras compute in loss_fn"):
        distloop.ActivationHistograms({"x": rows}, layers="conv")(Report(1, 1, {}, state))
    with pytest.raises(ValueError, match="The data given is a int; distloop takes a tf.data.Dataset"):
        distloop.ActivationHistograms(1)


@pytest.mark.parametrize("layers", ["(", 3])
def test_layers_that_are_no_regular_expression_are_refused_when_it_is_made(layers):
    make = lambda: distloop.ActivationHistograms({"x": np.zeros([2, 2])}, layers=layers)  # noqa: E731
    problems.refused(make, f"layers={layers!r}", "give a regular expression")


@pytest.mark.parametrize("make", [distloop.ActivationHistograms, functools.partial(distloop.WorstExamples, "test")])
def test_a_step_without_a_loss_fn_is_refused_before_the_first_step(make):
    def model_fn():
        net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        return distloop.ModelSpec(net, keras.optimizers.SGD(0.1), step_fn=lambda step: {})

    data, trainer = problems.batches(), distloop.Trainer(model_fn, problems.on(1))
    problems.refused(lambda: trainer.fit(data, steps=2, actions=[make(data, every=1)]), "a step_fn and no loss_fn")
    assert trainer.step == 0


@pytest.mark.wide
def test_a_run_with_them_ends_bit_for_bit_as_one_without(tmp_path):
    model_fn = problems.classifier(dropout=0.2, batch_norm="local")
    data = distloop.make_dataset(problems.classification(20), 8)
    trainers = []
    for actions in ([], [distloop.ActivationHistograms(data, every=2, layers="hidden|norm")]):
        trainers.append(distloop.Trainer(model_fn, problems.on(2, workdir=str(tmp_path / str(len(actions))))))
        trainers[-1].fit(data, steps=5, actions=actions)
    problems.assert_equal(*map(problems.everything, trainers))
    rows = distloop.read_metrics(tmp_path / "1")
    names = {"net/hidden/activation_mean", "net/norm/activation_deviation"}
    assert [row["step"] for row in rows if names <= row.keys()] == [2, 4, 5]
    assert not any("dropout" in name for name in rows[-1])
