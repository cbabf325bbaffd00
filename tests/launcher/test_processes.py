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

from distloop.launcher import consoles, elastic, processes
from distloop.workers import heartbeat
from distloop.workers.preemption import EXIT_CODE

pytestmark = pytest.mark.slow


ROOT = pathlib.Path(__file__).resolve().parents[2]
SECS = 240  # what a test waits for at most
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
def start(tmp_path):
    """Returns a function that starts the launcher of a program in a process group of its own; kills it at the end."""
    started = []

    def start(program, *flags, command=LAUNCH, **settings):
        path = tmp_path / "program.py"
        path.write_text(PRELUDE + textwrap.dedent(program))
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **settings}
        process = subprocess.Popen([*command, *flags, str(path)], start_new_session=True, env=env, **settings)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def launch(start):
    """Returns a function that runs the launcher and returns its exit code and the lines of stdout and stderr."""

    def launch(*arguments, **settings):
        code, out, err = end_of(start(*arguments, **settings))
        return code, out.splitlines(), err.splitlines()

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


def read_each(directory, *names):
    """Waits for the numbers that each of two workers writes, and returns them."""
    return [read(directory, f"{name}{i}") for name in names for i in range(2)]


def end_of(process):
    """Returns the exit code of the launcher once it has ended, and its stdout and stderr."""
    out, err = process.communicate(timeout=SECS)
    return process.returncode, out, err


def are_gone(pids):
    return lambda: not any(map(is_running, pids))


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
def test_the_exit_code_is_that_of_the_first_failure(ends, expected, launch):
    code, *_ = launch(f"EXIT_CODE = {EXIT_CODE}\nif index: {ends[1]}\nelse: {ends[0]}", "--workers=2")
    assert code == expected


def test_stdout_and_stderr_stay_apart_and_every_byte_comes_through(launch):
    program = r"""
        for i in range(200):
            os.write(1, b"out "), os.write(2, b"err "), os.write(1, b"%d\n" % i), os.write(2, b"%d\n" % i)
        os.write(1, b"\xff\x00\xc3\xa9\n\nno end")
    """
    code, out, err = launch(program, "--workers=2", text=False)
    assert code == 0
    for worker in (b"[worker 0] ", b"[worker 1] "):
        for name, lines, last in ((b"out", out, [b"\xff\x00\xc3\xa9", b"", b"no end"]), (b"err", err, [])):
            texts = [b"%s %d" % (name, i) for i in range(200)] + last
            assert [line.removeprefix(worker) for line in lines if line.startswith(worker)] == texts
    assert len(out) == 406 and len(err) == 400


def patched(**constants):
    """Returns the launcher's command with other constants in its modules."""
    lines = ["import sys", "from distloop import launch", "from distloop.launcher import consoles, elastic, processes"]
    for name, value in constants.items():
        module = next(module for module in (elastic, consoles, processes) if hasattr(module, name))
        lines.append(f"{module.__name__.rpartition('.')[2]}.{name} = {value}")
    return [sys.executable, "-c", "; ".join([*lines, "sys.exit(launch.main())"])]


@pytest.mark.parametrize("end", ["sys.exit(5)", "time.sleep(60)"])
def test_output_that_nobody_reads_hides_neither_a_crash_nor_a_signal(end, start, tmp_path):
    program = f"""
        for i in range(100_000):
            print("line", i)
        note("printed", 1)
        {end}
    """
    command = patched(_UNREAD_SECS=0.2, _PENDING_LINES=100)
    process = start(program, "--max_restarts=0", command=command)  # its stdout is not read
    read(tmp_path, "printed")
    if "sleep" in end:
        process.terminate()
    assert process.wait(SECS) == (5 if "exit" in end else 75)
    assert "worker 0 ended" in process.stderr.read()


