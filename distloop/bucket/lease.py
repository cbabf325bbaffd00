"""Lease: one process at a time writes to a workdir in a bucket, whatever hosts the processes are on.

    lease = Lease(RemoteDirectory("s3://bucket/run"))
    lease.take()            # ValueError: ... is being written to by process 4711 on node-a, since ...
    lease.verify()          # LockLost, if another process has taken over
    lease.release()

The lease is the file `run.lock`, with the holder as `monitoring.run_lock` names it and a number that grows every
BEAT_SECS. It has ended when its process has, on the same host; when its launcher has started a later membership; or
when the number did not grow for LEASE_SECS, watched by the clock of whoever waits. Where a file system can refuse to
overwrite (`RemoteDirectory.create`), one of several processes gets a free lease. One that has ended is written over:
each who does so reads it again after a while, and the last one has it. One that was copied with its directory, as
`aws s3 cp --recursive` does, has another directory's digest: whatever process it names, only the number counts.
"""

import functools
import hashlib
import json
import threading
import time

from distloop.bucket.directory import RemoteDirectory, RemoteError
from distloop.monitoring.console import say
from distloop.monitoring.records import as_object, parse_json
from distloop.monitoring.run_lock import Holder, LockLost, LockView, held, is_alive, parse, this_process

FILE = "run.lock"
BEAT_SECS = 10.0
LEASE_SECS = 60.0
_POLL_SECS = 2.0
_SETTLE_SECS = 2.0  # in which processes that write over a lease at once have all done so


class Lease:
    """The lease of a directory behind a URL; the process that holds it writes there."""

    def __init__(self, directory: RemoteDirectory):
        """Sends no request."""
        self._directory = directory
        self._name = hashlib.sha256(directory.url.encode()).hexdigest()  # which may hold a password
        self._holder: Holder | None = None
        self._beats = 0
        self._lost = ""  # why the lease is another process's; empty: it is not
        self._beating = threading.Thread()
        self._released = threading.Event()

    def take(self) -> None:
        """Takes the lease; waits while it is not known whether the process that has it is alive.

        Raises:
            ValueError: if another process has it.
            RemoteError: if the directory cannot be written.
        """
        own = self._holder = this_process()
        self._beats, self._lost, self._released = 0, "", threading.Event()
        held.add(own.token)
        try:
            self._acquire(own)
        except BaseException:
            held.discard(own.token)
            raise
        beat = functools.partial(self._beat, self._released)
        self._beating = threading.Thread(target=beat, name="distloop-lease", daemon=True)
        self._beating.start()

    def _acquire(self, own: Holder) -> None:
        first: LockView | None = None
        content = None
        while not self._directory.create(FILE, self._content()):
            if (there := self._directory.read(FILE)) is None:
                continue  # it was released at this moment
            if there != content:
                content, since = there, time.monotonic()
            look = LockView(self._holder_in(there), since, time.monotonic())
            first = first or look
            lives = is_alive(own, first, look, LEASE_SECS)
            if lives:
                raise ValueError(
                    f"workdir={self._directory.url!r} is being written to by {look.holder or 'another process'}: wait "
                    "until that run has ended, end it, or give another workdir."
                )
            if lives is None:
                if look is first:
                    say(
                        f"workdir={self._directory.url!r} is locked by {look.holder or 'another process'}; if there "
                        f"is no sign of life for {LEASE_SECS:g} seconds, this run goes on."
                    )
                time.sleep(_POLL_SECS)
            else:
                self._directory.write(FILE, self._content())
                time.sleep(_SETTLE_SECS)
                if self._is_own(self._directory.read(FILE)):
                    return

    def verify(self) -> None:
        """Checks, without a request, that the lease was still this process's when it was last looked at.

        Raises:
            LockLost: if it was not.
        """
        if self._lost:
            raise LockLost(self._lost)

    def look(self) -> None:
        """Checks that the lease is this process's, and writes it again if somebody has removed it.

        Raises:
            LockLost: if it is another process's.
            RemoteError: if it cannot be read.
        """
        self.verify()
        there = self._directory.read(FILE)
        if there is None:
            self._directory.create(FILE, self._content())
        elif not self._is_own(there):
            self._lost = (
                f"workdir={self._directory.url!r} was taken over by {parse(there) or 'another process'}, as this one "
                f"gave no sign of life for {LEASE_SECS:g} seconds or more, or is of an older membership; it writes no "
                "more there: end one of the two."
            )
            self.verify()

    def release(self) -> None:
        """Gives the lease back, unless it is another process's.

        Raises:
            RemoteError: if the directory does not answer.
        """
        self._released.set()
        self._beating.join()
        assert self._holder is not None
        held.discard(self._holder.token)
        if self._is_own(self._directory.read(FILE)):
            self._directory.delete(FILE)

    def _content(self) -> bytes:
        assert self._holder is not None
        return json.dumps({**self._holder._asdict(), "beats": self._beats, "directory": self._name}).encode()

    def _holder_in(self, content: bytes) -> Holder | None:
        """Returns who holds a lease; None: it was copied with its directory, and may be nobody's."""
        try:
            is_copied = parse_json(content, as_object).get("directory", self._name) != self._name
        except ValueError:
            return None
        return None if is_copied else parse(content)

    def _is_own(self, content: bytes | None) -> bool:
        return content is not None and self._holder_in(content) == self._holder

    def _beat(self, released: threading.Event) -> None:
        """Shows that this process lives until the lease is released or lost."""
        while not released.wait(BEAT_SECS):
            try:
                self.look()
                self._beats += 1
                if not released.is_set():
                    self._directory.write(FILE, self._content())
            except LockLost:
                return
            except RemoteError:  # the upload says that the directory does not answer
                continue
