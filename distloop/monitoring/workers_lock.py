"""Workers' lock: the chief takes the lock of a workdir; if it is refused, every worker of the run raises.

    with WorkersLock("runs/first", is_chief, gather):       # on every worker
        train()

It does not know how a lock is held.
"""

import contextlib
from collections.abc import Callable, Collection
from typing import Any

from distloop.monitoring.directory import Directory
from distloop.monitoring.run_lock import LockLost, RunLock


class WorkersLock:
    """The lock of a run of one worker or several: the chief takes it, and if it is refused, every worker raises.

    Attributes:
        finish: waits until nothing is being written; called before the lock is released.
        saved: returns the names of the run's checkpoints, to notice those that another process has made since this
            one held the lock last; None: it is not noticed.
    """

    def __init__(
        self,
        workdir: str,
        is_chief: bool,
        gather: Callable[[bool], Any],
        outer: Directory | None = None,
    ):
        """Touches no disk.

        Args:
            workdir: empty: there is nothing to lock.
            is_chief: whether this worker writes the files of the run.
            gather: returns a truth of every worker, on every worker.
            outer: is entered before the lock is taken, and left once it is released; all workers do so.
        """
        self._workdir = workdir
        self._lock = RunLock(workdir) if workdir and is_chief else None
        self._gather = gather
        self._outer = outer or Directory()
        self.finish: Callable[[], None] = lambda: None
        self.saved: Callable[[], Collection[str]] | None = None
        self._seen: set[str] | None = None  # the names when this process looked last
        self._depth = 0

    def __enter__(self) -> None:
        """Takes the lock, as `RunLock`; all workers call it.

        Raises:
            ValueError: if the chief is refused, or another process has saved since it looked last.
        """
        if not self._workdir:
            return
        refusal = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._outer)
            try:
                if self._lock is not None:
                    stack.enter_context(self._lock)
                    self._check()
            except ValueError as error:
                refusal = error
            if any(self._gather(refusal is not None)):
                raise refusal or ValueError(
                    f"The chief may not write to workdir={self._workdir!r}; its own message says why."
                )
            stack.pop_all()  # keeps the lock
            self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Releases the lock once nothing is being written.

        Raises:
            OSError: if it could not be written, unless another error ends the block.
        """
        if not self._workdir:
            return
        try:
            self.finish()
        except OSError:
            if error is None:
                raise
        finally:
            self._depth -= 1
            if self._lock is not None:
                with contextlib.suppress(LockLost, OSError):
                    self._lock.verify()
                    self.look()
                self._lock.__exit__(kind, error, trace)
            self._outer.__exit__(kind, error, trace)

    def look(self) -> None:
        """Notes the names of the run's checkpoints: this process knows of them."""
        if self._lock is not None and self.saved is not None:
            with contextlib.suppress(OSError):
                self._seen = set(self.saved())

    def _check(self) -> None:
        """Raises a ValueError if another process has saved meanwhile; a disk that cannot be read says so later."""
        others: list[str] = []
        with contextlib.suppress(OSError):
            if self.saved is not None and self._seen is not None and not self._depth:
                others = sorted(set(self.saved()) - self._seen)
        if others:
            raise ValueError(
                f"Another process has saved {', '.join(others)} under workdir={self._workdir!r} since this one looked "
                "last, and nothing was written: call restore() to go on from its newest checkpoint, or give another "
                "workdir."
            )

    def verify(self) -> None:
        """Checks that the chief still holds the lock, as `RunLock.verify`; other workers write nothing."""
        if self._lock is not None:
            self._lock.verify()
            self._outer.verify()
