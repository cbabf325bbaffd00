"""Datasets with a place in them: kinds of data, passes, epochs, and the data that is refused."""

import tempfile

import numpy as np
import pytest
import tensorflow as tf

from distloop.data.make_dataset import make_dataset
from distloop.data.opening import open_data, worker_context
from distloop.data.source import Passes, Source
from distloop.run.fit_call import batches_per_epoch, make_units
from tests.data.python_batches import Numbers, three
from tests.problems import batch_taker, mirrored, numbers, of_unknown_length

ONE = tf.distribute.get_strategy()


def taken(source, count, strategy=ONE):
    """Takes batches one by one and returns their rows, on every replica, padding included."""
    take = batch_taker(source, source.iterator())
    return [[t.numpy().tolist() for t in strategy.experimental_local_results(take().rows["x"])] for _ in range(count)]


def test_a_dataset_is_read_in_order_and_repeated_and_keeps_its_position():
    source = Source(numbers(5, 2), ONE)
    assert taken(source, 2) == [[[0, 1]], [[2, 3]]]
    assert source.iterator() is source.iterator()
    assert batch_taker(source, source.new_iterator())().rows["x"].numpy().tolist() == [0, 1]
    assert taken(source, 3) == [[[4]], [[0, 1]], [[2, 3]]]
    source = Source(numbers(4, 2), ONE, repeat=False)
    taken(source, 2)
    with pytest.raises(tf.errors.OutOfRangeError):
        taken(source, 1)


@pytest.mark.slow
def test_autograph_writes_no_file_for_a_function_of_ours(tmp_path, monkeypatch):
    dataset = of_unknown_length(numbers(6, 2).map(lambda batch: {"x": batch["x"], "y": batch["x"]}))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert taken(Source(dataset, mirrored(2)), 1) == [[[0, 1]]]
    assert batches_per_epoch(Source(dataset, ONE)) == 3
    assert len(list(make_dataset(np.zeros([4, 1]), 2))) == 2
    assert not list(tmp_path.iterdir())  # a process that is killed would leave it


def test_a_limit_bounds_each_pass_and_cached_batches_repeat_the_first_one():
    limited = Source(numbers(6, 2), ONE, limit=2)
    assert batches_per_epoch(limited) == 2
    assert taken(limited, 4) == [[[0, 1]], [[2, 3]], [[0, 1]], [[2, 3]]]
    assert not Source(numbers(6, 2).repeat(), ONE, limit=2).info.is_endless
    shuffled = tf.data.Dataset.range(100).shuffle(100).batch(5).map(lambda x: {"x": x})
    batches = taken(Source(shuffled, ONE, limit=2, is_cached=True), 6)
    assert batches[:2] == batches[2:4] == batches[4:] and batches[0] != batches[1]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_function_of_an_input_context_makes_the_dataset(count):
    contexts = []

    def make(context):
        contexts.append(context)
        return numbers(8, 4)

    source = Source(make, mirrored(count))
    (context,) = contexts
    assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
    assert context.num_replicas_in_sync == 1  # one dataset serves all replicas of a worker
    assert source.data is make
    assert taken(source, 1) == [[[0, 1, 2, 3]]]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda context: numbers(16, context.get_per_replica_batch_size(8)),
        lambda context: numbers(16, 8 // context.num_replicas_in_sync),
        lambda: numbers(16, 8),
        lambda *, size=8: numbers(16, size),
    ],
    ids=["by the context's method", "by hand", "without arguments", "with an option"],
)
def test_functions_give_global_batches(make, count):
    source = Source(make, mirrored(count))
    assert source.data is make and not source.layout.is_sharded
    assert taken(source, 2) == [[list(range(8))], [list(range(8, 16))]]


