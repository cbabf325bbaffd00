import concurrent.futures
import gzip
import json
import os
import pickle
import shutil
import sys
import unittest.mock
import zlib

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.source import Source
from distloop.records import record_files, record_index
from distloop.records.record_index import Files, expand, index_path
from tests.problems import mirrored
from tests.records.record_shards import contents, corrupt, position_of, write


@pytest.fixture
def shards(tmp_path):
    """Two shards of 30 and 12 records: their pattern, paths and records."""
    paths = [tmp_path / f"train-{i}.tfrecord" for i in range(2)]
    records = [contents(30), contents(12, b"other")]
    for path, rows in zip(paths, records, strict=True):
        write(path, rows)
    return str(tmp_path / "train-*.tfrecord"), paths, records[0] + records[1]


def test_records_are_read_by_number_in_any_order_from_all_shards(shards):
    pattern, paths, rows = shards
    records = distloop.open_records(pattern)
    assert len(records) == 42 and list(records) == rows
    assert records[-1] == rows[-1] and records[np.int64(30)] == rows[30]
    for numbers in ([41, 0, 7, 8, 9, 30, 29, 29, -1], range(42), np.arange(5), []):
        assert records.__getitems__(numbers) == [rows[number] for number in numbers]
    assert [shard.num_records for shard in records.shards] == [30, 12]
    for number in (42, -43):
        with pytest.raises(IndexError, match="there are 42, counted from 0"):
            records[number]
    copy = pickle.loads(pickle.dumps(records))  # as for other processes
    assert list(copy) == rows and copy.fingerprint == records.fingerprint
    assert list(distloop.open_records(reversed(paths))) == rows[30:] + rows[:30]


def test_neighbours_are_read_at_once_up_to_some_megabytes(shards, monkeypatch):
    records = distloop.open_records(shards[0])
    read = unittest.mock.Mock(wraps=records._files.read)
    monkeypatch.setattr(records._files, "read", read)
    assert records.__getitems__(range(42)) == shards[2]
    monkeypatch.setattr(record_files, "_READ_BYTES", 50)
    assert records.__getitems__(range(42)) == shards[2]
    reads = [len(call.args[0]) for call in read.call_args_list]
    assert reads[0] == 2 and reads[1] > 10


def test_threads_share_few_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(record_index, "MAX_OPEN_FILES", 2)
    rows = [contents(20, b"shard %d" % i) for i in range(6)]
    for i in range(6):
        write(tmp_path / f"{i}.tfrecord", rows[i])
    records = distloop.open_records(tmp_path / "*.tfrecord")
    expected = sum(rows, [])

    def read(seed):
        draws = np.random.default_rng(seed).integers(0, 120, (30, 16))
        return all(records.__getitems__(numbers) == [expected[number] for number in numbers] for numbers in draws)

    before = len(os.listdir("/proc/self/fd"))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(4)))
        assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_corrupt_record_is_named_or_replaced_by_the_next_one(shards, caplog):
    pattern, paths, rows = shards
    for record in (4, 5, 11):
        corrupt(paths[1], position_of(paths[1], record) + 15)
    records = distloop.open_records(pattern)
    where = rf"Record 4 of '.*train-1.tfrecord', at byte {position_of(paths[1], 4)}"
    with pytest.raises(ValueError, match=f"{where}, is corrupt.*on_corrupt='skip'"):
        records[34]
    assert records[36] == rows[36]
    records = distloop.open_records(pattern, on_corrupt="skip")
    assert len(records) == 42 and records.num_skipped == 0
    read = records.__getitems__(range(30, 42))
    assert read == [*rows[30:34], rows[36], rows[36], *rows[36:41], rows[30]]  # after the last one, the first one
    assert records[34] == rows[36] and records.num_skipped == 3
    assert len(caplog.records) == 1 and "train-1.tfrecord" in caplog.text


def test_a_shard_of_corrupt_records_alone_cannot_be_skipped(tmp_path):
    write(tmp_path / "a", [b"one", b"two"])
    for record in (0, 1):
        corrupt(tmp_path / "a", position_of(tmp_path / "a", record) + 13)
    with pytest.raises(ValueError, match="All records of .* are corrupt"):
        distloop.open_records(tmp_path / "a", on_corrupt="skip")[0]


