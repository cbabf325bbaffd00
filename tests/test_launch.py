"""The launcher, with workers that are plain Python: how they start, what is seen of them, and that none is left."""

import functools
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from distloop.distributed import heartbeat
from distloop.distributed.preemption import EXIT_CODE

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECS = 30  # what a test waits for at most
LAUNCH = [sys.executable, "-m", "distloop.launch"]

# What every program below begins with. `leave_child` starts one that outlives its parent if nobody ends it.
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
    """Returns a function that writes a program, whose path it returns."""

    def write(program, name="program.py"):
        (tmp_path / name).write_text(PRELUDE + textwrap.dedent(program))
        return str(tmp_path / name)

    return write


@pytest.fixture
def start():
    """Returns a function that starts the launcher in a process group of its own; kills what is left of it."""
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
    """Returns a function that runs the launcher to its end: its exit code, and the lines of stdout and stderr."""

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
    """Waits for what a worker notes, a whole number."""
    until((directory / name).exists)
    return int((directory / name).read_text())


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_each_worker_gets_its_own_tf_config(launch, write):
    code, out, err = launch("--workers=3", write("print(os.environ['TF_CONFIG'])"))
    assert (code, err) == (0, [])
    configs = [json.loads(line.split("] ")[1]) for line in sorted(out)]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": i} for i in range(3)]
    clusters = [config["cluster"] for config in configs]
    assert clusters[0] == clusters[1] == clusters[2] and list(clusters[0]) == ["worker"]
    hosts, ports = zip(*(address.split(":") for address in clusters[0]["worker"]), strict=True)
    assert set(hosts) == {"127.0.0.1"} and len({int(port) for port in ports}) == 3


def test_what_stands_behind_the_program_is_the_programs(launch, write):
    arguments = ["--workers=3", "-m", "x", "--help", "--", "-", "", "a b"]
    path = write("print(json.dumps(sys.argv))")
    code, out, _ = launch("--workers", "1", path, *arguments)
    assert code == 0 and json.loads(out[0].partition("] ")[2]) == [path, *arguments]


def test_modules_run_like_scripts(launch, write, tmp_path):
    (tmp_path / "package").mkdir()
    write("print(__name__, __package__, sys.argv[1:])", "package/module.py")
    code, out, err = launch("--workers=2", "-m", "package.module", "--workers=3", cwd=tmp_path)
    assert (code, err) == (0, [])
    assert sorted(out) == [f"[worker {i}] __main__ package ['--workers=3']" for i in range(2)]


def test_devices_per_worker_reach_the_program(launch, write):
    code, out, _ = launch("--devices_per_worker=2", write("print(sys.argv[1:])"), "--steps=3")
    assert (code, out) == (0, ["[worker 0] ['--steps=3', '--num_devices=2']"])


@pytest.mark.parametrize(
    ("visible", "flags", "expected"),
    [
        ("4,5,6,7", [], ["4,5", "6,7"]),
        ("4,5,6,7", ["--devices_per_worker=1"], ["4", "5"]),
        ("GPU-ab, MIG-cd,-1,3", [], ["GPU-ab", "MIG-cd"]),
        ("-1", ["--devices_per_worker=2"], ["-1", "-1"]),
        ("", [], ["", ""]),
    ],
)
def test_each_worker_sees_its_own_gpus(visible, flags, expected, launch, write):
    path = write("print(os.environ['CUDA_VISIBLE_DEVICES'])")
    code, out, _ = launch("--workers=2", *flags, path, env={"CUDA_VISIBLE_DEVICES": visible})
    assert code == 0 and sorted(out) == [f"[worker {i}] {gpus}" for i, gpus in enumerate(expected)]


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


def test_of_a_line_that_is_written_over_its_last_state_is_shown(launch, write):
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


