"""The forward and backward pass of one update, summed over microbatches, then over replicas.

    rows -> loss_fn -> tallies, sum(w * v) and sum(w) -> gradients of sum(w * loss) -> sums over all replicas

    update_pass = ForwardBackward(state, update, microbatches=4)
    shard = update_pass(batch, num_examples, layout)           # in replica context
    sums = update_pass.all_reduce(shard)                       # likewise
    update_pass.trace.names                                    # ["loss", "accuracy"]; known once the pass is traced

It changes no weight.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from distloop.data.shards import Batch, BatchLayout, batch_size, take_shard
from distloop.distributed import gathering, strategies, tensorflow_internals
from distloop.distributed.strategies import TreeSum
from distloop.errors import explaining_merge_call
from distloop.graph_functions import graph_function, time_after
from distloop.model import metrics, variable_writes
from distloop.model.spec import Update
from distloop.model.state import TrainState
from distloop.model.variable_writes import StateUpdates
from distloop.optimizers import gradient_noise
from distloop.optimizers.gradients import Segment
from distloop.training.differentiation import Differentiation, Objective, Trace, divisor_of
from distloop.training.microbatches import (
    Compute,
    LoopSums,
    Microbatch,
    MicrobatchSums,
    ShardSums,
    SparseSegmentsError,
    StateUpdate,
    Sums,
    VirtualReplicas,
    join_rows,
)
from distloop.training.window import RowLayout


class Computed(NamedTuple):
    """What comes of some rows of a replica."""

    segments: list[Segment]  # packed gradients of `factor * sum(w * value)`
    tallies: tf.Tensor  # [2 * m]: of all values that `loss_fn` returned; in another pass, of the value alone
    metric_rows: list[tf.Tensor]  # for Keras metrics
    replacements: list[tf.Tensor]  # the new values of the replaced variables


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
        packing, add_up: the layout of their gradients; sums tensors over all replicas.
        loss_scaler: the `LossScaleOptimizer` if the loss is scaled, else None.
        differentiate: computes the gradients of a value over some rows.
    """

    def __init__(
        self,
        state: TrainState,
        update: Update,
        *,
        microbatches: int = 1,
        jit_compile: str = "none",
        needs_full_gradients: bool = False,
        measures_noise: bool = False,
    ):
        """Prepares; nothing is traced yet.

        Args:
            state: what is trained.
            update: one of its updates.
            microbatches: into how many each replica's shard is cut.
            jit_compile: what XLA compiles, as `Config.jit_compile`.
            needs_full_gradients: whether every worker needs all gradients.
            measures_noise: whether the gradients of the microbatches are compared.
        """
        self.update, self.name = update, update.name
        variables = state.variables_of_update[update.name]
        self.replaced = [v for v in variables if getattr(v, "overwrite_with_gradient", False)]
        self.variables = [v for v in variables if not getattr(v, "overwrite_with_gradient", False)]
        self.loss_scaler = state.loss_scalers.get(update.name)
        self.packing = state.slot_placement.make_packing(state, update, self.variables, needs_all=needs_full_gradients)
        self.add_up = gathering.sum_in_tree if state.replicas.same_bits else tensorflow_internals.sum_over_replicas
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
    ) -> ShardSums:
        """Computes gradients and tallies of a shard, and sets `trace`; in replica context.

        Args:
            batch: the global batch.
            examples: as for `loss_factor`.
            layout: of the batch.
            value: the name of the value to differentiate.
            again_from: for another pass over the same batch, the values to start from, by the variables' `id`; metrics
                are not updated. None: the first pass.
        """
        objective = Objective(self.loss_factor(examples), value, is_first=again_from is None)
        shard = ShardSums(batch, layout, self.values() if again_from is None else again_from, objective)
        is_timed = objective.is_first and strategies.times_replicas(self.state.strategy)
        started = time_after(tf.nest.flatten(batch.rows, expand_composites=True)[:1]) if is_timed else None
        compute = functools.partial(self.compute, objective=objective, traces=shard.traces)
        if self.jit_compile == "pass":
            # No more than this: XLA cannot follow variables to another device, or a reduction. A function of its own
            # for each replica, which reads that replica's variables.
            of_tensors = compute  # TensorFlow refuses a function whose other arguments change, as `traces` does
            compute = graph_function(lambda *shard: of_tensors(*shard), jit_compile=True)
        with gathering.largest_shard(layout.max_replica_rows), explaining_merge_call(_explain_merge_call(self)):
            is_unrolled = self.state.replicas.same_bits or self.state.placement.devices or self.jit_compile == "loop"
            if self.microbatches > 1 and not is_unrolled:
                sums = self._sum_in_loop(shard, compute)
            else:
                sums = self._sum_microbatches(shard, compute, range(layout.per_device * self.microbatches))
            self._set_trace(shard)
            metric_rows = [join_rows(pieces) for pieces in zip(*sums.rows, strict=True)]
            self.state.keras_metrics.update_gathered(metric_rows, shard.joins[-1])
        vectors = shard.vectors | shard.rows[-1].unpack(sums.vector)
        if started is not None:
            vectors["secs"] = _secs_of_replicas(started, sums.segments)
        divisor = self.trace.divisor(value) if objective.is_first else 1
        after = {id(v): shard.after.get(id(v), tf.identity(v)) for v in self.trace.mutated}
        return replace(shard, segments=sums.segments, vectors=vectors, divisor=divisor, after=after)

    def all_reduce(self, shard: ShardSums) -> Sums:
        """Adds up the sums of all replicas' shards, the one reduction of the pass; in replica context."""
        mutated, of_shard = self.trace.mutated, (shard.batch, shard.layout)
        segments, vectors = self.packing.all_reduce(shard.segments, shard.vectors, self.add_up, of_shard)
        if "pulled_back" in vectors:
            segments = self.packing.add(segments, vectors["pulled_back"])
        tallies, after = vectors["tallies"], [shard.after[id(v)] for v in mutated]
        after, replacements = self.state_updates.merge(mutated, after, vectors.get("writes"))
        factor, weight = shard.objective.factor, metrics.elements(tallies)[shard.divisor]
        noise = gradient_noise.unscaled(vectors.get("noise"), factor)
        weight = weight if factor is None else weight * factor
        writes = self.writes(mutated, shard.before, after)
        return Sums(segments, weight, tallies, writes, replacements, vectors.get("secs"), noise)

    def _sum_microbatches(self, shard: ShardSums, compute: Compute, numbers: Sequence[Any]) -> MicrobatchSums:
        """Adds up microbatches: those of a virtual replica in their order, and virtual replicas in a fixed tree.

        Without virtual replicas, the replica is the only one. In a loop, `numbers` is that of one microbatch.
        """
        state, count = self.state, len(numbers) // shard.layout.per_device
        arguments = state, compute, shard.batch, shard.layout, count, shard.before
        replicas = VirtualReplicas(*arguments) if state.replicas.same_bits else None
        tree, sums = TreeSum[MicrobatchSums](self._add), list[MicrobatchSums]()
        for i, number in enumerate(numbers):
            if replicas is not None:
                more = _sums_of(self, shard, replicas(number, sums))
            else:
                with state.placement.in_order([each.segments for each in sums]):
                    rows, row_weights = take_shard(shard.batch, shard.layout, self.microbatches, number)
                    result, mutated = compute(rows, row_weights), {id(v): v for v in shard.traces[-1].mutated}
                    more = _sums_of(self, shard, Microbatch(number, rows, row_weights, result, mutated))
                    self.state_updates.rewind([*mutated.values()], shard.before, number)
            more = self._add(sums[-1], more) if i % count else more
            sums.append(more if (i + 1) % count else tree.append(more))
        total = tree.total()
        if replicas is not None:
            shard.after.update(replicas.after)
            if replicas.rows is not None:
                shard.vectors["pulled_back"] = _pull_back(self, shard, replicas, total.slopes)
        return total

    def _add(self, one: MicrobatchSums, other: MicrobatchSums) -> MicrobatchSums:
        """Returns the sums over the microbatches of both."""
        slopes = [a + b for a, b in zip(one.slopes, other.slopes, strict=True)]
        segments = self.packing.add(one.segments, other.segments)
        return MicrobatchSums(segments, one.vector + other.vector, slopes, one.rows + other.rows)

    def _sum_in_loop(self, shard: ShardSums, compute: Compute) -> MicrobatchSums:
        """Adds up the microbatches in a TensorFlow loop."""
        specs = self.state.keras_metrics.row_specs.get(self.name, ()) if shard.objective.is_first else ()
        loop = LoopSums(self.packing, self.microbatches, specs)

        def body(carried: Any) -> tuple[Any]:
            return (loop.add(carried, self._sum_microbatches(shard, compute, [carried.index])),)

        settings = {"loop_vars": (loop.start,), "shape_invariants": (loop.shapes,), "parallel_iterations": 1}
        try:
            (carried,) = tf.while_loop(lambda carried: carried.index < self.microbatches, body, **settings)
        except SparseSegmentsError:  # known once the loop's body was traced
            return self._sum_in_loop(shard, compute)
        return loop.total(carried)

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
        self, rows: Any, row_weights: tf.Tensor | None, objective: Objective, traces: list[Trace] | None = None
    ) -> Computed:
        """Runs forward and backward over some rows of a replica; call in replica context.

        Args:
            rows: `[b, ...]`.
            row_weights: `[b]`, 0 for padding; None: all rows count.
            objective: what to differentiate.
            traces: gets what tracing reveals.

        Raises:
            ValueError: if the loss depends on no variable.
        """
        with variable_writes.recorded_writes(self.writable) as mutated:
            found = self.differentiate(rows, row_weights, objective)
        value, is_first = objective.value, objective.is_first
        reached, tallies = [gradient is not None for gradient in found.gradients], found.tallies
        exchange = gathering.current_exchange()
        if not any(reached) and not (exchange is not None and exchange.given):
            raise ValueError(
                f"{'The loss' if value == 'loss' else repr(value)}{f' of update {self.name!r}' if self.name else ''} "
                "does not depend on any variable that is to be trained: compute it from the model's outputs."
            )
        names = ["loss", *(name for name in tallies if name != "loss")]
        flat_tallies = metrics.flatten([tallies[name] for name in (names if is_first else [divisor_of(value, names)])])
        if traces is not None:
            has_tokens, join = tallies["loss"].is_per_token, found.metric_rows.join
            traces.append(Trace(names, found.outputs, reached, mutated, has_tokens, join))
        return Computed(self.pack(found.gradients), flat_tallies, found.metric_rows.tensors, found.replacements)

    def pack(self, gradients: Sequence[Any], *, keeps_sparse: bool = True) -> list[Segment]:
        """Packs gradients, None where there is none."""
        pairs = zip(gradients, self.variables, strict=True)
        filled = [tf.zeros(v.shape, v.dtype) if g is None else self.packing.sized(g, v) for g, v in pairs]
        return self.packing.pack(filled, keeps_sparse=keeps_sparse)

    def _set_trace(self, shard: ShardSums) -> None:
        """Sets `trace` from the traces of all microbatches, or adds what another pass reached and wrote."""
        known = [] if shard.objective.is_first else self.trace.mutated
        for trace in shard.traces:
            metrics.require_same_names("loss_fn returned", trace.names, (self._trace or trace).names)
            if shard.objective.is_first:
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
        metrics.require_same_names("step_fn reported", trace.names, (self._trace or trace).names)
        self._trace = trace
        return self.add_mutated(trace.mutated)


