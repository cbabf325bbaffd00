"""W&B files: which rows of a run are in the files that wandb writes; they are in LevelDB's log format.

    step = last_step("run/wandb", "a1b2c3d4")

wandb buffers rows for seconds, so a process that is killed has handed over more than the files hold. The package has
no reader of them in Python; https://github.com/google/leveldb/blob/main/doc/log_format.md describes the format.
"""

import glob
import importlib
import os
import struct
from collections.abc import Iterator
from typing import Any

_BLOCK_BYTES = 32_768
_HEADER = struct.Struct("<IHB")  # checksum, length, and which part of a record follows
_FULL, _LAST = 1, 4  # parts that end a record


def last_step(directory: str, run_id: str) -> int:
    """Returns the last step of a run in the files of all its starts; -1 if there is none."""
    paths = glob.glob(os.path.join(glob.escape(directory), f"*run-*-{run_id}", f"run-{run_id}.wandb"))
    steps = [record.history.step.num for path in paths for record in records(path) if record.history.item]
    return max(steps, default=-1)


def records(path: str) -> Iterator[Any]:
    """Yields the whole records of a file, of wandb's protocol."""
    record_class = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    with open(path, "rb") as file:
        content = file.read()
    start, parts = _HEADER.size, b""  # the first bytes name the format
    while start + _HEADER.size <= len(content):
        if (left := _BLOCK_BYTES - start % _BLOCK_BYTES) < _HEADER.size:
            start += left  # too few for another part
            continue
        _, length, kind = _HEADER.unpack_from(content, start)
        start += _HEADER.size
        if not kind or start + length > len(content):  # the end of what was written, or half a part
            return
        parts += content[start : start + length]
        start += length
        if kind in (_FULL, _LAST):
            yield record_class.FromString(parts)
            parts = b""
