"""Record index: the offsets of the records in TFRecord shards, from one scan of the headers, kept in a file.

A shard is a sequence of records, all numbers little-endian (tensorflow/core/lib/io/record_writer.h):

    uint64 length | uint32 masked CRC-32C of the length | data | uint32 masked CRC-32C of the data

    files = Files(expand("gs://bucket/train-*.tfrecord"))      # on a disk or behind URLs; opens none yet
    shards, positions = open_index(files)
    begin, end = positions[4:6]        # of record 4 of the first shard, in bytes, with its header and footer
    (record,) = files.read([(0, begin, end)])

The index is beside the first shard, or in another directory, and belongs to one list of shards. It holds a digest of
the checksums of each shard: a shard that was copied is not taken for another one, and one with other records is
refused.
"""

import array
import concurrent.futures
import functools
import glob
import hashlib
import io
import json
import os
import pathlib
import shlex
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from distloop.atomic_files import make_directory, replacing
from distloop.log import log, say
from distloop.urls import absolute, file_system, is_url, require_no_password

try:
    import google_crc32c
except ImportError:
    google_crc32c = None  # type: ignore[assignment]  # which `open_index` refuses

_FORMAT = b"distloop records 1"
_NUM_THREADS = 8
HEADER_BYTES, FOOTER_BYTES = 12, 4
_MASK_DELTA = 0xA282EAD8
_BLOCK_BYTES = 1 << 22  # that a request for headers behind a URL gets
_MANY_BYTES = 1 << 30  # of which a line is printed
# What uncompresses a file, by its first bytes: of gzip (RFC 1952), and of zlib's four levels (RFC 1950).
_PROGRAMS = {
    b"\x1f\x8b": "gunzip -c",
    **dict.fromkeys((b"x\x01", b"x^", b"x\x9c", b"x\xda"), "zlib-flate -uncompress <"),
}
MAX_OPEN_FILES = 128  # of one `Files`; a process may usually have 1024

FileNames: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class Files:
    """Files on a disk, read by `pread`, or behind URLs, read through fsspec, which requests several ranges at once.

    Several threads may read them; files on a disk that were used last stay open.

    Attributes:
        paths: paths, or URLs of one file system.
    """

    def __init__(self, paths: Sequence[str]):
        """Opens no file.

        Raises:
            ValueError: if only some are URLs, or the package for their file system is not installed.
        """
        if len({path.partition("://")[0] if is_url(path) else "" for path in paths}) > 1:
            raise ValueError("Files of several file systems were given; give those of one, or copy them to one.")
        self.paths = paths
        self._system = file_system(paths[0]) if is_url(paths[0]) else None
        self._opened = functools.lru_cache(MAX_OPEN_FILES)(_OpenFile)

    def __reduce__(self) -> tuple[Any, ...]:
        return Files, (self.paths,)

    def stat(self, file: int) -> tuple[int, str]:
        """Returns the size of a file in bytes, and a text that is another one once the file has been written again."""
        path = self.paths[file]
        if self._system is not None:
            return int(self._system.size(path)), self._system.ukey(path)
        status = os.stat(path)
        return status.st_size, str(status.st_mtime_ns)

    def open(self, file: int) -> Any:
        """Returns a file, open to be read from its beginning on."""
        if self._system is not None:
            return self._system.open(self.paths[file], "rb", block_size=_BLOCK_BYTES)
        return open(self.paths[file], "rb")

    def read(self, ranges: Sequence[tuple[int, int, int]]) -> Iterable[bytes]:
        """Returns the bytes of ranges, each the number of a file, its begin and its end; fewer where a file ends."""
        if self._system is None:
            return (self._opened(self.paths[file]).read_range(begin, end) for file, begin, end in ranges)
        files, begins, ends = map(list, zip(*ranges, strict=True))
        return self._system.cat_ranges([self.paths[file] for file in files], begins, ends, on_error="raise")


class _OpenFile(io.FileIO):
    """A file that is closed when the last thread that reads it has let go of it."""

    def __del__(self) -> None:
        self.close()

    def read_range(self, begin: int, end: int) -> bytes:
        return os.pread(self.fileno(), end - begin, begin)


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


# The shards, and the byte at which each record begins, and for each shard the end of its last one, shard after shard:
# int64 [records + shards].
Index: TypeAlias = tuple[tuple[Shard, ...], np.ndarray]


