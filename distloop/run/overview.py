"""Overview: settings, model, environment and graph of a run, for TensorBoard and the console.

    forward = ForwardPass(state, config).trace(element_spec)
    introduce(writer, state, config, forward)           # of a SummaryWriter

The graph of the forward pass counts floating-point operations, too.
"""

import collections
import dataclasses
import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorboard
import tensorflow as tf

from distloop.data.source import Source
from distloop.distributed import collectives, strategies
from distloop.distributed.devices import short_device
from distloop.graph_functions import TRAINING_PASSES, count_flops, graph_function, has_clock, peak_of
from distloop.log import log, say
from distloop.model.state import TrainState
from distloop.monitoring.console import show_split, show_sum
from distloop.monitoring.media import LayerGraph, Media, Text
from distloop.monitoring.tensorboard import SummaryWriter
from distloop.optimizers.gradients import Clipping
from distloop.settings import flags
from distloop.settings.config import Config
from distloop.settings.precision import PRECISIONS
from distloop.urls import absolute
from distloop.variables import count_parameters, named_variables, tensorflow_variable, top_layers
from distloop.workdir import records

_MAX_ROWS = 200  # of the model's table
_MOST_VALUES = 2**20  # of a variable, in its mean
_MAX_NODES = 5000  # of a graph: TensorBoard cannot draw more in a reasonable time
_MAX_BYTES = 1024  # of a constant in a graph
# Tracing takes about 2 ms per variable and cannot be interrupted; with this many it stays below 0.3 s.
_FEW_VARIABLES = 100
_MANY_ROWS = 100_000  # of a table; with fewer, a step hardly shows that it walks all of it


def introduce(writer: SummaryWriter, state: TrainState, settings: Config, forward: tf.Graph | None) -> None:
    """Writes the overview to TensorBoard; the state is built, and the graph of the forward pass is `ForwardPass`'s.

    Raises:
        OSError: if it cannot be written.
    """
    texts: dict[str, Media] = {
        "run/config": Text(describe_config(settings)),
        "run/flags": Text(_table(["flag", "value"], flags.facts(settings).items())),  # those that repeat the run
        "run/model": Text(describe_model(state)),
        "run/environment": Text(describe_environment(state, settings)),
    }
    if incidents := describe_incidents(settings.local_workdir):
        texts["run/incidents"] = Text(incidents)
    graph = None
    if settings.graph == "always" or (settings.graph == "auto" and int(state.step) == 0):
        graph = None if forward is None else drawable(forward)
        texts |= layer_graphs(state.model)
    writer.begin(flags.hyperparameters(settings), texts, make_charts(settings), graph)


def make_charts(settings: Config) -> dict[str, dict[str, str]]:
    """Returns the charts of the custom-scalars page; none of them stays empty."""
    # A tag is the same in training and evaluation, so their lines share a chart.
    charts = {
        "Learning": {
            "loss": r"Metrics/(.*/)?(loss|regularization)$",
            "metrics": r"Metrics/(?!(.*/)?(loss|regularization)$)",
        },
        "Speed": {
            "steps per second": r"speed/steps_per_sec$",
            "seconds of a step: half, 90 % and 99 % of them took no longer": r"speed/step_secs_p\d+$",
            "fraction of the time that the loop waited for data": r"speed/input_wait$",
        },
        "Steps": {
            "learning rate": r"optimizer/(.*/)?learning_rate$",
            "gradient norm": r"optimizer/(.*/)?gradient_norm$",
            "weight norm": r"optimizer/(.*/)?weight_norm$",
            "skipped steps": r"optimizer/skipped_steps$",
        },
    }
    if Clipping.from_settings(settings):
        charts["Steps"]["fraction of the steps that were clipped"] = r"optimizer/(.*/)?clipped_share$"
    if PRECISIONS[settings.precision].needs_loss_scale:
        charts["Steps"]["loss scale"] = r"optimizer/(.*/)?loss_scale$"
    if settings.gradient_noise_every:
        charts["Steps"]["gradient noise scale"] = r"optimizer/(.*/)?gradient_noise_scale$"
    if settings.histograms_every:
        charts["Steps"]["update norm"] = r"optimizer/(.*/)?update_norm$"
        charts["Steps"]["update norm over weight norm"] = r"optimizer/(.*/)?update_ratio$"
    return charts


