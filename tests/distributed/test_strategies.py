"""Strategies: which one a Config means, and which executor runs its steps."""

import dataclasses
import logging
import operator
import socket
import threading
import unittest.mock

import numpy as np
import pytest
import tensorflow as tf

from distloop.distributed import strategies
from distloop.distributed.strategies import TreeSum, tree_sum
from distloop.settings.config import Config
from distloop.workers.environment import Cluster
from tests import forked


def make(**settings):
    return strategies.make_strategy(Config(device="cpu", **settings))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_mirrored_has_one_replica_a_device_and_is_made_once(count):
    strategy = make(strategy="mirrored", num_devices=count)
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    assert strategy.num_replicas_in_sync == count
    assert make(strategy="mirrored", num_devices=count) is strategy


def test_auto_is_mirrored_over_several_devices_and_none_on_one():
    assert make(num_devices=2).num_replicas_in_sync == 2
    assert make(strategy="mirrored").num_replicas_in_sync == 4  # num_devices=0: all
    assert make(num_devices=1) is make(strategy="none") is tf.distribute.get_strategy()


def totals(counts):
    """Returns the sum of ones over each of so many devices, added by as many strategies, one after the other."""

    def total():
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([3]))

    found = []
    for count in counts:
        strategy = make(strategy="mirrored", num_devices=count)
        results = strategy.experimental_local_results(tf.function(lambda s=strategy: s.run(total))())
        found.append(results[-1].numpy().tolist())
    return found


def totals_by_collectives(counts):
    """As GPUs add; TensorFlow would find the devices of one strategy in the group of another."""
    with unittest.mock.patch.object(strategies, "_choose_reduction", lambda *_: None):
        return totals(counts), strategies.describe_reduction(
            strategies._make_mirrored(("CPU:0", "CPU:1"), False, False)
        )


def test_strategies_of_different_sizes_work_side_by_side():
    assert totals([2, 4, 3, 2]) == [[n] * 3 for n in (2, 4, 3, 2)]


@pytest.mark.slow
def test_collectives_of_different_sizes_work_side_by_side():
    """In a process of its own, as a collective that fails ends all others."""
    found, reduction = forked.run_on_devices(totals_by_collectives, 4, [2, 4, 3, 2])
    assert reduction == "CollectiveAllReduce (RING)"
    assert found == [[n] * 3 for n in (2, 4, 3, 2)]


SERIAL, PARALLEL = strategies.SERIAL_EXECUTOR, strategies.PARALLEL_EXECUTOR


@pytest.mark.parametrize(
    "replicas, setting, step_flops, expected",
    [
        (1, "auto", 1e6, SERIAL),
        (1, "auto", 1e9, PARALLEL),
        (1, "auto", None, PARALLEL),
        (1, "serial", 1e9, SERIAL),
        (1, "parallel", 1e6, PARALLEL),
        (2, "auto", 1e6, PARALLEL),
    ],
)
def test_small_steps_of_one_replica_use_the_serial_executor(replicas, setting, step_flops, expected):
    assert strategies.choose_executor(make(num_devices=replicas), setting, step_flops) == expected


def test_a_small_gpu_step_is_parallel_and_a_serial_executor_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="executor=serial was given with 2 replicas.*: use executor=auto."):
        strategies.choose_executor(make(num_devices=2), "serial", 1e6)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    assert strategies.choose_executor(tf.distribute.get_strategy(), "auto", 1e6) == PARALLEL


def test_multi_worker_without_a_cluster_or_too_many_devices_are_refused():
    with pytest.raises(ValueError, match="names no other workers: start .* by srun with several tasks"):
        make(strategy="multi_worker")
    with pytest.raises(ValueError, match="num_devices=9 of device=cpu were asked for, but there are 4: ask for"):
        make(num_devices=9)


