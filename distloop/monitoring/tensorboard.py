"""TensorBoard: writes metrics and media to event files, so that no step appears twice.

    writer = SummaryWriter("run", evals=["test"], start=0)
    writer.begin({"learning_rate": 1e-3}, {"run/config": Text("...")}, {...})
    writer.write(500, {"loss": 0.12, "test/accuracy": 0.98})
    writer.show(500, {"samples": Images(array)})
    writer.close(has_succeeded=True)

When a run resumes, a marker in the file makes TensorBoard discard later steps. The writer does not know when it is
called.
"""

import contextlib
import glob
import itertools
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import summary as custom_scalars
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from tensorboard.plugins.scalar import metadata as scalars

from distloop.monitoring.media import Media
from distloop.workdir.records import GROUPS, METRICS

# The end of the name of the file for the HParams page. TensorBoard keeps the first status that it reads, so there is
# only the file of the last start. It is read last, because files are read in the order of their names.
_HPARAMS = ".hparams"
_EVENT_FILE = re.compile(r"events\.out\.tfevents\.(\d{10}(\.\d+)?)\.")
# Names in a workdir that an evaluation cannot have for its directory.
_TAKEN = frozenset(
    "train checkpoints evaluations export config.json flags.txt metrics.jsonl incidents.jsonl starts.jsonl "
    "writers.json".split()
)

_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}

_VALUE = (
    "A value of `loss_fn`, or a number of an action. Values of `loss_fn` are weighted means over the examples since "
    "the last row; in an evaluation, over all its examples."
)
_MEDIA = "Returned by an action, such as a `distloop.Summary`."
_MEDIA_GROUPS = {
    "keras": "The layers of the model.",
    "run": "Written when the run starts.",
    "weights": "The values of a variable.",
    "activations": "At most 131,072 outputs of a layer, for the examples of `distloop.ActivationHistograms`.",
    "gradients": "The gradient of a variable in one step, after clipping.",
}


class SummaryWriter:
    """Writes event files: training to `<directory>/train`, an evaluation to `<directory>/<eval>`.

    `<directory>` itself gets what belongs to both: texts, graphs, hyperparameters. It is the trial of the HParams page,
    and the numbers of the runs below it are the trial's metrics.

    A tag has no evaluation's prefix, so that evaluation and training share a chart. An evaluation called `train`, or as
    another entry of a workdir, is written to `train` and keeps its prefix. Files are created when they are first
    written to.
    """

    def __init__(self, directory: str, evals: Sequence[str], start: int | None = None):
        """Stores the paths; writes nothing.

        Args:
            directory: the parent of the runs' directories, a workdir.
            evals: names of the evaluations.
            start: the global step that the run starts from; TensorBoard discards later steps of earlier files. None:
                it keeps them.
        """
        self.path = directory
        self._start = start
        self._evals = frozenset(name for name in evals if name not in _TAKEN and not name.startswith("."))
        self._files: dict[str, _EventFile] = {}
        self._has_begun = False

    def begin(
        self,
        hyperparameters: Mapping[str, object],
        media: Mapping[str, Media],
        charts: Mapping[str, Mapping[str, str]],
        graph: bytes | None = None,
    ) -> None:
        """Writes hyperparameters, media, chart layout and graph before the first step.

        Args:
            hyperparameters: values for the HParams page, by name.
            media: name -> media.
            charts: of the custom-scalars page: category -> title -> regular expression of tags.
            graph: a serialized GraphDef; None: no graph.

        Raises:
            OSError: if a file cannot be written.
        """
        for path in glob.glob(os.path.join(glob.escape(self.path), f"events.out.tfevents.*{_HPARAMS}")):
            os.remove(path)
        self._has_begun = True
        # At the first step after the start: TensorBoard discards it if the run starts from here again. At the start
        # itself there may be events to keep.
        step, now = (self._start or 0) + 1, time.time()
        self._add("", step, now, media)
        if graph is not None:
            self._file("").write(Event(wall_time=now, step=step, graph_def=graph))
        info = SessionStartInfo(start_time_secs=now)
        for name, value in hyperparameters.items():
            kind = "bool" if isinstance(value, bool) else "number" if isinstance(value, (int, float)) else "string"
            setattr(info.hparams[name], f"{kind}_value", str(value) if kind == "string" else value)
        event = Event(wall_time=now, step=step, summary=_of_trial(session_start_info=info))
        layout = layout_pb2.Layout()
        for title, named in charts.items():
            category = layout.category.add(title=title)
            for name, tag in named.items():
                category.chart.add(title=name, multiline=layout_pb2.MultilineChartContent(tag=[tag]))
        event.summary.MergeFromString(custom_scalars.pb(layout).SerializeToString())
        self._file(_HPARAMS).write(event)
        self.flush()

    def write(self, step: int, metrics: Mapping[str, float], when: float | None = None) -> None:
        """Writes metrics, as one event per directory.

        Args:
            step: the step of the metrics.
            metrics: name -> number.
            when: Unix, seconds; None: now.

        Raises:
            OSError: if a file cannot be written.
        """
        when = when or time.time()
        events: dict[str, Event] = {}
        for name, value in metrics.items():
            run, rest = self._split(name)
            tag = group_tag(rest)
            event = events.setdefault(run, Event(wall_time=when, step=step))
            event.summary.value.add(tag=tag, simple_value=float(value), metadata=self._file(run).introduce(tag))
        for run, event in events.items():
            self._file(run).write(event)

    def show(self, step: int, media: Mapping[str, Media], when: float | None = None) -> None:
        """Writes media.

        Args:
            step: the step of the media.
            media: name -> media.
            when: Unix, seconds; None: now.

        Raises:
            OSError: if a file cannot be written.
        """
        by_run: dict[str, dict[str, Media]] = {}
        for name, item in media.items():
            run, rest = self._split(name)
            by_run.setdefault(run, {})[rest] = item
        for run, tagged in by_run.items():
            self._add(run, step, when or time.time(), tagged)

    def close(self, has_succeeded: bool | None = None) -> None:
        """Closes the files; a later write creates new ones.

        Args:
            has_succeeded: the run's status on the HParams page; None: running.

        Raises:
            OSError: if a file cannot be written.
        """
        try:
            if self._has_begun and self._files and has_succeeded is not None:
                now, status = time.time(), STATUS_SUCCESS if has_succeeded else STATUS_FAILURE
                info = SessionEndInfo(status=status, end_time_secs=now)
                self._file(_HPARAMS).write(Event(wall_time=now, summary=_of_trial(session_end_info=info)))
        finally:
            files, self._files = self._files, {}
            for file in files.values():
                file.close()

    def _split(self, name: str) -> tuple[str, str]:
        """Returns the TensorBoard run that a name belongs to, and the name without an evaluation's prefix."""
        prefix, _, rest = name.partition("/")
        return (prefix, rest) if prefix in self._evals and rest else ("train", name)

    def _add(self, run: str, step: int, when: float, media: Mapping[str, Media]) -> None:
        event = Event(wall_time=when, step=step)
        for tag, item in media.items():
            tensor, metadata = item.encode()
            metadata.summary_description = metadata.summary_description or describe_media(tag)
            event.summary.value.add(tag=tag, tensor=tensor, metadata=metadata)
        self._file(run).write(event)

    def flush(self) -> None:
        """Hands all events to the operating system, so that they survive this process.

        Raises:
            OSError: if a file cannot be written.
        """
        for file in self._files.values():
            file.flush()

    def discard(self, step: int) -> None:
        """Goes on in new files after an error; in older ones TensorBoard then discards what they hold from `step` on.

        Args:
            step: the first one that is written again.
        """
        files, self._files, self._start = self._files, {}, step - 1
        for file in files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _file(self, run: str) -> "_EventFile":
        if run == _HPARAMS and run not in self._files:
            self._files[run] = _EventFile(self.path, _HPARAMS)
        if run not in self._files:
            self._files[run] = file = _EventFile(os.path.join(self.path, run))
            if self._start is not None:
                begin = SessionLog(status=SessionLog.START)
                file.write(Event(wall_time=time.time(), step=self._start + 1, session_log=begin))
        return self._files[run]


