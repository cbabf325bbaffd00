"""What a recomputed layer must not do."""

import keras
import pytest
import tensorflow as tf

import distloop
from distloop.graph_functions import graph_function
from distloop.recompute.recomputation import recomputing
from distloop.variables import tensorflow_variable


class Faulty(keras.layers.Layer):
    """A layer that cannot be called again, for what it does besides its computation."""

    def __init__(self, fault, **settings):
        super().__init__(**settings)
        self.fault, self.kept = fault, []
        self.count = self.add_weight(shape=(), trainable=False, name="count")
        self.kernel = self.add_weight(shape=(3, 3), name="kernel")

    def call(self, rows):
        hidden = rows @ self.kernel
        if more := self.fault(self, rows, hidden):
            hidden += more[0]
        return hidden * 1.0


def gathers(layer, rows, hidden):
    return [tf.reduce_sum(distloop.gather_rows(rows)[0])]


def writes_by_tensorflow(layer, rows, hidden):
    tensorflow_variable(layer.count).assign_add(1.0)


def writes_in_a_loop(layer, rows, hidden):
    tf.while_loop(lambda i: i < 2, lambda i: [i + 0 * tf.cast(layer.count.assign(i), tf.int32) + 1], [0])


def writes_what_is_trained(layer, rows, hidden):
    layer.kernel.assign(layer.kernel / tf.norm(layer.kernel))


def keeps_for_the_loss(layer, rows, hidden):
    layer.kept = [hidden]


def keeps_for_itself(layer, rows, hidden):
    if not layer.kept:
        layer.kept.append(tf.tanh(hidden))
    return layer.kept


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (gathers, "calls gather_rows; the backward pass cannot call it again"),
        (writes_by_tensorflow, "writes to a variable or a generator by TensorFlow's operation AssignAddVariableOp"),
        (writes_in_a_loop, "writes 'faulty/count' in a loop or a branch of TensorFlow"),
        (writes_what_is_trained, "writes 'faulty/kernel', which is trained"),
        (keeps_for_the_loss, r"keeps the tensor '.*' of its call for later, by other ways than its outputs"),
        (keeps_for_itself, r"keeps the tensor '.*' of its call for later, by other ways than its outputs"),
    ],
)
def test_layers_that_cannot_be_called_again_are_refused(fault, sentence):
    layer = Faulty(fault, name="faulty")

    def loss_fn(rows, training):
        loss = tf.reduce_sum(layer(rows))
        return loss + tf.add_n([tf.reduce_sum(tensor) for tensor in layer.kept]) if layer.kept else loss

    def differentiate(rows):
        with tf.GradientTape() as tape:
            tape.watch(layer.kernel.value)
            loss = recomputing(loss_fn, model=[layer], pattern="faulty")(rows, True)
        return tape.gradient(loss, layer.kernel.value)

    with pytest.raises(ValueError, match=f"^recompute was given, and the layer 'faulty', which it matches, {sentence}"):
        graph_function(differentiate).get_concrete_function(tf.ones([2, 3]))
