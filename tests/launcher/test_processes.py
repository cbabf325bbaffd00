"""Processes of the launcher, whose workers are plain Python: output, signals, exit codes, restarts, no leftovers."""

import functools
import os
import pathlib
import select
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from distloop import launch as launcher
from distloop.distributed import heartbeat, output
from distloop.distributed.preemption import EXIT_CODE
from distloop.launcher import elastic, processes

pytestmark = pytest.mark.slow


ROOT = pathlib.Path(__file__).resolve().parents[2]


SECS = 30  # what a test waits for at most


LAUNCH = [sys.executable, "-m", "distloop.launch"]


# Every program below begins with this. `leave_child` starts one that outlives its parent if nobody ends it.
PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time

config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
here = pathlib.Path(__file__).parent

def note(name, value):
    (here / f"{name}.tmp").write_text(str(value))
    (here / f"{name}.tmp").rename(here / name)

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.005)

def leave_child():
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    note(f"child{index}", child.pid)

note(f"pid{index}", os.getpid())
"""


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes a program and returns its path."""

    def write(program, name="program.py"):
        (tmp_path / name).write_text(PRELUDE + textwrap.dedent(program))
        return str(tmp_path / name)

    return write


@pytest.fixture
def start():
    """Returns a function that starts the launcher in a process group of its own; kills it after the test."""
    started = []

    def start(*arguments, command=LAUNCH, **settings):
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **settings}
        plain = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
        settings["env"] = {**os.environ, **plain, **settings.get("env", {})}
        started.append(subprocess.Popen([*command, *arguments], start_new_session=True, **settings))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def launch(start):
    """Returns a function that runs the launcher and returns its exit code and the lines of stdout and stderr."""

    def launch(*arguments, **settings):
        process = start(*arguments, **settings)
        out, err = process.communicate(timeout=SECS)
        return process.returncode, out.splitlines(), err.splitlines()

    return launch


def until(is_done):
    """Waits until `is_done()`."""
    deadline = time.monotonic() + SECS
    while not is_done():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def read(directory, name):
    """Waits for the number that a worker writes, and returns it."""
    until((directory / name).exists)
    return int((directory / name).read_text())


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (["sys.exit(0)", "sys.exit(0)"], 0),
        (["sys.exit(0)", "sys.exit(3)"], 3),
        (["sys.exit(EXIT_CODE)", "sys.exit(EXIT_CODE)"], 75),
        (["sys.exit(0)", "sys.exit(EXIT_CODE)"], 75),
        (["sys.exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"], 128 + signal.SIGKILL),
        (["sys.exit(0)", "os.abort()"], 128 + signal.SIGABRT),
        (["sys.exit(EXIT_CODE)", "time.sleep(0.2); sys.exit(4)"], 4),
    ],
)
def test_the_exit_code_is_that_of_the_first_failure(ends, expected, launch, write):
    code, *_ = launch("--workers=2", write(f"EXIT_CODE = {EXIT_CODE}\nif index: {ends[1]}\nelse: {ends[0]}"))
    assert code == expected


def test_stdout_and_stderr_stay_apart_and_whole(launch, write):
    program = """
        for i in range(200):
            os.write(1, b"out "), os.write(2, b"err "), os.write(1, b"%d\\n" % i), os.write(2, b"%d\\n" % i)
    """
    code, out, err = launch("--workers=2", write(program))
    assert code == 0
    for lines, name in ((out, "out"), (err, "err")):
        for worker in range(2):
            prefix = f"[worker {worker}] "
            assert [line for line in lines if line.startswith(prefix)] == [f"{prefix}{name} {i}" for i in range(200)]
        assert len(lines) == 400


def test_every_byte_of_a_line_comes_through(launch, write):
    process_code, out, _ = launch(write(r"os.write(1, b'\xff\x00\xc3\xa9\n\nno end')"), text=False)
    assert process_code == 0 and out == [b"[worker 0] \xff\x00\xc3\xa9", b"[worker 0] ", b"[worker 0] no end"]


def test_the_last_state_of_an_overwritten_line_is_shown(launch, write):
    program = r"""
        for i in range(5):
            os.write(2, b"\r%d of 5" % i)
            time.sleep(0.01)
        os.write(2, b"\rdone\nnext\r")
        time.sleep(0.01)
        os.write(2, b"\nlast\r\n50%\r")
    """
    _, _, err = launch(write(program))
    assert err == ["[worker 0] done", "[worker 0] next", "[worker 0] last", "[worker 0] 50%"]


