"""Workdir tree: which files go to a bucket and come back, and when a directory counts as whole.

    files, units = scan("staging")          # {"metrics.jsonl": (1204, ...)}, [Unit("checkpoints/500", ...)]
    fetch_workdir(directory, "staging")     # all that a run goes on from

A unit is a directory with a seal: a checkpoint with `manifest.json`, an export with `saved_model.pb`. Its seal is
written last and deleted first, so that who sees the seal sees the whole. While a checkpoint is written again, the one
before is `<unit>.old`. `.uploaded.json` has the stamps of what is uploaded from this machine, and digests of the
manifests of its checkpoints. What reads the files that were brought needs to know no URLs.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from distloop.atomic_files import replacing
from distloop.bucket.directory import RemoteDirectory, RemoteError, is_path, local_path
from distloop.log import log
from distloop.monitoring import ledger, memory_file
from distloop.monitoring.records import as_best_steps, parse_json

CHECKPOINTS = "checkpoints"
BEST, ROWS, MANIFEST, OLD = f"{CHECKPOINTS}/best.json", "metrics.jsonl", "manifest.json", ".old"
SEALS = (MANIFEST, "saved_model.pb")
STATE = ".uploaded.json"
_MOST_MANIFESTS = 1000  # that are known again; a bucket may be put back to what it was
_STEP = re.compile(r"0|[1-9][0-9]{0,17}")
# Locks, temporary names, and the token of older versions.
_SKIPPED = re.compile(
    r"\..*|run\.lock.*|staging\.json|.*\.part|.*\.[0-9a-f]{8}\.tmp|.*\.\d{1,9}(-[0-9a-f]{8})?\.(tmp|old)(\.\w+)?"
)
_REPORTED = ("config.json", ROWS, "incidents.jsonl", ledger.STARTS, ledger.PROGRESS, memory_file.FILE)
_MANIFEST_OF_RUN = re.compile(rf"(?P<run>.*/|){CHECKPOINTS}/(?P<step>[0-9]{{1,18}})/manifest\.json")

Stamp: TypeAlias = tuple[int, int]  # size, and when it was written (nanoseconds)


class Unit(NamedTuple):
    """A directory that counts when its seal is there.

    Attributes:
        path: in the workdir.
        seal: the name of the file that is written last.
        files: by their paths in it.
    """

    path: str
    seal: str
    files: dict[str, Stamp]

    @property
    def step(self) -> int:
        """The step of a checkpoint; -1: it is none."""
        return step_of(self.path)

    @property
    def names(self) -> list[str]:
        """The files in the order in which they are written."""
        return sorted(self.files, key=lambda name: (name == self.seal, name))


def scan(root: str) -> tuple[dict[str, Stamp], list[Unit]]:
    """Returns the files of a workdir that are uploaded: those on their own by path, and the units.

    Args:
        root: the workdir; it may change meanwhile.
    """
    files: dict[str, Stamp] = {}
    units = checkpoints(root)
    for folder, folders, names in os.walk(root):
        below = os.path.relpath(folder, root)
        folders[:] = [name for name in folders if not _is_skipped(name)]
        if below == CHECKPOINTS:
            folders.clear()
        if seal := next((seal for seal in SEALS if seal in names), None):
            folders.clear()
            units.append(Unit("" if below == "." else below, seal, _stamps(folder)))
        else:
            paths = (os.path.normpath(os.path.join(below, name)) for name in names if not _is_skipped(name))
            files.update((path, s) for path in paths if (s := stamp(os.path.join(root, path))))
    return files, units


def checkpoints(root: str) -> list[Unit]:
    """Returns the checkpoints of a workdir that have their manifest, the newest first; it may change meanwhile."""
    folder = os.path.join(root, CHECKPOINTS)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = sorted((int(name) for name in names if _STEP.fullmatch(name)), reverse=True)
    found = (Unit(f"{CHECKPOINTS}/{s}", MANIFEST, _stamps(os.path.join(folder, str(s)))) for s in steps)
    return [unit for unit in found if MANIFEST in unit.files]


def step_of(path: str) -> int:
    """Returns the step of a checkpoint by its path in the workdir; -1: it is none."""
    folder, _, name = path.rpartition("/")
    return int(name) if folder == CHECKPOINTS and _STEP.fullmatch(name) else -1


def by_checkpoint(files: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Returns the files of a bucket that are in a directory of checkpoints: directory -> path in it -> size."""
    folders: dict[str, dict[str, int]] = {}
    for path, size in files.items():
        first, *rest = path.split("/", 2)
        if first == CHECKPOINTS and len(rest) == 2:
            folders.setdefault(f"{first}/{rest[0]}", {})[rest[1]] = size
    return folders


