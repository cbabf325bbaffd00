"""Row readers: reads examples by number from arrays, and from sources with `__len__` and `__getitem__`.

    reader = make_reader(source)
    examples = reader.read(rows, seeds)          # in a map of tf.data: [b] row numbers to a structure of [b, ...]

It does not know in which order the rows are read.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.data.columns import DIGITS, DiskColumn, content_of, is_on_disk
from distloop.data.examples import common_spec, describe, pad_rows
from distloop.data.order import CONTENT
from distloop.data.python_rows import ReadRows, RowReader, unmasked
from distloop.distributed.devices import HOST
from distloop.errors import carry
from distloop.installed import import_part
from distloop.threads import once

ENDLESS = 2**60  # a length that stands for no end, as Grain's `repeat` gives
_NUM_PEEKED = 8  # rows that are inspected before, spread over the source
_SLOW_SECS = 2e-4  # to read a row, from which on threads share the rows of a batch
_THREADS = 16


@dataclasses.dataclass(frozen=True)  # no tuple, into which TensorFlow's structures would look
class Uneven:
    """An entry of some rows whose shapes may differ."""

    values: tf.Tensor  # [sum of the rows' sizes], one row after the other
    ends: tf.Tensor  # int64 [b]: of each row in `values`
    shapes: tf.Tensor  # int64 [b, rank]
    spec: tf.TensorSpec  # of a row

    def __getitem__(self, index: tf.Tensor) -> tf.Tensor:
        shape = self.shapes[index]
        end = self.ends[index]
        return tf.ensure_shape(tf.reshape(self.values[end - tf.reduce_prod(shape) : end], shape), self.spec.shape)


class StageSecs:
    """The seconds of each stage in which rows become a batch, as Python has measured them in several threads."""

    def __init__(self) -> None:
        """Begins without a stage."""
        self._lock, self._secs = threading.Lock(), collections.defaultdict[str, float](float)

    def add(self, **secs: float) -> None:
        """Adds seconds by stage."""
        with self._lock:
            for stage, more in secs.items():
                self._secs[stage] += more

    def of(self, secs: float, rest: str) -> dict[str, float]:
        """Returns the seconds by stage, given those of all stages and the one that Python has not measured."""
        known = dict(self._secs)
        return {**known, rest: known.get(rest, 0.0) + max(0.0, secs - sum(known.values()))}


class ArrayRows:
    """Rows of arrays: those in memory become tensors of the host, those on disk are read row by row.

    Attributes:
        columns: each array as a tensor of the host, or as a `DiskColumn`.
        spec: of one row, a structure of `tf.TensorSpec`.
        is_in_memory: whether none is on disk.
        fingerprint: a text that is the same for the same arrays on disk; empty: all are in memory.
        uses_seeds: whether an example depends on its seed.
        stage_secs: of rows that are read from disk.
        unmeasured: the stage of other rows.
    """

    uses_seeds, unmeasured = False, "reading"

    def __init__(self, arrays: Any):
        """Copies arrays in memory into tensors of the host.

        Args:
            arrays: `[N, ...]`, in any nested structure.

        Raises:
            ValueError: if they differ in length, or have no rows.
        """
        structure = _with_dicts(arrays)
        if scalars := [a for a in tf.nest.flatten(structure) if getattr(a, "ndim", 1) == 0]:
            raise ValueError(
                f"The number {np.asarray(scalars[0])} was given among arrays, which have a row for each example, "
                "[N, ...]: repeat it with np.full(N, number), or leave it out."
            )
        with tf.device(HOST):
            self.columns = [_column(array) for array in tf.nest.flatten(structure)]
        lengths = {len(column) for column in self.columns}
        if len(lengths) != 1 or 0 in lengths:
            empty = "an array is empty, and " if 0 in lengths else ""
            raise ValueError(f"Arrays of {sorted(lengths)} rows were given; {empty}they need the same number, not 0.")
        self._num_rows, self.stage_secs = lengths.pop(), StageSecs()
        self._on_disk = [column for column in self.columns if isinstance(column, DiskColumn)]
        self._pack = functools.partial(tf.nest.pack_sequence_as, structure)
        self.is_in_memory = not self._on_disk
        specs = [c.spec if isinstance(c, DiskColumn) else tf.TensorSpec(c.shape[1:], c.dtype) for c in self.columns]
        self.spec = self._pack(specs)
        self.fingerprint = ":".join(column.digest for column in self._on_disk)

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """What a position depends on beside the number of rows: the fingerprint, and what arrays in memory hold."""
        facts = {"fingerprint": self.fingerprint} if self._on_disk else {}
        return facts if len(self._on_disk) == len(self.columns) else {**facts, CONTENT: content_of(self.columns)}

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> Any:
        """Returns one row, for a function of Python."""
        rows = np.array([row])
        return self._pack([c.read(rows)[0] if isinstance(c, DiskColumn) else c[row].numpy() for c in self.columns])

    def describe_change(self, fingerprint: str) -> str:
        """Returns how the arrays on disk differ from those of a fingerprint, as a part of a sentence."""
        digests = fingerprint.split(":")
        if [len(digest) for digest in digests] != [DIGITS] * len(self._on_disk):
            return "the source is another one"
        names = [c.name for c, digest in zip(self._on_disk, digests, strict=True) if c.digest != digest]
        return f"the rows of {' and '.join(names)} have changed"

    def read(self, rows: tf.Tensor, seeds: tf.Tensor | None = None, width: tf.Tensor | None = None) -> Any:
        """Returns the examples of some rows, a structure of tensors, [b, ...].

        Args:
            rows: int64 [b].
            seeds: of the examples; unused.
            width: unused, as the rows of an array have one shape.
        """
        types = [column.spec.dtype for column in self._on_disk]
        from_disk = tf.numpy_function(self._read, [rows], types) if types else []
        for column, entry in zip(self._on_disk, from_disk, strict=True):
            entry.set_shape([None, *column.spec.shape])
        entries = iter(from_disk)
        return self._pack([next(entries) if isinstance(c, DiskColumn) else tf.gather(c, rows) for c in self.columns])

    def use_processes(self, count: int) -> None:
        """Raises a ValueError: there is nothing for worker processes to do."""
        raise ValueError(
            f"processes={count} was given with arrays, which TensorFlow reads, and without a map_fn that runs in "
            "Python: leave processes out."
        )

    def _read(self, rows: np.ndarray) -> list[np.ndarray]:
        began_at = time.perf_counter()
        try:
            return [column.read(rows) for column in self._on_disk]
        except Exception as error:  # TensorFlow would pass on its text alone
            raise carry(error) from error
        finally:
            self.stage_secs.add(reading=time.perf_counter() - began_at)


class SourceRows:
    """Rows of a source that Python reads.

    Attributes:
        spec: of one row, a structure of `tf.TensorSpec`; an axis in which the rows inspected differ is free.
        facts: what the order depends on beside the number of rows: the source's fingerprint, if it has one.
        uses_seeds: whether an example depends on its seed.
        describe_change: returns how the source differs from that of a fingerprint; None: it cannot.
        stage_secs: of reading.
        unmeasured: the stage to which other seconds belong.
    """

    unmeasured = "batching"

    def __init__(
        self, source: Any, change: Callable[[Any, np.ndarray], Any] | None = None, rows_to_inspect: Sequence[int] = ()
    ):
        """Reads a few rows, to learn their types and shapes.

        Args:
            source: has `__len__` and `__getitem__`, and perhaps `__getitems__`, which takes a list of numbers.
                Several threads read it at once. One of several parts may have `row_name(number)`, for errors, and
                `rows_to_inspect`, some of each part.
            change: a function of an example and its seed, int64 [2], applied to each row in Python.
            rows_to_inspect: beside a few others.

        Raises:
            ValueError: if the source is empty, or its rows are no structures of arrays, numbers and texts.
        """
        self._source = source
        self._name = type(source).__name__
        self._reader = RowReader(source, change, self._name)
        self._processes: Any = None
        self.uses_seeds, self.stage_secs = change is not None, StageSecs()
        self._num_rows = len(source)
        if not self._num_rows:
            raise ValueError(f"The {self._name} given has 0 rows; training needs one at least: check what it reads.")
        if self._num_rows > ENDLESS:
            raise ValueError(
                f"The {self._name} given has no end; make_dataset starts each epoch itself: leave out its repeat()."
            )
        self.facts = {"fingerprint": mark} if (mark := getattr(source, "fingerprint", None)) else {}
        self.describe_change = getattr(source, "describe_change", None)
        began = time.monotonic()
        numbers = np.union1d(getattr(source, "rows_to_inspect", spread(self._num_rows)), rows_to_inspect).astype(int)
        examples = self._examples(numbers, None)
        self._is_slow = (time.monotonic() - began) / len(numbers) > _SLOW_SECS
        self._structure = examples[0]
        if isinstance(source, list) and change is None:  # other sources may draw their examples
            leaves = [array.tolist() for array in tf.nest.flatten(examples)]
            self.facts[CONTENT] = f"{zlib.crc32(repr(leaves).encode()):08x}"
        self.spec = common_spec(f"the {self._name} given", self._checked(examples, numbers))
        self._specs = tf.nest.flatten(self.spec)

    def __len__(self) -> int:
        return self._num_rows

    def read(self, rows: tf.Tensor, seeds: tf.Tensor | None = None, width: tf.Tensor | None = None) -> Any:
        """Returns the examples of some rows, a structure of tensors, [b, ...], or of `Uneven` where shapes may differ.

        Args:
            rows: int64 [b].
            seeds: of the examples, int64 [b, 2]; None: they use none.
            width: to which axes that differ are padded, int64 []; None: they are not.
        """
        types = []
        for spec in self._specs:
            is_static = width is not None or spec.shape.is_fully_defined()
            types += [spec.dtype] if is_static else [spec.dtype, tf.int64]
        given = [rows, -1 if width is None else width, *([] if seeds is None else [seeds])]
        tensors = iter(tf.numpy_function(self._read, given, types))
        entries: list[Any] = []
        for spec in self._specs:
            entry = next(tensors)
            if width is not None or spec.shape.is_fully_defined():
                entry.set_shape([None, *spec.shape])
                entries.append(entry)
            else:
                shapes = tf.ensure_shape(next(tensors), [None, spec.shape.rank])
                entry.set_shape([None])
                entries.append(Uneven(entry, tf.cumsum(tf.reduce_prod(shapes, 1)), shapes, spec))
        return tf.nest.pack_sequence_as(self.spec, entries)

    def _read(self, rows: np.ndarray, width: int = -1, seeds: np.ndarray | None = None) -> list[np.ndarray]:
        try:
            if len(self._source) != self._num_rows:
                raise ValueError(
                    f"The {self._name} given had {self._num_rows:,} rows when training began, and has "
                    f"{len(self._source):,} now: its length must stay as it is, as the order depends on it."
                )
            columns = zip(*(tf.nest.flatten(e) for e in self._checked(self._examples(rows, seeds), rows)), strict=True)
            arrays: list[np.ndarray] = []
            for spec, column in zip(self._specs, columns, strict=True):
                arrays += self._stack(spec, column, rows, width)
            return arrays
        except Exception as error:  # TensorFlow would pass on its text alone
            raise carry(error) from error

    def _stack(
        self, spec: tf.TensorSpec, column: Sequence[np.ndarray], rows: np.ndarray, width: int
    ) -> list[np.ndarray]:
        """Returns the entry of all rows as one array, or, with a width of -1, as the parts of an `Uneven`."""
        dtype = spec.dtype.as_numpy_dtype
        for row, array in zip(rows, column, strict=True):
            if not _holds(np.dtype(dtype), array) or not spec.shape.is_compatible_with(array.shape):
                raise ValueError(
                    f"{self._reader.row_name(row)} has an entry of {array.dtype.name} {list(array.shape)} where "
                    f"the first rows have {spec.dtype.name} {spec.shape.as_list()}: rows share their types, and their "
                    "shapes too unless a map_fn brings them to one."
                )
        if spec.shape.is_fully_defined():
            return [np.stack(column).astype(dtype, copy=False)]
        if width >= 0:
            return [pad_rows(column, spec, width)]
        shapes = np.array([array.shape for array in column], np.int64)
        return [np.concatenate([array.ravel().astype(dtype, copy=False) for array in column]), shapes]

    def _checked(self, examples: list[Any], rows: np.ndarray) -> list[Any]:
        """Returns the examples.

        Raises:
            ValueError: if one has another structure than the first row.
        """
        for row, example in zip(rows, examples, strict=True):
            try:
                tf.nest.assert_same_structure(self._structure, example)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{self._reader.row_name(row)} is {describe(example)}, where the first one is "
                    f"{describe(self._structure)}: all rows have the same entries."
                ) from error
        return examples

    def _examples(self, rows: np.ndarray, seeds: np.ndarray | None) -> list[Any]:
        """Returns the examples of some rows, structures of arrays, in their order."""
        began_at = time.perf_counter()
        pieces = self._pieces(rows, np.zeros([len(rows), 2], np.int64) if seeds is None else seeds)
        secs = time.perf_counter() - began_at
        sums = np.sum([piece[1:] for piece in pieces], 0)  # of all threads or processes
        reading, map_fn, copying = (sums * secs / max(sums.sum(), 1e-9)).tolist()
        self.stage_secs.add(reading=reading, map_fn=map_fn, copying=copying)
        return list(itertools.chain.from_iterable(piece.examples for piece in pieces))

    def _pieces(self, rows: np.ndarray, seeds: np.ndarray) -> list[ReadRows]:
        """Returns the examples of some rows, in pieces that threads or processes have read."""
        if self._processes is not None:
            return list(self._processes.read(rows, seeds))
        if not getattr(self, "_is_slow", False) or len(rows) < 2:
            return [self._reader.read(rows, seeds)]
        count = min(_THREADS, len(rows))
        return list(_threads().map(self._reader.read, np.array_split(rows, count), np.array_split(seeds, count)))

    def use_processes(self, count: int) -> None:
        """Lets worker processes read rows from now on; those of arrays are read here, and changed there.

        Raises:
            ValueError: if the source or the function cannot be pickled.
        """
        processes = import_part("processes.row_processes", "processes")
        is_fetched_here = isinstance(self._source, ArrayRows)
        self._processes = processes.RowProcesses(self._reader, count, is_fetched_here=is_fetched_here)


def is_arrays(source: Any) -> bool:
    """Returns whether a source is arrays `[N, ...]` in a structure, rather than an object with numbered rows."""
    if isinstance(source, list):
        return bool(source) and all(hasattr(array, "__array__") for array in source)
    return isinstance(source, (np.ndarray, tf.Tensor, Mapping, tuple)) or is_on_disk(source)


def spread(count: int) -> np.ndarray:
    """Returns a few numbers of rows, from the first one to the last of so many, int64."""
    return np.unique(np.linspace(0, count - 1, _NUM_PEEKED, dtype=np.int64))


def _holds(dtype: np.dtype, array: np.ndarray) -> bool:
    """Returns whether a type has the kind of an array, and holds its integers, and its floats but for their digits."""
    if array.dtype == dtype or not array.size:
        return True
    if array.dtype.kind != dtype.kind:
        return False
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    return bool(np.all(np.isinf(cast) <= np.isinf(array)) if dtype.kind == "f" else np.array_equal(cast, array))


@once
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_THREADS, "distloop-rows")


def _with_dicts(arrays: Any) -> Any:
    """Returns a structure with dicts for other mappings, as in h5py, and arrays for other sequences, as in datasets."""
    if isinstance(arrays, Mapping):
        return {name: _with_dicts(entry) for name, entry in arrays.items()}
    is_sequence = isinstance(arrays, Sequence) and not isinstance(arrays, (list, tuple, str, bytes))
    return np.asarray(arrays) if is_sequence else arrays


def _column(array: Any) -> Any:
    """Returns an array as a tensor of the host, or as a column on disk."""
    if is_on_disk(array):
        return DiskColumn(array)
    is_text = isinstance(array, (str, bytes))
    is_source = hasattr(array, "__getitem__") and not hasattr(array, "__array__") and not is_text
    values = None if is_source else np.asarray(unmasked(array))
    try:
        tensor = None if is_source else tf.constant(values)
    except (TypeError, ValueError) as error:  # such as a frame of several types
        raise ValueError(
            f"An array of type {np.asarray(array).dtype} was given; distloop takes numbers, truth values or texts, one "
            "type in an array: convert it with astype, or give the columns of a frame by name, as dict(frame)."
        ) from error
    if tensor is None or not tensor.shape.rank:
        raise ValueError(
            f"An entry of type {type(array).__name__} was given in a structure of arrays [N, ...]: turn lists of "
            "numbers or texts into arrays with np.asarray, and give make_dataset one source, as source['train'] of a "
            "dict of sources, or a distloop.Mixture of several."
        )
    return tensor
