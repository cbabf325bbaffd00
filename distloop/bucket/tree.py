"""Workdir tree: which files go to a bucket and come back, and when a checkpoint counts as whole.

    checkpoints("staging")                      # [Unit("checkpoints/500", ...), ...]
    units("staging")                            # [..., Unit("metrics.jsonl", ...), ...]
    fetch_workdir(directory, "staging")         # all that a run goes on from

A unit is a file, or a checkpoint, whose `manifest.json` is written last and deleted first, so that who sees it sees the
whole. While a checkpoint is written again, the one before is `<step>.old`. `.uploaded.json` has the stamps of the files
that are uploaded from this machine, and digests of the manifests of its checkpoints. A function that brings files
raises a `RemoteError` if one cannot be read.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from distloop.atomic_files import replacing
from distloop.bucket.directory import RemoteDirectory, RemoteError, is_path
from distloop.log import log
from distloop.monitoring import ledger
from distloop.monitoring.records import as_best_steps, parse_json

CHECKPOINTS = "checkpoints"
BEST, ROWS, MANIFEST, OLD = f"{CHECKPOINTS}/best.json", "metrics.jsonl", "manifest.json", ".old"
STATE = ".uploaded.json"
_SEALS = (MANIFEST, "saved_model.pb")
_MOST_MANIFESTS = 1000  # that are known again; a bucket may be put back to what it was
_CHECKPOINT = re.compile(r"(0|[1-9][0-9]{0,17})(\.abandoned(-\d+)?)?")  # a run has gone back before an abandoned one
_TEMPORARY = re.compile(r"(\d+)\.\d+-[0-9a-f]{8}\.(tmp|old)\Z")  # of a checkpoint that is replaced or deleted
# Locks, temporary names, and the token of older versions.
_SKIPPED = re.compile(
    r"\..*|run\.lock.*|staging\.json|.*\.[0-9a-f]{8}\.tmp|.*\.\d{1,9}(-[0-9a-f]{8})?\.(tmp|old)(\.\w+)?"
)
_REPORTED = ("config.json", ROWS, "incidents.jsonl", "told.jsonl", ledger.STARTS, ledger.PROGRESS, ledger.MEMORY)
_MANIFEST = re.compile(rf"(^|/){CHECKPOINTS}/[0-9]{{1,18}}/{re.escape(MANIFEST)}\Z")


State: TypeAlias = tuple[dict[str, tuple[int, int]], list[str]]  # from `read_state`


class Unit(NamedTuple):
    """What is uploaded whole: a file, or a checkpoint.

    Attributes:
        path: in the workdir.
        files: by path in the workdir, the manifest last: on a disk `stamp_of` each, in a bucket its size.
    """

    path: str
    files: dict[str, Any]

    @property
    def is_file(self) -> bool:
        """Whether it is no checkpoint."""
        return self.path in self.files

    @property
    def step(self) -> int:
        """The step of a checkpoint; -1: it is none, or abandoned."""
        return step_of(self.path)


def units(root: str, below: str = "") -> list[Unit]:
    """Returns what is uploaded of a workdir, which may change meanwhile: checkpoints, the newest first, then files.

    Args:
        root: the workdir.
        below: a directory in it, of which alone the units are wanted.
    """
    stamps = {}
    for folder, folders, names in os.walk(os.path.join(root, below)):
        path = os.path.relpath(folder, root)
        is_wanted = _CHECKPOINT.fullmatch if path == CHECKPOINTS else lambda name: not _SKIPPED.fullmatch(name)
        folders[:] = filter(is_wanted, folders)
        for name in names:
            if not _SKIPPED.fullmatch(name) and (stamp := stamp_of(os.path.join(folder, name))):
                stamps[os.path.normpath(os.path.join(path, name))] = stamp
    return sorted(_grouped(stamps), key=lambda u: (u.is_file, -u.step, seals_last(u.path)))


def checkpoints(root: str) -> list[Unit]:
    """Returns the checkpoints of a workdir that have their manifest: the newest first, those of older branches last."""
    return [unit for unit in units(root, CHECKPOINTS) if not unit.is_file]


def names_kept(root: str) -> set[str]:
    """Returns the names in the directory of checkpoints; one that is being replaced or deleted keeps its own."""
    try:
        names = os.listdir(os.path.join(root, CHECKPOINTS))
    except FileNotFoundError:
        return set()
    return {_TEMPORARY.sub(r"\1", name) for name in names}


def folder_of(path: str) -> str:
    """Returns the directory in that of checkpoints that a file of a workdir is in; of another file its own path."""
    return "/".join(path.split("/")[:2]) if path.startswith(f"{CHECKPOINTS}/") else path


def step_of(path: str) -> int:
    """Returns the step of a checkpoint by its path in the workdir, `.old` or not; -1: it is none."""
    folder, _, name = path.removesuffix(OLD).rpartition("/")
    match = _CHECKPOINT.fullmatch(name)
    return int(name) if folder == CHECKPOINTS and match and not match[2] else -1


def seals_last(path: str) -> tuple[bool, str]:
    """Returns what files are sorted by: one by which others count comes after them."""
    return os.path.basename(path) in _SEALS, path


def _grouped(files: Mapping[str, Any]) -> list[Unit]:
    """Returns the units of which files are, but for checkpoints without a manifest."""
    groups: dict[str, dict[str, Any]] = {}
    for path in sorted(files, key=seals_last):
        groups.setdefault(folder_of(path), {})[path] = files[path]
    return [Unit(path, group) for path, group in groups.items() if path in group or f"{path}/{MANIFEST}" in group]


def stamp_of(path: str) -> tuple[int, int] | None:
    """Returns size and time (nanoseconds) of a file, by which a change is seen; None: it is gone, or no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def whole_checkpoints(
    directory: RemoteDirectory, files: Mapping[str, int] | None = None
) -> Iterator[tuple[Unit, bytes]]:
    """Yields the whole checkpoints of a bucket, or among its files, with their manifests, the newest first.

    A damaged one is named in the log.
    """
    last, found = -1, _grouped(directory.list() if files is None else files)
    for unit in sorted(found, key=lambda unit: (-unit.step, unit.path.endswith(OLD))):
        if unit.step in (-1, last):
            continue
        manifest = directory.read(f"{unit.path}/{MANIFEST}") or b""
        if _named_in(manifest, unit.path).items() <= unit.files.items():
            last = unit.step
            yield unit, manifest
        else:
            log.error("The checkpoint %s/%s is damaged. Trying the one before it.", directory.url, unit.path)


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
    """Returns what is uploaded from a directory of this machine; if that is unknown, nothing: all is uploaded again.

    Returns:
        The stamps of the files, by path, and the digests of the manifests of checkpoints that came, were uploaded or
        begun, the latest last.
    """

    def as_state(value: Any) -> State:
        uploaded = {path: (int(size), int(at)) for path, (size, at) in value["uploaded"].items() if is_path(path)}
        return uploaded, [*map(str, value["manifests"])]

    try:
        return parse_json(read(root, STATE), as_state)
    except ValueError:
        return {}, []


