"""Variables that a piece of the graph writes."""

from types import SimpleNamespace

import keras
import tensorflow as tf

from distloop.training import variable_writes


def variables():
    return [tf.Variable(1.0), tf.Variable(2.0), keras.Variable(3.0, trainable=False)]


def test_only_variables_that_are_written_in_the_block_are_recorded():
    before, within, read = variables()

    @tf.function
    def run():
        before.assign(0.0)
        with variable_writes.recorded_writes([before, within, read]) as written:
            within.assign_add(tf.convert_to_tensor(read))
        return [v is within for v in written]

    assert run() == [True]


def test_writes_within_an_inner_function_are_recorded():
    a, _, b = variables()
    recorded = []

    @tf.function
    def run():
        with variable_writes.recorded_writes([a, b]) as written:
            tf.cond(a > 0.0, lambda: b.assign(a), lambda: b.value)
        recorded.extend(written)

    run()
    assert any(v is b for v in recorded)  # TensorFlow cannot tell that a branch merely reads `a`


def test_eagerly_every_candidate_counts_as_written():
    candidates = variables()
    with variable_writes.recorded_writes(candidates) as written:
        pass
    assert [id(v) for v in written] == [id(v) for v in candidates]


def test_writes_are_restored_except_those_of_random_streams():
    statistic, seed, kept = variables()
    state = SimpleNamespace(seeds=[seed], untrained_variables=[statistic, seed, kept])

    @tf.function
    def run():
        with variable_writes.restored_writes(state):
            statistic.assign_add(1.0)
            seed.assign_add(1.0)
            return tf.identity(statistic)

    assert float(run()) == 2.0
    assert [float(v.numpy()) for v in (statistic, seed, kept)] == [1.0, 3.0, 3.0]


def test_values_are_read_and_assigned_in_order():
    a, b, c = variables()
    values = variable_writes.read([a, b, c])
    variable_writes.assign([c, a, b], values)
    assert [float(v.numpy()) for v in (a, b, c)] == [2.0, 3.0, 1.0]


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
    assert variable_writes.outermost(handles[0]) is variable.handle
