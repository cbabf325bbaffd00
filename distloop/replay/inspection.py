"""Inspects one step: the values of each example and the gradients, brought to the host while the step runs.

    inspector = StepInspector(state)
    step = inspector.watch(lambda: TrainStep(state, needs_full_gradients=True))
    gradients_by_path(step, update, step.sums(update, batch, layout))      # in the graph that takes the step
    inspector.values(batch, layout)                                         # once it has run

Nothing of the step changes: it computes what it computes, and the host is handed copies of the values.
"""

import copy
import dataclasses
import functools
import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.data.iterators import iterate
from distloop.data.shards import Batch, BatchLayout, batch_size
from distloop.distributed import gathering
from distloop.distributed.devices import HOST
from distloop.model.metrics import Weighted
from distloop.model.state import TrainState
from distloop.monitoring.text_tables import Table, print_lines
from distloop.training.forward_backward import ForwardBackward
from distloop.training.microbatches import Sums
from distloop.training.step import TrainStep
from distloop.workdir.records import show_number

_MOST_EXAMPLES, _MOST_GRADIENTS = 20, 10  # that are shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """A step of a run, taken again, as NumPy arrays; `print` shows its largest losses and gradients.

    Attributes:
        step: its number.
        batch: the rows of the global batch, in the structure of the data, without padding.
        rows: the numbers of its examples, `[B]`, of data by number; None: the data has none.
        values: what `loss_fn` returned for each example, `[B, ...]`, by name; the weights of `weighted` as
            `<name>/weight`; of several updates, `<update>/<name>`. Arguments of Keras metrics are left out.
        gradients: of the whole batch, summed and divided, before clipping, by the variable's path; of several updates,
            `<update>/<path>`.
        weights_before: the variables of the model by path, before the step.
        weights_after: the same after it.
        learning_rate: of the step; of several updates, by name.
        is_finite: whether the step was applied, as its loss and gradients were finite.
        differences: a sentence on the first row of the run, on the way, that the replay does not have; else none.
        failure: a sentence on what in the step was not finite, if that is an error; else empty.
    """

    step: int
    batch: Any
    rows: np.ndarray | None
    values: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    weights_before: dict[str, np.ndarray]
    weights_after: dict[str, np.ndarray]
    learning_rate: float | dict[str, float]
    is_finite: bool
    differences: list[str]
    failure: str

    def __repr__(self) -> str:
        return f"Replay(step {self.step}, {len(self.values)} values, {len(self.gradients)} gradients)"

    def __str__(self) -> str:
        stream = io.StringIO()
        for table in (*self._losses(), self._largest_gradients()):
            print_lines(table, stream)
        lines = [f"step {self.step}: {'applied' if self.is_finite else 'not applied, as numbers were not finite'}"]
        return "\n".join([*lines, *self.differences, *filter(None, [self.failure]), "", stream.getvalue().rstrip()])

    def _losses(self) -> list[Table]:
        tables = []
        for name in [name for name in self.values if name.rpartition("/")[2] == "loss"]:
            losses = np.asarray(self.values[name], np.float64)
            losses = losses.reshape(len(losses), -1).mean(1)
            order = np.argsort(-np.where(np.isnan(losses), np.inf, losses), kind="stable")[:_MOST_EXAMPLES]
            rows = [[str(i), "-" if self.rows is None else str(self.rows[i]), show_number(losses[i])] for i in order]
            tables.append(Table(f"Largest of {name}", ["in the batch", "row of the data", name], rows))
        return tables

    def _largest_gradients(self) -> Table:
        norms = {path: float(np.linalg.norm(gradient)) for path, gradient in self.gradients.items()}
        order = sorted(norms, key=lambda path: -np.inf if np.isnan(norms[path]) else -norms[path])[:_MOST_GRADIENTS]
        rows = [[path, show_number(norms[path]), show_number(self._norm(path))] for path in order]
        return Table("Largest gradients", ["gradient", "norm", "norm of the weight"], rows)

    def _norm(self, path: str) -> float:
        weight = self.weights_before.get(path, self.weights_before.get(path.partition("/")[2]))
        return float("nan") if weight is None else float(np.linalg.norm(weight))


class StepInspector:
    """Collects the values that `loss_fn` returns in a step."""

    def __init__(self, state: TrainState):
        """Prepares for a step of a state."""
        self._state = state
        # By name and replica, then by the number of the call of `loss_fn`. Calls of the host have no order of their
        # own, and TensorFlow reads one iterator in the program's order, inside functions and loops, too.
        self._values: dict[str, dict[int, dict[int, np.ndarray]]] = {}
        with tf.device(HOST):
            self._numbers = iterate(tf.data.Dataset.counter())

    def watch(self, make_step: Callable[[], Any]) -> Any:
        """Returns a step whose `loss_fn`s hand over what they return."""
        spec = self._state.spec
        watched = copy.copy(spec)
        updates = [update.with_loss(functools.partial(self._watched, update.name)) for update in spec.updates]
        object.__setattr__(watched, "updates", tuple(updates))
        self._state.spec = watched
        try:
            return make_step()
        finally:
            self._state.spec = spec

    def values(self, batch: Batch, layout: BatchLayout) -> dict[str, np.ndarray]:
        """Returns the values of each example by name, in the order of the batch."""
        sizes = layout.shard_sizes(self._state.strategy.num_replicas_in_sync, int(batch_size(batch.rows)))
        values = {}
        for name, of_replicas in self._values.items():
            pieces = []
            for replica, size in enumerate(sizes):
                calls = of_replicas[replica]
                pieces.append(_join([calls[number] for number in sorted(calls)])[:size])  # of the first pass
            values[name] = _join(pieces)[: None if batch.size is None else int(batch.size)]
        return values

    def _watched(self, update: str, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(loss_fn)
        def call(batch: Any, training: bool) -> Any:
            outputs = loss_fn(batch, training)
            exchange = gathering.current_exchange()
            computes_values = exchange is None or not exchange.given or bool(exchange.rows)  # else from rows of zeros
            if isinstance(outputs, Mapping) and computes_values:
                named = _tensors(f"{update}/" if update else "", outputs)
                replica = tf.convert_to_tensor(tf.distribute.get_replica_context().replica_id_in_sync_group)

                def keep(number: np.ndarray, replica: np.ndarray, *arrays: np.ndarray) -> None:
                    for name, array in zip(named, arrays, strict=True):
                        self._values.setdefault(name, {}).setdefault(int(replica), {})[int(number)] = np.array(array)

                tf.numpy_function(keep, [next(self._numbers), replica, *named.values()], [], stateful=True)
            return outputs

        return call


def gradients_by_path(step: TrainStep, update: ForwardBackward, sums: Sums) -> dict[str, tf.Tensor]:
    """Returns the gradients of an update in a step, as in `Replay.gradients`; outside of replicas."""
    segments, weight = step.application.first((sums.segments, sums.weight))
    scale = tf.math.divide_no_nan(1.0, weight)
    names = [update.full_name(step.state.paths[id(variable)]) for variable in update.variables]
    return dict(zip(names, map(tf.convert_to_tensor, update.packing.unpack(segments, scale)), strict=True))


def _tensors(prefix: str, outputs: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Returns the values that a `loss_fn` returned, and the weights of those that have some, by name."""
    tensors = {}
    for name, value in outputs.items():
        if isinstance(value, Weighted):
            tensors[f"{prefix}{name}/weight"] = value.weights
            value = value.values
        if isinstance(value, tuple):
            continue  # arguments of a Keras metric
        tensors[prefix + name] = value
    dense = {
        n: t.to_tensor() if isinstance(t, tf.RaggedTensor) else tf.convert_to_tensor(t) for n, t in tensors.items()
    }
    return {n: tf.cast(t, tf.float32) if t.dtype.is_floating and t.dtype.size < 4 else t for n, t in dense.items()}


def _join(pieces: list[np.ndarray]) -> np.ndarray:
    """Returns the rows of several arrays, `[b, ...]`, padded with zeros where other axes differ."""
    shape = np.max([piece.shape for piece in pieces], 0)[1:]
    widths = [[(0, 0), *((0, int(n)) for n in shape - piece.shape[1:])] for piece in pieces]
    return np.concatenate([np.pad(piece, width) for piece, width in zip(pieces, widths, strict=True)])
