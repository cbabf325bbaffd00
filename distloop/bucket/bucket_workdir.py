"""Workdir in a bucket: locks the workdir, brings its files to this machine, and uploads new files.

    workdir = Workdir(config, Workers(strategy))
    with workdir:                       # on every worker
        train()                         # in config.local_workdir, as in any directory
    # what was saved is at the URL; OSError if the last checkpoint could not be uploaded

The staging directory of this machine goes on if the newest checkpoint of the bucket came to it or was uploaded from it;
else another machine has gone on, and it is replaced by what the bucket has. So a run goes on from its newest
checkpoint, wherever it runs.
"""

import contextlib
import functools
import os
import socket
from collections.abc import Iterator

from distloop.atomic_files import remove, replacing
from distloop.bucket import tree
from distloop.bucket.remote_directory import RemoteDirectory, RemoteError
from distloop.bucket.upload import Upload, listed
from distloop.distributed.collectives import Workers
from distloop.log import log, say, speaker
from distloop.settings.config import Config
from distloop.workdir.directory import Directory
from distloop.workdir.run_lock import LockLost, RunLock


class Workdir(Directory):
    """Where a run keeps its files."""

    def __init__(self, config: Config, workers: Workers):
        """Sends no request.

        Args:
            config: `workdir` and `console` are read.
            workers: of the run.
        """
        super().__init__(config, workers)
        self._say = speaker(workers.is_chief, config.console)
        self._open: tuple[RunLock, Upload] | None = None  # the chief's, of the last block

    def _begin(self, stack: contextlib.ExitStack) -> None:
        """Takes the lock, makes the staging directory what the run goes on from, and starts the upload."""
        directory = RemoteDirectory(self._url)
        lock = stack.enter_context(RunLock(self._url, directory=directory))
        directory.remove_leftovers()
        if not _is_current(self._root, directory):
            self._replace(directory)
        super()._begin(stack)
        self._open = lock, Upload(self._root, directory, verify=lock.verify, say=self._say)
        self._open[1].start()
        stack.push(self._finish)

    def _finish(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Waits until all is uploaded.

        Raises:
            OSError: if something could not be uploaded, unless another error ends the block.
        """
        assert self._open is not None
        upload = self._open[1]
        if missing := upload.finish():
            text = (
                f"{listed(missing)} could not be uploaded to {self._url} ({upload.failure}); {self._root} has it: run "
                "the same command on this machine to upload it."
            )
            if error is None:
                raise OSError(text)
            log.error("%s", text)
        else:
            self._say(f"all is in {self._url}")

    def verify(self) -> None:
        """Checks, without a request, that no other process has taken the workdir over.

        Raises:
            LockLost: if one has.
        """
        super().verify()
        if self._open is not None and self._open[0].lost:
            raise LockLost(self._open[0].lost)

    @contextlib.contextmanager
    def reading(self, path: str, *, best: bool = False) -> Iterator[str]:
        """Yields a local path with what is at a path or URL, as `local_copy`; of a run in progress its own files.

        All workers call it.

        Raises:
            ValueError: if it cannot be read.
        """
        is_own = path.rstrip("/") == self._url.rstrip("/")
        if is_own and not self._depth:
            act = functools.partial(_is_current, self._root, RemoteDirectory(self._url))
            is_own = all(self._workers.gather(self._agree(act)))
        if is_own:
            steps = tree.best_steps(tree.read(self._root, tree.BEST)) if best else ()
            for step in self._workers.broadcast(sorted(steps)):
                self.send_to_hosts(step)
            yield self._root
            return
        with super().reading(path, best=best) as local:
            yield local

    def send_to_hosts(self, step: int) -> None:
        """Brings a checkpoint that the chief has chosen to the hosts that lack it. All workers call it.

        Raises:
            ValueError: if it does not get there.
        """
        if self._depth == 0 or self._workers.count == 1:
            return
        known = tree.digest(tree.read(self._root, tree.CHECKPOINTS, str(step), tree.MANIFEST))
        is_there = known == self._workers.broadcast(known)
        hosts = self._workers.gather(None if is_there else [socket.gethostname(), os.path.abspath(self._root)])
        if any(hosts):
            upload = self._open[1] if self._open is not None else None
            self._agree((lambda: upload.wait_for(step)) if upload is not None else None)
            is_first = not is_there and hosts.index(hosts[self._workers.index]) == self._workers.index
            self._agree((lambda: self._fetch(step)) if is_first else None)

    def _fetch(self, step: int) -> None:
        """Brings a checkpoint to a host whose workers write no files, and from whose directory no run goes on."""
        directory = RemoteDirectory(self._url)
        found = [checkpoint for checkpoint in tree.complete_checkpoints(directory) if checkpoint.step == step]
        if not found:
            raise RemoteError(f"there is no complete checkpoint of step {step}")
        os.makedirs(self._root, 0o700, exist_ok=True)
        tree.fetch_checkpoint(directory, found[0], self._root)

    def _replace(self, directory: RemoteDirectory) -> None:
        """Replaces the staging directory by what the bucket has; keeps it aside if it has gone farther."""
        root, aside = self._root, f"{self._root}.aside"
        if os.path.isdir(root):
            say(f"{root} is replaced by what is in {self._url}, which was written to from elsewhere since.")
            steps = [*map(tree.step_of, tree.checkpoints(root))]
            newest = next((checkpoint.step for checkpoint in tree.complete_checkpoints(directory)), -1)
            if steps and steps[0] > newest:
                remove(aside)
                os.rename(root, aside)
                say(f"{aside} keeps the checkpoint of step {steps[0]}, after step {newest} of the bucket.")
            remove(root)
        os.makedirs(os.path.dirname(root), exist_ok=True)
        with replacing(root) as temporary:
            os.mkdir(temporary, 0o700)
            tree.write_state(temporary, state := tree.fetch_workdir(directory, temporary))
        if state.uploaded:
            self._say(f"{len(state.uploaded)} files and checkpoints were brought from {self._url} to {root}")


def _is_current(root: str, directory: RemoteDirectory) -> bool:
    """Returns whether a run goes on from a directory of this machine, which may be missing; else from the bucket.

    Raises:
        ValueError: if others may write to it, or the bucket has nothing of what was uploaded from there.
    """
    if os.path.isdir(root) and not _is_private(root):
        raise ValueError(
            f"{root!r}, which stands for {directory.url!r} on this machine, belongs to another user, or others may "
            "write to it: remove it, or give XDG_CACHE_HOME a directory of your own."
        )
    steps = [*map(tree.step_of, tree.checkpoints(root))]
    if not steps and not os.path.exists(os.path.join(root, tree.STATE)):
        return False
    _, known = tree.read_state(root)
    for newest in tree.complete_checkpoints(directory):
        return bool(steps) and tree.digest(newest.manifest) in known
    if steps and known:
        raise ValueError(
            f"workdir={directory.url!r} holds no complete checkpoint, but some were uploaded there from this machine, "
            f"where {root!r} has the run up to step {steps[0]}: check that the share is mounted, and that endpoint, "
            f"profile and name are those of the run. To upload it anew, delete {os.path.join(root, tree.STATE)!r}; to "
            "begin anew, the whole directory."
        )
    return True


def _is_private(path: str) -> bool:
    """Returns whether a file or directory is this user's, and nobody else may write to it."""
    status = os.stat(path)
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022
