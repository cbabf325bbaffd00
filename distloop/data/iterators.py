"""Iterators over datasets that nobody waits for when they end.

    iterator = iterate(dataset)     # in place of iter(dataset)

Deleting an iterator waits for the thread of tf.data that tunes it. That thread sleeps twice as long each time, up to a
minute, and its wake-up call can come too early: of 60 plain iterators 8 seconds old, 4 took from 2 to 41 seconds to
delete. Those of a dataset distributed over several devices always wait for the whole sleep. So threads delete them.
Until then each holds 17 threads and 2 MB on two devices, so a new one waits where very many have ended and are not yet
deleted.
"""

import atexit
import functools
import queue
import threading
import time
import weakref
from typing import Any

_RELEASE_SECS = 0.2  # after which the caller has released every part of a deleted iterator
_EXIT_SECS = 1.0  # the longest that the end of the process waits for deletions
_MOST_ENDED = 50  # iterators that are not yet deleted
_ROOM_SECS = 60.0  # the longest that a new one waits for a deletion

_is_exiting = threading.Event()


def iterate(dataset: Any) -> Any:
    """Returns an iterator that is deleted in a thread, for which the end of the process waits a second at most.

    Args:
        dataset: a `tf.data.Dataset`, or a distributed one.
    """
    deletions = _deletions()
    deletions.wait_for_room()
    iterator = iter(dataset)
    parts = getattr(iterator, "_iterators", None)  # one per worker, if the dataset is distributed
    weakref.finalize(iterator, deletions.add, list(parts) if parts else [iterator._iterator_resource])
    return iterator


@functools.cache
def _deletions() -> "_Deletions":
    atexit.register(_finish)
    return _Deletions(_MOST_ENDED)


class _Deletions:
    """The iterators that have ended and are not yet deleted."""

    def __init__(self, most: int):
        """Starts the thread that waits for them.

        Args:
            most: from this number on, `wait_for_room` waits.
        """
        self._most = most
        self._ended: queue.SimpleQueue[tuple[float, list[Any]]] = queue.SimpleQueue()  # when each ended, its parts
        self._num_deleting = 0  # taken from `_ended` and not yet deleted
        self._changed = threading.Condition()
        threading.Thread(target=self._delete_all, name="distloop-iterators", daemon=True).start()

    def wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait_for(self._has_room, _ROOM_SECS)

    def add(self, parts: list[Any]) -> None:
        self._ended.put((time.monotonic(), parts))

    def _has_room(self) -> bool:
        return self._ended.qsize() + self._num_deleting < self._most or _is_exiting.is_set()

    def _delete_all(self) -> None:
        kept: list[list[Any]] = []
        while True:
            ended_at, parts = self._ended.get()
            with self._changed:
                self._num_deleting += 1
            secs = ended_at + _RELEASE_SECS - time.monotonic()
            time.sleep(min(max(0.0, secs), _RELEASE_SECS))  # tests of users set the clock back
            if _is_exiting.is_set():
                kept.append(parts)
            else:
                threading.Thread(target=self._delete, args=[parts], name="distloop-iterator", daemon=True).start()
            del parts

    def _delete(self, parts: list[Any]) -> None:
        parts.clear()
        with self._changed:
            self._num_deleting -= 1
            self._changed.notify_all()


def _finish() -> None:
    """Begins no more deletions, and waits a moment for those under way.

    A thread that returns from TensorFlow while Python ends would abort the process, with code 134.
    """
    _is_exiting.set()
    deadline = time.monotonic() + _EXIT_SECS
    for thread in threading.enumerate():
        if thread.name == "distloop-iterator" and thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
