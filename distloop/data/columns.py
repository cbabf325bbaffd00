"""Arrays on disk, whose rows are read on demand: `numpy.memmap`, datasets of h5py, arrays of zarr.

    if is_on_disk(array):
        column = DiskColumn(array)
        values = column.read(np.array([7, 3]))      # [2, ...]

It does not know in which order rows are read.
"""

import functools
import hashlib
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.data.python_rows import unmasked

DIGITS = 8  # of a column's digest
_NUM_DIGESTED = 32  # rows of which a digest is made, spread over the array
_FULL_DIGEST_BYTES = 64 * 2**20  # an array in memory is digested whole up to this size, in some 50 ms, and beyond it
_MOST_BYTES, _MOST_ROWS = 16 * 2**20, 4096  # by so much of it, in rows that are spread over it
_TEXT_BYTES = 64  # taken for the size of a text


def is_on_disk(array: Any) -> bool:
    """Returns whether an array's rows are read from a file or a store: a memmap, or a foreign array not in memory."""
    if isinstance(array, np.memmap):
        return True
    is_array = all(hasattr(array, name) for name in ("shape", "__getitem__"))
    # What is in memory can be shared by DLPack; a column of pandas is indexed by labels.
    in_memory = isinstance(array, np.ndarray) or hasattr(array, "__dlpack__") or hasattr(array, "iloc")
    return is_array and isinstance(getattr(array, "dtype", None), np.dtype) and not in_memory


class DiskColumn:
    """An array on disk, `[N, ...]`; several threads may read it.

    Attributes:
        name: of the file, for a sentence.
        spec: of one row.
    """

    def __init__(self, array: Any):
        """Reads the first row if it may be a text.

        Args:
            array: has `shape`, `dtype` and `__getitem__`.

        Raises:
            ValueError: if TensorFlow has no such type.
        """
        self._array = array
        self.name = _name(array)
        dtype = array.dtype
        is_text = dtype.kind in "SU" or (dtype.kind == "O" and len(self) and isinstance(array[0], (str, bytes)))
        if not is_text and dtype.kind not in "biufc":
            raise ValueError(f"{self.name} has the type {dtype}; a column is of numbers, truth values or texts.")
        self._dtype = np.dtype(object) if is_text else dtype.newbyteorder("=")
        self.spec = tf.TensorSpec(array.shape[1:], tf.string if is_text else tf.as_dtype(self._dtype))

    def __len__(self) -> int:
        return int(self._array.shape[0]) if self._array.shape else 0

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Returns some rows, `[b, ...]`; neighbours are read at once.

        Args:
            rows: their numbers, int64 [b].

        Raises:
            ValueError: if they cannot be read.
        """
        try:
            if isinstance(self._array, np.memmap):
                values = self._array[rows]
            elif len(rows) > 1 and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
                values = self._array[int(rows[0]) : int(rows[-1]) + 1]
            else:
                values = [unmasked(self._array[row]) for row in rows.tolist()]
            return np.asarray(unmasked(values), self._dtype).reshape([len(rows), *self.spec.shape])
        except Exception as error:
            some = f"Row {rows[0]}" if len(rows) == 1 else f"One of the rows {rows.tolist()}"
            raise ValueError(f"{some} of {self.name} could not be read ({type(error).__name__}: {error}).") from error

    @functools.cached_property
    def digest(self) -> str:
        """Eight digits that depend on type, shape and some rows, so that another file in its place is noticed."""
        digest = hashlib.blake2b(f"{self._dtype} {tuple(self._array.shape)}".encode(), digest_size=DIGITS // 2)
        for row in np.unique(np.linspace(0, len(self) - 1, _NUM_DIGESTED, dtype=np.int64)):
            value = self.read(row[None])
            digest.update(repr(value.tolist()).encode() if value.dtype == object else value.tobytes())
        return digest.hexdigest()


def content_of(arrays: Iterable[Any]) -> str:
    """Returns a text that depends on types, shapes and values of arrays and tensors in memory, not on those on disk.

    Of an array above 64 MB, it depends on some 4,000 rows, or on 16 MB of them.
    """
    return ":".join(_digest(array) for array in arrays if not isinstance(array, DiskColumn) and not is_on_disk(array))


def _digest(array: Any) -> str:
    """Returns the digits of an array `[N, ...]`; a tensor that was made from it has the same."""
    dtype, shape = tf.as_dtype(array.dtype), tuple(array.shape)
    row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * (_TEXT_BYTES if dtype == tf.string else dtype.size)
    if row_bytes * shape[0] > _FULL_DIGEST_BYTES:
        count = min(shape[0], _MOST_ROWS, max(1, _MOST_BYTES // row_bytes))
        rows = np.linspace(0, shape[0] - 1, count, dtype=np.int64)
        array = tf.gather(array, rows) if tf.is_tensor(array) else array[rows]
    values = array.numpy() if tf.is_tensor(array) else array
    if dtype == tf.string:
        texts = (text if isinstance(text, bytes) else str(text).encode() for text in values.flat)
        values = np.frombuffer(b"\0".join(texts), np.uint8)
    values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    start = zlib.crc32(f"{dtype.name} {shape}".encode())
    return f"{zlib.crc32(values.tobytes(), start):08x}"


def _name(array: Any) -> str:
    """Returns what a user calls an array: its file, and its name in it."""
    file = getattr(array, "filename", None) or getattr(getattr(array, "file", None), "filename", None)
    if file is None:
        return f"the {type(array).__name__} given"
    name = getattr(array, "name", None)
    return f"{name} of {str(file)!r}" if isinstance(name, str) else repr(str(file))
