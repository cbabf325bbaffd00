"""The workdir of a run at a URL: it is locked, brought to this machine, and uploaded.

    workdir = Workdir(config, Workers(strategy))
    with workdir:                       # on every worker
        train()                         # in config.local_workdir, as in any directory
    # what was saved is at the URL; OSError if the last checkpoint could not be uploaded

The staging directory of this machine goes on if the newest checkpoint of the bucket is one of its own; else another
machine has gone on, and it is replaced by what the bucket has. So a run goes on from its newest checkpoint, wherever
it runs.
"""

import contextlib
import functools
import os
import secrets
import socket
from collections.abc import Callable, Iterator

from distloop.bucket import staging, tree
from distloop.bucket.directory import RemoteDirectory, RemoteError
from distloop.bucket.fetching import fetch_checkpoints
from distloop.bucket.lease import Lease
from distloop.bucket.mirror import Mirror, listed
from distloop.config import Config
from distloop.distributed.workers import Workers
from distloop.log import log
from distloop.monitoring.console import say
from distloop.monitoring.directory import Directory

_CHIEF = ".chief"  # a text that the chief writes at each start: who reads it sees the chief's disk


class Workdir(Directory):
    """Where a run keeps its files; may be entered several times, one inside the other."""

    def __init__(self, config: Config, workers: Workers):
        """Sends no request.

        Args:
            config: `workdir` and `keep_checkpoints` are read.
            workers: of the run.
        """
        self._url = config.workdir
        self._root, self._keep = config.local_workdir, config.keep_checkpoints
        self._is_quiet = config.console == "quiet"
        self._workers = workers
        self._depth = 0
        self._lease: Lease | None = None  # the chief's
        self._mirror: Mirror | None = None
        self._fetches = False  # whether this worker brings files for those of its host that do not see the chief's disk

    def __enter__(self) -> None:
        """Locks the workdir, brings what a run goes on from, and starts to upload. All workers call it.

        Raises:
            ValueError: if another process writes to it, or it cannot be read or written.
        """
        if self._depth == 0:
            try:
                self._agree(self._open if self._workers.is_chief else None)
                self._share_all()
            except BaseException as error:
                if self._mirror is not None:
                    self._close(error)
                raise
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Waits until all is uploaded, and unlocks the workdir.

        Raises:
            OSError: if something could not be uploaded, unless another error ends the block.
        """
        self._depth -= 1
        if self._depth == 0 and self._mirror is not None:
            self._close(error)

    def verify(self) -> None:
        """Checks, without a request, that no other process has taken the workdir over.

        Raises:
            LockLost: if one has.
        """
        if self._lease is not None:
            self._lease.verify()

    @contextlib.contextmanager
    def reading(self, path: str, *, best: bool = False) -> Iterator[str]:
        """Yields a local path with what is at a path or URL, as `local_copy`; of a run in progress its own files.

        All workers call it.

        Raises:
            ValueError: if it cannot be read.
        """
        if path.rstrip("/") == self._url.rstrip("/") and (self._depth or self._is_current()):
            if best:
                self._share(None)
            yield self._root
            return
        with super().reading(path, best=best) as local:
            yield local

    def share(self, step: int) -> None:
        """Brings a checkpoint that the chief has chosen to the hosts that lack it. All workers call it.

        Raises:
            ValueError: if it does not get there.
        """
        self._share({step})

    def _is_current(self) -> bool:
        """Returns whether all workers have a staging directory that the run goes on from. All workers call it."""
        answers: list[bool] = []
        self._agree(lambda: answers.append(staging.is_current(self._root, RemoteDirectory(self._url))))
        return all(self._workers.gather(answers[0]))

    def _share(self, steps: set[int] | None) -> None:
        """Brings checkpoints to the hosts that lack them; None: the best ones."""
        if self._depth == 0 or self._workers.count == 1:
            return
        if not any(self._workers.gather(self._fetches)):
            return
        mirror = self._mirror
        self._agree((lambda: mirror.wait_for(steps)) if mirror is not None else None)

        def fetch() -> None:
            fetch_checkpoints(RemoteDirectory(self._url), self._root, steps)
            staging.note_fetched(self._root)

        self._agree(fetch if self._fetches else None)

    def _agree(self, act: Callable[[], object] | None) -> None:
        """Does what this worker has to do; if that fails on any worker, all raise."""
        failure: ValueError | None = None
        try:
            if act is not None:
                act()
        except ValueError as error:
            failure = error
        except OSError as error:
            failure = ValueError(
                f"workdir={self._url!r} cannot be used ({error}): give a bucket that is there, and credentials in the "
                "way of its package, or a directory on a disk."
            )
            failure.__cause__ = error
        if any(self._workers.gather(failure is not None)):
            raise failure or ValueError(f"workdir={self._url!r} cannot be used; another worker says why.")

    def _open(self) -> None:
        """Takes the lease, brings the files, and starts the upload; on the chief."""
        directory = RemoteDirectory(self._url)
        lease = Lease(directory)
        lease.take()
        try:
            directory.remove_leftovers()
            self._update(directory)
            self._mirror = Mirror(self._root, directory, verify=lease.look, keep=self._keep, is_quiet=self._is_quiet)
        except BaseException:
            with contextlib.suppress(RemoteError):
                lease.release()
            raise
        self._lease = lease
        self._mirror.start()

    def _update(self, directory: RemoteDirectory) -> None:
        """Makes the staging directory what the bucket is, unless the run goes on from it."""
        if not staging.is_current(self._root, directory):
            if os.path.isdir(self._root):
                say(f"{self._root} is replaced by what is in {self._url}, which was written to from elsewhere since.")
            fetched = staging.replace(self._root, directory)
            if fetched and not self._is_quiet:
                say(f"{len(fetched)} files were brought from {self._url} to {self._root}")
        with open(os.path.join(self._root, _CHIEF), "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(16))

    def _share_all(self) -> None:
        """Brings the checkpoints to the hosts that do not see the chief's disk. All workers call it."""
        if self._workers.count == 1:
            return
        token = self._workers.broadcast(staging.read(self._root, _CHIEF).decode() if self._workers.is_chief else None)
        places = self._workers.gather([socket.gethostname(), os.path.abspath(self._root)])
        is_first = places.index(places[self._workers.index]) == self._workers.index
        self._fetches = is_first and staging.read(self._root, _CHIEF).decode(errors="replace") != token
        if not any(self._workers.gather(self._fetches)):
            return
        mirror = self._mirror
        newest = {unit.step for unit in tree.checkpoints(self._root)[:1]}
        self._agree((lambda: mirror.wait_for(newest)) if mirror is not None else None)
        fetch = functools.partial(staging.replace, self._root, RemoteDirectory(self._url))
        self._agree(fetch if self._fetches else None)

    def _close(self, error: BaseException | None) -> None:
        assert self._mirror is not None and self._lease is not None
        mirror, self._mirror = self._mirror, None
        lease, self._lease = self._lease, None
        try:
            missing = mirror.finish()
        finally:
            with contextlib.suppress(RemoteError):
                lease.release()
        if not missing:
            if not self._is_quiet:
                say(f"all is in {self._url}")
            return
        text = (
            f"{listed(missing)} could not be uploaded to {self._url} ({mirror.failure}); {self._root} has it: run the "
            "same command on this machine to upload it."
        )
        if error is None:
            raise OSError(text)
        log.error("%s", text)
