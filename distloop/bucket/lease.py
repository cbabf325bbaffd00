"""Lease: the lock of a workdir in a bucket, whatever hosts the processes are on.

    with RunLock(url, LeaseFile(RemoteDirectory(url))) as lease:    # ValueError: ... is being written to by process ...
        lease.verify()                                              # LockLost, if another process has taken over

The file `run.lock` has a number beside the holder, which grows as a sign of life. Where a file system can refuse to
overwrite (`RemoteDirectory.create`), one of several processes gets a free lease. One that was copied with its
directory, as `aws s3 cp --recursive` does, has another URL's digest: of whatever process, only the number counts.
"""

import hashlib
import json

from distloop.bucket.directory import RemoteDirectory
from distloop.monitoring.run_lock import FILE, Holder, LockFile, LockView, parse


class LeaseFile(LockFile):
    """The file of a lock in a bucket; each of its methods sends requests that may raise a `RemoteError`."""

    heartbeat_secs, stale_secs, poll_secs, settle_secs = 10.0, 60.0, 2.0, 2.0

    def __init__(self, directory: RemoteDirectory):
        """Sends no request."""
        super().__init__(FILE)
        self._directory = directory
        self._beats = 0

    def place(self) -> str:
        """Returns a digest of the URL."""
        return hashlib.sha256(self._directory.url.encode()).hexdigest()

    def read(self) -> LockView:
        """Returns what the file shows, without the holder if the file is a copy, and may be nobody's."""
        if (content := self._directory.read(FILE)) is None:
            raise FileNotFoundError(FILE)
        holder = parse(content)
        return LockView(holder if holder and holder.place in ("", self.place()) else None, content)

    def create(self, holder: Holder) -> bool:
        """Writes the file; returns False if there is one."""
        return self._directory.create(FILE, self._content(holder))

    def replace(self, holder: Holder) -> None:
        """Writes the file over another one."""
        self._directory.write(FILE, self._content(holder))

    def touch(self, holder: Holder) -> None:
        """Shows a sign of life."""
        self._beats += 1
        self.replace(holder)

    def remove(self) -> None:
        """Removes the file."""
        self._directory.delete(FILE)

    def _content(self, holder: Holder) -> bytes:
        return json.dumps({**holder._asdict(), "beats": self._beats}).encode()
