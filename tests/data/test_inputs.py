"""From datasets to each replica's share: repeat, pad, slice, count, and the data that is refused."""

import functools
import os
import types

import numpy as np
import pytest
import tensorflow as tf

from distloop.config import Config
from distloop.data import inputs
from distloop.data.inputs import Source
from distloop.distributed import cluster


@functools.cache
def replicas(count):
    return cluster.make_strategy(Config(device="cpu", strategy="mirrored", num_devices=count))


ONE = tf.distribute.get_strategy()


def numbers(count, batch_size):
    """Batches {"x": [B]} of the numbers from 0."""
    return tf.data.Dataset.range(count).batch(batch_size).map(lambda x: {"x": x})


def of_unknown_length(dataset):
    return dataset.filter(lambda *_: True)


def sizes_1_to_9():
    """Batches of 1 to 9 rows, with row numbers from 100."""
    return tf.data.Dataset.range(1, 10).map(lambda n: 100 + tf.range(n))


def taker(source, iterator):
    """Returns a function that takes a batch, compiled as in a loop."""
    return tf.function(lambda: inputs.next_batch(iterator, source.layout), autograph=False)


def taken(source, count, strategy=ONE):
    """Takes batches one by one and returns their rows, on every replica, padding included."""
    take = taker(source, source.iterator())
    return [[t.numpy().tolist() for t in strategy.experimental_local_results(take().rows["x"])] for _ in range(count)]


# Kinds of data, and the place in it.


def test_a_dataset_is_read_in_order_and_repeated():
    assert taken(Source(numbers(5, 2), ONE), 5) == [[[0, 1]], [[2, 3]], [[4]], [[0, 1]], [[2, 3]]]


def test_a_source_that_is_not_repeated_ends():
    source = Source(numbers(4, 2), ONE, repeat=False)
    taken(source, 2)
    with pytest.raises(tf.errors.OutOfRangeError):
        taken(source, 1)


def test_a_limit_bounds_each_pass():
    assert taken(Source(numbers(6, 2), ONE, limit=2), 4) == [[[0, 1]], [[2, 3]], [[0, 1]], [[2, 3]]]
    assert Source(numbers(6, 2), ONE, limit=2).batches_per_epoch() == 2
    assert not Source(numbers(6, 2).repeat(), ONE, limit=2).is_endless


def test_cached_batches_come_again_as_they_were_in_the_first_pass():
    shuffled = tf.data.Dataset.range(100).shuffle(100).batch(5).map(lambda x: {"x": x})
    found = taken(Source(shuffled, ONE, limit=2, is_cached=True), 6)
    assert found[:2] == found[2:4] == found[4:] and found[0] != found[1]


def test_a_limit_on_what_tensorflow_has_split_is_refused():
    strategy = replicas(2)
    split = strategy.experimental_distribute_dataset(numbers(6, 2))
    with pytest.raises(ValueError, match="call take\\(\\) on it"):
        Source(split, strategy, limit=2)


def test_next_batch_if_any_says_when_the_data_ends():
    source = Source(numbers(3, 2), ONE, repeat=False)

    @tf.function(autograph=False)
    def has_batch(iterator):
        has, get = inputs.next_batch_if_any(iterator, source.layout)
        return has, tf.cond(has, lambda: tf.size(get().rows["x"]), lambda: 0)

    iterator = source.iterator()
    assert [tuple(t.numpy() for t in has_batch(iterator)) for _ in range(3)] == [(True, 2), (True, 1), (False, 0)]


def test_the_iterator_keeps_its_place():
    source = Source(numbers(6, 2), ONE)
    assert taken(source, 2) == [[[0, 1]], [[2, 3]]]
    assert source.iterator() is source.iterator()
    assert taken(source, 2) == [[[4, 5]], [[0, 1]]]


def test_a_new_iterator_starts_at_the_beginning_and_leaves_the_place():
    source = Source(numbers(6, 2), ONE)
    taken(source, 1)
    batch = taker(source, source.new_iterator())()
    assert batch.rows["x"].numpy().tolist() == [0, 1]
    assert taken(source, 1) == [[[2, 3]]]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_function_of_an_input_context_gives_the_workers_share(count):
    contexts = []

    def make(context):
        contexts.append(context)
        return numbers(8, 4)

    source = Source(make, replicas(count))
    (context,) = contexts
    assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
    assert context.num_replicas_in_sync == count
    assert source.data is make
    assert taken(source, 1) == [[[0, 1, 2, 3]]]


