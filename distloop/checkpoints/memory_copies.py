"""Copies of a run's state in the memory of its hosts, for a run that is killed between two checkpoints.

    copies = MemoryCopies(checkpoints, strategy, verify)
    copies.open(is_wanted=True, is_resuming=True)       # puts a newer copy among the checkpoints
    copies.save(520, values, notes)                     # in the background, on the first worker of each host
    copies.delete()                                     # when the last checkpoint is whole

Every worker has the whole state, so each host has a whole copy, and a run can do without any host but one. A copy is a
checkpoint in a directory of /dev/shm, which outlives processes and not its host. `checkpoints/copies.json` in the
workdir has the directory's random name and the run's, and the directory has that, too: a copied workdir gets another
directory, and so does a run that has gone back. What somebody else may write to is not believed. A later run with
copies deletes those of workdirs that are gone.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from distloop.atomic_files import delete, is_private, make_directory, open_at_once, remove, replacing
from distloop.checkpoints.checkpoint import DamagedError, load
from distloop.checkpoints.store import Checkpoints
from distloop.distributed import workers
from distloop.errors import first_line
from distloop.log import log
from distloop.monitoring.console import say

MEMORY = "/dev/shm"  # of Linux
_NAME = "copies.json"
_OWNER = "workdir.json"  # in a directory of copies: whose they are; its process holds a lock on it
_MOST_IDS = 2**48  # of 12 hexadecimal digits


class MemoryCopies:
    """The copies of one run; those of this host, and what workers agree on about those of others."""

    def __init__(self, checkpoints: Checkpoints, strategy: tf.distribute.Strategy, verify: Callable[[], None]):
        """Touches no disk; `verify` raises if this process may not put a copy among the checkpoints."""
        self._checkpoints, self._strategy, self._verify = checkpoints, strategy, verify
        self._copies: Checkpoints | None = None  # None: the run has none
        self._writes = False  # whether this worker is the first one on its host
        self._lock: int | None = None  # a descriptor, from the first copy on
        self._run = ""  # the name of the run
        self.has_gone_back = False  # to another checkpoint than the newest; the next save begins other copies

    def open(self, *, is_wanted: bool, is_resuming: bool, run: str = "") -> None:
        """Finds the copies of the run. All workers call it.

        Args:
            run: the name of the run, from `claim_run`, as the chief knows it.
            is_wanted: whether to make copies from now on, where there are none.
            is_resuming: whether to put the newest one among the checkpoints, if it is newer than those.

        Raises:
            ValueError: if they are wanted on a machine without a directory in memory.
        """
        if self._copies is not None:
            return
        if is_wanted and not os.path.isdir(MEMORY):
            raise ValueError(
                f"copy_every was given, but this machine has no {MEMORY}, where Linux keeps files in memory: give "
                "copy_every=0, and a smaller checkpoint_every."
            )
        of_all = workers.Workers(self._strategy)
        self._run = of_all.broadcast(run)
        number = of_all.broadcast(self._find_number(is_wanted) if of_all.is_chief else 0)
        if not number:
            return
        self._writes = of_all.gather(socket.gethostname()).index(socket.gethostname()) == of_all.index
        self._copies = self._in_memory(number)
        if self._writes and is_wanted:
            for path in left_in_memory():
                remove(path)
        if is_resuming:
            self._put_back(self._copies)

    def save(self, step: int, values: Mapping[str, tf.Tensor], notes: Mapping[str, Any]) -> None:
        """Makes a copy in the background; arguments as for `Checkpoints.save`."""
        if self._copies is not None and self._writes:
            try:
                self._claim(self._copies.directory)
            except OSError as error:
                self._writes = False
                sentence = "No copies in memory are made on %s (%s): training goes on, with checkpoints on the disk."
                log.error(sentence, socket.gethostname(), first_line(error))
                return
            self._copies.save(step, values, notes)

    def drop_later(self, step: int) -> None:
        """Deletes copies of later steps, as the run has gone back to this one. All workers call it."""
        if self._copies is None:
            return
        if self.has_gone_back:  # hosts that are away now may have copies of what was left
            self.has_gone_back = False
            of_all = workers.Workers(self._strategy)
            if number := of_all.broadcast(self._draw() if of_all.is_chief else 0):
                if self._writes:
                    self._remove()
                self._copies = self._in_memory(number)
                return
        if self._writes:
            self._copies.join()
            with contextlib.suppress(OSError):
                for later in (later for later in self._copies.steps if later > step):
                    delete(os.path.join(self._copies.directory, str(later)))

    def delete(self) -> None:
        """Deletes the copies, when the chief has come here and its last checkpoint is whole. All workers call it."""
        if self._copies is None:
            return
        workers.gather(self._strategy, 0.0)
        if self._writes:
            self._remove()

    def _remove(self) -> None:
        assert self._copies is not None
        self._copies.join()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if _is_ours(self._copies.directory):
            remove(self._copies.directory)

    def _in_memory(self, number: int) -> Checkpoints:
        path = os.path.join(MEMORY, f"distloop-{os.getuid()}-{number:012x}")
        return Checkpoints(path, keep=1, kind="copy in memory")

    def _claim(self, directory: str) -> None:
        """Makes the directory of the copies, and notes there whose they are, while this process is alive.

        Raises:
            OSError: if it cannot be made, or is somebody else's.
        """
        if self._lock is not None and os.path.isdir(directory):
            return
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        if not _is_ours(directory):
            raise PermissionError(f"{directory} is not a directory that this user alone may write to")
        if not self._is_of_run(directory):  # its copies are of another run
            remove(directory)
            os.mkdir(directory, 0o700)
        if self._lock is not None:
            os.close(self._lock)
        self._lock = os.open(os.path.join(directory, _OWNER), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        path = os.path.realpath(os.path.dirname(self._checkpoints.directory))
        parent = os.path.dirname(path)  # which another host than the chief's may lack
        device = os.stat(parent).st_dev if os.path.isdir(parent) else None
        owner = {"path": path, "device": device, "mounts": _mounts(), "run": self._run}
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, json.dumps(owner).encode(), 0)

    def _find_number(self, is_wanted: bool) -> int:
        """Returns the number in the name of the directory, drawn at the first call; 0: there are no copies."""
        found = _read(os.path.join(self._checkpoints.directory, _NAME))
        with contextlib.suppress(ValueError, KeyError, TypeError):
            number = int(found["number"])
            if 0 < number < _MOST_IDS and found.get("run", self._run) == self._run:  # older versions noted none
                return number
        return self._draw() if is_wanted else 0

    def _draw(self) -> int:
        """Returns a new number, which is noted in the workdir; 0: it cannot be noted."""
        number = 1 + secrets.randbelow(_MOST_IDS - 1)
        path = os.path.join(self._checkpoints.directory, _NAME)
        try:
            make_directory(self._checkpoints.directory)
            with replacing(path, verify=self._verify) as temporary, open(temporary, "w", encoding="utf-8") as file:
                json.dump({"number": number, "run": self._run}, file)
        except OSError as error:
            log.error("%s cannot be written (%s): no new copies in memory are begun.", path, first_line(error))
            return 0
        return number

    def _put_back(self, copies: Checkpoints) -> None:
        """Puts the newest copy of any host among the checkpoints, if these are older."""
        of_disk = self._checkpoints.newest_whole if workers.is_chief(self._strategy) else -1
        steps, of_disks = workers.gather(self._strategy, [self._newest(copies.directory), of_disk]).T
        if (step := int(steps.max())) <= of_disks[0]:
            return
        if int(steps.argmax()) == workers.worker_index(self._strategy):  # maybe not the chief, which waits
            path, copy = (os.path.join(place.directory, str(step)) for place in (self._checkpoints, copies))
            try:
                load(copy)
                with replacing(path, verify=self._verify) as temporary:
                    shutil.copytree(copy, temporary)
                say(f"step {step} was kept in the memory of {socket.gethostname()}; it is now in {path}")
            except (DamagedError, OSError) as error:
                log.error("%s. So the run goes on from the newest checkpoint, not from its copy.", first_line(error))
        workers.gather(self._strategy, 0.0)

    def _newest(self, directory: str) -> int:
        """Returns the step of the newest copy of this run on this host; -1: there is none."""
        with contextlib.suppress(OSError):
            if not os.path.lexists(directory):
                return -1
            if not _is_ours(directory):
                log.error("%s is not used: not this user alone may write to it.", directory)
            elif self._is_of_run(directory):
                return self._in_memory(int(directory.rpartition("-")[2], 16)).newest_whole
        return -1

    def _is_of_run(self, directory: str) -> bool:
        """Returns whether copies are of this run; older versions did not note it."""
        return bool(_read(os.path.join(directory, _OWNER)).get("run", self._run) == self._run)


def left_in_memory() -> list[str]:
    """Returns the directories of this user's copies whose workdir is gone, or has begun others."""
    result = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(MEMORY)):
            path = os.path.join(MEMORY, name)
            if (match := re.fullmatch(rf"distloop-{os.getuid()}-([0-9a-f]{{12}})", name)) and _is_ours(path):
                place = _read(os.path.join(path, _OWNER))
                is_seen = place.get("mounts") == _mounts()  # else a container may have the workdir, and this one not
                if is_seen and not _is_in_use(path) and not _lives(place, int(match[1], 16)):
                    result.append(path)
    return result


