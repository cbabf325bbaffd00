"""The lock of a workdir: who holds it, who is refused, and who takes it over from the dead."""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures

import pytest

from distloop.workdir import run_lock
from distloop.workdir.run_lock import DiskDirectory, LockLost, Pace, RunLock
from distloop.workers import messages


def write_lock(workdir, age=0.0, **fields):
    """Writes the lock of another process, which touched it `age` seconds ago."""
    holder = {"token": "another", "host": run_lock.socket.gethostname(), "machine": run_lock._machine()}
    holder |= {"process": os.getppid(), "start": run_lock.start_ticks(os.getppid()), "since": time.time() - 100}
    os.makedirs(workdir, exist_ok=True)
    path = os.path.join(workdir, "run.lock")
    with open(path, "w") as file:
        json.dump({**holder, **fields}, file)
    touched_at = time.time() - age
    os.utime(path, (touched_at, touched_at))
    return path


def holder_of(workdir):
    with open(os.path.join(workdir, "run.lock")) as file:
        return json.load(file)


@pytest.fixture
def no_sleep(monkeypatch):
    """Lets this thread not sleep, and returns how long it would have; threads of other tests sleep as before."""
    slept, sleep, own = [], time.sleep, threading.get_ident()
    monkeypatch.setattr(
        run_lock.time, "sleep", lambda secs: slept.append(secs) if threading.get_ident() == own else sleep(secs)
    )
    return slept


def test_the_file_names_host_process_and_start_and_is_gone_after_the_exit(tmp_path):
    workdir = str(tmp_path / "new" / "run")
    with RunLock(workdir) as lock:
        holder = holder_of(workdir)
        assert (holder["host"], holder["process"]) == (run_lock.socket.gethostname(), os.getpid())
        assert holder["start"].isdecimal() and abs(holder["since"] - time.time()) < 10
        lock.verify()
        assert os.listdir(workdir) == ["run.lock"]
    assert os.listdir(workdir) == []
    with pytest.raises(KeyboardInterrupt), RunLock(workdir):
        raise KeyboardInterrupt
    assert os.listdir(workdir) == []
    with RunLock(workdir):
        pass


@pytest.fixture
def in_membership(monkeypatch):
    """Returns a function that gives this process a place in a membership of a launcher."""

    def enter(number):
        membership = messages.Membership(number, "a", 1, 3, "", 0, (0, 0))
        monkeypatch.setenv(*next(iter(membership.variables().items())))

    return enter


def test_a_newer_membership_takes_the_lock_from_a_process_that_lives(tmp_path, in_membership):
    in_membership(2)
    old = RunLock(str(tmp_path)).__enter__()
    in_membership(3)
    with RunLock(str(tmp_path)) as new:
        new.verify()
        assert (holder_of(tmp_path)["launch"], holder_of(tmp_path)["membership"]) == ("a", 3)
        with pytest.raises(LockLost, match=r"\(membership 3\), since .*, as this one is of membership 2; it writes no"):
            old.verify()
    old.__exit__()


LIVES, HAS_ENDED = os.getppid(), 2**22 + 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"process": LIVES, "launch": "a", "membership": 3}, r"\(membership 3\)", id="newer, lives"),
        pytest.param({"process": HAS_ENDED, "launch": "a", "membership": 3}, r"\(membership 3\)", id="newer, ended"),
        pytest.param({"process": LIVES, "launch": "b", "membership": 1}, "", id="of another launcher: not compared"),
    ],
)
def test_an_older_membership_is_refused(fields, words, tmp_path, in_membership):
    write_lock(tmp_path, **fields)
    in_membership(2)
    with pytest.raises(ValueError, match=rf"is being written to by process {fields['process']} on .* {words}"):
        RunLock(str(tmp_path)).__enter__()


def test_a_second_process_is_refused_with_the_name_of_the_first(tmp_path, no_sleep):
    path = write_lock(tmp_path, age=1000, since=0.0)
    before = open(path).read()
    name = f"process {os.getppid()} on {run_lock.socket.gethostname()}, since 1970-01-01"
    with pytest.raises(ValueError, match=f"{name}.* give another workdir"):
        RunLock(str(tmp_path)).__enter__()
    assert open(path).read() == before and os.listdir(tmp_path) == ["run.lock"] and not no_sleep


