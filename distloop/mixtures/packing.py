"""Packing: a source whose rows hold several sequences each, read by row number.

    packed = pack(texts, 2048, lengths=lengths)
    train = make_dataset(packed, 8, shuffle=True, seed=0)

Which sequences are in a row is planned once, from their lengths.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distloop.data.python_rows import as_example, read_rows
from distloop.log import shown
from distloop.settings.durations import whole_number


def pack(source: Any, length: int, *, lengths: Sequence[int] | np.ndarray) -> "PackedRows":
    """Returns a source whose rows are of one length and hold several sequences each, for `make_dataset`.

    A row is a dict: each entry of the sequences, one sequence after the other, then zeros; `segment_ids`, which count
    the sequences of the row from 1, and are 0 in the padding; and `positions` within the sequence. Sequences that are
    no dicts become the entry `tokens`.

    The plan is best-fit-decreasing: from the longest sequence to the shortest, each goes into the row with the least
    room that is left for it. It stays the same in all epochs.

    Args:
        source: of sequences: arrays `[T, ...]`, or dicts of arrays with the same T. It has `__len__` and `__getitem__`.
        length: of a row.
        lengths: of the sequences, [N], from 1 to `length`.

    Raises:
        ValueError: if the lengths do not fit the source, or a sequence is longer than a row.
    """
    counts = np.asarray(lengths)
    if counts.shape != (len(source),) or not len(counts) or counts.dtype.kind not in "iu" or counts.min() < 1:
        raise ValueError(
            f"lengths of {counts.dtype.name} {list(counts.shape)} were given for {len(source):,} sequences; give the "
            "length of each, an integer of 1 or more, and one sequence at least."
        )
    if (size := whole_number(length)) is None:
        raise ValueError(f"length={shown(length)} was given to pack; give the length of a row, a whole number.")
    if (longest := int(counts.max())) > size:
        raise ValueError(
            f"Sequence {int(np.argmax(counts))} has a length of {longest}, and rows have {size}: cut or split longer "
            "sequences, or give a larger length."
        )
    return PackedRows(source, size, counts)


class PackedRows:
    """Rows of one length that hold several sequences each; `pack` makes them.

    Attributes:
        fingerprint: a text that is the same for the same plan, over the same sequences as far as they are known.
        padding: the fraction of all rows that no sequence fills, from 0 to 1.
    """

    def __init__(self, source: Any, length: int, lengths: np.ndarray):
        """Plans the rows; the arguments are those of `pack`."""
        self._source, self._length, self._lengths = source, length, lengths
        self._sequences, self._starts = plan(lengths, length)
        self.padding = 1 - float(lengths.sum(dtype=np.int64)) / (length * len(self))
        mark = hashlib.sha256(f"{length} {getattr(source, 'fingerprint', '')}".encode())
        mark.update(self._sequences.tobytes())
        mark.update(self._starts.tobytes())
        self.fingerprint = mark.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Returns some rows, whose sequences are read together where their source can."""
        numbers = [self._sequences[self._starts[row] : self._starts[row + 1]].tolist() for row in rows]
        sequences = iter(read_rows(self._source, list(itertools.chain.from_iterable(numbers))))
        return [self._packed(of_row, list(itertools.islice(sequences, len(of_row)))) for of_row in numbers]

    def _packed(self, numbers: list[int], sequences: list[Any]) -> dict[str, np.ndarray]:
        """Returns a row of some sequences.

        Raises:
            ValueError: if a sequence has another length than `lengths` says.
        """
        named = [each if isinstance(each, Mapping) else {"tokens": each} for each in map(as_example, sequences)]
        for number, example in zip(numbers, named, strict=True):
            for name, entry in example.items():
                if entry.shape[:1] != (self._lengths[number],):
                    raise ValueError(
                        f"{name!r} of sequence {number} is {entry.dtype.name} {list(entry.shape)}, where its length is "
                        f"{self._lengths[number]}: lengths have to be those of all entries."
                    )
        counts = self._lengths[numbers]
        packed = {name: self._padded(np.concatenate([example[name] for example in named])) for name in named[0]}
        segments = np.repeat(np.arange(1, len(numbers) + 1, dtype=np.int32), counts)
        positions = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
        return {**packed, "segment_ids": self._padded(segments), "positions": self._padded(positions)}

    def _padded(self, entry: np.ndarray) -> np.ndarray:
        shape = [self._length - len(entry), *entry.shape[1:]]
        padding = np.full(shape, b"" if entry.dtype == object else 0, entry.dtype)
        return np.concatenate([entry, padding])


def plan(lengths: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns which sequences are in which row, by best-fit-decreasing.

    All sequences of one length get rows at once, so the time depends on the number of lengths, not of sequences.

    Args:
        lengths: of the sequences, [N], from 1 to `length`.
        length: of a row.

    Returns:
        The numbers of the sequences, row by row, int64 [N], and where each row begins in them, int64 [rows + 1].
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    row_of, first = np.empty(len(lengths), np.int64), 0
    rows_by_room: list[list[np.ndarray]] = [[] for _ in range(length)] + [[np.arange(len(lengths))]]  # the last are new
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        for room in range(size, length + 1):
            if not left:
                break
            if not rows_by_room[room]:
                continue
            fits, (rows, *more) = room // size, rows_by_room[room]
            rows, rest = np.split(np.concatenate([rows, *more]) if more else rows, [-(-left // fits)])
            rows_by_room[room] = [rest] if len(rest) else []
            num_fitted = min(left, len(rows) * fits)
            row_of[first : first + num_fitted] = np.repeat(rows, fits)[:num_fitted]
            first, left = first + num_fitted, left - num_fitted
            full = num_fitted // fits
            if full:
                rows_by_room[room - fits * size].append(rows[:full])
            if num_fitted % fits:
                rows_by_room[room - num_fitted % fits * size].append(rows[full:])
    by_row = np.argsort(row_of, kind="stable")
    return order[by_row], np.searchsorted(row_of[by_row], np.arange(row_of.max() + 2))