def _sums_of(update: ForwardBackward, shard: ShardSums, microbatch: Microbatch) -> MicrobatchSums:
    """Returns what is summed of a microbatch."""
    computed: Computed = microbatch.result
    mutated = [v for v in update.writable if id(v) in microbatch.mutated]
    trace = shard.traces[-1] = replace(shard.traces[-1], mutated=mutated)
    metric_rows = update.state.keras_metrics.add(trace.join(computed.metric_rows), microbatch.row_weights)
    shard.joins.append(metric_rows.join)
    pieces = {"tallies": computed.tallies}
    if shard.objective.is_first:
        size = batch_size(microbatch.rows) if microbatch.row_weights is None else tf.reduce_sum(microbatch.row_weights)
        values = [microbatch.mutated[id(v)] for v in mutated]
        writes = update.state_updates.flatten(mutated, values, computed.replacements, size, microbatch.number)
        pieces |= {} if writes is None else {"writes": writes}
        if update.measures_noise:
            pieces["noise"] = gradient_noise.of_microbatch(computed.segments, computed.tallies[trace.divisor("loss")])
    shard.rows.append(RowLayout({name: piece.shape[0] for name, piece in pieces.items()}))
    vector = computed.tallies if len(pieces) == 1 else tf.concat(shard.rows[-1].pack(pieces), 0)
    return MicrobatchSums(computed.segments, vector, microbatch.slopes, [metric_rows.tensors])