def whole_checkpoints(directory: RemoteDirectory, files: Mapping[str, int]) -> Iterator[tuple[int, str, bytes]]:
    """Yields step, path and manifest of each whole checkpoint of a bucket, the newest first.

    Args:
        directory: of the workdir.
        files: in it, as it lists them.
    """
    folders, last = by_checkpoint(files), -1
    steps = {path: step_of(path.removesuffix(OLD)) for path in folders}
    for path in sorted(folders, key=lambda path: (-steps[path], path.endswith(OLD))):
        if steps[path] not in (-1, last) and (manifest := _manifest_of_whole(directory, path, folders[path])):
            last = steps[path]
            yield last, path, manifest


def sealed_steps(files: Mapping[str, int]) -> list[int]:
    """Returns the steps of the checkpoints in a bucket that have their seal, in ascending order."""
    sealed = (step_of(path) for path, names in by_checkpoint(files).items() if MANIFEST in names)
    return sorted(step for step in sealed if step >= 0)


def best_steps(best: bytes | None) -> set[int]:
    """Returns the steps that a `best.json` lists; none if there is no such file, or it is damaged."""
    try:
        return {step for steps in parse_json(best or b"{}", as_best_steps).values() for step in steps}
    except ValueError:
        return set()


def stamp(path: str) -> Stamp | None:
    """Returns the stamp of a file; None: it is not there any more, or no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_size, status.st_mtime_ns) if os.path.isfile(path) else None


class State(NamedTuple):
    """What is uploaded from a directory of this machine.

    Attributes:
        uploaded: the stamps of each file and unit, by path.
        manifests: the digests of the manifests of checkpoints that came, were uploaded or begun, the latest last.
    """

    uploaded: dict[str, list[Any]]
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


def note_fetched(root: str, paths: Collection[str] | None = None) -> None:
    """Notes that files of a directory, which have just come from the bucket, are there; None: all of them."""
    files, units = scan(root)
    stamps = {path: list(stamp) for path, stamp in files.items()}
    if paths is not None:
        stamps = {path: stamp for path, stamp in stamps.items() if path in paths}
        units = [unit for unit in units if all(f"{unit.path}/{name}" in paths for name in unit.files)]
    write_state(root, State(stamps | {unit.path: as_stamps(unit) for unit in units}, digests(root)))


def as_stamps(unit: Unit) -> list[Any]:
    """Returns the stamps of a unit's files, as JSON holds them."""
    return [[name, *unit.files[name]] for name in sorted(unit.files)]


def digest(manifest: bytes) -> str:
    """Returns what a manifest is known by."""
    return hashlib.sha256(manifest).hexdigest()


def digests(root: str) -> list[str]:
    """Returns the digests of the manifests of the checkpoints in a directory, the newest first."""
    return [digest(read(root, unit.path, unit.seal)) for unit in checkpoints(root)]


def read(*path: str) -> bytes:
    """Returns what a file holds; nothing if it cannot be read."""
    try:
        with open(os.path.join(*path), "rb") as file:
            return file.read()
    except OSError:
        return b""


