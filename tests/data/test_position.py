"""Positions in data that has changed since a checkpoint noted them."""

import contextlib
import io

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.columns import content_of
from distloop.data.order import convert_batches, facts_of
from distloop.data.source import Source
from tests import forked
from tests.data.python_batches import Stateful, taken
from tests.problems import assert_equal, classification, classifier, everything, on, refused

ONE = tf.distribute.get_strategy()


def position(batches, **facts):
    return {"batches": batches, "skipped": [], **facts_of(**{"num_batches": None, "batch_size": None, **facts})}


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        (position(4, batch_size=4), position(0, batch_size=8), 2),
        (position(5, batch_size=4), position(0, batch_size=8), 2),  # rounded down: four examples are read again
        (position(3, batch_size=8), position(0, batch_size=4), 6),
        (position(13, batch_size=4, num_batches=8), position(0, batch_size=8, num_batches=4), 4 + 2),
        (position(25, num_batches=10), position(0, num_batches=12), 2 * 12 + 5),
        (position(29, num_batches=10), position(0, num_batches=6), 3 * 6),  # behind the end of a shorter epoch
        (position(4, batch_size=4), position(0), 4),  # unknown
        (position(4, batch_size=4, num_batches=3), position(0, batch_size=4), 4),
        (position(4, batch_size=4, num_workers=2), position(0, batch_size=2, num_workers=4), 4),  # each worker's batch
        (position(0, batch_size=4), position(0, batch_size=8), 0),
    ],
)
def test_a_position_is_after_as_many_examples_of_the_same_epoch(then, now, expected):
    assert convert_batches(then, now)["batches"] == expected


def test_an_older_versions_position_stays_and_fits_its_kind_of_data():
    old = {"batches": 4, "skipped": [1]}
    assert convert_batches(old, position(0, batch_size=8, num_batches=3)) is old
    arrays = Source(np.arange(32), ONE, batch_size=4)
    arrays.batches_taken = 3
    dataset = Source(tf.data.Dataset.range(32).batch(4), ONE)
    refused(lambda: dataset.go_to(arrays.position()), "data by number", "begin another run")


def rows_of(source, count):
    return [batch.numpy().ravel().tolist() for batch, _ in zip(source.new_iterator(), range(count), strict=False)]


def going_on(data, other, batches):
    """Returns the source of other data at the place that so many batches of some data have."""
    first, again = (Source(given, ONE, batch_size=4, shuffle_seed=1) for given in (data, other))
    first.batches_taken = batches
    again.go_to(first.position())
    return again


def test_batches_of_another_size_go_on_at_the_same_rows_and_are_named(caplog):
    again = going_on(tf.data.Dataset.range(32).batch(4), tf.data.Dataset.range(32).batch(8), 4)
    assert next(again.iterator()).numpy().tolist() == list(range(16, 24))
    assert "batches of 4 examples and 8 batches an epoch" in caplog.text
    assert "batches of 8 examples and 4 batches an epoch: going on at batch 2 in place of 4" in caplog.text


def test_an_iterators_state_is_not_followed_in_other_batches():
    source = Source(Stateful(), ONE)  # 5 batches of 2
    source.go_to({**position(3, batch_size=4), "state": {"pass": 0, "iterator": {"place": 3}}})
    assert source.batches_taken == 6 and taken(source, 1) == [2]


@pytest.mark.parametrize(
    "data",
    [
        lambda: tf.data.Dataset.range(32).shuffle(32).batch(4),
        lambda: tf.data.Dataset.range(32).batch(4).repeat(),
        lambda: tf.data.Dataset.range(32).filter(lambda x: x > 1).batch(4),
        lambda: lambda: (np.random.default_rng().normal(size=4) for _ in range(8)),
        lambda: np.arange(32),
    ],
)
def test_the_same_data_raises_no_alarm(data, caplog):
    assert going_on(data(), data(), 3).batches_taken == 3 and "checkpoint's" not in caplog.text


@pytest.mark.parametrize("kind", [np.asarray, list])
def test_other_values_in_memory_are_said_and_the_order_goes_on(kind, caplog):
    data, other = (
        np.asarray(values) if kind is np.asarray else distloop.make_dataset(list(values), 4, shuffle=True)
        for values in (range(32), range(1, 33))
    )
    again = going_on(data, other, 3)
    assert "other values than the checkpoint's" in caplog.text
    expected = rows_of(Source(data, ONE, batch_size=4, shuffle_seed=1), 4)[3]
    assert next(again.iterator()).numpy().tolist() == [row + 1 for row in expected]


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, bool, np.float16, ">f4", str])
def test_a_digest_notices_one_value_and_an_exchange_of_rows(dtype):
    array = np.arange(24).reshape(8, 3).astype(dtype)
    digest = content_of([array])
    assert content_of([array.copy()]) == content_of([np.asfortranarray(array)]) == digest
    if np.dtype(dtype).isnative:
        assert content_of([tf.constant(array)]) == digest
    changed = array.copy()
    changed[5, 1] = changed[0, 0]
    assert content_of([changed]) != digest
    assert dtype is bool or content_of([array[::-1]]) != digest
    assert content_of([array[:4]]) != digest and content_of([array.reshape(4, 6)]) != digest