def ended_process():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return child


@pytest.mark.parametrize(
    "fields",
    [
        lambda: {"process": ended_process()},
        lambda: {"start": "1"},  # the number belongs to another process now
        lambda: {"process": os.getpid(), "start": run_lock.start_ticks(os.getpid())},  # of a program before `exec`
        lambda: {"process": os.getpid(), "start": "1"},  # in a container, every program may have the same number
    ],
)
def test_a_process_of_this_host_that_has_ended_is_followed_at_once(fields, tmp_path, no_sleep):
    write_lock(tmp_path, **fields())
    with RunLock(str(tmp_path)) as lock:
        lock.verify()
        assert holder_of(tmp_path)["token"] != "another" and os.listdir(tmp_path) == ["run.lock"]
    assert no_sleep == [Pace().race_secs]


def test_a_zombie_has_ended(tmp_path, no_sleep):
    child = os.fork()
    if not child:
        signal.pause()
    start = run_lock.start_ticks(child)
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    write_lock(tmp_path, process=child, start=start)
    with RunLock(str(tmp_path)):
        os.waitpid(child, 0)


@pytest.fixture
def soon(monkeypatch):
    """Lets a process without a sign of life count as dead after half a second."""
    monkeypatch.setattr(DiskDirectory, "pace", Pace(stale_secs=0.5, poll_secs=0.01))


@pytest.mark.parametrize("fields", [{"host": "n17"}, {"machine": "another boot"}])
@pytest.mark.parametrize("age", [0.0, 10**6, -(10**6)])  # clocks of hosts may differ
def test_a_lock_of_another_host_is_taken_without_a_sign_of_life(fields, age, tmp_path, soon, capsys):
    write_lock(tmp_path, age=age, process=99, **fields)
    began_at = time.monotonic()
    with RunLock(str(tmp_path)):
        assert holder_of(tmp_path)["process"] == os.getpid() and time.monotonic() - began_at > 0.5
    (line,) = capsys.readouterr().out.splitlines()
    assert f"locked by process 99 on {fields.get('host', run_lock.socket.gethostname())}, since" in line
    assert "if it shows no sign of life for 0.5 seconds, this run goes on" in line
    assert os.listdir(tmp_path) == []


def test_a_living_process_of_another_host_is_noticed_by_its_next_sign(tmp_path, monkeypatch):
    path = write_lock(tmp_path, age=4, host="n17", process=99)
    monkeypatch.setattr(run_lock.time, "sleep", lambda secs: os.utime(path))
    with pytest.raises(ValueError, match="is being written to by process 99 on n17"):
        RunLock(str(tmp_path)).__enter__()
    assert os.listdir(tmp_path) == ["run.lock"]


@pytest.mark.parametrize("odd", ["", "half a lo", "[1]", '{"token": "x"}', "a pipe", "a dangling link"])
def test_what_is_no_lock_counts_as_one_until_it_shows_no_sign_of_life(odd, tmp_path, soon):
    path, holders = tmp_path / "run.lock", []
    if odd == "a pipe":
        os.mkfifo(path)
    elif odd == "a dangling link":
        path.symlink_to("/nowhere/else")
    else:
        path.write_text(odd)
        os.utime(path, (0, 0))

    def take():
        with RunLock(str(tmp_path)):
            holders.append(holder_of(tmp_path)["process"])

    thread = threading.Thread(target=take, daemon=True)  # which a pipe might keep for ever
    thread.start()
    thread.join(300)
    assert holders == [os.getpid()]


@pytest.mark.slow
def test_of_many_that_take_a_lock_over_one_has_it(tmp_path):
    write_lock(tmp_path, process=ended_process())
    everybody, are_refused = threading.Barrier(8), threading.Event()

    def compete(_):
        everybody.wait()
        try:
            with RunLock(str(tmp_path)) as lock:
                are_refused.wait(300)
                lock.verify()
                return "held"
        except ValueError as error:
            refused.append(error)
            if len(refused) == 7:
                are_refused.set()
            return "refused" if "being written to" in str(error) else str(error)

    refused = []
    with futures.ThreadPoolExecutor(8) as pool:
        outcomes = sorted(pool.map(compete, range(8)))
    assert outcomes == ["held", *["refused"] * 7] and os.listdir(tmp_path) == []


