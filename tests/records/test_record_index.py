import concurrent.futures
import contextlib
import io
import os
import pathlib
import shutil
import struct
import threading
import time
import unittest.mock

import numpy as np
import pytest

import distloop
from distloop import atomic_files
from distloop.records import record_index
from distloop.records.record_index import Files, index_path, open_index, scan_shard
from tests.records.record_shards import contents, corrupt, position_of, write


@pytest.fixture
def paths(tmp_path):
    """Three shards of 10, 20 and 30 records."""
    shards = [str(tmp_path / f"{i}.tfrecord") for i in range(3)]
    for i, path in enumerate(shards):
        write(path, contents(10 * (i + 1)))
    return shards


@pytest.fixture
def scanned(monkeypatch):
    """The numbers of the shards whose headers have been read."""
    found, scan = [], record_index.scan_shard
    monkeypatch.setattr(record_index, "scan_shard", lambda *arguments: found.append(arguments[1]) or scan(*arguments))
    return found


def equal(index, other):
    return index[0] == other[0] and np.array_equal(index[1], other[1])


def test_the_headers_are_read_once(paths, scanned, tmp_path):
    for _ in range(2):
        distloop.open_records(paths, index_dir=tmp_path / "new" / "indices")
    assert len(scanned) == 3 and len(os.listdir(tmp_path / "new" / "indices")) == 1
    assert sorted(os.listdir(tmp_path)) == ["0.tfrecord", "1.tfrecord", "2.tfrecord", "new"]
    scanned.clear()
    index = open_index(Files(paths))
    assert sorted(scanned) == [0, 1, 2]
    assert equal(open_index(Files(paths)), index) and len(scanned) == 3
    assert index[1].dtype == np.int64 and len(index[1]) == 63
    assert open_index(Files(paths))[1].flags.aligned
    assert len(distloop.open_records(tmp_path / "*").shards) == 3  # the index is hidden from patterns
    shutil.copytree(tmp_path, tmp_path / "elsewhere", copy_function=shutil.copy2)
    moved = [str(tmp_path / "elsewhere" / os.path.basename(path)) for path in paths]
    assert [shard.path for shard in open_index(Files(moved))[0]] == moved and len(scanned) == 3
    for files in (paths[:2], paths[::-1]):  # another list of files has another index
        for _ in range(2):
            assert len(open_index(Files(files))[0]) == len(files)
    assert len(scanned) == 8


def test_a_copied_shard_is_read_again_and_the_index_is_refreshed(paths, scanned, caplog):
    before = distloop.open_records(paths)
    scanned.clear()
    shutil.copy(paths[1], f"{paths[1]}.new")
    os.utime(f"{paths[1]}.new", (1, 1))
    os.replace(f"{paths[1]}.new", paths[1])
    for _ in range(2):
        assert distloop.open_records(paths).fingerprint == before.fingerprint
    assert scanned == [1] and not caplog.records


@pytest.mark.parametrize(("count", "mark"), [(20, b"ROW"), (7, b"row")], ids=["same size", "another size"])
def test_a_shard_with_other_records_is_named_with_what_to_do(paths, count, mark):
    records = distloop.open_records(paths)
    before, index = records.shards[1].num_bytes, index_path(paths)
    write(paths[1], contents(count, mark))
    sentence = f"20 records in {before} bytes, and it has {count} other ones in {os.path.getsize(paths[1])} bytes"
    for _ in range(2):
        with pytest.raises(ValueError, match=f"The shard '.*1.tfrecord' has changed: .*{sentence}") as error:
            distloop.open_records(paths)
    assert f"delete {index!r}" in str(error.value)
    os.remove(index)
    assert "1.tfrecord" in distloop.open_records(paths).describe_change(records.fingerprint)


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: data[:-20] + bytes([data[-20] ^ 4]) + data[-19:],
        lambda data: data[:-8],
        lambda data: b"",
        lambda data: b"distloop records 0" + data[18:],
    ],
    ids=["a bit", "the end", "all", "another format"],
)
def test_a_damaged_index_is_made_again(paths, scanned, caplog, harm):
    index = open_index(Files(paths))
    path = pathlib.Path(index_path(paths))
    path.write_bytes(harm(path.read_bytes()))
    scanned.clear()
    assert equal(open_index(Files(paths)), index) and len(scanned) == 3
    assert "cannot be read (it is damaged): the headers of the shards are read again" in caplog.text
    assert equal(open_index(Files(paths)), index) and len(scanned) == 3


def test_an_index_that_another_host_is_writing_is_none(paths, caplog, monkeypatch):
    @contextlib.contextmanager
    def removed_before_it_is_renamed(path):
        with atomic_files.replacing(path) as temporary:
            yield temporary
            monkeypatch.setattr(atomic_files, "_is_used", lambda leftover: False)  # as seen from another host
            atomic_files.remove_leftovers(os.path.dirname(path))

    monkeypatch.setattr(record_index, "replacing", removed_before_it_is_renamed)
    assert len(distloop.open_records(paths)) == 60
    assert not os.path.exists(index_path(paths)) and "cannot be written" not in caplog.text


