"""Tests the first run on a machine, on virtual CPUs."""

import pytest
import tensorflow as tf

from distloop import smoke


def lines_of(capsys):
    """Returns name -> how each check went, and the last line."""
    *lines, last = capsys.readouterr().out.splitlines()
    return {line[:28].strip(): line[28:].split()[0] for line in lines}, last


@pytest.mark.slow
def test_everything_passes_on_virtual_cpus(capsys):
    assert smoke.main(["--device=cpu", "--num_devices=2"]) == 0
    results, last = lines_of(capsys)
    assert results.pop("batches to the devices") == "skipped"
    assert set(results.values()) == {"passed"} and len(results) == 7
    assert last == "7 passed, 0 failed, 1 skipped"


def test_a_failed_check_is_printed_and_the_others_still_run(monkeypatch, capsys):
    def broken(config):
        raise tf.errors.InternalError(None, None, "NCCL error\nsome trace")

    monkeypatch.setattr(smoke, "_CHECKS", {"sums": broken, "devices": smoke._devices})
    assert smoke.main(["--device=cpu", "--num_devices=2"]) == 1
    output = capsys.readouterr().out.splitlines()
    assert "failed   InternalError: NCCL error" in output[0]
    assert "passed   2 replicas (CPU:0, CPU:1)" in output[1]
    assert output[2] == "1 passed, 1 failed, 0 skipped"


@pytest.mark.slow
def test_weights_that_differ_are_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(smoke, "_TOLERANCE", -1.0)
    monkeypatch.setattr(smoke, "_CHECKS", {"replicas": smoke._replicas})
    assert smoke.main(["--device=cpu", "--num_devices=2"]) == 1
    assert "the weights differ by" in capsys.readouterr().out


def test_missing_devices_are_an_error(capsys):
    assert smoke.main(["--device=gpu"]) == 2
    assert "device=gpu was asked for, but TensorFlow sees none here" in capsys.readouterr().err
