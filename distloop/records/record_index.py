"""Record index: where the records of all shards begin, made once and kept in a file.

    index = open_index(open_files(paths))
    begin, end = index.positions[4:6]        # of record 4 of the first shard, in bytes

The file is beside the first shard, or in another directory, and belongs to one list of shards. It holds a digest of the
checksums of each shard: a shard that was copied is not taken for another one, and one with other records is refused.
"""

import concurrent.futures
import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distloop.atomic_files import make_directory, replacing
from distloop.log import log
from distloop.monitoring.records import parse_json
from distloop.records.file_ranges import Files
from distloop.records.record_scan import Shard, scan_shards
from distloop.urls import file_system, is_url

_FORMAT = b"distloop records 1"
_NUM_THREADS = 16  # that ask for the sizes of files


class Index(NamedTuple):
    """The records of several shards.

    Attributes:
        shards: in the order given.
        positions: the byte at which each record begins, and for each shard the end of its last one, shard after shard:
            int64 `[records + shards]`.
    """

    shards: tuple[Shard, ...]
    positions: np.ndarray


def open_index(files: Files, directory: str = "") -> Index:
    """Returns the index of shards; reads it, or makes it where there is none. Shards that are newer are scanned again.

    Args:
        files: the shards.
        directory: of the index, a path or a URL; empty: that of the first shard.

    Raises:
        ValueError: if a shard is compressed, no TFRecord, or holds other records than when the index was made.
        OSError: if a shard cannot be read.
    """
    path = index_path(files.paths, directory)
    index = _load(path, files.paths)
    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
        stats = list(pool.map(files.stat, range(len(files.paths))))
    newer = [i for i, stat in enumerate(stats) if index is None or index.shards[i][1:3] != stat]
    if newer or index is None:
        scans = scan_shards(files, newer, [stats[i] for i in newer])
        kept = {} if index is None else _by_shard(index)
        _require_same(kept, dict(zip(newer, scans, strict=True)), path)
        kept |= dict(zip(newer, scans, strict=True))
        shards, positions = zip(*(kept[i] for i in range(len(stats))), strict=True)
        index = Index(shards, np.concatenate(positions))
        _store(path, index)
    return index


def index_path(paths: Sequence[str], directory: str = "") -> str:
    """Returns where the index of some shards is kept; that of another list has another name."""
    beside = os.path.dirname(paths[0]) if is_url(paths[0]) else os.path.dirname(os.path.abspath(paths[0]))
    directory = (directory or beside).rstrip("/")
    if is_url(directory) or is_url(paths[0]):
        names = [path.removeprefix(f"{directory}/") for path in paths]
    else:
        names = [os.path.relpath(path, directory) for path in paths]
    key = hashlib.blake2b("\n".join(names).encode(), digest_size=6).hexdigest()
    return f"{directory}/.records-{key}.index"  # hidden, so that no pattern for shards matches it


def _by_shard(index: Index) -> dict[int, tuple[Shard, np.ndarray]]:
    """Returns each shard and its positions by its number."""
    ends = np.cumsum([shard.num_records + 1 for shard in index.shards])
    return dict(enumerate(zip(index.shards, np.split(index.positions, ends[:-1]), strict=True)))


def _require_same(
    kept: Mapping[int, tuple[Shard, np.ndarray]], scans: Mapping[int, tuple[Shard, np.ndarray]], path: str
) -> None:
    """Raises a ValueError if a shard that was scanned again holds other records; one that was damaged may."""
    for number, (shard, _) in scans.items():
        before = kept.get(number, (shard,))[0]
        if before.digest != shard.digest and not before.damage:
            raise ValueError(
                f"The shard {shard.path!r} has changed: its index was made of {before.num_records} records in "
                f"{before.num_bytes} bytes, and it has {shard.num_records} other ones in {shard.num_bytes} bytes; to "
                f"go on with a run, put the old file back; to use the new one, delete {path!r}."
            )


def _load(path: str, paths: Sequence[str]) -> Index | None:
    """Returns the index in a file; None if there is none, or, with a warning, if it cannot be used."""
    try:
        if is_url(path):
            data = file_system(path).cat_file(path)
        else:
            with open(path, "rb") as file:
                data = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("The index %r cannot be read (%s): the headers of the shards are read again.", path, error)
        return None
    try:
        first = data.index(b"\n")
        assert data[:first] == b"%s %08x" % (_FORMAT, zlib.crc32(memoryview(data)[first:]))
        second = data.index(b"\n", first + 1)
        shards = parse_json(
            data[first:second], lambda rows: tuple(Shard(path, *row) for path, row in zip(paths, rows, strict=True))
        )
        return Index(shards, np.frombuffer(data, "<i8", offset=second + 1))
    except (ValueError, AssertionError):
        log.warning("The index %r is damaged: the headers of the shards are read again.", path)
        return None


def _store(path: str, index: Index) -> None:
    """Writes an index whole or not at all; warns if that is not possible."""
    head = b"\n" + json.dumps([shard[1:] for shard in index.shards]).encode()
    head += b" " * (-(len(_FORMAT) + 9 + len(head) + 1) % 8) + b"\n"  # so that the positions are aligned
    data = head + index.positions.astype("<i8").tobytes()
    data = b"%s %08x" % (_FORMAT, zlib.crc32(data)) + data
    try:
        if is_url(path):
            file_system(path).pipe_file(path, data)  # object stores show a file when it is whole
            return
        make_directory(os.path.dirname(path))
        with replacing(path) as temporary, open(temporary, "wb") as file:
            file.write(data)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not is_url(path):
            return  # another host took the temporary file for what a killed process left, and writes an index itself
        log.warning(
            "The index %r cannot be written (%s), so each start reads the headers of the shards again: name a "
            "directory for it by open_records(..., index_dir=...).",
            *(path, error),
        )
