import gzip
import os
import pickle
import sys
import threading
import zlib

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.records import record_files, record_index
from distloop.records.record_index import Files, expand, index_path
from tests.record_shards import contents, corrupt, position_of, write


@pytest.fixture
def shards(tmp_path):
    """Two shards of 30 and 12 records: their pattern, paths and records."""
    paths = [tmp_path / f"train-{i}.tfrecord" for i in range(2)]
    records = [contents(30), contents(12, b"other")]
    for path, rows in zip(paths, records, strict=True):
        write(path, rows)
    return str(tmp_path / "train-*.tfrecord"), paths, records[0] + records[1]


def test_records_are_read_by_number_in_any_order_from_all_shards(shards):
    pattern, _, rows = shards
    records = distloop.open_records(pattern)
    assert len(records) == 42 and list(records) == rows
    assert records[-1] == rows[-1] and records[np.int64(30)] == rows[30]
    for numbers in ([41, 0, 7, 8, 9, 30, 29, 29, -1], range(42), np.arange(5), []):
        assert records.__getitems__(numbers) == [rows[number] for number in numbers]
    assert [shard.num_records for shard in records.shards] == [30, 12]


@pytest.mark.parametrize("number", [42, -43])
def test_a_record_that_does_not_exist_is_an_index_error(shards, number):
    with pytest.raises(IndexError, match="there are 42, counted from 0"):
        distloop.open_records(shards[0])[number]


def test_the_order_is_that_of_the_list(shards):
    _, paths, rows = shards
    assert list(distloop.open_records(reversed(paths))) == rows[30:] + rows[:30]


def test_neighbours_are_read_at_once_up_to_some_megabytes(shards, monkeypatch):
    records = distloop.open_records(shards[0])
    reads = []
    read = records._files.read
    monkeypatch.setattr(records._files, "read", lambda ranges: reads.append(len(ranges)) or read(ranges))
    assert records.__getitems__(range(42)) == shards[2]
    monkeypatch.setattr(record_files, "_READ_BYTES", 50)
    assert records.__getitems__(range(42)) == shards[2]
    assert reads[0] == 2 and reads[1] > 10


def test_processes_may_get_the_records_as_a_pickle(shards):
    records = distloop.open_records(shards[0])
    copy = pickle.loads(pickle.dumps(records))
    assert list(copy) == shards[2] and copy.fingerprint == records.fingerprint


