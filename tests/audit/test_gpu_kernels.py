"""Operations without a GPU kernel are found on any machine, and what stays on a GPU or belongs to the host is not."""

import keras
import pytest
import tensorflow as tf

from distloop.audit.gpu_kernels import off_the_gpu
from distloop.errors import innermost_line
from distloop.graph_functions import graph_function

WEIGHT, COUNT = tf.Variable(tf.ones([8, 8])), tf.Variable(0)


def found_in(fn, dtype=tf.float32):
    graph = graph_function(fn).get_concrete_function(tf.TensorSpec([4, 8], dtype)).graph
    return [(op.type, innermost_line(op.traceback).partition(":")[0]) for op in off_the_gpu(graph)]


@pytest.mark.parametrize(
    ("fn", "dtype", "kind"),
    [
        (tf.strings.as_string, tf.float32, "AsString"),
        (lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: tf.strings.as_string(x), lambda: ""), tf.float32, "AsString"),
        (lambda x: tf.numpy_function(lambda x: x, [x], tf.float32), tf.float32, "PyFunc"),
        (lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(tf.zeros([4], tf.int64), x), tf.float64, None),
    ],
)
def test_texts_python_and_dtypes_without_a_kernel_are_found_in_branches(fn, dtype, kind):
    assert found_in(fn, dtype) == [(kind or "SparseSoftmaxCrossEntropyWithLogits", "test_gpu_kernels.py")]


def test_what_a_gpu_computes_and_what_belongs_to_the_host_is_not_found():
    def fn(x):
        COUNT.assign_add(1)  # of int32, which TensorFlow keeps on the host
        with tf.device("/CPU:0"):
            tf.strings.as_string(x)
        tf.debugging.assert_rank(x, 2, message="a text that is a constant")
        scale = tf.cast(tf.shape(x)[1], tf.float32)
        return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x @ WEIGHT / scale), (0, x))

    assert found_in(fn) == []


@pytest.mark.slow
def test_layers_of_keras_and_their_gradients_are_not_found():
    layers = [keras.layers.Embedding(9, 8), keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True))]
    layers += [keras.layers.Dropout(0.5), keras.layers.Conv1D(4, 3), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((8,), dtype="int32"), *layers, keras.layers.GlobalMaxPooling1D()])

    def fn(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.cast(x, tf.int32), training=True) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    assert found_in(fn) == []
