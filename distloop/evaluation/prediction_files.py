"""Prediction files: appends outputs to `.npy` files batch by batch, so that memory holds one batch.

    write_outputs("predictions", [{"logits": np.zeros([2, 10])}], is_chief=True)
    logits = np.load("predictions/logits.npy", mmap_mode="r")       # [2, 10]

It does not know where outputs come from.
"""

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from distloop import urls
from distloop.atomic_files import make_directory, replacing

_KINDS = "biufcSUmM"  # of dtypes that a file can hold without pickle


class _ArrayFile:
    """An `.npy` file that grows; its header, of a fixed length, gets the number of rows at the end."""

    def __init__(self, path: str, first: np.ndarray):
        self.num_rows = 0
        self._row = first.dtype, first.shape[1:]
        self._file = open(path, "wb")
        self._header_bytes = self._write_header()

    def append(self, rows: np.ndarray) -> None:
        """Appends rows; raises a ValueError if they are others than the first."""
        if (rows.dtype, rows.shape[1:]) != self._row:
            raise ValueError(
                f"Rows of {rows.dtype} {list(rows.shape[1:])} follow rows of {self._row[0]} {list(self._row[1])}, and "
                "one file holds one kind: pad them to one length, or use trainer.stream_predictions(dataset)."
            )
        self._file.write(np.ascontiguousarray(rows).tobytes())
        self.num_rows += len(rows)

    def close(self) -> None:
        """Writes the number of rows."""
        self._file.seek(0)
        length = self._write_header()
        assert length == self._header_bytes  # NumPy leaves room for a longer first axis
        self._file.close()

    def _write_header(self) -> int:
        dtype, row_shape = self._row
        descr = np.lib.format.dtype_to_descr(dtype)
        shape = (self.num_rows, *row_shape)
        np.lib.format.write_array_header_1_0(self._file, {"descr": descr, "fortran_order": False, "shape": shape})
        return self._file.tell()


def write_outputs(path: str, batches: Iterable[Any], is_chief: bool) -> None:
    """Writes the outputs of batches to a directory, which replaces an older one once it is complete.

    Args:
        path: of the directory. Each output becomes `<name>.npy`, `[N, ...]`: `outputs.npy` if it is the only one.
        batches: outputs of one structure, NumPy arrays `[B, ...]`; all workers take them, and the chief writes.
        is_chief: whether this worker writes.

    Raises:
        ValueError: if something else is at the path, there is no batch, or a file cannot hold an output.
        OSError: if a file cannot be written.
    """
    urls.require_disk(path, "path={} is a URL, and predictions go to a disk: give a directory of this machine.")
    path = os.path.abspath(urls.expand(path))
    if is_chief:
        _require_replaceable(path)
        make_directory(os.path.dirname(path))
    with replacing(path) if is_chief else contextlib.nullcontext("") as directory:
        files: dict[str, _ArrayFile] = {}
        is_empty = True
        for outputs in batches:
            is_empty = False
            named = dict(_named(outputs)) if is_chief else {}
            for name, rows in named.items():
                if not isinstance(rows, np.ndarray) or rows.dtype.kind not in _KINDS:
                    raise ValueError(
                        f"The output {name!r} is of {getattr(rows, 'dtype', type(rows).__name__)}, which an .npy file "
                        "cannot hold: return dense numbers from predict_fn."
                    )
                if name not in files:
                    os.makedirs(directory, exist_ok=True)
                    files[name] = _ArrayFile(os.path.join(directory, f"{name}.npy"), rows)
                files[name].append(rows)
            if is_chief:
                _require_replaceable(path, {f"{name}.npy" for name in files})
        if is_empty:
            raise ValueError("The dataset to predict for is empty; distloop needs one batch at least.")
        for file in files.values():
            file.close()


def _named(outputs: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the arrays of a structure with the names of their files."""
    if isinstance(outputs, Mapping):
        items = outputs.items()
    elif isinstance(outputs, (list, tuple)):
        items = dict(enumerate(outputs)).items()
    else:
        yield name or "outputs", outputs
        return
    for key, value in items:
        key = re.sub(r"[^\w\-]", "_", str(key))
        yield from _named(value, f"{name}.{key}" if name else key)


def _require_replaceable(path: str, files: Collection[str] = ()) -> None:
    """Raises a ValueError unless nothing is at the path, or a directory of predictions: of `.npy` files alone.

    Args:
        path: of the directory.
        files: the names that are written; once they are known, the directory holds no others.
    """
    if os.path.lexists(path):
        if not os.path.isdir(path) or any(not name.endswith(".npy") for name in os.listdir(path)):
            raise ValueError(
                f"{path!r} is not a directory of .npy files alone, and predictions would replace it: give another path."
            )
        if files and (others := sorted(set(os.listdir(path)) - set(files))):
            raise ValueError(
                f"{path!r} holds {others[0]}, which is none of these predictions ({', '.join(sorted(files))}) and "
                "would be lost: give another path."
            )
