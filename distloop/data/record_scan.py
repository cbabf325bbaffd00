"""Record scan: where the records of TFRecord shards begin, from their headers alone.

A shard is a sequence of records, all numbers little-endian (tensorflow/core/lib/io/record_writer.h):

    uint64 length | uint32 masked CRC-32C of the length | data | uint32 masked CRC-32C of the data

    shard, positions = scan_shards(open_files(paths), [0], [(num_bytes, stamp)])[0]
    begin, end = positions[4:6]         # of record 4, with its header and footer

It does not read the data, unless records are so small that this is faster.
"""

import concurrent.futures
import functools
import hashlib
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import rich.progress

from distloop.data.file_ranges import Files
from distloop.monitoring.console import say

HEADER_BYTES, FOOTER_BYTES = 12, 4
_JOINT_BYTES = FOOTER_BYTES + HEADER_BYTES  # the end of a record and the beginning of the next one
_MASK_DELTA = 0xA282EAD8
_LARGE_PART = 8  # records of more than this part of a window are not read through
_JUMPS_AT_ONCE = 1024
_NUM_THREADS = 8
_PATIENCE_SECS = 1.5  # before the progress is shown
_BAR_SECS = 0.2  # between two drawings
_LINE_SECS = 30.0  # between two lines where there is no terminal


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
    """Returns shards and where their records begin, and shows the progress if this takes more than a moment.

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
    num_done, is_over = [0] * len(numbers), threading.Event()  # bytes; whether nobody waits any more

    def scan(place: int) -> tuple[Shard, np.ndarray]:
        def advance(num_bytes: int) -> None:
            num_done[place] = num_bytes
            if is_over.is_set():
                raise concurrent.futures.CancelledError

        return _scan_shard(files, numbers[place], *stats[place], advance)

    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
        futures = [pool.submit(scan, place) for place in range(len(numbers))]
        try:
            _show_progress(futures, lambda: sum(num_done), sum(num_bytes for num_bytes, _ in stats))
            return [future.result() for future in futures]
        finally:
            is_over.set()
            pool.shutdown(wait=False, cancel_futures=True)


def _scan_shard(
    files: Files, number: int, num_bytes: int, stamp: str, advance: Callable[[int], None]
) -> tuple[Shard, np.ndarray]:
    """Returns one shard and where its records begin; calls `advance` with the bytes that are done."""

    def read(begin: int, end: int) -> bytes:
        (data,) = files.read([(number, begin, end)])
        if len(data) < end - begin:
            raise ValueError(f"The shard {path!r} became shorter while it was read: wait until it is written.")
        return data

    path, digest = files.paths[number], hashlib.blake2b(digest_size=8)
    begins: list[np.ndarray] = []
    end, damage = 0, ""
    for positions, joints, following in _walk(read, num_bytes, files.window_bytes):
        is_corrupt = _masked_crcs(joints[:, 4:12]) != joints[:, 12:].copy().view("<u4")[:, 0]
        if is_corrupt.any():
            first = int(is_corrupt.argmax())
            digest.update(joints[:first].tobytes() + joints[first, :FOOTER_BYTES].tobytes())
            begins.append(positions[:first])
            end, damage = int(positions[first]), "has a corrupt length"
            break
        digest.update(joints.tobytes())
        begins.append(positions)
        end = following
        advance(end)
    if end > num_bytes:  # the last record
        begins[-1], end, damage = begins[-1][:-1], int(begins[-1][-1]), "is cut off"
    elif end < num_bytes:
        damage = damage or "is cut off"
    elif num_bytes:
        digest.update(read(num_bytes - FOOTER_BYTES, num_bytes))
    num_records = sum(map(len, begins))
    if damage and end == 0:
        _require_records(path, read(0, min(2, num_bytes)))
    damage = f"record {num_records}, at byte {end}, {damage}" if damage else "" if num_bytes else "it is empty"
    shard = Shard(path, num_bytes, stamp, num_records, digest.hexdigest(), damage)
    return shard, np.concatenate([*begins, [end]]).astype(np.int64)


def _walk(
    read: Callable[[int, int], bytes], num_bytes: int, window_bytes: int
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yields the records of a file, some at once, from header to header; checksums are not looked at.

    Small records are read through; of large ones, the end of one and the header of the next.

    Yields:
        Where they begin, int64 `[n]`; the 4 bytes before each one and its header, uint8 `[n, 16]`, zeros before the
        first one of the file; where the next one begins, after the end of the file if the last one is cut off.
    """
    length = struct.Struct("<Q").unpack_from
    position, are_large = -FOOTER_BYTES, False  # of the next joint
    while position + _JOINT_BYTES <= num_bytes:
        begin, positions = position, []
        if are_large:
            pieces: list[bytes] = []
            while position + _JOINT_BYTES <= num_bytes and len(pieces) < _JUMPS_AT_ONCE:
                pieces.append(read(position, position + _JOINT_BYTES))
                positions.append(position)
                position += _JOINT_BYTES + length(pieces[-1], FOOTER_BYTES)[0]
            joints = np.frombuffer(b"".join(pieces), np.uint8).reshape(-1, _JOINT_BYTES)
        else:
            block = bytes(max(-begin, 0)) + read(max(begin, 0), min(begin + window_bytes, num_bytes))
            last = begin + len(block) - _JOINT_BYTES
            while position <= last:
                positions.append(position)
                position += _JOINT_BYTES + length(block, position - begin + FOOTER_BYTES)[0]
            places = np.array(positions)[:, None] - begin + np.arange(_JOINT_BYTES)
            joints = np.frombuffer(block, np.uint8)[places]
        are_large = position - begin > len(positions) * window_bytes // _LARGE_PART
        yield np.array(positions, np.int64) + FOOTER_BYTES, joints, position + FOOTER_BYTES


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


