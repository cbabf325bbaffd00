"""Devices and the process: virtual CPUs, memory of GPUs (stubs), threads and seeds."""

import contextlib
import os
import random
import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from distloop.distributed import devices
from distloop.settings.config import Config
from distloop.workers import environment
from tests import forked

GPUS = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(2)]
TOO_LATE = (
    "num_devices=9 virtual CPUs were asked for, but TensorFlow has already started with fewer: call "
    "distloop.prepare(config) before the first tensor, dataset or model, such as one for from_keras(model), which "
    "also takes the function that makes it, from_keras(make_model); in a notebook, restart the kernel first."
)


@pytest.fixture
def claimed_gpus(monkeypatch):
    """Makes TensorFlow report two GPUs, and records how they are configured."""
    listed, of_device = tf.config.list_physical_devices, tf.config.get_logical_device_configuration
    done = types.SimpleNamespace(grown=[], visible=[])
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: GPUS if kind == "GPU" else listed(kind))
    monkeypatch.setattr(
        tf.config, "get_logical_device_configuration", lambda device: None if device in GPUS else of_device(device)
    )
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, on: done.grown.append((gpu.name, on)))
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda devices, kind: done.visible.append((devices, kind)))
    return done


@pytest.fixture
def started():
    """Starts TensorFlow, so that no virtual CPU can be added."""
    return tf.config.list_logical_devices("CPU")


def draws():
    """Returns a draw from every generator that a seed should set."""
    return [random.random(), *map(float, (np.random.rand(), tf.random.uniform([]), keras.random.uniform([])))]


def test_preparing_again_or_for_fewer_devices_keeps_the_existing_ones(started):
    for count in (4, 4, 1, 0):
        devices.prepare_process(Config(device="cpu", num_devices=count))
        assert len(tf.config.list_logical_devices("CPU")) == 4


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_devices": 9}, f"^{re.escape(TOO_LATE)}$"),
        ({"intra_op_threads": 97}, "intra_op_threads=97 was given, but TensorFlow has already started"),
        ({"device": "gpu"}, "device=gpu was asked for, but TensorFlow sees none .*: use device=auto"),
    ],
)
def test_a_process_that_cannot_be_prepared_is_refused(settings, sentence, started):
    with pytest.raises(ValueError, match=sentence):
        devices.prepare_process(Config(**{"device": "cpu", **settings}))


@contextlib.contextmanager
def functions_that_run_eagerly():
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


@pytest.mark.parametrize(
    ("switch", "sentence"),
    [
        (functions_that_run_eagerly, r"run_functions_eagerly\(True\) was called, .* set Config\(eager=True\)"),
        (
            lambda: keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]).scope(),
            r"keras.distribution is set, .*: call keras.*set_distribution\(None",
        ),
    ],
)
def test_a_switch_under_which_nothing_would_train_as_it_should_is_refused(switch, sentence, started):
    with switch(), pytest.raises(ValueError, match=sentence):
        devices.prepare_process(Config(device="cpu"))
    devices.prepare_process(Config(device="cpu"))


def test_another_backend_of_keras_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")  # each other one needs a package that is not here
    with pytest.raises(ValueError, match="the 'jax' backend; .*: set KERAS_BACKEND=tensorflow"):
        devices.prepare_process(Config(device="cpu"))


def test_the_seed_reaches_python_numpy_tensorflow_and_keras():
    devices.prepare_process(Config(device="cpu", seed=7))
    first = draws()
    devices.prepare_process(Config(device="cpu", seed=7))
    assert draws() == first
    devices.prepare_process(Config(device="cpu", seed=8))
    assert all(one != other for one, other in zip(draws(), first, strict=True))


@pytest.mark.parametrize(
    ("device", "visible", "grown"),
    [("cpu", [([], "GPU")], []), ("auto", [], GPUS), ("gpu", [], GPUS)],
)
def test_gpus_are_hidden_from_cpu_runs_and_else_take_memory_as_needed(device, visible, grown, claimed_gpus):
    devices.prepare_process(Config(device=device))
    assert claimed_gpus.visible == visible and claimed_gpus.grown == [(gpu.name, True) for gpu in grown]


def test_parts_of_a_gpu_keep_the_memory_that_they_were_given(claimed_gpus, monkeypatch):
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: [gpu] * 2 * (gpu is GPUS[0]))
    devices.prepare_process(Config(device="gpu"))
    assert claimed_gpus.grown == [(gpu.name, True) for gpu in GPUS[1:]]


def test_the_first_gpu_is_split_if_there_is_one(request, monkeypatch):
    with pytest.raises(ValueError, match="4 logical GPUs were asked for, but TensorFlow sees no GPU here to split"):
        devices.split_first_gpu(4, 1024)
    claimed_gpus, made = request.getfixturevalue("claimed_gpus"), []
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", lambda gpu, parts: made.append((gpu, parts)))
    devices.split_first_gpu(2, 1024)
    assert claimed_gpus.visible == [(GPUS[:1], "GPU")]
    assert made == [(GPUS[0], [tf.config.LogicalDeviceConfiguration(memory_limit=1024)] * 2)]


def refuse(*_):
    raise RuntimeError("Physical devices cannot be modified after being initialized")


def test_started_gpus_that_cannot_be_hidden_are_warned_about(claimed_gpus, monkeypatch, caplog):
    monkeypatch.setattr(tf.config, "set_visible_devices", refuse)
    with caplog.at_level("WARNING", "distloop"):
        devices.prepare_process(Config(device="cpu"))
    assert "device=cpu, but TensorFlow has already started with GPUs" in caplog.text


@pytest.mark.parametrize("is_growing", [False, True])
def test_gpus_that_have_started_are_warned_about_unless_their_memory_grows(
    claimed_gpus, monkeypatch, caplog, is_growing
):
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", refuse)
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: is_growing)
    with caplog.at_level("WARNING", "distloop"):
        devices.prepare_process(Config(device="gpu"))
    assert ("holds all its memory: call distloop.prepare first" in caplog.text) != is_growing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("intra_op_threads=2", "2"),
        ("num_devices=2, intra_op_threads=2", "2"),
        ("num_devices=2", str(max(1, environment.count_cores() // 2))),  # virtual CPUs share the cores
        ("num_stages=64", "1"),
        ("num_devices=1", "0"),
    ],
)
def test_tensorflow_has_the_threads_that_were_asked_for(settings, expected, tmp_path):
    (tmp_path / "program.py").write_text(
        "import tensorflow as tf, distloop\n"
        f"distloop.prepare(distloop.Config(device='cpu', {settings}))\n"
        "tf.constant(0)\n"
        "print(tf.config.threading.get_intra_op_parallelism_threads())"
    )
    result = forked.run([str(tmp_path / "program.py")], env=os.environ)
    assert result.stdout == f"{expected}\n", result.stderr
