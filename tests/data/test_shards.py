"""The shard of each replica: slice, pad, count."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data import shards
from distloop.data.source import Source
from distloop.distributed import strategies
from tests.problems import batch_taker, mirrored, mostly_wide, numbers, sizes_1_to_9


def test_a_batch_that_is_too_small_is_padded_with_its_own_rows():
    source = Source(sizes_1_to_9(), mirrored(4))
    assert source.layout.is_padded
    take = batch_taker(source, source.iterator())
    for size in range(1, 10):
        rows, count = take()[:2]
        copies = {1: 4, 2: 2, 3: 4}.get(size, 1)  # every row as often as any other
        assert rows.numpy().tolist() == [100 + i for i in range(size)] * copies
        assert int(count) == size
    source = Source(sizes_1_to_9(), mirrored(2), microbatches=3)
    rows, count = batch_taker(source, source.iterator())()[:2]
    assert rows.shape == (6,) and int(count) == 1
    source = Source(sizes_1_to_9(), mirrored(1))
    batch = batch_taker(source, source.iterator())()
    assert not source.layout.is_padded and batch.rows.shape == (1,) and batch.size is None


def test_next_batch_if_any_returns_false_at_the_end():
    source = Source(numbers(3, 2), tf.distribute.get_strategy(), repeat=False)
    iterator = source.iterator()

    @tf.function(autograph=False)
    def has_batch():
        has, get = shards.next_batch_if_any(iterator, source.layout)
        return has, tf.cond(has, lambda: tf.size(get().rows["x"]), lambda: 0)

    assert [tuple(t.numpy() for t in has_batch()) for _ in range(3)] == [(True, 2), (True, 1), (False, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "data", "expected"),
    [
        (1, sizes_1_to_9, range(1, 10)),
        (3, sizes_1_to_9, range(1, 10)),
    ],
    ids=["one replica", "three replicas"],
)
def test_examples_are_counted_over_the_replicas_without_padding(replicas, data, expected):
    source = Source(data(), mirrored(replicas))
    iterator = source.iterator()
    count = tf.function(lambda: shards.count_examples(shards.next_batch(iterator, source.layout)))
    assert [int(count()) for _ in expected] == list(expected)


def shards_of(source, strategy, microbatches=1):
    """Returns a function of nothing: rows and weights of each replica and microbatch of the next batch, in order."""
    iterator = source.iterator()

    def replica_fn(batch):
        parts = []
        for microbatch in range(microbatches):
            rows, weights = shards.take_shard(batch, source.layout, microbatches, microbatch)
            parts.append((rows, tf.ones([shards.batch_size(rows)]) if weights is None else weights))
        return parts

    @tf.function(autograph=False)
    def take():
        parts = strategy.run(replica_fn, args=(shards.next_batch(iterator, source.layout),))
        values = [strategy.experimental_local_results(value) for value in tf.nest.flatten(parts)]
        return [tf.nest.pack_sequence_as(parts, of_replica) for of_replica in zip(*values, strict=True)]

    return lambda: sum(take(), [])


def joined(parts):
    """Returns the rows that count, in order."""
    rows, weights = (np.concatenate(values) for values in zip(*parts, strict=True))
    return rows[weights > 0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", mostly_wide([1, 2, 3]))
@pytest.mark.parametrize("count", mostly_wide([1, 2, 3, 4]))
def test_shards_make_up_the_batch_in_order_and_each_row_counts_once(count, microbatches):
    strategy = mirrored(count)
    read = shards_of(Source(sizes_1_to_9(), strategy, microbatches=microbatches), strategy, microbatches)
    for size in range(1, 10):
        parts = read()
        assert all(rows.shape[0] > 0 for rows, _ in parts)
        assert joined(parts) == [100 + i for i in range(size)]
        weights = np.concatenate([weights for _, weights in parts])
        assert set(weights) <= {0.0, 1.0} and weights.sum() == size
        lengths = np.reshape([rows.shape[0] for rows, _ in parts], [count, microbatches]).sum(axis=1)
        assert max(lengths) - min(lengths) <= 1  # as even as whole rows allow
        if size >= count * microbatches:
            assert (weights == 1).all()  # nothing is added


@pytest.mark.parametrize(("device", "place"), [("GPU", "/device:CPU:0"), ("CPU", "/device:CPU:1")])
def test_a_gpu_receives_only_its_own_rows(monkeypatch, device, place):
    context = types.SimpleNamespace(num_replicas_in_sync=2, replica_id_in_sync_group=1, strategy=None)
    monkeypatch.setattr(tf.distribute, "get_replica_context", lambda: context)
    monkeypatch.setattr(strategies, "has_gpus", lambda strategy: device == "GPU")
    with tf.Graph().as_default(), tf.device(f"/device:{device}:1"):
        batch = shards.Batch({"x": tf.zeros([4, 3])}, None)
        rows, _ = shards.take_shard(batch, shards.BatchLayout(is_padded=False))
        assert rows["x"].device == place and rows["x"].shape == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 3])
def test_shards_of_a_batch_of_a_static_size_make_up_the_batch(microbatches):
    data = tf.data.Dataset.range(10).batch(5, drop_remainder=True)
    read = shards_of(Source(data, mirrored(3), microbatches=microbatches), mirrored(3), microbatches)
    assert [joined(read()) for _ in range(2)] == [list(range(5)), list(range(5, 10))]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", mostly_wide([1, 2, 5]))
def test_nested_batches_with_ragged_and_string_entries_are_sharded(batch_size):
    words = tf.ragged.constant([[1], [2, 2], [], [4, 4, 4], [5], [6, 6]])
    structure = {"text": {"words": words, "name": tf.constant(list("abcdef"))}, "label": tf.range(6)}
    source = Source(tf.data.Dataset.from_tensor_slices(structure).batch(batch_size), mirrored(3))
    read = shards_of(source, mirrored(3))
    found = {"words": [], "name": [], "label": []}
    for _ in range(-(-6 // batch_size)):
        for rows, weights in read():
            keep = weights.numpy() > 0
            found["words"] += [row for row, k in zip(rows["text"]["words"].to_list(), keep, strict=True) if k]
            found["name"] += [row.decode() for row in rows["text"]["name"].numpy()[keep]]
            found["label"] += rows["label"].numpy()[keep].tolist()
    assert found == {"words": words.to_list(), "name": list("abcdef"), "label": list(range(6))}


def test_the_batch_size_is_an_int_if_it_is_known():
    sizes = []
    of_batch = tf.function(lambda x: sizes.append(shards.batch_size({"x": x})))
    of_batch.get_concrete_function(tf.TensorSpec([None, 2]))
    assert tf.is_tensor(sizes[0])
    assert shards.batch_size({"x": tf.zeros([3, 2])}) == 3
    assert int(shards.batch_size(tf.ragged.constant([[1], [2, 3]]))) == 2


@pytest.mark.slow
def test_replicas_take_as_many_rows_as_the_info_says():
    source = Source(numbers(20, 10), mirrored(3))
    assert [len(rows["x"]) for rows, _ in shards_of(source, mirrored(3))()] == list(source.info.replica_batch_sizes)


@pytest.mark.parametrize(("rows", "shards_given"), [(10, 3), (3, 4), (8, 2), (0, 2)])
def test_shard_bounds_cover_all_rows_evenly(rows, shards_given):
    bounds = [shards.shard_bounds(index, shards_given, rows) for index in range(shards_given)]
    assert [row for start, end in bounds for row in range(start, end)] == list(range(rows))
    lengths = [end - start for start, end in bounds]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("settings", [{"num_devices": 2}, {"num_devices": 1, "microbatches": 2}])
def test_a_ragged_entry_behind_a_dense_one_is_cut_where_the_size_is_known(settings):
    def model_fn():
        table = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)], name="net")

        def loss_fn(batch, training):
            return {"loss": table(tf.cast(tf.reduce_sum(batch["tokens"], 1, keepdims=True), tf.float32))[:, 0]}

        return distloop.ModelSpec(table, keras.optimizers.SGD(0.1), loss_fn)

    rows = {"label": tf.range(8), "tokens": tf.ragged.constant([[1] * n for n in range(8)])}
    data = tf.data.Dataset.from_tensor_slices(rows).batch(4, drop_remainder=True)
    losses = []
    for given in (settings, {"num_devices": 1}):
        trainer = distloop.Trainer(model_fn, distloop.Config(device="cpu", console="quiet", **given))
        losses.append((trainer.fit(data, steps=2)["loss"], trainer.evaluate(data)["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
