"""Array records: ArrayRecord files as a source whose rows are read by their number, through the package array_record.

    records = ArrayRecords(["data/train-00000-of-00002.array_record", "data/train-00001-of-00002.array_record"])

Such files hold their own index, and the package checks the data when it reads it.
"""

import hashlib
import operator
import os
from collections.abc import Sequence

_INDEX_BYTES = 1 << 16  # the end of a file, which holds sizes and places of its records


class ArrayRecords:
    """The records of ArrayRecord files by number; may be read from several threads at once, and pickled.

    Attributes:
        fingerprint: a digest of the files' sizes and ends, where their indices are.
    """

    def __init__(self, paths: Sequence[str]):
        """Opens the files.

        Raises:
            ValueError: if the package is not installed, or a file cannot be read or holds no records.
        """
        try:
            from array_record.python.array_record_data_source import ArrayRecordDataSource
        except ImportError:
            raise ValueError(f"The file {paths[0]!r} needs array_record: pip install array_record.") from None
        digest = hashlib.blake2b(digest_size=8)
        for path in paths:
            try:
                num_records = len(ArrayRecordDataSource([path]))
                with open(path, "rb") as file:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(max(size - _INDEX_BYTES, 0))
                    digest.update(b"%d %b" % (size, file.read()))
            except (RuntimeError, OSError) as error:
                raise ValueError(
                    f"The file {path!r} cannot be read as ArrayRecord ({error}): write it again."
                ) from error
            if not num_records:
                raise ValueError(f"The file {path!r} holds no records: leave it out, or write it again.")
        self._source = ArrayRecordDataSource(list(paths))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        """Returns the number of records."""
        return len(self._source)

    def __repr__(self) -> str:
        return f"ArrayRecords({len(self)}, {self.fingerprint})"

    def __getitem__(self, number: int) -> bytes:
        """Returns the data of a record; raises an IndexError if there is no such record."""
        return self.__getitems__([operator.index(number)])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[bytes]:
        """Returns the data of records.

        Args:
            numbers: of the records, in any order; -1 is the last one.

        Raises:
            IndexError: if there is no such record.
        """
        rows = [number + len(self) if number < 0 else number for number in map(int, numbers)]
        if not all(0 <= row < len(self) for row in rows):
            raise IndexError(f"Of {len(self)} records, counted from 0, one was asked for that does not exist.")
        return list(self._source.__getitems__(rows)) if rows else []

    def describe_change(self, fingerprint: str) -> str:
        """Returns how these records differ from those of a fingerprint, as a part of a sentence; empty: they do not."""
        return "" if fingerprint == self.fingerprint else "the records of a file have changed"
