"""Copies of a run's state in the memory of its hosts, for a run that is killed between two checkpoints.

    copies = MemoryCopies(checkpoints, strategy, verify)
    copies.open(is_wanted=True, is_resuming=True)       # puts a newer copy among the checkpoints
    copies.save(520, values, notes)                     # in the background, on the first worker of each host
    copies.delete()                                     # when the last checkpoint is whole

Every worker has the whole state, so each host has a whole copy, and a run can do without any host but one. A copy is a
checkpoint in a directory of /dev/shm, which outlives processes and not its host. `checkpoints/copies.json` in the
workdir has the directory's name: of a workdir that was deleted, nothing comes back. It does not know when copies are
due.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from distloop.atomic_files import delete, make_directory, remove, replacing
from distloop.checkpoints.checkpoint import DamagedError, load
from distloop.checkpoints.store import Checkpoints
from distloop.distributed import workers
from distloop.errors import first_line
from distloop.log import log
from distloop.monitoring.console import say

MEMORY = "/dev/shm"  # of Linux
_NAME = "copies.json"
_MOST_IDS = 2**48  # that a collective of float64 hands on exactly


class MemoryCopies:
    """The copies of one run; those of this host, and what workers agree on about those of others."""

    def __init__(self, checkpoints: Checkpoints, strategy: tf.distribute.Strategy, verify: Callable[[], None]):
        """Touches no disk.

        Args:
            checkpoints: of the run.
            strategy: of the run.
            verify: called before a copy is put among the checkpoints; raises if this process may not write.
        """
        self._checkpoints, self._strategy, self._verify = checkpoints, strategy, verify
        self._copies: Checkpoints | None = None  # None: the run has none
        self._writes = False  # whether this worker is the first one on its host

    def open(self, *, is_wanted: bool, is_resuming: bool) -> None:
        """Finds the copies of the run. All workers call it.

        Args:
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
        number = self._find_number(is_wanted) if workers.is_chief(self._strategy) else 0
        host = int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:6], "big")
        numbers, hosts = workers.gather(self._strategy, [number, host]).T
        if not numbers[0]:
            return
        self._writes = list(hosts).index(host) == workers.worker_index(self._strategy)
        directory = os.path.join(MEMORY, f"distloop-{os.getuid()}-{int(numbers[0]):012x}")
        self._copies = Checkpoints(directory, keep=1, kind="copy in memory")
        if is_resuming:
            self._put_back(self._copies)

    def save(self, step: int, values: Mapping[str, tf.Tensor], notes: Mapping[str, Any]) -> None:
        """Makes a copy in the background; arguments as for `Checkpoints.save`."""
        if self._copies is not None and self._writes:
            make_directory(self._copies.directory)
            os.chmod(self._copies.directory, 0o700)
            self._copies.save(step, values, notes)

    def drop_later(self, step: int) -> None:
        """Deletes copies of later steps, as the run has gone back to this one."""
        if self._copies is not None and self._writes:
            self._copies.join()
            for later in (later for later in self._copies.steps if later > step):
                delete(os.path.join(self._copies.directory, str(later)))

    def delete(self) -> None:
        """Deletes the copies, when the chief has come here and its last checkpoint is whole. All workers call it."""
        if self._copies is None:
            return
        workers.gather(self._strategy, 0.0)
        if self._writes:
            self._copies.join()
            remove(self._copies.directory)

    def _find_number(self, is_wanted: bool) -> int:
        """Returns the number in the name of the directory, drawn at the first call; 0: there are no copies."""
        path = os.path.join(self._checkpoints.directory, _NAME)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            with open(path, encoding="utf-8") as file:
                return int(json.load(file)["number"])
        if not is_wanted:
            return 0
        number = 1 + secrets.randbelow(_MOST_IDS - 1)
        make_directory(self._checkpoints.directory)
        with replacing(path, verify=self._verify) as temporary, open(temporary, "w", encoding="utf-8") as file:
            json.dump({"number": number}, file)
        return number

    def _put_back(self, copies: Checkpoints) -> None:
        """Puts the newest copy of any host among the checkpoints, if these are older."""
        of_disk = self._checkpoints.newest_whole if workers.is_chief(self._strategy) else -1
        steps, of_disks = workers.gather(self._strategy, [copies.newest_whole, of_disk]).T
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