def test_progress_without_an_end_is_shown_now_and_then(launch, write):
    program = """
        for i in range(20):
            os.write(2, b"\\r%d" % i)
            time.sleep(0.02)
    """
    _, _, err = launch(write(program), command=patched(_PROGRESS_SECS=0.1))
    assert 3 <= len(err) <= 5 and err[-1] == "[worker 0] 19"


def patched(**constants):
    """Returns the launcher's command, with other constants."""
    lines = "".join(f"launch.{name} = {value}; " for name, value in constants.items())
    return [sys.executable, "-c", f"import sys; from distloop import launch; {lines}sys.exit(launch.main())"]


def test_lines_come_at_once(start, write, tmp_path):
    process = start(write("print('hello')\nwait_for('go')"))
    assert select.select([process.stdout], [], [], SECS)[0]
    assert process.stdout.readline() == "[worker 0] hello\n" and process.poll() is None
    (tmp_path / "go").touch()
    assert process.wait(SECS) == 0


def test_one_that_is_done_waits_for_the_others(launch, write):
    program = """
        if index:
            print("late", flush=time.sleep(0.3))
    """
    assert launch("--workers=2", write(program)) == (0, ["[worker 1] late"], [])


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


@pytest.mark.parametrize("to_group", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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


def test_one_that_ends_by_the_signal_that_was_passed_on_is_not_restarted(start, write, tmp_path):
    process = start("--workers=2", "--max_restarts=3", write("time.sleep(60)"))
    for i in range(2):
        read(tmp_path, f"pid{i}")
    process.terminate()
    _, err = process.communicate(timeout=SECS)
    assert process.returncode == 128 + signal.SIGTERM and "again" not in err.partition("again to kill")[2]
    assert sorted(err.splitlines()[1:]) == [
        f"distloop.launch: worker {i} ended by signal 15 (Terminated)." for i in (0, 1)
    ]


def test_one_that_was_sent_a_signal_gets_no_second_one_before_it_is_killed(start, write, tmp_path):
    program = f"""
        signal.signal(signal.SIGTERM, lambda *_: (print("asked"), note(f"asked{{index}}", 1)))
        note(f"ready{{index}}", 1)
        while not (index and (here / "asked1").exists()):
            time.sleep(0.01)
        sys.exit({EXIT_CODE})
    """
    process = start("--workers=2", "--grace_secs=0.1", write(program), command=patched(_FOLLOW_SECS=0.2))
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


def test_when_nobody_reads_any_more_the_workers_are_asked_to_end(start, write, tmp_path):
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
def test_a_launcher_that_is_killed_leaves_nobody(how, start, write, tmp_path):
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


def test_a_launcher_that_is_killed_while_it_starts_leaves_nobody(start, write, tmp_path):
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
    """Lists the processes that have an argument in their command line."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if argument.encode() in words and is_running(int(path.parent.name)):
            found.append(int(path.parent.name))
    return found


def test_no_guard_is_left_either(launch, start, write, tmp_path):
    def guards(parent):
        found = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return [int(pid) for pid in found if b"groups" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]

    process = start(write("wait_for('go')"))
    read(tmp_path, "pid0")
    (guard,) = guards(process.pid)
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


def test_one_that_does_not_heed_sigterm_is_killed_after_the_grace_time(launch, write, tmp_path):
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


def test_after_the_first_failure_the_others_are_not_heard(launch, write):
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


def test_what_a_worker_wrote_just_before_its_end_is_shown(start, write, tmp_path):
    process = start(write("wait_for('go')\nos.write(2, b'x' * 9999 + b'\\nlast')\nos._exit(3)"))
    pid = read(tmp_path, "pid0")
    process.send_signal(signal.SIGSTOP)  # so that all of it is still in the pipe when the worker has ended
    (tmp_path / "go").touch()
    until(lambda: not is_running(pid))
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=SECS)
    assert process.returncode == 3
    assert err.splitlines()[:2] == ["[worker 0] " + "x" * 9999, "[worker 0] last"]


def test_the_first_in_time_is_blamed_not_the_first_in_order(launch, write):
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
def test_one_that_ended_because_another_one_failed_is_not_blamed(end, launch, write):
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


def test_one_that_hangs_and_made_another_one_end_is_stopped(launch, write, tmp_path):
    program = f"""
        if index == 1:
            wait_for("ready0")
            sys.exit({heartbeat.EXIT_CODE})
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note("ready0", 1)
        time.sleep(60)
    """
    command = patched(_FAIL_SECS=0.2)
    code, _, err = launch("--workers=2", "--grace_secs=0.2", write(program), command=command)
    assert code == heartbeat.EXIT_CODE and err == [
        "distloop.launch: worker 1 ended with exit code 76.",
        "distloop.launch: worker 0 ended by signal 9 (Killed).",
        "distloop.launch: worker 1 ended first, because another one had failed or fallen silent; the others were "
        "stopped.",
    ]


@pytest.mark.parametrize("code", [0, heartbeat.EXIT_CODE])
def test_where_no_one_here_failed_the_first_that_ended_for_it_is_named_and_all_start_again(code, launch, write):
    program = f"""
        count = len(list(here.glob(f"run*-{{index}}")))
        note(f"run{{count}}-{{index}}", 1)
        time.sleep(0.3 * index)
        sys.exit(0 if count else {code} if index else {heartbeat.EXIT_CODE})
    """
    found, _, err = launch("--workers=2", "--max_restarts=1", write(program))
    assert found == 0 and err[-1] == "distloop.launch: all workers start again (restart 1 of 1)."
    assert " ended first, because another one had failed or fallen silent." in err[-2]


def test_a_worker_that_lost_one_on_another_host_says_so(launch, write, ports):
    flags = ["--hosts=a,b", "--host_index=1", f"--port={ports}"]
    code, _, err = launch(*flags, write(f"sys.exit({heartbeat.EXIT_CODE})"))
    assert code == heartbeat.EXIT_CODE
    assert err[-1] == "distloop.launch: worker 1 ended, because another one had failed or fallen silent."


@pytest.mark.parametrize("given", [None, "0"])
def test_tensorflow_is_told_to_be_quiet_unless_it_was_told_something_else(given, launch, write, monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    path = write("print(os.environ['TF_CPP_MIN_LOG_LEVEL'])")
    code, out, _ = launch(path, env={} if given is None else {"TF_CPP_MIN_LOG_LEVEL": given})
    assert code == 0 and out == [f"[worker 0] {given or 2}"]


CRASHES = """
    count = len(list(here.glob(f"run*-{index}")))
    note(f"run{count}-{index}", 1)
    print("run", count, config["cluster"]["worker"][0])
    if index == 1:
        wait_for(f"run{count}-0")
        sys.exit(9 if count < int(sys.argv[1]) else 0)
"""


def test_restarts_are_bounded_and_counted(launch, write, tmp_path):
    code, out, err = launch("--workers=2", "--max_restarts=2", write(CRASHES), "99")
    assert code == 9 and len(list(tmp_path.glob("run*-1"))) == 3
    assert [line for line in err if "again" in line] == [
        f"distloop.launch: all workers start again (restart {i} of 2)." for i in (1, 2)
    ]
    assert err[-1].startswith("distloop.launch: worker 1 failed first, with exit code 9")
    assert len({line.split()[-1] for line in out if "[worker 1]" in line}) == 3  # fresh ports


def test_a_restart_that_goes_well_is_a_success(launch, write, tmp_path):
    code, _, err = launch("--workers=2", "--max_restarts=5", write(CRASHES), "1")
    assert code == 0 and len(list(tmp_path.glob("run*-1"))) == 2 and "restart 1 of 5" in err[-1]


def test_one_that_saved_and_left_is_not_restarted(launch, write, tmp_path):
    program = f"""
        note(f"run{{len(list(here.glob('run*')))}}-{{index}}", 1)
        sys.exit({EXIT_CODE})
    """
    code, _, err = launch("--workers=2", "--max_restarts=3", write(program))
    assert code == EXIT_CODE and len(list(tmp_path.glob("run*"))) == 2
    assert sorted(err) == [f"distloop.launch: worker {i} ended with exit code 75." for i in range(2)]


def test_when_one_saved_and_left_the_others_have_time_to_follow(launch, write):
    program = f"""
        time.sleep(0.5 * index)
        print("saved")
        sys.exit({EXIT_CODE})
    """
    code, out, _ = launch("--workers=2", "--grace_secs=0", write(program))
    assert code == EXIT_CODE and sorted(out) == ["[worker 0] saved", "[worker 1] saved"]


@pytest.mark.parametrize("heeds", [True, False])
def test_one_that_does_not_follow_is_stopped_in_the_end(heeds, launch, write):
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
    code, _, err = launch(
        "--workers=2", f"--grace_secs={grace_secs}", write(program), command=patched(_FOLLOW_SECS=0.2)
    )
    assert code == (EXIT_CODE if heeds else 128 + signal.SIGKILL)
    assert "worker 0 ended " + ("with exit code 75" if heeds else "by signal 9") in err[-1]


@pytest.fixture
def ports():
    """Returns the first of three free ports in a row."""
    for first in range(21_000, 32_000, 3):
        probes = [socket.socket() for _ in range(3)]
        try:
            for i, probe in enumerate(probes):
                probe.bind(("", first + i))
            return first
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()


def test_each_host_starts_its_own_share(launch, write, ports):
    flags = ["--hosts=127.0.0.1,node-1.example", "--workers=2", f"--port={ports}"]
    path = write("print(os.environ['TF_CONFIG'])")
    for host in range(2):
        code, out, _ = launch(*flags, f"--host_index={host}", path)
        assert code == 0
        for i, line in enumerate(sorted(out)):
            index = 2 * host + i
            prefix, _, config = line.partition("] ")
            addresses = [f"{name}:{ports + j}" for name in ("127.0.0.1", "node-1.example") for j in range(2)]
            assert prefix == f"[worker {index}"
            assert json.loads(config) == {
                "cluster": {"worker": addresses},
                "task": {"type": "worker", "index": index},
            }


@pytest.mark.parametrize(
    ("flags", "index", "expected"),
    [(["--hosts=a,b"], "1", 1), (["--hosts=a,b"], "0", 0), (["--hosts=a,b", "--host_index=0"], "1", 0), ([], "7", 0)],
)
def test_an_indexed_job_of_kubernetes_numbers_its_hosts(flags, index, expected, launch, write, ports):
    flags = [*flags, *([f"--port={ports}"] if flags else [])]
    code, out, _ = launch(*flags, write("print(index)"), env={"JOB_COMPLETION_INDEX": index})
    assert (code, out) == (0, [f"[worker {expected}] {expected}"])


@pytest.mark.parametrize("index", ["2", "-1", "one", ""])
def test_an_index_of_kubernetes_that_is_no_hosts_is_refused(index, launch, write):
    code, out, err = launch("--hosts=a,b", write(""), env={"JOB_COMPLETION_INDEX": index})
    assert (code, out) == (2, []) and "is not allowed with 2 hosts: give each host its own, from 0 to 1" in err[0]


CORES = len(os.sched_getaffinity(0))
THREADS = "print(*(os.environ.get(f'TF_NUM_{name}_THREADS') for name in ('INTRAOP', 'INTEROP')))"


@pytest.mark.parametrize(
    ("flags", "given", "expected"),
    [
        (["--workers=1"], {}, "None None"),
        (["--workers=2"], {}, f"{max(1, CORES // 2)} {max(2, CORES // 2)}"),
        (["--workers=3"], {"TF_NUM_INTRAOP_THREADS": "5"}, f"5 {max(2, CORES // 3)}"),
        (["--workers=2"], {"TF_NUM_INTRAOP_THREADS": "0", "TF_NUM_INTEROP_THREADS": "4"}, "0 4"),
    ],
)
def test_workers_share_the_cores_unless_the_user_set_threads(flags, given, expected, launch, write):
    _, out, _ = launch(*flags, write(THREADS), env=given)
    assert {line.partition("] ")[2] for line in out} == {expected}


def test_workers_share_the_cores_that_the_launcher_may_use(launch, write):
    # There are not so many: they are counted, but no worker is bound to them.
    share = "import os, sys; from distloop import launch; os.sched_getaffinity = lambda pid: range(13); "
    share += "os.sched_setaffinity = lambda pid, cores: None; "
    command = [sys.executable, "-c", share + "sys.exit(launch.main())"]
    _, out, _ = launch("--workers=3", write(THREADS), command=command)
    assert {line.partition("] ")[2] for line in out} == {"4 4"}


SHARES = "print(*sorted(os.sched_getaffinity(0)))"


def shares(launch, write, *flags, **settings):
    """Returns the cores that each worker may use, as sets."""
    code, out, err = launch(*flags, write(SHARES), **settings)
    assert (code, err) == (0, [])
    return [set(line.partition("] ")[2].split()) for line in sorted(out)]


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
def test_each_worker_runs_on_cores_of_its_own(launch, write):
    first, second = shares(launch, write, "--workers=2")
    assert len(first) == len(second) == CORES // 2 and not first & second
    assert [len(share) for share in shares(launch, write, "--workers=2", "--cores_per_worker=1")] == [1, 1]
    assert [len(share) for share in shares(launch, write, "--cores_per_worker=1")] == [1]


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        (["--workers=2", "--cores_per_worker=0"], {}),
        (["--workers=1"], {}),
        ([f"--workers={CORES + 1}"], {}),
        (["--workers=2"], {"CUDA_VISIBLE_DEVICES": "0,1"}),
    ],
)
def test_workers_run_on_any_core_where_that_is_better_or_wanted(flags, given, launch, write):
    assert {len(share) for share in shares(launch, write, *flags, env=given)} == {CORES}


def test_more_cores_than_there_are_are_refused(launch, write):
    code, out, err = launch("--workers=2", f"--cores_per_worker={CORES}", write(""))
    assert (code, out) == (2, []) and err == [
        f"distloop.launch: cores_per_worker={CORES} is too much for workers=2 on {CORES} cores: give {CORES // 2} or "
        "less; 0 shares all cores."
    ]


@pytest.mark.slow
def test_tensorflow_heeds_the_shares_of_cores():
    program = """
        import os
        import tensorflow as tf
        tf.function(lambda a: a @ a)(tf.ones([500, 500]))
        print(len(os.listdir("/proc/self/task")))
    """

    def threads(intra, inter):
        given = {"TF_NUM_INTRAOP_THREADS": str(intra), "TF_NUM_INTEROP_THREADS": str(inter)}
        command = [sys.executable, "-c", textwrap.dedent(program)]
        return int(subprocess.check_output(command, env={**os.environ, **given}, stderr=subprocess.DEVNULL))

    few = threads(2, 2)
    assert threads(12, 2) >= few + 10 and threads(2, 12) >= few + 10


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_port_that_is_taken_is_told_before_anything_starts(kind, launch, write, ports, tmp_path):
    with socket.socket(type=kind) as taken:
        taken.bind(("127.0.0.1", ports + 1))
        if kind == socket.SOCK_STREAM:
            taken.listen()
        flags = ["--hosts=a,b", "--host_index=1", "--workers=2", f"--port={ports}"]
        code, out, err = launch(*flags, write(""))
    assert (code, out) == (2, []) and not list(tmp_path.glob("pid*"))
    assert err == [
        f"distloop.launch: port {ports + 1} is taken on this host, but worker 3 is to have it: give another --port, "
        "the same on every host, or end what listens there."
    ]


def test_with_hosts_all_here_start_again_on_the_same_ports(launch, write, ports):
    flags = ["--hosts=a,b", "--host_index=0", "--workers=2", f"--port={ports}", "--max_restarts=1"]
    code, out, err = launch(*flags, write(CRASHES), "1")
    assert code == 0 and "restart 1 of 1" in err[-1]
    assert {line.split()[-1] for line in out} == {f"a:{ports}"} and len(out) == 4


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("", "no program was given: end the command with a script or -m and a module"),
        ("--workers=2", "no program was given"),
        ("--workers=2 -m", "no program was given"),
        ("--workers=0 PROGRAM", "workers=0 is not allowed: give 1 or more"),
        ("--workers=-1 PROGRAM", "workers=-1 is not allowed: give 1 or more"),
        ("--workers=two PROGRAM", "--workers: invalid int value: 'two'; --help tells"),
        ("--workers", "--workers: expected one argument"),
        ("--devices_per_worker=0 PROGRAM", "devices_per_worker=0 is not allowed: give 1 or more, or leave it out"),
        ("--max_restarts=-1 PROGRAM", "max_restarts=-1 is not allowed: give 0 or more"),
        ("--grace_secs=nan PROGRAM", "grace_secs=nan is not allowed: give 0 or more"),
        ("--work=2 PROGRAM", "--work=2 is no flag of the launcher: give its own flags (--help lists them) before"),
        ("--steps 5 PROGRAM", "--steps is no flag of the launcher"),
        ("nowhere/program.py", "there is no file 'nowhere/program.py': give the path of a script, or -m and a module"),
        ("-m nowhere.program", "there is no module 'nowhere.program' here"),
        ("--host_index=0 PROGRAM", "--host_index was given without --hosts"),
        ("--port=5000 PROGRAM", "--port was given without --hosts"),
        ("--hosts=a,b PROGRAM", "host_index=None is not allowed with 2 hosts: give each host its own, from 0 to 1"),
        ("--hosts=a,b --host_index=2 PROGRAM", "host_index=2 is not allowed with 2 hosts"),
        ("--hosts=a,a --host_index=1 PROGRAM", "hosts=a,a is not allowed: give names or IPv4 addresses, each once"),
        ("--hosts=a:1,b --host_index=1 PROGRAM", "hosts=a:1,b is not allowed"),
        ("--hosts=a, --host_index=0 PROGRAM", "hosts=a, is not allowed"),
        ("--hosts=a --host_index=0 --port=65535 --workers=2 PROGRAM", "port=65535 leaves no room for 2 workers"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_one_sentence(command, sentence, launch, write, tmp_path):
    path = write("")
    code, out, err = launch(*command.replace("PROGRAM", path).split())
    assert (code, out) == (2, []) and len(err) == 1 and err[0].startswith("distloop.launch: ") and sentence in err[0]
    assert not list(tmp_path.glob("pid*"))


def test_too_few_gpus_are_refused(launch, write):
    code, _, err = launch("--workers=2", "--devices_per_worker=2", write(""), env={"CUDA_VISIBLE_DEVICES": "0,1,2"})
    assert code == 2 and err == [
        "distloop.launch: 3 GPUs are too few for workers=2 with 2 each: ask for fewer, or set CUDA_VISIBLE_DEVICES=-1 "
        "to run on CPUs."
    ]


def test_the_launcher_starts_without_tensorflow(launch):
    heavy = "{'tensorflow', 'keras', 'numpy'}"
    program = (
        f"import sys, distloop.launch; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    )
    code, _, err = launch(command=[sys.executable, "-c", program])
    assert code == 0, err


def test_help_tells_the_flags(launch):
    code, out, err = launch("--help")
    assert (code, err) == (0, []) and "--max_restarts N" in "".join(out) and "python -m distloop.launch" in out[0]
