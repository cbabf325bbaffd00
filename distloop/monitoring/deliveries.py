"""Deliveries: hands every row of a run to each of the user's writers, in order, also after stops and kills.

    deliveries = Deliveries([WandbWriter(project="digits")], workdir, left_files=lambda: [RunFile("m", "run/m", 500)])
    with deliveries.open(step, settings):       # first the rows that a writer lacks: it failed, or is new to the run
        deliveries.write(500, {"loss": 0.12}, time.time())
        deliveries.flush()

The rows are read from `metrics.jsonl`; of a run without a workdir, the last ones are kept in memory. `writers.json` in
the workdir holds the last row that each writer has taken, as of some seconds ago: a writer may keep later ones in a
buffer, which a kill takes. After a kill these come again. One thread calls the writers, so they hold up neither steps
nor saves.
"""

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from distloop.atomic_files import identify_directory
from distloop.log import log
from distloop.monitoring.writers import RunFile, name_of
from distloop.urls import is_url
from distloop.workdir.records import as_metrics, read_json, replace_json, rows_between

if TYPE_CHECKING:
    from distloop.monitoring.media import Media

_BUFFER_SECS = 20.0  # that a writer may keep a row, at most, before it is safe from a kill; wandb: 15
_MAX_ROWS, _MAX_MEDIA = 10_000, 20  # the last rows, and the media of the last rows, that are kept in memory
_OPEN_SECS = 30.0  # that a run waits until new writers are open
_CLOSE_SECS = 60.0  # that the end of a run waits for the writers
_FILES_SECS = 600.0  # that it waits if the run has left files
_LEAVE_SECS = 5.0  # that an interrupted or failed one does


class _Row(NamedTuple):
    step: int
    numbers: Mapping[str, float]
    time: float
    media: "Mapping[str, Media]" = {}


