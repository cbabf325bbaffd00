"""What a bug report needs is in the report, and no secret and no name of a user."""

import getpass
import os
import shutil
import subprocess

import pytest
import tensorflow as tf

import distloop
from distloop import report
from tests.problems import write_run


def test_versions_devices_variables_and_changed_settings_are_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    write_run(tmp_path / "run", [{"step": 1, "loss": 0.5}], {"batch_size": 32, "seed": 0, "own_flag": 3})
    assert report.main(["--environment", str(tmp_path / "run")]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    found = {name: value for name, value in lines}
    assert found["distloop"] == distloop.__version__ and found["tensorflow"] == tf.__version__
    assert found["TF_ENABLE_ONEDNN_OPTS"] == "0" and found["CPU:0"] == "CPU" and "driver" in found["CUDA"]
    assert found["--batch_size"] == "32" and "--seed" not in found and "--own_flag" not in found


def test_no_run_is_needed_and_nothing_private_is_shown(monkeypatch, capsys):
    home = os.path.expanduser("~")
    monkeypatch.setenv("DISTLOOP_SECRET", "hidden1")
    monkeypatch.setenv("CUDA_CACHE_PATH", f"{home}/cache")
    monkeypatch.setenv("TF_FILES", "s3://user:hidden2@host/x")
    monkeypatch.setenv("XLA_NAME", f"of {getpass.getuser()}")
    monkeypatch.setenv("HF_HOME_OF_ANOTHER_LIBRARY", "hidden3")
    assert report.main(["--environment"]) == 0
    text = capsys.readouterr().out
    assert "DISTLOOP_SECRET" in text and "~/cache" in text and "of USER" in text
    assert "hidden" not in text and home not in text.replace("~", "")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_of_the_users_code_and_changes_to_it_are_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text("1")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], check=True)
    (tmp_path / "program.py").write_text("2")
    assert report.main(["--environment"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("git commit")]
    assert len(line.split()[2]) == 41 and line.endswith(", files changed since: 1")
