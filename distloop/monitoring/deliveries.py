"""Deliveries: every row of a run to each of the user's writers, once, over stops, kills and failures of the writer.

    deliveries = Deliveries([WandbWriter(project="digits")], workdir)
    with deliveries.open(step, settings):       # first the rows that a writer lacks: it failed, or is new to the run
        deliveries.write(500, {"loss": 0.12}, time.time())
        deliveries.flush()
        deliveries.write_files(lambda: [RunFile("best/loss", "run/checkpoints/400", 400)])  # at the end of the run

`writers.json` in the workdir holds the step of the last row that each writer took. After a kill, rows that are computed
again are not handed over again, and rows that were not handed over come from `metrics.jsonl`. A kill in the moment
between a writer's return and the note repeats that row, unless the writer has a `last_step`. Each writer has a thread:
a slow one holds up neither steps nor saves. This module does not know what a writer does.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distloop.log import log
from distloop.monitoring.delivery import Delivery, Notes, Row
from distloop.monitoring.json_writer import rows_between
from distloop.monitoring.records import as_number
from distloop.monitoring.writers import RunFile

if TYPE_CHECKING:
    from distloop.monitoring.media import Media

_CLOSE_SECS = 60.0  # that the end of a run waits for a writer
_FILES_SECS = 600.0  # that it waits for one that has got files
_LEAVE_SECS = 5.0  # that an interrupted or failed one does


class Deliveries:
    """Hands rows to writers, each in a thread of its own; also a file writer for `actions.write.Write`.

    Attributes:
        path: the name of the file with the notes.
    """

    path = "writers.json"

    def __init__(self, writers: Sequence[Any], workdir: str, run: str = ""):
        """Reads the notes about the rows that the writers have.

        Args:
            writers: as `Writer`; their names differ.
            workdir: empty: there are no notes.
            run: the name of the run, from `run_identity`; notes of another run, in a copied workdir, do not count.
        """
        self._workdir = workdir
        notes = Notes(os.path.join(workdir, self.path) if workdir and writers else "", run)
        self._deliveries = [Delivery(writer, notes) for writer in writers]
        self._settings: Mapping[str, Any] = {}
        self._rows: list[Row] = []  # since the last flush
        self._close_secs = _CLOSE_SECS

    def open(self, step: int, settings: Mapping[str, Any], *, is_over: bool = False) -> "Deliveries":
        """Opens the writers, and hands over the rows up to a step that they lack.

        Args:
            step: where the run goes on.
            settings: as for `Writer.open`.
            is_over: whether no rows will follow: only writers that lack rows, or were not closed, are opened.

        Raises:
            ValueError: if a writer cannot be opened.
        """
        self._settings = settings
        with contextlib.ExitStack() as stack:
            stack.push(self)  # closes those that are open if another one fails
            for delivery in self._deliveries:
                noted = delivery.note
                if is_over and not (noted.is_open or self._lacking(noted.step, step)):
                    continue
                delivery.open(settings)
                delivery.put([_row(row) for row in self._lacking(noted.step, step)])
                if noted.step > 0 == step:
                    log.warning(
                        "%s has the rows up to step %d and gets those after it; remove %r to begin anew.",
                        *(delivery.name, noted.step, os.path.join(self._workdir, self.path)),
                    )
            stack.pop_all()
        return self

    def write(self, step: int, metrics: Mapping[str, float], when: float) -> None:
        """Adds a row to those of the next flush."""
        self._rows.append(Row(int(step), {name: float(value) for name, value in metrics.items()}, when))

    def show(self, step: int, media: "Mapping[str, Media]", when: float) -> None:
        """Adds media to the row of a step, which was the last to be written."""
        if any(delivery.takes_media for delivery in self._deliveries):
            files = {name: file for name, item in media.items() if (file := item.as_file()) is not None}
            self._rows[-1] = self._rows[-1]._replace(media=files)

    def write_files(self, left_files: Callable[[], Sequence[RunFile]]) -> None:
        """Passes files on to the writers that lack them, which are opened if they are not.

        Args:
            left_files: returns what the run has left.
        """
        self.flush()
        try:
            files = left_files() if self._deliveries else ()
        except OSError as error:
            log.error("Writers get no files, as %r cannot be read (%s).", error.filename, error.strerror or error)
            return
        for delivery in self._deliveries:
            for file in filter(delivery.lacks, files):
                if not delivery.is_started:
                    delivery.open(self._settings)
                delivery.put_file(file)
                self._close_secs = _FILES_SECS

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
            delivery.wait(self._close_secs if error is None else _LEAVE_SECS)

    def _lacking(self, after: int, until: int) -> list[dict[str, Any]]:
        path = os.path.join(self._workdir, "metrics.jsonl")
        return rows_between(path, after, until) if self._workdir and until else []


def _row(record: Mapping[str, Any]) -> Row:
    """Returns a row of `metrics.jsonl`, where null stands for nan."""
    numbers = {name: as_number(value) for name, value in record.items() if name not in ("step", "time")}
    return Row(record["step"], numbers, as_number(record.get("time")))