def test_a_file_that_becomes_shorter_while_it_is_read_is_corrupt(shards):
    pattern, paths, _ = shards
    records = distloop.open_records(pattern)
    os.truncate(paths[1], position_of(paths[1], 6) + 14)
    assert records[35]
    for record in (6, 7):
        with pytest.raises(ValueError, match=f"Record {record} of .*train-1"):
            records[30 + record]


def refused(files, words, **settings):
    with pytest.raises(ValueError, match=words):
        distloop.open_records(files, **settings)


@pytest.mark.parametrize(
    ("harm", "damage", "num_left"),
    [
        (lambda path, byte: corrupt(path, byte + 1), "record 5, at byte BYTE, has a corrupt length", 5),
        (lambda path, byte: os.truncate(path, byte + 13), "record 5, at byte BYTE, is cut off", 5),
        (lambda path, byte: os.truncate(path, byte + 5), "record 5, at byte BYTE, is cut off", 5),
        (lambda path, byte: os.truncate(path, 0), "it is empty", 0),
    ],
    ids=["a corrupt length", "a record that is cut off", "a header that is cut off", "empty"],
)
def test_a_damaged_shard_is_named_and_its_rest_left_out_on_request(shards, harm, damage, num_left, caplog):
    pattern, paths, rows = shards
    byte = position_of(paths[0], 5)
    harm(paths[0], byte)
    damage = damage.replace("BYTE", str(byte))
    refused(pattern, f"The shard '.*train-0.tfrecord' is damaged: {damage}; write or copy")
    assert list(distloop.open_records(pattern, on_corrupt="skip")) == rows[:num_left] + rows[30:]
    assert damage in caplog.text and "left out" in caplog.text
    refused(pattern, damage)  # from the index, too
    if not num_left:
        refused(paths[0], "hold no records", on_corrupt="skip")
    write(paths[0], rows[:30])
    assert list(distloop.open_records(pattern)) == list(distloop.open_records(pattern)) == rows


@pytest.mark.parametrize(
    ("kind", "command", "decompress"),
    [("GZIP", "gunzip -c", gzip.decompress), ("ZLIB", "zlib-flate -uncompress <", zlib.decompress)],
)
def test_compressed_shards_are_refused_with_a_command_that_helps(tmp_path, kind, command, decompress):
    path = tmp_path / kind
    with tf.io.TFRecordWriter(str(path), kind) as writer:
        writer.write(b"some data " * 10)
    for on_corrupt in ("raise", "skip"):
        refused(path, f"is compressed.*: {command} .*{kind} > FILE.", on_corrupt=on_corrupt)
    path.write_bytes(decompress(path.read_bytes()))
    assert list(distloop.open_records(path)) == [b"some data " * 10]


def test_wrong_arguments_and_files_that_are_no_tfrecords_are_refused(tmp_path):
    for files, sentence in (
        (tmp_path, "The directory .* was given; name its files by a pattern, such as '.*/\\*'"),
        (tmp_path / "no-*.tfrecord", "No file matches .*no-\\*"),
        ([], "An empty list of files"),
        ("nosuchprotocol://bucket/a", "cannot be opened: Protocol not known"),
        ([__file__, "a.array_record"], "No file matches"),
    ):
        refused(files, sentence)
    refused(__file__, "on_corrupt='ignore'", on_corrupt="ignore")
    (tmp_path / "notes.txt").write_text("These are my notes on the data.\n")
    refused(tmp_path / "notes.txt", "notes.txt' does not begin with a TFRecord", on_corrupt="skip")


def test_a_fingerprint_is_that_of_the_records_and_their_order(shards, tmp_path):
    pattern, paths, rows = shards
    records = distloop.open_records(pattern)
    copies = [shutil.copy(path, tmp_path / f"copy of {path.name}") for path in paths]
    assert distloop.open_records(copies).fingerprint == records.fingerprint
    assert len(records.fingerprint) < 40
    assert records.describe_change(records.fingerprint) == ""
    for other in ("0123456789abcdef", "abc", "", "01234567:89abcdef:01234567"):  # of another kind of source
        assert records.describe_change(other) == "the source is another one"

    def change(files):
        for index in tmp_path.glob(".records-*"):
            index.unlink()
        return distloop.open_records(files).describe_change(records.fingerprint)

    assert change(paths[::-1]) == "the files are the same in another order"
    assert change(paths[:1]) == "there were 2 files, and there are 1"
    write(copies[1], rows)
    assert change([paths[0], copies[1]]) == f"the records of {str(copies[1])!r} have changed"
    write(copies[0], rows[1:])
    assert change(copies) == f"the records of {str(copies[0])!r}, {str(copies[1])!r} have changed"


