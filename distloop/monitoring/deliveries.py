"""Deliveries: every row of a run to each of the user's writers, once, over stops, kills and failures of the writer.

    deliveries = Deliveries([WandbWriter(project="digits")], workdir)
    with deliveries.open(step, settings):       # first the rows that a writer lacks: it failed, or is new to the run
        deliveries.write(500, {"loss": 0.12}, time.time())
        deliveries.flush()

`writers.json` in the workdir holds the step of the last row that each writer took. After a kill, rows that are computed
again are not handed over again, and rows that were not handed over come from `metrics.jsonl`. A kill in the moment
between a writer's return and the note repeats that row, unless the writer has a `last_step`. Each writer has a thread:
a slow one holds up neither steps nor saves. This module does not know what a writer does.
"""

import contextlib
import functools
import json
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from distloop.log import log
from distloop.monitoring.json_writer import rows_between
from distloop.monitoring.records import as_number

_MAX_ROWS = 10_000  # that are kept while a writer fails
_CLOSE_SECS = 60.0  # that the end of a run waits for a writer
_LEAVE_SECS = 5.0  # that an interrupted or failed one does


class Writer(Protocol):
    """Receives the rows of a run: `fit(..., writers=[writer])`; only `write` and `close` are required.

    All calls come from one thread, which is not the main one, and on several workers on the chief alone.

    Attributes:
        name: the workdir notes under it which rows the writer has; two writers of a run need different ones. Empty:
            the name of the class.
        last_step: after `open`: the step of the last row that the writer has; None: unknown.
    """

    name: str = ""
    last_step: int | None = None

    def open(self, settings: Mapping[str, Any], run_id: str | None) -> str | None:
        """Prepares for the rows of a call of `fit`.

        Args:
            settings: of the run, by name, with `workdir`; secret ones are `***`.
            run_id: what `open` returned for this workdir before; None: nothing, or there is no workdir.

        Returns:
            A text that identifies the run where the rows go, for the next `open`; None: there is none.
        """
        return None

    def write(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        """Receives a row; after an error it comes again with the next one.

        Args:
            step: of the numbers.
            numbers: by name, as in `metrics.jsonl`.
            time: when the step ended; Unix, seconds.
        """

    def on_error(self, error: BaseException) -> None:
        """Receives the error or interruption that ended `fit`, before `close`."""

    def close(self) -> None:
        """Ends the rows of a call of `fit`."""


class Row(NamedTuple):
    """What a writer receives."""

    step: int
    numbers: dict[str, float]
    time: float


class Deliveries:
    """Hands rows to writers, each in a thread of its own; also a file writer for `actions.write.Write`.

    Attributes:
        path: the name of the file with the notes.
    """

    path = "writers.json"

    def __init__(self, writers: Sequence[Any], workdir: str):
        """Reads the notes about the rows that the writers have.

        Args:
            writers: as `Writer`; their names differ.
            workdir: empty: there are no notes.
        """
        self._workdir = workdir
        notes = _Notes(os.path.join(workdir, self.path) if workdir and writers else "")
        self._deliveries = [_Delivery(writer, notes) for writer in writers]
        self._rows: list[Row] = []  # since the last flush

    def open(self, step: int, settings: Mapping[str, Any], *, is_over: bool = False) -> "Deliveries":
        """Opens the writers, and hands over the rows up to a step that they lack.

        Args:
            step: where the run goes on.
            settings: as for `Writer.open`.
            is_over: whether no rows will follow: only writers that lack rows are opened.

        Raises:
            ValueError: if a writer cannot be opened.
        """
        rows_path = os.path.join(self._workdir, "metrics.jsonl")
        with contextlib.ExitStack() as stack:
            stack.push(self)  # closes those that are open if another one fails
            for delivery in self._deliveries:
                lacking = rows_between(rows_path, delivery.step, step) if self._workdir and step else []
                if lacking or not is_over:
                    delivery.open(settings)
                    delivery.put([_row(row) for row in lacking])
                if delivery.step > 0 == step:
                    log.warning(
                        "%s has the rows up to step %d and gets those after it; remove %r to begin anew.",
                        *(delivery.name, delivery.step, os.path.join(self._workdir, self.path)),
                    )
            stack.pop_all()
        return self

    def write(self, step: int, metrics: Mapping[str, float], when: float) -> None:
        """Adds a row to those of the next flush."""
        self._rows.append(Row(int(step), {name: float(value) for name, value in metrics.items()}, when))

    def flush(self) -> None:
        """Passes the rows on to the threads of the writers, and waits for none of them."""
        rows, self._rows = self._rows, []
        for delivery in self._deliveries if rows else ():
            delivery.put(rows)

    def discard(self, step: int) -> None:
        """Forgets the rows from a step on that no writer has taken; they are written again."""
        self._rows = [row for row in self._rows if row.step < step]
        for delivery in self._deliveries:
            delivery.discard(step)

    def close(self) -> None:
        """Does nothing: if the run goes back to a checkpoint, the writers stay open."""

    def __enter__(self) -> "Deliveries":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits until the writers have their rows, and closes them."""
        self.flush()
        for delivery in self._deliveries:
            delivery.begin_to_close(error)
        for delivery in self._deliveries:
            delivery.wait(_CLOSE_SECS if error is None else _LEAVE_SECS)


class _Notes:
    """What the workdir notes of each writer, by its name: the `step` of its last row, and the `id` of its run."""

    def __init__(self, path: str):
        """Reads the file; an empty path: nothing is kept."""
        self._path = path
        self._lock = threading.Lock()  # each writer has a thread
        self._notes: dict[str, dict[str, Any]] = {}
        if path and os.path.isfile(path):
            try:
                with open(path, encoding="utf-8") as file:
                    self._notes = {
                        name: {"step": int(note["step"]), "id": note["id"]} for name, note in json.load(file).items()
                    }
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                log.warning("%r cannot be read: writers get all rows, also those that they have.", path)

    def get(self, name: str) -> tuple[int, str | None]:
        """Returns the step and the id of a writer."""
        note = self._notes.get(name, {"step": -1, "id": None})
        return note["step"], note["id"]

    def set(self, name: str, step: int, run_id: str | None) -> None:
        """Replaces the note of a writer."""
        with self._lock:
            self._notes[name] = {"step": step, "id": run_id}
            if self._path:
                # The system call survives this process; a disk that fails is noticed by those who write rows.
                with contextlib.suppress(OSError):
                    with open(f"{self._path}.tmp", "w", encoding="utf-8") as file:
                        json.dump(self._notes, file)
                    os.replace(f"{self._path}.tmp", self._path)


class _Delivery:
    """Rows on their way to one writer, in a thread that only waits for it.

    Attributes:
        name: of the writer.
        step: of the last row that it has.
    """

    def __init__(self, writer: Any, notes: _Notes):
        self.name = name_of(writer)
        self.step, self._run_id = notes.get(self.name)
        self._writer, self._notes = writer, notes
        self._rows: deque[Row] = deque()  # that the writer lacks
        self._num_lost = 0
        self._is_failing = False
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def open(self, settings: Mapping[str, Any]) -> None:
        """Starts the thread, and opens the writer in it.

        Raises:
            ValueError: if that fails.
        """
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"distloop {self.name}")
        self._thread.start()
        opened: Future[None] = Future()
        self._tasks.put(functools.partial(self._open, settings, opened))
        try:
            opened.result()
        except Exception as error:
            self._tasks.put(None)
            self._thread = None
            raise ValueError(
                f"The writer {self.name} cannot be opened ({_show(error)}): correct it, or leave it out of "
                "fit(writers=...)."
            ) from error

    def put(self, rows: Sequence[Row]) -> None:
        """Hands rows over, after those before."""
        self._tasks.put(functools.partial(self._take, rows))

    def discard(self, step: int) -> None:
        """Forgets the rows from a step on that the writer has not taken."""
        self._tasks.put(functools.partial(self._discard, step))

    def begin_to_close(self, error: BaseException | None) -> None:
        """Closes the writer after its rows; an error is the one that ended the run."""
        if self._thread is not None:
            self._tasks.put(functools.partial(self._close, error))
            self._tasks.put(None)

    def wait(self, secs: float) -> None:
        """Waits until the writer is closed, and logs what it lacks."""
        if self._thread is None:
            return
        self._thread.join(secs)
        is_slow = self._thread.is_alive()
        if count := self._num_lost + len(self._rows):
            log.error("%s lacks %d rows after step %d.", self.name, count, self.step)
        elif is_slow:
            log.error("%s has not closed in %g seconds; the program goes on.", self.name, secs)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _open(self, settings: Mapping[str, Any], opened: "Future[None]") -> None:
        try:
            if hasattr(self._writer, "open"):
                self._run_id = self._writer.open(settings, self._run_id)
            if (last_step := getattr(self._writer, "last_step", None)) is not None:
                self.step = max(self.step, int(last_step))
            self._notes.set(self.name, self.step, self._run_id)
            opened.set_result(None)
        except BaseException as error:
            opened.set_exception(error)

    def _take(self, rows: Sequence[Row]) -> None:
        self._rows.extend(rows)
        while len(self._rows) > _MAX_ROWS and self._is_failing:
            self._rows.popleft()
            self._num_lost += 1
        self._hand_over()

    def _hand_over(self) -> None:
        """Hands over all rows, in order, up to the first that the writer does not take."""
        while self._rows:
            row = self._rows[0]
            if row.step > self.step:
                try:
                    self._writer.write(row.step, dict(row.numbers), row.time)
                except Exception as error:
                    if not self._is_failing:
                        log.error(
                            "%s failed at step %d (%s): the run goes on, and its rows are kept until it takes them.",
                            *(self.name, row.step, _show(error)),
                        )
                    self._is_failing = True
                    return
                self.step = row.step
                self._notes.set(self.name, self.step, self._run_id)
            self._rows.popleft()
        if self._is_failing:
            log.warning("%s takes rows again.", self.name)
        self._is_failing = False

    def _discard(self, step: int) -> None:
        self._rows = deque(row for row in self._rows if row.step < step)

    def _close(self, error: BaseException | None) -> None:
        self._hand_over()
        try:
            if error is not None and hasattr(self._writer, "on_error"):
                self._writer.on_error(error)
            self._writer.close()
        except Exception as failure:
            log.error("%s cannot be closed (%s).", self.name, _show(failure))


def check_writers(writers: Any) -> None:
    """Checks what `fit` was given as writers.

    Raises:
        ValueError: if they are something else, or two have the same name.
    """
    if not isinstance(writers, Sequence):
        raise ValueError(f"writers={writers!r} was given; fit takes a list of writers: writers=[writer].")
    for writer in writers:
        if not (callable(getattr(writer, "write", None)) and callable(getattr(writer, "close", None))):
            raise ValueError(
                f"The writer {writer!r} was given; a writer is an object with write(step, numbers, time) and close()."
            )
    names = [name_of(writer) for writer in writers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"Two writers are called {twice[0]!r}, and the workdir notes by name which rows a writer has: give one of "
            "them another attribute `name`."
        )


def name_of(writer: Any) -> str:
    """Returns the name under which the workdir keeps notes of a writer."""
    return str(getattr(writer, "name", "") or type(writer).__name__)


def _show(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.200}" if text else type(error).__name__


def _row(record: Mapping[str, Any]) -> Row:
    """Returns a row of `metrics.jsonl`, where null stands for nan."""
    numbers = {name: as_number(value) for name, value in record.items() if name not in ("step", "time")}
    return Row(record["step"], numbers, as_number(record.get("time")))
