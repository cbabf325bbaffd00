"""The bytes of variables by the device on which they lie."""

import keras
import tensorflow as tf

import distloop
from distloop.monitoring import memory_file
from distloop.training import held_memory
from distloop.training.state import TrainState


def make_state(average_decay=0.0):
    def model_fn():
        model = keras.Sequential(
            [keras.Input((2,), dtype="int32"), keras.layers.Embedding(1000, 4, name="items"), keras.layers.Dense(3)],
            name="net",
        )
        return distloop.ModelSpec(model, keras.optimizers.SGD(momentum=0.9), lambda batch, training: {"loss": batch})

    return TrainState.make(model_fn, tf.distribute.get_strategy(), average_decay)


def test_weights_tables_slots_and_averages_are_told_apart():
    (held,) = held_memory.held_by_device(make_state(0.9)).values()
    assert set(held) == set(memory_file.HELD)
    dense, table = 4 * (4 * 3 + 3), 4 * 1000 * 4
    assert 0 <= held.pop("optimizer slots") - (dense + table) <= 12  # the rate and the count of steps
    assert held == {"weights": dense, "embedding tables": table, "averages of weights": dense + table}


def test_variables_count_where_they_are_placed():
    state = make_state()
    slot = state.optimizer.variables[-1]
    before = held_memory.held_by_device(state)
    with tf.device("CPU:1"):
        slot._value = tf.Variable(tf.zeros(slot.shape))
    size = 4 * slot.value.shape.num_elements()
    after = held_memory.held_by_device(state)
    assert after["CPU:1"] == {"optimizer slots": size}
    assert after["CPU:0"]["optimizer slots"] == before["CPU:0"]["optimizer slots"] - size


def test_larger_tables_are_named():
    model = make_state().model
    assert held_memory.table_bytes(model, 16_000) == {"net/items": 16_000} and not held_memory.table_bytes(
        model, 16_001
    )
