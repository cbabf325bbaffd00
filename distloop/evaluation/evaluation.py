"""Evaluation: the step for a batch, the loop over a dataset, and the actions that call the loop.

    actions = make_evaluations({"test": test, "hard": Evaluation(hard)}, config, passes, eval_loop, predictor)

A pass runs in chunks of about a second, between which the host looks whether it is to stop; they change no number. It
changes nothing but the Keras metrics of evaluation: what the forward pass writes is restored.
"""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from distloop.actions.evaluate import Evaluate, Evaluation, trace_first, with_rows
from distloop.data import shards
from distloop.data.shards import Batch, BatchLayout
from distloop.data.source import Data, Passes, Source
from distloop.distributed import collectives, gathering
from distloop.distributed.devices import HOST
from distloop.distributed.strategies import tree_sum
from distloop.errors import TEXT_AS_NUMBER, raise_as_user_error
from distloop.evaluation.prediction import Predictor
from distloop.graph_functions import (
    NO_LIMIT_SECS,
    TimeLimit,
    called_by_kind,
    compiled,
    graph_function,
    has_clock,
    with_called,
)
from distloop.model import broadcasts, metrics
from distloop.model.keras_metrics import Join, KerasMetrics, check_arguments
from distloop.model.memory import explain_pass
from distloop.model.spec import LossFn
from distloop.model.state import TrainState
from distloop.optimizers.keras_hooks import made_again
from distloop.settings.config import Config
from distloop.training.differentiation import tally_outputs
from distloop.training.microbatches import join_rows, run_forward
from distloop.training.step_operations import unsaved_draws_refused
from distloop.workers.preemption import StopRequests

_SCALAR, _VECTOR = tf.TensorShape([]), tf.TensorShape([None])
_CHUNK_SECS = 1.0  # after which a chunk of a pass begins no other batch


class EvalStep:
    """One step of evaluation: computes the tallies of a batch and updates Keras metrics; nothing else changes."""

    def __init__(self, state: TrainState, loss_fn: LossFn | None, metrics: Mapping[str, keras.metrics.Metric] | None):
        """Prepares; nothing is traced yet. `loss_fn` and `metrics` are as for `EvalLoop`."""
        self._state, self._strategy = state, state.strategy
        self._loss_fn, self._needs_loss = loss_fn, loss_fn is None
        self.keras_metrics = state.keras_metrics if loss_fn is None else _copied(metrics or {}, state)
        self.names: list[str] = []

    @property
    def loss_fns(self) -> dict[str, LossFn]:
        """The functions that return values, by name of the update."""
        if self._loss_fn is not None:
            return {"": self._state.prepared(self._state.spec.prepared(self._loss_fn))}
        return {update.name: update.loss_fn for update in self._state.spec.updates}

    def __call__(self, batch: Batch, layout: BatchLayout) -> tf.Tensor:
        """Runs one step; in a `tf.function`, outside `strategy.run`.

        Returns:
            The tallies of this worker's rows, `[2 * M]`, float64: a total and a weight of each of `names`; with virtual
            replicas, those of each of this worker's, `[v * 2 * M]`.
        """
        per_replica = self._strategy.run(functools.partial(self._forward, layout), args=(batch,))
        with tf.device(HOST):
            tallies = [tf.cast(t, tf.float64) for t in self._strategy.experimental_local_results(per_replica)]
            return tf.concat(tallies, 0) if self._state.replicas.same_bits else tf.add_n(tallies)

    def sum_over_workers(self, tallies: tf.Tensor) -> tf.Tensor:
        """Returns the tallies of all workers, `[2 * M]`, from the sums of what a step returns."""
        strategy, replicas = self._strategy, self._state.replicas
        num_workers = collectives.num_workers(strategy)
        if replicas.same_bits:  # each worker's at its own index, where zeros change no bit of them
            size = replicas.count // num_workers * 2 * len(self.names)
            here = tf.one_hot(collectives.worker_index(strategy), num_workers, dtype=tf.float64)
            tallies = tf.reshape(here[:, tf.newaxis] * tf.broadcast_to(tallies, [size]), [-1])  # one zero: no batch yet
        if num_workers > 1:
            tallies = collectives.sum_over_workers(strategy, tallies)
        return tree_sum(tf.unstack(tf.reshape(tallies, [replicas.count, -1]))) if replicas.same_bits else tallies

    def _forward(self, layout: BatchLayout, batch: Batch) -> tf.Tensor:
        """Returns the tallies of a replica's rows, `[2 * M]`; of each of its virtual replicas, `[v * 2 * M]`."""
        joins: dict[str, Join] = {}  # by update, what puts together the arguments of Keras metrics
        with gathering.largest_shard(layout.max_replica_rows):
            results = run_forward(self._state, layout, batch, functools.partial(self._tally, joins))
            tallies, metric_rows = zip(*results, strict=True)
            for update, join in joins.items():
                of_metric = zip(*(rows[update] for rows in metric_rows), strict=True)
                self.keras_metrics.update_gathered([join_rows(pieces) for pieces in of_metric], join)
        return join_rows(tallies)

    def _tally(
        self, joins: dict[str, Join], rows: Any, row_weights: tf.Tensor | None
    ) -> tuple[tf.Tensor, dict[str, list[tf.Tensor]]]:
        """Returns the tallies of some rows, `[2 * M]`, and by update the rows of its Keras metrics; adds to `joins`."""
        named: dict[str, metrics.Tally] = {}
        fed: set[str] = set()
        rows_by_update = {}
        for update, loss_fn in self.loss_fns.items():
            prefix = f"{update}/" if update else ""
            with gathering.shard(row_weights):
                outputs = loss_fn(rows, False)
            tallies, metric_rows = tally_outputs(
                outputs, rows, row_weights, self.keras_metrics, needs_loss=self._needs_loss
            )
            broadcasts.refuse_pairs(outputs, loss_fn, rows, False)
            arguments = metric_rows.join(metric_rows.tensors)
            rows_by_update[update], joins[update] = self.keras_metrics.add(arguments, row_weights)
            named |= {prefix + name: tally for name, tally in tallies.items()}
            fed |= {*outputs}
        metrics.check_fed(self.keras_metrics, fed)
        metrics.require_same_names("loss_fn returned", list(named), self.names or [*named])
        self.names = list(named)
        return metrics.flatten(named.values()), rows_by_update

    def feed(self, layout: BatchLayout, fed: dict[str, Any], batch: Batch) -> None:
        """Stores by update the arguments that its `loss_fn` returns for Keras metrics, alike on each replica."""
        rows, row_weights = shards.take_shard(batch, layout)
        for update, loss_fn in self.loss_fns.items():
            with gathering.largest_shard(layout.max_replica_rows), gathering.shard(row_weights):
                outputs = loss_fn(rows, False)
            metrics.check_names(outputs, self.keras_metrics, needs_loss=self._needs_loss)
            fed[update] = {
                name: check_arguments(name, value) for name, value in outputs.items() if name in self.keras_metrics
            }


