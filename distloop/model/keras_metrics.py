"""Keras metrics: updates, reads, resets and saves Keras metrics that are no mean over examples, such as AUC.

    keras_metrics = KerasMetrics({"auc": keras.metrics.AUC()}, strategy)
    keras_metrics.add({"auc": (labels, probabilities)}, row_weights)         # in replica context
    keras_metrics.results()                                                  # outside: {"auc": ...}

The state of Keras's own metrics is a sum over examples: each replica adds up its rows, and TensorFlow adds up the
replicas. The state of any other metric may be a maximum, a product or a last value. Every replica updates such a metric
with the rows of all replicas and microbatches, as one device would, so its state is the same on each.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from distloop.distributed import collectives, gathering
from distloop.distributed.devices import HOST
from distloop.graph_functions import graph_function
from distloop.optimizers.keras_hooks import mask_of, masks_of
from distloop.variables import tensorflow_variable

Arguments = Mapping[str, Any]  # name of a metric -> the arguments for its `update_state`
Join = Callable[[Sequence[tf.Tensor]], dict[str, Any]]  # puts the arguments of metrics together again


class MetricRows(NamedTuple):
    """The arguments of several metrics, taken apart so that their rows can be gathered."""

    tensors: list[tf.Tensor]  # [b, ...] each: arguments and Keras's masks of arguments
    join: Join  # from such tensors


class KerasMetrics(Mapping[str, keras.metrics.Metric]):
    """The Keras metrics of a model, by name.

    Attributes:
        by_name: the metrics; what records the rows of some values, and has no variables and no result, may be added.
        gathered: the names of the metrics that are updated with the rows of all replicas.
        row_specs: by name of the update, the rows of `gathered` that its `loss_fn` returns; known once they are built.
        is_built: whether every metric has all of its variables.
    """

    def __init__(
        self,
        metrics: Mapping[str, keras.metrics.Metric],
        strategy: tf.distribute.Strategy,
        *,
        gathers_all: bool = False,
    ):
        """Stores the metrics, of which some may create their variables when they are first updated.

        Args:
            metrics: by name.
            strategy: in whose scope they were made.
            gathers_all: whether sums are updated with the rows of all replicas, too, so that their bits do not depend
                on the number of replicas.
        """
        self.by_name = dict(metrics)
        self._strategy = strategy
        self._restored: Mapping[str, tf.Tensor] | None = None  # until the metrics are built
        self._reset_gathered = graph_function(lambda: strategy.run(functools.partial(self._reset, self.gathered)))
        self._gather_sums = graph_function(lambda: strategy.run(self._gather_on_replica))
        self.gathered = [name for name, metric in self.by_name.items() if gathers_all or not _is_sum(metric)]
        self.row_specs: dict[str, list[tf.TensorSpec]] = {}
        self.is_built = not self.gathered and all(map(_is_built, self.by_name.values()))
        self._check_variables()

    def __getitem__(self, name: str) -> keras.metrics.Metric:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    def build(self, fed: Mapping[str, Arguments], *, eager: bool = False) -> None:
        """Creates the variables that metrics create when they are first updated; changes no value.

        Args:
            fed: by name of the update, what its `loss_fn` returned for metrics.
            eager: whether `update_state` runs as plain Python.

        Raises:
            ValueError: if a metric keeps its state elsewhere than in its variables.
        """
        for update, arguments in fed.items():
            rows = take_rows({name: value for name, value in arguments.items() if name in self.gathered})
            self.row_specs[update] = [_spec_of(tensor) for tensor in rows.tensors]
            for name, value in arguments.items():
                if name in self.gathered or not _is_built(self.by_name[name]):
                    self._build(name, take_rows({name: value}), eager)
        self.is_built = True
        self._check_variables()
        if self._restored is not None:
            self.restore(self._restored)
            self._restored = None

    def add(self, arguments: Arguments, row_weights: tf.Tensor | None) -> MetricRows:
        """Updates the metrics whose state is a sum with rows of a replica, padding apart; in replica context.

        Call it outside what XLA compiles, which cannot leave out rows.

        Args:
            arguments: of any metrics, as `check_arguments` returns them.
            row_weights: `[b]`, 1 for examples that count and 0 for padding; None: every row counts.

        Returns:
            The rows for the metrics of `gathered`, without padding.

        Raises:
            ValueError: if arguments of such a metric are ragged.
        """
        kept = {name: tuple(without_padding(list(value), row_weights)) for name, value in arguments.items()}
        for name, value in kept.items():
            if name not in self.gathered:
                self.by_name[name].update_state(*value)
            elif any(isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(value)):
                raise ValueError(
                    f'loss_fn returned a ragged tensor for the metric under "{name}"; metrics other than Keras\'s own '
                    "take dense ones: call to_tensor() on it, and give weights for the padding."
                )
        return take_rows({name: kept[name] for name in self.gathered if name in kept})

    def update_gathered(self, tensors: Sequence[tf.Tensor], join: Join) -> None:
        """Updates metrics of `gathered` with the rows of all replicas; in replica context, on each of them.

        This replica's rows, and what puts them together again, are those of `take_rows`.
        """
        if tensors and self._strategy.num_replicas_in_sync > 1:
            tensors = gathering.gather_all(tensors, f"The metrics {self.gathered} take the rows of all replicas")
        for name, arguments in join(tensors).items():
            self.by_name[name].update_state(*arguments)

    def results(self) -> dict[str, Any]:
        """Returns the result of each metric; outside `strategy.run`."""
        results = {name: metric.result() for name, metric in self.by_name.items() if name not in self.gathered}
        if self.gathered:
            per_replica = self._strategy.run(self._results_on_replica)
            results |= tf.nest.map_structure(lambda r: self._strategy.experimental_local_results(r)[0], per_replica)
        return {name: results[name] for name in self.by_name}

    def reset(self) -> None:
        """Resets every metric."""
        if self.is_built:
            with tf.device(HOST):  # no shape is sent to another device: see step_marks.py
                self._reset([name for name in self if name not in self.gathered])
        if self.is_built and self.gathered:
            self._reset_gathered()

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Enters a scope in which the metrics start anew; restores their state on exit."""
        copies = [copy for variable in self.variables().values() for copy in self._copies(variable)]
        values = [tf.identity(copy) for copy in copies]
        self.reset()
        try:
            yield
        finally:
            for copy, value in zip(copies, values, strict=True):
                copy.assign(value)

    def variables(self) -> dict[str, Any]:
        """Returns the variables of the metrics, by `<metric>/<i>`."""
        return {
            f"{name}/{i}": variable
            for name, metric in self.by_name.items()
            for i, variable in enumerate(metric.variables)
        }

    def variables_of(self, names: Collection[str]) -> list[Any]:
        """Returns the variables of the metrics that are among some names."""
        return [v for name, metric in self.by_name.items() if name in names for v in metric.variables]

    def snapshot(self) -> dict[str, tf.Tensor]:
        """Returns a copy of the state, the names of `variables` -> `[R, ...]` for a sum, else `[1, ...]`."""
        with tf.device(HOST):
            values = {}
            for name, variable in self.variables().items():
                copies = self._copies(variable) if self._is_sum(name) else self._copies(variable)[:1]
                values[name] = tf.stack([tf.identity(copy) for copy in copies])
            if collectives.num_workers(self._strategy) > 1 and len(self.gathered) < len(self):
                values |= self._strategy.experimental_local_results(self._gather_sums())[0]
            return values

    def restore(self, values: Mapping[str, tf.Tensor]) -> None:
        """Sets the state to a snapshot of any number of replicas; a metric that is missing or differs starts anew."""
        if not self.is_built:
            self._restored = values
            return
        self.reset()
        replicas, first = self._strategy.num_replicas_in_sync, collectives.first_replica(self._strategy)
        variables = self.variables()
        fits = {name: name in values and values[name].shape[1:] == v.shape for name, v in variables.items()}
        others = {name.rpartition("/")[0] for name, does_fit in fits.items() if not does_fit}
        for name, variable in variables.items():
            if name.rpartition("/")[0] in others:
                continue
            value = values[name]
            if not self._is_sum(name):
                value = tf.stack([value[0]] * replicas)
            elif len(value) != replicas:  # the first replica gets the sum
                total = tf.reduce_sum(value, 0)
                value = tf.stack([total, *[tf.zeros_like(total)] * (replicas - 1)])
            for copy, copy_value in zip(self._copies(variable), tf.unstack(value)[first:], strict=False):
                copy.assign(copy_value)

    def _is_sum(self, variable_name: str) -> bool:
        return variable_name.rpartition("/")[0] not in self.gathered

    def _copies(self, variable: Any) -> tuple[Any, ...]:
        """Returns the TensorFlow variable of each replica of this worker."""
        return tuple(self._strategy.experimental_local_results(tensorflow_variable(variable)))

    def _build(self, name: str, rows: MetricRows, eager: bool) -> None:
        """Updates a metric in a scope where variables keep their values, but are created."""
        metric = self.by_name[name]

        def update(*tensors: tf.Tensor) -> None:
            metric.update_state(*rows.join(tensors)[name])

        zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in metric.variables]
        with self._strategy.scope(), keras.StatelessScope(zeros):
            if eager:
                update(*rows.tensors)
                writes: list[tf.Operation] = []
            else:
                traced = graph_function(update)
                graph = traced.get_concrete_function(*[_spec_of(tensor) for tensor in rows.tensors]).graph
                writes = [op for op in graph.get_operations() if op.type.startswith(("Assign", "ResourceScatter"))]
        if writes or not metric.variables:
            raise ValueError(
                f'The metric under "{name}", a {type(metric).__name__}, keeps its state elsewhere than in '
                "metric.variables, so it is neither reset nor saved: create it with self.add_variable, and change it "
                "with its assign."
            )

    def _check_variables(self) -> None:
        """Refuses variables that are not on every replica."""
        for name, variable in self.variables().items():
            if len(self._copies(variable)) != collectives.num_local_replicas(self._strategy):
                raise ValueError(
                    f'The metric under "{name.rpartition("/")[0]}" was made outside model_fn, so replicas would not '
                    "share it: make it inside model_fn."
                )

    def _reset(self, names: Collection[str]) -> None:
        for name in names:
            self.by_name[name].reset_state()

    def _results_on_replica(self) -> dict[str, Any]:
        results = {name: self.by_name[name].result() for name in self.gathered}
        results = tf.nest.map_structure(tf.identity, results)  # a variable would be read outside, summed over replicas
        if collectives.num_workers(self._strategy) > 1:  # the same bits on each, since they decide by them
            results = tf.nest.map_structure(lambda r: gathering.all_gather(r[tf.newaxis])[0], results)
        return results

    def _gather_on_replica(self) -> dict[str, tf.Tensor]:
        """Returns each variable of the sums of all replicas of all workers, `[R, ...]`."""
        variables = {name: variable for name, variable in self.variables().items() if self._is_sum(name)}
        context = tf.distribute.get_replica_context()
        return {name: context.all_gather(tf.identity(variable)[None], axis=0) for name, variable in variables.items()}


