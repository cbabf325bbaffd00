"""Run identity: a random name of a run, bound to its workdir, so that a copied workdir is another run.

    run = run_identity.claim(config, verify)      # "9f2c51d0a4b7": made by the first `fit`, and anew in a copy
    run_identity.read("run")                    # the same; empty in a workdir without a name of its own

What lies outside a workdir (copies in memory, runs at W&B) is known by this name. A directory is known by its inode,
which a move keeps and a copy does not; where inodes do not last (FUSE) by its path; the files of a bucket by their URL.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from typing import NamedTuple

from distloop.atomic_files import replacing
from distloop.log import log
from distloop.monitoring.records import read_json
from distloop.settings.config import Config

FILE = "run_id.json"


class _Identity(NamedTuple):
    run: str
    place: str


def read(workdir: str, url: str = "") -> str:
    """Returns the name of the run in a directory; empty if it has none, or the directory is a copy.

    Args:
        workdir: the directory.
        url: of the bucket that the files are uploaded to; empty: none.
    """
    identity = _read(workdir)
    return identity.run if identity is not None and identity.place == (url or place(workdir)) else ""


def claim(config: Config, verify: Callable[[], None] = lambda: None) -> str:
    """Returns the name of the run of a config's workdir; makes one if there is none, or the directory is a copy.

    Args:
        config: whose workdir exists, and is not empty.
        verify: called before the file is written; raises if this process may not write.

    Returns:
        The name; empty where it cannot be written: the first save will say so.
    """
    workdir = config.local_workdir
    url = config.workdir if config.workdir != workdir else ""
    with contextlib.suppress(OSError):
        if run := read(workdir, url):
            return run
        if _read(workdir) is not None:
            log.warning("workdir=%r is a copy of another run's: from here on it is a run of its own.", config.workdir)
        run = secrets.token_hex(6)
        with replacing(os.path.join(workdir, FILE), verify=verify) as path, open(path, "w", encoding="utf-8") as file:
            json.dump({"run": run, "place": url or place(workdir)}, file)
        return run
    return ""


def _read(workdir: str) -> _Identity | None:
    path = os.path.join(workdir, FILE)
    return read_json(path, lambda value: _Identity(str(value["run"]), str(value["place"])), instead="a new one is made")


def place(directory: str) -> str:
    """Returns a text that differs between a directory and its copy."""
    return f"inode {os.stat(directory).st_ino}" if _has_lasting_inodes(directory) else os.path.realpath(directory)


def _has_lasting_inodes(path: str) -> bool:
    """Returns whether files keep their inodes while a file system is mounted again, which FUSE does not promise."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            lines = [line.split() for line in file]
    except OSError:
        return True
    return not any(line[2] == number and line[line.index("-") + 1].startswith("fuse") for line in lines)