def test_threads_share_few_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(record_index, "MAX_OPEN_FILES", 2)
    rows = [contents(20, b"shard %d" % i) for i in range(6)]
    for i in range(6):
        write(tmp_path / f"{i}.tfrecord", rows[i])
    records = distloop.open_records(tmp_path / "*.tfrecord")
    expected, wrong = [row for shard in rows for row in shard], []

    def read(seed):
        for numbers in np.random.default_rng(seed).integers(0, 120, (30, 16)):
            wrong.extend(k for k, row in zip(numbers, records.__getitems__(numbers), strict=True) if row != expected[k])

    before = len(os.listdir("/proc/self/fd"))
    threads = [threading.Thread(target=read, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_corrupt_record_is_named_with_its_file_and_byte(shards):
    pattern, paths, rows = shards
    byte = position_of(paths[1], 4)
    corrupt(paths[1], byte + 15)
    records = distloop.open_records(pattern)
    with pytest.raises(ValueError, match=rf"Record 4 of '.*train-1.tfrecord', at byte {byte}, is corrupt") as error:
        records[34]
    assert "on_corrupt='skip'" in str(error.value)
    assert records[35] == rows[35]


def test_corrupt_records_are_replaced_by_the_next_one_counted_and_told_once(shards, caplog):
    pattern, paths, rows = shards
    for record in (4, 5, 11):
        corrupt(paths[1], position_of(paths[1], record) + 15)
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


DAMAGES = {
    "record 5, at byte BYTE, has a corrupt length": lambda path, byte: corrupt(path, byte + 1),
    "record 5, at byte BYTE, is cut off": lambda path, byte: os.truncate(path, byte + 13),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_and_its_rest_left_out_where_that_is_asked_for(shards, damage, caplog):
    pattern, paths, rows = shards
    byte = position_of(paths[0], 5)
    DAMAGES[damage](paths[0], byte)
    damage = damage.replace("BYTE", str(byte))
    with pytest.raises(ValueError, match=f"The shard '.*train-0.tfrecord' is damaged: {damage}; write or copy"):
        distloop.open_records(pattern)
    records = distloop.open_records(pattern, on_corrupt="skip")
    assert list(records) == rows[:5] + rows[30:]
    assert damage in caplog.text and "left out" in caplog.text
    with pytest.raises(ValueError, match=damage):  # from the index, too
        distloop.open_records(pattern)
    write(paths[0], rows[:30])
    assert list(distloop.open_records(pattern)) == list(distloop.open_records(pattern)) == rows


def test_a_shard_whose_last_header_is_cut_off_is_damaged(shards):
    os.truncate(shards[1][0], position_of(shards[1][0], 29) + 5)
    with pytest.raises(ValueError, match="record 29, at byte .* is cut off"):
        distloop.open_records(shards[0])


def test_an_empty_shard_is_refused_or_left_out(shards, caplog):
    pattern, paths, rows = shards
    paths[0].write_bytes(b"")
    with pytest.raises(ValueError, match="The shard '.*train-0.tfrecord' is damaged: it is empty"):
        distloop.open_records(pattern)
    assert list(distloop.open_records(pattern, on_corrupt="skip")) == rows[30:]
    with pytest.raises(ValueError, match="hold no records"):
        distloop.open_records(paths[0], on_corrupt="skip")


@pytest.mark.parametrize("on_corrupt", ["raise", "skip"])
def test_compressed_shards_are_refused_with_a_command_that_helps(tmp_path, on_corrupt):
    for kind, command in (("GZIP", "gunzip -c"), ("ZLIB", "zlib-flate -uncompress <")):
        path = tmp_path / kind
        with tf.io.TFRecordWriter(str(path), kind) as writer:
            writer.write(b"some data " * 10)
        with pytest.raises(ValueError, match=f"is compressed.*'{command} .*{kind} > FILE'"):
            distloop.open_records(path, on_corrupt=on_corrupt)
        data = path.read_bytes()
        path.write_bytes(gzip.decompress(data) if kind == "GZIP" else zlib.decompress(data))
        assert list(distloop.open_records(path)) == [b"some data " * 10]


def test_a_file_that_is_no_tfrecord_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("These are my notes on the data.\n")
    with pytest.raises(ValueError, match="notes.txt' does not begin with a TFRecord"):
        distloop.open_records(tmp_path / "notes.txt", on_corrupt="skip")


def test_wrong_arguments_are_refused(tmp_path):
    for files, sentence in (
        (tmp_path, "The directory .* was given; name its files by a pattern, such as '.*/\\*'"),
        (tmp_path / "no-*.tfrecord", "No file matches .*no-\\*"),
        ([], "An empty list of files"),
        ("nosuchprotocol://bucket/a", "cannot be opened: Protocol not known"),
        ([__file__, "a.array_record"], "No file matches"),
    ):
        with pytest.raises(ValueError, match=sentence):
            distloop.open_records(files)
    with pytest.raises(ValueError, match="on_corrupt='ignore'"):
        distloop.open_records(__file__, on_corrupt="ignore")


def test_a_fingerprint_is_that_of_the_records_and_their_order(shards, tmp_path):
    pattern, paths, rows = shards
    records = distloop.open_records(pattern)
    copies = []
    for path in paths:
        copies.append(tmp_path / f"copy of {path.name}")
        copies[-1].write_bytes(path.read_bytes())
    assert distloop.open_records(copies).fingerprint == records.fingerprint
    assert records.describe_change(records.fingerprint) == ""

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
    assert len(records.fingerprint) < 40


@pytest.mark.parametrize("other", ["0123456789abcdef", "abc", "", "01234567:89abcdef:01234567"])
def test_the_fingerprint_of_another_kind_of_source_is_that_of_another_one(other, shards):
    assert distloop.open_records(shards[0]).describe_change(other) == "the source is another one"


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
    records = distloop.open_records("memory://bucket/train-*")
    assert list(records) == rows and records.__getitems__([41, 0, 1]) == [rows[41], rows[0], rows[1]]
    index = index_path([shard.path for shard in records.shards])
    assert system.exists(index) and list(distloop.open_records("memory://bucket/train-*")) == rows
    with pytest.raises(ValueError, match="The directory 'memory://bucket' was given"):
        distloop.open_records("memory://bucket")
    with pytest.raises(ValueError, match="No file matches"):
        distloop.open_records("memory://bucket/test-*")
    write(paths[0], contents(31))
    system.pipe_file("/bucket/train-0.tfrecord", paths[0].read_bytes())
    with pytest.raises(ValueError, match="The shard 'memory://.*train-0.tfrecord' has changed"):
        distloop.open_records("memory://bucket/train-*")


def test_files_of_several_file_systems_are_refused(shards):
    system = pytest.importorskip("fsspec").filesystem("memory")
    _, paths, _ = shards
    system.pipe_file("/several/train-0.tfrecord", paths[0].read_bytes())
    try:
        with pytest.raises(ValueError, match="Files of several file systems were given; give those of one"):
            distloop.open_records(["memory://several/train-0.tfrecord", paths[1]])
    finally:
        system.rm("/several", recursive=True)


def test_a_missing_package_is_named_with_its_extra(shards, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"pip install 'distloop\[records\]'"):
        patch.setitem(sys.modules, "fsspec", None)
        distloop.open_records("memory://bucket/a")
    monkeypatch.setattr(record_index, "google_crc32c", None)
    with pytest.raises(ValueError, match=r"pip install 'distloop\[records\]'"):
        distloop.open_records(shards[0])


def test_ranges_of_many_files_are_read_and_end_where_the_file_does(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        with open(path, "w") as file:
            file.write(f"the text of {path[-1]}")
    files = Files(paths)
    assert list(files.read([(1, 0, 3), (0, 12, 13), (1, 4, 99), (0, 50, 60)])) == [b"the", b"a", b"text of b", b""]
    assert files.stat(0)[0] == 13


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


def test_a_file_that_is_missing_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(Files([str(tmp_path / "a")]).read([(0, 0, 1)]))
