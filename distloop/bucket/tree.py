"""Workdir tree: which files go to a bucket and come back, and when a checkpoint counts as complete.

    units("staging")                            # {"checkpoints/500": (1204, ...), ..., "metrics.jsonl": (9120, ...)}
    fetch_workdir(directory, "staging")         # all that a run goes on from

A unit is what is uploaded as one: a file, or a checkpoint, whose `manifest.json` is written last and deleted first, so
that who sees it sees all of it. While a checkpoint is written again, the one before is `<step>.old`. `.uploaded.json`
has the stamps of the units that are uploaded from this machine, and digests of the manifests of its checkpoints. A
function that brings files raises a `RemoteError` if one cannot be read.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from distloop.atomic_files import replacing
from distloop.bucket.remote_directory import RemoteDirectory, RemoteError, is_path
from distloop.log import log
from distloop.workdir import ledger
from distloop.workdir.records import as_best_steps, parse_json

CHECKPOINTS = "checkpoints"
BEST, ROWS, MANIFEST, OLD = f"{CHECKPOINTS}/best.json", "metrics.jsonl", "manifest.json", ".old"
STATE = ".uploaded.json"
_SEALS = (MANIFEST, "saved_model.pb")
_MOST_MANIFESTS = 1000  # that are known again; a bucket may be put back to what it was
_CHECKPOINT = re.compile(r"(0|[1-9][0-9]{0,17})(\.abandoned(-\d+)?)?")  # a run has gone back before an abandoned one
_TEMPORARY = re.compile(r"(/\d+)\.\d+-[0-9a-f]{8}\.(tmp|old)\Z")  # of a checkpoint that is replaced or deleted
# Locks, temporary names, and the token of older versions.
_SKIPPED = re.compile(
    r"\..*|run\.lock.*|staging\.json|.*\.[0-9a-f]{8}\.tmp|.*\.\d{1,9}(-[0-9a-f]{8})?\.(tmp|old)(\.\w+)?"
)
_REPORTED = ("config.json", "flags.txt", ROWS, "incidents.jsonl", ledger.STARTS, ledger.PROGRESS, ledger.MEMORY)
_MANIFEST = re.compile(rf"(^|/){CHECKPOINTS}/[0-9]{{1,18}}/{re.escape(MANIFEST)}\Z")

Stamp: TypeAlias = tuple[int, int]  # size and time (nanoseconds) of a file, by which a change is seen


class State(NamedTuple):
    """What is uploaded from a directory of this machine.

    Attributes:
        uploaded: the stamps of units, by path.
        manifests: digests of the manifests of checkpoints that came, were uploaded or begun, the latest last.
    """

    uploaded: dict[str, Stamp]
    manifests: list[str]


class Complete(NamedTuple):
    """A checkpoint in a bucket all of whose files are there."""

    step: int
    path: str
    files: list[str]  # paths in the workdir
    manifest: bytes


def units(root: str) -> dict[str, Stamp]:
    """Returns what is uploaded of a workdir, which may change meanwhile: `checkpoints`, then files, in this order."""
    files = {}
    for folder, folders, names in os.walk(root):
        path = os.path.relpath(folder, root)
        folders[:] = [name for name in folders if path != CHECKPOINTS and not _SKIPPED.fullmatch(name)]
        for name in names:
            if not _SKIPPED.fullmatch(name) and (stamp := stamp_of(os.path.join(folder, name))):
                files[os.path.normpath(os.path.join(path, name))] = stamp
    return checkpoints(root) | {path: files[path] for path in sorted(files, key=lambda p: (p != BEST, seals_last(p)))}


def checkpoints(root: str) -> dict[str, Stamp]:
    """Returns the stamps of the manifests of a workdir's checkpoints, by the paths of those, the newest first.

    Those of older branches come last.
    """
    paths = [f"{CHECKPOINTS}/{name}" for name in _names_in(root) if _CHECKPOINT.fullmatch(name)]
    stamps = {path: stamp_of(os.path.join(root, path)) for path in sorted(paths, key=step_of, reverse=True)}
    return {path: stamp for path, stamp in stamps.items() if stamp}


def paths_kept(root: str) -> set[str]:
    """Returns the paths in the directory of checkpoints; one that is being replaced or deleted keeps its own."""
    return {_TEMPORARY.sub(r"\1", f"{CHECKPOINTS}/{name}") for name in _names_in(root)}


def _names_in(root: str) -> list[str]:
    """Returns the names in the directory of checkpoints; none if it is missing."""
    try:
        return os.listdir(os.path.join(root, CHECKPOINTS))
    except OSError:
        return []


def stamp_of(path: str) -> Stamp | None:
    """Returns the stamp of a file, or of a checkpoint's manifest; None: it is gone, or no file."""
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            status = os.stat(os.path.join(path, MANIFEST))
    except OSError:
        return None
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def folder_of(path: str) -> str:
    """Returns the directory in that of checkpoints that a file of a workdir is in; of another file its own path."""
    return "/".join(path.split("/")[:2]) if path.startswith(f"{CHECKPOINTS}/") else path


