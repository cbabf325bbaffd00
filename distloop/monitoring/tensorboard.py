"""Owns TensorBoard's files: what is written where, and that no step comes twice.

    writer = SummaryWriter("run/summaries", evals=["test"], start=0)
    writer.begin({"learning_rate": 1e-3}, {"run/config": Text("...")}, Layout({...}))
    writer.write(500, {"loss": 0.12, "test/accuracy": 0.98})
    writer.show(500, {"samples": Images(array)})
    writer.close(has_succeeded=True)

Where a run goes on, TensorBoard is told to forget what comes after its first step. It does not know when it is called.
"""

import glob
import itertools
import os
import time
from collections.abc import Mapping, Sequence

import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from distloop.monitoring.media import END_TAG, HPARAMS_TAG, LAYOUT_TAG, HParams, Layout, Media, RunEnd

# The run that the HParams page lists. A directory of its own, as TensorBoard takes every number in it for a column,
# and keeps the first status that it reads of a run for ever: its files are those of the last start alone.
_HPARAMS = "hparams"


class SummaryWriter:
    """Writes for TensorBoard: what belongs to an evaluation to `<directory>/<eval>`, all else to `<directory>/train`.

    An evaluation's tag is its name without the prefix, so that its chart lies over the one of training; an evaluation
    that is called `train` or `hparams` keeps its prefix. Files are made at the first thing for them.
    """

    def __init__(self, directory: str, evals: Sequence[str], start: int | None = None):
        """Remembers where; writes nothing.

        Args:
            directory: under which the directories are made.
            evals: names of the evaluations.
            start: the global step that the run starts from; TensorBoard is told to forget what comes after it. None:
                it is not.
        """
        self.path = directory
        self._start = start
        self._evals = frozenset(evals) - {"train", _HPARAMS}
        self._places: dict[str, tuple[str, str]] = {}  # by name
        self._files: dict[str, _EventFile] = {}
        self._has_begun = False
        self._last: tuple[int, dict[str, float]] | None = None  # what the HParams page is still to be told

    def begin(
        self,
        hyperparameters: Mapping[str, object],
        media: Mapping[str, Media],
        layout: Layout,
        graph: bytes | None = None,
    ) -> None:
        """Writes what is known before the first step.

        Args:
            hyperparameters: what the HParams page is to tell runs apart by.
            media: name -> what to show.
            layout: which charts the custom-scalars page shows.
            graph: a GraphDef.

        Raises:
            OSError: if it cannot be written.
        """
        for path in glob.glob(os.path.join(glob.escape(os.path.join(self.path, _HPARAMS)), "events.out.tfevents.*")):
            os.remove(path)
        self._has_begun = True
        # Not at the start, which may hold what is to stay, but at the first step after it: all that is forgotten when
        # the run starts from here again.
        step, now = (self._start or 0) + 1, time.time()
        self._add(_HPARAMS, step, now, {HPARAMS_TAG: HParams(hyperparameters, now), LAYOUT_TAG: layout})
        self.show(step, media, now)
        if graph is not None:
            self._file("train").write(Event(wall_time=now, step=step, graph_def=graph))
        self.flush()

    def write(self, step: int, metrics: Mapping[str, float], when: float | None = None) -> None:
        """Writes each number, all of a directory in one event.

        Args:
            step: that the numbers belong to.
            metrics: name -> number.
            when: Unix, seconds; None: now.

        Raises:
            OSError: if it cannot be written.
        """
        when = when or time.time()
        events: dict[str, Event] = {}
        for name, value in metrics.items():
            run, tag = self._place(name)
            event = events.setdefault(run, Event(wall_time=when, step=step))
            event.summary.value.add(tag=tag, simple_value=float(value))
        for run, event in events.items():
            self._file(run).write(event)
        if self._has_begun:
            shown = [name for name in metrics if name.rpartition("/")[2] == "loss" or self._place(name)[0] != "train"]
            self._last = (step, {f"last/{name}": metrics[name] for name in shown}) if shown else self._last
            if len(events) > 1:  # something was evaluated
                self._write_last()

    def show(self, step: int, media: Mapping[str, Media], when: float | None = None) -> None:
        """Writes what is no number.

        Args:
            step: that it belongs to.
            media: name -> what to show.
            when: Unix, seconds; None: now.

        Raises:
            OSError: if it cannot be written.
        """
        by_run: dict[str, dict[str, Media]] = {}
        for name, item in media.items():
            run, tag = self._place(name)
            by_run.setdefault(run, {})[tag] = item
        for run, tagged in by_run.items():
            self._add(run, step, when or time.time(), tagged)

    def close(self, has_succeeded: bool | None = None) -> None:
        """Closes the files; a later write makes new ones.

        Args:
            has_succeeded: what the HParams page says of the run; None: that it is running.

        Raises:
            OSError: if it cannot be written.
        """
        try:
            if self._has_begun and self._files:
                self._write_last()
                if has_succeeded is not None:
                    self._add(_HPARAMS, 0, time.time(), {END_TAG: RunEnd(has_succeeded, time.time())})
        finally:
            files, self._files = self._files, {}
            for file in files.values():
                file.close()

    def _place(self, name: str) -> tuple[str, str]:
        """Says to which run a name belongs, and what it is called there."""
        if (place := self._places.get(name)) is None:
            prefix, _, rest = name.partition("/")
            place = self._places[name] = (prefix, rest) if prefix in self._evals and rest else ("train", name)
        return place

    def _add(self, run: str, step: int, when: float, media: Mapping[str, Media]) -> None:
        event = Event(wall_time=when, step=step)
        for tag, item in media.items():
            tensor, metadata = item.encode()
            event.summary.value.add(tag=tag, tensor=tensor, metadata=metadata)
        self._file(run).write(event)

    def _write_last(self) -> None:
        """Tells the HParams page the last losses and evaluations."""
        if self._last is not None:
            (step, numbers), self._last = self._last, None
            event = Event(wall_time=time.time(), step=step)
            for tag, value in numbers.items():
                event.summary.value.add(tag=tag, simple_value=float(value))
            self._file(_HPARAMS).write(event)

    def flush(self) -> None:
        """Hands all that was written to the operating system.

        Raises:
            OSError: if it cannot be written.
        """
        for file in self._files.values():
            file.flush()

    def _file(self, run: str) -> "_EventFile":
        if run not in self._files:
            self._files[run] = file = _EventFile(os.path.join(self.path, run))
            if self._start is not None:
                begin = SessionLog(status=SessionLog.START)
                file.write(Event(wall_time=time.time(), step=self._start + 1, session_log=begin))
        return self._files[run]


class _EventFile:
    """A file of events; every error is an OSError.

    TensorBoard's own writer has a thread, which keeps errors to itself until it is asked to flush, and computes
    checksums in Python, 20 ms for an image.
    """

    _numbers = itertools.count()

    def __init__(self, directory: str):
        os.makedirs(directory, exist_ok=True)
        # TensorBoard reads the files of a directory in the order of their names.
        self._path = os.path.join(
            directory, f"events.out.tfevents.{time.time():017.6f}.{os.getpid()}.{next(self._numbers)}"
        )
        with _os_errors(self._path):
            self._writer = tf.io.TFRecordWriter(self._path)
        self.write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, event: Event) -> None:
        with _os_errors(self._path):
            self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        with _os_errors(self._path):
            self._writer.flush()

    def close(self) -> None:
        with _os_errors(self._path):
            self._writer.close()


class _os_errors:  # noqa: N801 - used as a function; a generator would cost as much as the write
    """Turns TensorFlow's errors about files into Python's."""

    def __init__(self, path: str):
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, tf.errors.OpError):
            raise OSError(None, error.message.rpartition("; ")[2] or error.message, self._path) from error
