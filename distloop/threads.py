"""Threads: makes things once for all threads, and a gate at which threads wait.

    @once
    def _threads() -> ThreadPoolExecutor: ...

    for batch in gate.through(batches): ...     # in a thread that reads ahead
    with gate: ...                              # in the call that the batches are for; behind it, no thread reads

`functools.cache` calls a function twice where two threads ask before it has returned.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SHUT_SECS = 1.0  # the longest that the end of a call waits for the user's code
_END = object()
_REPLACING = threading.RLock()


def once(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns a function that calls `make` once for each set of arguments; threads that ask meanwhile wait."""
    making, made = threading.RLock(), functools.cache(make)

    @functools.wraps(made)
    def get(*arguments: _P.args, **options: _P.kwargs) -> _T:
        with making:
            return made(*arguments, **options)  # type: ignore[arg-type]

    return get


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Enters a scope, of one thread at a time, with another value of an attribute."""
    with _REPLACING:
        original = getattr(owner, name)
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, original)


class Gate(contextlib.ContextDecorator):
    """Lets threads that read ahead run the user's code, one at a time, while some call needs what they read."""

    def __init__(self) -> None:
        """Opens the gate, until the end of the first call."""
        self._is_kept = False
        self._changed = threading.Condition()
        # `_num_running` counts threads inside the user's code, which makes a batch or is closed.
        self._num_calls, self._is_open, self._num_running = 0, True, 0
        self._readings: dict[object, Iterator[Any]] = {}
        self._waiting: list[object] = []  # the keys of readings, the next one first

    def __enter__(self) -> None:
        """Begins a call, in which threads may pass."""
        with self._changed:
            self._num_calls += 1
            self._is_open = True
            self._changed.notify_all()

    def __exit__(self, *_: object) -> None:
        """Ends a call; the last one waits until the user's code does not run, or for a second."""
        with self._changed:
            self._num_calls -= 1
            self._is_open = self._num_calls > 0
            self._changed.wait_for(lambda: self._is_open or not self._num_running, _SHUT_SECS)
        if not (self._is_open or self._is_kept):
            self.end()

    def keep_readings(self, owner: object, is_kept: bool) -> None:
        """Decides whether what was begun ends with the last call, or goes on with the next one; an owner ends it."""
        self._is_kept = is_kept
        weakref.finalize(owner, self.end).atexit = False

    def end(self) -> None:
        """Ends what was begun, without waiting: whoever asks for more of it gets an error."""
        with self._changed:
            ended, self._readings = self._readings, {}
            self._changed.notify_all()
        del ended  # generators that wait for the next batch are closed here

    def through(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields batches, each made while the gate is open."""
        key = object()
        self._readings[key] = batches
        del batches  # closed by whoever removes it
        try:
            while True:
                with self._changed:
                    self._waiting.append(key)
                    self._changed.wait_for(lambda: key not in self._readings or self._may_pass(key))
                    self._waiting.remove(key)
                    self._changed.notify_all()
                    if key not in self._readings:
                        raise RuntimeError("The call that needed these batches has ended.")
                    reading, self._num_running = self._readings[key], self._num_running + 1
                try:
                    batch = next(reading, _END)
                finally:
                    del reading
                    self._stop_running()
                if batch is _END:
                    return
                yield batch
        finally:
            with self._changed:
                ended, self._num_running = self._readings.pop(key, None), self._num_running + 1
            del ended  # a generator that has not come to its end is closed here
            self._stop_running()

    def _stop_running(self) -> None:
        with self._changed:
            self._num_running -= 1
            self._changed.notify_all()

    def _may_pass(self, key: object) -> bool:
        return self._is_open and not self._num_running and self._waiting[0] is key
