"""Record index: the offsets of the records in TFRecord shards, from one scan of the headers, kept in a file.

A shard is a sequence of records, all numbers little-endian (tensorflow/core/lib/io/record_writer.h):

    uint64 length | uint32 masked CRC-32C of the length | data | uint32 masked CRC-32C of the data

    index = open_index(Files(paths))
    begin, end = index.positions[4:6]        # of record 4 of the first shard, in bytes, with its header and footer

The file is beside the first shard, or in another directory, and belongs to one list of shards. It holds a digest of the
checksums of each shard: a shard that was copied is not taken for another one, and one with other records is refused.
"""

import array
import concurrent.futures
import functools
import hashlib
import json
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distloop.atomic_files import make_directory, replacing
from distloop.log import log
from distloop.monitoring.console import say
from distloop.monitoring.records import parse_json
from distloop.records.file_ranges import Files
from distloop.urls import file_system, is_url

_FORMAT = b"distloop records 1"
_NUM_THREADS = 8
HEADER_BYTES, FOOTER_BYTES = 12, 4
_JOINT_BYTES = FOOTER_BYTES + HEADER_BYTES  # the end of a record and the beginning of the next one
_MASK_DELTA = 0xA282EAD8
_LARGE_PART = 8  # a record of more than this part of a window is not read
_PATIENCE_SECS = 1.5  # before a line is printed


class Shard(NamedTuple):
    """A file of records.

    Attributes:
        path: where it is.
        num_bytes: its size.
        stamp: another text once the file has been written again.
        num_records: its readable records.
        digest: of the lengths and checksums of these records, 16 hexadecimal digits.
        damage: what is wrong behind them, for people; empty: nothing.
    """

    path: str
    num_bytes: int
    stamp: str
    num_records: int
    digest: str
    damage: str = ""


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


@functools.cache
def crc32c() -> Callable[[bytes], int]:
    """Returns the function that computes the CRC-32C of bytes.

    Raises:
        ValueError: if its package is not installed.
    """
    try:
        import google_crc32c
    except ImportError:
        raise ValueError("TFRecord files need google-crc32c: pip install 'distloop[records]'.") from None
    return google_crc32c.value


def masked(crc: int) -> int:
    """Returns a CRC-32C in the form that TFRecord files hold."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def scan_shards(
    files: Files, numbers: Sequence[int], stats: Sequence[tuple[int, str]]
) -> list[tuple[Shard, np.ndarray]]:
    """Returns shards and where their records begin, and prints a line if this takes more than a moment.

    Args:
        files: all shards.
        numbers: of the shards to scan.
        stats: size in bytes and stamp of each shard in `numbers`.

    Returns:
        For each of them the shard, and where each record begins and the last one ends, int64 `[num_records + 1]`.

    Raises:
        ValueError: if a file is compressed, or no TFRecord.
        OSError: if one cannot be read.
    """
    is_over = threading.Event()  # nobody waits for the other scans any more
    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
        jobs = zip(numbers, stats, strict=True)
        futures = [pool.submit(_scan_shard, files, number, *stat, is_over) for number, stat in jobs]
        try:
            if concurrent.futures.wait(futures, _PATIENCE_SECS, concurrent.futures.FIRST_EXCEPTION).not_done:
                num_bytes = sum(num_bytes for num_bytes, _ in stats)
                say(f"Reading the headers of {len(futures)} shards, {num_bytes / 1e9:.1f} GB, once.")
            for future in concurrent.futures.as_completed(futures):
                future.result()
            return [future.result() for future in futures]
        finally:
            is_over.set()
            pool.shutdown(wait=False, cancel_futures=True)


def _scan_shard(
    files: Files, number: int, num_bytes: int, stamp: str, is_over: threading.Event
) -> tuple[Shard, np.ndarray]:
    """Returns one shard and where its records begin; small records are read through, large ones left out."""
    path, digest, crc = files.paths[number], hashlib.blake2b(digest_size=8), crc32c()
    block, origin = bytes(FOOTER_BYTES), -FOOTER_BYTES  # of the file, as read last; zeros are before its beginning

    def read(begin: int, end: int) -> bytes:
        (data,) = files.read([(number, begin, end)])
        if len(data) < end - begin:
            raise ValueError(f"The shard {path!r} became shorter while it was read: wait until it is written.")
        return data

    positions, damage = array.array("q", [0]), ""
    while (begin := positions[-1]) + HEADER_BYTES <= num_bytes and not damage:
        first, end = begin - FOOTER_BYTES, begin + HEADER_BYTES
        if end > origin + len(block):
            is_small = begin - positions[max(len(positions) - 2, 0)] <= files.window_bytes // _LARGE_PART
            size = max(files.window_bytes, _JOINT_BYTES) if is_small else _JOINT_BYTES
            kept = block[first - origin :] if first < origin + len(block) else b""
            block = kept + read(first + len(kept), min(first + size, num_bytes))
            origin = first
            if is_over.is_set():
                raise concurrent.futures.CancelledError
        joint = block[first - origin : end - origin]
        length = joint[FOOTER_BYTES:-4]
        if masked(crc(length)) != int.from_bytes(joint[-4:], "little"):
            digest.update(joint[:FOOTER_BYTES])
            damage = "has a corrupt length"
            continue
        digest.update(joint)
        if (following := end + int.from_bytes(length, "little") + FOOTER_BYTES) <= num_bytes:
            positions.append(following)
        else:
            damage = "is cut off"
    if positions[-1] < num_bytes:
        damage = damage or "is cut off"
    elif num_bytes:
        digest.update(read(num_bytes - FOOTER_BYTES, num_bytes))
    num_records, end = len(positions) - 1, positions[-1]
    if damage and not end:
        _require_records(path, read(0, min(2, num_bytes)))
    damage = f"record {num_records}, at byte {end}, {damage}" if damage else "" if num_bytes else "it is empty"
    shard = Shard(path, num_bytes, stamp, num_records, digest.hexdigest(), damage)
    return shard, np.array(positions, np.int64)


def _require_records(path: str, beginning: bytes) -> None:
    """Raises a ValueError for a file of another format than TFRecord; a file that may be damaged raises nothing."""
    if beginning == b"\x1f\x8b":
        program = "gunzip -c"
    elif beginning[:1] == b"\x78" and int.from_bytes(beginning, "big") % 31 == 0:  # RFC 1950
        program = "zlib-flate -uncompress <"
    else:
        raise ValueError(
            f"The file {path!r} does not begin with a TFRecord: give files that TFRecordWriter has written."
        )
    raise ValueError(
        f"The shard {path!r} is compressed, so its records cannot be read one by one: write it without compression, "
        f"such as by '{program} {path} > FILE'."
    )