def _pull_back(update: ForwardBackward, shard: ShardSums, replicas: VirtualReplicas, slopes: Any) -> list[Segment]:
    """Returns the packed gradients by way of the rows that each virtual replica gave to all."""
    if update.state.strategy.num_replicas_in_sync > 1:
        slopes = gathering.sum_in_tree(slopes)

    def pull_back(rows: Any, row_weights: tf.Tensor | None) -> list[Segment]:
        gradients = update.differentiate.pull_back(rows, row_weights, slopes)
        are_reached = zip(shard.traces[-1].reached, gradients, strict=True)
        reached = [is_reached or gradient is not None for is_reached, gradient in are_reached]
        shard.traces[-1] = replace(shard.traces[-1], reached=reached)
        return update.pack(gradients, keeps_sparse=False)

    again, tree, sums = replicas.of_same_rows(pull_back), TreeSum[list[Segment]](update.packing.add), list[Any]()
    for number in range(again.count):
        sums.append(tree.append(again(number, sums).result))
    return tree.total()


def _explain_merge_call(update: ForwardBackward) -> str:
    """Returns one sentence about a forward pass that talks to other replicas where TensorFlow cannot do it."""
    setting, allowed = f"microbatches={update.microbatches}", "microbatches=1"
    where = "inside a loop or what XLA compiles"
    if update.jit_compile == "pass":
        setting, allowed = "jit_compile=pass", "jit_compile=none"
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
