"""Deliveries: hands every row of a run to each of the user's writers, in order, also after stops and kills.

    deliveries = Deliveries([WandbWriter(project="digits")], workdir, left_files=lambda: [RunFile("m", "run/m", 500)])
    with deliveries.open(step, settings):       # first the rows that a writer lacks: it failed, or is new to the run
        deliveries.write(500, {"loss": 0.12}, time.time())
        deliveries.flush()

`writers.json` in the workdir holds the last row that each writer has taken, as of some seconds ago: a writer may keep
later ones in a buffer, which a kill takes. After a kill these come again, from the run or from `metrics.jsonl`. One
thread calls the writers, so they hold up neither steps nor saves.
"""

import concurrent.futures
import contextlib
import functools
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from distloop.log import log
from distloop.monitoring.records import as_metrics, read_json, rows_between
from distloop.monitoring.writers import RunFile, name_of

if TYPE_CHECKING:
    from distloop.monitoring.media import Media

_BUFFER_SECS = 20.0  # that a writer may keep a row, at most, before it is safe from a kill; wandb: 15
_MAX_ROWS, _MAX_MEDIA = 10_000, 20  # the last rows, and the last rows with media, that are kept for a writer that fails
_OPEN_SECS = 30.0  # that a run waits until the writers are open
_CLOSE_SECS = 60.0  # that the end of a run waits for the writers
_FILES_SECS = 600.0  # that it waits if they have got files
_LEAVE_SECS = 5.0  # that an interrupted or failed one does


class _Row(NamedTuple):
    step: int
    numbers: Mapping[str, float]
    time: float
    media: "Mapping[str, Media]" = {}


class _Delivery:
    """Hands rows, media and files to one writer, in the thread.

    Attributes:
        note: in `writers.json`: `step`, of the last row that the writer has for sure; `id`, which its `open` returned;
            `is_open`, whether it was opened and not closed; `files`, when each one that it has was changed last; `run`.
        step: of the last row that it took.
        settings: for `Writer.open`.
    """

    def __init__(self, writer: Any, note: dict[str, Any], save: Callable[[], None], after: Callable[[int], list[_Row]]):
        """Stores the writer, its note, what writes the notes, and what returns the rows of the run after a step."""
        self.name, self.note, self.step = name_of(writer), note, note["step"]
        self.settings: Mapping[str, Any] = {}
        self._writer, self._save, self._rows_after = writer, save, after
        self._is_open = self._is_failing = False
        self._taken, self._noted_at = self.step, time.monotonic()  # the last row when notes were written, and when
        self._media_step = -1  # of the last media

    def open(self) -> None:
        """Opens the writer; the id of a new run is noted before it begins."""
        writer, note = self._writer, self.note
        if note["id"] is None and hasattr(writer, "new_run_id"):
            note["id"] = writer.new_run_id()
            self._save()
        if hasattr(writer, "open"):
            note["id"] = writer.open(self.settings, note["id"])
        if (last_step := getattr(writer, "last_step", None)) is not None:
            self.step = self._taken = note["step"] = int(last_step)
        self._is_open = note["is_open"] = True
        self._save()

    def catch_up(self) -> None:
        """Hands over all rows, in order, up to the first that the writer does not take, which comes again."""
        failure = "cannot be opened"
        try:
            if not self._is_open:
                self.open()
            rows = self._rows_after(self.step)
            for row in rows:
                failure = f"failed at step {row.step}"
                self._hand_over(row)
        except Exception as error:
            if not self._is_failing:
                text = "%s %s (%s): the run goes on, and its rows are kept until it takes them."
                log.error(text, self.name, failure, _show(error))
            self._is_failing = True
            return
        if self._is_failing:
            log.warning("%s takes rows again.", self.name)
        self._is_failing = False
        if rows and time.monotonic() - self._noted_at >= _BUFFER_SECS:  # a writer may keep a row until the next comes
            self.note["step"], self._taken, self._noted_at = self._taken, self.step, time.monotonic()
            self._save()

    def _hand_over(self, row: _Row) -> None:
        """Hands over a row, after its media; those that fail hold up no rows."""
        if row.media and row.step > self._media_step and hasattr(self._writer, "write_media"):
            self._media_step = row.step
            media = {name: file for name, item in row.media.items() if (file := item.as_file()) is not None}
            failure = f"did not take {', '.join(media)} of step {row.step}"
            if media:
                self._try(failure, self._writer.write_media, row.step, media, row.time, instead=": they are left out")
        self._writer.write(row.step, dict(row.numbers), row.time)
        self.step = row.step

    def lacks(self, file: RunFile) -> bool:
        """Returns whether the writer takes files, and has not got this one as it is, if it is there."""
        return hasattr(self._writer, "write_file") and not _version(file).items() <= self.note["files"].items()

    def close(self, files: Sequence[RunFile], error: BaseException | None) -> None:
        """Hands over files and the error that ended the run, and closes the writer."""
        if not self._is_open:
            return
        taken: dict[str, int] = {}
        for file in files:
            version, failure = _version(file), f"did not take {file.path!r}"
            if self._try(failure, self._writer.write_file, *file, instead=": the same command tries it again"):
                taken |= version
        if error is not None and hasattr(self._writer, "on_error"):
            self._try("did not take the error that ended the run", self._writer.on_error, error)
        if self._try("cannot be closed", self._writer.close):
            self._is_open = False
            self.note.update(step=self.step, is_open=False, files={**self.note["files"], **taken})
            self._save()

    def _try(self, failure: str, call: Callable[..., None], *arguments: Any, instead: str = "") -> bool:
        """Calls the writer; returns whether it raised no error, which is logged."""
        try:
            call(*arguments)
        except Exception as error:
            log.error("%s %s (%s)%s.", self.name, failure, _show(error), instead)
            return False
        return True