@pytest.mark.parametrize("count", [1, 2])
def test_a_distributed_dataset_is_taken_as_tensorflow_split_it(count):
    strategy = replicas(count)
    source = Source(strategy.experimental_distribute_dataset(numbers(8, 4)), strategy)
    assert source.layout.is_split and not source.layout.is_padded
    expected = [[[0, 1, 2, 3]], [[4, 5, 6, 7]]] if count == 1 else [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert taken(source, 2, strategy) == expected


def test_a_distributed_dataset_is_started_again_at_its_end():
    strategy = replicas(2)
    source = Source(strategy.experimental_distribute_dataset(numbers(12, 4)), strategy)
    found = []
    for _ in range(2):
        left = source.start_loop()
        assert left == 3
        found.append(taken(source, left, strategy))
        source.batches_taken += left
    assert found[0] == found[1]


def test_a_loop_over_a_distributed_dataset_takes_what_is_left_of_a_pass():
    strategy = replicas(2)
    source = Source(strategy.experimental_distribute_dataset(numbers(12, 4)), strategy)
    source.batches_taken = 4
    assert source.start_loop() == 2


def test_a_loop_over_a_plain_dataset_has_any_length():
    assert Source(numbers(12, 4), ONE).start_loop() is None


def test_a_loop_over_an_endless_distributed_dataset_has_any_length():
    strategy = replicas(2)
    source = Source(strategy.experimental_distribute_dataset(numbers(12, 4).repeat()), strategy)
    assert source.start_loop() is None


def test_a_distributed_dataset_of_unknown_length_is_refused():
    strategy = replicas(2)
    source = Source(strategy.experimental_distribute_dataset(of_unknown_length(numbers(12, 4))), strategy)
    with pytest.raises(ValueError, match="DistributedDataset given does not know its length; .*: give the plain"):
        source.start_loop()


def test_elements_keep_their_structure():
    x, y = tf.zeros([4, 2]), tf.ones([4])
    for structure in ((x, y), {"a": x, "b": {"c": y}}, (x, {"y": y}), x):
        for count in (1, 2):
            source = Source(tf.data.Dataset.from_tensor_slices(structure).batch(2), replicas(count))
            rows = taker(source, source.iterator())().rows
            tf.nest.assert_same_structure(rows, structure)
            assert tf.nest.flatten(rows)[0].shape == (2, 2)


# Padding.


def test_a_batch_that_is_too_small_is_padded_with_its_own_rows():
    source = Source(sizes_1_to_9(), replicas(4))
    assert source.layout.is_padded
    take = taker(source, source.iterator())
    for size in range(1, 10):
        rows, count = take()
        own = [100 + i for i in range(size)]
        assert rows.numpy().tolist() == (own * 4)[:4] if size < 4 else own
        assert int(count) == size


def test_microbatches_need_rows_too():
    source = Source(sizes_1_to_9(), replicas(2), microbatches=3)
    rows, count = taker(source, source.iterator())()
    assert rows.shape == (6,) and int(count) == 1


def test_nothing_is_padded_on_one_replica():
    source = Source(sizes_1_to_9(), replicas(1))
    batch = taker(source, source.iterator())()
    assert not source.layout.is_padded
    assert batch.rows.shape == (1,) and batch.size is None


@pytest.mark.parametrize(("batch_size", "is_padded"), [(3, True), (4, False)])
def test_a_batch_size_that_is_known_tells_whether_to_pad(batch_size, is_padded):
    dataset = tf.data.Dataset.range(12).batch(batch_size, drop_remainder=True)
    assert Source(dataset, replicas(4)).layout.is_padded == is_padded


def counted(source, strategy, batches):
    iterator = source.iterator()
    count = tf.function(lambda: inputs.count_examples(inputs.next_batch(iterator, source.layout), strategy))
    return [int(count()) for _ in range(batches)]


@pytest.mark.parametrize("count", [1, 3])
def test_examples_are_counted_without_padding(count):
    strategy = replicas(count)
    source = Source(sizes_1_to_9(), strategy)
    assert counted(source, strategy, 9) == list(range(1, 10))


def test_examples_of_a_split_batch_are_counted_over_the_replicas():
    strategy = replicas(2)
    source = Source(strategy.experimental_distribute_dataset(numbers(7, 4)), strategy)
    assert counted(source, strategy, 2) == [4, 3]


# Shares.


def shares(source, strategy, microbatches):
    """Returns a function of nothing: rows and weights of each replica and microbatch of the next batch, in order."""
    iterator = source.iterator()

    def replica_fn(batch):
        found = []
        for microbatch in range(microbatches):
            rows, weights = inputs.take_share(batch, source.layout, microbatches, microbatch)
            found.append((rows, tf.ones([inputs.batch_size(rows)]) if weights is None else weights))
        return found

    @tf.function(autograph=False)
    def take():
        return strategy.run(replica_fn, args=(inputs.next_batch(iterator, source.layout),))

    def read():
        per_replica = take()
        return [
            tf.nest.map_structure(lambda t, r=r: strategy.experimental_local_results(t)[r], part)
            for r in range(strategy.num_replicas_in_sync)
            for part in per_replica
        ]

    return read


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_shares_make_up_the_batch_in_order_and_each_row_counts_once(count, microbatches):
    strategy = replicas(count)
    read = shares(Source(sizes_1_to_9(), strategy, microbatches=microbatches), strategy, microbatches)
    for size in range(1, 10):
        parts = read()
        assert all(rows.shape[0] > 0 for rows, _ in parts)
        rows = np.concatenate([rows for rows, _ in parts])
        weights = np.concatenate([weights for _, weights in parts])
        assert rows[weights > 0].tolist() == [100 + i for i in range(size)]
        assert set(weights) <= {0.0, 1.0} and weights.sum() == size
        lengths = [sum(parts[r * microbatches + k][0].shape[0] for k in range(microbatches)) for r in range(count)]
        assert max(lengths) - min(lengths) <= 1  # as even as whole rows allow
        if size >= count * microbatches:
            assert (weights == 1).all()  # nothing is added


@pytest.mark.parametrize(("device", "place"), [("GPU", "/device:CPU:0"), ("CPU", "/device:CPU:1")])
def test_a_gpu_is_sent_its_own_rows_alone(monkeypatch, device, place):
    context = types.SimpleNamespace(num_replicas_in_sync=2, replica_id_in_sync_group=1, strategy=None)
    monkeypatch.setattr(tf.distribute, "get_replica_context", lambda: context)
    monkeypatch.setattr(cluster, "has_gpus", lambda strategy: device == "GPU")
    with tf.Graph().as_default(), tf.device(f"/device:{device}:1"):
        batch = inputs.Batch({"x": tf.zeros([4, 3])}, None)
        rows, _ = inputs.take_share(batch, inputs.Layout(is_split=False, is_padded=False))
        assert rows["x"].device == place and rows["x"].shape == [2, 3]


def test_shares_of_a_static_batch_size_make_up_the_batch():
    strategy = replicas(3)
    read = shares(Source(tf.data.Dataset.range(16).batch(8, drop_remainder=True), strategy), strategy, 1)
    for first in (0, 8):
        parts = read()
        assert np.concatenate([rows for rows, _ in parts]).tolist() == list(range(first, first + 8))


@pytest.mark.parametrize("microbatches", [1, 3])
def test_shares_of_a_split_batch_are_what_the_replica_got(microbatches):
    strategy = replicas(2)
    source = Source(strategy.experimental_distribute_dataset(numbers(10, 6)), strategy, microbatches=microbatches)
    read = shares(source, strategy, microbatches)
    for expected in (range(6), range(6, 10)):
        parts = read()
        rows = np.concatenate([rows["x"] for rows, _ in parts])
        weights = np.concatenate([weights for _, weights in parts])
        assert rows[weights > 0].tolist() == list(expected)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_nested_batches_with_ragged_and_string_entries_are_shared_out(batch_size):
    strategy = replicas(3)
    words = tf.ragged.constant([[1], [2, 2], [], [4, 4, 4], [5], [6, 6]])
    structure = {"text": {"words": words, "name": tf.constant(list("abcdef"))}, "label": tf.range(6)}
    source = Source(tf.data.Dataset.from_tensor_slices(structure).batch(batch_size), strategy)
    read = shares(source, strategy, 1)
    found = {"words": [], "name": [], "label": []}
    for _ in range(-(-6 // batch_size)):
        for rows, weights in read():
            keep = weights.numpy() > 0
            found["words"] += [row for row, k in zip(rows["text"]["words"].to_list(), keep, strict=True) if k]
            found["name"] += [row.decode() for row in rows["text"]["name"].numpy()[keep]]
            found["label"] += rows["label"].numpy()[keep].tolist()
    assert found == {"words": words.to_list(), "name": list("abcdef"), "label": list(range(6))}


def test_the_batch_size_is_an_int_only_where_it_is_known():
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def trace(x):
        found.append(inputs.batch_size({"x": x}))

    trace(tf.zeros([3, 2]))
    assert tf.is_tensor(found[0])
    assert inputs.batch_size({"x": tf.zeros([3, 2])}) == 3
    assert int(inputs.batch_size(tf.ragged.constant([[1], [2, 3]]))) == 2


# Epochs.


@pytest.mark.parametrize("make", [lambda d: d, of_unknown_length], ids=["known", "unknown"])
def test_an_epoch_is_counted(make):
    assert Source(make(numbers(10, 4)), ONE).batches_per_epoch() == 3


def test_counting_an_epoch_leaves_the_place():
    source = Source(of_unknown_length(numbers(10, 4)), ONE)
    taken(source, 1)
    source.batches_per_epoch()
    assert taken(source, 1) == [[[4, 5, 6, 7]]]


def test_an_epoch_of_a_distributed_dataset_is_counted():
    strategy = replicas(2)
    assert Source(strategy.experimental_distribute_dataset(numbers(10, 4)), strategy).batches_per_epoch() == 3


def test_an_endless_dataset_has_no_epoch():
    with pytest.raises(ValueError, match="epochs were given, but the dataset is endless .*: give steps instead"):
        Source(numbers(10, 4).repeat(), ONE).batches_per_epoch()


def test_an_epoch_of_nothing_is_refused():
    with pytest.raises(ValueError, match="The dataset given is empty"):
        Source(numbers(10, 4).filter(lambda _: False), ONE).batches_per_epoch()


# A batch to build models from.


def test_the_first_rows_are_the_first_batch():
    assert Source(numbers(10, 4), replicas(2)).first_rows()["x"].numpy().tolist() == [0, 1, 2, 3]


def test_the_first_rows_of_a_split_batch_are_one_replicas():
    strategy = replicas(2)
    source = Source(strategy.experimental_distribute_dataset(numbers(10, 4)), strategy)
    assert source.first_rows()["x"].numpy().tolist() == [0, 1]


def test_there_are_no_first_rows_of_nothing():
    with pytest.raises(ValueError, match="The dataset given is empty"):
        Source(numbers(10, 4).filter(lambda _: False), ONE).first_rows()


# Refusals.


def test_a_dataset_that_is_known_to_be_empty_is_refused():
    with pytest.raises(ValueError, match="The dataset given is empty; distloop needs one batch at least: check"):
        Source(numbers(0, 4), ONE)


@pytest.mark.parametrize("data", [np.zeros([4, 2]), (np.zeros([4, 2]), np.zeros([4])), [1, 2], None])
def test_what_is_no_dataset_is_refused(data):
    with pytest.raises(ValueError, match=rf"is a {type(data).__name__}; .* a tf.data.Dataset .*make_dataset\("):
        Source(data, ONE)


def test_a_function_that_returns_no_dataset_is_refused():
    with pytest.raises(ValueError, match="is a list; distloop takes a tf.data.Dataset"):
        Source(lambda context: [1, 2], ONE)


def test_single_examples_are_refused():
    with pytest.raises(ValueError, match=r"hold a scalar .*, so they are single examples; .*: call .batch\("):
        Source(tf.data.Dataset.from_tensor_slices({"x": tf.zeros([4, 2]), "y": tf.zeros([4])}), ONE)


def test_entries_with_different_first_axes_are_refused():
    with pytest.raises(ValueError, match=r"first axes of \[2, 3\]; the entries of a batch share .*: call .batch\("):
        Source(tf.data.Dataset.from_tensor_slices({"x": tf.zeros([4, 2]), "y": tf.zeros([4, 3])}), ONE)


def test_sparse_tensors_are_refused():
    sparse = tf.data.Dataset.from_tensor_slices(tf.sparse.eye(4)).batch(2)
    with pytest.raises(ValueError, match="gives a sparse tensor .*: turn it into a dense or ragged one"):
        Source(sparse, ONE)


def test_entries_that_are_none_are_refused():
    with pytest.raises(ValueError, match="None"):
        Source(tf.data.Dataset.from_tensors({"x": tf.zeros([4, 2]), "y": None}), ONE)


def explained(dataset, strategy=ONE, batches=9):
    """Returns what `explain` says of the error that reading the data raises."""
    source = Source(dataset, strategy, repeat=False)
    take = taker(source, source.iterator())
    with pytest.raises(tf.errors.OpError) as caught:
        for _ in range(batches):
            take()
    return inputs.explain(caught.value)


def generated(batches, **specs):
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=specs)


X = tf.TensorSpec([None, 2])


@pytest.mark.parametrize(
    ("second", "mark"),
    [
        ({"y": np.zeros([3, 2])}, "structure"),
        ({"x": np.array([["a", "b"]])}, "expected type"),
        ({"x": np.zeros([3])}, "element of shape"),
        ({"x": np.zeros([3, 5])}, "element of shape"),
    ],
    ids=["structure", "dtype", "rank", "axis"],
)
def test_a_generator_that_changes_its_batches_is_explained(second, mark):
    error = explained(generated([{"x": np.zeros([3, 2])}, second], x=X))
    assert isinstance(error, ValueError)
    assert str(error).startswith("A batch differs from those before it: ")
    assert mark in str(error)
    assert str(error).endswith("correct the generator or its output_signature.")


def test_entries_that_differ_in_their_number_of_rows_are_explained():
    dataset = generated([{"x": np.zeros([3, 2]), "y": np.zeros([4, 2])}], x=X, y=X)
    error = explained(dataset, replicas(2), batches=1)
    assert "A batch's entries differ in their number of rows" in str(error)
    assert "\n" not in str(error)


def test_the_end_of_all_data_is_explained_as_empty():
    assert str(explained(generated([], x=X))).startswith("The dataset given is empty")


def test_an_error_of_another_kind_is_left_alone():
    assert inputs.explain(tf.errors.InvalidArgumentError(None, None, "Matrix size-incompatible")) is None
    assert inputs.explain(tf.errors.InternalError(None, None, None)) is None


# make_dataset.


def flat(dataset):
    return [int(value) for batch in dataset.as_numpy_iterator() for value in batch]


def test_arrays_become_batches_in_order():
    dataset = inputs.make_dataset({"x": np.arange(10).reshape(5, 2), "y": {"z": np.arange(5)}}, 2)
    batches = list(dataset.as_numpy_iterator())
    assert [len(batch["x"]) for batch in batches] == [2, 2, 1]
    assert np.concatenate([batch["x"] for batch in batches]).tolist() == np.arange(10).reshape(5, 2).tolist()
    assert np.concatenate([batch["y"]["z"] for batch in batches]).tolist() == list(range(5))
    assert len(dataset) == 3


def test_drop_remainder_leaves_the_odd_batch_out_and_knows_the_batch_size():
    dataset = inputs.make_dataset(np.arange(5), 2, drop_remainder=True)
    assert dataset.element_spec.shape == [2]
    assert flat(dataset) == [0, 1, 2, 3]


EXAMPLES = [np.arange(20), tf.data.Dataset.range(20)]


@pytest.mark.parametrize("examples", EXAMPLES, ids=["arrays", "dataset"])
def test_shuffling_gives_every_epoch_another_order_and_every_row_once(examples):
    dataset = inputs.make_dataset(examples, 4, shuffle=True)
    first, second = flat(dataset), flat(dataset)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != list(range(20)) and first != second
    repeated = flat(inputs.make_dataset(examples, 4, shuffle=True).repeat(2))
    assert sorted(repeated[:20]) == list(range(20)) and repeated[:20] != repeated[20:]


@pytest.mark.parametrize("examples", EXAMPLES, ids=["arrays", "dataset"])
def test_the_seed_fixes_the_order(examples):
    orders = [flat(inputs.make_dataset(examples, 4, shuffle=True, seed=seed).repeat(2)) for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]


def test_rows_of_several_arrays_stay_together_when_shuffled():
    dataset = inputs.make_dataset({"x": np.arange(20), "y": 10 * np.arange(20)}, 3, shuffle=True)
    for batch in dataset.as_numpy_iterator():
        np.testing.assert_array_equal(10 * batch["x"], batch["y"])


@pytest.mark.parametrize("examples", EXAMPLES, ids=["arrays", "dataset"])
def test_a_buffer_shuffles_rows_that_are_near(examples):
    order = flat(inputs.make_dataset(examples, 4, shuffle=3))
    assert sorted(order) == list(range(20)) and order != list(range(20))
    assert all(value <= place + 2 for place, value in enumerate(order))  # never earlier than the buffer allows


def test_a_cached_dataset_is_read_once():
    reads = []

    def examples():
        reads.append(True)
        yield from range(4)

    dataset = tf.data.Dataset.from_generator(examples, output_signature=tf.TensorSpec([], tf.int64))
    cached = inputs.make_dataset(dataset, 2, cache=True)
    assert flat(cached) == flat(cached) == [0, 1, 2, 3]
    assert len(reads) == 1


def test_the_position_in_shuffled_arrays_can_be_saved_and_is_small(tmp_path):
    rows = np.zeros([2000, 1000], np.float32)  # 8 MB
    rows[:, 0] = np.arange(2000)

    def source():
        return Source(inputs.make_dataset(rows, 8, shuffle=True), replicas(2))

    def take(source, count):
        take_batch = taker(source, source.iterator())
        return [take_batch().rows.numpy()[:, 0].tolist() for _ in range(count)]

    first = source()
    take(first, 300)  # into the second epoch
    path = tf.train.Checkpoint(iterator=first.iterator()).write(os.path.join(tmp_path, "position"))
    expected = take(first, 5)
    second = source()
    tf.train.Checkpoint(iterator=second.iterator()).read(path)
    assert take(second, 5) == expected
    assert sum(os.path.getsize(os.path.join(tmp_path, name)) for name in os.listdir(tmp_path)) < 1_000_000


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_without_rows_is_refused(batch_size):
    with pytest.raises(ValueError, match=f"batch_size={batch_size} was given; a batch has one row at least"):
        inputs.make_dataset(np.arange(5), batch_size)


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"Arrays of \[4, 5\] rows were given; they need the same number"):
        inputs.make_dataset({"x": np.zeros([4]), "y": np.zeros([5])}, 2)


@pytest.mark.parametrize("arrays", [np.zeros([0, 3]), np.float32(1.0)])
def test_arrays_without_rows_are_refused(arrays):
    with pytest.raises(ValueError, match=r"Arrays of \[0\] rows were given"):
        inputs.make_dataset(arrays, 2)


def test_all_of_a_dataset_of_unknown_length_cannot_be_shuffled():
    with pytest.raises(ValueError, match="shuffle=True was given with a dataset of unknown length; give the number"):
        inputs.make_dataset(of_unknown_length(tf.data.Dataset.range(9)), 2, shuffle=True)


# What a batch is split into.


@pytest.mark.parametrize(
    ("count", "batch_size", "microbatches", "sizes"),
    [
        (1, 10, 1, [10]),
        (2, 10, 1, [5, 5]),
        (3, 10, 1, [3, 3, 4]),
        (4, 3, 1, [1, 1, 1, 0]),
        (2, 3, 4, [3, 0]),
    ],
)
def test_the_rows_that_each_replica_takes_are_told(count, batch_size, microbatches, sizes):
    strategy = replicas(count) if count > 1 else ONE
    source = Source(numbers(20, batch_size), strategy, microbatches=microbatches)
    assert source.split() == (batch_size, sizes)
    assert sum(sizes) == batch_size


def test_the_rows_told_are_those_taken():
    source = Source(numbers(20, 10), replicas(3))
    iterator = source.iterator()

    def count(batch):
        return inputs.batch_size(inputs.take_share(batch, source.layout)[0])

    take = tf.function(lambda: replicas(3).run(count, args=(inputs.next_batch(iterator, source.layout),)))
    assert [int(n) for n in replicas(3).experimental_local_results(take())] == source.split()[1]


def test_the_size_of_a_batch_is_found_behind_what_keeps_it():
    data = tf.data.Dataset.range(20).batch(4, num_parallel_calls=2).shuffle(3).cache().take(3).repeat().prefetch(1)
    assert Source(data, ONE).split() == (4, [4])
    assert Source(inputs.make_dataset(np.arange(9.0), 5, shuffle=True), ONE).split() == (5, [5])
    assert Source(tf.data.Dataset.range(20).batch(4, drop_remainder=True).map(lambda x: x), ONE).split() == (4, [4])


def test_the_size_of_a_batch_is_not_guessed():
    assert Source(sizes_1_to_9(), ONE).split() is None
    assert Source(numbers(20, 4).unbatch().padded_batch(3), ONE).split() == (3, [3])
    assert Source(numbers(20, 4).concatenate(numbers(20, 5)), ONE).split() is None
    distributed = replicas(2).experimental_distribute_dataset(numbers(8, 4))
    assert Source(distributed, replicas(2)).split() is None