def patched(**constants):
    """Returns the launcher's command with other constants in its modules."""
    lines = ["import sys", "from distloop import launch", "from distloop.distributed import output"]
    lines.append("from distloop.launcher import elastic, processes")
    for name, value in constants.items():
        module = next(module for module in (launcher, elastic, output, processes) if hasattr(module, name))
        lines.append(f"{module.__name__.rpartition('.')[2]}.{name} = {value}")
    return [sys.executable, "-c", "; ".join([*lines, "sys.exit(launch.main())"])]


@pytest.mark.parametrize("end", ["sys.exit(5)", "time.sleep(60)"])
def test_output_that_nobody_reads_hides_neither_a_crash_nor_a_signal(end, start, write, tmp_path):
    program = f"""
        for i in range(100_000):
            print("line", i)
        note("printed", 1)
        {end}
    """
    command = patched(_UNREAD_SECS=0.2, _PENDING_LINES=100)
    process = start("--max_restarts=0", write(program), command=command)  # its stdout is not read
    read(tmp_path, "printed")
    if "sleep" in end:
        process.terminate()
    assert process.wait(SECS) == (5 if "exit" in end else 128 + signal.SIGTERM)
    assert "worker 0 ended" in process.stderr.read()


def test_lines_come_at_once(start, write, tmp_path):
    process = start(write("print('hello')\nwait_for('go')"))
    assert select.select([process.stdout], [], [], SECS)[0]
    assert process.stdout.readline() == "[worker 0] hello\n" and process.poll() is None
    (tmp_path / "go").touch()
    assert process.wait(SECS) == 0


CATCHES = """
    caught = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: caught.append(signal.Signals(number).name))
    note(f"ready{index}", 1)
    while not caught:
        time.sleep(0.01)
    time.sleep(0.3)
    print("saved after", *caught)
    sys.exit(75)
"""


@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_is_passed_on_once_and_waited_for(number, to_group, start, write, tmp_path):
    process = start("--workers=2", "--max_restarts=3", "--grace_secs=0", write(CATCHES))
    for i in range(2):
        read(tmp_path, f"ready{i}")
    (os.killpg if to_group else os.kill)(process.pid, number)  # Ctrl-C is for the launcher's group
    out, err = process.communicate(timeout=SECS)
    assert process.returncode == 75
    assert sorted(out.splitlines()) == [f"[worker {i}] saved after {number.name}" for i in range(2)]
    assert err.splitlines()[0] == f"distloop.launch: {number.name}, the workers are asked to end; again to kill them."
    assert "start again" not in err


def test_a_worker_that_ends_by_the_passed_signal_is_not_restarted(start, write, tmp_path):
    process = start("--workers=2", "--max_restarts=3", write("time.sleep(60)"))
    for i in range(2):
        read(tmp_path, f"pid{i}")
    process.terminate()
    _, err = process.communicate(timeout=SECS)
    assert process.returncode == 128 + signal.SIGTERM and "again" not in err.partition("again to kill")[2]
    assert sorted(err.splitlines()[1:]) == [
        f"distloop.launch: worker {i} ended by signal 15 (Terminated)." for i in (0, 1)
    ]


def test_a_worker_gets_one_signal_before_it_is_killed(start, write, tmp_path):
    program = f"""
        signal.signal(signal.SIGTERM, lambda *_: (print("asked"), note(f"asked{{index}}", 1)))
        note(f"ready{{index}}", 1)
        while not (index and (here / "asked1").exists()):
            time.sleep(0.01)
        sys.exit({EXIT_CODE})
    """
    process = start("--workers=2", "--grace_secs=0.1", write(program), command=patched(FOLLOW_SECS=0.2))
    for i in range(2):
        read(tmp_path, f"ready{i}")
    process.terminate()
    out, err = process.communicate(timeout=SECS)
    assert sorted(out.splitlines()) == ["[worker 0] asked", "[worker 1] asked"]  # a second would end it unsaved
    assert process.returncode == 128 + signal.SIGKILL and "worker 0 ended by signal 9" in err


