"""The operations of traced functions, and the count of floating-point operations against counts by hand."""

import keras
import pytest
import tensorflow as tf

from distloop.operations import DRAWS_FROM_KERNEL, count_flops, outermost, peak_of, with_called


def test_operations_of_called_functions_and_of_branches_are_seen():
    inner = tf.function(lambda x: tf.cond(x > 0, lambda: x + tf.random.normal([]), lambda: x))
    graph = tf.function(lambda x: inner(x) * 2).get_concrete_function(tf.TensorSpec([])).graph
    assert not [op for op in graph.get_operations() if DRAWS_FROM_KERNEL.fullmatch(op.type)]
    assert [op.type for op in with_called(graph.get_operations()) if DRAWS_FROM_KERNEL.fullmatch(op.type)]


def test_a_captured_tensor_leads_out_to_the_variables_handle():
    variable = tf.Variable(1.0)
    handles = []

    @tf.function
    def outer():
        @tf.function
        def inner():
            result = variable + 1.0
            graph = tf.compat.v1.get_default_graph()
            handles.extend(op.inputs[0] for op in graph.get_operations() if op.type == "ReadVariableOp")
            return result

        return inner()

    outer()
    assert outermost(handles[0]) is variable.handle


def counted(fn, *shapes):
    specs = [tf.TensorSpec(shape) for shape in shapes]
    return count_flops(tf.function(fn, autograph=False).get_concrete_function(*specs).graph)


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (keras.layers.Dense(5), (4, 3), 2 * 4 * 3 * 5),
        (keras.layers.Dense(5), (4, 7, 3), 2 * 4 * 7 * 3 * 5),
        (keras.layers.Conv2D(5, 3, padding="same"), (4, 8, 6, 2), 2 * (4 * 8 * 6 * 5) * (3 * 3 * 2)),
        (keras.layers.Conv2D(6, 3, strides=2, groups=2), (4, 9, 9, 4), 2 * (4 * 4 * 4 * 6) * (3 * 3 * 2)),
        (keras.layers.DepthwiseConv2D(3, padding="same"), (4, 8, 6, 2), 2 * (4 * 8 * 6 * 2) * 9),
        (keras.layers.Conv2DTranspose(5, 3, strides=2), (4, 8, 6, 2), 2 * (4 * 8 * 6 * 2) * (3 * 3 * 5)),
        (keras.layers.Conv3D(5, 3, padding="same"), (1, 4, 4, 4, 2), 2 * (64 * 5) * (27 * 2)),
        (keras.layers.LayerNormalization(), (4, 3), 0),
    ],
)
def test_layers_are_counted(layer, shape, expected):
    layer.build(shape)
    assert counted(layer, shape) == expected


def test_attention_is_counted():
    layer = keras.layers.MultiHeadAttention(num_heads=2, key_dim=4, flash_attention=False)
    layer.build((3, 5, 8), (3, 5, 8))
    projections = 4 * 2 * (3 * 5) * 8 * (2 * 4)  # query, key, value, output
    scores_and_mixing = 2 * 2 * 3 * 2 * (5 * 5) * 4
    assert counted(lambda x: layer(x, x), (3, 5, 8)) == projections + scores_and_mixing


def test_each_call_of_a_function_counts():
    square = tf.function(lambda x: x @ x)
    assert counted(lambda x: square(square(x)), (3, 3)) == 2 * 2 * 27


@pytest.mark.slow
def test_functions_without_a_graph_are_not_counted():
    assert counted(lambda output: keras.losses.ctc(tf.ones([4, 2]), output), (4, 5, 3)) is None


def test_unknown_shapes_and_loops_are_not_counted():
    assert counted(lambda x, w: x @ w, (None, 3), (3, 5)) is None
    loop = lambda body: lambda x: tf.while_loop(lambda i, _: i < 3, body, [0, x])  # noqa: E731
    assert counted(loop(lambda i, x: (i + 1, x @ x)), (3, 3)) is None
    assert counted(loop(lambda i, x: (i + 1, x + x)), (3, 3)) == 0
    assert counted(lambda x: tf.cond(x[0, 0] > 0, lambda: x @ x, lambda: x), (3, 3)) is None


@pytest.mark.parametrize(
    ("device", "is_half", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", True, 312e12),
        ("NVIDIA H100 PCIe", False, 378e12),
        ("NVIDIA H100 80GB HBM3", True, 989e12),
        ("Tesla T4", False, 8.1e12),
        ("NVIDIA L40S", True, 362e12),
        ("NVIDIA L4", True, 121e12),
        ("GeForce 256", True, None),
    ],
)
def test_peaks_of_known_devices(device, is_half, expected):
    assert peak_of(device, is_half) == expected