def test_each_worker_counts_as_one_replica_for_a_function_of_data():
    context = worker_context(num_workers=3, worker=1)
    assert (context.num_input_pipelines, context.input_pipeline_id) == (3, 1)
    assert (context.get_per_replica_batch_size(12), 12 // context.num_replicas_in_sync) == (4, 4)
    with pytest.raises(ValueError, match="8 is not divisible by `num_replicas_in_sync` 3"):
        context.get_per_replica_batch_size(8)
    opened = open_data(lambda context: tf.data.Dataset.range(8).batch(context.num_input_pipelines), 3, 1)
    assert opened.takes_context and next(iter(opened.dataset)).shape == [3]
    for data in (make_dataset(np.arange(4.0), 4), tf.data.Dataset.range(4).batch(4)):
        changed = open_data(data, 1, 0, map_batch=lambda batch: batch * 2)
        assert next(iter(changed.dataset)).numpy().tolist() == [0, 2, 4, 6]


def shuffled():
    return tf.data.Dataset.range(20).shuffle(20, seed=3).batch(6).map(lambda x: {"x": x})


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 4, 7])
def test_a_position_is_restored_in_a_new_source(batches):
    first, second = Source(shuffled(), ONE), Source(shuffled(), ONE)
    for source in (first, second):
        source.first_rows()
    taken(first, batches)
    first.batches_taken = batches
    second.go_to(first.position())
    assert second.batches_taken == batches and second.fast_forward.num_batches == batches
    assert taken(second, 6) == taken(first, 6)


@pytest.mark.parametrize("look", [Source.first_rows, Source.count_batches])
@pytest.mark.parametrize("may_go_back", [False, True])
def test_a_look_at_the_data_changes_no_order(look, may_go_back):
    def of_unknown_length():
        return shuffled().filter(lambda batch: True)

    expected = taken(Source(of_unknown_length(), ONE), 8)
    source = Source(of_unknown_length(), ONE, may_go_back=may_go_back)
    look(source)
    assert taken(source, 8) == expected
    source.go_to({"batches": 2, "skipped": []})
    assert taken(source, 6) == expected[2:]


@pytest.mark.parametrize("look", [Source.first_rows, Source.count_batches, Source.require_batch])
def test_data_that_does_not_shuffle_is_not_copied_for_a_look(look, monkeypatch):
    def refuse(**_):
        raise AssertionError("of images in memory, a copy takes as much memory again")

    monkeypatch.setattr(tf.raw_ops, "DatasetToGraphV2", refuse)
    options = tf.data.Options()
    images = (
        tf.data.Dataset.from_tensor_slices({"x": np.zeros([8, 2])}).cache().map(lambda x: x, 2).with_options(options)
    )
    batches = images.flat_map(tf.data.Dataset.from_tensors).filter(lambda x: True).batch(4, num_parallel_calls=2)
    look(Source(tf.data.Dataset.zip(batches.prefetch(2)).take(2), ONE, may_go_back=True))
    captured = tf.data.Dataset.range(2).shuffle(2)
    by_function = tf.data.Dataset.range(2).flat_map(lambda i: captured).filter(lambda x: True).batch(2)
    for of_seeds in (by_function, by_function.shuffle(2)) if look is not Source.require_batch else ():
        with pytest.raises(AssertionError):
            look(Source(of_seeds, ONE))


def test_a_position_is_restored_in_a_source_that_was_read_or_skips():
    source = Source(shuffled(), ONE, may_go_back=True)
    start = source.position()
    batches = taken(source, 6)
    source.go_to(start)
    assert taken(source, 6) == batches
    source = Source(numbers(40, 4), ONE)
    source.go_to({"batches": 2, "skipped": [2, 3, 7]})
    assert source.start_loop() == 3  # the loop ends before the next one to skip
    assert source.batches_taken == 4
    assert taken(source, 1) == [[[16, 17, 18, 19]]]


@pytest.mark.slow
def test_elements_keep_their_structure():
    x, y = tf.zeros([4, 2]), tf.ones([4])
    for structure in ((x, y), {"a": x, "b": {"c": y}}, (x, {"y": y}), x):
        for count in (1, 2):
            source = Source(tf.data.Dataset.from_tensor_slices(structure).batch(2), mirrored(count))
            rows = batch_taker(source, source.iterator())().rows
            tf.nest.assert_same_structure(rows, structure)
            assert tf.nest.flatten(rows)[0].shape == (2, 2)


