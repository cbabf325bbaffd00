"""Deliveries: hands every row of a run to each of the user's writers, in order, also after stops and kills.

    deliveries = Deliveries([WandbWriter(project="digits")], workdir)
    with deliveries.open(step, settings):       # first the rows that a writer lacks: it failed, or is new to the run
        deliveries.write(500, {"loss": 0.12}, time.time())
        deliveries.flush()
        deliveries.write_files(lambda: [RunFile("best/loss", "run/checkpoints/400", 400)])  # at the end of the run

`writers.json` in the workdir holds the last row that each writer has taken, as of some seconds ago: a writer may keep
later ones in a buffer, which a kill takes. After a kill these come again, from the run or from `metrics.jsonl`. One
thread calls the writers, so they hold up neither steps nor saves.
"""

import contextlib
import functools
import json
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from distloop.log import log
from distloop.monitoring.json_writer import rows_between
from distloop.monitoring.records import as_number, read_json
from distloop.monitoring.writers import MediaFile, RunFile, name_of

if TYPE_CHECKING:
    from distloop.monitoring.media import Media

_BUFFER_SECS = 10.0  # that a writer may keep a row, at most, before it is safe from a kill
_MAX_ROWS = 10_000  # that are kept while a writer fails
_OPEN_SECS = 30.0  # that a run waits until the writers are open
_CLOSE_SECS = 60.0  # that the end of a run waits for the writers
_FILES_SECS = 600.0  # that it waits if they have got files
_LEAVE_SECS = 5.0  # that an interrupted or failed one does


class SentRow(NamedTuple):
    """The numbers and media of one step for a writer."""

    step: int
    numbers: Mapping[str, float]
    time: float
    media: Mapping[str, MediaFile] = {}


@dataclass
class Note:
    """The note about a writer in the workdir.

    Attributes:
        step: of the last row that it has for sure; -1: it has none.
        id: what its `open` returned.
        is_open: whether it was opened and not closed: a process was killed.
        files: when each file that it has was changed last, by its key.
        run: whose rows it has, so that a copied workdir begins anew; empty: unknown, from an earlier version.
    """

    step: int = -1
    id: str | None = None
    is_open: bool = False
    files: dict[str, int] = field(default_factory=dict)
    run: str = ""


class Delivery:
    """Rows, media and files on their way to one writer; all but the constructor and `lacks` belong to the thread.

    Attributes:
        step: of the last row that the writer took; `note.step` is of a while ago.
        rows: that it lacks, but for `num_lost` that were given up.
        settings: for `Writer.open`; None: it was not asked to open.
    """

    def __init__(self, writer: Any, note: Note, save: Callable[[], None]):
        """Stores the writer, its note, and what writes the notes."""
        self.name, self.note, self.step = name_of(writer), note, note.step
        self.takes_media, self._takes_files = hasattr(writer, "write_media"), hasattr(writer, "write_file")
        self.rows: deque[SentRow] = deque()
        self.num_lost = 0
        self.settings: Mapping[str, Any] | None = None
        self.is_failing = self._fails_at_media = self._is_open = False
        self._writer, self._save = writer, save
        self._taken, self._noted_at = note.step, time.monotonic()  # the last row when notes were written, and when
        self._files: dict[str, int] = {}  # as in the note: of this call, until the writer is closed

    def open(self) -> None:
        """Opens the writer; the id of a new run is noted before it begins."""
        writer, note = self._writer, self.note
        if note.id is None and hasattr(writer, "new_run_id"):
            note.id = writer.new_run_id()
            self._save()
        if hasattr(writer, "open"):
            note.id = writer.open(self.settings or {}, note.id)
        if (last_step := getattr(writer, "last_step", None)) is not None:
            self.step = self._taken = note.step = int(last_step)
        self._is_open = note.is_open = True
        self._save()

    def take(self, rows: Sequence[SentRow]) -> None:
        """Adds rows, and hands over all, in order, up to the first that the writer does not take."""
        self.rows.extend(rows)
        while len(self.rows) > _MAX_ROWS and self.is_failing:
            self.rows.popleft()
            self.num_lost += 1
        while self.rows:
            try:
                self._hand_over(self.rows[0])
            except Exception as error:
                if not self.is_failing:
                    log.error(
                        "%s failed at step %d (%s): the run goes on, and its rows are kept until it takes them.",
                        *(self.name, self.rows[0].step, _show(error)),
                    )
                self.is_failing = True
                self.rows = deque(row._replace(media={}) for row in self.rows)  # media may be large
                return
            self.rows.popleft()
        if self.is_failing and self._is_open:
            log.warning("%s takes rows again.", self.name)
            self.is_failing = False
        if time.monotonic() - self._noted_at >= _BUFFER_SECS:
            self.note.step, self._taken, self._noted_at = self._taken, self.step, time.monotonic()
            self._save()

    def _hand_over(self, row: SentRow) -> None:
        """Hands over a row that the writer has not got, after its media; those that fail hold up no rows."""
        if not self._is_open:
            self.open()
        if row.step <= self.step:
            return
        if row.media and self.takes_media:
            try:
                self._writer.write_media(row.step, dict(row.media), row.time)
            except Exception as error:
                if not self._fails_at_media:
                    names = ", ".join(row.media)
                    text = "%s did not take %s of step %d (%s): media that fail are left out."
                    log.error(text, self.name, names, row.step, _show(error))
                self._fails_at_media = True
        self._writer.write(row.step, dict(row.numbers), row.time)
        self.step = row.step

    def lacks(self, file: RunFile) -> bool:
        """Returns whether the writer takes files, and has not got this one as it is, if it is there."""
        return self._takes_files and _changed_at(file.path) not in (0, self.note.files.get(file.key))

    def take_file(self, file: RunFile) -> None:
        """Hands a file to the writer."""
        changed_at = _changed_at(file.path)
        try:
            if not self._is_open:
                self.open()
            self._writer.write_file(*file)
            self._files[file.key] = changed_at
        except Exception as error:
            log.error("%s did not take %r (%s): the same command tries it again.", self.name, file.path, _show(error))

    def discard(self, step: int) -> None:
        """Forgets the rows from a step on that the writer has not taken."""
        self.rows = deque(row for row in self.rows if row.step < step)

    def close(self, error: BaseException | None) -> None:
        """Closes the writer after its rows; an error is the one that ended the run."""
        self.take(())
        if not self._is_open:
            return
        if error is not None and hasattr(self._writer, "on_error"):
            try:
                self._writer.on_error(error)
            except Exception as failure:
                log.error("%s did not take the error that ended the run (%s).", self.name, _show(failure))
        try:
            self._writer.close()
        except Exception as failure:
            log.error("%s cannot be closed (%s).", self.name, _show(failure))
            return
        self._is_open = self.note.is_open = False
        self.note.step, self.note.files = self.step, {**self.note.files, **self._files}
        self._save()


