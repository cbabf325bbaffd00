"""The bytes of a function's tensors, compared with counts by hand."""

import keras
import tensorflow as tf

from distloop.diagnostics.live_memory import Peak, peak_of

N = 1000  # numbers of a vector: 4,000 bytes


def peak(fn, *shapes):
    specs = [tf.TensorSpec(shape) for shape in shapes or [[N]]]
    return peak_of(tf.function(fn, autograph=False).get_concrete_function(*specs).graph)


def test_a_tensor_takes_memory_until_its_last_use():
    assert peak(lambda x: tf.exp(x)) == Peak(4 * N)
    assert peak(lambda x: tf.exp(tf.exp(tf.exp(x)))) == Peak(2 * 4 * N)  # an input and an output


def test_reshaped_tensors_and_those_of_no_use_take_none():
    def fn(x):
        tf.exp(x)
        return tf.reshape(tf.exp(x), [10, -1])

    assert peak(fn) == Peak(4 * N)


def test_the_backward_pass_keeps_what_it_reads():
    weight = tf.Variable(1.0)

    def fn(x):
        with tf.GradientTape() as tape:
            y = x * weight
            for _ in range(3):
                y = tf.sin(y)  # whose gradient needs its input
            y = tf.reduce_sum(y)
        return tape.gradient(y, weight)

    most = peak(fn)
    assert 3 * 4 * N <= most.activations < 4 * 4 * N
    assert 4 * N <= most.gradients <= 3 * 4 * N


def test_activations_that_the_backward_pass_computes_again_are_no_gradients():
    def fn(x):
        with tf.name_scope("gradient_tape"):
            slope = tf.exp(x)
        for _ in range(2):  # the second scope is "recomputed_1"
            with tf.name_scope("recomputed"):
                slope = tf.concat([slope, slope], 0)
        return slope

    assert peak(fn) == Peak((2 + 4) * 4 * N)


def test_what_a_called_function_needs_counts_while_it_runs():
    twice = tf.function(lambda x: tf.exp(tf.exp(x)), autograph=False)
    assert peak(lambda x: tf.reduce_sum(twice(x))).total == 2 * 4 * N


def test_a_recurrent_layer_keeps_its_states_of_all_time_steps():
    layer = keras.layers.SimpleRNN(8, activation="tanh")
    layer.build((None, 50, 3))

    def fn(x):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(layer(x))
        return tape.gradient(y, [v.value for v in layer.trainable_variables])

    state = 50 * 16 * 8 * 4
    assert state < peak(fn, [16, 50, 3]).activations < 6 * state


def test_unknown_sizes_are_told():
    assert peak(lambda x: tf.boolean_mask(x, x > 0)).num_unknown > 0