class Deliveries:
    """Hands rows to writers, in a thread; also a file writer for `actions.write.Write`.

    Attributes:
        path: the name of the file with the notes.
    """

    path = "writers.json"

    def __init__(
        self,
        writers: Sequence[Any],
        workdir: str,
        run: str = "",
        left_files: Callable[[], Sequence[RunFile]] = tuple,
    ):
        """Reads the notes.

        Args:
            writers: as `Writer`; their names differ.
            workdir: empty: there are no notes.
            run: the name of the run; notes of another run, in a copied workdir, do not count.
            left_files: returns what the run has left when it is over, for the writers that lack it.
        """
        self._workdir, self._run, self._left_files = workdir, run, left_files
        self._path = os.path.join(workdir, self.path) if workdir and writers else ""
        self._notes = _read_notes(self._path, run)
        for name in map(name_of, writers):
            self._notes.setdefault(name, {"step": -1, "id": None, "is_open": False, "files": {}})
        self._deliveries = [_Delivery(w, self._notes[name_of(w)], self._save, self._rows_after) for w in writers]
        self._rows: list[_Row] = []  # that a writer lacks
        self._in_file = 0  # the step up to which rows are in `metrics.jsonl` alone
        self._media: Mapping[str, Media] = {}  # of the next row
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()

    @contextlib.contextmanager
    def open(self, step: int, settings: Mapping[str, Any], *, is_over: bool = False) -> Iterator["Deliveries"]:
        """Enters a scope in which the writers are open; first they get the rows that they lack.

        Args:
            step: where the run goes on.
            settings: as for `Writer.open`.
            is_over: whether no rows will follow: only writers that lack something, or were not closed, are opened.

        Raises:
            ValueError: if a writer without rows of this run cannot be opened.
        """
        self._in_file = step
        if is_over and self._deliveries:
            files = self._read_files()
            self._deliveries = [
                delivery
                for delivery in self._deliveries
                if delivery.note["is_open"] or self._rows_after(delivery.step) or any(map(delivery.lacks, files))
            ]
        for delivery in self._deliveries:
            delivery.settings = settings
        if self._deliveries:
            threading.Thread(target=self._work, daemon=True, name="distloop writers").start()
        ended_by: BaseException | None = None
        left: Sequence[RunFile] = ()
        try:
            self._open(step)
            yield self
            left = self._read_files() if self._deliveries else ()
        except BaseException as error:
            ended_by = error
            raise
        finally:
            self._close(left, ended_by)

    def _open(self, step: int) -> None:
        """Opens the writers; one that takes long, or has rows and cannot be opened, holds up no run."""
        new = [delivery for delivery in self._deliveries if not delivery.note["is_open"] and delivery.step < 0]
        opened = {self._do(delivery.open): delivery for delivery in self._deliveries}
        concurrent.futures.wait(opened, _OPEN_SECS)
        for future, delivery in opened.items():
            if not future.done():
                text = "%s is not open after %g seconds: the run goes on, and its rows are kept until it is."
                log.error(text, delivery.name, _OPEN_SECS)
            elif delivery in new and (error := future.exception()) is not None:
                self._deliveries.remove(delivery)
                raise ValueError(
                    f"The writer {delivery.name} cannot be opened ({_show(error)}): correct it, or leave it out of "
                    "fit(writers=...)."
                ) from error
            if delivery.step > 0 == step:
                text = "%s has the rows up to step %d and gets those after it; remove %r to begin anew."
                log.warning(text, delivery.name, delivery.step, self._path)
            self._do(delivery.catch_up)

    def show(self, step: int, media: "Mapping[str, Media]", when: float) -> None:
        """Takes media, which change no more, for the row that comes next."""
        self._media = media

    def write(self, step: int, metrics: Mapping[str, float], when: float) -> None:
        """Adds a row; it reaches the writers after the next flush, at the latest."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self._rows.append(_Row(int(step), numbers, when, self._media))
        self._media = {}

    def flush(self) -> None:
        """Has the thread hand over the rows, and waits for no writer; forgets rows that all writers have."""
        least = min((delivery.step for delivery in self._deliveries), default=math.inf)
        rows = [row for row in self._rows if row.step > least]
        if len(rows) > _MAX_ROWS:
            self._in_file = rows[-_MAX_ROWS - 1].step
        old = [row._replace(media={}) for row in rows[-_MAX_ROWS:-_MAX_MEDIA]]
        self._rows = old + rows[-_MAX_MEDIA:]  # another list, as the thread may be reading the one before
        for delivery in self._deliveries:
            self._do(delivery.catch_up)

    def discard(self, step: int) -> None:
        """Forgets the rows from a step on that no writer has taken; they are written again."""
        self._rows = [row for row in self._rows if row.step < step]
        self._in_file = min(self._in_file, step - 1)

    def close(self) -> None:
        """Does nothing: the writers stay open if the run goes back to a checkpoint."""

    def _close(self, left: Sequence[RunFile], error: BaseException | None) -> None:
        """Waits until the writers have their rows and files, closes them, and logs what they lack."""
        self.flush()
        lacking = {delivery: list(filter(delivery.lacks, left)) for delivery in self._deliveries}
        closed = {self._do(delivery.close, files, error): delivery for delivery, files in lacking.items()}
        self._tasks.put(None)
        secs = _LEAVE_SECS if error is not None else _FILES_SECS if any(lacking.values()) else _CLOSE_SECS
        concurrent.futures.wait(closed, secs)
        for future, delivery in closed.items():
            if count := len(self._rows_after(delivery.step)):
                log.error("%s lacks %d rows after step %d.", delivery.name, count, delivery.step)
            elif not future.done():
                log.error("%s has not closed in %g seconds; the program goes on.", delivery.name, secs)

    def _do(self, task: Callable[..., None], *arguments: Any) -> "Future[None]":
        """Has the thread call a function, after those before."""
        done: Future[None] = Future()
        self._tasks.put((functools.partial(task, *arguments), done))
        return done

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, done = item
            try:
                done.set_result(task())
            except BaseException as error:
                done.set_exception(error)

    def _rows_after(self, step: int) -> list[_Row]:
        """Returns the rows of the run after a step, in order, as far as this process or `metrics.jsonl` has them."""
        kept = self._rows  # before `_in_file`: a flush may move rows from one to the other meanwhile
        path, until = os.path.join(self._workdir, "metrics.jsonl"), self._in_file
        earlier = map(as_metrics, rows_between(path, step, until) if self._workdir and step < until else ())
        rows = [_Row(int(row.pop("step")), row, row.pop("time", math.nan)) for row in earlier]
        return rows + [row for row in kept if row.step > max([step, *(row.step for row in rows[-1:])])]

    def _read_files(self) -> Sequence[RunFile]:
        try:
            return self._left_files()
        except OSError as error:
            log.error("Writers get no files, as %r cannot be read (%s).", error.filename, error.strerror or error)
            return ()

    def _save(self) -> None:
        """Writes the notes; the system call survives this process, and who writes rows notices a disk that fails."""
        notes = {name: note | {"run": self._run} for name, note in self._notes.items()}
        with contextlib.suppress(OSError):
            if self._path:
                with open(temporary := f"{self._path}.tmp", "w", encoding="utf-8") as file:
                    json.dump(notes, file)
                os.replace(temporary, self._path)


def _read_notes(path: str, run: str) -> dict[str, dict[str, Any]]:
    """Returns the notes by the writers' names, but for those of another run; older ones lack some entries."""

    def read(content: Any) -> dict[str, dict[str, Any]]:
        for note in content.values():
            note |= {"step": int(note["step"]), "id": note["id"], "files": dict(note.get("files", {}))}
        return {name: {"is_open": False, **note} for name, note in content.items()}

    notes = (read_json(path, read, instead="writers get all rows, also those that they have") if path else None) or {}
    if copied := [name for name, note in notes.items() if note.get("run", "") not in ("", run)]:
        log.warning("%s is of a copied workdir: %s begin runs of their own.", path, ", ".join(copied))
    return {name: note for name, note in notes.items() if name not in copied}


def _version(file: RunFile) -> dict[str, int]:
    """Returns when a file or directory was changed last, by its name and step; nothing if it is not there."""
    try:
        return {f"{file.name}/{file.step}": os.stat(file.path).st_mtime_ns}
    except OSError:
        return {}


def _show(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.200}" if text else type(error).__name__
