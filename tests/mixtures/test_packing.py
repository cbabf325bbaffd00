"""Packing: rows of several sequences."""

import numpy as np
import pytest

import distloop
from distloop.mixtures.packing import pack, plan

LENGTHS = np.random.default_rng(0).integers(1, 33, 400)
TEXTS = [list(range(1, 1 + length)) for length in LENGTHS]


def best_fit_decreasing(lengths, length):
    """Returns the number of rows, by the algorithm as it is in textbooks."""
    rooms = []
    for size in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= size
        else:
            rooms.append(length - size)
    return len(rooms)


@pytest.mark.parametrize("length", [32, 33, 50, 100, 1000])
def test_a_plan_has_every_sequence_once_in_as_few_rows_as_best_fit(length):
    sequences, starts = plan(LENGTHS, length)
    assert sorted(sequences.tolist()) == list(range(400)) and starts[0] == 0 and starts[-1] == 400
    sums = np.add.reduceat(LENGTHS[sequences], starts[:-1])
    assert sums.max() <= length and len(sums) == best_fit_decreasing(LENGTHS.tolist(), length)


def test_rows_hold_sequences_with_their_segments_and_positions():
    packed = pack([{"x": np.arange(n) + 1.5, "y": np.ones([n, 2], np.int32)} for n in (2, 3, 4)], 6, lengths=[2, 3, 4])
    row = packed[0]
    assert row["x"].tolist() == [1.5, 2.5, 3.5, 4.5, 1.5, 2.5] and row["y"].shape == (6, 2)
    assert row["segment_ids"].tolist() == [1, 1, 1, 1, 2, 2] and row["positions"].tolist() == [0, 1, 2, 3, 0, 1]
    assert packed[1]["segment_ids"].tolist() == [1, 1, 1, 0, 0, 0] and packed[1]["x"].tolist()[3:] == [0] * 3
    assert len(packed) == 2 and packed.padding == pytest.approx(3 / 12)
    texts = pack([["a", "b"], ["c"]], 4, lengths=[2, 1])[0]
    assert texts["tokens"].tolist() == ["a", "b", "c", b""]


def test_packed_rows_are_data_by_number():
    packed = pack(TEXTS, 64, lengths=LENGTHS)
    data = distloop.make_dataset(packed, 16, shuffle=True)
    batch = next(iter(data.starting_at(10**6)))
    assert data.element_spec["tokens"].shape.as_list() == [None, 64]
    np.testing.assert_array_equal(batch["tokens"], np.where(batch["segment_ids"] > 0, batch["positions"] + 1, 0))
    assert data.facts_at({"batches": 0})["fingerprint"] == packed.fingerprint
    assert packed.fingerprint != pack(TEXTS, 65, lengths=LENGTHS).fingerprint


def test_sequences_are_read_together_where_the_source_can():
    class Together(list):
        def __getitems__(self, numbers):
            return [self[number] for number in numbers]

    one, all_rows = (pack(texts, 64, lengths=LENGTHS) for texts in (TEXTS, Together(TEXTS)))
    for number, row in zip([5, 2], all_rows.__getitems__([5, 2]), strict=True):
        assert all(np.array_equal(row[name], one[number][name]) for name in row)


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([1, 2], r"lengths of int64 \[2\] were given for 3 sequences"),
        ([1, 0, 2], "an integer of 1 or more"),
        ([1, 9, 2], "Sequence 1 has a length of 9, and rows have 8: cut or split"),
        ([1, 3, 1], r"'tokens' of sequence 1 is int64 \[2\], where its length is 3"),  # when it is read
    ],
)
def test_lengths_that_do_not_fit_are_refused(lengths, words):
    with pytest.raises(ValueError, match=words):
        pack([[1], [1, 2], [3]], 8, lengths=lengths)[0]
