"""Workdir in a bucket: locks the workdir, brings its files to this machine, and uploads new files.

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
import itertools
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator

from distloop.atomic_files import is_private, replacing
from distloop.bucket import tree
from distloop.bucket.directory import RemoteDirectory, RemoteError
from distloop.bucket.lease import Lease
from distloop.bucket.upload import Upload, listed
from distloop.distributed.workers import Workers
from distloop.log import log
from distloop.monitoring.console import say
from distloop.monitoring.directory import Directory
from distloop.settings.config import Config

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
        self._upload: Upload | None = None
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
                if self._upload is not None:
                    self._close(error)
                raise
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Waits until all is uploaded, and unlocks the workdir.

        Raises:
            OSError: if something could not be uploaded, unless another error ends the block.
        """
        self._depth -= 1
        if self._depth == 0 and self._upload is not None:
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
        self._agree(lambda: answers.append(_is_current(self._root, RemoteDirectory(self._url))))
        return all(self._workers.gather(answers[0]))

    def _share(self, steps: set[int] | None) -> None:
        """Brings checkpoints to the hosts that lack them; None: the best ones."""
        if self._depth == 0 or self._workers.count == 1:
            return
        if not any(self._workers.gather(self._fetches)):
            return
        upload = self._upload
        self._agree((lambda: upload.wait_for(steps)) if upload is not None else None)

        def fetch() -> None:
            tree.fetch_checkpoints(RemoteDirectory(self._url), self._root, steps)
            tree.note_fetched(self._root)

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
            self._upload = Upload(self._root, directory, verify=lease.look, keep=self._keep, is_quiet=self._is_quiet)
        except BaseException:
            with contextlib.suppress(RemoteError):
                lease.release()
            raise
        self._lease = lease
        self._upload.start()

    def _update(self, directory: RemoteDirectory) -> None:
        """Makes the staging directory what the bucket is, unless the run goes on from it."""
        if not _is_current(self._root, directory):
            if os.path.isdir(self._root):
                say(f"{self._root} is replaced by what is in {self._url}, which was written to from elsewhere since.")
            fetched = _replace(self._root, directory)
            if fetched and not self._is_quiet:
                say(f"{len(fetched)} files were brought from {self._url} to {self._root}")
        with open(os.path.join(self._root, _CHIEF), "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(16))

    def _share_all(self) -> None:
        """Brings the checkpoints to the hosts that do not see the chief's disk. All workers call it."""
        if self._workers.count == 1:
            return
        token = self._workers.broadcast(tree.read(self._root, _CHIEF).decode() if self._workers.is_chief else None)
        places = self._workers.gather([socket.gethostname(), os.path.abspath(self._root)])
        is_first = places.index(places[self._workers.index]) == self._workers.index
        self._fetches = is_first and tree.read(self._root, _CHIEF).decode(errors="replace") != token
        if not any(self._workers.gather(self._fetches)):
            return
        upload = self._upload
        newest = {unit.step for unit in tree.checkpoints(self._root)[:1]}
        self._agree((lambda: upload.wait_for(newest)) if upload is not None else None)
        fetch = functools.partial(_replace, self._root, RemoteDirectory(self._url))
        self._agree(fetch if self._fetches else None)

    def _close(self, error: BaseException | None) -> None:
        assert self._upload is not None and self._lease is not None
        upload, self._upload = self._upload, None
        lease, self._lease = self._lease, None
        try:
            missing = upload.finish()
        finally:
            with contextlib.suppress(RemoteError):
                lease.release()
        if not missing:
            if not self._is_quiet:
                say(f"all is in {self._url}")
            return
        text = (
            f"{listed(missing)} could not be uploaded to {self._url} ({upload.failure}); {self._root} has it: run the "
            "same command on this machine to upload it."
        )
        if error is None:
            raise OSError(text)
        log.error("%s", text)


def _is_current(root: str, directory: RemoteDirectory) -> bool:
    """Returns whether a run goes on from a directory of this machine; else from what the bucket has.

    Args:
        root: the directory; may be missing.
        directory: of the run.

    Raises:
        ValueError: if others may write to it, or the bucket has nothing of what was uploaded from there.
        RemoteError: if the bucket cannot be read.
    """
    if os.path.isdir(root) and not is_private(root):
        raise ValueError(
            f"{root!r}, which stands for {directory.url!r} on this machine, belongs to another user, or others may "
            "write to it: remove it, or give XDG_CACHE_HOME a directory of your own."
        )
    steps = [unit.step for unit in tree.checkpoints(root)]
    if not steps and not os.path.exists(os.path.join(root, tree.STATE)):
        return False
    manifests = tree.read_state(root).manifests
    for _, _, manifest in tree.whole_checkpoints(directory, directory.list()):  # the newest
        return bool(steps) and tree.digest(manifest) in {*manifests, *tree.digests(root)}
    if steps and manifests:
        raise ValueError(
            f"workdir={directory.url!r} holds no whole checkpoint, but some were uploaded there from this machine, "
            f"where {root!r} has the run up to step {steps[0]}: check that the share is mounted, and that endpoint, "
            f"profile and name are those of the run. To upload it anew, delete {os.path.join(root, tree.STATE)!r}; to "
            "begin anew, the whole directory."
        )
    return True


def _replace(root: str, directory: RemoteDirectory) -> list[str]:
    """Replaces a directory of this machine by what the bucket has; keeps it aside if the bucket lacks some of it.

    Returns:
        The paths of the files that came.
    """
    uploaded, units = tree.read_state(root).uploaded, tree.checkpoints(root)
    newest = next(tree.whole_checkpoints(directory, directory.list()), (-1,))[0] if units else -1
    if late := [u.step for u in units if uploaded.get(u.path) != tree.as_stamps(u) or u.step > newest]:
        names = itertools.chain([f"{root}.aside"], (f"{root}.aside-{i}" for i in itertools.count(2)))
        os.rename(root, aside := next(name for name in names if not os.path.lexists(name)))
        say(f"{aside} keeps steps {', '.join(map(str, late))}, which the bucket did not get before it was written to.")
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(os.path.dirname(root), exist_ok=True)
    with replacing(root) as temporary:
        os.mkdir(temporary, 0o700)
        paths = tree.fetch_workdir(directory, temporary)
        tree.note_fetched(temporary, paths)
    return paths