def test_lines_come_at_once(start, tmp_path):
    process = start("print('hello')\nwait_for('go')")
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
def test_a_signal_is_passed_on_once_and_waited_for(number, to_group, start, tmp_path):
    process = start(CATCHES, "--workers=2", "--max_restarts=3", "--grace_secs=0")
    read_each(tmp_path, "ready")
    (os.killpg if to_group else os.kill)(process.pid, number)  # Ctrl-C is for the launcher's group
    code, out, err = end_of(process)
    assert code == 75
    assert sorted(out.splitlines()) == [f"[worker {i}] saved after {number.name}" for i in range(2)]
    assert err.splitlines()[0] == f"distloop.launch: {number.name}, the workers are asked to end; again to kill them."
    assert "start again" not in err


def test_a_worker_that_ends_by_the_passed_signal_is_not_restarted(start, tmp_path):
    process = start("time.sleep(60)", "--workers=2", "--max_restarts=3")
    read_each(tmp_path, "pid")
    process.terminate()
    code, _, err = end_of(process)
    assert code == 75 and "again" not in err.partition("again to kill")[2]  # it had not come to train
    assert sorted(err.splitlines()[1:]) == [
        f"distloop.launch: worker {i} ended by signal 15 (Terminated)." for i in (0, 1)
    ]


def test_a_worker_gets_one_signal_before_it_is_killed(start, tmp_path):
    program = f"""
        signal.signal(signal.SIGTERM, lambda *_: (print("asked"), note(f"asked{{index}}", 1)))
        note(f"ready{{index}}", 1)
        while not (index and (here / "asked1").exists()):
            time.sleep(0.01)
        sys.exit({EXIT_CODE})
    """
    process = start(program, "--workers=2", "--grace_secs=0.1", command=patched(FOLLOW_SECS=0.2))
    read_each(tmp_path, "ready")
    process.terminate()
    code, out, err = end_of(process)
    assert sorted(out.splitlines()) == ["[worker 0] asked", "[worker 1] asked"]  # a second would end it unsaved
    assert code == 128 + signal.SIGKILL and "worker 0 ended by signal 9" in err


def test_a_closed_terminal_is_a_sigterm_for_the_workers(start, tmp_path):
    heard = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # also where these tests run under nohup
    process = start(CATCHES, preexec_fn=heard)
    read(tmp_path, "ready0")
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGINT):  # nobody asked twice
        process.send_signal(number)
        time.sleep(0.05)
    code, out, _ = end_of(process)
    assert code == 75 and out == "[worker 0] saved after SIGTERM\n"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_an_elastic_run(number, start, tmp_path):
    sends = "sys.path.insert(0, os.environ['PYTHONPATH']); from distloop.workers import messages"
    program = CATCHES.replace('print("saved', f'{sends}; messages.send(leaves=True); print("saved').replace(
        "\n    ", "\n"
    )
    heard = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    process = start(program, "--workers=1:2", preexec_fn=heard)
    read_each(tmp_path, "ready")
    process.send_signal(number)
    code, _, err = end_of(process)
    assert code == 75 and "membership" not in err


def test_a_signal_while_new_workers_start_ends_an_elastic_run_as_saved(start, tmp_path):
    program = """
        sys.path.insert(0, os.environ["PYTHONPATH"])
        from distloop.workers import messages
        if messages.find_membership().number == 1:
            messages.send(begins=5)
            os.kill(os.getpid(), signal.SIGKILL)
        note(f"starting{index}", 1)
        time.sleep(60)
    """
    process = start(program, "--workers=1:2", command=patched(_FIRST_PAUSE_SECS=0.1))
    read(tmp_path, "starting0")
    process.terminate()
    code, _, err = end_of(process)
    assert code == 75 and "membership 3" not in err


def test_workers_are_asked_to_end_when_the_output_is_closed(start, tmp_path):
    program = """
        signal.signal(signal.SIGTERM, lambda *_: (note("asked", 1), sys.exit(75)))
        while True:
            print("step")
            time.sleep(0.02)
    """
    process = start(program)
    assert process.stdout.readline() == "[worker 0] step\n"
    process.stdout.close()
    assert process.wait(SECS) == 75 and read(tmp_path, "asked")