class EvalLoop:
    """Evaluates datasets; traced once for each kind of data."""

    def __init__(
        self,
        state: TrainState,
        *,
        eager: bool = False,
        max_traces: int = 0,
        loss_fn: LossFn | None = None,
        metrics: Mapping[str, keras.metrics.Metric] | None = None,
    ):
        """Prepares; nothing is traced yet.

        Args:
            state: the model, and what `loss_fn` and metrics it is evaluated with.
            eager: as for `TrainLoop`.
            max_traces: as `Config.max_traces`.
            loss_fn: used in place of the state's; None: those of the state.
            metrics: of this `loss_fn`, copied into the strategy's scope.

        Raises:
            ValueError: if a metric cannot be copied.
        """
        self._state = state
        self._eager, self._max_traces = eager, max_traces
        self._step = EvalStep(state, loss_fn, metrics)
        self._run = compiled(self._chunk, eager, name="evaluation", max_traces=max_traces)
        self._call = called_by_kind(self._run, eager)
        self._most_batches = 1  # of the next chunk, on several workers
        with tf.device(HOST):  # of the chunks before, [2 * M]; one zero before the first batch
            self._tallies = tf.Variable(tf.zeros([1], tf.float64), shape=[None], trainable=False)

    def with_values(self, loss_fn: LossFn | None, metrics: Mapping[str, keras.metrics.Metric] | None) -> "EvalLoop":
        """Returns a loop that evaluates the model with another `loss_fn`; None: this one."""
        settings: dict[str, Any] = {"eager": self._eager, "max_traces": self._max_traces}
        return self if loss_fn is None else EvalLoop(self._state, **settings, loss_fn=loss_fn, metrics=metrics)

    def build_metrics(self, source: Source) -> None:
        """Builds the Keras metrics that are not built yet, from a trace of each `loss_fn`, which runs nothing.

        Raises:
            ValueError: if `loss_fn` or a metric breaks a rule.
        """
        if self._step.keras_metrics.is_built:
            return
        fed: dict[str, Any] = {}

        def trace(rows: Any) -> None:
            batch = source.layout.batch_of(rows)
            self._state.strategy.run(functools.partial(self._step.feed, source.layout, fed), args=(batch,))

        if self._eager:
            trace(source.first_rows())
        else:
            graph_function(trace).get_concrete_function(source.info.element_spec)
        self._step.keras_metrics.build(fed, eager=self._eager)

    def names(self, source: Source) -> list[str] | None:
        """Returns the names of the metrics, from a trace that the first evaluation uses, too; None: it is eager."""
        if not (self._eager or self._step.names):
            self.trace(source)
        return None if self._eager else [*self._step.names, *self._step.keras_metrics]

    def trace(self, source: Source) -> None:
        """Builds the Keras metrics and traces a pass over a dataset, which runs nothing; `evaluate` uses the trace.

        Raises:
            ValueError: if `loss_fn` or a metric breaks a rule.
        """
        self.build_metrics(source)
        if not self._eager:
            graph = self._run.get_concrete_function(source.iterator_spec(), source.layout, *_limits(0, 0.0)).graph
            operations = with_called(graph.get_operations())
            if any(op.type == "Cast" and op.inputs[0].dtype == tf.string for op in operations):
                raise ValueError(TEXT_AS_NUMBER)

    def evaluate(self, source: Source, limit: int = 0, stop_requests: StopRequests | None = None) -> dict[str, float]:
        """Returns the metrics of one pass by name, over all examples, with the averaged weights if the state has any.

        Args:
            source: data that ends, unless there is a limit.
            limit: the largest number of batches; 0: all.
            stop_requests: asked about every second whether to leave the pass; None: it is not left.

        Raises:
            ValueError: if the data is empty.
            Interrupted: on every worker, if one is asked to stop before the end.
        """
        collectives.report_phase(self._state.strategy, "evaluating", self._state.step)
        self.build_metrics(source)
        state = self._state
        with source.gate, state.averaged(), state.random_streams.preserved(), self._step.keras_metrics.preserved():
            try:
                result = self._run_chunks(source, limit, stop_requests)
            except tf.errors.ResourceExhaustedError as error:
                raise explain_pass(error, state, "evaluating", source.info.batch_size) from error
            except tf.errors.OpError as error:
                state.end_steps(are_complete=not state.passes_write)
                raise_as_user_error(error)
        if not result["batches"]:
            raise ValueError("The dataset to evaluate on is empty; distloop needs one batch at least.")
        if source.info.num_batches is None:
            source.layout.check_same(state.strategy, "use an evaluation", {"the batches read": int(result["batches"])})
        return metrics.means(self._step.names, result["tallies"]) | metrics.flatten_results(result["keras_metrics"])

    def _run_chunks(self, source: Source, limit: int, stop_requests: StopRequests | None) -> dict[str, Any]:
        """Makes a pass; returns what the last chunk returned, as NumPy arrays, and the batches of all chunks.

        On several workers a chunk has as many batches as the chief has time for.
        """
        strategy, iterator = self._state.strategy, source.new_iterator()
        is_alone = collectives.num_workers(strategy) == 1
        is_cut, ends_by_time = is_alone or stop_requests is not None, is_alone and has_clock()
        if not is_alone:
            self._run.get_concrete_function(iterator, source.layout, *_limits(0, NO_LIMIT_SECS))
            facts = {"the limit of batches": limit, "the values of loss_fn": self._step.names}
            facts["the Keras metrics"] = sorted(self._step.keras_metrics)
            collectives.require_same(strategy, "evaluate", facts)
        self._tallies.assign([0.0])
        batches = 0
        while True:
            start = time.monotonic()
            most = limit - batches if limit else tf.int64.max
            most = most if ends_by_time or not is_cut else min(most, self._most_batches)
            result = self._call(iterator, source.layout, *_limits(most, _CHUNK_SECS if ends_by_time else NO_LIMIT_SECS))
            result = tf.nest.map_structure(lambda t: t.numpy(), result)
            batches += int(result["batches"])
            if not is_cut:
                return result | {"batches": batches}
            in_time = int(result["batches"] * _CHUNK_SECS / max(time.monotonic() - start, 1e-6))
            most = max(1, min(in_time, 2 * self._most_batches))
            has_ended = bool(result["has_ended"]) or batches == limit
            vote = collectives.Vote(step=int(self._state.step), max_steps=most, has_ended=has_ended)
            votes = collectives.agree_to_go_on(strategy, stop_requests, vote)
            if all(vote.has_ended for vote in votes):
                return result | {"batches": batches}
            self._most_batches = int(votes[0].max_steps)

    def _chunk(self, iterator: Any, layout: BatchLayout, max_batches: tf.Tensor, secs: tf.Tensor) -> dict[str, Any]:
        """Adds the tallies of up to `max_batches` batches to those of the chunks before; sums them over all workers.

        After so many seconds no batch begins, but for the first one.
        """
        with tf.device(HOST):
            time_limit = TimeLimit(secs)

        def goes_on(has_more: tf.Tensor, batches: tf.Tensor, _: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([before]):  # the clock is read when the batch before the last has ended
                in_time = time_limit.is_ahead()
            return has_more & (batches < max_batches) & (in_time | (batches == 0))

        def body(has_more: tf.Tensor, batches: tf.Tensor, tallies: tf.Tensor, _: tf.Tensor) -> Any:
            with tf.device(HOST):
                has_batch, get_batch = shards.next_batch_if_any(iterator, layout)
            with unsaved_draws_refused(self._state):
                more = tf.cond(
                    has_batch, lambda: tallies + self._step(get_batch(), layout), lambda: tf.identity(tallies)
                )
            return has_batch, batches + tf.cast(has_batch, tf.int64), more, tallies

        with tf.device(HOST):
            # The number of tallies is known once the body is traced: until then, one zero broadcasts to all.
            tallies = self._tallies.read_value()
            has_more, batches, tallies, _ = tf.while_loop(
                goes_on,
                body,
                (tf.constant(True), tf.constant(0, tf.int64), tallies, tallies),
                shape_invariants=(_SCALAR, _SCALAR, _VECTOR, _VECTOR),
            )
            self._tallies.assign(tallies)
        tallies = self._step.sum_over_workers(tallies)  # once for the whole pass
        results = self._step.keras_metrics.results()
        return {"has_ended": ~has_more, "batches": batches, "tallies": tallies, "keras_metrics": results}


def make_evaluations(
    evals: Mapping[str, Data | Evaluation], config: Config, passes: Passes, eval_loop: EvalLoop, predictor: Predictor
) -> list[Evaluate]:
    """Returns an action for each dataset to evaluate on.

    Raises:
        ValueError: if a dataset breaks a rule.
    """
    evaluations = []
    for name, data in evals.items():
        evaluation = data if isinstance(data, Evaluation) else Evaluation(data)
        limits = [limit for limit in (evaluation.batches, config.limit_eval_batches) if limit]
        source = passes.source(evaluation.dataset, limit := min(limits, default=0))
        loop = eval_loop.with_values(evaluation.loss_fn, evaluation.metrics)
        evaluate = functools.partial(loop.evaluate, source, limit)
        tracers: list[Callable[[Source], None]] = [Source.require_batch, loop.trace]
        if evaluation.rows_fn is not None:
            rows_predictor = predictor.with_function(evaluation.predict_fn)
            predict = functools.partial(rows_predictor.predict, source, limit=limit)
            evaluate = functools.partial(with_rows, evaluate, predict, evaluation.rows_fn)
            tracers.append(rows_predictor.trace)
        every = config.eval_every if evaluation.every is None else evaluation.every
        check = functools.partial(trace_first, name, source, tracers, evaluation.rows_fn is not None)
        names = functools.partial(loop.names, source) if evaluation.rows_fn is None else lambda: None
        options: dict[str, Any] = {"has_values_of_step": evaluation.loss_fn is None, "check": check}
        evaluations.append(Evaluate(name, evaluate, every, evaluation.dataset, names, **options))
    return evaluations


def _limits(max_batches: int, secs: float) -> tuple[tf.Tensor, tf.Tensor]:
    with tf.device(HOST):
        return tf.constant(max_batches, tf.int64), tf.constant(secs, tf.float64)


def _copied(metrics: Mapping[str, keras.metrics.Metric], state: TrainState) -> KerasMetrics:
    """Returns copies of metrics, which were made anywhere, on all replicas.

    Raises:
        ValueError: if the config of a metric is not complete.
    """
    instead = "put it into ModelSpec(metrics=...)"
    with state.strategy.scope():
        copies = {name: made_again(m, f'The metric "{name}" of an Evaluation', instead) for name, m in metrics.items()}
    return KerasMetrics(copies, state.strategy, gathers_all=state.replicas.same_bits)
