"""Rows from worker processes: law `processes`, and what becomes of the processes when a run or one of them ends."""

import contextlib
import functools
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.errors import as_user_error
from distloop.processes import row_processes
from tests import forked
from tests.problems import mostly_wide
from tests.processes import train
from tests.processes.python_sources import Imports, Kinds, Sizes, Waves, add_noise

STEPS = 12  # in epochs of 5
each_number = pytest.mark.parametrize("processes", mostly_wide([1, 2, 8], 2))


def children(pid):
    """Returns the processes that a process has started and that have not ended."""
    return [int(text) for task in pathlib.Path(f"/proc/{pid}/task").iterdir() for text in texts(task / "children")]


def texts(path):
    with contextlib.suppress(OSError):  # of a thread that has ended
        return path.read_text().split()
    return []


def has_ended(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(is_done, secs=60):
    end = time.monotonic() + secs
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.05)


def failure(dataset):
    with pytest.raises(tf.errors.OpError) as failed:
        list(dataset)
    return as_user_error(failed.value)


@functools.cache
def without_processes():
    return train.train("", 0, STEPS)


def program(*arguments):
    """Starts the program that trains."""
    command = [sys.executable, "-m", "tests.processes.train", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.slow
@each_number
def test_a_run_has_the_bits_of_the_run_without_processes(processes):
    assert train.train("", processes, STEPS) == without_processes()


@pytest.mark.parametrize(
    "source, arguments",
    [
        (Waves(), {"map_fn": add_noise}),
        (Kinds(), {"lengths": 1 + np.arange(37) % 5}),
        ({"x": np.arange(60, dtype="float32").reshape(20, 3)}, {"map_fn": add_noise}),
        (Waves(3), {}),  # fewer rows than processes
    ],
    ids=["waves", "kinds", "arrays", "few"],
)
def test_batches_are_those_without_processes(source, arguments):
    datasets = [distloop.make_dataset(source, 8, shuffle=True, processes=n, **arguments) for n in (0, 5)]
    for one, other in zip(*datasets, strict=True):
        for entry, same in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
            assert entry.dtype == same.dtype and entry.shape == same.shape and np.array_equal(entry, same)


def test_records_and_mixtures_of_sources_can_be_read_in_processes(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        for row in range(20):
            writer.write(b"record %d" % row)
    records = distloop.open_records(str(tmp_path / "a.tfrecord"))
    mixture = distloop.Mixture({"waves": Waves(), "more": Waves(5)}, {"waves": 0.8, "more": 0.2})
    packed = distloop.pack([[1, 2], [3], [4, 5, 6]], 4, lengths=[2, 1, 3])
    for source in (records, mixture, packed):
        one, other = (distloop.make_dataset(source, 4, processes=n) for n in (0, 2))
        tf.nest.map_structure(np.testing.assert_array_equal, list(one), list(other))


def test_memory_grows_with_the_rows():
    for megabytes in (1, 9):
        batches = list(distloop.make_dataset(Sizes(4, megabytes=megabytes), 3, processes=2))
        assert [batch[:, -1].numpy().tolist() for batch in batches] == [[0, 1, 2], [3]]


def test_worker_processes_are_others_and_do_not_import_tensorflow():
    (batch,) = distloop.make_dataset(Imports(8), 8, processes=2)
    assert not batch[:, 0].numpy().any() and len({os.getpid(), *batch[:, 1].numpy().tolist()}) == 3


def test_a_killed_worker_process_ends_the_reading_with_a_sentence():
    files = os.listdir("/dev/shm")
    dataset = distloop.make_dataset(Waves(killed=11), 8, processes=2)
    words = r"A worker process of make_dataset\(processes=2\) was killed by signal 9 .* the rows \[8, 9, 10, 11\] of"
    with pytest.raises(RuntimeError, match=words):
        raise failure(dataset)
    assert next(iter(dataset))["row"].numpy().tolist() == list(range(8))
    assert os.listdir("/dev/shm") == files


def test_an_error_in_a_row_is_the_one_without_processes():
    one, other = (failure(distloop.make_dataset(Waves(fails=12), 8, processes=n)) for n in (0, 2))
    assert type(one) is type(other) and str(one) == str(other)
    assert "Row 12 of the Waves given could not be read (ZeroDivisionError" in str(other)
    assert "python_sources.py" in str(other.__cause__)  # the traceback


def test_processes_without_work_end_and_start_again(monkeypatch):
    monkeypatch.setattr(row_processes, "_IDLE_SECS", 0.2)
    dataset = distloop.make_dataset(Imports(8), 8, processes=2)
    first = set(next(iter(dataset))[:, 1].numpy().tolist())
    for is_reaped in (False, True):  # just left, and long gone
        wait_until(lambda pids=first: all(map(has_ended, pids)))
        time.sleep(is_reaped)
        second = set(next(iter(dataset))[:, 1].numpy().tolist())
        assert len(second) == 2 and not first & second
        first = second


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_behind_and_resumes_with_its_bits(tmp_path):
    files = os.listdir("/dev/shm")
    run = program(tmp_path / "run", 2, 1000)
    wait_until(lambda: (tmp_path / "run" / "checkpoints" / "4").exists())
    workers = children(run.pid)
    assert len(workers) == 2
    run.kill()
    run.wait()
    wait_until(lambda: all(map(has_ended, workers)), secs=10)
    assert os.listdir("/dev/shm") == files
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        if path.name.isdecimal() and int(path.name) > STEPS:
            path.rename(tmp_path / path.name)
    digests = []
    for arguments in ((tmp_path / "run", 8, STEPS), ("", 0, STEPS)):
        done = forked.run(["-m", "tests.processes.train", *arguments], env=os.environ)
        assert len(done.stdout) == 65, done.stderr
        digests.append(done.stdout)
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_a_process_that_reads_a_row_ends_with_a_killed_run(tmp_path):
    run = program("", 2, 1000, 30)
    wait_until(lambda: len(children(run.pid)) == 2)
    workers = children(run.pid)
    time.sleep(1)
    run.kill()
    run.wait()
    wait_until(lambda: all(map(has_ended, workers)), secs=10)


@pytest.mark.slow
@pytest.mark.parametrize("to_all", mostly_wide([True, False]))
def test_a_stopped_run_saves_its_state_and_its_processes_end(to_all, tmp_path):
    run = program(tmp_path / "run", 2, 100_000)
    wait_until(lambda: (tmp_path / "run" / "checkpoints" / "4").exists())
    workers = children(run.pid)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    if to_all:
        for pid in workers:  # as a scheduler does
            os.kill(pid, signal.SIGTERM)
    _, errors = run.communicate(timeout=900)
    assert run.returncode == 75 and "Traceback" not in errors, errors
    assert all(map(has_ended, workers))


def test_a_function_of_the_program_is_imported_from_its_file(tmp_path):
    text = """
        import distloop

        def halve(example, seed):
            return example.item() // 2

        if __name__ == "__main__":
            print([batch.numpy().tolist() for batch in distloop.make_dataset(range(5), 3, map_fn=halve, processes=2)])
        """
    done = forked.run_program(tmp_path, text)
    assert done.stdout == "[[0, 0, 1], [1, 2]]\n", done.stderr