@pytest.mark.parametrize(("batch_size", "is_padded"), [(3, True), (4, False)])
def test_a_known_batch_size_decides_whether_to_pad(batch_size, is_padded):
    dataset = tf.data.Dataset.range(12).batch(batch_size, drop_remainder=True)
    assert Source(dataset, mirrored(4)).layout.is_padded == is_padded


def test_only_data_by_number_is_read_in_part_by_each_of_several_workers():
    found = []
    for data in (make_dataset(np.arange(8), 4), Numbers(), three, numbers(8, 4)):
        source = Source(data, ONE)
        source._num_workers = 2
        source._lay_out()
        found.append(getattr(source.feed, "worker_rows", None) is not None)
    assert found == [True, False, False, False]


def test_an_epoch_is_counted_and_the_place_stays():
    assert batches_per_epoch(Source(numbers(10, 4), ONE)) == 3
    source = Source(of_unknown_length(numbers(10, 4)), ONE)
    taken(source, 1)
    assert batches_per_epoch(source) == 3
    assert taken(source, 1) == [[[4, 5, 6, 7]]]


def test_the_first_rows_are_the_first_batch():
    assert Source(numbers(10, 4), mirrored(2)).first_rows()["x"].numpy().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("length", ["3 epochs", 2])
def test_a_dataset_of_unknown_length_is_counted_once(length, monkeypatch):
    counted = []
    monkeypatch.setattr("distloop.data.source.count_batches", lambda dataset: counted.append(dataset) or 3)
    source = Source(of_unknown_length(numbers(10, 4)), ONE)
    units = make_units(source, length)
    assert units.run.steps == (9 if length == "3 epochs" else 2) and len(counted) == (length == "3 epochs")
    assert units.period("1 epoch").steps == 3 and batches_per_epoch(source) == 3
    assert len(counted) == 1


@pytest.mark.parametrize("data", [(np.zeros([4, 2]), 5), [{"x": np.zeros(4)}], {}, None, "text", range(4), 3])
def test_other_data_is_refused(data):
    with pytest.raises(ValueError, match=rf"is a {type(data).__name__}; .* a tf.data.Dataset .*make_dataset\("):
        Source(data, ONE)
    with pytest.raises(ValueError, match=f"is a {type(data).__name__}; distloop takes a tf.data.Dataset"):
        Source(lambda context: data, ONE)


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        (np.zeros([8, 2]), "a smaller dtype of the arrays"),
        (make_dataset(np.zeros([8, 2]), 4, map_fn=lambda row, seed: row + 1), "less work in map_fn"),
        (make_dataset([[1.0, 2.0]] * 8, 4), "a faster disk"),
        (Numbers(), "workers= of the PyDataset"),
        (three, "distloop.make_dataset(source, batch_size)"),
        (tf.data.Dataset.range(8).batch(4), ""),
    ],
)
def test_what_to_try_against_waiting_fits_the_kind_of_data(data, advice):
    found = Source(data, ONE, batch_size=4).against_waiting
    assert advice in found and bool(advice) == bool(found) and "cache()" not in found


def test_passes_remember_the_sources_of_the_latest_datasets_alone():
    passes, data = Passes(ONE, {"batch_size": 4}), [numbers(8, 4) for _ in range(9)]
    sources = [passes.source(given) for given in data]
    assert len(set(map(id, sources))) == 9 and passes.source(data[-1]) is sources[-1]
    assert sources[-1].data is data[-1]
    assert passes.source(data[0]) is not sources[0]
    arrays = {"x": np.arange(6)}
    assert passes.source(arrays) is not passes.source(arrays)  # they are read again each time
    endless = numbers(8, 4).repeat()
    with pytest.raises(ValueError, match="endless.*take"):
        passes.source(endless)
    assert passes.source(endless, may_be_endless=True).info.is_endless  # a limit ends the pass