def test_a_removed_lock_is_written_again_and_one_taken_over_is_lost(tmp_path):
    workdir = tmp_path / "run"
    with RunLock(str(workdir)) as lock:
        (workdir / "run.lock").unlink()
        lock.verify()
        assert holder_of(workdir)["process"] == os.getpid()
        write_lock(workdir, host="n17", process=99)
        with pytest.raises(LockLost, match="was taken over by process 99 on n17.*writes no more there"):
            lock.verify()
    assert holder_of(workdir)["process"] == 99


@pytest.mark.parametrize("now", ["moved", "removed", "another directory"])
def test_a_directory_that_is_gone_is_said_and_not_made_again(now, tmp_path):
    workdir = tmp_path / "run"
    with RunLock(str(workdir)) as lock:
        workdir.rename(tmp_path / "moved")
        if now == "removed":
            shutil.rmtree(tmp_path / "moved")
        if now == "another directory":
            workdir.mkdir()
        for _ in range(2):
            with pytest.raises(LockLost, match="run' was moved or removed while .*, and nothing was made anew"):
                lock.verify()
    assert not list(workdir.iterdir()) if now == "another directory" else not workdir.exists()
    if now != "removed":
        with RunLock(str(tmp_path / "moved")) as lock:  # at once, as its process has released it
            lock.verify()


def test_the_file_is_touched_while_the_lock_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(DiskDirectory, "pace", Pace(heartbeat_secs=0.005))
    path = tmp_path / "run.lock"
    with RunLock(str(tmp_path)):
        os.utime(path, (0, 0))
        give_up = time.monotonic() + 300
        while os.stat(path).st_mtime == 0 and time.monotonic() < give_up:
            time.sleep(0.005)
        assert os.stat(path).st_mtime > 0
        for _ in range(2):  # the thread may be about to touch its own while that is replaced, and knows afterwards
            write_lock(tmp_path, age=1000, host="n17")
            time.sleep(0.05)
        assert os.stat(path).st_mtime < time.time() - 900  # the lock of another process is left alone


def test_a_forked_child_does_not_hold_the_lock_and_does_not_release_it(tmp_path):
    lock = RunLock(str(tmp_path))
    with lock:
        child = os.fork()
        if not child:
            status = 1
            try:
                with pytest.raises(LockLost, match="not in a child of it"):
                    lock.verify()
                for other in (RunLock(str(tmp_path)), lock):
                    with pytest.raises(ValueError, match=f"by process {os.getppid()} on"):
                        other.__enter__()
                lock.__exit__(None, None, None)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        lock.verify()


def test_a_directory_that_may_only_be_read_is_not_locked(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(run_lock, "open", refuse, raising=False)
    with RunLock(str(tmp_path)) as lock, pytest.raises(OSError, match="Read-only"):
        lock.verify()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_refused_in_a_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    class Full(io.FileIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_on_full_disk(path, mode="r", **options):
        return (Full if "x" in mode else open)(path, mode, **options)

    monkeypatch.setattr(run_lock, "open", open_on_full_disk, raising=False)
    with pytest.raises(ValueError, match="cannot be written .No space left on device.: give a directory"):
        RunLock(str(tmp_path)).__enter__()
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_killed_program_is_followed_at_once(tmp_path):
    program = (
        "import os, sys; from distloop.workdir.run_lock import RunLock\n"
        "with RunLock(sys.argv[1]): print('held', flush=True); os._exit(3)"
    )
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=900)
    assert result.stdout == "held\n" and os.listdir(tmp_path) == ["run.lock"], result.stderr
    with RunLock(str(tmp_path)):
        assert holder_of(tmp_path)["process"] == os.getpid()


def test_a_copy_that_is_still_locked_is_refused(tmp_path):
    with RunLock(str(tmp_path / "run")):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        for name in ("copy", "run"):
            with pytest.raises(ValueError, match=f"{name}' is being written to by another fit of this process"):
                RunLock(str(tmp_path / name)).__enter__()
    with RunLock(str(tmp_path / "copy")):  # the process has it no more
        pass