def open_index(files: Files, directory: str = "") -> Index:
    """Returns the index of shards; reads it, or makes it where there is none. Shards that are newer are scanned again.

    Args:
        files: the shards.
        directory: of the index, a path or a URL; empty: that of the first shard.

    Raises:
        ValueError: if a shard is compressed, no TFRecord, or holds other records than when the index was made; or if
            google-crc32c is not installed.
        OSError: if a shard cannot be read.
    """
    if google_crc32c is None:
        raise ValueError("TFRecord files need google-crc32c: pip install google-crc32c.")
    path = index_path(files.paths, directory)
    stored = _load(path, files.paths)
    scans: list[Any] = [None] * len(files.paths)
    if stored is not None:
        ends = np.cumsum([shard.num_records + 1 for shard in stored[0]])
        scans = list(zip(stored[0], np.split(stored[1], ends[:-1]), strict=True))
    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
        stats = list(pool.map(files.stat, range(len(scans))))
        newer = [i for i, scan in enumerate(scans) if scan is None or scan[0][1:3] != stats[i]]
        if stored is not None and not newer:
            return stored
        if (num_bytes := sum(stats[i][0] for i in newer)) > _MANY_BYTES:
            say(f"Reading the headers of {len(newer)} shards, {num_bytes / 1e9:.1f} GB, once.")
        for i, scan in zip(newer, pool.map(lambda i: scan_shard(files, i, stats[i]), newer), strict=True):
            before, now = scans[i] and scans[i][0], scan[0]
            if before is not None and before.digest != now.digest and not before.damage:
                raise ValueError(
                    f"The shard {now.path!r} has changed: its index was made of {before.num_records} records in "
                    f"{before.num_bytes} bytes, and it has {now.num_records} other ones in {now.num_bytes} bytes; to "
                    f"go on with a run, put the old file back; to use the new one, delete {path!r}."
                )
            scans[i] = scan
    shards, positions = zip(*scans, strict=True)
    index = shards, np.concatenate(positions)
    _store(path, *index)
    return index


def index_path(paths: Sequence[str], directory: str = "") -> str:
    """Returns where the index of some shards is kept; that of another list has another name."""
    beside = os.path.dirname(paths[0] if is_url(paths[0]) else os.path.abspath(paths[0]))
    directory = (directory or beside).rstrip("/")
    if is_url(directory) or is_url(paths[0]):
        names = [path.removeprefix(f"{directory}/") for path in paths]
    else:
        names = [os.path.relpath(path, directory) for path in paths]
    key = hashlib.blake2b("\n".join(names).encode(), digest_size=6).hexdigest()
    return f"{directory}/.records-{key}.index"  # hidden, so that no pattern for shards matches it


