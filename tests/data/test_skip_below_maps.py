"""A pipeline that begins below its maps gives the batches of one that is read again, bit for bit, or none at all."""

import numpy as np
import pytest
import tensorflow as tf

from distloop.data.skip_below_maps import begin_at

N = 23
S = tf.data.Dataset.from_tensor_slices


def numbers():
    return tf.data.Dataset.range(N)


def rows():
    return S({"x": np.arange(float(N)), "y": np.arange(N)})


def sine(row):
    return {**row, "x": tf.sin(row["x"])}


def flip_if_even(row):
    return {**row, "x": tf.cond(row["y"] % 2 == 0, lambda: -row["x"], lambda: row["x"])}


def added(dataset):
    for number in (1, 2, 3):
        dataset = dataset.map(lambda row: {**row, "x": row["x"] * number})  # noqa: B023
    return dataset


def reading_only(deterministic):
    options = tf.data.Options()
    options.deterministic = deterministic
    return options


PIPELINES = {
    "a range": lambda: numbers().map(lambda v: v * 2).batch(4),
    "arrays, shuffled": lambda: rows().shuffle(N, seed=1).map(sine).batch(4),
    "a small buffer": lambda: rows().shuffle(5, seed=1).map(sine, num_parallel_calls=2).batch(4).prefetch(2),
    "no odd last batch": lambda: rows().shuffle(N, seed=1).map(sine).batch(4, drop_remainder=True),
    "one order": lambda: rows().shuffle(N, seed=1, reshuffle_each_iteration=False).map(sine).batch(4),
    "two shuffles": lambda: rows().shuffle(7, seed=1).shuffle(9, seed=2).map(sine).map(flip_if_even).batch(5),
    "a map of batches": lambda: rows().shuffle(N, seed=1).batch(4).map(lambda b: {**b, "x": b["x"] + 1}),
    "parallel batches": lambda: rows().shuffle(N, seed=1).map(sine).batch(4, num_parallel_calls=2),
    "options": lambda: rows().shuffle(N, seed=1).map(sine).with_options(reading_only(True)).batch(4).prefetch(1),
    "repeated batches": lambda: rows().shuffle(N, seed=1).map(sine).batch(4).repeat().prefetch(1),
    "batches over ends": lambda: rows().shuffle(N, seed=1).map(sine).repeat().batch(4),
    "repeated rows": lambda: rows().shuffle(N, seed=1).repeat().map(sine).batch(4, drop_remainder=True),
    "a function that is bound late": lambda: added(rows().shuffle(N, seed=1)).batch(4),
    "no map": lambda: rows().shuffle(N, seed=1).batch(4),
    "a prefetch below": lambda: rows().shuffle(N, seed=1).prefetch(3).map(sine).batch(23),
}
LEFT_ALONE = {
    "a map that draws": lambda: rows().map(lambda r: {**r, "x": tf.random.uniform([], seed=1)}).batch(4),
    "a map of Python": lambda: rows().map(lambda r: tf.py_function(float, [r["x"]], tf.float64)).batch(4),
    "a table": lambda: numbers().map(TABLE.lookup).batch(4),
    "no fixed order": lambda: rows().map(sine, num_parallel_calls=2, deterministic=False).batch(4),
    "options without order": lambda: rows().map(sine).batch(4).with_options(reading_only(False)),
    "a filter": lambda: rows().filter(lambda r: r["y"] > 3).map(sine).batch(4),
    "a map below a shuffle": lambda: rows().map(sine).shuffle(N, seed=1).batch(4),
    "two passes": lambda: rows().map(sine).batch(4).repeat(2),
    "two batches": lambda: numbers().batch(4).unbatch().batch(3),
    "batches of batches": lambda: numbers().batch(2).batch(3),
    "a cache": lambda: rows().map(sine).batch(4).cache(),
}
TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(np.arange(N), np.arange(N)), 0)


def list_files(directory):
    return tf.data.Dataset.list_files(f"{directory}/*", seed=3).map(tf.io.read_file).batch(3)


def assert_equal_batches(dataset, reference, count=13):
    pairs = list(zip(dataset.take(count).as_numpy_iterator(), reference.take(count).as_numpy_iterator(), strict=True))
    assert len(pairs) == count
    for batch, expected in pairs:
        tf.nest.map_structure(np.testing.assert_array_equal, batch, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_that_begins_at_a_batch_gives_those_of_reading_again(name):
    make = PIPELINES[name]
    for num_batches in (1, 5, 6, 7, 14, 20):
        skipped = begin_at(make(), num_batches)
        assert skipped is not None
        assert_equal_batches(skipped, make().repeat().skip(num_batches))


def test_the_files_of_a_list_are_not_read_before_the_place(tmp_path):
    for number in range(11):
        (tmp_path / f"{number:02}").write_text(str(number))
    expected = [batch.tolist() for batch in list_files(tmp_path).repeat().skip(2).take(2).as_numpy_iterator()]
    skipped = iter(begin_at(list_files(tmp_path), 2))
    first = next(skipped).numpy().tolist()
    assert [first, next(skipped).numpy().tolist()] == expected


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_pipelines_are_left_alone(name):
    assert begin_at(LEFT_ALONE[name](), 5) is None


def test_a_skip_that_takes_long_is_left_alone():
    dataset = tf.data.Dataset.range(10_000_000).batch(100)
    assert begin_at(dataset, 10_000) is not None and begin_at(dataset, 10_001) is None


def test_a_dataset_that_was_read_before_is_shuffled_as_its_next_iterator_would():
    def read_before():
        dataset = rows().shuffle(N, seed=1).map(sine).batch(4)
        next(iter(dataset))
        return dataset

    assert_equal_batches(begin_at(read_before(), 7), read_before().repeat().skip(7))
