"""Owns what TensorBoard is told of a run before its first step: settings, flags, model, environment, incidents, graph.

    introduce(writer, state, config, element_spec)      # of a SummaryWriter

It does not know how a run goes.
"""

import dataclasses
import os
import platform
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorboard
import tensorflow as tf
from absl import logging

from distloop import cluster, config, records
from distloop.config import Config
from distloop.displays import Layout, Text
from distloop.paths import named_variables
from distloop.state import TrainState
from distloop.summaries import SummaryWriter

_MOST_ROWS = 200  # of the model's table
_MOST_NODES = 5000  # of a graph: TensorBoard draws no more in a reasonable time
_MOST_BYTES = 1024  # of a constant in a graph
# Tracing costs about 2 ms a variable, and nothing can stop it: up to so many it stays below 0.3 s.
_FEW_VARIABLES = 100


def introduce(writer: SummaryWriter, state: TrainState, settings: Config, element_spec: Any) -> None:
    """Writes what is known of a run before its first step.

    Args:
        writer: of the run.
        state: what is trained; built.
        settings: of the run.
        element_spec: what a batch looks like.

    Raises:
        OSError: if it cannot be written.
    """
    texts = {
        "run/config": Text(describe_config(settings)),
        "run/flags": Text(describe_flags(settings)),
        "run/model": Text(describe_model(state)),
        "run/environment": Text(describe_environment(state, settings)),
    }
    if incidents := describe_incidents(settings.workdir):
        texts["run/incidents"] = Text(incidents)
    is_cheap = len(state.paths) <= _FEW_VARIABLES and cluster.num_workers(state.strategy) == 1
    graph = None
    if settings.graph == "always" or (settings.graph == "auto" and is_cheap and int(state.step) == 0):
        graph = trace_graph(state, element_spec)
    writer.begin(config.hyperparameters(settings), texts, make_layout(settings), graph)


def make_layout(settings: Config) -> Layout:
    """Chooses charts for the custom-scalars page, none of which stays empty."""
    # A tag is the same in training and evaluation, so their lines share a chart. `last/` is for the HParams page.
    others = "|".join(sorted({*records.ABOUT_THE_RUN, "skipped_steps", "regularization", "loss"}))
    charts = {
        "Learning": {
            "loss": r"(?!last/)(.*/)?(loss|regularization)$",
            "metrics": rf"(?!last/)(?!(.*/)?({others})$)",
        },
        "Speed": {
            "steps per second": r"steps_per_sec$",
            "share of the time that the loop waited for data": r"input_wait$",
        },
        "Steps": {
            "learning rate": r"(.*/)?learning_rate$",
            "gradient norm": r"(.*/)?gradient_norm$",
            "skipped steps": r"skipped_steps$",
        },
    }
    if settings.clip_norm:
        charts["Steps"]["share of the steps that were clipped"] = r"(.*/)?clipped_share$"
    if settings.precision == "mixed_float16":
        charts["Steps"]["loss scale"] = r"(.*/)?loss_scale$"
    if settings.histograms_every:
        charts["Steps"] |= {"weight norm": r"(.*/)?weight_norm$", "update norm": r"(.*/)?update_norm$"}
        charts["Steps"]["update norm over weight norm"] = r"(.*/)?update_ratio$"
    return Layout({title: {name: [tag] for name, tag in part.items()} for title, part in charts.items()})


def describe_config(settings: Config) -> str:
    """Lists every setting, those that differ from their default first."""
    rows = [(f.name, getattr(settings, f.name), f.default) for f in dataclasses.fields(settings)]
    changed = _table(["setting", "value", "default"], [row for row in rows if row[1] != row[2]])
    others = _table(["setting", "value"], [row[:2] for row in rows if row[1] == row[2]])
    return f"Settings that differ from their defaults:\n\n{changed}\n\nAll others:\n\n{others}"


def describe_flags(settings: Config) -> str:
    """Lists the flags that repeat the run, as `flags.txt` does."""
    return _table(["flag", "value"], config.facts(settings).items())


