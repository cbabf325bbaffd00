"""The standby process, whose workers are plain Python: they run as new processes do, and nothing is left behind."""

import os
import pathlib
import signal
import time

import pytest

from distloop.launcher import standby
from tests.launcher import test_processes
from tests.launcher.test_processes import is_running, patched, read, until

launch, start, write = test_processes.launch, test_processes.start, test_processes.write  # fixtures

# The worker tells what a standby process is to import; the second time it starts it shows whether that was imported.
TELLS = """
sys.path.insert(0, os.environ["PYTHONPATH"])
from distloop.distributed import notes
sys.path.pop(0)
membership = notes.find_membership()
if membership.tells_modules:
    membership.tell_modules(["colorsys", *told()])
membership.tell(begins=0, sizes=[])
is_fork, is_first = "colorsys" in sys.modules, membership.number == 1
"""
FAILS_ONCE = TELLS + "if is_first: sys.exit(9)\n"
WAITS_AND_FAILS_ONCE = TELLS + "if is_first: wait_for('go'), sys.exit(9)\n"
AGAIN = ["--workers=1", "--max_restarts=1"]
ENDED = "distloop.launch: the standby process has ended, workers start without it."


@pytest.fixture
def write_program(write):
    """Returns a function that writes a program, whose `told()` are modules for the standby process."""
    return lambda program, told="": write(f"def told(): return [{told}]\n" + program)


@pytest.fixture
def run(launch):
    """Returns a function that runs a program twice with a standby process; without pauses."""

    def run(path, *arguments, is_on=True, **settings):
        command = patched(_FIRST_PAUSE_SECS=0.0)
        return launch(f"--standby={int(is_on)}", *AGAIN, path, *arguments, command=command, **settings)

    return run


def standbys(launcher):
    """Returns the standby processes of a launcher."""
    children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    commands = {int(pid): pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, command in commands.items() if b"distloop.launcher.standby" in command]


def wait_for_standby(process):
    until(lambda: standbys(process.pid))
    (pid,) = standbys(process.pid)
    return pid


SHOWS = """
import threading
def show(*values):
    print(*values)
show(is_fork)
show(sys.argv, sys.orig_argv, sys.path, sys.flags, __name__, __file__, __package__, __spec__ and __spec__.name)
show([word for word in pathlib.Path("/proc/self/cmdline").read_text().split(chr(0)) if word])
show(sorted(os.listdir("/proc/self/fd")), sys.stdin.read(), sys.stdout.line_buffering, sys.stdout.write_through)
show(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), sorted(os.sched_getaffinity(0)), os.getcwd())
show(os.nice(0), os.sched_getscheduler(0), threading.active_count(), threading.current_thread().name)
show([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD)])
show(signal.pthread_sigmask(signal.SIG_BLOCK, []), sorted(set(os.environ) - {"_"}))
show(sys.modules["__main__"].show is show)
"""


@pytest.mark.parametrize("is_module", [False, True])
def test_a_worker_that_starts_again_is_as_a_new_process(is_module, run, write_program, tmp_path):
    path = write_program(FAILS_ONCE + SHOWS)
    program = ["-m", "program"] if is_module else [path]
    plain, warm = (run(*program, "--a=b c", "", is_on=is_on, cwd=tmp_path) for is_on in (False, True))
    assert (plain[1][0], warm[1][0]) == ("[worker 0] False", "[worker 0] True")
    assert plain[1][1:] == warm[1][1:] and plain[0] == warm[0] == 0


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("def fail(): raise ValueError('boom')\nfail()", 1),
        ("sys.exit('a text')", 1),
        ("sys.exit(7)", 7),
        ("raise KeyboardInterrupt", 128 + signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM), time.sleep(9)", 128 + signal.SIGTERM),
        ("import atexit, threading\natexit.register(print, 'last')\nthreading.Timer(0.2, print, ['late']).start()", 0),
    ],
)
def test_it_ends_as_a_new_process(end, code, run, write_program):
    path = write_program(FAILS_ONCE + "print('started')\n" + end)
    plain, warm = run(path, is_on=False), run(path)
    assert plain == warm and warm[0] == code and "[worker 0] started" in warm[1]


def test_each_worker_has_its_own_descriptors_cores_and_random_numbers(launch, write_program):
    program = TELLS + (
        "print(is_fork, index, os.environ['TF_CONFIG'][-12:], sorted(os.sched_getaffinity(0)), flush=True)\n"
        "import random, numpy\nprint('numbers', random.random(), numpy.random.random())\n"
        "if is_first: wait_for('pid1'), time.sleep(index), sys.exit(9 * index)\n"
    )
    command = patched(_FIRST_PAUSE_SECS=0.0)
    flags = ["--standby=1", "--workers=2", "--max_restarts=1", "--cores_per_worker=1", "--grace_secs=0"]
    code, out, err = launch(*flags, write_program(program, told="'numpy'"), command=command)
    assert code == 0 and ENDED not in err
    for i in range(2):
        lines = [line.removeprefix(f"[worker {i}] ").split(maxsplit=3) for line in out if f"[worker {i}] " in line]
        plain, warm = (line for line in lines if line[0] != "numbers")
        assert (plain[0], warm[0]) == ("False", "True") and plain[1:] == warm[1:]
    numbers = [number for line in out if "numbers" in line for number in line.split()[3:]]
    assert len(numbers) == len(set(numbers)) == 8


