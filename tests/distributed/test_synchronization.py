import keras
import pytest
import tensorflow as tf

import distloop
from tests.problems import refused


def network(name):
    layers = [keras.Input((2,)), keras.layers.Dense(2), keras.layers.BatchNormalization(name="norm")]
    return keras.Sequential(layers, name=name)


class Pair(tf.Module):
    def __init__(self):
        super().__init__()
        self.nets = {"a": network("a"), "b": [network("b")]}


@pytest.mark.parametrize(
    "make", [lambda: network("net"), lambda: keras.Sequential([keras.Input((2,)), network("inner")]), Pair]
)
def test_each_batch_normalization_at_any_depth_is_synchronized(make):
    model = make()
    assert distloop.synchronize(model) is model
    tops = [model.nets["a"], *model.nets["b"]] if isinstance(model, Pair) else [model]
    layers = [layer for top in tops for layer in top._flatten_layers()]
    norms = [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]
    assert len(norms) == len(tops) and all(norm.synchronized for norm in norms)


def test_a_model_without_batch_normalization_stays_and_what_holds_no_layer_is_refused():
    dense = keras.layers.Dense(2)
    assert distloop.synchronize(dense) is dense
    refused(lambda: distloop.synchronize(lambda: None), "<lambda>", "give a Keras model")