def test_a_closed_terminal_is_a_sigterm_for_the_workers(start, write, tmp_path):
    heard = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # also where these tests run under nohup
    process = start(write(CATCHES), preexec_fn=heard)
    read(tmp_path, "ready0")
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGINT):  # nobody asked twice
        process.send_signal(number)
        time.sleep(0.05)
    out, _ = process.communicate(timeout=SECS)
    assert process.returncode == 75 and out == "[worker 0] saved after SIGTERM\n"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_an_elastic_run(number, start, write, tmp_path):
    tells = "sys.path.insert(0, os.environ['PYTHONPATH']); from distloop.distributed import notes"
    program = CATCHES.replace('print("saved', f'{tells}; notes.tell(leaves=True); print("saved').replace("\n    ", "\n")
    heard = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    process = start("--workers=1:2", write(program), preexec_fn=heard)
    for i in range(2):
        read(tmp_path, f"ready{i}")
    process.send_signal(number)
    _, err = process.communicate(timeout=SECS)
    assert process.returncode == 75 and "membership" not in err


def test_workers_are_asked_to_end_when_the_output_is_closed(start, write, tmp_path):
    program = """
        signal.signal(signal.SIGTERM, lambda *_: (note("asked", 1), sys.exit(75)))
        while True:
            print("step")
            time.sleep(0.02)
    """
    process = start(write(program))
    assert process.stdout.readline() == "[worker 0] step\n"
    process.stdout.close()
    assert process.wait(SECS) == 75 and read(tmp_path, "asked")


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
def test_a_second_signal_kills_at_once(numbers, start, write, tmp_path):
    program = """
        signal.signal(signal.SIGINT, lambda *_: note(f"asked{index}", 1))
        signal.signal(signal.SIGTERM, lambda *_: note(f"asked{index}", 1))
        leave_child()
        while True:
            time.sleep(1)
    """
    process = start("--workers=2", write(program))
    pids = [read(tmp_path, f"{kind}{i}") for kind in ("pid", "child") for i in range(2)]
    process.send_signal(numbers[0])
    for i in range(2):
        read(tmp_path, f"asked{i}")
    assert process.poll() is None
    process.send_signal(numbers[1])
    _, err = process.communicate(timeout=SECS)
    assert process.returncode == 128 + numbers[1]
    assert f"distloop.launch: {numbers[1].name} again, the workers are killed." in err
    until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize("how", ["SIGKILL", "Ctrl-C, then SIGKILL"])
def test_a_killed_launcher_leaves_no_process(how, start, write, tmp_path):
    program = """
        signal.signal(signal.SIGINT, lambda *_: note(f"asked{index}", 1))
        leave_child()
        while True:
            time.sleep(1)
    """
    process = start("--workers=2", write(program))
    pids = [read(tmp_path, f"{kind}{i}") for kind in ("pid", "child") for i in range(2)]
    if how != "SIGKILL":
        os.killpg(process.pid, signal.SIGINT)
        for i in range(2):
            read(tmp_path, f"asked{i}")
    assert all(map(is_running, pids))
    process.kill()
    until(lambda: not any(map(is_running, pids)))


def test_a_launcher_killed_during_the_start_leaves_no_process(start, write, tmp_path):
    path = write("time.sleep(60)")
    for i in range(8):
        process = start("--workers=4", path)
        if i:
            read(tmp_path, f"pid{i % 4}")
        time.sleep(0.004 * i)
        process.kill()
        until(lambda: not running_with(path))
        for file in tmp_path.glob("pid*"):
            file.unlink()


def running_with(argument):
    """Returns the processes that have an argument in their command line."""
    pids = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if argument.encode() in words and is_running(int(path.parent.name)):
            pids.append(int(path.parent.name))
    return pids


def guards_of(parent):
    children = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children if b"groups" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_the_guard_ends_with_the_launcher(launch, start, write, tmp_path):
    process = start(write("wait_for('go')"))
    read(tmp_path, "pid0")
    (guard,) = guards_of(process.pid)
    (tmp_path / "go").touch()
    assert process.wait(SECS) == 0 and not is_running(guard)


def test_children_of_a_worker_end_with_it(start, write, tmp_path):
    process = start("--workers=2", write("leave_child()\nif index: wait_for('go')"))
    pid, other = (read(tmp_path, f"child{i}") for i in range(2))
    until(lambda: not is_running(pid))
    assert process.poll() is None and is_running(other)
    (tmp_path / "go").touch()
    assert process.wait(SECS) == 0
    until(lambda: not is_running(other))