def test_of_many_files_the_fingerprint_stays_short(tmp_path):
    paths = [tmp_path / str(i) for i in range(33)]
    for path in paths:
        write(path, [b"row"])
    most, all_of_them = (distloop.open_records(paths[:count]) for count in (32, 33))
    assert len(most.fingerprint) < 150 and len(all_of_them.fingerprint) < 25
    before = all_of_them.fingerprint
    write(paths[3], [b"other"])
    assert distloop.open_records(paths, index_dir=tmp_path / "other").describe_change(before) == (
        "the records of a file have changed"
    )


def test_urls_are_read_through_fsspec(shards):
    fsspec = pytest.importorskip("fsspec")
    _, paths, rows = shards
    system = fsspec.filesystem("memory")
    for path in paths:
        system.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    system.pipe_file("/bucket/deeper/train-9.tfrecord", b"")
    pattern = "memory://bucket/train-*"
    records = distloop.open_records(pattern)
    assert list(records) == rows and records.__getitems__([41, 0, 1]) == [rows[41], rows[0], rows[1]]
    index = index_path([shard.path for shard in records.shards])
    assert system.exists(index) and list(distloop.open_records(pattern)) == rows
    refused("memory://bucket", "The directory 'memory://bucket' was given")
    refused("memory://bucket/test-*", "No file matches")
    several = ["memory://bucket/train-0.tfrecord", paths[1]]
    refused(several, "Files of several file systems were given; give those of one")
    write(paths[0], contents(31))
    system.pipe_file("/bucket/train-0.tfrecord", paths[0].read_bytes())
    refused(pattern, "The shard 'memory://.*train-0.tfrecord' has changed")


def test_a_missing_package_is_named(shards, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "fsspec", None)
        refused("memory://bucket/a", "pip install fsspec")
    monkeypatch.setattr(record_index, "google_crc32c", None)
    refused(shards[0], "pip install google-crc32c")


def test_ranges_of_many_files_are_read_and_end_where_the_file_does(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f"the text of {name}")
    files = Files([str(tmp_path / name) for name in "abc"])
    assert list(files.read([(1, 0, 3), (0, 12, 13), (1, 4, 99), (0, 50, 60)])) == [b"the", b"a", b"text of b", b""]
    assert files.stat(0)[0] == 13
    with pytest.raises(FileNotFoundError):
        list(files.read([(2, 0, 1)]))


def test_patterns_are_sorted_and_lists_are_not(tmp_path, monkeypatch):
    for name in ("c", "a", "b[1]", ".hidden"):
        (tmp_path / name).touch()
    (tmp_path / "directory").mkdir()
    names = [str(tmp_path / name) for name in ("a", "b[1]", "c")]
    assert expand(tmp_path / "*") == names
    assert expand([names[2], tmp_path / "a*"]) == [names[2], names[0]]
    assert expand(names[1]) == [names[1]]  # a name before a pattern
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand("~/a") == [names[0]]


def test_a_file_that_changed_since_the_checkpoint_is_named(tmp_path):
    paths = [tmp_path / "train-0", tmp_path / "train-1"]

    def source(second, index_dir):
        for path, text in zip(paths, (b"a", second), strict=True):
            write(path, [b"%s%d" % (text, number) for number in range(5)])
        records = distloop.open_records(paths, index_dir=str(tmp_path / index_dir))
        return Source(distloop.make_dataset(records, 2), mirrored(1))

    before = source(b"b", "before")
    assert [next(before.iterator()).numpy().tolist() for _ in range(2)] == [[b"a0", b"a1"], [b"a2", b"a3"]]
    before.batches_taken = 2
    place = before.position()
    assert len(json.dumps(place)) < 1000
    same = source(b"b", "after")
    same.go_to(place)
    assert next(same.iterator()).numpy().tolist() == [b"a4", b"b0"]
    with pytest.raises(ValueError, match=r"as the records of '.*train-1' have changed: give the data"):
        source(b"c", "changed").go_to(place)
