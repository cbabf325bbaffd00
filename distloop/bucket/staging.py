"""Staging: the directory of this machine in which a run in a bucket works, and what of it is uploaded.

    if not is_current(root, directory):         # another machine has gone on since
        replace(root, directory)                # by what the bucket has; work that was not uploaded is kept aside

`.uploaded.json` in it has the stamps of what is uploaded, and digests of the manifests of its checkpoints. The newest
checkpoint of the bucket tells who was there last: if it is here, or was uploaded from here, this directory goes on.
"""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Collection
from typing import Any, NamedTuple

from distloop.atomic_files import is_private, replacing
from distloop.bucket import tree
from distloop.bucket.directory import RemoteDirectory, is_path
from distloop.bucket.fetching import fetch_workdir
from distloop.bucket.tree import Unit
from distloop.monitoring.console import say
from distloop.monitoring.records import parse_json

STATE = ".uploaded.json"
_MOST_MANIFESTS = 1000  # that are known again; a bucket may be put back to what it was


def is_current(root: str, directory: RemoteDirectory) -> bool:
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
    if not steps and not os.path.exists(os.path.join(root, STATE)):
        return False
    manifests = read_state(root).manifests
    for _, _, manifest in tree.whole(directory, directory.list()):  # the newest
        return bool(steps) and digest(manifest) in {*manifests, *_digests(root)}
    if steps and manifests:
        raise ValueError(
            f"workdir={directory.url!r} holds no whole checkpoint, but some were uploaded there from this machine, "
            f"where {root!r} has the run up to step {steps[0]}: check that the share is mounted, and that endpoint, "
            f"profile and name are those of the run. To upload it anew, delete {os.path.join(root, STATE)!r}; to begin "
            "anew, the whole directory."
        )
    return True


def replace(root: str, directory: RemoteDirectory) -> list[str]:
    """Replaces a directory of this machine by what the bucket has; keeps it aside if the bucket lacks some of it.

    Returns:
        The paths of the files that came.
    """
    uploaded, units = read_state(root).uploaded, tree.checkpoints(root)
    newest = next(tree.whole(directory, directory.list()), (-1,))[0] if units else -1
    if late := [u.step for u in units if uploaded.get(u.path) != as_stamps(u) or u.step > newest]:
        names = itertools.chain([f"{root}.aside"], (f"{root}.aside-{i}" for i in itertools.count(2)))
        os.rename(root, aside := next(name for name in names if not os.path.lexists(name)))
        say(f"{aside} keeps steps {', '.join(map(str, late))}, which the bucket did not get before it was written to.")
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(os.path.dirname(root), exist_ok=True)
    with replacing(root) as temporary:
        os.mkdir(temporary, 0o700)
        paths = fetch_workdir(directory, temporary)
        note_fetched(temporary, paths)
    return paths


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


def as_stamps(unit: Unit) -> list[Any]:
    """Returns the stamps of a unit's files, as JSON holds them."""
    return [[name, *unit.files[name]] for name in sorted(unit.files)]


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


def note_fetched(root: str, paths: Collection[str] | None = None) -> None:
    """Notes that files of a directory, which have just come from the bucket, are there.

    Args:
        root: the directory of this machine.
        paths: of its files; None: of all.
    """
    files, units = tree.scan(root)
    stamps = {path: list(stamp) for path, stamp in files.items()}
    if paths is not None:
        stamps = {path: stamp for path, stamp in stamps.items() if path in paths}
        units = [unit for unit in units if all(f"{unit.path}/{name}" in paths for name in unit.files)]
    write_state(root, State(stamps | {unit.path: as_stamps(unit) for unit in units}, _digests(root)))


def _digests(root: str) -> list[str]:
    return [digest(read(root, unit.path, unit.seal)) for unit in tree.checkpoints(root)]


def _as_state(value: Any) -> State:
    stamps = {path: [*stamp] for path, stamp in value["uploaded"].items() if stamp and (not path or is_path(path))}
    return State(stamps, [str(manifest) for manifest in value["manifests"]])