def test_a_crash_stops_the_others(launch, write, tmp_path):
    program = """
        leave_child()
        if index == 1:
            wait_for("child0"), wait_for("child2")
            raise RuntimeError("boom")
        time.sleep(60)
    """
    code, _, err = launch("--workers=3", write(program))
    assert code == 1 and "[worker 1] RuntimeError: boom" in err
    assert err[-4] == "distloop.launch: worker 1 ended with exit code 1."
    assert sorted(err[-3:-1]) == [f"distloop.launch: worker {i} ended by signal 15 (Terminated)." for i in (0, 2)]
    assert err[-1] == "distloop.launch: worker 1 failed first, with exit code 1; the others were stopped."
    until(lambda: not any(is_running(read(tmp_path, f"{kind}{i}")) for kind in ("pid", "child") for i in range(3)))


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_time(launch, write, tmp_path):
    program = """
        signal.signal(signal.SIGTERM, lambda *_: note("asked", 1))
        note(f"ready{index}", 1)
        if index:
            wait_for("ready0")
            sys.exit(5)
        while True:
            time.sleep(1)
    """
    began = time.monotonic()
    code, _, err = launch("--workers=2", "--grace_secs=0.4", write(program))
    assert time.monotonic() - began > 0.4 and code == 5 and read(tmp_path, "asked")
    assert err[-2:] == [
        "distloop.launch: worker 0 ended by signal 9 (Killed).",
        "distloop.launch: worker 1 failed first, with exit code 5; the others were stopped.",
    ]


def test_a_single_worker_fails_alone(launch, write):
    code, _, err = launch(write("sys.exit('sorry')"))
    assert (code, err[-1]) == (1, "distloop.launch: worker 0 failed, with exit code 1.") and "others" not in "".join(
        err
    )


def test_output_of_the_others_after_the_first_failure_is_not_shown(launch, write):
    program = """
        if index == 1:
            wait_for("ready0")
            for i in range(20_000):  # more than a pipe holds
                print("last words", i)
            os._exit(7)
        def end(*_):
            print("chorus")
            sys.exit("chorus")
        signal.signal(signal.SIGTERM, end)
        print("before")
        note("ready0", 1)
        time.sleep(60)
    """
    code, out, err = launch("--workers=2", write(program))
    assert code == 7 and "chorus" not in "".join(out + err)
    assert [line for line in out if "[worker 0]" in line] == ["[worker 0] before"]
    assert [line for line in out if "[worker 1]" in line] == [f"[worker 1] last words {i}" for i in range(20_000)]
    assert err[-2] == "distloop.launch: worker 0 ended with exit code 1."
    assert err[-1] == "distloop.launch: worker 1 failed first, with exit code 7; the others were stopped."


def test_the_last_output_of_a_worker_is_shown(start, write, tmp_path):
    process = start(write("wait_for('go')\nos.write(2, b'x' * 9999 + b'\\nlast')\nos._exit(3)"))
    pid = read(tmp_path, "pid0")
    process.send_signal(signal.SIGSTOP)  # so that all of it is still in the pipe when the worker has ended
    (tmp_path / "go").touch()
    until(lambda: not is_running(pid))
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=SECS)
    assert process.returncode == 3
    assert err.splitlines()[:2] == ["[worker 0] " + "x" * 9999, "[worker 0] last"]


def test_the_first_failure_in_time_is_blamed(launch, write):
    program = """
        if index == 0:
            wait_for("pid1")
            worker_1 = pathlib.Path("/proc", (here / "pid1").read_text(), "stat")
            while worker_1.exists() and ") Z" not in worker_1.read_text():
                time.sleep(0.001)
            time.sleep(0.05)  # a collective breaks no faster than that
            sys.exit(6)
        time.sleep(0.1)
        sys.exit(5)
    """
    code, _, err = launch("--workers=2", write(program))
    assert code == 5 and "worker 1 failed first, with exit code 5" in err[-1]


@pytest.mark.parametrize("end", ["sys.exit(5)", "os.kill(os.getpid(), signal.SIGABRT)"])
def test_a_worker_that_ended_because_another_failed_is_not_blamed(end, launch, write):
    program = f"""
        if index == 1:
            sys.exit({heartbeat.EXIT_CODE})
        time.sleep(0.5)
        print("why")
        {end}
    """
    code, out, err = launch("--workers=2", write(program))
    how, expected = ("with exit code 5", 5) if "exit" in end else ("by signal 6 (Aborted)", 128 + signal.SIGABRT)
    assert code == expected and out == ["[worker 0] why"]
    assert err[0] == "distloop.launch: worker 1 ended with exit code 76."
    assert err[-1] == f"distloop.launch: worker 0 failed first, {how}."