def _of_trial(**data: Any) -> Summary:
    """Returns a summary with one field for the HParams page, as the functions of `tensorboard.plugins.hparams` do.

    Those import TensorBoard's copy of TensorFlow's files, and with it clients of buckets: a tenth of a second.
    """
    plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=HParamsPluginData(**data).SerializeToString())
    tensor = TensorProto(dtype=DT_FLOAT, tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=0)]))
    value = Summary.Value(tag=f"_hparams_/{min(data)}", metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
    return Summary(value=[value])


class _EventFile:
    """An event file; every error is an OSError.

    TensorBoard's own writer reports errors of its thread only at a flush, and computes checksums in Python, which takes
    20 ms per image.
    """

    _numbers = itertools.count()

    def __init__(self, directory: str, suffix: str = ""):
        os.makedirs(directory, exist_ok=True)
        # TensorBoard reads the files of a directory in alphabetical order: of a clock that was set back, too.
        times = [float(match[1]) for match in map(_EVENT_FILE.match, os.listdir(directory)) if match]
        after = max([time.time(), *(when + 1e-6 for when in times)])
        name = f"events.out.tfevents.{after:017.6f}.{os.getpid()}.{next(self._numbers)}{suffix}"
        self._path = os.path.join(directory, name)
        self._tags: set[str] = set()  # of numbers that have a description in this file
        self._writer = self._call(tf.io.TFRecordWriter, self._path)
        self.write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def introduce(self, tag: str) -> SummaryMetadata | None:
        """Returns the description that goes with the first number of a tag in a file; None: there was one."""
        if tag in self._tags:
            return None
        self._tags.add(tag)
        metadata = scalars.create_summary_metadata(None, describe(tag))
        metadata.data_class = DATA_CLASS_SCALAR  # without it TensorBoard's data server leaves out the description
        return metadata

    def write(self, event: Event) -> None:
        self._call(self._writer.write, event.SerializeToString())

    def flush(self) -> None:
        self._call(self._writer.flush)

    def close(self) -> None:
        self._call(self._writer.close)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except tf.errors.OpError as error:
            raise OSError(None, error.message.rpartition("; ")[2] or error.message, self._path) from error


def group_tag(name: str) -> str:
    """Returns the tag of a number: its name under the group of its last part, `Metrics` for the user's values."""
    return f"{_GROUP_OF.get(name.rpartition('/')[2], METRICS)}/{name}"


def describe(tag: str) -> str:
    """Returns the description of a number, in Markdown, by its tag."""
    name = tag.rpartition("/")[2]
    return GROUPS[_GROUP_OF[name]][name] if name in _GROUP_OF else _VALUE


def describe_media(tag: str) -> str:
    """Returns the description of media, in Markdown, by their tag."""
    return _MEDIA_GROUPS.get(tag.partition("/")[0], _MEDIA)