def test_of_a_large_array_some_rows_are_digested():
    array = np.zeros([20_000, 1000], np.float32)  # 80 MB
    digest = content_of([array])
    array[-1, -1] = 1
    assert content_of([array]) != digest


@pytest.mark.parametrize("is_list", [False, True])
def test_arrays_changed_between_two_fits_train_on_with_their_new_values(is_list, caplog):
    rows = classification(40)
    data = {**rows, "label": rows["label"].tolist()} if is_list else rows

    def trained(change):
        trainer = distloop.Trainer(classifier(), on(1, batch_size=8, seed=3, console="quiet"))
        trainer.fit(data, steps=4)
        data["label"][7] = (data["label"][7] + change) % 4
        trainer.fit(data, steps=10)
        return everything(trainer)

    once = trained(0)
    assert not caplog.text
    changed = trained(1)
    assert caplog.text.count("other values than at the last call of fit") == 1
    assert any(not np.array_equal(changed[name], value) for name, value in once.items())


def test_arrays_changed_in_place_keep_their_position_in_the_order():
    rows = np.arange(40)
    source = Source(rows, ONE, batch_size=8, shuffle_seed=3)
    expected = rows_of(source, 7)
    source.batches_taken = 6
    rows += 100
    source.refresh(rows)
    assert source.batches_taken == 6
    assert next(source.iterator()).numpy().tolist() == [row + 100 for row in expected[6]]


def shard_by_number(context):
    """Data by number of a worker, whose shard has as many batches as the others' and fewer rows."""
    rows = {name: value[: 40 - context.input_pipeline_id] for name, value in classification(40).items()}
    rows["x"] = rows["x"] + context.input_pipeline_id
    return distloop.make_dataset(rows, 8, shuffle=True, seed=context.input_pipeline_id)


def shard_in_smaller_batches(context):
    """A dataset of a worker, whose batches are half as large as the chief's."""
    size = 8 // (1 + context.input_pipeline_id)
    return tf.data.Dataset.from_tensor_slices(classification(5 * size)).batch(size)


def poisoned(context):
    """Data by number of a worker, whose last row is not finite."""
    rows = classification(40 - context.input_pipeline_id)
    rows["x"][-1] = np.nan
    return distloop.make_dataset(rows, 8)


def fit_on_shards(workdir, shard, steps, **settings):
    """Trains until a step; returns the weights and how many batches were taken."""
    settings = {"workdir": str(workdir), "checkpoint_every": 3, "console": "quiet", **settings}
    trainer = distloop.Trainer(classifier(), on(1, **settings))
    trainer.fit(shard, steps=steps)
    return everything(trainer), trainer._train_source.batches_taken


def train_on_shards(path):
    """Trains in one go and with stops, and goes back to a checkpoint; a function of `forked`."""
    results = []
    with contextlib.redirect_stderr(io.StringIO()) as warnings:
        for shard in (shard_by_number, shard_in_smaller_batches):
            once = fit_on_shards(f"{path}/{shard.__name__}_once", shard, 12)
            fit_on_shards(f"{path}/{shard.__name__}", shard, 7)
            results.append((fit_on_shards(f"{path}/{shard.__name__}", shard, 12), once))
    rolled_back = fit_on_shards(f"{path}/poisoned", poisoned, 12, on_divergence="rollback")
    trainer = distloop.Trainer(classifier(), on(1, workdir=f"{path}/history"))
    refused(lambda: trainer.fit(poisoned, steps=1, actions=[distloop.ExampleHistory()]), "whose rows have no numbers")
    return results, warnings.getvalue(), rolled_back[1], fit_on_shards(f"{path}/moved", shard_by_number, 6)[1]


@pytest.mark.slow
def test_workers_go_on_in_shards_that_have_other_rows(tmp_path):
    fit_on_shards(tmp_path / "moved", shard_by_number, 3)
    for results, warnings, *batches_taken in forked.run_in_workers(train_on_shards, 2, str(tmp_path)):
        for (found, position), (expected, position_of_one_run) in results:
            assert_equal(found, expected)
            assert position == position_of_one_run
        assert "checkpoint" not in warnings and batches_taken == [14, 6]
    assert fit_on_shards(tmp_path / "moved", shard_by_number, 9)[1] == 9
