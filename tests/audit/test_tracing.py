import pytest
import tensorflow as tf

from distloop.audit.tracing import (
    VariableCreated,
    as_replica,
    compiled,
    drawing_operations,
    hold_draws,
    no_new_variables,
)


def test_code_is_traced_as_a_replica_of_several():
    collectives, asked = set(), set()

    def trace(x):
        with as_replica(1, 3, collectives, asked):
            context = tf.distribute.get_replica_context()
            assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (1, 3)
            total = context.all_reduce("SUM", x)
            return total + context.all_gather(x, axis=0)

    assert compiled(trace, tf.constant([1.0]))(tf.constant([2.0])).numpy() == [4.0]  # with its own values
    assert collectives == {"all_reduce", "all_gather"}
    assert asked == {"replica_id_in_sync_group", "num_replicas_in_sync"}


def test_two_calls_have_the_same_operations_though_the_first_one_captures():
    captured, calls = tf.Variable(2.0), []

    def trace(x):
        for _ in range(2):
            with as_replica(0, 2, set()) as operations:
                x = x * captured + tf.random.stateless_normal([], [1, 2])
            calls.append([op.type for op in operations])
        return x

    compiled(trace, tf.constant(1.0))
    assert calls[0] == calls[1] and "Mul" in calls[0]


def test_a_new_variable_is_an_error_that_names_it():
    with no_new_variables(), pytest.raises(VariableCreated, match="late"):
        tf.Variable(0.0, name="late")


def test_operations_that_draw_are_told_from_others():
    with tf.Graph().as_default() as graph:
        tf.random.stateless_normal([2], [1, 2])
        tf.random.truncated_normal([2])
        tf.zeros([2])
    types = {op.type for op in drawing_operations(graph.get_operations())}
    assert types == {"StatelessRandomNormalV2", "TruncatedNormal"}


def test_random_numbers_are_held_but_for_whole_ones_and_those_in_called_functions():
    def draw(kind, are_left):
        draws = {
            "float": lambda: tf.random.stateless_normal([2], [1, 2]),
            "whole": lambda: tf.cast(tf.random.stateless_uniform([2], [1, 2], 0, 9, tf.int32), tf.float32),
            "called": lambda: tf.function(lambda: tf.random.stateless_normal([2], [1, 2]))(),
        }

        def trace(x):
            with as_replica(0, 2, set()) as operations:
                result = x * draws[kind]()
            assert hold_draws(operations) == are_left
            return result

        return compiled(trace, tf.constant(2.0))(tf.constant(2.0)).numpy().tolist()

    assert draw("float", False) == [pytest.approx(1.8)] * 2
    assert draw("whole", True) != [pytest.approx(1.8)] * 2 != draw("called", True)
