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


def test_a_function_that_merely_reads_a_variable_does_not_write_it():
    a, b, c = variables()
    recorded = []

    @tf.function
    def run():
        with variable_writes.recorded_writes([a, b, c]) as written:
            tf.cond(a > 0.0, lambda: b.assign(a), lambda: b.value())
            tf.while_loop(lambda i: i < a, lambda i: [i + c], [0.0])
            tf.function(lambda: a + 1.0)()
        recorded.extend(written)

    run()
    assert [v is b for v in recorded] == [True]


def test_eagerly_what_is_not_trainable_counts_as_written_and_a_weight_if_it_changed():
    changed, kept, statistic = variables()
    with variable_writes.recorded_writes([changed, kept, statistic]) as written:
        changed.assign_add(1.0)
    assert [id(v) for v in written] == [id(changed), id(statistic)]


def test_writes_are_restored_except_those_of_random_streams():
    weight, seed, statistic = variables()
    untrained = [seed, statistic]
    state = SimpleNamespace(
        seeds=[seed], recurrent_states=[], untrained_variables=untrained, trained_variables=[weight]
    )

    @tf.function
    def run():
        with variable_writes.restored_writes(state):
            weight.assign_add(1.0)
            seed.assign_add(1.0)
            statistic.assign_add(1.0)
            return tf.identity(weight)

    assert float(run()) == 2.0
    assert [float(v.numpy()) for v in (weight, seed, statistic)] == [1.0, 3.0, 3.0]


def test_values_are_read_and_assigned_in_order():
    a, b, c = variables()
    values = variable_writes.read([a, b, c])
    variable_writes.assign([c, a, b], values)
    assert [float(v.numpy()) for v in (a, b, c)] == [2.0, 3.0, 1.0]