def _load(path: str, paths: Sequence[str]) -> Index | None:
    """Returns the index in a file; None if there is none, or, with a warning, if it cannot be used."""
    try:
        data = file_system(path).cat_file(path) if is_url(path) else pathlib.Path(path).read_bytes()
        mark, _, rest = data.partition(b"\n")
        if mark != _mark_of(rest):
            raise ValueError("it is damaged")
        head, _, positions = rest.partition(b"\n")
        shards = tuple(Shard(path, *row) for path, row in zip(paths, json.loads(head), strict=True))
        return shards, np.frombuffer(positions, "<i8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("The index %r cannot be read (%s): the headers of the shards are read again.", path, error)
        return None


def _store(path: str, shards: Sequence[Shard], positions: np.ndarray) -> None:
    """Writes an index atomically; warns if that is not possible."""
    rest = b"%s\n%s" % (json.dumps([shard[1:] for shard in shards]).encode(), positions.astype("<i8").tobytes())
    data = b"%s\n%s" % (_mark_of(rest), rest)
    try:
        if is_url(path):
            file_system(path).pipe_file(path, data)  # object stores show a file when it is complete
            return
        make_directory(os.path.dirname(path))
        with replacing(path) as temporary:
            pathlib.Path(temporary).write_bytes(data)
    except OSError as error:
        if is_url(path) or not isinstance(error, FileNotFoundError):  # which another host causes that writes it, too
            log.warning(
                "The index %r cannot be written (%s), so each start reads the headers of the shards again: name a "
                "directory for it by open_records(..., index_dir=...).",
                *(path, error),
            )


def _mark_of(rest: bytes) -> bytes:
    """Returns the first line of an index, with a checksum of the rest."""
    return b"%s %08x" % (_FORMAT, zlib.crc32(rest, zlib.crc32(b"\n")))


def is_intact(data: bytes, checksum: bytes) -> bool:
    """Returns whether bytes fit their masked CRC-32C."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF == int.from_bytes(checksum, "little")


def scan_shard(files: Files, number: int, stat: tuple[int, str]) -> tuple[Shard, np.ndarray]:
    """Returns a shard, and where its records begin and the last one ends, int64 `[num_records + 1]`.

    Args:
        files: all shards.
        number: of the shard.
        stat: its size in bytes and stamp.

    Raises:
        ValueError: if it is compressed, or no TFRecord.
        OSError: if it cannot be read.
    """
    path, digest, num_bytes = files.paths[number], hashlib.blake2b(digest_size=8), stat[0]
    if not num_bytes:  # of which object stores refuse to send a range
        return Shard(path, *stat, 0, digest.hexdigest(), "it is empty"), np.zeros(1, np.int64)
    positions, damage, footer = array.array("q", [0]), "", bytes(FOOTER_BYTES)
    with files.open(number) as file:
        while not damage and (begin := positions[-1]) < num_bytes:
            header = file.read(HEADER_BYTES)
            following = begin + HEADER_BYTES + int.from_bytes(header[:8], "little") + FOOTER_BYTES
            if begin + HEADER_BYTES > num_bytes:
                damage = "is cut off"
            elif not is_intact(header[:8], header[8:]):
                digest.update(footer)
                damage = "has a corrupt length"
            else:
                digest.update(footer + header)
                damage = "is cut off" if following > num_bytes else ""
            if not damage:
                file.seek(following - FOOTER_BYTES)
                footer = file.read(FOOTER_BYTES)
                positions.append(following)
    if not damage:
        digest.update(footer)
    elif not begin and (program := _PROGRAMS.get(header[:2])):
        raise ValueError(
            f"The shard {path!r} is compressed, so its records cannot be read one by one: write it without "
            f"compression, such as by: {program} {shlex.quote(path)} > FILE."
        )
    elif not begin:
        raise ValueError(
            f"The file {path!r} does not begin with a TFRecord: give files that TFRecordWriter has written."
        )
    num_records = len(positions) - 1
    damage = damage and f"record {num_records}, at byte {begin}, {damage}"
    return Shard(path, *stat, num_records, digest.hexdigest(), damage), np.array(positions, np.int64)


def expand(files: FileNames) -> list[str]:
    """Returns the paths of the files that are meant.

    Args:
        files: a path, a pattern such as `train-*.tfrecord`, or several of them; URLs of fsspec, too.

    Returns:
        The paths in the order given; those of a pattern in alphabetical order, without directories and hidden files.

    Raises:
        ValueError: if nothing matches, or a directory is given.
    """
    names = [files] if isinstance(files, str | os.PathLike) else list(files)
    if not names:
        raise ValueError("An empty list of files was given; give a path or a pattern, such as 'data/train-*.tfrecord'.")
    return [path for name in names for path in _matches(os.fspath(name))]


def _matches(name: str) -> list[str]:
    """Returns the files that one path or pattern means."""
    if is_url(name):
        require_no_password(name)
        system = file_system(name)
        exists, is_directory = system.exists(name), system.isdir(name)
        infos = {} if exists else system.glob(name, detail=True)
        paths = [system.unstrip_protocol(path) for path, info in infos.items() if info["type"] == "file"]
    else:
        name = absolute(os.path.expanduser(name))
        exists, is_directory = os.path.exists(name), os.path.isdir(name)
        paths = [] if exists else [path for path in glob.glob(name, recursive=True) if not os.path.isdir(path)]
    if is_directory:
        raise ValueError(
            f"The directory {name!r} was given; name its files by a pattern, such as {name.rstrip('/') + '/*'!r}."
        )
    paths = [name] if exists else sorted(path for path in paths if not path.rpartition("/")[2].startswith("."))
    if not paths:
        raise ValueError(f"No file matches {name!r}: correct the path or the pattern.")
    return paths
