"""Layers whose calls are replaced within a scope."""

import keras
import tensorflow as tf

from distloop.optimizers.keras_hooks import ReplacedCalls


def test_layers_have_their_own_calls_again_when_the_last_scope_is_left():
    layer = keras.layers.Dense(2, kernel_initializer="ones", name="dense")
    rows = tf.ones([1, 3])
    own = layer(rows)
    layers = {"net/dense": layer}
    calls = ReplacedCalls(layers, lambda path, layer, call: lambda rows: call(rows) * len(path))
    with calls:
        with calls:
            pass
        tf.debugging.assert_equal(layer(rows), 9 * own)
    tf.debugging.assert_equal(layer(rows), own)
    assert "call" not in vars(layer)
