"""A directory behind a URL: requests that fail, hang, or are cut short."""

from concurrent import futures
from unittest import mock

import pytest

from distloop.bucket.remote_directory import RemoteDirectory, RemoteError
from tests.bucket.unreliable import URL, Unreliable, bucket, empty


@pytest.fixture(autouse=True)
def no_files():
    empty()


def test_what_is_written_is_complete_though_30_percent_of_requests_fail(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(200)))
    for seed in range(20):
        with bucket(seed) as faults:
            remote = RemoteDirectory(URL)
            remote.upload(str(source), "a/b")
            remote.copy("a/b", "a/c")
            remote.write("d", b"text")
            assert remote.create("lock", b"one") and not remote.create("lock", b"another")
            assert remote.list() == {"a/b": 200, "a/c": 200, "d": 4, "lock": 3}
            assert remote.list("a") == {"b": 200, "c": 200}
            remote.download("a/c", str(target))
            assert (target.read_bytes(), remote.read("d"), remote.read("e")) == (source.read_bytes(), b"text", None)
            for name in remote.list():
                remote.delete(name)
            remote.delete("d")
            assert remote.list() == {} and len(faults.requests) > 30


def test_a_file_that_another_process_replaces_at_once_was_written(tmp_path, monkeypatch):
    remote = RemoteDirectory(f"file://{tmp_path}/run")
    mv = remote._system.mv

    def mv_then_replace(source, target):
        mv(source, target)
        (tmp_path / "run" / "lock").write_bytes(b"of another process")

    monkeypatch.setattr(remote._system, "mv", mv_then_replace)
    remote.write("lock", b"of this process")
    assert remote.read("lock") == b"of another process"


def test_of_processes_that_create_a_file_on_a_disk_at_once_one_succeeds(tmp_path):
    for i in range(20):
        with futures.ThreadPoolExecutor(4) as pool:
            directories = [RemoteDirectory(f"file://{tmp_path}/{i}") for _ in range(4)]
            is_own = pool.map(lambda one: one.create("lock", f"{id(one)}".encode()), directories)
            assert sum(is_own) == 1


@pytest.mark.parametrize("error, num_tries", [(PermissionError("403 Forbidden"), 1), (OSError("503"), 25)])
def test_an_error_that_no_try_mends_is_raised_at_once(error, num_tries, monkeypatch):
    with bucket(share=0.0):
        request = mock.Mock(side_effect=error)
        monkeypatch.setattr(Unreliable, "pipe_file", request)
        with pytest.raises(RemoteError, match=f"a: .*{error}"):
            RemoteDirectory(URL).write("a", b"")
    assert request.call_count == num_tries


def test_temporary_files_of_killed_processes_are_removed():
    with bucket(share=0.0):
        remote = RemoteDirectory(URL)
        for name in ("rows.0123abcd.tmp", "rows", "a.tmp"):
            remote.write(name, b"")
        remote.remove_leftovers()
        assert set(remote.list()) == {"rows", "a.tmp"}