class Deliveries:
    """Hands rows to writers, in a thread; also a file writer for `actions.write.Write`.

    Attributes:
        path: the name of the file with the notes.
    """

    path = "writers.json"

    def __init__(self, writers: Sequence[Any], workdir: str, run: str = ""):
        """Reads the notes.

        Args:
            writers: as `Writer`; their names differ.
            workdir: empty: there are no notes.
            run: the name of the run, from `run_identity`; notes of another run, in a copied workdir, do not count.
        """
        self._workdir, self._run = workdir, run
        self._path = os.path.join(workdir, self.path) if workdir and writers else ""
        self._notes = _read_notes(self._path, run)
        self._deliveries = [
            Delivery(writer, self._notes.setdefault(name_of(writer), Note()), self._save) for writer in writers
        ]
        self._rows: list[SentRow] = []  # since the last flush
        self._settings: Mapping[str, Any] = {}
        self._close_secs = _CLOSE_SECS
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def open(self, step: int, settings: Mapping[str, Any], *, is_over: bool = False) -> "Deliveries":
        """Opens the writers, and hands over the rows that they lack.

        Args:
            step: where the run goes on.
            settings: as for `Writer.open`.
            is_over: whether no rows will follow: only writers that lack rows, or were not closed, are opened.

        Raises:
            ValueError: if a writer cannot be opened.
        """
        self._settings, until = settings, time.monotonic() + _OPEN_SECS
        with contextlib.ExitStack() as stack:
            stack.push(self)  # closes those that are open if another one fails
            for delivery in self._deliveries:
                if is_over and not (delivery.note.is_open or self._lacking(delivery.step, step)):
                    continue
                self._open(delivery, until)
                self._do(delivery.take, self._lacking(delivery.step, step))
                if delivery.step > 0 == step:
                    log.warning(
                        "%s has the rows up to step %d and gets those after it; remove %r to begin anew.",
                        *(delivery.name, delivery.step, self._path),
                    )
            stack.pop_all()
        return self

    def write(self, step: int, metrics: Mapping[str, float], when: float) -> None:
        """Adds a row to those of the next flush."""
        self._rows.append(SentRow(int(step), {name: float(value) for name, value in metrics.items()}, when))

    def show(self, step: int, media: "Mapping[str, Media]", when: float) -> None:
        """Adds media to the row of a step, which was the last to be written."""
        if any(delivery.takes_media for delivery in self._deliveries):
            files = {name: file for name, item in media.items() if (file := item.as_file()) is not None}
            self._rows[-1] = self._rows[-1]._replace(media=files)

    def write_files(self, left_files: Callable[[], Sequence[RunFile]]) -> None:
        """Passes the files that a function returns to the writers that lack them; opens writers if need be."""
        self.flush()
        try:
            files = left_files() if self._deliveries else ()
        except OSError as error:
            log.error("Writers get no files, as %r cannot be read (%s).", error.filename, error.strerror or error)
            return
        for delivery in self._deliveries:
            for file in filter(delivery.lacks, files):
                if delivery.settings is None:
                    self._open(delivery, time.monotonic() + _OPEN_SECS)
                self._do(delivery.take_file, file)
                self._close_secs = _FILES_SECS

    def flush(self) -> None:
        """Passes the rows on to the thread, and waits for no writer."""
        rows, self._rows = self._rows, []
        for delivery in self._deliveries if rows else ():
            self._do(delivery.take, rows)

    def discard(self, step: int) -> None:
        """Forgets the rows from a step on that no writer has taken; they are written again."""
        self._rows = [row for row in self._rows if row.step < step]
        for delivery in self._deliveries:
            self._do(delivery.discard, step)

    def close(self) -> None:
        """Does nothing: the writers stay open if the run goes back to a checkpoint."""

    def __enter__(self) -> "Deliveries":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits until the writers have their rows, closes them, and logs what they lack."""
        self.flush()
        closed = [(delivery, self._do(delivery.close, error)) for delivery in self._deliveries if self._thread]
        if self._thread is None:
            return
        self._tasks.put(None)
        self._thread.join(secs := self._close_secs if error is None else _LEAVE_SECS)
        for delivery, future in closed:
            if count := delivery.num_lost + len(delivery.rows):
                log.error("%s lacks %d rows after step %d.", delivery.name, count, delivery.step)
            elif not future.done():
                log.error("%s has not closed in %g seconds; the program goes on.", delivery.name, secs)

    def _open(self, delivery: Delivery, until: float) -> None:
        """Opens a writer; where the writer has rows of the run, a failure is tried again with the next row.

        A writer that takes long is opened while the run goes on.

        Raises:
            ValueError: if that fails in a new run.
        """
        delivery.settings = self._settings
        goes_on = delivery.note.is_open or delivery.step >= 0
        opened = self._do(delivery.open)
        try:
            opened.result(max(0.0, until - time.monotonic()))
        except Exception as error:
            if not opened.done():
                log.error(
                    "%s is not open after %g seconds: the run goes on, and its rows are kept until it is.",
                    *(delivery.name, _OPEN_SECS),
                )
            elif goes_on:
                delivery.is_failing = True
                log.error(
                    "%s cannot be opened (%s): the run goes on, and its rows are kept until it can.",
                    *(delivery.name, _show(error)),
                )
            else:
                raise ValueError(
                    f"The writer {delivery.name} cannot be opened ({_show(error)}): correct it, or leave it out of "
                    "fit(writers=...)."
                ) from error

    def _do(self, task: Callable[..., None], *arguments: Any) -> "Future[None]":
        """Has the thread call a function, after those before."""
        done: Future[None] = Future()
        self._tasks.put((functools.partial(task, *arguments), done))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="distloop writers")
            self._thread.start()
        return done

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, done = item
            try:
                done.set_result(task())
            except BaseException as error:
                done.set_exception(error)

    def _save(self) -> None:
        """Writes the notes; the system call survives this process, and who writes rows notices a disk that fails."""
        notes = {name: vars(note) | {"run": self._run} for name, note in self._notes.items()}
        with contextlib.suppress(OSError):
            if self._path:
                with open(temporary := f"{self._path}.tmp", "w", encoding="utf-8") as file:
                    json.dump(notes, file)
                os.replace(temporary, self._path)

    def _lacking(self, after: int, until: int) -> list[SentRow]:
        """Returns the rows of `metrics.jsonl` between two steps; null stands for nan there."""
        path = os.path.join(self._workdir, "metrics.jsonl")
        found = rows_between(path, after, until) if self._workdir and until else []
        numbers = [{name: as_number(value) for name, value in row.items()} for row in found]
        return [SentRow(int(row.pop("step")), row, row.pop("time", math.nan)) for row in numbers]


def _read_notes(path: str, run: str) -> dict[str, Note]:
    """Returns the notes by the writers' names, but for those of another run."""
    instead = "writers get all rows, also those that they have"
    notes = (read_json(path, _as_notes, instead=instead) if path else None) or {}
    if copied := [name for name, note in notes.items() if note.run not in ("", run)]:
        log.warning("%s is of a copied workdir: %s begin runs of their own.", path, ", ".join(copied))
    return {name: note for name, note in notes.items() if name not in copied}


def _as_notes(content: Any) -> dict[str, Note]:
    notes = {}
    for name, note in content.items():
        if not isinstance(note["id"], str | None):
            raise TypeError(f"an id of {note['id']!r}")
        files = {key: int(changed_at) for key, changed_at in note.get("files", {}).items()}
        notes[name] = Note(int(note["step"]), note["id"], bool(note.get("is_open")), files, str(note.get("run", "")))
    return notes


def _changed_at(path: str) -> int:
    """Returns when a file or directory was changed last; 0 if it is not there."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _show(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.200}" if text else type(error).__name__
