"""Workers' lock: the chief takes the lock of a workdir; if it is refused, every worker of the run raises.

    with WorkersLock("runs/first", is_chief, gather):       # on every worker
        train()

It does not know how a lock is held.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from distloop.monitoring.run_lock import RunLock


class Outer:
    """What else a run needs in order to write its files; this one is always there."""

    def __enter__(self) -> None:
        """Gets it."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Gives it back."""

    def verify(self) -> None:
        """Checks that this process still has it; raises as `RunLock.verify` if not."""


class WorkersLock:
    """The lock of a run of one worker or several: the chief takes it, and if it is refused, every worker raises."""

    def __init__(
        self,
        workdir: str,
        is_chief: bool,
        gather: Callable[[bool], Any],
        finish: Callable[[], None] = lambda: None,
        outer: Outer | None = None,
    ):
        """Touches no disk.

        Args:
            workdir: empty: there is nothing to lock.
            is_chief: whether this worker writes the files of the run.
            gather: returns a truth of every worker, on every worker.
            finish: waits until nothing is being written; called before the lock is released.
            outer: is entered before the lock is taken, and left once it is released; all workers do so.
        """
        self._workdir = workdir
        self._lock = RunLock(workdir) if workdir and is_chief else None
        self._gather = gather
        self._finish = finish
        self._outer = outer or Outer()

    def __enter__(self) -> None:
        """Takes the lock, as `RunLock`; all workers call it.

        Raises:
            ValueError: if the chief is refused.
        """
        if not self._workdir:
            return
        refusal = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._outer)
            try:
                if self._lock is not None:
                    stack.enter_context(self._lock)
            except ValueError as error:
                refusal = error
            if any(self._gather(refusal is not None)):
                raise refusal or ValueError(
                    f"The chief may not write to workdir={self._workdir!r}; its own message says why."
                )
            stack.pop_all()  # keeps the lock

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Releases the lock once nothing is being written.

        Raises:
            OSError: if it could not be written, unless another error ends the block.
        """
        if not self._workdir:
            return
        try:
            self._finish()
        except OSError:
            if error is None:
                raise
        finally:
            if self._lock is not None:
                self._lock.__exit__(kind, error, trace)
            self._outer.__exit__(kind, error, trace)

    def verify(self) -> None:
        """Checks that the chief still holds the lock, as `RunLock.verify`; other workers write nothing."""
        if self._lock is not None:
            self._lock.verify()
            self._outer.verify()