STAYS = """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: note(f"asked{index}", 1))
    leave_child()
    while True:
        time.sleep(1)
"""


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
def test_a_second_signal_kills_at_once(numbers, start, tmp_path):
    process = start(STAYS, "--workers=2")
    pids = read_each(tmp_path, "pid", "child")
    process.send_signal(numbers[0])
    read_each(tmp_path, "asked")
    assert process.poll() is None
    process.send_signal(numbers[1])
    code, _, err = end_of(process)
    assert code == 128 + numbers[1]
    assert f"distloop.launch: {numbers[1].name} again, the workers are killed." in err
    until(are_gone(pids))


@pytest.mark.parametrize("how", ["SIGKILL", "Ctrl-C, then SIGKILL"])
def test_a_killed_launcher_leaves_no_process(how, start, tmp_path):
    process = start(STAYS, "--workers=2")
    pids = read_each(tmp_path, "pid", "child")
    if how != "SIGKILL":
        os.killpg(process.pid, signal.SIGINT)
        read_each(tmp_path, "asked")
    assert all(map(is_running, pids))
    process.kill()
    until(are_gone(pids))


def test_a_launcher_killed_during_the_start_leaves_no_process(start, tmp_path):
    for i in range(8):
        process = start("time.sleep(60)", "--workers=4")
        if i:
            read(tmp_path, f"pid{i % 4}")
        time.sleep(0.004 * i)
        process.kill()
        until(lambda: not running_with(str(tmp_path / "program.py")))
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