def test_a_hanging_worker_is_stopped_after_another_ended_because_of_it(launch, write, tmp_path):
    program = f"""
        if index == 1:
            wait_for("ready0")
            sys.exit({heartbeat.EXIT_CODE})
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note("ready0", 1)
        time.sleep(60)
    """
    command = patched(FAIL_SECS=0.2)
    code, _, err = launch("--workers=2", "--grace_secs=0.2", write(program), command=command)
    assert code == heartbeat.EXIT_CODE and err == [
        "distloop.launch: worker 1 ended with exit code 76.",
        "distloop.launch: worker 0 ended by signal 9 (Killed).",
        "distloop.launch: worker 1 ended first, because another one had failed or fallen silent; the others were "
        "stopped.",
    ]


@pytest.mark.parametrize("code", [0, heartbeat.EXIT_CODE])
def test_workers_that_ended_for_one_elsewhere_start_again(code, launch, write):
    program = f"""
        count = len(list(here.glob(f"run*-{{index}}")))
        note(f"run{{count}}-{{index}}", 1)
        time.sleep(0.3 * index)
        sys.exit(0 if count else {code} if index else {heartbeat.EXIT_CODE})
    """
    exit_code, _, err = launch(
        "--workers=2", "--max_restarts=1", write(program), command=patched(_FIRST_PAUSE_SECS=0.01)
    )
    assert exit_code == 0 and err[-1] == "distloop.launch: all workers start again in 0.01 s (restart 1 of 1)."
    assert " ended first, because another one had failed or fallen silent." in err[-2]


CRASHES = """
    count = len(list(here.glob(f"run*-{index}")))
    note(f"run{count}-{index}", 1)
    print("run", count, config["cluster"]["worker"][0])
    if index == 1:
        wait_for(f"run{count}-0")
        sys.exit(9 if count < int(sys.argv[1]) else 0)
"""


def test_restarts_are_bounded_and_counted(launch, write, tmp_path):
    command = patched(_FIRST_PAUSE_SECS=0.1)
    code, out, err = launch("--workers=2", "--max_restarts=2", write(CRASHES), "99", command=command)
    assert code == 9 and len(list(tmp_path.glob("run*-1"))) == 3
    assert [line for line in err if "again" in line] == [
        f"distloop.launch: all workers start again in 0.{i} s (restart {i} of 2)." for i in (1, 2)
    ]
    assert err[-1].startswith("distloop.launch: worker 1 failed first, with exit code 9")
    assert len({line.split()[-1] for line in out if "[worker 1]" in line}) == 3  # fresh ports


def test_a_worker_that_saved_and_left_is_not_restarted(launch, write, tmp_path):
    program = f"""
        note(f"run{{len(list(here.glob('run*')))}}-{{index}}", 1)
        sys.exit({EXIT_CODE})
    """
    code, _, err = launch("--workers=2", "--max_restarts=3", write(program))
    assert code == EXIT_CODE and len(list(tmp_path.glob("run*"))) == 2
    assert sorted(err) == [f"distloop.launch: worker {i} ended with exit code 75." for i in range(2)]


def test_a_single_worker_that_lost_one_on_another_host_says_so(launch, write):
    code, _, err = launch(write(f"sys.exit({heartbeat.EXIT_CODE})"))
    assert code == heartbeat.EXIT_CODE
    assert err[-1] == "distloop.launch: worker 0 ended, because another one had failed or fallen silent."


def test_the_others_have_time_to_save_when_one_saved_and_left(launch, write):
    program = f"""
        time.sleep(0.5 * index)
        print("saved")
        sys.exit({EXIT_CODE})
    """
    code, out, _ = launch("--workers=2", "--grace_secs=0", write(program))
    assert code == EXIT_CODE and sorted(out) == ["[worker 0] saved", "[worker 1] saved"]


@pytest.mark.parametrize("heeds", [True, False])
def test_a_worker_that_does_not_follow_is_stopped(heeds, launch, write):
    program = f"""
        if index:
            wait_for("ready0")
            sys.exit({EXIT_CODE})
        signal.signal(signal.SIGTERM, lambda *_: sys.exit({EXIT_CODE}) if {heeds} else None)
        note("ready0", 1)
        while True:
            time.sleep(1)
    """
    grace_secs = 3 if heeds else 0.1
    code, _, err = launch("--workers=2", f"--grace_secs={grace_secs}", write(program), command=patched(FOLLOW_SECS=0.2))
    assert code == (EXIT_CODE if heeds else 128 + signal.SIGKILL)
    assert "worker 0 ended " + ("with exit code 75" if heeds else "by signal 9") in err[-1]


