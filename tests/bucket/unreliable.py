"""A bucket in memory whose requests fail, are slow, are cut short or hang, drawn from a seed, and that can be killed.

with bucket(seed=1) as faults:                       # 30 % of the requests
    ...                                              # at unreliable://bucket/run
with bucket(seed=1, kill_at=17) as faults:           # request 17 is the last one of this machine
    ...
faults.requests                                      # what was asked for, in order
"""

import contextlib
import random
import re
import threading
import time
from unittest import mock

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from distloop.bucket import remote_directory as directory
from distloop.bucket import upload

URL = "unreliable://bucket/run"
_nested = threading.local()


class Killed(BaseException):
    """The machine is gone."""


class Faults:
    """What befalls the requests.

    Attributes:
        requests: kind and path of each, in order.
        is_dead: whether the machine is gone.
    """

    def __init__(self, seed=0, share=0.3, kill_at=-1):
        self.requests, self.is_dead = [], False
        self._random, self._share, self._kill_at = random.Random(seed), share, kill_at
        self._mutex = threading.Lock()

    def draw(self, kind, path):
        """Returns what befalls a request: nothing, or a fault."""
        with self._mutex:
            self.requests.append((kind, path))
            if self.is_dead or len(self.requests) - 1 == self._kill_at:
                is_first, self.is_dead = not self.is_dead, True
                return "killed in the middle" if is_first and self._random.random() < 0.5 else "killed"
            if self._random.random() >= self._share:
                return None
            return self._random.choice(["fails", "fails", "fails", "answer lost", "slow", "cut short", "cut short"])


class Unreliable(MemoryFileSystem):
    """Files in memory, behind requests to which `faults` happen."""

    protocol = "unreliable"
    store, pseudo_dirs = {}, [""]
    faults = Faults(share=0.0)
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("unreliable://"))

    def _request(self, kind, path, do, cut=None):
        if getattr(_nested, "is_on", False):
            return do()
        _nested.is_on = True
        try:
            fault = self.faults.draw(kind, path)
            if fault == "slow":
                time.sleep(0.002)
            if fault in ("cut short", "killed in the middle") and cut is not None:
                result = cut()
                if fault == "cut short":
                    return result
            if fault in ("killed", "killed in the middle"):
                raise Killed
            if fault in ("fails", "cut short"):
                raise OSError(f"503 Slow Down: {kind}")
            result = do()
            if fault == "answer lost":
                raise OSError(f"connection reset: {kind}")
            return result
        finally:
            _nested.is_on = False

    def _whole(kind, name=None):
        """A method of the file system, as a request that cannot be cut short."""

        def method(self, path, *arguments, **options):
            call = getattr(super(), name or kind)
            return self._request(kind, path, lambda: call(path, *arguments, **options))

        return method

    find, info, makedirs = _whole("find"), _whole("info"), _whole("makedirs")
    cp_file, rm_file = _whole("copy", "cp_file"), _whole("rm", "_rm")

    def cat_file(self, path, *arguments, **options):
        def read():
            return super(Unreliable, self).cat_file(path, *arguments, **options)

        def read_half():
            return read()[: len(read()) // 2]

        return self._request("cat", path, read, read_half)

    def pipe_file(self, path, value, mode="overwrite", **options):
        write = super().pipe_file
        if mode == "create":  # a store writes what it creates whole or not at all
            self._request("create", path, lambda: write(path, value, mode))
        else:
            self._request("pipe", path, lambda: write(path, value), lambda: write(path, value[: len(value) // 2]))

    def put_file(self, local, path, **options):
        with open(local, "rb") as file:
            data = file.read()
        write = super().pipe_file
        self._request("put", path, lambda: write(path, data), lambda: write(path, data[: len(data) // 2]))

    def get_file(self, path, local, **options):
        def get(share=1.0):
            data = super(Unreliable, self).cat_file(path)
            with open(local, "wb") as file:
                file.write(data[: int(len(data) * share)])

        self._request("get", path, get, lambda: get(0.5))

    def mv(self, path, new, **options):
        path, new = self._strip_protocol(path), self._strip_protocol(new)

        def move():
            if path not in self.store:
                raise FileNotFoundError(path)
            self.store[new] = self.store.pop(path)

        self._request("mv", path, move)


@contextlib.contextmanager
def bucket(seed=0, share=0.3, kill_at=-1):
    """Yields the faults of the requests to `unreliable://`, which are tried again at once while the block runs."""
    fsspec.register_implementation("unreliable", Unreliable, clobber=True)
    faults = Faults(seed, share, kill_at)
    with (
        mock.patch.object(Unreliable, "faults", faults),
        mock.patch.object(directory, "_PAUSES_SECS", (0.0,) * 24),
        mock.patch.object(upload, "PASS_SECS", 0.001),
    ):
        yield faults


def sealed_steps(files):
    """Returns the steps of the checkpoints in a bucket that have their manifest, in ascending order."""
    found = (re.fullmatch(r"checkpoints/(\d+)/manifest\.json", path) for path in files)
    return sorted(int(match[1]) for match in found if match)


def empty():
    """Deletes all files of the bucket."""
    Unreliable.store.clear()
    Unreliable.pseudo_dirs[:] = [""]
