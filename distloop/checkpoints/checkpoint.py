"""One checkpoint: a directory of named tensors, which is loaded only if all checksums match.

    write_files("run/checkpoints/500.tmp", 500, {"model/dense/kernel": tensor, ...}, {"replicas": 2})
    saved = load("run/checkpoints/500")                                           # Saved(path, step, values, metadata)

It holds `manifest.json`, and `variables.index` and `variables.data-*` in TensorFlow's own format, which
`tf.train.load_checkpoint(".../variables")` reads by name. The manifest has a checksum of itself and one of the index,
and the index has a CRC of each tensor, which TensorFlow compares; so values never load under another step's manifest.

Damage is what was read and is not what was written. An error of the disk or of the process (no descriptors left, a
stale handle of NFS, no permission, no memory) says nothing about the checkpoint, and is never taken for damage.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from distloop.atomic_files import open_at_once
from distloop.distributed.devices import HOST
from distloop.errors import first_line
from distloop.variables import count_unnamed
from distloop.workdir.records import as_object, parse_json

_FORMAT = 2  # format 1 has no checksum of the index
_MANIFEST, _VARIABLES = "manifest.json", "variables"
_INDEX = f"{_VARIABLES}.index"
_PLAIN = re.compile(r"[^*?\[\]\\{}\x00-\x1f\x7f\ud800-\udfff]+")
_PAUSES_SECS = (0.1, 1.0)  # before a read that failed is tried again
# What an operating system says of files that are not there, and TensorFlow of content that it cannot read.
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_DAMAGE = (tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.InvalidArgumentError, tf.errors.OutOfRangeError)
_T = TypeVar("_T")


class Saved(NamedTuple):
    """The contents of a checkpoint."""

    path: str
    step: int
    values: dict[str, tf.Tensor]
    metadata: dict[str, Any]


class DamagedError(ValueError):
    """A checkpoint is missing or differs from what was written; the message says how."""


def is_checkpoint(path: str) -> bool:
    """Returns whether a path is the directory of one checkpoint."""
    return os.path.exists(os.path.join(path, _MANIFEST))


@contextlib.contextmanager
def plain_path(path: str) -> Iterator[str]:
    """Yields a path to a directory, or to one that is yet to be made, whose letters TensorFlow takes as they are.

    It reads a checkpoint's path as a pattern, and texts as UTF-8: where a path has such letters, a link stands for it.
    """
    if _PLAIN.fullmatch(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="distloop-") as directory:
        os.symlink(os.path.abspath(path), link := os.path.join(directory, "link"))
        yield link


def write_files(directory: str, step: int, values: Mapping[str, tf.Tensor], metadata: Mapping[str, Any]) -> None:
    """Creates a directory with the files of a checkpoint: tensors that will not change, and metadata for JSON."""
    os.mkdir(directory)
    with plain_path(directory) as plain, tf.device(HOST):
        tf.raw_ops.SaveV2(
            prefix=os.path.join(plain, _VARIABLES),
            tensor_names=list(values),
            shape_and_slices=[""] * len(values),
            tensors=list(values.values()),
        )
    manifest = {
        "format": _FORMAT,
        "step": step,
        "entries": {name: {"shape": list(v.shape), "dtype": v.dtype.name} for name, v in values.items()},
        "files": {name: os.path.getsize(os.path.join(directory, name)) for name in sorted(os.listdir(directory))},
        "index": _index_checksum(directory),
        "notes": dict(metadata),
    }
    with open(os.path.join(directory, _MANIFEST), "w", encoding="utf-8") as file:
        lines = [f"{json.dumps(n)}: {json.dumps(v)}" for n, v in {**manifest, "checksum": _checksum(manifest)}.items()]
        file.write("{\n" + ",\n".join(lines) + "\n}\n")  # `indent` would take json ten times as long


def load(path: str) -> Saved:
    """Loads the checkpoint in a directory and verifies every byte of it.

    Raises:
        DamagedError: if it differs from what was written.
        ValueError: if a newer version of distloop wrote it.
        OSError: if it cannot be read, though it may be complete.
    """

    def read() -> Saved:
        manifest = read_manifest(path)
        entries = manifest["entries"]
        with plain_path(path) as plain, tf.device(HOST):
            tensors = tf.raw_ops.RestoreV2(
                prefix=os.path.join(plain, _VARIABLES),
                tensor_names=list(entries),
                shape_and_slices=[""] * len(entries),
                dtypes=[tf.as_dtype(entry["dtype"]) for entry in entries.values()],
            )
        values = dict(zip(_portable(list(entries)), tensors, strict=True))
        return Saved(path, manifest["step"], values, manifest["notes"])

    try:
        return patiently(read, path)
    except _DAMAGE as error:
        raise _damaged(path, error) from error


def read_manifest(path: str) -> dict[str, Any]:
    """Returns the manifest of a checkpoint after comparing the sizes of its files and its index with it.

    Raises:
        DamagedError: if they differ, or a file is missing.
        ValueError: if a newer version of distloop wrote it.
        OSError: if a file cannot be read.
    """
    try:
        with open_at_once(os.path.join(path, _MANIFEST)) as file:
            manifest = parse_json(file.read(), as_object)
        if manifest.pop("checksum") != _checksum(manifest):
            raise ValueError(f"{_MANIFEST} was altered")
        for name, size in manifest["files"].items():
            actual_size = os.path.getsize(os.path.join(path, name))
            if actual_size != size:
                raise ValueError(f"{name} has {actual_size} bytes instead of {size}")
        if manifest["format"] == _FORMAT and manifest["index"] != _index_checksum(path):
            raise ValueError(f"{_INDEX} is not the one that was written")
        is_newer = manifest["format"] > _FORMAT
    except (*_MISSING, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error
    if is_newer:
        raise ValueError(
            f"The checkpoint {path!r} has format {manifest['format']}, and this version of distloop reads up to "
            f"{_FORMAT}: install the version that wrote it, or give another workdir."
        )
    return manifest


def patiently(read: Callable[[], _T], path: str) -> _T:
    """Returns what a function reads from a path; tries again shortly after an error that may pass.

    Files that are missing and damage in the manifest are raised at once. What TensorFlow takes for damage is tried
    again too: it may have been unable to read.

    Raises:
        OSError: if it still cannot read.
    """
    for pause in (*_PAUSES_SECS, None):
        try:
            return read()
        except _MISSING:
            raise
        except (OSError, tf.errors.OpError) as error:
            is_damage = isinstance(error, _DAMAGE) and _is_readable(path)
            if pause is not None:
                time.sleep(0 if is_damage else pause)
                continue
            if is_damage:
                raise
            raise OSError(
                f"{path!r} cannot be read ({first_line(error)}), which says nothing about what it holds: nothing was "
                "restored or deleted. Run the same command again when the disk can be read."
            ) from error
    raise AssertionError


def _portable(names: Sequence[str]) -> list[str]:
    """Returns names of values; older versions kept the numbers that Keras gives to variables without a name."""
    counted = count_unnamed([name.removeprefix("model/") for name in names if name.startswith("model/")])
    of_optimizer = count_unnamed([name for name in names if re.fullmatch(r"optimizer/[^/]+", name)])
    portable = []
    for name in names:
        ends = (name[i + 1 :] for i, letter in enumerate(name) if letter == "/")  # slots and averages end in the name
        end = next((end for end in ends if end in counted), "")
        portable.append(of_optimizer.get(name, name.removesuffix(end) + counted.get(end, "")))
    return portable


def _damaged(path: str, error: Exception) -> DamagedError:
    return DamagedError(f"The checkpoint {path!r} is damaged ({first_line(error)}).")


def _is_readable(directory: str) -> bool:
    """Returns whether every byte of the files in a directory can be read."""
    try:
        for name in os.listdir(directory):
            with open(os.path.join(directory, name), "rb", buffering=0) as file:
                while file.read(1 << 22):
                    pass
    except OSError as error:
        return isinstance(error, _MISSING)
    return True


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _index_checksum(directory: str) -> str:
    with open_at_once(os.path.join(directory, _INDEX)) as file:
        return hashlib.sha256(file.read()).hexdigest()