def test_children_of_a_worker_end_with_it_and_the_guard_with_the_launcher(start, tmp_path):
    process = start("leave_child()\nif index: wait_for('go')", "--workers=2")
    pid, other = read_each(tmp_path, "child")
    until(are_gone([pid]))
    assert process.poll() is None and is_running(other)
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (guard,) = [pid for pid in children if b"groups" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
    (tmp_path / "go").touch()
    assert process.wait(SECS) == 0 and not is_running(guard)
    until(are_gone([other]))


def test_a_crash_stops_the_others(launch, tmp_path):
    program = """
        leave_child()
        if index == 1:
            wait_for("child0"), wait_for("child2")
            raise RuntimeError("boom")
        time.sleep(60)
    """
    code, _, err = launch(program, "--workers=3")
    assert code == 1 and "[worker 1] RuntimeError: boom" in err
    assert err[-4] == "distloop.launch: worker 1 ended with exit code 1."
    assert sorted(err[-3:-1]) == [f"distloop.launch: worker {i} ended by signal 15 (Terminated)." for i in (0, 2)]
    assert err[-1] == "distloop.launch: worker 1 failed first, with exit code 1; the others were stopped."
    until(lambda: not any(is_running(read(tmp_path, f"{kind}{i}")) for kind in ("pid", "child") for i in range(3)))


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_time(launch, tmp_path):
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
    code, _, err = launch(program, "--workers=2", "--grace_secs=0.4")
    assert time.monotonic() - began > 0.4 and code == 5 and read(tmp_path, "asked")
    assert err[-2:] == [
        "distloop.launch: worker 0 ended by signal 9 (Killed).",
        "distloop.launch: worker 1 failed first, with exit code 5; the others were stopped.",
    ]


LOST = "worker 0 ended, because another one had failed or fallen silent."  # on another host


@pytest.mark.parametrize(
    ("ends", "expected", "says"),
    [("'sorry'", 1, "worker 0 failed, with exit code 1."), (heartbeat.EXIT_CODE, heartbeat.EXIT_CODE, LOST)],
)
def test_a_single_worker_fails_alone(ends, expected, says, launch):
    code, _, err = launch(f"sys.exit({ends})")
    assert code == expected and err[-1] == f"distloop.launch: {says}" and "others" not in "".join(err)


def test_output_of_the_others_after_the_first_failure_is_not_shown(launch):
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
    code, out, err = launch(program, "--workers=2")
    assert code == 7 and "chorus" not in "".join(out + err)
    assert [line for line in out if "[worker 0]" in line] == ["[worker 0] before"]
    assert [line for line in out if "[worker 1]" in line] == [f"[worker 1] last words {i}" for i in range(20_000)]
    assert err[-2] == "distloop.launch: worker 0 ended with exit code 1."
    assert err[-1] == "distloop.launch: worker 1 failed first, with exit code 7; the others were stopped."


def test_the_last_output_of_a_worker_is_shown(start, tmp_path):
    process = start("wait_for('go')\nos.write(2, b'x' * 9999 + b'\\nlast')\nos._exit(3)")
    pid = read(tmp_path, "pid0")
    process.send_signal(signal.SIGSTOP)  # so that all of it is still in the pipe when the worker has ended
    (tmp_path / "go").touch()
    until(lambda: not is_running(pid))
    process.send_signal(signal.SIGCONT)
    code, _, err = end_of(process)
    assert code == 3 and err.splitlines()[:2] == ["[worker 0] " + "x" * 9999, "[worker 0] last"]


def test_the_first_failure_in_time_is_blamed(launch):
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
    code, _, err = launch(program, "--workers=2")
    assert code == 5 and "worker 1 failed first, with exit code 5" in err[-1]


@pytest.mark.parametrize("end", ["sys.exit(5)", "os.kill(os.getpid(), signal.SIGABRT)"])
def test_a_worker_that_ended_because_another_failed_is_not_blamed(end, launch):
    program = f"""
        if index == 1:
            sys.exit({heartbeat.EXIT_CODE})
        time.sleep(0.5)
        print("why")
        {end}
    """
    code, out, err = launch(program, "--workers=2")
    how, expected = ("with exit code 5", 5) if "exit" in end else ("by signal 6 (Aborted)", 128 + signal.SIGABRT)
    assert code == expected and out == ["[worker 0] why"]
    assert err[0] == "distloop.launch: worker 1 ended with exit code 76."
    assert err[-1] == f"distloop.launch: worker 0 failed first, {how}."


def test_a_hanging_worker_is_stopped_after_another_ended_because_of_it(launch, tmp_path):
    program = f"""
        if index == 1:
            wait_for("ready0")
            sys.exit({heartbeat.EXIT_CODE})
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note("ready0", 1)
        time.sleep(60)
    """
    code, _, err = launch(program, "--workers=2", "--grace_secs=0.2", command=patched(FAIL_SECS=0.2))
    assert code == heartbeat.EXIT_CODE and err == [
        "distloop.launch: worker 1 ended with exit code 76.",
        "distloop.launch: worker 0 ended by signal 9 (Killed).",
        "distloop.launch: worker 1 ended first, because another one had failed or fallen silent; the others were "
        "stopped.",
    ]


@pytest.mark.parametrize("code", [0, heartbeat.EXIT_CODE])
def test_workers_that_ended_for_one_elsewhere_start_again(code, launch):
    program = f"""
        count = len(list(here.glob(f"run*-{{index}}")))
        note(f"run{{count}}-{{index}}", 1)
        time.sleep(0.3 * index)
        sys.exit(0 if count else {code} if index else {heartbeat.EXIT_CODE})
    """
    exit_code, _, err = launch(program, "--workers=2", "--max_restarts=1", command=patched(_FIRST_PAUSE_SECS=0.01))
    assert exit_code == 0 and err[-1] == "distloop.launch: all workers start again in 0.01 s (restart 1 of 1)."
    assert " ended first, because another one had failed or fallen silent." in err[-2]


def test_restarts_are_bounded_and_counted(launch, tmp_path):
    program = """
        count = len(list(here.glob(f"run*-{index}")))
        note(f"run{count}-{index}", 1)
        print(config["cluster"]["worker"][0])
        if index == 1:
            wait_for(f"run{count}-0")
            sys.exit(9)
    """
    code, out, err = launch(program, "--workers=2", "--max_restarts=2", command=patched(_FIRST_PAUSE_SECS=0.1))
    assert code == 9 and len(list(tmp_path.glob("run*-1"))) == 3
    assert [line for line in err if "again" in line] == [
        f"distloop.launch: all workers start again in 0.{i} s (restart {i} of 2)." for i in (1, 2)
    ]
    assert err[-1].startswith("distloop.launch: worker 1 failed first, with exit code 9")
    assert len({line for line in out if "[worker 1]" in line}) == 3  # fresh ports


def test_workers_that_saved_are_not_restarted_and_others_have_time_to_save(launch, tmp_path):
    program = f"""
        note(f"run{{len(list(here.glob('run*')))}}-{{index}}", 1)
        time.sleep(0.5 * index)
        print("saved")
        sys.exit({EXIT_CODE})
    """
    code, out, err = launch(program, "--workers=2", "--max_restarts=3", "--grace_secs=0")
    assert code == EXIT_CODE and len(list(tmp_path.glob("run*"))) == 2
    assert sorted(out) == ["[worker 0] saved", "[worker 1] saved"]
    assert sorted(err) == [f"distloop.launch: worker {i} ended with exit code 75." for i in range(2)]


@pytest.mark.parametrize("heeds", [True, False])
def test_a_worker_that_does_not_follow_is_stopped(heeds, launch):
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
    code, _, err = launch(program, "--workers=2", f"--grace_secs={grace_secs}", command=patched(FOLLOW_SECS=0.2))
    assert code == (EXIT_CODE if heeds else 128 + signal.SIGKILL)
    assert "worker 0 ended " + ("with exit code 75" if heeds else "by signal 9") in err[-1]


def test_a_signal_ends_the_pause_before_a_restart(start, tmp_path):
    process = start("sys.exit(3)", "--max_restarts=1", command=patched(_FIRST_PAUSE_SECS=60))
    while "start again in 60 s" not in process.stderr.readline():
        pass
    process.terminate()
    assert process.wait(SECS) == 75
    assert process.stderr.read() == "distloop.launch: SIGTERM, the workers do not start again.\n"


def test_slots_of_workers_that_failed_are_empty_and_the_one_left_goes_on(launch):
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
    code, out, err = launch(program, "--workers=1:3", command=patched(_FIRST_PAUSE_SECS=60))
    cause = "worker 1 failed first, by signal 9 (Killed)"
    assert code == 0 and out[-1] == f"[worker 0] membership 2 of 1 {cause}"
    assert err[-1] == f"distloop.launch: membership 2 has 1 of 3 workers: {cause}."


def test_as_process_1_the_launcher_reaps_processes_that_lost_their_parent(start, tmp_path):
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
    process = start(program, command=[sys.executable, "-c", inherits + patched()[2]])
    for i in range(2):
        until(lambda i=i: not pathlib.Path(f"/proc/{read(tmp_path, f'orphan{i}')}").exists())
    assert process.poll() is None
    (tmp_path / "go").touch()
    assert process.wait(SECS) == 4


def test_who_failed_is_named_even_if_one_that_noticed_is_seen_with_it(start, tmp_path):
    program = "wait_for('go')\nsys.exit(76) if index == 0 else os.kill(os.getpid(), signal.SIGKILL)"
    process = start(program, "--workers=2")
    pids = read_each(tmp_path, "pid")
    process.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    until(lambda: all(b") Z " in pathlib.Path(f"/proc/{pid}/stat").read_bytes() for pid in pids))
    process.send_signal(signal.SIGCONT)
    assert process.wait(SECS) == 137
    assert "worker 1 failed first, by signal 9 (Killed)" in process.stderr.read()


KERNEL = """
import os, subprocess, sys

parent = f"--parent={os.getpid()}"
subprocess.run([sys.executable, "-m", "distloop.launch", "--workers=1", parent, *sys.argv[1:]], start_new_session=True)
"""
WORKER = """
import os, signal, subprocess, sys, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a step that does not end
child = subprocess.Popen(["sleep", "100"])
open(sys.argv[1], "w").write(f"{os.getppid()} {os.getpid()} {child.pid}")
time.sleep(100)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_quiet_workers_end_with_a_kernel_that_is_ended(number, start, tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL)
    (tmp_path / "worker.py").write_text(WORKER)
    paths = [str(tmp_path / name) for name in ("kernel.py", "worker.py", "run")]
    kernel = start("", command=[sys.executable, *paths])
    until(lambda: (tmp_path / "run").exists() and len((tmp_path / "run").read_text().split()) == 3)
    pids = (tmp_path / "run").read_text().split()
    assert all(map(is_running, pids))
    kernel.send_signal(number)
    kernel.wait(SECS)
    until(are_gone(pids))