def take_rows(arguments: Arguments) -> MetricRows:
    """Takes the arguments of metrics apart into tensors with rows and what puts them together again."""
    leaves = tf.nest.flatten(arguments)
    are_tensors = [tf.is_tensor(leaf) for leaf in leaves]
    masks = masks_of(leaves)

    def join(tensors: Sequence[tf.Tensor]) -> dict[str, Any]:
        taken = iter(tensors)
        joined = [next(taken) if is_tensor else leaf for leaf, is_tensor in zip(leaves, are_tensors, strict=True)]
        for leaf, mask in zip(joined, masks, strict=True):
            if mask is not None:
                leaf._keras_mask = next(taken)
        packed: dict[str, Any] = tf.nest.pack_sequence_as(arguments, joined)
        return packed

    tensors = [leaf for leaf, is_tensor in zip(leaves, are_tensors, strict=True) if is_tensor]
    return MetricRows([*tensors, *(mask for mask in masks if mask is not None)], join)


def check_arguments(name: str, arguments: Any) -> tuple[Any, ...]:
    """Returns the arguments for a metric's `update_state`: what `loss_fn` returned under its name, tensors `[b, ...]`.

    Raises:
        ValueError: if they are no tuple, or a tensor among them has no rows.
    """
    if type(arguments) not in (tuple, list):
        raise ValueError(
            f'loss_fn returned a {type(arguments).__name__} under "{name}", which is a Keras metric; '
            "distloop needs the tuple of arguments for its update_state, such as (labels, predictions)."
        )
    if any(tf.is_tensor(leaf) and leaf.shape.rank == 0 for leaf in tf.nest.flatten(arguments)):
        raise ValueError(
            f'loss_fn returned a tensor of shape [] for the Keras metric under "{name}"; distloop needs a row for each '
            "example, [B, ...], in all arguments of update_state: drop the reduction over the batch."
        )
    return tuple(arguments)


