"""Evaluation: one step over a batch, and the loop that makes a pass over a dataset.

It changes nothing but the Keras metrics of evaluation: what the forward pass writes is restored. It does not know when
a run evaluates, or what is done with the numbers.
"""

import functools
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from distloop.data import shards
from distloop.data.shards import Batch, Layout
from distloop.data.source import Source
from distloop.distributed import gathering, workers
from distloop.distributed.devices import HOST
from distloop.errors import as_user_error
from distloop.training import broadcasts, metrics, unsaved_draws
from distloop.training.compiled_loop import compiled
from distloop.training.differentiation import tally_outputs
from distloop.training.metric_state import KerasMetrics, check_arguments
from distloop.training.spec import LossFn
from distloop.training.state import TrainState
from distloop.training.variable_creation import refusing_new_variables
from distloop.training.variable_writes import restored_writes


class EvalStep:
    """One step of evaluation: computes the tallies of a batch and updates Keras metrics; nothing else changes."""

    def __init__(
        self,
        state: TrainState,
        loss_fn: LossFn | None = None,
        metrics: Mapping[str, keras.metrics.Metric] | None = None,
    ):
        """Prepares; nothing is traced yet. `loss_fn` and `metrics` are as for `EvalLoop`."""
        self._state = state
        self._strategy = state.strategy
        self._loss_fn = loss_fn
        self._needs_loss = loss_fn is None
        self.keras_metrics = state.keras_metrics if loss_fn is None else _copied(metrics or {}, state.strategy)
        self.names: list[str] = []

    @property
    def loss_fns(self) -> dict[str, LossFn]:
        """The functions that return values, by name of the update."""
        if self._loss_fn is not None:
            return {"": refusing_new_variables(self._state.spec.prepared(self._loss_fn))}
        return {update.name: update.loss_fn for update in self._state.spec.updates}

    def __call__(self, batch: Batch, layout: Layout) -> tf.Tensor:
        """Runs one step; in a `tf.function`, outside `strategy.run`.

        Returns:
            The tallies of this worker's rows, `[2 * M]`, float64: a total and a weight of each of `names`.
        """
        replica_fn = gathering.with_max_rows(functools.partial(self._forward, layout), layout.max_replica_rows)
        tallies = self._strategy.experimental_local_results(self._strategy.run(replica_fn, args=(batch,)))
        with tf.device(HOST):
            return tf.add_n([tf.cast(replica_tallies, tf.float64) for replica_tallies in tallies])

    def _forward(self, layout: Layout, batch: Batch) -> tf.Tensor:
        state = self._state
        rows, row_weights = shards.take_shard(batch, layout)
        named: dict[str, metrics.Tally] = {}
        with restored_writes(state):
            fed: set[str] = set()
            for update, loss_fn in self.loss_fns.items():
                prefix = f"{update}/" if update else ""
                with gathering.shard(row_weights):
                    outputs = loss_fn(rows, False)
                tallies, metric_rows = tally_outputs(
                    outputs, rows, row_weights, self.keras_metrics, needs_loss=self._needs_loss
                )
                broadcasts.refuse_pairs(outputs, loss_fn, rows, False)
                arguments = metric_rows.join(metric_rows.tensors)
                self.keras_metrics.update_gathered(*self.keras_metrics.add(arguments, row_weights))
                named.update({prefix + name: tally for name, tally in tallies.items()})
                fed.update(outputs)
        metrics.check_fed(self.keras_metrics, fed)
        self.names = list(named)
        return metrics.flatten(named.values())

    def feed(self, layout: Layout, batch: Batch) -> dict[str, Any]:
        """Returns the arguments that each update's `loss_fn` returns for Keras metrics, by its name; on a replica."""
        rows, row_weights = shards.take_shard(batch, layout)
        fed = {}
        for update, loss_fn in self.loss_fns.items():
            with gathering.shard(row_weights):
                outputs = loss_fn(rows, False)
            metrics.check_names(outputs, self.keras_metrics, needs_loss=self._needs_loss)
            fed[update] = {
                name: check_arguments(name, value) for name, value in outputs.items() if name in self.keras_metrics
            }
        return fed