def _masked_crcs(words: np.ndarray) -> np.ndarray:
    """Returns the checksum of each row of 8 bytes, as TFRecord files hold it: uint8 `[N, 8]` -> uint32 `[N]`.

    A CRC is affine over bits: that of a row is the sum (xor) of what each of its bytes changes in that of zeros.
    """
    zeros, tables = _tables()
    crcs = np.full(len(words), zeros, np.uint32)
    for place in range(8):
        if (column := words[:, place]).any():  # the upper bytes of a length are 0
            crcs ^= tables[place][column]
    return (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(_MASK_DELTA)


@functools.cache
def _tables() -> tuple[int, np.ndarray]:
    """Returns the CRC-32C of 8 zeros, and what each byte at each place changes in it: uint32 `[8, 256]`."""
    zeros = crc32c()(bytes(8))
    tables = [
        [crc32c()(bytes([*[0] * place, byte, *[0] * (7 - place)])) ^ zeros for byte in range(256)] for place in range(8)
    ]
    return zeros, np.array(tables, np.uint32)


def _show_progress(futures: Sequence[concurrent.futures.Future], done: Callable[[], int], num_bytes: int) -> None:
    """Waits for threads, or raises the first error; after a moment shows a bar, or lines if there is no terminal."""
    if _wait(futures, _PATIENCE_SECS):
        return
    say(f"Reading the headers of {len(futures)} shards, {num_bytes / 1e9:.1f} GB, once.")
    shown_at = time.monotonic()
    with rich.progress.Progress(transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("", total=num_bytes)
        while not _wait(futures, _BAR_SECS):
            bar.update(task, completed=done())
            if bar.disable and time.monotonic() - shown_at >= _LINE_SECS:
                shown_at = time.monotonic()
                say(f"{done() / num_bytes:.0%} of the headers are read.")


def _wait(futures: Sequence[concurrent.futures.Future], secs: float) -> bool:
    """Waits for threads that long at most and returns whether all are done; raises the error of one that failed."""
    done, waiting = concurrent.futures.wait(futures, secs, concurrent.futures.FIRST_EXCEPTION)
    for future in done:
        future.result()
    return not waiting
