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

import contextlib
import hashlib
import json
import threading
import time

from distloop.bucket.directory import RemoteDirectory, RemoteError
from distloop.monitoring.console import say
from distloop.monitoring.run_lock import Holder, LockLost, LockView, held, is_alive, parse, this_process

FILE = "run.lock"
BEAT_SECS = 10.0
LEASE_SECS = 60.0
_POLL_SECS = 2.0
_SETTLE_SECS = 2.0  # in which processes that write over a lease at once have all done so


class Lease:
    """The lease of a directory behind a URL, taken once; the process that holds it writes there."""

    def __init__(self, directory: RemoteDirectory):
        """Sends no request."""
        self._directory = directory
        name = hashlib.sha256(directory.url.encode()).hexdigest()
        self._holder = this_process()._replace(place=name)
        self._beats = 0
        self._lost = ""  # why the lease is another process's; empty: it is not
        self._beating = threading.Thread(target=self._beat, name="distloop-lease", daemon=True)
        self._released = threading.Event()

    def take(self) -> None:
        """Takes the lease; waits while it is not known whether the process that has it is alive.

        Raises:
            ValueError: if another process has it.
            RemoteError: if the directory cannot be written.
        """
        held.add(self._holder.token)
        with contextlib.ExitStack() as stack:
            stack.callback(held.discard, self._holder.token)  # after an error this process may try again
            self._acquire()
            stack.pop_all()
        self._beating.start()

    def _acquire(self) -> None:
        first: LockView | None = None
        content = None
        while not self._directory.create(FILE, self._content()):
            if (there := self._directory.read(FILE)) is None:
                continue  # it was released at this moment
            if there != content:
                content, since = there, time.monotonic()
            view = LockView(self._holder_in(there), since, time.monotonic())
            holder = view.holder or "another process"
            is_first, first = first is None, first or view
            lives = is_alive(self._holder, first, view, LEASE_SECS)
            if lives:
                raise ValueError(
                    f"workdir={self._directory.url!r} is being written to by {holder}: wait until that run has ended, "
                    "end it, or give another workdir."
                )
            if lives is None:
                if is_first:
                    say(
                        f"workdir={self._directory.url!r} is locked by {holder}; if there is no sign of life for "
                        f"{LEASE_SECS:g} seconds, this run goes on."
                    )
                time.sleep(_POLL_SECS)
            else:
                self._directory.write(FILE, self._content())
                time.sleep(_SETTLE_SECS)
                if self._is_own(self._directory.read(FILE)):
                    return

    def verify(self) -> None:
        """Checks, without a request, that the lease was still this process's when it was read last.

        Raises:
            LockLost: if it was not.
        """
        if self._lost:
            raise LockLost(self._lost)

    def check(self) -> None:
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
        held.discard(self._holder.token)
        if self._is_own(self._directory.read(FILE)):
            self._directory.delete(FILE)

    def _content(self) -> bytes:
        return json.dumps({**self._holder._asdict(), "beats": self._beats}).encode()

    def _holder_in(self, content: bytes) -> Holder | None:
        """Returns who holds a lease; None: it was copied with its directory, and may be nobody's."""
        holder = parse(content)
        return holder if holder and holder.place in ("", self._holder.place) else None

    def _is_own(self, content: bytes | None) -> bool:
        return content is not None and parse(content) == self._holder

    def _beat(self) -> None:
        """Shows that this process lives until the lease is released or lost."""
        while not self._released.wait(BEAT_SECS) and not self._lost:
            with contextlib.suppress(RemoteError, LockLost):  # the upload says that the directory does not answer
                self.check()
                self._beats += 1
                if not self._released.is_set():
                    self._directory.write(FILE, self._content())