def write_state(root: str, state: State) -> None:
    """Notes what is uploaded from a directory, for the next process on this machine, if that can be written."""
    with contextlib.suppress(OSError), replacing(os.path.join(root, STATE)) as temporary:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"uploaded": state[0], "manifests": state[1][-_MOST_MANIFESTS:]}, file)


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
    """Brings the files of a run: its whole checkpoints, rows, settings, TensorBoard's files, exports.

    Returns:
        As `read_state`: of `root`, empty before, the files that are as they are in the bucket.
    """
    files = directory.list()
    others = [path for path in files if folder_of(path) == path and not any(map(_SKIPPED.fullmatch, path.split("/")))]
    fetch_files(directory, others, root)
    whole = [*whole_checkpoints(directory, files)]
    for checkpoint, _ in whole:
        fetch_checkpoint(directory, checkpoint, root)
    old = [checkpoint.path.removesuffix(OLD) for checkpoint, _ in whole if checkpoint.path.endswith(OLD)]
    uploaded = {path: stamp for unit in units(root) if unit.path not in old for path, stamp in unit.files.items()}
    return uploaded, [digest(manifest) for _, manifest in whole]


def fetch_checkpoint(directory: RemoteDirectory, checkpoint: Unit, root: str) -> None:
    """Brings a checkpoint, whole or not at all, to the path of its step in a workdir."""
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
    with tempfile.TemporaryDirectory(prefix="distloop_") as root:
        copied, directory = os.path.join(root, name), RemoteDirectory(path)
        is_file = name.endswith((".npz", ".safetensors", ".keras", ".weights.h5"))
        files = {} if is_file else directory.list()
        if MANIFEST in files:
            fetch_files(directory, files, copied)
            yield copied
        elif whole := [unit for unit, _ in whole_checkpoints(directory, files)]:
            wanted = best_steps(directory.read(BEST)) if best else {whole[0].step}
            fetch_files(directory, files.keys() & {BEST} if best else (), root)
            for checkpoint in whole:
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