class EvalLoop:
    """Evaluates datasets; traced once for each kind of data."""

    def __init__(
        self,
        state: TrainState,
        *,
        eager: bool = False,
        loss_fn: LossFn | None = None,
        metrics: Mapping[str, keras.metrics.Metric] | None = None,
    ):
        """Prepares; nothing is traced yet.

        Args:
            state: the model, and what `loss_fn` and metrics it is evaluated with.
            eager: as for `TrainLoop`.
            loss_fn: used in place of the state's; None: those of the state.
            metrics: of this `loss_fn`, copied into the strategy's scope.

        Raises:
            ValueError: if a metric cannot be copied.
        """
        self._state = state
        self._eager = eager
        self._step = EvalStep(state, loss_fn, metrics)
        self._run = compiled(self._pass, eager, name="evaluation")

    def with_values(self, loss_fn: LossFn | None, metrics: Mapping[str, keras.metrics.Metric] | None) -> "EvalLoop":
        """Returns a loop that evaluates the model with another `loss_fn`; None: this one."""
        return self if loss_fn is None else EvalLoop(self._state, eager=self._eager, loss_fn=loss_fn, metrics=metrics)

    def build_metrics(self, source: Source) -> None:
        """Builds the Keras metrics that are not built yet, from a trace of each `loss_fn`, which runs nothing.

        Args:
            source: data to train or evaluate on.

        Raises:
            ValueError: if `loss_fn` or a metric breaks a rule.
        """
        if self._step.keras_metrics.is_built:
            return
        fed: dict[str, Any] = {}

        def on_replica(batch: Batch) -> None:
            fed.update(self._step.feed(source.layout, batch))  # the same on each replica

        def trace(rows: Any) -> None:
            batch = shards.pad(rows, source.info.min_rows) if source.layout.is_padded else Batch(rows, None)
            replica_fn = gathering.with_max_rows(on_replica, source.layout.max_replica_rows)
            self._state.strategy.run(replica_fn, args=(batch,))

        if self._eager:
            trace(source.first_rows())
        else:
            tf.function(trace, autograph=False).get_concrete_function(source.info.element_spec)
        self._step.keras_metrics.build(fed, eager=self._eager)

    def evaluate(self, source: Source, limit: int = 0) -> dict[str, float]:
        """Computes the metrics of one pass over a dataset, with the averaged weights if the state has any.

        Args:
            source: data that ends, unless there is a limit.
            limit: the largest number of batches; 0: all.

        Returns:
            Name -> number, over all examples.

        Raises:
            ValueError: if the data is empty.
        """
        workers.report_phase(self._state.strategy, "evaluating")
        self.build_metrics(source)
        state = self._state
        with state.averaged(), state.random_streams.preserved(), self._step.keras_metrics.preserved():
            try:
                arguments = source.new_iterator(), source.layout, tf.constant(limit or tf.int64.max, tf.int64)
                if workers.num_workers(state.strategy) > 1:
                    self._compare_workers(arguments)
                result = self._run(*arguments)
            except tf.errors.OpError as error:
                explained = as_user_error(error)
                if explained is None:
                    raise
                raise explained from error
        result = tf.nest.map_structure(lambda t: t.numpy(), result)
        if not result["batches"]:
            raise ValueError("The dataset to evaluate on is empty; distloop needs one batch at least.")
        if source.info.num_batches is None and not source.layout.is_sharded:
            workers.require_same(state.strategy, "use an evaluation", {"the batches read": int(result["batches"])})
        means = metrics.means(self._step.names, result["tallies"])
        return means | metrics.flatten_results(result["keras_metrics"])

    def _compare_workers(self, arguments: tuple[Any, ...]) -> None:
        """Traces a pass, and compares between the workers what it sums."""
        self._run.get_concrete_function(*arguments)
        facts = {"the limit of batches": int(arguments[-1]), "the values of loss_fn": self._step.names}
        facts["the Keras metrics"] = sorted(self._step.keras_metrics)
        workers.require_same(self._state.strategy, "evaluate", facts)

    def _pass(self, iterator: Any, layout: Layout, max_batches: tf.Tensor) -> dict[str, Any]:
        """Sums the tallies of all batches, up to `max_batches`, over all workers."""

        def body(has_more: tf.Tensor, batches: tf.Tensor, tallies: tf.Tensor) -> Any:
            with tf.device(HOST):
                has_batch, get_batch = shards.next_batch_if_any(iterator, layout)
            with unsaved_draws.refused(self._state):
                more = tf.cond(
                    has_batch,
                    lambda: tallies + self._step(get_batch(), layout),
                    lambda: tf.identity(tallies),
                )
            return has_batch, batches + tf.cast(has_batch, tf.int64), more

        with tf.device(HOST):
            # The number of tallies is known once the body is traced: until then, one zero broadcasts to all.
            start = (tf.constant(True), tf.constant(0, tf.int64), tf.zeros([1], tf.float64))
            _, batches, tallies = tf.while_loop(
                lambda has_more, batches, _: has_more & (batches < max_batches),
                body,
                start,
                shape_invariants=(tf.TensorShape([]), tf.TensorShape([]), tf.TensorShape([None])),
            )
        if workers.num_workers(self._state.strategy) > 1:  # one sum over workers for the whole pass
            tallies = workers.sum_over_workers(self._state.strategy, tallies)
        return {"batches": batches, "tallies": tallies, "keras_metrics": self._step.keras_metrics.results()}


def _copied(metrics: Mapping[str, keras.metrics.Metric], strategy: tf.distribute.Strategy) -> KerasMetrics:
    """Returns copies of metrics, which were made anywhere, on all replicas.

    Raises:
        ValueError: if a metric does not say how it is made.
    """
    copies = {}
    with strategy.scope():
        for name, metric in metrics.items():
            try:
                copies[name] = type(metric).from_config(metric.get_config())
            except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
                raise ValueError(
                    f'The metric under "{name}" of an Evaluation cannot be copied to the replicas ({error}): give it '
                    "a get_config that returns the arguments of its constructor, or put it into ModelSpec(metrics=...)."
                ) from error
    return KerasMetrics(copies, strategy)