def test_the_standby_process_holds_no_files_and_no_threads_and_writes_nothing(start, write_program, tmp_path):
    (tmp_path / "noisy.py").write_text("import os; os.write(1, b'out'); os.write(2, b'err')")
    path = write_program(TELLS + "wait_for('go')", told="'noisy'")
    process = start("--standby=1", *AGAIN, path, cwd=tmp_path)
    pid = wait_for_standby(process)
    proc = pathlib.Path(f"/proc/{pid}")
    until(lambda: b"noisy" not in (proc / "cmdline").read_bytes() and _is_waiting(proc))
    descriptors = {number: os.readlink(proc / "fd" / number) for number in os.listdir(proc / "fd")}
    sockets = [target for target in descriptors.values() if target.startswith("socket:")]
    assert len(sockets) == 1 and set(descriptors.values()) == {"/dev/null", *sockets}
    assert len(os.listdir(proc / "task")) == 1
    (tmp_path / "go").touch()
    assert process.communicate(timeout=30) == ("", "") and process.returncode == 0
    assert not is_running(pid)


def _is_waiting(proc):
    """Returns whether a process has used no time for a while."""
    before = (proc / "stat").read_text().split()[13:15]
    time.sleep(0.5)
    return before == (proc / "stat").read_text().split()[13:15]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("told", ["", "'slow'"])
def test_no_standby_process_is_left_behind(number, told, start, write_program, tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    process = start("--standby=1", *AGAIN, write_program(TELLS + "time.sleep(60)", told=told), cwd=tmp_path)
    pid = wait_for_standby(process)
    pids = [pid, read(tmp_path, "pid0")]
    process.send_signal(number)
    process.wait(30)
    until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_of_it_ends_with_the_launcher_and_so_do_its_children(number, start, write_program, tmp_path):
    path = write_program(
        TELLS + "note(f'fork{is_fork}', os.getpid())\nif is_first: sys.exit(9)\nleave_child()\ntime.sleep(60)"
    )
    process = start("--standby=1", *AGAIN, path)
    pids = [read(tmp_path, "forkTrue"), read(tmp_path, "child0"), wait_for_standby(process)]
    process.send_signal(number)
    process.wait(30)
    until(lambda: not any(map(is_running, pids)))


def test_a_worker_of_it_that_is_killed_falls(start, write_program, tmp_path):
    path = write_program(
        TELLS + "note(f'fork{is_fork}', os.getpid())\nif is_first: sys.exit(9)\nleave_child()\ntime.sleep(60)"
    )
    process = start("--standby=1", *AGAIN, path)
    pids = [read(tmp_path, "forkTrue"), read(tmp_path, "child0")]
    os.kill(pids[0], signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 137 and "worker 0 ended by signal 9 (Killed)." in err
    assert not any(map(is_running, pids))


@pytest.mark.parametrize(("told", "secs"), [("", 0.0), ("", 1.5), ("'starts_thread'", 0.0), ("'kills_itself'", 0.0)])
def test_without_it_workers_start_as_ever(told, secs, start, write_program, tmp_path):
    (tmp_path / "starts_thread.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=[60]).start()"
    )
    (tmp_path / "kills_itself.py").write_text("import os; os.kill(os.getpid(), 9)")
    path = write_program(WAITS_AND_FAILS_ONCE + "print(is_fork)", told=told)
    process = start("--standby=1", *AGAIN, path, cwd=tmp_path)
    if not told:
        pid = wait_for_standby(process)
        time.sleep(secs)  # until it has imported, and waits
        os.kill(pid, signal.SIGKILL)
    (tmp_path / "go").touch()
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "[worker 0] False\n") and ENDED in err.splitlines()


def test_imports_are_waited_for_unless_a_signal_comes(start, write_program, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\nwhile not pathlib.Path('imported').exists(): time.sleep(0.01)"
    )
    path = write_program(FAILS_ONCE + "print(is_fork)", told="'slow'")
    command = patched(_FIRST_PAUSE_SECS=0.0)
    process = start("--standby=1", *AGAIN, path, cwd=tmp_path, command=command)
    pid = wait_for_standby(process)
    time.sleep(0.5)
    assert process.poll() is None and len(standbys(process.pid)) == 1
    (tmp_path / "imported").touch()
    assert process.communicate(timeout=30)[0] == "[worker 0] True\n"
    (tmp_path / "imported").unlink()
    process = start("--standby=1", *AGAIN, path, cwd=tmp_path, command=command)
    pid = wait_for_standby(process)
    time.sleep(0.5)
    process.terminate()
    assert process.wait(30) in (0, 128 + signal.SIGTERM) and not is_running(pid)


def test_a_program_that_tells_nothing_has_no_standby_process(start, write, tmp_path):
    process = start("--workers=1:2", write("wait_for('go')"))
    for i in range(2):
        read(tmp_path, f"pid{i}")
    assert standbys(process.pid) == []
    (tmp_path / "go").touch()
    assert process.wait(30) == 0


def test_a_directory_or_an_archive_is_started_as_ever(tmp_path):
    (tmp_path / "program.py").touch()
    programs = [["-m", "program"], [str(tmp_path / "program.py")], [str(tmp_path)], ["program.zip"]]
    assert [standby._can_run(program) for program in programs] == [True, True, False, False]


def test_one_that_does_not_come_so_far_is_not_tried_again(monkeypatch):
    lines = []
    monkeypatch.setattr(standby.processes, "log", lines.append)
    monkeypatch.setattr(standby, "_can_run", lambda program: True)
    process = standby.Standby(["program.py"], dict(os.environ), standby.processes.Signals())
    process.start(["no_such_module"])
    monkeypatch.setattr(process, "_wait_for_imports", lambda: (_ for _ in ()).throw(EOFError))
    assert process.fork({}, [], 0, {}) is None and not process.is_wanted
    assert lines == ["the standby process has ended, workers start without it."]