def layer_graphs(models: Any) -> dict[str, LayerGraph]:
    """Returns the layers of Sequential and functional models by tag: `keras`, of several models `keras/<name>`."""
    graphs = {}
    for path, model in keras.tree.flatten_with_path(models):
        if not isinstance(model, keras.Model):
            continue
        try:
            content = model.to_json()
            if json.loads(content)["config"].get("layers"):  # a subclassed model has none
                graphs["/".join(["keras", *map(str, path)])] = LayerGraph(content)
        except Exception as error:  # a layer without a config: the model trains all the same
            log.info("There is no graph of the layers for TensorBoard: %s", error)
    return graphs


def describe_config(settings: Config) -> str:
    """Returns a table of all settings, first those that differ from their defaults."""
    shown = flags.shown_settings(settings)
    rows = [(f.name, shown[f.name], f.metadata["default"]) for f in dataclasses.fields(settings)]
    changed = _table(["setting", "value", "default"], [row for row in rows if row[1] != row[2]])
    others = _table(["setting", "value"], [row[:2] for row in rows if row[1] == row[2]])
    return f"Settings that differ from their defaults:\n\n{changed}\n\nAll others:\n\n{others}"


def describe_model(state: TrainState) -> str:
    """Returns a table of the model's variables."""
    trained: dict[int, list[str]] = {}
    for name, variables in state.variables_of_update.items():
        for variable in variables:
            trained.setdefault(id(variable), []).append(name or "yes")
    named = named_variables(state.model)
    counts = {path: int(np.prod(variable.shape)) for path, variable in named.items()}
    rows = []
    for path, variable in list(named.items())[:_MAX_ROWS]:
        updates, dtype = ", ".join(trained.get(id(variable), ["no"])), tf.as_dtype(variable.dtype)
        row = [path, list(variable.shape), dtype.name, updates, f"{counts[path]:,}"]
        row += [records.show_bytes(counts[path] * dtype.size), *_moments(variable, counts[path])]
        rows.append([*row, short_device(tensorflow_variable(variable).device)] if state.stage_devices else row)
    more = f"\n\nand {len(named) - _MAX_ROWS} more variables" if len(named) > _MAX_ROWS else ""
    total = f"{state.num_parameters():,} trained parameters of {sum(counts.values()):,} in {len(named)} variables"
    head = ["variable", "shape", "dtype", "trained", "count", "size", "mean", "deviation"]
    head += ["device"] * bool(state.stage_devices)
    return f"{total}\n\n{_table(head, rows)}{more}"


