"""Workdir tree: which files go to a bucket and come back, and when a directory counts as whole.

    checkpoints("staging")                      # [Unit("checkpoints/500", ...), ...]
    others("staging")                           # [Unit("metrics.jsonl", ...), ...]
    fetch_workdir(directory, "staging")         # all that a run goes on from

A unit is a file, or a directory with a seal: a checkpoint with `manifest.json`, an export with `saved_model.pb`. Its
seal is written last and deleted first, so that who sees the seal sees the whole. While a checkpoint is written again,
the one before is `<unit>.old`. `.uploaded.json` has the stamps of the files that are uploaded from this machine, and
digests of the manifests of its checkpoints. A function that brings files raises a `RemoteError` if one cannot be read.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from distloop.atomic_files import replacing
from distloop.bucket.directory import RemoteDirectory, RemoteError, is_path, local_path
from distloop.log import log
from distloop.monitoring import ledger
from distloop.monitoring.records import as_best_steps, parse_json

CHECKPOINTS = "checkpoints"
BEST, ROWS, MANIFEST, OLD = f"{CHECKPOINTS}/best.json", "metrics.jsonl", "manifest.json", ".old"
SEALS = (MANIFEST, "saved_model.pb")
STATE = ".uploaded.json"
_MOST_MANIFESTS = 1000  # that are known again; a bucket may be put back to what it was
_CHECKPOINT = re.compile(r"(0|[1-9][0-9]{0,17})(\.abandoned(-\d+)?)?")  # a run has gone back before an abandoned one
# Locks, temporary names, and the token of older versions.
_SKIPPED = re.compile(
    r"\..*|run\.lock.*|staging\.json|.*\.part|.*\.[0-9a-f]{8}\.tmp|.*\.\d{1,9}(-[0-9a-f]{8})?\.(tmp|old)(\.\w+)?"
)
_REPORTED = ("config.json", ROWS, "incidents.jsonl", "told.jsonl", ledger.STARTS, ledger.PROGRESS, ledger.MEMORY)
_MANIFEST = re.compile(rf"(^|/){CHECKPOINTS}/[0-9]{{1,18}}/{re.escape(MANIFEST)}\Z")

Stamp: TypeAlias = tuple[int, int]  # size, and when it was written (nanoseconds)


class Unit(NamedTuple):
    """What is uploaded whole: a file, or a directory that counts when its seal is there.

    Attributes:
        path: in the workdir.
        files: stamps by path in the workdir, the seal last.
    """

    path: str
    files: dict[str, Stamp]

    @property
    def is_file(self) -> bool:
        """Whether it is no directory."""
        return self.path in self.files

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is one, of an older branch too."""
        return os.path.dirname(self.path) == CHECKPOINTS and not self.is_file

    @property
    def seal(self) -> str:
        """The path of the file that is written last."""
        return next(reversed(self.files))

    @property
    def step(self) -> int:
        """The step of a checkpoint; -1: it is none, or abandoned."""
        return step_of(self.path)


def units(root: str, below: str = "") -> list[Unit]:
    """Returns what is uploaded of a workdir, which may change meanwhile: checkpoints, the newest first; files; exports.

    Args:
        root: the workdir.
        below: a directory in it, of which alone the units are wanted.
    """
    found: list[Unit | None] = []
    for folder, folders, names in os.walk(os.path.join(root, below)):
        path = os.path.relpath(folder, root)
        is_wanted = _CHECKPOINT.fullmatch if path == CHECKPOINTS else lambda name: not _SKIPPED.fullmatch(name)
        folders[:] = filter(is_wanted, folders)
        if (unit := sealed_unit(root, path)) or os.path.dirname(path) == CHECKPOINTS:
            folders.clear()
            found.append(unit)
        else:
            paths = (os.path.normpath(os.path.join(path, name)) for name in names if not _SKIPPED.fullmatch(name))
            found += [file_unit(root, path) for path in paths]
    return sorted(filter(None, found), key=lambda u: (not u.is_checkpoint, -u.step, not u.is_file, u.path))


def checkpoints(root: str) -> list[Unit]:
    """Returns the checkpoints of a workdir that have their manifest: the newest first, those of older branches last."""
    return [unit for unit in units(root, CHECKPOINTS) if unit.is_checkpoint]