def without_padding(rows: Any, row_weights: tf.Tensor | None) -> Any:
    """Returns a structure of tensors, `[b, ...]`, and the masks that Keras put on them without the rows of weight 0."""
    if row_weights is None:
        return rows
    are_examples = row_weights > 0

    def drop(leaf: Any) -> Any:
        if not tf.is_tensor(leaf):
            return leaf
        is_ragged = isinstance(leaf, tf.RaggedTensor)
        kept = (tf.ragged.boolean_mask if is_ragged else tf.boolean_mask)(leaf, are_examples)
        if (mask := mask_of(leaf)) is not None:
            kept._keras_mask = tf.boolean_mask(mask, are_examples)
        return kept

    return tf.nest.map_structure(drop, rows)


def _is_sum(metric: keras.metrics.Metric) -> bool:
    """Returns whether a metric's state is a sum over examples, which it is where Keras's own methods change it."""
    methods = (type(metric).update_state, type(metric).reset_state)
    if not all(method.__module__.startswith("keras.src.metrics.") for method in methods):
        return False
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        return True
    # A function of the user's, and Keras's along the first axis, may compare the examples of a batch.
    is_keras = isinstance(metric._fn, FunctionType) and metric._fn.__module__.startswith("keras.src.")
    return is_keras and metric._fn_kwargs.get("axis", -1) == -1


def _is_built(metric: keras.metrics.Metric) -> bool:
    """Returns whether a metric has all of its variables; Keras's keep that private, others never say it."""
    return getattr(metric, "_built", True)


def _spec_of(tensor: tf.Tensor) -> tf.TensorSpec:
    """Returns the spec of a tensor with any number of rows."""
    shape = tensor.shape if tensor.shape.rank is None else tf.TensorShape([None, *tensor.shape[1:]])
    return tf.TensorSpec(shape, tensor.dtype)