def _moments(variable: Any, count: int) -> tuple[str, str]:
    """Returns the mean and the standard deviation of a variable's values now; of a large one, of its first values."""
    plain = tensorflow_variable(variable)
    if not count or not (plain.dtype.is_floating or plain.dtype.is_integer):
        return "", ""
    rows = plain[: max(1, _MOST_VALUES * plain.shape[0] // count)] if count > _MOST_VALUES else plain
    values = np.asarray(rows, np.float64)
    return records.show_number(values.mean()), records.show_number(values.std())


def describe_environment(state: TrainState, settings: Config) -> str:
    """Returns a table of versions and devices."""
    rows = [
        ("start", f"step {int(state.step)}"),
        ("runs on", strategies.describe(state.strategy)),
        ("replicas", state.strategy.num_replicas_in_sync),
        *([("virtual replicas", state.replicas.count)] if state.replicas.same_bits else []),
        ("workers", collectives.num_workers(state.strategy)),
        ("devices of the first worker", ", ".join(device.name for device in tf.config.list_logical_devices())),
        ("CPU cores", os.cpu_count()),
        ("precision", _precision(state, settings)),
        ("TensorFlow", tf.__version__),
        ("Keras", keras.__version__),
        ("NumPy", np.__version__),
        ("TensorBoard", tensorboard.__version__),
        ("Python", platform.python_version()),
        ("system", platform.platform()),
    ]
    return _table(["", ""], rows)


def describe_incidents(workdir: str) -> str:
    """Returns a table of the divergences after which the run went back; empty if there are none."""
    rows = records.read_rows_if_any(os.path.join(workdir, "incidents.jsonl"), instead="TensorBoard lacks the incidents")
    names = ["step", "batch", "action", "checkpoint", "left_out", "reason"]
    return _table(names, [[row.get(name, "") for name in names] for row in rows]) if rows else ""


def peak_flops(state: TrainState, settings: Config) -> float | None:
    """Returns the peak floating-point operations per second of all devices together; None if it is unknown."""
    peak: float | None = settings.peak_flops
    if not peak:
        gpus = tf.config.get_visible_devices("GPU") if settings.device != "cpu" else []
        names = {tf.config.experimental.get_device_details(gpu).get("device_name", "") for gpu in gpus}
        peak = peak_of(names.pop(), PRECISIONS[settings.precision].is_half) if len(names) == 1 else None
    return peak and peak * num_devices(state)


def num_devices(state: TrainState) -> int:
    """Returns on how many devices all workers train: one for each replica, or those of its pipeline stages."""
    return (len(set(state.stage_devices)) or 1) * int(state.strategy.num_replicas_in_sync)


class ForwardPass:
    """The forward pass of every `loss_fn`, as one replica would evaluate it; traced once for each kind of data."""

    def __init__(self, state: TrainState, settings: Config):
        """Prepares; nothing is traced yet."""
        self._state, self._settings = state, settings
        self._kind: Any = None
        self._graph: tf.Graph | None = None

    def trace(self, element_spec: Any, batch_size: int | None = None) -> tf.Graph | None:
        """Returns the graph for batches of a structure, of the batch size if it is known; the state is built.

        None: tracing costs more than its use, or is impossible, which a log line says.
        """
        if self._kind != (kind := (element_spec, batch_size)):
            self._kind, self._graph = kind, self._trace(*kind)
        return self._graph

    def step_flops(self, source: Source) -> float | None:
        """Returns the floating-point operations of a step on data; None: they cannot be counted."""
        batch_size = source.info.batch_size
        flops = count_flops(self.trace(source.info.element_spec, batch_size)) if batch_size else None
        return flops and TRAINING_PASSES * flops

    def choose_executor(self, source: Source) -> str:
        """Returns the executor of a step's graph on data; stages run at the same time, however small a step is."""
        flops = None if self._state.stage_devices else self.step_flops(source)
        return strategies.choose_executor(self._state.strategy, self._settings.executor, flops)

    def _trace(self, element_spec: Any, batch_size: int | None) -> tf.Graph | None:
        state, settings = self._state, self._settings
        if settings.eager:  # loss_fn must get tensors with values
            return None
        is_cheap = len(state.paths) <= _FEW_VARIABLES and collectives.num_workers(state.strategy) == 1
        if not is_cheap and settings.graph != "always" and not peak_flops(state, settings):
            return None

        def forward(batch: Any) -> None:
            for update in state.spec.updates:
                with tf.name_scope(update.name or "loss_fn"):
                    update.loss_fn(batch, False)

        try:
            graph: tf.Graph = graph_function(forward).get_concrete_function(_named(element_spec, batch_size)).graph
            return graph
        except Exception as error:  # a model that cannot be traced here may still train
            log.info("There is no graph of this model for TensorBoard: %s", error)
            return None


def drawable(traced: tf.Graph) -> bytes | None:
    """Returns a graph in the form that TensorBoard draws.

    Returns:
        A serialized GraphDef without large constants; None if it is too large, which a log line says.
    """
    graph = traced.as_graph_def(add_shapes=True)
    functions = [function.node_def for function in graph.library.function]
    count = len(graph.node) + sum(map(len, functions))
    if count > _MAX_NODES:
        log.info("The graph of this model has %d operations, too many for TensorBoard to draw.", count)
        return None
    for nodes in (graph.node, *functions):
        for node in nodes:
            if node.op == "Const" and node.attr["value"].ByteSize() > _MAX_BYTES:
                node.attr["value"].Clear()
    return bytes(graph.SerializeToString())


def _named(element_spec: Any, batch_size: int | None) -> Any:
    """Returns the specs of a graph's inputs, named after the entries of the batch, with its size."""
    leaves = [
        tf.TensorSpec([batch_size or leaf.shape[0], *leaf.shape[1:]], leaf.dtype, "_".join(map(str, path)) or "batch")
        if isinstance(leaf, tf.TensorSpec)
        else leaf
        for path, leaf in keras.tree.flatten_with_path(element_spec)
    ]
    return tf.nest.pack_sequence_as(element_spec, leaves)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table in Markdown, with every value as code."""
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        cells = [" ".join(str(cell).replace("|", "\\|").replace("`", "'").split()) for cell in row]
        lines.append(f"| {' | '.join(f'`{cell}`' if cell else ' ' for cell in cells)} |")
    return "\n".join(lines) if len(lines) > 2 else "none"


def describe_shard(source: Source, strategy: tf.distribute.Strategy) -> str:
    """Returns a sentence about what this worker reads and which part of it its replicas take."""
    index, each = collectives.worker_index(strategy), source.layout.per_device
    local, total = collectives.num_local_replicas(strategy) * each, strategy.num_replicas_in_sync * each
    worker = f"worker {index} of {collectives.num_workers(strategy)}"
    if source.depends_on_workers:
        batches = "endless batches" if source.info.is_endless else f"{source.info.num_batches} batches a pass"
        missing = source.info.num_missing_batches
        fillers = f", {missing} of them without examples, as other shards are longer" if missing else ""
        return f"{worker} reads its own shard, {batches}{fillers}."
    first, last = index * local, (index + 1) * local - 1
    shards = f"shard {first}" if local == 1 else f"shards {first} to {last}"
    reads = "reads" if getattr(source.feed, "worker_rows", None) else "reads all and trains on"
    return f"{worker} {reads} {shards} of {total} of every batch."


def _precision(state: TrainState, settings: Config) -> str:
    """Returns the precision of the layers with variables; of several, in how many layers each is."""
    layers = [each for top in top_layers(state.model) for each in top._flatten_layers() if each._trainable_variables]
    counts = collections.Counter(layer.dtype_policy.name for layer in layers)
    if len(counts) < 2:
        return next(iter(counts), settings.precision)
    return f"{', '.join(f'{name} in {count}' for name, count in counts.most_common())} of {len(layers)} layers"


def console_lines(state: TrainState, settings: Config, source: Source) -> list[str]:
    """Returns what the console shows before the first step, a line each: devices, precision, parameters, batch, ..."""
    of_layers, trained = count_parameters(state.model), state.num_parameters()
    total = sum(of_layers.values())
    some = "" if trained == total else f", of which {trained:,} train{_left_out(state)}"
    virtual = f", {state.replicas.count} virtual replicas" if state.replicas.same_bits else ""
    lines = [
        f"devices {strategies.describe(state.strategy)}{virtual}",
        f"precision {_precision(state, settings)}",
        f"parameters {total:,}{some}" + (f" = {show_sum(of_layers)}" if len(of_layers) > 1 else ""),
    ]
    if (batch_size := source.info.batch_size) is not None:
        sizes = source.info.replica_batch_sizes
        name = f"batch {batch_size} on each worker" if source.layout.is_sharded else f"global batch {batch_size}"
        replica = "virtual replica" if virtual else "replica"
        each = f"{sizes[0]} per {replica}" if len(set(sizes)) == 1 else show_split(sizes)
        lines.append(f"{name} ({each})" if len(sizes) > 1 else name)
    lines += state.describe()
    if virtual and strategies.has_gpus(state.strategy):
        lines.append("virtual replicas are untested on GPUs")
    if not has_clock():
        lines.append("deterministic operations, without a clock: rows lack input_wait, step_secs_p50 and the like")
    if settings.average_from or settings.average_decay:
        how = f"from {settings.average_from} on" if settings.average_from else f"decay {settings.average_decay:g}"
        lines.append(f"averaged weights, {how}: evaluate, predict and export use them")
    if settings.microbatches != 1:
        lines.append(f"microbatches {settings.microbatches}")
    if settings.workdir and not settings.fast_dev_run:
        if source.resume:
            lines.append(f"data {type(source.data).__name__}: {source.resume}")
        lines.append(f"workdir {absolute(settings.workdir)}")
        lines.append(f"{_tensorboard()} --logdir {shlex.quote(settings.local_workdir)}")
    return lines


def _left_out(state: TrainState) -> str:
    """Returns the layers whose variables could train and no update takes, in brackets; empty: there are none."""
    others = {id(v) for v in (*state.trained_variables, *state.seeds)}
    left_out = [path for path, v in named_variables(state.model).items() if v.trainable and id(v) not in others]
    layers = list(dict.fromkeys(path.rpartition("/")[0] or path for path in left_out))
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return f" (no update takes {', '.join(layers[:3])}{more})" if layers else ""


def _tensorboard() -> str:
    """Returns the command that starts TensorBoard; an environment that is not activated has none on the PATH."""
    if shutil.which("tensorboard") or not sys.executable:
        return "tensorboard"
    relative = os.path.relpath(sys.executable)
    return f"{shlex.quote(sys.executable if relative.startswith(os.pardir) else relative)} -m tensorboard.main"


def report_dense_tables(updates: Iterable[Any], state: TrainState, *, is_shown: bool) -> None:
    """Prints the tables of many rows that a step updates densely, and why, if this worker prints anything."""
    for update in updates if is_shown else ():
        reasons = update.packing.reasons
        for variable in (v for v in update.variables if id(v) in reasons and v.shape[0] >= _MANY_ROWS):
            if (reason := reasons[id(variable)]) is not None:
                table = f"the table {state.paths[id(variable)]} of {variable.shape[0]:,} rows"
                say(f"{table} is updated as a whole at each step, since {reason}")
