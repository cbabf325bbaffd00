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
from distloop.monitoring.console import say
from distloop.monitoring.records import parse_json
from distloop.remote import tree
from distloop.remote.directory import RemoteDirectory
from distloop.remote.fetching import fetch_workdir
from distloop.remote.tree import MANIFEST, Unit

STATE = ".uploaded.json"


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
    state = read_state(root)
    if whole := tree.whole_checkpoints(directory, directory.list()):
        manifest = digest(directory.read(f"{whole[max(whole)]}/{MANIFEST}") or b"")
        return bool(steps) and manifest in {*state.manifests, *_manifests(root).values()}
    if steps and state.manifests:
        raise ValueError(
            f"workdir={directory.url!r} holds no whole checkpoint, but some were uploaded there from this machine, "
            f"where {root!r} has the run up to step {steps[0]}: check that the share is mounted, and that endpoint, "
            f"profile and name are those of the run. To upload it anew, delete {os.path.join(root, STATE)!r}; to begin "
            "anew, the whole directory."
        )
    return True


def replace(root: str, directory: RemoteDirectory) -> list[str]:
    """Replaces a directory of this machine by what the bucket has; keeps it aside if some of it was not uploaded.

    Returns:
        The paths of the files that came.
    """
    uploaded = read_state(root).uploaded
    if late := [u.step for u in tree.checkpoints(root) if uploaded.get(u.path) != as_stamps(u)]:
        names = itertools.chain([f"{root}.aside"], (f"{root}.aside-{i}" for i in itertools.count(2)))
        os.rename(root, aside := next(name for name in names if not os.path.lexists(name)))
        say(f"{aside} keeps steps {', '.join(map(str, late))}, which were not uploaded before another machine went on.")
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(os.path.dirname(root), exist_ok=True)
    with replacing(root) as temporary:
        os.mkdir(temporary, 0o700)
        paths = fetch_workdir(directory, temporary)
        _note_fetched(temporary, paths)
    return paths


class State(NamedTuple):
    """What is uploaded from a directory of this machine.

    Attributes:
        uploaded: the stamps of each file and unit, by path.
        manifests: the digests of the manifests of checkpoints that were uploaded, or begun, with the path of each.
    """

    uploaded: dict[str, list[Any]]
    manifests: dict[str, str]

    def forget(self, path: str, but: str = "") -> None:
        """Removes a path, or all of its manifests but one."""
        if not but:
            self.uploaded.pop(path, None)
        for manifest in [m for m, owner in self.manifests.items() if owner == path and m != but]:
            del self.manifests[manifest]


def read_state(root: str) -> State:
    """Returns what is uploaded from a directory; nothing if that is not known: all is uploaded again then."""
    with contextlib.suppress(ValueError):
        return parse_json(read(root, STATE), lambda state: State(dict(state["uploaded"]), dict(state["manifests"])))
    return State({}, {})


def write_state(root: str, state: State) -> None:
    """Notes what is uploaded from a directory, for the next process on this machine, if that can be written."""
    with contextlib.suppress(OSError), replacing(os.path.join(root, STATE)) as temporary:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(state._asdict(), file)


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


def _manifests(root: str) -> dict[str, str]:
    """Returns the digest of the manifest of each checkpoint in a directory, by the path of the checkpoint."""
    return {unit.path: digest(read(root, unit.path, unit.seal)) for unit in tree.checkpoints(root)}


def _note_fetched(root: str, paths: Collection[str]) -> None:
    """Notes that files of a directory, which have just come from the bucket, are there."""
    files, units = tree.scan(root)
    stamps = {path: list(stamp) for path, stamp in files.items() if path in paths}
    units = [unit for unit in units if all(f"{unit.path}/{name}" in paths for name in unit.files)]
    stamps |= {unit.path: as_stamps(unit) for unit in units}
    write_state(root, State(stamps, {manifest: path for path, manifest in _manifests(root).items() if path in stamps}))
