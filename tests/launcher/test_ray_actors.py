"""Workers in Ray's actors, with a stand-in for Ray; on a real one: tests/launcher/test_elastic_runs.py."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from distloop import launch

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECS = 240
PRELUDE = """
import json, os, signal, sys, time
from distloop.workers import messages
told, task = messages.find_membership(), json.loads(os.environ["TF_CONFIG"])
index, addresses = task["task"]["index"], task["cluster"]["worker"]
here = os.path.dirname(__file__)

def note(**values):
    with open(os.path.join(here, "log"), "a") as file:
        file.write(json.dumps({"membership": told.number, "worker": index, "of": len(addresses), **values}) + "\\n")

def make_room(count):
    with open(os.path.join(here, "new"), "w") as file:
        file.write(str(count))
    os.replace(os.path.join(here, "new"), os.path.join(here, "room"))
"""


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts the launcher with a program, on a Ray with room for two actors."""
    shutil.copy(pathlib.Path(__file__).parent / "fake_ray.py", tmp_path / "ray.py")
    (tmp_path / "room").write_text("2")
    started = []

    def start(flags, program):
        (tmp_path / "program.py").write_text(PRELUDE + textwrap.dedent(program))
        command = [sys.executable, "-m", "distloop.launch", "--ray", *flags.split(), str(tmp_path / "program.py")]
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, "FAKE_RAY_ROOM": str(tmp_path / "room")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def log_of(directory):
    path = directory / "log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_each_worker_is_an_actor_with_its_address_and_the_runs_secret(start, tmp_path):
    program = "note(pid=os.getppid(), addresses=addresses, secret=os.environ['DISTLOOP_SECRET']); print('line', index)"
    process = start("--workers=2 --devices_per_worker=1", program)
    out, err = process.communicate(timeout=SECS)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["[worker 0] line 0", "[worker 1] line 1"]
    first, second = sorted(log_of(tmp_path), key=lambda row: row["worker"])
    assert first["of"] == 2 and len(set(first["addresses"])) == 2 and first["addresses"] == second["addresses"]
    assert first["secret"] == second["secret"] and len(first["secret"]) == 32


def test_the_first_worker_that_fails_is_named_and_gives_the_exit_code(start):
    process = start("--workers=2", "print(5 / 0) if index else time.sleep(100)")
    _, err = process.communicate(timeout=SECS)
    assert process.returncode == 1 and "[worker 1] ZeroDivisionError: division by zero" in err
    assert err.splitlines()[-1] == (
        "distloop.launch: worker 1 failed first, with exit code 1; the others were stopped."
    )


def test_a_node_that_goes_and_one_that_comes_change_the_number_of_workers(start, tmp_path):
    process = start(
        "--workers=1:2 --grace_secs=2",
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        messages.send(begins=10 * told.number)
        note()
        if told.number == 1 and index == 0:
            time.sleep(1)
            make_room(1)
        if told.number == 2:
            make_room(2)
        time.sleep(0 if told.number == 3 else 100)
        """,
    )
    _, err = process.communicate(timeout=SECS)
    assert process.returncode == 0, err
    memberships = [(row["membership"], row["of"]) for row in log_of(tmp_path)]
    assert sorted(memberships) == [(1, 2), (1, 2), (2, 1), (3, 2), (3, 2)], err
    assert "failed first, as Ray has lost its actor; the others were stopped." in err
    assert "membership 3 has 2 of 2 workers: there are slots for more." in err


def test_a_worker_that_cannot_start_ends_the_run_with_the_reason(start, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "from distloop.launcher import processes\nimport subprocess, types\n"
        "def fail(command, **settings):\n    if '-I' in command: return subprocess.Popen(command, **settings)\n"
        "    raise OSError('no memory')\n"
        "processes.subprocess = types.SimpleNamespace(**vars(subprocess) | {'Popen': fail})"
    )
    process = start("--workers=1", "note()")
    _, err = process.communicate(timeout=SECS)
    assert process.returncode == 1 and "worker 0 failed, as it could not start (no memory)." in err


def test_sigterm_to_the_launcher_lets_all_workers_save_and_leave(start, tmp_path):
    process = start("--workers=2", "signal.signal(15, lambda *_: sys.exit(75)); note(); time.sleep(100)")
    ends_at = time.monotonic() + SECS
    while len(log_of(tmp_path)) < 2:
        assert time.monotonic() < ends_at and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=SECS)
    assert process.returncode == 75 and "SIGTERM, the workers are asked to end; again to kill them." in err


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        ("raise ImportError", "--ray was given, but Ray is not installed: pip install ray."),
        (
            "def init(): raise ConnectionError('no answer')",
            "Ray cannot be reached (no answer): start a cluster, or unset RAY_ADDRESS to start a local one.",
        ),
    ],
)
def test_a_ray_that_is_missing_or_does_not_answer_is_one_sentence(module, sentence, tmp_path, monkeypatch, capsys):
    (tmp_path / "ray.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert launch.main(["--ray", "--workers=1:2", __file__]) == 2
    assert capsys.readouterr().err == f"distloop.launch: {sentence}\n"
    sys.modules.pop("ray", None)
