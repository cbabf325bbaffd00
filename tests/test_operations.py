"""The operations of traced functions."""

import tensorflow as tf

from distloop.operations import DRAWS_FROM_KERNEL, outermost, with_called


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
