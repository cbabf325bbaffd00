"""Rows that Python reads, as structures of NumPy arrays; needs no TensorFlow.

    example = as_example({"ids": [1, 2, 3], "name": "a"})
    examples = RowReader(source, map_fn, "Photos").read(rows, seeds).examples

It does not know in which order rows are read, nor in which threads or processes.
"""

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_SCALARS = (str, bytes, int, float, np.generic)


def as_example(example: Any) -> Any:
    """Returns an example with NumPy arrays as leaves: of numbers, texts, lists of them, and others' tensors.

    A list of numbers or texts, or of such lists of one length, is an array; a tuple and a dict are structures. As in
    TensorFlow, a Python float is a float32.
    """
    if isinstance(example, Mapping):
        return {name: as_example(entry) for name, entry in example.items()}
    if isinstance(example, tuple) or (isinstance(example, list) and not is_rectangular(example)):
        entries = [as_example(entry) for entry in example]
        return type(example)(*entries) if hasattr(example, "_fields") else tuple(entries)
    if isinstance(example, (str, bytes)):
        return np.array(example, object)  # NumPy's own texts lose zeros at their end
    if hasattr(example, "detach"):  # PyTorch's tensors, which may have a gradient or be on another device
        return np.asarray(example.detach().cpu())
    array = np.asarray(unmasked(example))
    if array.dtype.kind in "US":
        return np.array(example, object) if isinstance(example, list) else array.astype(object)
    is_of_python = isinstance(example, (list, float))
    return array.astype(np.float32) if is_of_python and array.dtype == np.float64 else array


def is_rectangular(values: list[Any]) -> bool:
    """Returns whether a list holds numbers or texts, or such lists of one length."""
    if all(isinstance(value, _SCALARS) for value in values):
        return True
    if not all(isinstance(value, list) and is_rectangular(value) for value in values):
        return False
    return len({np.shape(value) for value in values}) == 1


def unmasked(values: Any) -> Any:
    """Returns values as they are.

    Raises:
        ValueError: if some are masked, as in `numpy.ma` and netCDF4.
    """
    if np.ma.is_masked(values):
        raise ValueError(
            f"An array of {np.size(values)} values, {np.ma.count_masked(values)} of which are masked, was given, and "
            "their mask would be dropped: give array.filled(value), and the mask as an entry of its own or as weights."
        )
    return values


def read_rows(source: Any, numbers: Sequence[int]) -> Sequence[Any]:
    """Returns some rows of a source, read together where it can."""
    if not hasattr(source, "__getitems__"):
        return [source[number] for number in numbers]
    rows: Sequence[Any] = source.__getitems__(numbers)
    if len(rows) != len(numbers):
        raise ValueError(
            f"__getitems__ of the {type(source).__name__} given returned {len(rows)} examples for {len(numbers)} rows: "
            "let it return a list with one for each."
        )
    return rows


class ReadRows(NamedTuple):
    """Examples, structures of arrays, and the seconds that each stage of them took."""

    examples: list[Any]
    reading: float
    map_fn: float
    copying: float = 0.0  # from another process


@dataclasses.dataclass(frozen=True)
class RowReader:
    """Reads rows of a source, and changes them by a function of Python.

    Attributes:
        source: has `__len__` and `__getitem__`, and perhaps `__getitems__` and `row_name`.
        change: a function of an example and its seed, int64 [2], applied to each row; None: there is none.
        name: of the source, for errors.
    """

    source: Any
    change: Callable[[Any, np.ndarray], Any] | None
    name: str

    def read(self, rows: np.ndarray, seeds: np.ndarray) -> ReadRows:
        """Returns the examples of some rows, in their order.

        Args:
            rows: int64 [b].
            seeds: of the examples, int64 [b, 2].

        Raises:
            ValueError: if a row cannot be read or changed; it names the row.
        """
        began_at = time.perf_counter()
        fetched = self.fetch(rows)
        fetched_at = time.perf_counter()
        examples = self.changed(rows, fetched, seeds)
        return ReadRows(examples, fetched_at - began_at, time.perf_counter() - fetched_at)

    def fetch(self, rows: np.ndarray) -> list[Any]:
        """Returns the examples of some rows, before they are changed."""
        numbers = rows.tolist()
        try:
            examples = read_rows(self.source, numbers)
        except Exception as error:
            raise self._unreadable(numbers, error) from error
        return list(map(as_example, examples))

    def changed(self, rows: np.ndarray, examples: list[Any], seeds: np.ndarray) -> list[Any]:
        """Returns what `fetch` returned, changed."""
        if self.change is None:
            return examples
        return [self._changed(*each) for each in zip(rows.tolist(), examples, seeds, strict=True)]

    def row_name(self, number: int) -> str:
        """Returns which row of which source a number is, for a sentence."""
        named: str = getattr(self.source, "row_name", lambda number: f"Row {number} of the {self.name} given")(number)
        return named

    def _unreadable(self, numbers: list[int], error: Exception) -> ValueError:
        """Returns the error about rows that cannot be read together, with the first one that cannot be read alone."""
        what = f"One of the rows {numbers} of the {self.name} given"
        for number in numbers:
            try:
                self.source[number]
            except Exception as of_row:
                what, error = self.row_name(number), of_row
                break
        return ValueError(f"{what} could not be read ({type(error).__name__}: {error}).")

    def _changed(self, number: int, example: Any, seed: np.ndarray) -> Any:
        assert self.change is not None
        try:
            return as_example(self.change(copy.deepcopy(example), seed))  # it may write into its example
        except Exception as error:
            raise ValueError(f"map_fn failed on row {number} ({type(error).__name__}: {error}).") from error
