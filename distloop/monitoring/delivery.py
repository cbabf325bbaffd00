"""Delivery: rows, media and files on their way to one writer, in a thread that waits for it, and notes of what it has.

    delivery = Delivery(writer, Notes("run/writers.json"))
    delivery.open(settings)
    delivery.put([Row(500, {"loss": 0.12}, time.time())])
    delivery.begin_to_close(None)
    delivery.wait(60.0)

It does not know where rows come from.
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
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distloop.log import log
from distloop.monitoring.records import read_json
from distloop.monitoring.writers import MediaFile, RunFile, name_of

_MAX_ROWS = 10_000  # that are kept while a writer fails
_OPEN_SECS = 30.0  # that a run waits until a writer is open


class Row(NamedTuple):
    """What a writer receives of a step."""

    step: int
    numbers: Mapping[str, float]
    time: float
    media: Mapping[str, MediaFile] = {}


@dataclass
class Note:
    """What the workdir notes of a writer.

    Attributes:
        step: of its last row; -1: it has none.
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


class Notes:
    """What the workdir notes of each writer, by its name."""

    def __init__(self, path: str, run: str = ""):
        """Reads the file, of which the notes of another run do not count; an empty path: nothing is kept."""
        self._path = path
        self._lock = threading.Lock()  # each writer has a thread
        notes = read_json(path, _as_notes, instead="writers get all rows, also those that they have") if path else None
        self._notes: dict[str, Note] = notes or {}
        if copied := [name for name, note in self._notes.items() if note.run not in ("", run)]:
            self._notes = {name: note for name, note in self._notes.items() if name not in copied}
            log.warning("%s is of a copied workdir: %s begin runs of their own.", path, ", ".join(copied))
        self._run = run

    def get(self, name: str) -> Note:
        """Returns the note of a writer."""
        return self._notes.setdefault(name, Note())

    def save(self) -> None:
        """Writes the notes as they are."""
        with self._lock:
            if self._path:
                notes = self._notes
                # The system call survives this process; a disk that fails is noticed by those who write rows.
                with contextlib.suppress(OSError):
                    with open(f"{self._path}.tmp", "w", encoding="utf-8") as file:
                        json.dump({name: vars(note) | {"run": self._run} for name, note in notes.items()}, file)
                    os.replace(f"{self._path}.tmp", self._path)


