"""Where it runs: virtual CPUs, GPUs that are only claimed, seeds, and the strategies over them."""

import random
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from distloop import cluster
from distloop.config import Config

GPUS = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(2)]


def config(**settings):
    return Config(**{"device": "cpu", **settings})


@pytest.fixture
def claimed_gpus(monkeypatch):
    """Lets TensorFlow claim two GPUs, and notes what is done to them."""
    list_physical_devices = tf.config.list_physical_devices
    done = types.SimpleNamespace(grown=[], visible=[])
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: GPUS if kind == "GPU" else list_physical_devices(kind)
    )
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, on: done.grown.append((gpu.name, on)))
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda devices, kind: done.visible.append((devices, kind)))
    return done


@pytest.fixture
def started():
    """Starts TensorFlow, so that no virtual CPU can be added."""
    return tf.config.list_logical_devices("CPU")


def draws():
    """Draws from every generator that a seed should reach."""
    return [
        random.random(),
        float(np.random.rand()),
        float(tf.random.uniform([])),
        float(keras.random.uniform([])),
    ]


def test_prepare_may_be_called_again(started):
    for _ in range(2):
        cluster.prepare(config(num_devices=4))
    assert len(tf.config.list_logical_devices("CPU")) == 4


def test_prepare_for_fewer_devices_leaves_those_that_are_there(started):
    cluster.prepare(config(num_devices=1))
    cluster.prepare(config(num_devices=0))
    assert len(tf.config.list_logical_devices("CPU")) == 4


def test_the_seed_reaches_python_numpy_tensorflow_and_keras():
    cluster.prepare(config(seed=7))
    first = draws()
    cluster.prepare(config(seed=7))
    assert draws() == first
    cluster.prepare(config(seed=8))
    assert all(one != other for one, other in zip(draws(), first, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_operations_are_asked_for_only_if_set(monkeypatch, deterministic):
    asked = []
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: asked.append(True))
    cluster.prepare(config(deterministic=deterministic))
    assert bool(asked) == deterministic


@pytest.mark.slow
def test_virtual_cpus_after_the_start_are_refused_in_one_sentence():
    program = """
import tensorflow as tf
import distloop
tf.constant(1.0)
try:
    distloop.prepare(distloop.Config(device="cpu", num_devices=3))
except ValueError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == (
        "num_devices=3 virtual CPUs were asked for, but TensorFlow has already started with fewer: call "
        "distloop.prepare(config) before the first tensor, dataset or model.\n"
    )


def test_prepare_names_the_devices_that_come_too_late(started):
    with pytest.raises(ValueError, match="num_devices=9 virtual CPUs .* already started .*: call distloop.prepare"):
        cluster.prepare(config(num_devices=9))


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="device=gpu was asked for, but TensorFlow sees none .*: use device=auto"):
        cluster.prepare(config(device="gpu"))


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match="the 'jax' backend; .*: set KERAS_BACKEND=tensorflow"):
        cluster.prepare(config())


def test_a_keras_distribution_is_refused(monkeypatch):
    monkeypatch.setattr(keras.distribution, "distribution", object)
    with pytest.raises(ValueError, match=r"keras.distribution is set, .*: call keras.*set_distribution\(None"):
        cluster.prepare(config())


def test_gpus_are_hidden_from_a_run_on_cpus(claimed_gpus):
    cluster.prepare(config(device="cpu"))
    assert claimed_gpus.visible == [([], "GPU")]
    assert not claimed_gpus.grown


@pytest.mark.parametrize("device", ["auto", "gpu"])
def test_gpus_take_memory_as_they_need_it(claimed_gpus, device):
    cluster.prepare(config(device=device))
    assert claimed_gpus.grown == [(gpu.name, True) for gpu in GPUS]
    assert not claimed_gpus.visible


def test_gpus_that_have_started_are_warned_about_when_they_cannot_be_hidden(claimed_gpus, monkeypatch, caplog):
    def refuse(devices, kind):
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config, "set_visible_devices", refuse)
    with caplog.at_level("WARNING", logger="absl"):
        cluster.prepare(config(device="cpu"))
    assert "device=cpu, but TensorFlow has already started with GPUs" in caplog.text


@pytest.mark.parametrize("is_growing", [False, True])
def test_gpus_that_have_started_are_warned_about_unless_their_memory_grows(
    claimed_gpus, monkeypatch, caplog, is_growing
):
    def refuse(gpu, on):
        raise RuntimeError("Physical devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", refuse)
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: is_growing)
    with caplog.at_level("WARNING", logger="absl"):
        cluster.prepare(config(device="gpu"))
    assert ("holds all its memory: call distloop.prepare first" in caplog.text) != is_growing


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_mirrored_has_one_replica_a_device(count):
    strategy = cluster.make_strategy(config(strategy="mirrored", num_devices=count))
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    assert strategy.num_replicas_in_sync == count


def test_no_number_means_all_devices():
    assert cluster.make_strategy(config(strategy="mirrored")).num_replicas_in_sync == 4


def test_auto_is_mirrored_over_several_devices_and_none_on_one():
    assert cluster.make_strategy(config(num_devices=2)).num_replicas_in_sync == 2
    assert cluster.make_strategy(config(num_devices=1)) is tf.distribute.get_strategy()


def test_none_is_tensorflows_default_strategy():
    assert cluster.make_strategy(config(strategy="none")) is tf.distribute.get_strategy()


def test_a_strategy_over_the_same_devices_is_made_once():
    first, second = (cluster.make_strategy(config(strategy="mirrored", num_devices=2)) for _ in range(2))
    assert first is second


def test_strategies_of_different_sizes_work_side_by_side():
    def total():
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([3]))

    for count in (2, 4, 3, 2):
        strategy = cluster.make_strategy(config(strategy="mirrored", num_devices=count))
        results = strategy.experimental_local_results(tf.function(lambda s=strategy: s.run(total))())
        np.testing.assert_array_equal(results[-1], [count] * 3)


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match="num_devices=9 of device=cpu were asked for, but there are 4: ask for"):
        cluster.make_strategy(config(num_devices=9))


def test_a_strategy_object_is_taken_as_it_is():
    for strategy in (tf.distribute.OneDeviceStrategy("/cpu:1"), tf.distribute.get_strategy()):
        assert cluster.check_strategy(strategy) is strategy


@pytest.mark.parametrize("given", ["mirrored", tf.distribute.MirroredStrategy, 2])
def test_what_is_no_strategy_object_is_refused(given):
    with pytest.raises(ValueError, match=r"is not a tf.distribute.Strategy object; name one in Config\(strategy=...\)"):
        cluster.check_strategy(given)


def test_an_asynchronous_strategy_is_refused():
    strategy = object.__new__(tf.distribute.ParameterServerStrategy)  # a real one needs a cluster
    with pytest.raises(ValueError, match="ParameterServerStrategy .*: use a synchronous strategy"):
        cluster.check_strategy(strategy)


@pytest.mark.parametrize(
    ("settings", "description"),
    [
        ({"strategy": "none"}, "1 replica (CPU:0)"),
        ({"strategy": "mirrored", "num_devices": 1}, "1 replica (CPU:0)"),
        ({"strategy": "mirrored", "num_devices": 2}, "2 replicas (CPU:0, CPU:1)"),
    ],
)
def test_a_strategy_is_described_by_its_replicas_and_devices(settings, description):
    assert cluster.describe(cluster.make_strategy(config(**settings))) == description


def test_a_strategy_that_the_user_made_is_described_too():
    assert cluster.describe(tf.distribute.OneDeviceStrategy("/cpu:1")) == "1 replica (CPU:1)"