def test_a_signal_ends_the_pause_before_a_restart(start, write, tmp_path):
    process = start("--max_restarts=1", write("sys.exit(3)"), command=patched(_FIRST_PAUSE_SECS=60))
    while "start again in 60 s" not in process.stderr.readline():
        pass
    process.terminate()
    assert process.wait(SECS) == 128 + signal.SIGTERM
    assert process.stderr.read() == "distloop.launch: SIGTERM, the workers do not start again.\n"


def test_places_of_workers_that_fall_at_once_are_empty_and_the_one_left_goes_on(launch, write):
    program = """
        membership = json.loads(os.environ["DISTLOOP_MEMBERSHIP"])
        print("membership", membership["number"], "of", len(config["cluster"]["worker"]), membership["cause"])
        if membership["number"] == 1 and index == 0:
            others = [wait_for(f"pid{i}") or int((here / f"pid{i}").read_text()) for i in (1, 2)]
            os.kill(os.getppid(), signal.SIGSTOP)  # the launcher, until both have fallen
            for other in others:
                os.kill(other, signal.SIGKILL)
            time.sleep(0.2)
            os.kill(os.getppid(), signal.SIGCONT)
        if membership["number"] == 1:
            time.sleep(60)
    """
    code, out, err = launch("--workers=1:3", write(program), command=patched(_FIRST_PAUSE_SECS=60))
    cause = "worker 1 failed first, by signal 9 (Killed)"
    assert code == 0 and out[-1] == f"[worker 0] membership 2 of 1 {cause}"
    assert err[-1] == f"distloop.launch: membership 2 has 1 of 3 workers: {cause}."


def test_as_process_1_the_launcher_reaps_processes_that_lost_their_parent(start, write, tmp_path):
    program = """
        for i in range(2):
            if not os.fork():  # a child that ends at once, and its child later
                if not os.fork():
                    os.setsid()
                    note(f"orphan{i}", os.getpid())
                os._exit(0)
        wait_for("go")
        sys.exit(4)
    """
    inherits = "import ctypes; ctypes.CDLL(None).prctl(36, 1); "  # PR_SET_CHILD_SUBREAPER
    command = [sys.executable, "-c", inherits + patched()[2]]
    process = start(write(program), command=command)
    for i in range(2):
        until(lambda i=i: not pathlib.Path(f"/proc/{read(tmp_path, f'orphan{i}')}").exists())
    assert process.poll() is None
    (tmp_path / "go").touch()
    assert process.wait(SECS) == 4


def test_who_failed_is_named_even_if_one_that_noticed_it_is_seen_at_the_same_time(start, write, tmp_path):
    process = start("--workers=2", write("""
        wait_for("go")
        sys.exit(76) if index == 0 else os.kill(os.getpid(), signal.SIGKILL)
    """))  # fmt: skip
    pids = [int(read(tmp_path, f"pid{i}")) for i in range(2)]
    process.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    until(lambda: all(b") Z " in pathlib.Path(f"/proc/{pid}/stat").read_bytes() for pid in pids))
    process.send_signal(signal.SIGCONT)
    assert process.wait(SECS) == 137
    assert "worker 1 failed first, by signal 9 (Killed)" in process.stderr.read()


KERNEL = """
import sys
from distloop import notebook

def train(path):
    import os, signal, subprocess, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a step that does not end
    child = subprocess.Popen(["sleep", "100"])
    open(path, "w").write(f"{os.getppid()} {os.getpid()} {child.pid}")
    time.sleep(100)

notebook.notebook_launch(train, (sys.argv[1],), workers=1)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_quiet_workers_end_with_a_kernel_that_is_ended(number, start, write, tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL)
    kernel = start(str(tmp_path / "run"), command=[sys.executable, str(tmp_path / "kernel.py")])
    until(lambda: (tmp_path / "run").exists() and len((tmp_path / "run").read_text().split()) == 3)
    pids = (tmp_path / "run").read_text().split()
    assert all(map(is_running, pids))
    kernel.send_signal(number)
    kernel.wait(SECS)
    until(lambda: not any(map(is_running, pids)))
