import pickle
import sys

import numpy as np
import pytest

import distloop


@pytest.fixture
def paths(tmp_path):
    """Two ArrayRecord files of 100 and 20 records."""
    module = pytest.importorskip("array_record.python.array_record_module")
    names = [str(tmp_path / f"train-{i}.array_record") for i in range(2)]
    for name, count in zip(names, (100, 20), strict=True):
        writer = module.ArrayRecordWriter(name, "group_size:1")
        for row in range(count):
            writer.write(b"%d of %d" % (row, count))
        writer.close()
    return names


def test_records_are_read_by_number_from_all_files(paths, tmp_path):
    records = distloop.open_records(tmp_path / "*.array_record")
    assert len(records) == 120 and records[119] == b"19 of 20" and records[np.int64(100)] == b"0 of 20"
    assert records.__getitems__([101, 3, 3, 0]) == [b"1 of 20", b"3 of 100", b"3 of 100", b"0 of 100"]
    copy = pickle.loads(pickle.dumps(records))
    assert list(copy) == list(records) and copy.fingerprint == records.fingerprint
    data = distloop.make_dataset(records, 50, shuffle=True)
    assert sorted(row for batch in data for row in batch.numpy()) == sorted(records)
    assert records.fingerprint == distloop.open_records(paths).fingerprint
    assert records.fingerprint != distloop.open_records(paths[:1]).fingerprint
    (tmp_path / "notes.array_record").write_text("These are notes.")
    with pytest.raises(ValueError, match="notes.array_record' cannot be read as ArrayRecord"):
        distloop.open_records(tmp_path / "notes.array_record")


def test_a_missing_package_and_mixed_files_are_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "a.array_record").write_bytes(b"")
    (tmp_path / "b.tfrecord").write_bytes(b"")
    with pytest.raises(ValueError, match="ArrayRecord and TFRecord files"):
        distloop.open_records(tmp_path / "*")
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_data_source", None)
    with pytest.raises(ValueError, match="pip install array_record"):
        distloop.open_records(tmp_path / "a.array_record")