def _as_state(value: Any) -> State:
    stamps = {path: [*stamp] for path, stamp in value["uploaded"].items() if stamp and (not path or is_path(path))}
    return State(stamps, [str(manifest) for manifest in value["manifests"]])


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
    fetched, folders = [], by_checkpoint(files)
    whole = {step: path for step, path, _ in whole_checkpoints(directory, files)}
    for step in sorted({*sealed_steps(files)} - whole.keys()):
        log.error("The checkpoint %s/%s/%d is damaged. Trying the one before it.", directory.url, CHECKPOINTS, step)
    in_checkpoints = {f"{folder}/{name}" for folder, names in folders.items() for name in names}
    for path, size in files.items():
        if path not in in_checkpoints and not any(map(_is_skipped, path.split("/"))):
            _download(directory, path, size, root)
            fetched.append(path)
    for step, unit in whole.items():
        try:
            names = _fetch_checkpoint(directory, unit, files, root, f"{CHECKPOINTS}/{step}")
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
        steps = best_steps(directory.read(BEST))
    for step, unit, _ in whole_checkpoints(directory, files):
        path = f"{CHECKPOINTS}/{step}"
        if step in steps and not os.path.isdir(os.path.join(root, path)):
            _fetch_checkpoint(directory, unit, files, root, path)


@contextlib.contextmanager
def fetched(path: str, *, best: bool = False) -> Iterator[str]:
    """Yields a local path with what is at a URL, for as long as the block runs; see `monitoring.directory.local_copy`.

    Raises:
        RemoteError: if it cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="distloop_") as root:
        path = path.rstrip("/")
        folder, _, name = path.rpartition("/")
        if not folder:
            raise RemoteError("it names no directory", is_final=True)
        copied = local_path(root, name)
        if path.endswith((".npz", ".keras", ".weights.h5")):
            _fetch_named(RemoteDirectory(folder), [name], root)
            yield copied
            return
        directory = RemoteDirectory(path)
        files = directory.list()
        if MANIFEST in files:
            for file, size in files.items():
                _download(directory, file, size, copied)
            yield copied
        elif newest := next(whole_checkpoints(directory, files), None):
            fetch_checkpoints(directory, root, None if best else {newest[0]})
            yield root
        else:
            parent = RemoteDirectory(folder)
            _fetch_named(parent, [file for file in parent.list() if file.startswith(f"{name}.")], root)
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
        newest: dict[str, tuple[int, str]] = {}  # of each run, the manifest of its last checkpoint
        for path in files:
            if match := _MANIFEST_OF_RUN.fullmatch(path):
                newest[match["run"]] = max(newest.get(match["run"], (-1, "")), (int(match["step"]), path))
        wanted = {path for _, path in newest.values()} | {p for p in files if p.rpartition("/")[2] in _REPORTED}
        if not any(path.rpartition("/")[2] in (ROWS, memory_file.FILE) for path in wanted):
            raise ValueError(
                f"{directory.url!r} holds no {ROWS}: give URLs of runs that have begun, or of a directory of them."
            )
        for path in wanted:
            _download(directory, path, files[path], target)
        return target
    except RemoteError as error:
        raise ValueError(f"{url!r} cannot be read ({error}): give the URL of what you may read.") from error


def _fetch_checkpoint(
    directory: RemoteDirectory, unit: str, files: Mapping[str, int], root: str, path: str
) -> list[str]:
    """Brings a checkpoint, whole or not at all, from `unit` to `root/path`; returns the paths of its files there."""
    names = [name for name in files if name.startswith(f"{unit}/")]
    target = local_path(root, path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with replacing(target) as temporary:
        for name in names:
            _download(directory, name.removeprefix(f"{unit}/"), files[name], temporary, name)
    return names


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


def _is_skipped(name: str) -> bool:
    """Returns whether a file or directory of this name stays where it is."""
    return bool(_SKIPPED.fullmatch(name))


def _manifest_of_whole(directory: RemoteDirectory, path: str, sizes: Mapping[str, int]) -> bytes:
    """Returns a checkpoint's manifest if the files that it names are there, with their sizes; else nothing."""
    content = directory.read(f"{path}/{MANIFEST}") if MANIFEST in sizes else None
    try:
        named = parse_json(content or b"", lambda manifest: manifest["files"].items())
    except ValueError:
        return b""
    return content or b"" if all(sizes.get(name) == size for name, size in named) else b""


def _stamps(folder: str) -> dict[str, Stamp]:
    paths = (os.path.join(inner, name) for inner, _, names in os.walk(folder) for name in names)
    return {os.path.relpath(path, folder): found for path in paths if (found := stamp(path))}
