"""Fetching: brings files of a bucket to this machine, so that what reads them needs to know no URLs.

fetch_workdir(directory, "staging")                     # all that a run goes on from
with local_copy("s3://bucket/run") as path:             # its newest checkpoint
    load_newest(path)
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping

from distloop.atomic_files import replacing
from distloop.bucket import tree
from distloop.bucket.directory import RemoteDirectory, RemoteError, is_path, local_path
from distloop.bucket.tree import BEST, CHECKPOINTS
from distloop.log import log
from distloop.monitoring import ledger, memory_file, run_starts

_REPORTED = ("config.json", "metrics.jsonl", "incidents.jsonl", run_starts.FILE, ledger.FILE, memory_file.FILE)
_MANIFEST = re.compile(rf"(?P<run>.*/|){CHECKPOINTS}/(?P<step>[0-9]{{1,18}})/manifest\.json")
_FILES = (".npz", ".keras", ".weights.h5")


def fetch_workdir(directory: RemoteDirectory, root: str) -> list[str]:
    """Brings the files of a run: its whole checkpoints, rows, settings, TensorBoard's files, exports.

    Args:
        directory: of the run.
        root: a local directory, empty or missing.

    Returns:
        The paths of the files.

    Raises:
        RemoteError: if one cannot be read.
    """
    files = directory.list()
    fetched = []
    whole, folders = tree.whole_checkpoints(directory, files), tree.by_checkpoint(files)
    for step in sorted({*tree.sealed_steps(files)} - whole.keys()):
        log.error("The checkpoint %s/%s/%d is damaged. Trying the one before it.", directory.url, CHECKPOINTS, step)
    in_checkpoints = {f"{folder}/{name}" for folder, names in folders.items() for name in names}
    for path, size in files.items():
        if path not in in_checkpoints and not any(map(tree.is_skipped, path.split("/"))):
            _download(directory, path, size, root)
            fetched.append(path)
    for step, unit in whole.items():
        try:
            names = fetch_checkpoint(directory, unit, files, root, f"{CHECKPOINTS}/{step}")
        except RemoteError:
            if not directory.list(unit):  # the chief, which writes there, has deleted an old one
                continue
            raise
        if unit == f"{CHECKPOINTS}/{step}":
            fetched += names
    return fetched


def fetch_checkpoints(directory: RemoteDirectory, root: str, steps: Collection[int] | None) -> None:
    """Brings checkpoints that are not in a local workdir yet.

    Args:
        directory: of the run.
        root: the local workdir.
        steps: of the checkpoints; None: the best ones, with their list.

    Raises:
        RemoteError: if one cannot be read.
    """
    files = directory.list()
    if steps is None:
        _fetch_named(directory, [BEST], root)
        steps = tree.best_steps(directory.read(BEST))
    for step, unit in tree.whole_checkpoints(directory, files).items():
        path = f"{CHECKPOINTS}/{step}"
        if step in steps and not os.path.isdir(os.path.join(root, path)):
            fetch_checkpoint(directory, unit, files, root, path)


def fetch_checkpoint(
    directory: RemoteDirectory, unit: str, files: Mapping[str, int], root: str, path: str
) -> list[str]:
    """Brings a checkpoint, whole or not at all; returns the paths of its files in the bucket.

    Args:
        directory: of the run.
        unit: where the checkpoint is in it.
        files: in the directory, as it lists them.
        root: a local directory.
        path: of the checkpoint in it.
    """
    names = [name for name in files if name.startswith(f"{unit}/")]
    target = local_path(root, path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with replacing(target) as temporary:
        for name in names:
            _download(directory, name.removeprefix(f"{unit}/"), files[name], temporary, name)
    return names


@contextlib.contextmanager
def local_copy(path: str, *, best: bool = False) -> Iterator[str]:
    """Yields a local path with what is at a URL, for as long as the block runs.

    Args:
        path: of a workdir, of which the newest whole checkpoint comes; a checkpoint; an `.npz`, `.keras` or
            `.weights.h5` file; or the prefix of a TensorFlow checkpoint.
        best: whether the best checkpoints of a workdir come, with their list, in place of the newest.

    Raises:
        RemoteError: if it cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="distloop_") as root:
        path = path.rstrip("/")
        folder, _, name = path.rpartition("/")
        if not folder:
            raise RemoteError("it names no directory", is_final=True)
        copied = local_path(root, name)
        if path.endswith(_FILES):
            _fetch_named(RemoteDirectory(folder), [name], root)
            yield copied
            return
        directory = RemoteDirectory(path)
        files = directory.list()
        if "manifest.json" in files:
            for file, size in files.items():
                _download(directory, file, size, copied)
            yield copied
        elif whole := tree.whole_checkpoints(directory, files):
            fetch_checkpoints(directory, root, None if best else {max(whole)})
            yield root
        else:
            parent = RemoteDirectory(folder)
            _fetch_named(parent, [file for file in parent.list() if file.startswith(f"{name}.")], root)
            yield copied


def fetch_reports(url: str, root: str) -> str:
    """Brings what a report reads, of a run or of the runs in a directory.

    Args:
        url: of a workdir, or of a directory of them.
        root: a local directory.

    Returns:
        The path of what was brought: the URL's, below `root`.

    Raises:
        ValueError: if it cannot be read, or is no run.
    """
    directory = RemoteDirectory(url)
    path = "/".join(filter(is_path, directory.url.split("/")))
    try:
        return _fetch_reports(directory, local_path(root, path))
    except RemoteError as error:
        raise ValueError(f"{url!r} cannot be read ({error}): give the URL of what you may read.") from error


def _fetch_reports(directory: RemoteDirectory, root: str) -> str:
    files = directory.list()
    newest: dict[str, tuple[int, str]] = {}  # of each run, the manifest of its last checkpoint
    for path in files:
        if match := _MANIFEST.fullmatch(path):
            newest[match["run"]] = max(newest.get(match["run"], (-1, "")), (int(match["step"]), path))
    wanted = {path for _, path in newest.values()} | {path for path in files if path.rpartition("/")[2] in _REPORTED}
    if not any(path.rpartition("/")[2] in ("metrics.jsonl", memory_file.FILE) for path in wanted):
        raise ValueError(
            f"{directory.url!r} holds no metrics.jsonl: give URLs of runs that have begun, or of a directory of them."
        )
    for path in wanted:
        _download(directory, path, files[path], root)
    return root


def _fetch_named(directory: RemoteDirectory, names: Iterable[str], root: str) -> None:
    for name in names:
        if (data := directory.read(name)) is not None:
            path = local_path(root, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with replacing(path) as temporary, open(temporary, "wb") as file:  # in place of a link
                file.write(data)


def _download(directory: RemoteDirectory, path: str, size: int, root: str, name: str = "") -> None:
    """Brings a file to `root/path`; `name` is its path in the bucket, if that is another."""
    target = local_path(root, path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    directory.download(name or path, size, target)
