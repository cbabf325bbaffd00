"""Readers of examples by their numbers."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from distloop.data import rows as rows_module
from distloop.data.rows import ArrayRows, SourceRows
from distloop.errors import as_user_error
from tests.data.python_batches import Rows


def read(reader, rows, seeds=None, part=lambda batch: batch):
    seeds = None if seeds is None else tf.constant(seeds, tf.int64)
    return tf.function(lambda rows: part(reader.read(rows, seeds)))(tf.constant(rows, tf.int64))


def failure(reader, rows):
    with pytest.raises(tf.errors.OpError) as failed:
        read(reader, rows)
    return as_user_error(failed.value)


@pytest.mark.slow
def test_examples_may_be_of_numbers_texts_lists_and_arrays():
    example = {"a": 1.5, "b": 2, "c": b"x\0", "d": [1, 2], "e": (np.ones(2, np.float16), "text"), "f": True}
    batch = read(SourceRows(Rows(lambda row: example)), [3, 4])
    assert batch["a"].dtype == tf.float32 and batch["b"].dtype == tf.int64 and batch["f"].dtype == tf.bool
    assert batch["c"].numpy().tolist() == [b"x\0"] * 2  # a zero at the end stays
    assert batch["d"].shape == [2, 2] and batch["e"][0].dtype == tf.float16 and batch["e"][1].numpy()[0] == b"text"
    assert read(SourceRows(Rows(lambda row: np.full(3, row))), [7, 1]).numpy().tolist() == [[7] * 3, [1] * 3]
    assert read(SourceRows(Rows(lambda row: b"%d" % row)), [7, 1]).numpy().tolist() == [b"7", b"1"]


def test_a_source_may_read_several_rows_at_once_and_a_failure_names_one(monkeypatch):
    monkeypatch.setattr(rows_module, "_SLOW_SECS", 1e9)  # no threads, which would share the rows

    class Many(Rows):
        limit = None

        def __getitems__(self, rows):
            asked.append(rows)
            return [self.make(row) for row in rows][: self.limit]

    asked = []
    source = Many(lambda row: {"x": 10 // (row - 5)}, count=8 * 7)
    reader = SourceRows(source)
    asked.clear()
    assert read(reader, [7, 3])["x"].numpy().tolist() == [5, -5]
    assert asked == [[7, 3]]
    assert "Row 5 of the Many given could not be read (ZeroDivisionError" in str(failure(reader, [4, 5, 6]))
    source.limit = 1
    assert "__getitems__ of the Many given returned 1 examples for 2 rows" in str(failure(reader, [3, 4]))


def test_entries_of_different_shapes_are_rows_of_an_uneven_entry():
    reader = SourceRows(Rows(lambda row: np.full([row + 1, 2], row, np.float32)))
    assert reader.spec == tf.TensorSpec([None, 2], tf.float32)
    first, second = read(reader, [3, 0], part=lambda entry: (entry[0], entry[1]))
    assert first.shape == [4, 2] and second.numpy().tolist() == [[0.0, 0.0]]
    reader = SourceRows([[2**60 + 1] * (row % 3) for row in range(10)])
    assert reader.spec == tf.TensorSpec([None], tf.int64)
    first, second = read(reader, [2, 3], part=lambda entry: (entry[0], entry[1]))
    assert first.numpy().tolist() == [2**60 + 1] * 2 and second.numpy().tolist() == []


def test_slow_rows_are_read_in_threads_in_their_order(monkeypatch):
    monkeypatch.setattr(rows_module, "_SLOW_SECS", -1.0)
    names, barrier = set(), threading.Barrier(2)

    def make(row):
        if row in (4, 5) and threading.current_thread() is not threading.main_thread():
            names.add(threading.current_thread().name)
            barrier.wait(300)  # both are read at once
        return row

    reader = SourceRows(Rows(lambda row: row))
    reader._source.make = make
    assert read(reader, [5, 4]).numpy().tolist() == [5, 4]
    assert len(names) == 2


def test_a_function_of_python_gets_each_example_and_its_seed():
    reader = SourceRows(Rows(lambda row: row), lambda example, seed: [int(example), *seed.tolist()])
    assert reader.uses_seeds
    assert read(reader, [4, 5], [[1, 2], [3, 4]]).numpy().tolist() == [[4, 1, 2], [5, 3, 4]]
    with pytest.raises(ValueError, match=r"map_fn failed on row 0 \(KeyError: 'x'\)"):
        SourceRows(Rows(lambda row: {"y": row}), lambda example, seed: example["x"])


def test_a_function_of_python_may_write_into_its_example():
    source = [{"x": np.full(2, row, np.float32)} for row in range(3)]
    reader = SourceRows(source, lambda example, seed: {"x": np.add(example["x"], 1, out=example["x"])})
    for _ in range(2):
        assert read(reader, [0, 2])["x"].numpy().tolist() == [[1, 1], [3, 3]]
    assert [row["x"].tolist() for row in source] == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Rows(None, count=0), "The Rows given has 0 rows"),
        (
            Rows(lambda row: row, count=2**63 - 1),
            "The Rows given has no end; make_dataset starts each epoch itself: leave",
        ),
        (
            Rows(lambda row: np.zeros(2) if row else 1.0),
            r"entry of float32 \[\] and float64 \[2\]; an entry is an array",
        ),
        (
            Rows(lambda row: None if row else 1),
            r"entry of NoneType and int64 \[\]; an entry is an array, a number or a text",
        ),
    ],
)
def test_sources_with_unusable_first_rows_or_length_are_refused_at_once(source, words):
    with pytest.raises(ValueError, match=words):
        SourceRows(source)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"a": np.arange(3), "b": np.arange(2)}, r"Arrays of \[2, 3\] rows were given"),
        ({"a": np.zeros([0, 2])}, r"Arrays of \[0\] rows were given; an array is empty, and they need the same number"),
        ({"a": [1, 2]}, "entry of type int was given in .* arrays .*: turn lists of numbers or texts into arrays"),
        ({"train": Rows(None)}, r"An entry of type Rows was given in .* as source\['train'\] of a dict"),
    ],
)
def test_what_are_no_arrays_of_one_length_is_refused(arrays, words):
    with pytest.raises(ValueError, match=words):
        ArrayRows(arrays)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda row: 1 / (row - 5), r"could not be read \(ZeroDivisionError: division"),
        (lambda row: np.zeros(3 if row == 5 else 2), r"has an entry of float64 \[3\] where"),
        (lambda row: np.zeros(2, int if row == 5 else float), "has an entry of int64"),
        (lambda row: {"y": 1} if row == 5 else {"x": 1}, r"is \{'y': int64 \[\]\}"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(make, words):
    reader = SourceRows(Rows(make, count=8 * 7))  # row 5 is not among those looked at before
    assert read(reader, [4]) is not None
    with pytest.raises(ValueError, match=f"Row 5 of the Rows given {words}"):
        raise failure(reader, [4, 5])


def test_a_source_whose_length_changes_is_refused_and_has_a_fingerprint():
    source = Rows(lambda row: row)
    reader = SourceRows(source)
    assert reader.facts == {}
    source.count = 11
    assert "had 10 rows when training began, and has 11 now" in str(failure(reader, [1]))
    source.fingerprint = "abc"
    assert SourceRows(source).facts == {"fingerprint": "abc"}


def rows_but_one(usual, other):
    """Returns what a reader reads of rows that are alike but for the last but one, which it does not look at before."""
    reader = SourceRows(Rows(lambda row: other if row == 18 else usual, 20))
    return reader._read(np.arange(16, 20))[0]


@pytest.mark.parametrize(
    ("usual", "fitting", "other"),
    [
        (np.uint8(7), np.uint16(255), np.uint16(256)),
        (np.int32(7), np.int64(-5), np.int64(2**31)),
        (np.float32(1), np.float64("inf"), np.array(1e300)),
        (np.float16(1), np.float32("inf"), np.float32(1e6)),
    ],
    ids=["uint8", "int32", "float32", "float16"],
)
def test_values_take_the_type_of_the_first_rows_or_are_refused(usual, fitting, other):
    read = rows_but_one(usual, fitting)
    assert read.dtype == usual.dtype and read.tolist() == [usual, usual, fitting, usual]
    with pytest.raises(RuntimeError) as error:
        rows_but_one(usual, other)
    names = f"an entry of {other.dtype.name} [] where the first rows have {usual.dtype}"
    assert f"Row 18 of the Rows given has {names}" in str(error.value.__cause__)


def test_the_fingerprint_of_another_kind_of_source_is_that_of_another_one(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(6))
    rows = ArrayRows(np.load(tmp_path / "x.npy", mmap_mode="r"))
    for other in ("0123456789abcdef:2:0123456789ab", "0123456789abcdef", "abc", "01234567:89abcdef"):
        assert rows.describe_change(other) == "the source is another one"
