"""Stands in for Ray in test_ray_actors.py: actors are threads, as many as a file says that there is room for."""

import concurrent.futures
import os
import threading
import time
import types


class RayError(Exception):
    pass


exceptions = types.SimpleNamespace(RayError=RayError)
util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
_placed = []  # actors, the first ones to stay
_lock = threading.Lock()


def _room():
    with open(os.environ["FAKE_RAY_ROOM"]) as file:
        return int(file.read() or 0)


class _Actor:
    def __init__(self, kind):
        self._kind, self._thread = kind, concurrent.futures.ThreadPoolExecutor(1)
        self._is_dead, self._object = threading.Event(), None
        self._thread.submit(self._place)

    def _place(self):
        while not self._is_dead.wait(0.05):
            with _lock:
                if len(_placed) < _room():
                    _placed.append(self)
                    self._object = self._kind()
                    return

    def __getattr__(self, name):
        return types.SimpleNamespace(remote=lambda *arguments: self._thread.submit(self._call, name, arguments))

    def _call(self, name, arguments):
        if self._object is not None and self in _placed[_room() :]:
            kill(self)
        if self._is_dead.is_set():
            raise RayError
        return getattr(self._object, name)(*arguments)


def init():
    pass


def cluster_resources():
    return {"CPU": 2.0}


def remote(**_):
    return lambda kind: types.SimpleNamespace(remote=lambda: _Actor(kind))


def wait(looks, num_returns, timeout):
    ends_at = time.monotonic() + timeout
    while len(done := [look for look in looks if look.done()]) < num_returns and time.monotonic() < ends_at:
        time.sleep(0.01)
    return done, []


def get(look):
    return look.result()


def kill(actor):
    actor._is_dead.set()
    with _lock:
        if actor in _placed:
            _placed.remove(actor)
            actor._object._guard.__exit__()


def shutdown():
    pass