def is_changing(root: str, path: str) -> bool:
    """Returns whether a checkpoint is there after all, or has a temporary name while the run replaces it."""
    step = str(step_of(path))
    names = {name for name in os.listdir(os.path.join(root, CHECKPOINTS)) if name.split(".")[0] == step}
    return step in names or any(not _CHECKPOINT.fullmatch(name) for name in names)


def file_unit(root: str, path: str) -> Unit | None:
    """Returns the unit that a file is; None: it is not there any more, or no file."""
    stamp = _stamp(os.path.join(root, path))
    return Unit(path, {path: stamp}) if stamp else None


def sealed_unit(root: str, path: str) -> Unit | None:
    """Returns the unit that a directory is; None: it has no seal."""
    place = os.path.join(root, path)
    seal = next((os.path.join(path, name) for name in SEALS if os.path.isfile(os.path.join(place, name))), None)
    if seal is None:
        return None
    names = [os.path.relpath(os.path.join(folder, n), root) for folder, _, files in os.walk(place) for n in files]
    names.sort(key=lambda name: (name == seal, name))
    files = {name: stamp for name in names if (stamp := _stamp(os.path.join(root, name)))}
    return Unit(path, files) if seal in files else None


def folder_of(path: str) -> str:
    """Returns the directory of a checkpoint that a file is in, by its path in the workdir; else something else."""
    return "/".join(path.split("/")[:2])


def step_of(path: str) -> int:
    """Returns the step of a checkpoint by its path in the workdir, `.old` or not; -1: it is none."""
    folder, _, name = path.removesuffix(OLD).rpartition("/")
    match = _CHECKPOINT.fullmatch(name)
    return int(name) if folder == CHECKPOINTS and match and not match[2] else -1


