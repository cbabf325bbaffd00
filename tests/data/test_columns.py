"""Arrays on disk, whose rows are read when they are asked for."""

import os
import types

import h5py
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.columns import DiskColumn, is_on_disk
from distloop.data.make_dataset import make_dataset
from distloop.data.source import Source
from tests.problems import mirrored


class Stored:
    """As an array of zarr; notes what is asked for."""

    def __init__(self, values):
        self.values, self.shape, self.dtype, self.asked = values, values.shape, values.dtype, []

    def __getitem__(self, rows):
        self.asked.append(rows)
        return self.values[rows]


def saved(path, values):
    np.save(path.with_suffix(".new.npy"), values)
    os.replace(path.with_suffix(".new.npy"), path)  # an old file of this name stays whole for who reads it
    return np.load(path, mmap_mode="r")


def test_arrays_that_are_read_from_disk_are_known(tmp_path):
    assert is_on_disk(saved(tmp_path / "x.npy", np.arange(3))) and is_on_disk(Stored(np.arange(3)))
    labelled = types.SimpleNamespace(shape=(3,), dtype=np.dtype(int), __getitem__=None, iloc=None)  # as pandas
    others = np.arange(3), tf.range(3), [1, 2], labelled, types.SimpleNamespace(shape=(3,), dtype="int")
    assert not any(map(is_on_disk, others))


@pytest.mark.parametrize(
    "values",
    [np.arange(20.0).reshape(10, 2), np.arange(10).astype(">i4"), np.array([b"a", b"bc"] * 5), np.arange(10) > 4],
    ids=["floats", "other byte order", "texts", "truth values"],
)
def test_rows_on_disk_are_those_of_the_array_in_memory(values, tmp_path):
    expected = values.astype(object if values.dtype.kind == "S" else values.dtype.newbyteorder("="))
    for array in (saved(tmp_path / "x.npy", values), Stored(values)):
        column = DiskColumn(array)
        for rows in ([7, 3, 7], [4, 5, 6], [2], []):
            found = column.read(np.array(rows, np.int64))
            np.testing.assert_array_equal(found, expected[rows])
            assert found.dtype == expected.dtype and found.shape == expected[rows].shape
        assert tf.TensorSpec(values.shape[1:], tf.as_dtype(expected.dtype)) == column.spec


def test_neighbours_are_read_at_once_and_an_unreadable_row_is_named():
    stored = Stored(np.arange(10))
    column = DiskColumn(stored)
    column.read(np.array([4, 5, 6]))
    column.read(np.array([6, 4]))
    assert stored.asked == [slice(4, 7), 6, 4]
    stored.values = stored.values[:5]
    with pytest.raises(ValueError, match=r"Row 7 of the Stored given could not be read \(IndexError: "):
        column.read(np.array([7]))
    with pytest.raises(ValueError, match="has the type .*; a column is of numbers, truth values or texts"):
        DiskColumn(Stored(np.zeros(3, [("a", int)])))


def test_no_more_of_an_array_on_disk_is_read_than_is_given():
    stored = Stored(np.arange(1000))
    data = make_dataset({"a": stored, "b": np.arange(1000) * 2}, 4, shuffle=True)
    assert not [rows for rows in stored.asked if isinstance(rows, slice) and rows.stop - rows.start > 1]
    batch = next(iter(data.starting_at(600)))
    assert batch["b"].numpy().tolist() == (2 * batch["a"]).numpy().tolist()
    assert len(stored.asked) < 500
    stored.asked.clear()
    mixture = distloop.Mixture({"a": stored, "b": np.arange(1000, 1100)}, {"a": 1, "b": 1})
    assert len(next(iter(make_dataset(mixture, 8, shuffle=True)))) == 8
    assert len(stored.asked) < 500 and all(isinstance(row, int) for row in stored.asked)


@pytest.mark.slow
def test_arrays_on_disk_and_in_memory_come_in_the_same_order(tmp_path):
    values = np.arange(30.0).reshape(15, 2)
    sources = [values, saved(tmp_path / "x.npy", values), Stored(values)]
    for change in (None, lambda row, seed: np.asarray(row) * 2):  # the second one cannot be traced
        datasets = [make_dataset(s, 4, shuffle=True, map_fn=change).starting_at(2).take(4) for s in sources]
        for batches in zip(*datasets, strict=True):
            for batch in batches[1:]:
                np.testing.assert_array_equal(batch, batches[0])


def test_groups_of_h5py_are_sources(tmp_path):
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"], file["name"] = np.arange(12.0).reshape(6, 2), ["a", "b", "c", "d", "e", "f"]
        for batch in make_dataset(file, 4, shuffle=True):
            assert [int(x[0]) // 2 for x in batch["x"].numpy()] == [ord(name) - 97 for name in batch["name"].numpy()]


def test_an_array_on_disk_that_changed_since_the_checkpoint_is_named(tmp_path):
    def source(x):
        return Source(make_dataset({"x": x, "y": np.arange(10)}, 2, shuffle=True), mirrored(1))

    first = source(saved(tmp_path / "x.npy", np.arange(10)))
    first.batches_taken = 3
    place = first.position()
    source(saved(tmp_path / "moved.npy", np.arange(10))).go_to(place)
    with pytest.raises(ValueError, match=r"as the rows of '.*x.npy' have changed: give the data"):
        source(saved(tmp_path / "x.npy", np.arange(1, 11))).go_to(place)
    with pytest.raises(ValueError, match="as the source is another one"):
        source(np.arange(10)).go_to(place)
