"""The forward and backward pass of one update on one replica, over its microbatches.

    rows -> loss_fn -> tallies, sum(w * v) and sum(w) -> gradients of sum(w * loss) -> packed, summed over microbatches

    update_pass = ForwardBackward(state, update, microbatches=4)
    local = update_pass(batch, layout, loss_factor)            # in replica context
    update_pass.trace.names                                    # ["loss", "accuracy"]; known once the pass is traced

It sums nothing over replicas and changes no weight.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from distloop.data.shards import Batch, Layout
from distloop.distributed import gathering, tensorflow_internals
from distloop.distributed.devices import HOST
from distloop.errors import explaining_merge_call
from distloop.optimizers.sparse_gradients import Segment
from distloop.training import metrics, variable_writes
from distloop.training.differentiation import Differentiation, divisor_of
from distloop.training.part_sums import PartSums, Trace
from distloop.training.spec import Update
from distloop.training.state import TrainState
from distloop.training.tables import Tables
from distloop.training.variable_writes import WrittenValues
from distloop.variables import tensorflow_variable


class Local(NamedTuple):
    """What a replica computes before the reduction."""

    segments: list[Segment]  # packed gradients of the scaled sum(w * loss)
    sums: dict[str, Any]  # what is summed over the replicas along with them, by name
    written: list[Any]  # the variables that the forward pass writes
    before: list[tf.Tensor]  # their values before it
    after: list[tf.Tensor]  # and after it, those with a mean apart


class ForwardBackward:
    """The forward and backward pass of one update.

    Attributes:
        update: the user's `loss_fn` and optimizer.
        state, microbatches, jit_compile: the arguments.
        variables: the variables to differentiate by.
        overwritten: the variables whose "gradient" is their new value, such as the scales of float8 layers: neither
            summed nor scaled, they get the maximum over microbatches and replicas.
        writable, written_values: the variables that the forward pass may write, and what becomes of their values.
        packing, reduce: the layout of their gradients; sums tensors over all replicas.
        loss_scaler: the `LossScaleOptimizer` if the loss is scaled, else None.
        tables: what becomes of sparse gradients.
        reads: the entries of a batch that `loss_fn` reads; known once the pass is traced.
    """

    def __init__(
        self,
        state: TrainState,
        update: Update,
        *,
        microbatches: int = 1,
        jit_compile: bool = False,
        needs_whole_gradients: bool = False,
    ):
        """Prepares; nothing is traced yet.

        Args:
            state: what is trained.
            update: one of its updates.
            microbatches: the number of parts that each replica's shard is cut into.
            jit_compile: whether XLA compiles the pass.
            needs_whole_gradients: whether every worker needs all gradients.
        """
        self.update = update
        variables = state.variables_of_update[update.name]
        self.overwritten = [v for v in variables if getattr(v, "overwrite_with_gradient", False)]
        self.variables = [v for v in variables if not getattr(v, "overwrite_with_gradient", False)]
        self.loss_scaler = state.loss_scalers.get(update.name)
        self.packing = state.slot_placement.make_packing(
            *(self.variables, state.placement.gradient_devices(self.variables)),
            needs_whole=bool(state.virtual_replicas or update.gradient_fn or update.step_fn),
            needs_all=needs_whole_gradients,
        )
        self.tables = Tables(state, update, self.variables, self.packing)
        self.reduce = gathering.sum_in_tree if state.virtual_replicas else tensorflow_internals.sum_over_replicas
        self._differentiate = Differentiation(state, update, self.variables, self.overwritten, microbatches)
        self.reads = self._differentiate.reads
        self.state = state
        self.microbatches = microbatches
        self.jit_compile = jit_compile
        self._trace: Trace | None = None
        metrics_variables = state.keras_metrics.variables().values()
        self.writable = [*state.untrained_variables, *metrics_variables, *state.trained_variables]
        self.written_values = WrittenValues(state, microbatches=microbatches, overwritten=self.overwritten)

    @property
    def name(self) -> str:
        """The name of the update; empty if it is the only one."""
        return self.update.name

    @property
    def trace(self) -> Trace:
        """What tracing revealed; there is one once the pass was called."""
        assert self._trace is not None, "the pass is not traced yet"
        return self._trace

    def full_name(self, name: str) -> str:
        """Returns the reported name of a value: `discriminator/loss`."""
        return f"{self.name}/{name}" if self.name else name

    def loss_factor(self, examples: tf.Tensor) -> tf.Tensor | None:
        """Returns the factor of the loss, a sum over examples, before its gradient is taken; None: it is not scaled.

        Args:
            examples: in the global batch, a float32 scalar. The loss scale applies to the mean over them, so a larger
                batch has no larger gradients in float16; layers that round gradients, to float8, see those of the mean.
        """
        if self.loss_scaler is None:
            return 1.0 / examples if self.overwritten else None
        return self.loss_scaler.scale_loss(1.0) / examples

    @property
    def is_loss_scaled(self) -> bool:
        """Whether `loss_factor` returns a factor."""
        return self.loss_scaler is not None or bool(self.overwritten)

    def __call__(
        self,
        batch: Batch,
        layout: Layout,
        factor: tf.Tensor | None,
        value: str = "loss",
        *,
        again_from: Mapping[int, tf.Tensor] | None = None,
    ) -> Local:
        """Computes gradients and tallies of a replica's shard, and sets `trace`; call in replica context.

        Args:
            batch: the global batch.
            layout: its layout.
            factor: of the loss, as `loss_factor` returns it.
            value: the name of the value to differentiate.
            again_from: for another look at the same batch, the values to start from, by the variables' `id`; metrics
                are not updated. None: the first look.

        Returns:
            Packed gradients, and the sums to be reduced with them: "tallies", `[2 * m]`, or total and weight of `value`
            in another look; with several replicas also "secs", `[R]`, the seconds that each replica took; where values
            that parts of the batch write are merged, "writes", `[F]`.
        """
        replicas, is_first = self.state.strategy.num_replicas_in_sync, again_from is None
        is_timed = replicas > 1 and is_first
        started = _time_after(tf.nest.flatten(batch.rows, expand_composites=True)[:1]) if is_timed else None
        before = self.values() if again_from is None else again_from
        parts = PartSums(self, batch, layout, factor, value, before, is_first=is_first)
        with explaining_merge_call(_explain_merge_call(self)):
            segments, vector, metric_rows = parts.in_turns() if self.state.virtual_replicas else parts.in_loop()
        self._set_trace(parts.traces, is_first=is_first)
        self.state.keras_metrics.update_gathered(metric_rows, parts.joins[-1])
        size, written = 2 * len(self.trace.names) if is_first else 2, self.trace.written
        has_writes = vector.shape[0] > size
        sums = {"tallies": vector[:size], "writes": vector[size:]} if has_writes else {"tallies": vector}
        if started is not None:
            with tf.device(HOST):  # a copy: a mere dependency on a GPU's tensor is met before that is computed
                last = tf.identity(tf.nest.flatten(segments)[-1][:1])
            secs = tf.cast(_time_after([*tf.nest.flatten(segments), last]) - started, tf.float32)
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            sums["secs"] = tf.one_hot(replica, replicas) * secs
        if parts.pulled_back:
            sums["pulled_back"] = parts.pulled_back
        after = [parts.after.get(id(v), tf.identity(v)) for v in written]
        return Local(segments, sums, written, [before[id(v)] for v in written], after)

    def variables_by_path(self) -> dict[str, Any]:
        """Returns the variables to differentiate by, in order."""
        return {self.state.paths[id(v)]: v for v in self.variables}

    def values(self) -> dict[int, tf.Tensor]:
        """Returns the values of all variables that the pass may write, by `id`; in replica context."""
        return {id(v): tf.identity(v) for v in self.writable}  # TensorFlow prunes the values that nobody needs

    def unsynchronized_variables(self) -> list[Any]:
        """Returns the written variables that have no mean, and of which each replica keeps a value of its own."""
        kept_equal = {id(v) for v in self.written_values.with_mean(self.trace.written)} | self.written_values.carried
        none = tf.VariableAggregation.NONE
        return [v for v in self.trace.written if id(v) not in kept_equal and tensorflow_variable(v).aggregation == none]

    def compute(
        self,
        rows: Any,
        row_weights: tf.Tensor | None,
        factor: tf.Tensor | None,
        value: str = "loss",
        *,
        is_first: bool = True,
    ) -> tuple[list[Segment], tf.Tensor, list[tf.Tensor], list[tf.Tensor], Trace]:
        """Runs forward and backward over some rows of a replica; call in replica context.

        Args:
            rows: `[b, ...]`.
            row_weights: `[b]`, 0 for padding; None: all rows count.
            factor: of the value; None: 1.
            value: the name of the value to differentiate.
            is_first: whether it is the first look at the rows.

        Returns:
            Packed gradients of `factor * sum(w * value)`; the tallies of all values that `loss_fn` returned, `[2 * m]`,
            or in another look total and weight of `value`; the rows for Keras metrics; the new values of the
            overwritten variables; and what tracing revealed.

        Raises:
            ValueError: if the loss depends on no variable.
        """
        with variable_writes.recorded_writes(self.writable) as written:
            outputs, gradients, new_values, tallies, metric_rows = self._differentiate(
                rows, row_weights, factor, value, is_first=is_first
            )
        reached = [gradient is not None for gradient in gradients]
        exchange = gathering.current_exchange()
        if not any(reached) and not (exchange is not None and exchange.given):
            raise ValueError(
                f"{'The loss' if value == 'loss' else repr(value)}{f' of update {self.name!r}' if self.name else ''} "
                "does not depend on any variable that is to be trained: compute it from the model's outputs."
            )
        names = ["loss", *(name for name in tallies if name != "loss")]
        flat_tallies = metrics.flatten([tallies[name] for name in (names if is_first else [divisor_of(value, names)])])
        trace = Trace(names, outputs, reached, written, tallies["loss"].is_per_token, metric_rows.join)
        return self._pack(gradients), flat_tallies, metric_rows.tensors, new_values, trace

    def pull_back(
        self, rows: Any, row_weights: tf.Tensor | None, slopes: Sequence[tf.Tensor]
    ) -> tuple[list[Segment], list[bool]]:
        """Returns packed gradients by way of rows that virtual replicas exchanged, and which variables they reach.

        The arguments are those of `Differentiation.pull_back`.
        """
        gradients = self._differentiate.pull_back(rows, row_weights, slopes)
        return self._pack(gradients, keeps_sparse=False), [gradient is not None for gradient in gradients]

    def _pack(self, gradients: Sequence[Any], *, keeps_sparse: bool = True) -> list[Segment]:
        """Packs gradients, None where there is none."""
        filled = [
            tf.zeros(v.shape, v.dtype) if g is None else self.tables.sized(g, v)
            for g, v in zip(gradients, self.variables, strict=True)
        ]
        return self.packing.pack(filled, keeps_sparse=keeps_sparse)

    def gradients_of(
        self, rows: Any, examples: tf.Tensor, *, training: bool
    ) -> tuple[dict[str, tf.Tensor | None], dict[str, metrics.Tally]]:
        """Computes the gradients over some rows, to check the user's code.

        Args:
            rows: `[b, ...]`.
            examples: in the global batch that the rows belong to, a scalar.
            training: the argument for `loss_fn`.

        Returns:
            By path, the gradient of `sum(w * loss)`, or None if the loss does not depend on the variable; and the tally
            of each value except Keras metrics.
        """
        factor = self.loss_factor(tf.cast(examples, tf.float32))
        _, gradients, _, tallies, _ = self._differentiate(rows, None, factor, training=training, is_first=False)
        divisor = 1.0 if factor is None else factor
        by_path = {
            self.state.paths[id(v)]: None if g is None else tf.convert_to_tensor(g) / divisor
            for v, g in zip(self.variables, gradients, strict=True)
        }
        return by_path, tallies

    def _set_trace(self, traces: Sequence[Trace], *, is_first: bool) -> None:
        """Sets `trace` from the traces of all microbatches, or adds what another look reached and wrote."""
        known = [] if is_first else self.trace.written
        for trace in traces:
            if self._trace is not None and trace.names != self._trace.names:
                raise ValueError(
                    f"loss_fn returned {trace.names}, and {self._trace.names} before; it returns the same names for "
                    "all data."
                )
            if is_first:
                self._trace = trace
            self.trace.reached[:] = map(operator.or_, self.trace.reached, trace.reached)
        self.add_written([*known, *(v for trace in traces for v in trace.written)])

    def add_written(self, variables: Sequence[Any]) -> list[Any]:
        """Sets the written variables in `trace` to these and those of Keras metrics; returns them in their order."""
        are_written = {id(v) for v in (*variables, *self.state.keras_metrics.variables_of(self.trace.outputs))}
        self._trace = replace(self.trace, written=[v for v in self.writable if id(v) in are_written])
        return self.trace.written


def _explain_merge_call(update: ForwardBackward) -> str:
    """Returns one sentence about a forward pass that talks to other replicas where TensorFlow cannot do it."""
    setting, allowed = f"microbatches={update.microbatches}", "microbatches=1"
    if update.jit_compile:
        setting, allowed = "jit_compile=True", "jit_compile=False"
    place = "inside a loop or what XLA compiles"
    if update.state.virtual_replicas:
        setting, allowed = f"virtual_replicas={update.state.virtual_replicas}", "plain BatchNormalization"
        place = "between virtual replicas, which take turns"
    return (
        f"{setting} was given with a model that talks to other replicas in its forward pass, such as "
        f"BatchNormalization(synchronized=True), which TensorFlow cannot do {place}: use {allowed}."
    )


def _time_after(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the time at which all of some tensors are computed, in seconds."""
    with tf.control_dependencies(tensors):
        return tf.timestamp()