def test_an_index_that_cannot_be_written_or_read_is_a_warning(paths, scanned, caplog, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(record_index, "replacing", unittest.mock.Mock(side_effect=PermissionError(13, "denied")))
        for count in (1, 2):
            assert len(distloop.open_records(paths)) == 60 and len(scanned) == 3 * count
    assert "cannot be written (" in caplog.text and "index_dir=" in caplog.text
    os.mkdir(index_path(paths))
    assert "cannot be read" not in caplog.text
    assert len(distloop.open_records(paths)) == 60
    assert "cannot be read" in caplog.text


def test_whoever_makes_the_index_at_the_same_time_leaves_a_whole_one(paths, scanned, monkeypatch):
    scan, everyone = record_index.scan_shard, threading.Barrier(4)

    def scan_shard(files, number, stat):
        if number == 0:
            everyone.wait(300)
        return scan(files, number, stat)

    monkeypatch.setattr(record_index, "scan_shard", scan_shard)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        indices = list(pool.map(lambda _: open_index(Files(paths)), range(4)))
    assert len(scanned) == 12
    assert all(equal(index, open_index(Files(paths))) for index in indices) and len(scanned) == 12
    assert len(os.listdir(os.path.dirname(paths[0]))) == 4


def test_a_million_records_open_in_a_moment(tmp_path, scanned):
    path = str(tmp_path / "many")
    write(path, [b"row"])
    index = open_index(Files([path]))
    many = index[0], np.arange(1_000_001, dtype=np.int64)
    record_index._store(index_path([path]), *many)
    start = time.thread_time()  # of this thread, which reads the index
    assert equal(open_index(Files([path])), many)
    assert time.thread_time() - start < 0.1 and len(scanned) == 1


def scan(path, buffer=1 << 16):
    files = Files([str(path)])
    files.open = lambda number: open(path, "rb", buffer)
    return scan_shard(files, 0, files.stat(0))


@pytest.mark.parametrize("buffer", [16, 17, 40, 100, 1000, 1 << 16])
def test_records_begin_where_they_were_written_however_the_file_is_read(tmp_path, buffer):
    path = tmp_path / "shard"
    write(path, [*contents(50), *[b"x" * 300] * 5, b"", *contents(50)])
    shard, positions = scan(path, buffer)
    assert positions.tolist() == [position_of(path, record) for record in range(107)]
    assert shard == scan(path)[0] and shard.num_records == 106 and not shard.damage


def test_large_records_are_not_read(tmp_path):
    path = tmp_path / "shard"
    write(path, [bytes(1_000_000)] * 30)
    files, reads = Files([str(path)]), []

    class Counted(io.FileIO):
        def readinto(self, buffer):
            reads.append(len(buffer))
            return super().readinto(buffer)

    files.open = lambda number: io.BufferedReader(Counted(path))
    assert scan_shard(files, 0, files.stat(0))[0].num_records == 30
    assert 0 < sum(reads) < 0.2 * 30_000_000


def test_a_digest_is_that_of_the_lengths_and_checksums(tmp_path):
    digests, path = set(), tmp_path / "shard"
    for rows in (contents(20), contents(19), contents(20, b"ROW"), contents(20)[::-1]):
        write(path, rows)
        digests.add(scan(path)[0].digest)
    assert len(digests) == 4
    corrupt(path, -1)  # of the last checksum
    assert scan(path)[0].digest not in digests


@pytest.mark.parametrize("length", [0, 5, 1 << 20, 1 << 62, (1 << 64) - 1])
def test_any_corrupt_length_ends_a_shard(tmp_path, length):
    path = tmp_path / "shard"
    write(path, contents(20))
    byte = position_of(path, 7)
    with open(path, "r+b") as file:
        file.seek(byte)
        file.write(struct.pack("<Q", length))
    for buffer in (16, 1 << 16):
        shard, positions = scan(path, buffer)
        assert shard.num_records == 7 and positions[-1] == byte and "record 7" in shard.damage


def test_a_line_says_what_is_read_where_it_is_much(paths, monkeypatch, capsys):
    open_index(Files(paths[:2]))
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(record_index, "_MANY_BYTES", 100)
    for _ in range(2):
        open_index(Files(paths))
    assert capsys.readouterr().out == "distloop: Reading the headers of 3 shards, 0.0 GB, once.\n"


def test_of_an_empty_shard_no_byte_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "shard").write_bytes(b"")
    files = Files([str(tmp_path / "shard")])
    monkeypatch.setattr(files, "open", lambda file: pytest.fail(f"{file} was read"))  # which object stores refuse
    shard, positions = scan_shard(files, 0, files.stat(0))
    assert shard.damage == "it is empty" and positions.tolist() == [0]
