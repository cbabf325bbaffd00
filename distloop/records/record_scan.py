"""Record scan: where the records of TFRecord shards begin, from their headers alone.

A shard is a sequence of records, all numbers little-endian (tensorflow/core/lib/io/record_writer.h):

    uint64 length | uint32 masked CRC-32C of the length | data | uint32 masked CRC-32C of the data

    shard, positions = scan_shards(open_files(paths), [0], [(num_bytes, stamp)])[0]
    begin, end = positions[4:6]         # of record 4, with its header and footer
"""

import array
import concurrent.futures
import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from distloop.monitoring.console import say
from distloop.records.file_ranges import Files

HEADER_BYTES, FOOTER_BYTES = 12, 4
_JOINT_BYTES = FOOTER_BYTES + HEADER_BYTES  # the end of a record and the beginning of the next one
_MASK_DELTA = 0xA282EAD8
_LARGE_PART = 8  # a record of more than this part of a window is not read
_NUM_THREADS = 8
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
    """Raises a ValueError that says what a file is which does not begin with a record; nothing if it may be damaged."""
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