def is_checkpoint(path: str) -> bool:
    """Returns whether a path in a workdir is that of a checkpoint, `.old` or abandoned ones too."""
    folder, _, name = path.removesuffix(OLD).rpartition("/")
    return folder == CHECKPOINTS and bool(_CHECKPOINT.fullmatch(name))


def step_of(path: str) -> int:
    """Returns the step of a checkpoint by its path in the workdir, `.old` or not; -1: it is none, or abandoned."""
    name = path.removesuffix(OLD).rpartition("/")[2]
    return int(name) if is_checkpoint(path) and name.isdecimal() else -1


def seals_last(path: str) -> tuple[bool, str]:
    """Returns what files are sorted by: one by which others count comes after them."""
    return os.path.basename(path) in _SEALS, path


def complete_checkpoints(directory: RemoteDirectory, files: Mapping[str, int] | None = None) -> Iterator[Complete]:
    """Yields the complete checkpoints of a bucket, or among its files, the newest first.

    A damaged one is named in the log.
    """
    folders: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for path, size in (directory.list() if files is None else files).items():
        folders[folder_of(path)][path] = size
    last = -1
    for path in sorted(folders, key=lambda path: (-step_of(path), path.endswith(OLD))):
        step = step_of(path)
        if step in (-1, last) or f"{path}/{MANIFEST}" not in folders[path]:
            continue
        manifest = directory.read(f"{path}/{MANIFEST}") or b""
        if _named_in(manifest, path).items() <= folders[path].items():
            last = step
            yield Complete(step, path, [*folders[path]], manifest)
        else:
            log.error("The checkpoint %s/%s is damaged. Trying the one before it.", directory.url, path)


def _named_in(manifest: bytes, folder: str) -> dict[str, int]:
    """Returns the sizes of the files that a manifest names, by path; of a damaged manifest, those of no checkpoint."""
    try:
        return parse_json(manifest, lambda value: {f"{folder}/{name}": size for name, size in value["files"].items()})
    except ValueError:
        return {"": 0}


def best_steps(best: bytes | None) -> set[int]:
    """Returns the steps that a `best.json` lists; none if there is no such file, or it is damaged."""
    try:
        return {step for steps in parse_json(best or b"{}", as_best_steps).values() for step in steps}
    except ValueError:
        return set()


def read_state(root: str) -> State:
    """Returns what is uploaded from a directory of this machine; if that is unknown, nothing: all is uploaded again."""

    def as_state(value: Any) -> State:
        uploaded = {path: (int(size), int(at)) for path, (size, at) in value["uploaded"].items() if is_path(path)}
        return State(uploaded, [*map(str, value["manifests"])])

    try:
        return parse_json(read(root, STATE), as_state)
    except ValueError:
        return State({}, [])


def write_state(root: str, state: State) -> None:
    """Notes what is uploaded from a directory, for the next process on this machine, if that can be written."""
    with contextlib.suppress(OSError), replacing(os.path.join(root, STATE)) as temporary:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"uploaded": state.uploaded, "manifests": state.manifests[-_MOST_MANIFESTS:]}, file)


def digest(manifest: bytes) -> str:
    """Returns what a manifest is known by."""
    return hashlib.sha256(manifest).hexdigest()


def read(*path: str) -> bytes:
    """Returns what a file holds; nothing if it cannot be read."""
    try:
        with open(os.path.join(*path), "rb") as file:
            return file.read()
    except OSError:
        return b""


