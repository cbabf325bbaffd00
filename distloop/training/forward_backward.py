"""The forward and backward pass of one update, summed over microbatches, then over replicas.

    rows -> loss_fn -> tallies, sum(w * v) and sum(w) -> gradients of sum(w * loss) -> sums over all replicas

    update_pass = ForwardBackward(state, update, microbatches=4)
    summed = update_pass(batch, num_examples, layout)          # in replica context
    update_pass.trace.names                                    # ["loss", "accuracy"]; known once the pass is traced

It changes no weight.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from distloop.data.shards import Batch, BatchLayout, batch_size, take_shard
from distloop.distributed import gathering, strategies, tensorflow_internals
from distloop.errors import explaining_merge_call
from distloop.graph_functions import graph_function, time_after
from distloop.model import metrics, variable_writes
from distloop.model.keras_metrics import Join
from distloop.model.placement import Sums
from distloop.model.spec import Update
from distloop.model.state import TrainState
from distloop.model.variable_writes import StateUpdates
from distloop.optimizers import gradient_noise
from distloop.optimizers.gradients import Segment
from distloop.training.differentiation import Differentiation, Trace, divisor_of
from distloop.training.virtual_replicas import Compute, Microbatch, VirtualReplicas

# Packed gradients; tallies and state updates; slopes of exchanged rows; rows for Keras metrics, one list each.
_MicrobatchSums: TypeAlias = tuple[list[Segment], tf.Tensor, list[tf.Tensor], list[list[tf.Tensor]]]


class StateUpdate(NamedTuple):
    """What the forward pass makes of a variable, on a replica."""

    before: tf.Tensor  # its value before the step
    after: tf.Tensor  # its value after it


class Summed(NamedTuple):
    """An update's gradients after the reduction; all but `writes` is the same on every replica."""

    segments: list[Segment]  # packed gradients; of this replica alone if they are summed where they are used
    weight: tf.Tensor  # []: what divides them
    tallies: tf.Tensor  # [2 * m]: of all values; of a pass from other weights, total and weight of its value
    writes: dict[str, StateUpdate]  # of the variables that the forward pass writes, by their index in `writable`
    replacements: list[tf.Tensor]  # of the replaced variables
    secs: tf.Tensor | None  # [R]: of forward and backward on each replica; None: there is only one
    noise: tf.Tensor | None = None  # [2]: `gradient_noise.of_microbatch` over all; None: it is not measured
    are_finite: Sequence[tf.Tensor] = ()  # [] each: conditions on the passes that led to it


@dataclass
class _Shard:
    """A replica's shard in one pass, and what its microbatches, of virtual replicas if there are any, add to."""

    batch: Batch  # the global one
    layout: BatchLayout
    before: Mapping[int, tf.Tensor]  # by `id`, the values that the mutated variables have when a microbatch begins
    is_first: bool  # whether the pass is the first one over this batch
    traces: list[Trace] = field(default_factory=list)  # of the microbatches, in order
    joins: list[Join] = field(default_factory=list)  # of their arguments of Keras metrics
    after: Mapping[int, tf.Tensor] = field(default_factory=dict)  # by `id`, values that variables do not have yet
    pulled_back: list[tf.Tensor] = field(default_factory=list)  # packed gradients by way of rows that were exchanged