class Delivery:
    """Rows on their way to one writer.

    Attributes:
        name: of the writer.
        note: what it has.
        takes_media, takes_files: whether it wants them.
    """

    def __init__(self, writer: Any, notes: Notes):
        """Stores the writer; it is opened later."""
        self.name = name_of(writer)
        self.note = notes.get(self.name)
        self.takes_media, self.takes_files = hasattr(writer, "write_media"), hasattr(writer, "write_file")
        self._writer, self._notes = writer, notes
        self._settings: Mapping[str, Any] = {}
        self._rows: deque[Row] = deque()  # that the writer lacks
        self._num_lost = 0
        self._is_open = False
        self._is_failing = self._fails_at_media = False
        self._files: dict[str, int] = {}  # as in the note: of this call, until the writer is closed
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def open(self, settings: Mapping[str, Any]) -> None:
        """Starts the thread, and opens the writer in it; if that fails in a run that it has rows of, tries again later.

        One that takes long is opened while the run goes on.

        Raises:
            ValueError: if that fails in a new run.
        """
        self._settings = settings
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"distloop {self.name}")
        self._thread.start()
        opened: Future[None] = Future()
        self._tasks.put(functools.partial(self._open, opened))
        try:
            opened.result(_OPEN_SECS)
        except Exception as error:
            if not opened.done():
                log.error(
                    "%s is not open after %g seconds: the run goes on, and its rows are kept until it is.",
                    *(self.name, _OPEN_SECS),
                )
                return
            if self.note.step >= 0:
                self._is_failing = True
                log.error(
                    "%s cannot be opened (%s): the run goes on, and its rows are kept until it can.",
                    *(self.name, _show(error)),
                )
                return
            self._tasks.put(None)
            self._thread = None
            raise ValueError(
                f"The writer {self.name} cannot be opened ({_show(error)}): correct it, or leave it out of "
                "fit(writers=...)."
            ) from error

    @property
    def is_started(self) -> bool:
        """Whether `open` was called."""
        return self._thread is not None

    def put(self, rows: Sequence[Row]) -> None:
        """Hands rows over, after those before."""
        self._tasks.put(functools.partial(self._take, rows))

    def lacks(self, file: RunFile) -> bool:
        """Returns whether the writer takes files, and has not got this one as it is, if it is there."""
        changed_at = _changed_at(file.path)
        return self.takes_files and changed_at not in (0, self.note.files.get(file.key))

    def put_file(self, file: RunFile) -> None:
        """Hands a file over, after the rows before."""
        self._tasks.put(functools.partial(self._take_file, file))

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
            log.error("%s lacks %d rows after step %d.", self.name, count, self.note.step)
        elif is_slow:
            log.error("%s has not closed in %g seconds; the program goes on.", self.name, secs)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _open(self, opened: "Future[None]") -> None:
        try:
            self._try_to_open()
            opened.set_result(None)
        except BaseException as error:
            opened.set_exception(error)

    def _try_to_open(self) -> None:
        writer, note = self._writer, self.note
        if note.id is None and hasattr(writer, "new_run_id"):
            note.id = writer.new_run_id()
            self._notes.save()
        if hasattr(writer, "open"):
            note.id = writer.open(self._settings, note.id)
        if (last_step := getattr(writer, "last_step", None)) is not None:
            note.step = int(last_step)
        self._is_open = note.is_open = True
        self._notes.save()

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
            try:
                if not self._is_open:
                    self._try_to_open()
                if row.step > self.note.step:
                    self._show_media(row)
                    self._writer.write(row.step, dict(row.numbers), row.time)
                    self.note.step = row.step
                    self._notes.save()
            except Exception as error:
                if not self._is_failing:
                    log.error(
                        "%s failed at step %d (%s): the run goes on, and its rows are kept until it takes them.",
                        *(self.name, row.step, _show(error)),
                    )
                self._is_failing = True
                self._rows = deque(row._replace(media={}) for row in self._rows)  # media may be large
                return
            self._rows.popleft()
        if self._is_failing and self._is_open:
            log.warning("%s takes rows again.", self.name)
            self._is_failing = False

    def _show_media(self, row: Row) -> None:
        """Hands over media; those that fail are left out, so that they hold up no rows."""
        if not (row.media and self.takes_media):
            return
        try:
            self._writer.write_media(row.step, dict(row.media), row.time)
        except Exception as error:
            if not self._fails_at_media:
                log.error(
                    "%s did not take %s of step %d (%s): media that fail are left out.",
                    *(self.name, ", ".join(row.media), row.step, _show(error)),
                )
            self._fails_at_media = True

    def _take_file(self, file: RunFile) -> None:
        changed_at = _changed_at(file.path)
        try:
            if not self._is_open:
                self._try_to_open()
            self._writer.write_file(*file)
            self._files[file.key] = changed_at
        except Exception as error:
            log.error("%s did not take %r (%s): the same command tries it again.", self.name, file.path, _show(error))

    def _discard(self, step: int) -> None:
        self._rows = deque(row for row in self._rows if row.step < step)

    def _close(self, error: BaseException | None) -> None:
        self._hand_over()
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
        self.note.files = {**self.note.files, **self._files}
        self._notes.save()


def _as_notes(content: Any) -> dict[str, Note]:
    return {name: _as_note(note) for name, note in content.items()}


def _as_note(note: Any) -> Note:
    files = {name: int(time) for name, time in note.get("files", {}).items()}
    if not isinstance(note["id"], str | None):
        raise TypeError(f"an id of {note['id']!r}")
    return Note(int(note["step"]), note["id"], bool(note.get("is_open")), files, str(note.get("run", "")))


def _changed_at(path: str) -> int:
    """Returns when a file or directory was changed last; 0 if it is not there."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _show(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.200}" if text else type(error).__name__