def by_checkpoint(files: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Returns the files of a bucket that are in a directory of checkpoints: directory -> path in it -> size."""
    folders: dict[str, dict[str, int]] = {}
    for path, size in files.items():
        if (folder := folder_of(path)).startswith(f"{CHECKPOINTS}/") and folder != path:
            folders.setdefault(folder, {})[path[len(folder) + 1 :]] = size
    return folders


def whole_checkpoints(
    directory: RemoteDirectory, files: Mapping[str, int] | None = None
) -> Iterator[tuple[int, str, bytes]]:
    """Yields step, path and manifest of each whole checkpoint of a bucket, or among its files; the newest first."""
    folders, last = by_checkpoint(directory.list() if files is None else files), -1
    for path in sorted(folders, key=lambda path: (-step_of(path), path.endswith(OLD))):
        if step_of(path) not in (-1, last) and (manifest := _manifest_of_whole(directory, path, folders[path])):
            last = step_of(path)
            yield last, path, manifest


def best_steps(best: bytes | None) -> set[int]:
    """Returns the steps that a `best.json` lists; none if there is no such file, or it is damaged."""
    try:
        return {step for steps in parse_json(best or b"{}", as_best_steps).values() for step in steps}
    except ValueError:
        return set()


class State(NamedTuple):
    """What is uploaded from a directory of this machine.

    Attributes:
        uploaded: the stamps of the files, by path.
        manifests: the digests of the manifests of checkpoints that came, were uploaded or begun, the latest last.
    """

    uploaded: dict[str, Stamp]
    manifests: list[str]


def read_state(root: str) -> State:
    """Returns what is uploaded from a directory; nothing if that is not known: all is uploaded again then."""
    with contextlib.suppress(ValueError):
        return parse_json(read(root, STATE), _as_state)
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


def _as_state(value: Any) -> State:
    stamps = {path: stamp for path, stamp in value["uploaded"].items() if is_path(path) and isinstance(stamp[0], int)}
    return State({path: (size, at) for path, (size, at) in stamps.items()}, [*map(str, value["manifests"])])


def fetch_workdir(directory: RemoteDirectory, root: str) -> State:
    """Brings the files of a run: its whole checkpoints, rows, settings, TensorBoard's files, exports.

    Returns:
        The files that are below `root`, empty before, as they are in the bucket.
    """
    files = directory.list()
    folders, whole = by_checkpoint(files), {path: step for step, path, _ in whole_checkpoints(directory, files)}
    for path in sorted(folders.keys() - whole.keys()):
        if MANIFEST in folders[path] and step_of(path) not in {-1, *whole.values()}:
            log.error("The checkpoint %s/%s is damaged. Trying the one before it.", directory.url, path)
    others = [p for p in files if folder_of(p) not in folders and not any(map(_SKIPPED.fullmatch, p.split("/")))]
    fetch_files(directory, {path: files[path] for path in others}, root)
    state = State({path: stamp for path in others if (stamp := _stamp(os.path.join(root, path)))}, [])
    for path in whole:
        try:
            unit = fetch_checkpoint(directory, path, folders[path], root)
        except RemoteError:
            if not directory.list(path):  # another process, which writes there, has deleted an old one
                continue
            raise
        state.manifests.append(digest(read(root, unit.seal)))
        state.uploaded.update(unit.files if path == unit.path else {})
    return state


def fetch_checkpoint(directory: RemoteDirectory, path: str, files: Mapping[str, int], root: str) -> Unit:
    """Brings a checkpoint, whole or not at all, from a path of the bucket to the path of its step; returns it."""
    target = local_path(root, new := path.removesuffix(OLD))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with replacing(target) as temporary:
        fetch_files(directory, files, temporary, f"{path}/")
    if (unit := sealed_unit(root, new)) is None:
        raise RemoteError(f"{path} is not whole in {directory.url}")
    return unit


def fetch_files(directory: RemoteDirectory, files: Mapping[str, int], root: str, below: str = "") -> None:
    """Brings files to the same paths below a local directory.

    Args:
        directory: of the files.
        files: their sizes, by path.
        root: the local directory.
        below: what is before each path in the bucket.
    """
    for name, size in files.items():
        path = local_path(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        directory.download(below + name, path, size)


@contextlib.contextmanager
def fetched(path: str, *, best: bool = False) -> Iterator[str]:
    """Yields a local path with what is at a URL, for as long as the block runs; as `directory.local_copy`."""
    with tempfile.TemporaryDirectory(prefix="distloop_") as root:
        path = path.rstrip("/")
        folder, _, name = path.rpartition("/")
        if not folder:
            raise RemoteError("it names no directory", is_final=True)
        copied = local_path(root, name)
        if path.endswith((".npz", ".safetensors", ".keras", ".weights.h5")):
            fetch_files(RemoteDirectory(folder), {name: 0}, root)
            yield copied
            return
        directory = RemoteDirectory(path)
        files = directory.list()
        whole = list(whole_checkpoints(directory, files))
        if MANIFEST in files:
            fetch_files(directory, files, copied)
            yield copied
        elif whole:
            wanted = best_steps(directory.read(BEST)) if best else {whole[0][0]}
            fetch_files(directory, {BEST: files[BEST]} if best and BEST in files else {}, root)
            for step, unit, _ in whole:
                if step in wanted:
                    fetch_checkpoint(directory, unit, by_checkpoint(files)[unit], root)
            yield root
        else:
            parent = RemoteDirectory(folder)
            fetch_files(parent, {n: size for n, size in parent.list().items() if n.startswith(f"{name}.")}, root)
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
    try:
        target = local_path(root, "/".join(filter(is_path, directory.url.split("/"))))
        files = directory.list()
        wanted = {p: s for p, s in files.items() if os.path.basename(p) in _REPORTED or _MANIFEST.search(p)}
        if not any(os.path.basename(path) in (ROWS, ledger.MEMORY) for path in wanted):
            raise ValueError(
                f"{directory.url!r} holds no {ROWS}: give URLs of runs that have begun, or of a directory of them."
            )
        fetch_files(directory, wanted, target)
        return target
    except RemoteError as error:
        raise ValueError(f"{url!r} cannot be read ({error}): give the URL of what you may read.") from error


def _manifest_of_whole(directory: RemoteDirectory, path: str, sizes: Mapping[str, int]) -> bytes:
    """Returns a checkpoint's manifest if the files that it names are there, with their sizes; else nothing."""
    content = directory.read(f"{path}/{MANIFEST}") if MANIFEST in sizes else None
    try:
        named = parse_json(content or b"", lambda manifest: manifest["files"].items())
    except ValueError:
        return b""
    return content or b"" if all(sizes.get(name) == size for name, size in named) else b""


def _stamp(path: str) -> Stamp | None:
    """Returns the stamp of a file; None: it is not there any more, or no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None
