import os
import struct
import threading

import pytest

from distloop.records import record_scan
from distloop.records.file_ranges import LocalFiles
from distloop.records.record_scan import masked, scan_shards
from tests.record_shards import contents, position_of, write


def scan(path, window=1 << 18):
    files = LocalFiles([str(path)])
    files.window_bytes = window
    return scan_shards(files, [0], [files.stat(0)])[0]


@pytest.mark.parametrize("window", [16, 17, 40, 100, 1000, 1 << 18])
def test_records_begin_where_they_were_written_however_the_file_is_read(tmp_path, window):
    path = tmp_path / "shard"
    write(path, [*contents(50), *[b"x" * 300] * 5, b"", *contents(50)])
    shard, positions = scan(path, window)
    assert positions.tolist() == [position_of(path, record) for record in range(107)]
    assert shard == scan(path)[0] and shard.num_records == 106 and not shard.damage


def test_large_records_are_not_read(tmp_path, monkeypatch):
    path = tmp_path / "shard"
    write(path, [bytes(100_000)] * 30)
    sizes, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: sizes.append(size) or pread(file, size, offset))
    assert scan(path)[0].num_records == 30
    assert sum(sizes) < (1 << 18) + 30 * 16


def test_a_digest_is_that_of_the_lengths_and_checksums(tmp_path):
    digests = set()
    for name, rows in {
        "a": contents(20),
        "b": contents(19),
        "c": contents(20, b"ROW"),
        "d": contents(20)[::-1],
    }.items():
        write(tmp_path / name, rows)
        digests.add(scan(tmp_path / name)[0].digest)
    assert len(digests) == 4
    last = bytearray((tmp_path / "a").read_bytes())
    last[-1] ^= 1  # of the last checksum
    (tmp_path / "b").write_bytes(last)
    assert scan(tmp_path / "b")[0].digest not in digests


def test_checksums_are_those_that_tensorflow_writes(tmp_path):
    write(tmp_path / "shard", [b"123456789"])
    footer = (tmp_path / "shard").read_bytes()[-4:]
    assert masked(0xE3069283).to_bytes(4, "little") == footer  # of "123456789": Castagnoli's check value


@pytest.mark.parametrize("length", [0, 5, 1 << 20, 1 << 62, (1 << 64) - 1])
def test_any_corrupt_length_ends_a_shard(tmp_path, length):
    path = tmp_path / "shard"
    write(path, contents(20))
    byte = position_of(path, 7)
    data = bytearray(path.read_bytes())
    data[byte : byte + 8] = struct.pack("<Q", length)
    path.write_bytes(data)
    for window in (16, 1 << 18):
        shard, positions = scan(path, window)
        assert shard.num_records == 7 and positions[-1] == byte and "record 7" in shard.damage


def test_a_line_says_what_is_read_where_it_takes_longer(tmp_path, monkeypatch, capsys):
    write(tmp_path / "shard", contents(20_000))  # so many that a busy machine looks before the end
    scan(tmp_path / "shard", window=64)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(record_scan, "_PATIENCE_SECS", 0.0)
    scan(tmp_path / "shard", window=64)
    assert capsys.readouterr().out == "distloop: Reading the headers of 1 shards, 0.0 GB, once.\n"


def test_an_error_in_a_thread_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(record_scan, "_PATIENCE_SECS", 0.01)
    write(tmp_path / "shard", contents(2000))
    (tmp_path / "text").write_text("This is a text.")
    files, reads = LocalFiles([str(tmp_path / "shard"), str(tmp_path / "text")]), []
    stats = [files.stat(0), files.stat(1)]
    files.window_bytes = 64
    read, is_waiting = files.read, threading.Event()

    def slow_read(ranges):
        if ranges[0][0] == 0:
            is_waiting.wait(0.1)  # longer than the other file takes
            reads.append(ranges)
        return read(ranges)

    monkeypatch.setattr(files, "read", slow_read)
    with pytest.raises(ValueError, match="text' does not begin with a TFRecord"):
        scan_shards(files, [0, 1], stats)
    assert len(reads) < 5