@pytest.mark.parametrize(("split", "count"), [(None, 1), (["half", "half"], 2)])
def test_more_gpus_than_a_worker_has_are_refused_before_it_joins(split, count, monkeypatch):
    for name in ("list_physical_devices", "get_visible_devices"):
        monkeypatch.setattr(tf.config, name, lambda kind: [kind])
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: split)
    config = Config(strategy="multi_worker", num_devices=3)
    with pytest.raises(ValueError, match=f"num_devices=3 of device=gpu were asked for, but there are {count}: ask for"):
        strategies._join(Cluster(("localhost:1", "localhost:2"), 1), config, None)


def test_a_strategy_object_is_returned_unchanged():
    for strategy in (tf.distribute.OneDeviceStrategy("/cpu:1"), tf.distribute.get_strategy()):
        assert strategies.check_strategy(strategy) is strategy


NO_STRATEGY = r"is not a tf.distribute.Strategy object; name one in Config\(strategy=...\)"


@pytest.mark.parametrize(
    ("make_strategy", "description"),
    [
        (lambda: make(strategy="none"), "1 replica (CPU:0)"),
        (lambda: make(strategy="mirrored", num_devices=1), "1 replica (CPU:0)"),
        (lambda: make(strategy="mirrored", num_devices=2), "2 replicas (CPU:0, CPU:1)"),
        (lambda: tf.distribute.OneDeviceStrategy("/cpu:1"), "1 replica (CPU:1)"),  # one that the user created
    ],
)
def test_a_strategy_is_described_by_its_replicas_and_devices(make_strategy, description):
    assert strategies.describe(make_strategy()) == description


def test_tensorflow_does_not_warn_that_eager_steps_are_slow():
    logger, text = tf.get_logger(), "Using MirroredStrategy eagerly has significant overhead currently."
    for _ in range(2):
        strategies.prepare_eager(tf.distribute.get_strategy(), True)
    records = [logging.makeLogRecord({"msg": msg, "levelno": logging.WARNING}) for msg in (text, "Another warning.")]
    logged = [logger.filter(record) for record in records]
    logger.removeFilter(strategies._is_not_about_eager)
    assert [bool(is_logged) for is_logged in logged] == [False, True]
    assert logger.filter(records[0])  # it was added once


def test_workers_join_once_the_server_of_the_chief_listens(monkeypatch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        cluster = Cluster((f"127.0.0.1:{server.getsockname()[1]}", "127.0.0.1:9"), 1)
        timer = threading.Timer(0.2, server.listen)
        timer.start()
        strategies._wait_for_chief(cluster)
        assert timer.finished.is_set()
        timer.join()
        strategies._wait_for_chief(dataclasses.replace(cluster, index=0))  # the chief waits for nobody
    monkeypatch.setattr(strategies, "_SERVER_SECS", 0.1)
    strategies._wait_for_chief(cluster)  # nobody listens: TensorFlow tries, and says so


@pytest.mark.parametrize("count", [1, 2, 4, 8, 32])
def test_a_sum_of_sums_has_the_same_bits_whatever_the_cut(count):
    values = np.random.default_rng(0).normal(size=(count, 1000)).astype(np.float32)
    whole = tree_sum(values)
    for parts in (2**i for i in range(count.bit_length())):
        assert tree_sum([tree_sum(part) for part in np.split(values, parts)]).tobytes() == whole.tobytes()
    if count == 32:  # the law would hold for any sum if rounding did not show
        assert np.sum(values, 0).tobytes() != whole.tobytes()


def test_values_are_added_in_pairs_as_soon_as_they_are_there():
    tree = TreeSum[str](lambda a, b: f"({a}+{b})")
    assert [tree.append(name) for name in "abcd"] == ["a", "(a+b)", "c", "((a+b)+(c+d))"]
    assert tree.total() == "((a+b)+(c+d))"
    tree, most = TreeSum[int](operator.add), 0
    for _ in range(64):
        tree.append(1)
        most = max(most, len(tree._partial))
    assert (tree.total(), most) == (64, 6)