def _lives(place: Mapping[str, Any], number: int) -> bool:
    """Returns whether the run of copies may be there, also under another name beside its old one."""
    try:
        workdir = parent = str(place["path"])
        while not os.path.isdir(parent := os.path.dirname(parent)):
            pass
        if os.stat(parent).st_dev != place["device"]:  # of the parent: a disk that is not mounted now
            return True
        beside = [os.path.join(parent, name) for name in os.listdir(parent)]
    except (OSError, KeyError):
        return True
    files = [os.path.join(path, "checkpoints", _NAME) for path in [workdir, *beside]]
    return any(_read(file).get("number", number) == number for file in files if os.path.lexists(file))


def _is_in_use(directory: str) -> bool:
    """Returns whether a process is alive that makes copies there."""
    with open(os.path.join(directory, _OWNER), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _mounts() -> str:
    """Returns a text that processes have in common which see the same directories; each container has another one."""
    try:
        return os.readlink("/proc/self/ns/mnt")
    except OSError:
        return "unknown"


def _is_ours(directory: str) -> bool:
    """Returns whether a directory is one that this user alone may write to, and no link to one."""
    return os.path.isdir(directory) and not os.path.islink(directory) and is_private(directory)


def _read(path: str) -> dict[str, Any]:
    """Returns the content of a small file; empty if it is missing, damaged or another user's."""
    try:
        with open_at_once(path) as file:
            content = json.loads(file.read())
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}