def fetch_workdir(directory: RemoteDirectory, root: str) -> State:
    """Brings the files of a run: its complete checkpoints, rows, settings, TensorBoard's files, exports.

    Returns:
        The state of `root`, empty before: what is as it is in the bucket.
    """
    files = directory.list()
    others = [path for path in files if folder_of(path) == path and not any(map(_SKIPPED.fullmatch, path.split("/")))]
    fetch_files(directory, others, root)
    complete = [*complete_checkpoints(directory, files)]
    for checkpoint in complete:
        fetch_checkpoint(directory, checkpoint, root)
    old = [checkpoint.path.removesuffix(OLD) for checkpoint in complete if checkpoint.path.endswith(OLD)]
    uploaded = {path: stamp for path, stamp in units(root).items() if path not in old}
    return State(uploaded, [digest(checkpoint.manifest) for checkpoint in complete])


def fetch_checkpoint(directory: RemoteDirectory, checkpoint: Complete, root: str) -> None:
    """Brings a checkpoint, atomically, to the path of its step in a workdir."""
    os.makedirs(os.path.join(root, CHECKPOINTS), exist_ok=True)
    with replacing(os.path.join(root, checkpoint.path.removesuffix(OLD))) as temporary:
        fetch_files(directory, checkpoint.files, temporary, f"{checkpoint.path}/")


def fetch_files(directory: RemoteDirectory, names: Iterable[str], root: str, below: str = "") -> None:
    """Brings files to a local directory.

    Args:
        directory: of the files.
        names: their paths, as `RemoteDirectory.list` returns them.
        root: the local directory.
        below: the beginning of their paths that they have not below `root`.
    """
    for name in names:
        path = os.path.join(root, name.removeprefix(below))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        directory.download(name, path)


@contextlib.contextmanager
def fetched(path: str, *, best: bool = False) -> Iterator[str]:
    """Yields a local path with what is at a URL, for as long as the block runs; as `directory.local_copy`."""
    folder, _, name = path.rstrip("/").rpartition("/")
    if not folder or not is_path(name):
        raise RemoteError("it names no file or directory")
    if path.startswith("hf://") and folder.count("/") < 3:
        raise ValueError(f"it names a repository and no file in it, as {path.rstrip('/')}/model.safetensors does")
    with tempfile.TemporaryDirectory(prefix="distloop_") as root:
        copied, directory = os.path.join(root, name), RemoteDirectory(path)
        is_file = name.endswith((".npz", ".safetensors", ".keras", ".weights.h5"))
        files = {} if is_file else directory.list()
        if MANIFEST in files:
            fetch_files(directory, files, copied)
            yield copied
        elif complete := [*complete_checkpoints(directory, files)]:
            wanted = best_steps(directory.read(BEST)) if best else {complete[0].step}
            fetch_files(directory, files.keys() & {BEST} if best else (), root)
            for checkpoint in complete:
                if checkpoint.step in wanted:
                    fetch_checkpoint(directory, checkpoint, root)
            yield root
        else:
            parent = RemoteDirectory(folder)
            names = [name] if is_file else [file for file in parent.list() if file.startswith(f"{name}.")]
            fetch_files(parent, names, root)
            yield copied


def fetch_reports(url: str, root: str) -> str:
    """Brings the files that a report reads, of one run or of all runs in a directory.

    Args:
        url: of a workdir, or of a directory of them.
        root: a local directory.

    Returns:
        The path of what was brought: the URL's, below `root`.

    Raises:
        ValueError: if it cannot be read, or is no run.
    """
    directory = RemoteDirectory(url)
    target = os.path.join(root, *filter(is_path, directory.url.split("/")))
    try:
        wanted = [p for p in directory.list() if os.path.basename(p) in _REPORTED or _MANIFEST.search(p)]
        if not any(os.path.basename(path) in (ROWS, ledger.MEMORY) for path in wanted):
            raise ValueError(
                f"{directory.url!r} holds no {ROWS}: give URLs of runs that have begun, or of a directory of them."
            )
        fetch_files(directory, wanted, target)
        return target
    except RemoteError as error:
        raise ValueError(f"{url!r} cannot be read ({error}): give the URL of what you may read.") from error
