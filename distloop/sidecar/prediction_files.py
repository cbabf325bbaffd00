"""Prediction files: the outputs of `predict` as `.npy` files in a directory, written a batch at a time.

write_outputs("predictions", predictor.stream(source), is_chief=True)
logits = np.load("predictions/outputs.npy", mmap_mode="r")
"""

import contextlib
import os
import re
from collections.abc import Collection, Iterable
from typing import Any

import keras
import numpy as np

from distloop import urls
from distloop.atomic_files import make_directory, replacing
from distloop.errors import explaining_disk_errors
from distloop.evaluation.prediction import IS_EMPTY

_KINDS_IN_FILES = "biufcSUmM"  # of dtypes that an .npy file can hold without pickle


class _ArrayFile:
    """An `.npy` file that grows; its header, of a fixed length, gets the number of rows at the end."""

    def __init__(self, path: str, first: np.ndarray):
        self._num_rows, self._row = 0, (first.dtype, first.shape[1:])
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
        self._num_rows += len(rows)

    def close(self) -> None:
        """Writes the number of rows."""
        self._file.seek(0)
        length = self._write_header()
        assert length == self._header_bytes  # NumPy leaves room for a longer first axis
        self._file.close()

    def _write_header(self) -> int:
        dtype, row_shape = self._row
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(self._file, {**header, "shape": (self._num_rows, *row_shape)})
        return self._file.tell()


def write_outputs(path: str, batches: Iterable[Any], is_chief: bool) -> None:
    """Writes the outputs of batches to a directory, which replaces an older one once it is complete.

    Args:
        path: of the directory. Each output becomes `<name>.npy`, `[N, ...]`: `outputs.npy` if it is the only one.
        batches: outputs of one structure, NumPy arrays `[B, ...]`; all workers take them, and the chief writes.
        is_chief: whether this worker writes.

    Raises:
        ValueError: if something else is at the path, there is no batch, a file cannot hold an output, or the disk is
            full.
    """
    urls.require_disk(path, "path={} is a URL, and predictions go to a disk: give a directory of this machine.")
    path = os.path.abspath(urls.expand(path))
    if is_chief:
        _require_replaceable(path)
        with explaining_disk_errors(path):
            make_directory(os.path.dirname(path))
    with replacing(path) if is_chief else contextlib.nullcontext("") as directory:
        files, outputs = dict[str, _ArrayFile](), None
        for outputs in batches:
            if is_chief:
                with explaining_disk_errors(path):
                    _append(outputs, files, directory)
                _require_replaceable(path, {f"{name}.npy" for name in files})
        if outputs is None:
            raise ValueError(IS_EMPTY)
        with explaining_disk_errors(path):
            for file in files.values():
                file.close()


def _append(outputs: Any, files: dict[str, _ArrayFile], directory: str) -> None:
    """Appends the outputs of a batch to their files, which the first batch makes.

    Raises:
        ValueError: if a file cannot hold an output.
        OSError: if a file cannot be written.
    """
    flat = keras.tree.flatten_with_path(outputs)
    named = {".".join(re.sub(r"[^\w\-]", "_", str(k)) for k in keys) or "outputs": rows for keys, rows in flat}
    if len(named) < len(flat):
        raise ValueError(f"Two outputs of predict_fn would be one of the files {sorted(named)}: rename one.")
    for name, rows in named.items():
        if not isinstance(rows, np.ndarray) or rows.dtype.kind not in _KINDS_IN_FILES:
            raise ValueError(
                f"The output {name!r} is of {getattr(rows, 'dtype', type(rows).__name__)}, which an .npy file "
                "cannot hold: return dense numbers from predict_fn."
            )
        if name not in files:
            os.makedirs(directory, exist_ok=True)
            files[name] = _ArrayFile(os.path.join(directory, f"{name}.npy"), rows)
        files[name].append(rows)


def _require_replaceable(path: str, files: Collection[str] = ()) -> None:
    """Raises a ValueError unless nothing is at the path, or a directory of `.npy` files, of these names if given."""
    there = os.listdir(path) if os.path.isdir(path) else []
    if os.path.lexists(path) and not (os.path.isdir(path) and all(name.endswith(".npy") for name in there)):
        raise ValueError(
            f"{path!r} is not a directory of .npy files alone, and predictions would replace it: give another path."
        )
    if files and (others := sorted(set(there) - set(files))):
        raise ValueError(
            f"{path!r} holds {others[0]}, which is none of these predictions ({', '.join(sorted(files))}) and "
            "would be lost: give another path."
        )