class ForwardBackward:
    """The forward and backward pass of one update.

    Attributes:
        update: the user's `loss_fn` and optimizer.
        name: of the update; empty if it is the only one.
        state, microbatches, jit_compile: the arguments.
        variables: the variables to differentiate by.
        replaced: the variables whose "gradient" is their new value, such as the scales of float8 layers: neither
            summed nor scaled, they get the maximum over microbatches and replicas.
        writable, state_updates: the variables that the forward pass may write, and what becomes of their values.
        packing, reduce: the layout of their gradients; sums tensors over all replicas.
        loss_scaler: the `LossScaleOptimizer` if the loss is scaled, else None.
        differentiate: computes the gradients of a value over some rows.
    """

    def __init__(
        self,
        state: TrainState,
        update: Update,
        *,
        microbatches: int = 1,
        jit_compile: bool = False,
        needs_full_gradients: bool = False,
        measures_noise: bool = False,
    ):
        """Prepares; nothing is traced yet.

        Args:
            state: what is trained.
            update: one of its updates.
            microbatches: into how many each replica's shard is cut.
            jit_compile: whether XLA compiles the pass.
            needs_full_gradients: whether every worker needs all gradients.
            measures_noise: whether the gradients of the microbatches are compared.
        """
        self.update, self.name = update, update.name
        variables = state.variables_of_update[update.name]
        self.replaced = [v for v in variables if getattr(v, "overwrite_with_gradient", False)]
        self.variables = [v for v in variables if not getattr(v, "overwrite_with_gradient", False)]
        self.loss_scaler = state.loss_scalers.get(update.name)
        self.packing = state.slot_placement.make_packing(state, update, self.variables, needs_all=needs_full_gradients)
        self.reduce = gathering.sum_in_tree if state.replicas.same_bits else tensorflow_internals.sum_over_replicas
        self.differentiate = Differentiation(state, update, self.variables, self.replaced, microbatches)
        self.state, self.microbatches = state, microbatches
        self.jit_compile, self.measures_noise = jit_compile, measures_noise
        self._trace: Trace | None = None
        of_metrics = state.keras_metrics.variables().values()
        self.writable = [*state.untrained_variables, *of_metrics, *state.trained_variables]
        self.state_updates = StateUpdates(state, microbatches=microbatches, replaced=self.replaced)

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
            return 1.0 / examples if self.replaced else None
        return self.loss_scaler.scale_loss(1.0) / examples

    @property
    def is_loss_scaled(self) -> bool:
        """Whether `loss_factor` returns a factor."""
        return self.loss_scaler is not None or bool(self.replaced)

    def __call__(
        self,
        batch: Batch,
        examples: tf.Tensor,
        layout: BatchLayout,
        value: str = "loss",
        *,
        again_from: Mapping[int, tf.Tensor] | None = None,
    ) -> Summed:
        """Computes gradients and tallies of a shard, sums them over all replicas, and sets `trace`; in replica context.

        Args:
            batch: the global batch.
            examples: as for `loss_factor`.
            layout: of the batch.
            value: the name of the value to differentiate.
            again_from: for another pass over the same batch, the values to start from, by the variables' `id`; metrics
                are not updated. None: the first pass.
        """
        factor = self.loss_factor(examples)
        shard = _Shard(batch, layout, self.values() if again_from is None else again_from, again_from is None)
        is_timed = shard.is_first and strategies.times_replicas(self.state.strategy)
        started = time_after(tf.nest.flatten(batch.rows, expand_composites=True)[:1]) if is_timed else None
        settings: dict[str, Any] = {"value": value, "traces": shard.traces, "is_first": shard.is_first}
        compute = functools.partial(self.compute, factor=factor, **settings)
        if self.jit_compile:
            # No more than this: XLA cannot follow variables to another device, or a reduction. A function of its own
            # for each replica, which reads that replica's variables.
            of_tensors = compute  # TensorFlow refuses a function whose other arguments change, as `traces` does
            compute = graph_function(lambda *shard: of_tensors(*shard), jit_compile=True)
        with gathering.largest_shard(layout.max_replica_rows), explaining_merge_call(_explain_merge_call(self)):
            if self.state.replicas.same_bits:
                segments, vector, metric_rows = self._sum_virtual_replicas(shard, compute)
            elif self.microbatches == 1 and not self.state.placement.devices:
                segments, vector, metric_rows = self._microbatch(shard, compute, 0)
            else:
                specs = self.state.keras_metrics.row_specs.get(self.name, ()) if shard.is_first else ()
                arguments = self.microbatches, functools.partial(self._microbatch, shard, compute), specs
                segments, vector, metric_rows = self.state.placement.sum_microbatches(self.packing, *arguments)
        self._set_trace(shard)
        self.state.keras_metrics.update_gathered(metric_rows, shard.joins[-1])
        sums = _split(self, vector, shard.is_first)
        if started is not None:
            sums["secs"] = _secs_of_replicas(started, segments)
        if shard.pulled_back:
            sums["pulled_back"] = shard.pulled_back
        return self._reduce(shard, segments, sums, factor, value)

    def _microbatch(self, shard: _Shard, compute: Compute, index: tf.Tensor | int) -> Sums:
        """Returns what is summed of a microbatch of this replica."""
        rows, row_weights = take_shard(shard.batch, shard.layout, self.microbatches, index)
        result = compute(rows, row_weights)
        mutated = shard.traces[-1].mutated
        sums = _sums_of(self, shard, Microbatch(index, rows, row_weights, result, {id(v): v for v in mutated}))
        self.state_updates.rewind(mutated, shard.before, index)
        return sums

    def _sum_virtual_replicas(self, shard: _Shard, compute: Compute) -> Sums:
        """Adds up the microbatches of each virtual replica of this device, and these in a fixed tree."""
        replicas = VirtualReplicas(self.state, shard.batch, shard.layout, self.microbatches, shard.before)

        def of_microbatch(microbatch: Microbatch) -> _MicrobatchSums:
            segments, vector, metric_rows = _sums_of(self, shard, microbatch)
            return segments, vector, list(microbatch.slopes), [metric_rows]

        def add(one: _MicrobatchSums, other: _MicrobatchSums) -> _MicrobatchSums:
            slopes = [a + b for a, b in zip(one[2], other[2], strict=True)]
            return self.packing.add(one[0], other[0]), one[1] + other[1], slopes, one[3] + other[3]

        segments, vector, slopes, metric_rows = replicas.sum_microbatches(compute, of_microbatch, add)
        shard.after = replicas.after
        if replicas.rows is not None:
            shard.pulled_back = _pull_back(self, shard, replicas, slopes)
        return segments, vector, [tf.concat(rows, 0) for rows in zip(*metric_rows, strict=True)]

    def _reduce(
        self, shard: _Shard, segments: list[Segment], sums: dict[str, Any], factor: tf.Tensor | None, value: str
    ) -> Summed:
        """Sums what a replica computed over all of them."""
        mutated = self.trace.mutated
        after, replacements = [shard.after.get(id(v), tf.identity(v)) for v in mutated], list[tf.Tensor]()
        segments, sums = self.packing.all_reduce(segments, sums, self.reduce, (shard.batch, shard.layout))
        if "pulled_back" in sums:
            segments = self.packing.add(segments, sums["pulled_back"])
        tallies = sums["tallies"]
        weight = tallies[self.trace.divisor(value) if shard.is_first else 1]
        if shard.is_first:
            after, replacements = self.state_updates.merge(mutated, after, sums.get("writes"))
        noise = gradient_noise.unscaled(sums.get("noise"), factor)
        weight = weight if factor is None else weight * factor
        writes = self.writes(mutated, shard.before, after)
        return Summed(segments, weight, tallies, writes, replacements, sums.get("secs"), noise)

    def writes(self, mutated: Sequence[Any], before: Mapping[int, Any], after: Sequence[Any]) -> dict[str, StateUpdate]:
        """Returns the writes of variables, given the values before the step by `id`, and those after it in order."""
        indices = {id(v): str(i) for i, v in enumerate(self.writable)}
        return {indices[id(v)]: StateUpdate(before[id(v)], new) for v, new in zip(mutated, after, strict=True)}

    def variables_of(self, writes: Mapping[str, Any]) -> list[Any]:
        """Returns the variables of writes, in their order."""
        return [self.writable[int(i)] for i in writes]

    def values(self) -> dict[int, tf.Tensor]:
        """Returns the values of all variables that the pass may write, by `id`; in replica context."""
        return {id(v): tf.identity(v) for v in self.writable}  # TensorFlow prunes the values that nobody needs

    def compute(
        self,
        rows: Any,
        row_weights: tf.Tensor | None,
        factor: tf.Tensor | None,
        value: str = "loss",
        *,
        is_first: bool = True,
        traces: list[Trace] | None = None,
    ) -> tuple[list[Segment], tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
        """Runs forward and backward over some rows of a replica; call in replica context.

        Args:
            rows: `[b, ...]`.
            row_weights: `[b]`, 0 for padding; None: all rows count.
            factor: of the value; None: 1.
            value: the name of the value to differentiate.
            is_first: whether it is the first pass over the rows.
            traces: gets what tracing reveals.

        Returns:
            Packed gradients of `factor * sum(w * value)`; the tallies of all values that `loss_fn` returned, `[2 * m]`,
            or in another pass total and weight of `value`; the rows for Keras metrics; and the new values of the
            replaced variables.

        Raises:
            ValueError: if the loss depends on no variable.
        """
        with variable_writes.recorded_writes(self.writable) as mutated:
            outputs, gradients, replacements, tallies, metric_rows = self.differentiate(
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
        if traces is not None:
            traces.append(Trace(names, outputs, reached, mutated, tallies["loss"].is_per_token, metric_rows.join))
        return self.pack(gradients), flat_tallies, metric_rows.tensors, replacements

    def pack(self, gradients: Sequence[Any], *, keeps_sparse: bool = True) -> list[Segment]:
        """Packs gradients, None where there is none."""
        pairs = zip(gradients, self.variables, strict=True)
        filled = [tf.zeros(v.shape, v.dtype) if g is None else self.packing.sized(g, v) for g, v in pairs]
        return self.packing.pack(filled, keeps_sparse=keeps_sparse)

    def _set_trace(self, shard: _Shard) -> None:
        """Sets `trace` from the traces of all microbatches, or adds what another pass reached and wrote."""
        known = [] if shard.is_first else self.trace.mutated
        for trace in shard.traces:
            if self._trace is not None and trace.names != self._trace.names:
                raise ValueError(
                    f"loss_fn returned {trace.names}, and {self._trace.names} before; it returns the same names for "
                    "all data."
                )
            if shard.is_first:
                self._trace = trace
            self.trace.reached[:] = map(operator.or_, self.trace.reached, trace.reached)
        self.add_mutated([*known, *(v for trace in shard.traces for v in trace.mutated)])

    def add_mutated(self, variables: Sequence[Any]) -> list[Any]:
        """Sets the mutated variables in `trace` to these and those of Keras metrics; returns them in their order."""
        are_mutated = {id(v) for v in (*variables, *self.state.keras_metrics.variables_of(self.trace.outputs))}
        self._trace = replace(self.trace, mutated=[v for v in self.writable if id(v) in are_mutated])
        return self.trace.mutated

    def set_own_trace(self, trace: Trace) -> list[Any]:
        """Sets the trace of a step that the user computes; returns the variables that it writes, in their order."""
        if self._trace is not None and trace.names != self._trace.names:
            raise ValueError(f"step_fn reported {trace.names}, and {self._trace.names} before: report the same names.")
        self._trace = trace
        return self.add_mutated(trace.mutated)


def _sums_of(update: ForwardBackward, shard: _Shard, microbatch: Microbatch) -> Sums:
    """Returns what is summed of a microbatch."""
    segments, tallies, fed, replacements = microbatch.result
    mutated = [v for v in update.writable if id(v) in microbatch.mutated]
    trace = shard.traces[-1] = replace(shard.traces[-1], mutated=mutated)
    metric_rows = update.state.keras_metrics.add(trace.join(fed), microbatch.row_weights)
    shard.joins.append(metric_rows.join)
    if shard.is_first:
        size = batch_size(microbatch.rows) if microbatch.row_weights is None else tf.reduce_sum(microbatch.row_weights)
        values = [microbatch.mutated[id(v)] for v in mutated]
        flat = update.state_updates.flatten(mutated, values, replacements, size, microbatch.number)
        vectors = [tallies] if flat is None else [tallies, flat]
        if update.measures_noise:
            vectors.append(gradient_noise.of_microbatch(segments, tallies[trace.divisor("loss")]))
        tallies = vectors[0] if len(vectors) == 1 else tf.concat(vectors, 0)
    return segments, tallies, metric_rows.tensors


def _split(update: ForwardBackward, vector: tf.Tensor, is_first: bool) -> dict[str, Any]:
    """Returns the pieces of a vector that `_sums_of` has joined, by name."""
    size, end = 2 * len(update.trace.names) if is_first else 2, vector.shape[0]
    noise = {}
    if is_first and update.measures_noise:
        noise, end = {"noise": vector[-2:]}, end - 2
    return {"tallies": vector[:size]} | ({"writes": vector[size:end]} if end > size else {}) | noise


def _pull_back(update: ForwardBackward, shard: _Shard, replicas: VirtualReplicas, slopes: Any) -> list[tf.Tensor]:
    """Returns the packed gradients by way of the rows that each virtual replica gave to all."""
    if update.state.strategy.num_replicas_in_sync > 1:
        slopes = gathering.sum_in_tree(slopes)

    def pull_back(rows: Any, row_weights: tf.Tensor | None) -> list[Segment]:
        gradients = update.differentiate.pull_back(rows, row_weights, slopes)
        are_reached = zip(shard.traces[-1].reached, gradients, strict=True)
        reached = [is_reached or gradient is not None for is_reached, gradient in are_reached]
        shard.traces[-1] = replace(shard.traces[-1], reached=reached)
        return update.pack(gradients, keeps_sparse=False)

    return replicas.sum_again(pull_back, lambda microbatch: microbatch.result, update.packing.add)


def _explain_merge_call(update: ForwardBackward) -> str:
    """Returns one sentence about a forward pass that talks to other replicas where TensorFlow cannot do it."""
    setting, allowed = f"microbatches={update.microbatches}", "microbatches=1"
    where = "inside a loop or what XLA compiles"
    if update.jit_compile:
        setting, allowed = "jit_compile=True", "jit_compile=False"
    if (replicas := update.state.replicas).same_bits:
        setting, allowed = replicas.setting, "plain BatchNormalization"
        where = "between virtual replicas, of which a device computes one after the other"
    return (
        f"{setting} was given with a model that talks to other replicas in its forward pass, such as "
        f"BatchNormalization(synchronized=True), which TensorFlow cannot do {where}: use {allowed}."
    )


def _secs_of_replicas(started: tf.Tensor, segments: list[Segment]) -> tf.Tensor:
    """Returns how long a replica took, at its index in `[R]`, whose other numbers are 0."""
    context = tf.distribute.get_replica_context()
    secs = tf.cast(time_after(tf.nest.flatten(segments)) - started, tf.float32)
    return tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync) * secs
