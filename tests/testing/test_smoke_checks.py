"""Tests the first run on a machine, on virtual CPUs."""

import contextlib
import io
import os
import unittest.mock

import pytest
import tensorflow as tf

from distloop.model import layers
from distloop.testing import smoke_checks as smoke
from tests import forked


@pytest.fixture(autouse=True)
def may_run_in_this_process(monkeypatch):
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", lambda count: None)


@pytest.mark.slow
def test_everything_passes_on_virtual_cpus():
    done = forked.run(["-m", "distloop.smoke", "--device=cpu", "--num_devices=2"], env=os.environ)
    assert done.returncode == 0, done.stdout
    *lines, last = done.stdout.splitlines()
    results = {line[:28].strip(): line[28:].split()[0] for line in lines}
    assert results.pop("batches to the devices") == "skipped"
    assert set(results.values()) == {"passed"} and len(results) == 8
    assert last == "8 passed, 0 failed, 1 skipped"
    assert "the same weights on 1 and 2 devices, SHA-256 " in lines[-1]


def output_with_one_stream_for_all_turns():
    checks = unittest.mock.patch.object(smoke, "_CHECKS", {"bits": smoke._same_bits})
    with checks, unittest.mock.patch.object(layers, "stream_of", lambda state, index: state):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert smoke.main(["--device=cpu", "--num_devices=2"]) == 1
    return output.getvalue()


@pytest.mark.slow
def test_other_bits_are_a_failure():
    output = forked.run_on_devices(output_with_one_stream_for_all_turns, 2)
    assert "failed   AssertionError: " in output and "has other bits on 1 and 2 devices" in output


def test_a_failed_check_is_printed_and_the_others_still_run(monkeypatch, capsys):
    def broken(config):
        raise tf.errors.InternalError(None, None, "NCCL error\nsome trace")

    monkeypatch.setattr(smoke, "_CHECKS", {"sums": broken, "devices": smoke._devices})
    assert smoke.main(["--device=cpu", "--num_devices=2"]) == 1
    output = capsys.readouterr().out.splitlines()
    assert "failed   InternalError: NCCL error" in output[0]
    assert "passed   2 replicas (CPU:0, CPU:1)" in output[1]
    assert output[2] == "1 passed, 1 failed, 0 skipped"


@pytest.mark.wide
def test_weights_that_differ_are_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(smoke, "_TOLERANCE", -1.0)
    monkeypatch.setattr(smoke, "_CHECKS", {"replicas": smoke._replicas})
    assert smoke.main(["--device=cpu", "--num_devices=2"]) == 1
    assert "the weights differ by" in capsys.readouterr().out


def test_missing_devices_are_an_error(capsys):
    assert smoke.main(["--device=gpu"]) == 2
    assert "device=gpu was asked for, but TensorFlow sees none here" in capsys.readouterr().err
    assert smoke.main(["--logical_gpus=2"]) == 2
    assert "2 logical GPUs were asked for, but TensorFlow sees no GPU here to split" in capsys.readouterr().err