class _Delivery:
    """Hands rows, media and files to one writer, in the thread.

    Attributes:
        entry: in `writers.json`: `step`, of the last row that the writer has for sure; `id`, which its `open` returned;
            `is_open`, whether it was opened, and not closed at the end of the run with all its files; `workdir`, where
            it was opened, and `directory`, as `identify_directory` has it.
        step: of the last row that it took.
        is_new: whether it was never opened for this run.
    """

    def __init__(self, writer: Any, entry: dict[str, Any], save: Callable[[], None]):
        """Stores the writer, its entry, and what writes all entries."""
        self.name, self.entry, self.step = name_of(writer), entry, entry["step"]
        self.is_new = self.step < 0 and not entry["is_open"]
        self._writer, self._save = writer, save
        self._is_open = self._is_failing = False
        self._taken, self._saved_at = self.step, time.monotonic()  # the last row when entries were written, and when
        self._media_step = -1  # of the last media

    def open(self, settings: Mapping[str, Any]) -> None:
        """Opens the writer."""
        if self.entry["id"] is None and hasattr(self._writer, "new_run_id"):
            self.entry["id"] = self._writer.new_run_id()
            self._save()
        if hasattr(self._writer, "open"):
            self.entry["id"] = self._writer.open(settings, self.entry["id"])
        if (last_step := getattr(self._writer, "last_step", None)) is not None:
            self.step = self._taken = self.entry["step"] = int(last_step)
        self._is_open = self.entry["is_open"] = True
        self._save()

    def catch_up(self, settings: Mapping[str, Any], rows_after: Callable[[int], Sequence[_Row]]) -> None:
        """Opens the writer, and hands over all rows, in order, up to the first that it does not take.

        Args:
            settings: for `Writer.open`.
            rows_after: returns the rows of the run after a step.
        """
        try:
            if not self._is_open:
                self.open(settings)
            for row in rows_after(self.step):
                self._hand_over(row)
        except BaseException as error:  # here, too
            if not self._is_failing:
                what = f"failed after step {self.step}" if self._is_open else "cannot be opened"
                text = "%s %s (%s): the run goes on, and its rows are kept until it takes them."
                log.error(text, self.name, what, _show(error))
            self._is_failing = True
            return
        if self._is_failing:
            log.warning("%s takes rows again.", self.name)
        self._is_failing = False
        if self.step > self._taken and time.monotonic() - self._saved_at >= _BUFFER_SECS:
            self.entry["step"], self._taken, self._saved_at = self._taken, self.step, time.monotonic()
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

    def close(self, files: Sequence[RunFile], error: BaseException | None) -> None:
        """Hands over files and the error that ended the run, and closes the writer."""
        if not self._is_open:
            return
        is_over = error is None
        for file in files if hasattr(self._writer, "write_file") else ():
            failure = f"did not take {file.path!r}"
            is_over &= self._try(failure, self._writer.write_file, *file, instead=": the same command tries it again")
        if error is not None and hasattr(self._writer, "on_error"):
            self._try("did not take the error that ended the run", self._writer.on_error, error)
        if self._try("cannot be closed", self._writer.close):
            self.entry.update(step=self.step, is_open=not is_over)
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
        path: the name of the file with an entry for each writer.
    """

    path = "writers.json"

    def __init__(
        self, writers: Sequence[Any], workdir: str, given: str = "", left_files: Callable[[], Sequence[RunFile]] = tuple
    ):
        """Reads the entries.

        Args:
            writers: as `Writer`; their names differ.
            workdir: empty: there are no entries.
            given: the workdir as it was given, which may be a URL, with its files at `workdir`; empty: as `workdir`.
            left_files: returns what the run has left when it is over, for the writers that lack it.
        """
        self._workdir, self._given, self._left_files = workdir, given or workdir, left_files
        self._path = os.path.join(workdir, self.path) if workdir and writers else ""
        self._entries = _read_entries(self._path)
        for name in map(name_of, writers):
            new = {"step": -1, "id": None, "is_open": False, "workdir": "", "directory": ""}
            self._entries.setdefault(name, new)
        self._deliveries = [_Delivery(writer, self._entries[name_of(writer)], self._save) for writer in writers]
        self._rows: list[_Row] = []  # the last ones, of a run without a workdir
        self._last_step = -1  # of all rows of the run
        self._media: dict[int, Mapping[str, Media]] = {}  # the last ones, by step
        self._refused: list[tuple[_Delivery, BaseException]] = []  # new writers that cannot be opened, and why
        self._has_tried = threading.Event()  # to open new writers
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()  # None: rows; the arguments of `_Delivery.close`

    @contextlib.contextmanager
    def open(self, step: int, settings: Mapping[str, Any], *, is_over: bool = False) -> Iterator["Deliveries"]:
        """Enters a scope in which the writers are open; first they get the rows that they lack.

        Args:
            step: where the run goes on.
            settings: as for `Writer.open`.
            is_over: whether no rows will follow: only writers that lack something, or were not closed, are opened.

        Raises:
            ValueError: if a writer without rows of this run cannot be opened, or the workdir is a copy of one that is
                still there, so that a writer's run is that of the other one.
        """
        self._last_step, self._settings = step, settings
        if is_over:
            lacking = [delivery for delivery in self._deliveries if self._rows_after(delivery.step)]
            self._deliveries = [each for each in self._deliveries if each.entry["is_open"] or each in lacking]
        if not self._deliveries:
            yield self
            return
        if self._path:
            self._require_original()
        thread = threading.Thread(target=self._work, daemon=True, name="distloop writers")
        thread.start()
        files: list[RunFile] = []
        ended_by: BaseException | None = None
        try:
            self._require_open(step)
            self.flush()
            yield self
            files = [file for file in self._left_files() if os.path.exists(file.path)]
        except BaseException as error:
            ended_by = error
            raise
        finally:
            self._close(thread, files, ended_by)

    def _require_original(self) -> None:
        """Raises a ValueError if a writer's run is that of another workdir, of which this one is a copy."""
        own = {"workdir": self._given, "directory": _identify(self._given)}
        for delivery in self._deliveries:
            entry = delivery.entry
            is_elsewhere = entry["id"] is not None and entry["directory"] not in ("", own["directory"])
            if is_elsewhere and _identify(entry["workdir"]) == entry["directory"]:
                raise ValueError(
                    f"workdir={self._given!r} is a copy of {entry['workdir']!r}, whose run {entry['id']!r} at "
                    f"{delivery.name} gets the rows there: go on there, or remove {self._path!r}, with which the copy "
                    "begins a run of its own."
                )
            entry |= own

    def _work(self) -> None:
        """Opens the writers, hands over rows when there may be some, and closes the writers; the thread."""
        for delivery in [delivery for delivery in self._deliveries if delivery.is_new]:
            try:
                delivery.open(self._settings)
            except BaseException as error:  # of a writer that leaves the program, too: it is in the thread
                self._refused.append((delivery, error))
        self._has_tried.set()
        while (end := self._calls.get()) is None:
            for delivery in self._deliveries:
                delivery.catch_up(self._settings, self._rows_after)
        for delivery in self._deliveries:
            delivery.close(*end)

    def _require_open(self, step: int) -> None:
        """Waits for writers that are new to the run; one that takes long, or has rows, holds up no run."""
        if not self._has_tried.wait(_OPEN_SECS):
            text = "New writers are not open after %g seconds: the run goes on, and its rows are kept until they are."
            log.error(text, _OPEN_SECS)
        elif self._refused:
            delivery, error = self._refused[0]
            refused = [each for each, _ in self._refused]
            self._deliveries = [each for each in self._deliveries if each not in refused]
            raise ValueError(
                f"The writer {delivery.name} cannot be opened ({_show(error)}): correct it, or leave it out of "
                "fit(writers=...)."
            ) from error
        for delivery in self._deliveries:
            if delivery.step > 0 == step:
                text = "%s has the rows up to step %d and gets those after it; remove %r to begin anew."
                log.warning(text, delivery.name, delivery.step, self._path)

    def show(self, step: int, media: "Mapping[str, Media]", when: float) -> None:
        """Takes media, which change no more, for the row of the same step."""
        self._media = dict([*self._media.items(), (step, media)][-_MAX_MEDIA:])

    def write(self, step: int, metrics: Mapping[str, float], when: float) -> None:
        """Adds a row; it reaches the writers after the next flush, at the latest."""
        self._last_step = int(step)
        if not self._workdir:
            row = _Row(int(step), {name: float(value) for name, value in metrics.items()}, when)
            self._rows = [*self._rows, row][-_MAX_ROWS:]  # another list, as the thread may be reading the one before

    def flush(self) -> None:
        """Has the thread hand over the rows, which `metrics.jsonl` has by now; waits for no writer."""
        self._calls.put(None)

    def discard(self, step: int) -> None:
        """Forgets the rows from a step on; they are written again."""
        self._rows, self._last_step = [row for row in self._rows if row.step < step], step - 1

    def close(self) -> None:
        """Does nothing: the writers stay open if the run goes back to a checkpoint."""

    def _close(self, thread: threading.Thread, files: Sequence[RunFile], error: BaseException | None) -> None:
        """Waits until the writers have their rows and files and are closed, and logs what they lack."""
        self.flush()
        self._calls.put((files, error))
        secs = _LEAVE_SECS if error is not None else _FILES_SECS if files else _CLOSE_SECS
        thread.join(secs)
        for delivery in self._deliveries:
            if count := len(self._rows_after(delivery.step)):
                log.error("%s lacks %d rows after step %d.", delivery.name, count, delivery.step)
            elif thread.is_alive():
                log.error("%s has not closed in %g seconds; the program goes on.", delivery.name, secs)

    def _rows_after(self, step: int) -> list[_Row]:
        """Returns the rows of the run after a step, in order, as far as this process or `metrics.jsonl` has them."""
        rows = [row for row in self._rows if row.step > step]
        if self._workdir and step < self._last_step:
            read = map(as_metrics, rows_between(os.path.join(self._workdir, "metrics.jsonl"), step, self._last_step))
            rows = [_Row(int(row.pop("step")), row, row.pop("time", math.nan)) for row in read]
        return [row._replace(media=self._media.get(row.step, {})) for row in rows]

    def _save(self) -> None:
        """Writes the entries; who writes rows notices a disk that fails."""
        if self._path:
            with contextlib.suppress(OSError):
                replace_json(self._path, self._entries)


def _read_entries(path: str) -> dict[str, dict[str, Any]]:
    """Returns the entries by the writers' names; older ones lack some values."""

    def read(content: Any) -> dict[str, dict[str, Any]]:
        for entry in content.values():
            entry |= {"step": int(entry["step"]), "id": entry["id"], "is_open": bool(entry.get("is_open"))}
            entry |= {name: str(entry.get(name, "")) for name in ("workdir", "directory")}
        return dict(content)

    return (read_json(path, read, instead="writers get all rows, also those that they have") if path else None) or {}


def _identify(workdir: str) -> str:
    """Returns a text that differs between a workdir and its copy; empty: there is no such workdir."""
    with contextlib.suppress(OSError):
        return workdir if is_url(workdir) else identify_directory(workdir)
    return ""


def _show(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.200}" if text else type(error).__name__
