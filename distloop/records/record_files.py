"""TFRecord shards and ArrayRecord files as sources whose records are read by number.

    records = open_records("data/train-*.tfrecord")
    len(records), records[4]                        # 50000, b"..."
    records.__getitems__([7, 3])                    # many at once

It knows neither batches nor their order, and does not parse records.
"""

import hashlib
import itertools
import operator
import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from distloop.log import log
from distloop.records.record_index import (
    FOOTER_BYTES,
    HEADER_BYTES,
    FileNames,
    Files,
    Index,
    expand,
    is_intact,
    open_index,
)

_READ_BYTES = 1 << 22  # neighbours are read at once, about so many bytes of them
_MAX_NAMED = 32  # shards of which a fingerprint holds a digest each
_DIGITS = 4  # of each
_MAX_LISTED = 3  # in a sentence
_INDEX_BYTES = 1 << 16  # the end of an ArrayRecord file, which holds sizes and positions of its records


class Records:
    """The records of TFRecord shards by number; may be read from several threads at once, and pickled.

    Attributes:
        shards: the files in the order of their records, with their sizes and digests.
        fingerprint: a text of at most 150 characters, the same for the same records in the same order.
    """

    def __init__(self, files: Files, index: Index, skips: bool):
        self.shards, self._positions = index
        self._files, self._skips = files, skips
        self._firsts = [0, *itertools.accumulate(shard.num_records for shard in self.shards)]  # by shard, and the end
        self._corrupt: set[int] = set()
        self._has_warned: set[int] = set()  # shards
        digest = hashlib.blake2b("".join(shard.digest for shard in self.shards).encode(), digest_size=8).hexdigest()
        digests = "".join(shard.digest[:_DIGITS] for shard in self.shards) if len(self.shards) <= _MAX_NAMED else ""
        self.fingerprint = f"{digest}:{len(self.shards)}:{digests}"

    def __len__(self) -> int:
        return self._firsts[-1]

    @property
    def num_skipped(self) -> int:
        """Corrupt records that others have replaced so far, each counted once."""
        return len(self._corrupt)

    def __getitem__(self, number: int) -> bytes:
        """Returns the data of a record; the errors are those of `__getitems__`."""
        return self.__getitems__([operator.index(number)])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[bytes]:
        """Returns the data of records; neighbours are read at once.

        Args:
            numbers: of the records, in any order; -1 is the last one.

        Raises:
            IndexError: if there is no such record.
            ValueError: if one is corrupt.
            OSError: if a file cannot be read.
        """
        wanted = np.asarray(numbers, np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if not ((wanted >= 0) & (wanted < len(self))).all():
            raise IndexError(f"A record was asked for that does not exist: there are {len(self)}, counted from 0.")
        if not wanted.size:
            return []
        shards = np.searchsorted(self._firsts, wanted, "right") - 1
        begins, ends = self._positions[wanted + shards], self._positions[wanted + shards + 1]
        # A read ends where the next record is no neighbour, or after some megabytes.
        is_apart = (begins[1:] != ends[:-1]) | (np.diff(shards) != 0) | (np.diff(begins // _READ_BYTES) != 0)
        cuts = [0, *(np.flatnonzero(is_apart) + 1).tolist(), len(wanted)]
        spans = list(zip(shards.tolist(), begins.tolist(), ends.tolist(), strict=True))
        blocks = self._files.read([(*spans[a][:2], spans[b - 1][2]) for a, b in itertools.pairwise(cuts)])
        records = []
        for block, (first, end) in zip(blocks, itertools.pairwise(cuts), strict=True):
            origin = spans[first][1]
            for number, (shard, begin, stop) in zip(wanted[first:end].tolist(), spans[first:end], strict=True):
                data = _data_of(block[begin - origin : stop - origin])
                records.append(self._replacement_of(number, shard, begin) if data is None else data)
        return records

    def describe_change(self, fingerprint: str) -> str:
        """Returns how these records differ from those of a fingerprint, as a part of a sentence; empty: they do not.

        Args:
            fingerprint: that of other `Records`, or of the same ones in an earlier process.
        """
        if fingerprint == self.fingerprint:
            return ""
        (total, num_now, now), given = self.fingerprint.split(":"), fingerprint.split(":")
        if len(given) != 3 or len(given[0]) != len(total):
            return "the source is another one"
        _, num_then, then = given
        if num_then != num_now:
            return f"there were {num_then} files, and there are {num_now}"
        digests = [[text[i : i + _DIGITS] for i in range(0, len(text), _DIGITS)] for text in (then, now)]
        if sorted(digests[0]) == sorted(digests[1]) and then != now:
            return "the files are the same in another order"
        names = [repr(s.path) for s, old, new in zip(self.shards, *digests, strict=False) if old != new]
        more = f" and {len(names) - _MAX_LISTED} more files" if len(names) > _MAX_LISTED else ""
        return f"the records of {', '.join(names[:_MAX_LISTED]) or 'a file'}{more} have changed"

    def _replacement_of(self, number: int, shard: int, begin: int) -> bytes:
        """Returns the data of the next intact record of a shard in place of a corrupt one, which is counted.

        Raises:
            ValueError: if corrupt records are not to be skipped, or the shard has no other ones.
        """
        path, first, end = self.shards[shard].path, *self._firsts[shard : shard + 2]
        damage = f"Record {number - first} of {path!r}, at byte {begin}, is corrupt: its data does not fit its checksum"
        if not self._skips:
            raise ValueError(f"{damage}; write or copy the file again, or give open_records on_corrupt='skip'.")
        if shard not in self._has_warned:
            self._has_warned.add(shard)
            log.warning("%s; it is replaced by the next one, and so are all corrupt ones of this file.", damage)
        self._corrupt.add(number)
        for other in [*range(number + 1, end), *range(first, number)]:
            (record,) = self._files.read([(shard, *self._positions[other + shard : other + shard + 2].tolist())])
            if (data := _data_of(record)) is not None:
                return data
            self._corrupt.add(other)
        raise ValueError(f"All records of {path!r} are corrupt: write or copy the file again, or leave it out.")


def _data_of(record: bytes) -> bytes | None:
    """Returns the data of a record that was read whole; None if the data does not fit its checksum."""
    data = record[HEADER_BYTES:-FOOTER_BYTES]
    return data if is_intact(data, record[-FOOTER_BYTES:]) else None


def open_records(
    files: FileNames, *, index_dir: str | os.PathLike[str] = "", on_corrupt: Literal["raise", "skip"] = "raise"
) -> "Records | Any":
    """Returns the records of TFRecord or ArrayRecord files as a source for `make_dataset`: read by number, as bytes.

    The first call reads the headers of TFRecord files and keeps where each record begins, in a hidden file of 8 bytes a
    record. Later ones read that, and the headers of files whose size or time differs. ArrayRecord files hold an index
    of their own; theirs is the data source of the package array_record.

    Args:
        files: a path, a pattern such as `data/train-*.tfrecord`, or several of them; URLs such as "gs://..." take
            fsspec. The records of files are numbered in the order given, those of a pattern in alphabetical order.
        index_dir: where to keep the index, a path or a URL; empty: beside the first file.
        on_corrupt: "raise": an error names the file and the byte. "skip": the next intact record of the file takes the
            place of a corrupt one, so the others keep their numbers; what follows a corrupt length is left out. Both
            are reported once for each file.

    Raises:
        ValueError: if no file matches; if a file is empty, compressed, cut off, no TFRecord, or has other records than
            when the index was made.
        OSError: if a file cannot be read.
    """
    if on_corrupt not in ("raise", "skip"):
        raise ValueError(f'on_corrupt={on_corrupt!r} was given; it is "raise" or "skip".')
    paths = expand(files)
    are_arrays = [".array_record" in os.path.basename(path) for path in paths]
    if any(are_arrays):
        if not all(are_arrays):
            raise ValueError("ArrayRecord and TFRecord files were given; open those of each kind by themselves.")
        return _open_array_records(paths)
    opened = Files(paths)
    index = open_index(opened, os.path.expanduser(os.fspath(index_dir)))
    for shard in index[0]:
        if shard.damage and on_corrupt == "raise":
            raise ValueError(
                f"The shard {shard.path!r} is damaged: {shard.damage}; write or copy it again, or give open_records "
                "on_corrupt='skip' to leave out the rest of it."
            )
        if shard.damage:
            log.warning("The shard %r is damaged: %s; the rest of it is left out.", shard.path, shard.damage)
    records = Records(opened, index, skips=on_corrupt == "skip")
    if not len(records):
        raise ValueError(f"The files from {paths[0]!r} on hold no records: correct the path or the pattern.")
    return records


def _open_array_records(paths: Sequence[str]) -> Any:
    """Returns the data source of the package array_record over files, which hold their own index.

    It gets a fingerprint, a digest of the files' sizes and ends, where their indices are.

    Raises:
        ValueError: if the package is not installed, or a file cannot be read.
    """
    try:
        from array_record.python.array_record_data_source import ArrayRecordDataSource
    except ImportError:
        raise ValueError(f"The file {paths[0]!r} needs array_record: pip install array_record.") from None
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        try:
            ArrayRecordDataSource([path])
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - _INDEX_BYTES, 0))
                digest.update(b"%d %b" % (size, file.read()))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"The file {path!r} cannot be read as ArrayRecord ({error}): write it again.") from error
    source = ArrayRecordDataSource(list(paths))
    source.fingerprint = digest.hexdigest()
    return source