def describe_model(state: TrainState) -> str:
    """Lists the variables of the model."""
    trained: dict[int, list[str]] = {}
    for name, variables in state.variables_of_update.items():
        for variable in variables:
            trained.setdefault(id(variable), []).append(name or "yes")
    named = named_variables(state.model)
    counts = {path: int(np.prod(variable.shape)) for path, variable in named.items()}
    rows = [
        (
            path,
            list(variable.shape),
            tf.as_dtype(variable.dtype).name,
            ", ".join(trained.get(id(variable), ["no"])),
            f"{counts[path]:,}",
        )
        for path, variable in list(named.items())[:_MOST_ROWS]
    ]
    more = f"\n\nand {len(named) - _MOST_ROWS} more variables" if len(named) > _MOST_ROWS else ""
    total = f"{state.num_parameters():,} trained parameters of {sum(counts.values()):,} in {len(named)} variables"
    return f"{total}\n\n{_table(['variable', 'shape', 'dtype', 'trained', 'count'], rows)}{more}"


def describe_environment(state: TrainState, settings: Config) -> str:
    """Lists versions and devices."""
    devices = [device.name for device in tf.config.list_logical_devices()]
    rows = [
        ("start", f"step {int(state.step)}"),
        ("runs on", cluster.describe(state.strategy)),
        ("replicas", state.strategy.num_replicas_in_sync),
        ("workers", cluster.num_workers(state.strategy)),
        ("devices of the first worker", ", ".join(devices)),
        ("CPU cores", os.cpu_count()),
        ("precision", settings.precision),
        ("TensorFlow", tf.__version__),
        ("Keras", keras.__version__),
        ("NumPy", np.__version__),
        ("TensorBoard", tensorboard.__version__),
        ("Python", platform.python_version()),
        ("system", platform.platform()),
    ]
    return _table(["", ""], rows)


def describe_incidents(workdir: str) -> str:
    """Lists what made the run go back; empty where nothing did."""
    try:
        rows = records.read_rows(os.path.join(workdir, "incidents.jsonl"))
    except FileNotFoundError:
        return ""
    names = ["step", "batch", "action", "checkpoint", "left_out", "reason"]
    return _table(names, [[row.get(name, "") for name in names] for row in rows]) if rows else ""


def trace_graph(state: TrainState, element_spec: Any) -> bytes | None:
    """Traces the forward pass of every `loss_fn`, as one replica runs it to evaluate.

    Args:
        state: what is trained; built.
        element_spec: what a batch looks like.

    Returns:
        A GraphDef; None where there is none to be had or it is too large, which a log line tells.
    """

    def forward(batch: Any) -> None:
        for update in state.spec.updates:
            with tf.name_scope(update.name or "loss_fn"):
                update.loss_fn(batch, False)

    try:
        traced = tf.function(forward, autograph=False).get_concrete_function(_named(element_spec))
        graph = traced.graph.as_graph_def(add_shapes=True)
    except Exception as error:  # whatever a model does that cannot be traced alone: the run itself may do well
        logging.info("There is no graph of this model for TensorBoard: %s", error)
        return None
    functions = [function.node_def for function in graph.library.function]
    count = len(graph.node) + sum(map(len, functions))
    if count > _MOST_NODES:
        logging.info("The graph of this model has %d operations, too many for TensorBoard to draw.", count)
        return None
    for nodes in (graph.node, *functions):
        for node in nodes:
            if node.op == "Const" and node.attr["value"].ByteSize() > _MOST_BYTES:
                node.attr["value"].Clear()
    content: bytes = graph.SerializeToString()
    return content


def _named(element_spec: Any) -> Any:
    """Names the inputs of a graph after the entries of the batch."""
    leaves = [
        tf.TensorSpec(leaf.shape, leaf.dtype, "_".join(map(str, path)) or "batch")
        if isinstance(leaf, tf.TensorSpec)
        else leaf
        for path, leaf in keras.tree.flatten_with_path(element_spec)
    ]
    return tf.nest.pack_sequence_as(element_spec, leaves)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Writes a table in Markdown, every value as it is."""
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        cells = [" ".join(str(cell).replace("|", "\\|").replace("`", "'").split()) for cell in row]
        lines.append(f"| {' | '.join(f'`{cell}`' if cell else ' ' for cell in cells)} |")
    return "\n".join(lines) if len(lines) > 2 else "none"
