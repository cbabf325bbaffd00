"""Law `shares`: replicas that split a batch unequally train, evaluate and predict as those with equal parts."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data import shards
from distloop.data.info import inspect
from distloop.data.source import Source
from distloop.distributed import strategies
from distloop.distributed.devices import Replicas
from tests.problems import (
    assert_close,
    assert_equal,
    batches,
    classification,
    classifier,
    cross_entropy,
    mirrored,
    mostly_wide,
    numbers,
    on,
    refused,
    rows_of,
    train,
    weights,
)

SHARES = ["3,1", "5,2,1", "1,7", "2,3,2,3"]


def adam():
    return keras.optimizers.Adam(0.01)


# 67 rows in batches of 16: the last one has 3.
CASES = {
    "all together": dict(is_weighted=True, l2=0.1, clip_norm=0.1, average_decay=0.9, microbatches=2),
    "smaller than the replicas": dict(size=2, rows=5),
    "slots on one replica each": dict(shard_optimizer=True, average_decay=0.9, optimizer=adam),
    "synchronized BatchNorm": dict(batch_norm="synchronized", executor="parallel", optimizer=adam),
    "batches of one size": dict(rows=64, microbatches=3),
    "skipping": dict(on_nonfinite="skip", clip_value=0.01),
    "XLA": dict(jit_compile="pass"),
    "own steps": dict(eager=True),
}


def weights_and_averages(case, replicas, **shares):
    settings = dict(CASES[case])
    data = batches(settings.pop("size", 16), settings.pop("rows", 67), drop_remainder=settings.get("microbatches") == 3)
    of_model = {k: settings.pop(k) for k in ("is_weighted", "l2", "batch_norm", "optimizer") if k in settings}
    trainer = train(classifier(**of_model), on(replicas, **settings, **shares), data)
    with trainer.state.averaged():
        averages = weights(trainer)
    return weights(trainer) | {f"average/{path}": value for path, value in averages.items()}


@pytest.mark.slow
@pytest.mark.parametrize("shares", mostly_wide(SHARES, "3,1", "5,2,1"))
@pytest.mark.parametrize("case", mostly_wide(CASES, "all together", "slots on one replica each"))
def test_replicas_of_unequal_shares_train_to_the_same_weights(case, shares):
    expected = weights_and_averages(case, 1)
    assert_close(weights_and_averages(case, len(shares.split(",")), device_shares=shares), expected)


@pytest.mark.slow
def test_a_batch_smaller_than_the_shares_trains_to_the_same_weights():
    expected = weights_and_averages("smaller than the replicas", 1)
    assert_close(weights_and_averages("smaller than the replicas", 3, device_shares=[50, 20, 1]), expected)


def tables():
    layers = [keras.Input((3,), dtype="int64"), keras.layers.Embedding(40, 8, name="words"), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(4, name="logits")], name="net")

    def loss_fn(batch, training):
        everyone, place = distloop.gather_rows(model(batch["x"], training=training))  # [B, 4], [b]
        pairs = tf.matmul(tf.gather(everyone, place), everyone, transpose_b=True)  # [b, B]
        return {"loss": cross_entropy(batch["label"], tf.gather(everyone, place)) + tf.reduce_mean(pairs, -1)}

    return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)


def table_rows():
    return distloop.make_dataset({"x": np.arange(67 * 3).reshape(67, 3) % 40, "label": np.arange(67) % 4}, 16)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [[3, 1], [5, 2, 1]], ids=str)
def test_tables_and_gathered_rows_do_not_depend_on_shares(shares):
    found, expected = (
        weights(train(tables, config, table_rows())) for config in (on(len(shares), device_shares=shares), on(1))
    )
    assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("size", mostly_wide([5, 1, 16]))
def test_evaluations_and_predictions_do_not_depend_on_shares(size):
    trainers = [
        distloop.Trainer(classifier(is_weighted=True, metrics=True), config)
        for config in (on(3, device_shares=[5, 2, 1]), on(1))
    ]
    found, expected = (trainer.evaluate(batches(size)) for trainer in trainers)
    assert found == pytest.approx(expected, rel=1e-6)
    found, expected = (trainer.predict(batches(size)) for trainer in trainers)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)  # in the order of the data
    found, expected = (trainer.predict(classification(67)) for trainer in trainers)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_run_of_unequal_shares_resumes_bit_for_bit(tmp_path):
    def run(path, *steps):
        for until in steps:
            settings = on(2, device_shares=[3, 1], workdir=str(path), average_decay=0.9, log_every=4)
            trainer = train(classifier(dropout=0.5), settings, batches(shuffle=True), until)
        return weights(trainer), rows_of(path)

    (found, rows), (expected, expected_rows) = run(tmp_path / "a", 7, 12), run(tmp_path / "b", 12)
    assert_equal(found, expected)
    assert [row for row in rows if row["step"] != 7][-1]["loss"] == expected_rows[-1]["loss"]


@pytest.mark.slow
def test_a_run_goes_on_with_other_shares_and_another_number_of_replicas(tmp_path):
    for steps, shares in [(4, [3, 1]), (8, [1, 3]), (12, [5, 2, 1]), (16, [])]:
        config = on(len(shares) or 2, device_shares=shares, workdir=str(tmp_path), average_decay=0.9)
        trainer = train(classifier(l2=0.1), config, batches(shuffle=True), steps)
    expected = train(classifier(l2=0.1), on(1, average_decay=0.9), batches(shuffle=True), 16)
    assert_close(weights(trainer), weights(expected))


@pytest.mark.slow
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_the_step_of_unequal_shares_is_traced_once(drop_remainder):
    traces = []
    config = on(3, device_shares=[5, 2, 1], log_every=3)
    train(classifier(on_trace=traces.append), config, batches(drop_remainder=drop_remainder), 17)
    assert traces.count(True) == 3  # once for each replica's part of the graph


@pytest.mark.slow
def test_a_shard_of_a_static_size_has_it_while_it_is_traced():
    data = tf.data.Dataset.range(16).batch(16, drop_remainder=True)
    source = Source(data, mirrored(3), replicas=Replicas(3, 0, (5, 2, 1)))
    shapes = {}

    def replica_fn(batch):
        rows, weights = shards.take_shard(batch, source.layout)
        shapes[int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))] = rows.shape[0]
        assert weights is None

    tf.function(lambda: mirrored(3).run(replica_fn, args=(shards.next_batch(source.iterator(), source.layout),)))()
    assert shapes == {0: 10, 1: 4, 2: 2} and source.info.replica_batch_sizes == (10, 4, 2)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("shares", [[3, 1], [5, 2, 1], [2, 3, 2, 3], [1000, 1, 1], [1, 1]], ids=str)
def test_each_replica_gets_its_share_and_a_row_for_each_microbatch(shares, microbatches):
    least, count = len(shares) * microbatches, len(shares)
    for rows in [0, *range(least, 70), 1000]:
        for size in (rows, tf.constant(rows), tf.constant(rows, tf.int64)):
            bounds = [shards.shard_bounds(i, count, size, shares, least) for i in range(count)]
            bounds = [tuple(int(bound) for bound in each) for each in bounds]
            assert [row for start, end in bounds for row in range(start, end)] == list(range(rows))
            lengths = np.array([end - start for start, end in bounds])
            assert not rows or lengths.min() >= microbatches
            wanted = rows * np.array(shares) / sum(shares)
            assert np.abs(lengths - wanted).max() < 1 + microbatches * count or rows == 0
        if rows == 1000 and wanted.min() >= microbatches:
            assert np.abs(lengths - wanted).max() < 1
        if len(set(shares)) == 1:
            assert bounds == [shards.shard_bounds(i, count, rows) for i in range(count)]


def test_a_shard_for_each_worker_is_refused():
    shares = Replicas(2, 0, (3, 1))
    call = lambda: inspect(numbers(8, 4), mirrored(2), replicas=shares, is_sharded=True)  # noqa: E731
    refused(call, "device_shares=[3, 1] was given with a shard for each worker", "give the plain dataset")


@pytest.mark.parametrize("size", [5, 16, 33])
def test_no_replica_takes_more_rows_than_collectives_are_told(size, monkeypatch):
    monkeypatch.setattr(strategies, "uses_collectives", lambda strategy: True)
    for shares in [(3, 1), (5, 2, 1), (2, 3, 2, 3), (1000, 1, 1)]:
        data, count = numbers(100, size), len(shares)
        layout = inspect(data, mirrored(count), replicas=Replicas(count, 0, shares)).layout
        for rows in range(1, size + 1):
            padded = int(tf.shape(shards.pad(tf.range(rows), layout.min_rows).rows)[0])
            bounds = [layout.bounds(i, count, padded) for i in range(count)]
            assert max(min(rows, end) - min(rows, start) for start, end in bounds) <= layout.max_replica_rows
