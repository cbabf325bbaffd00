"""The forward and backward pass of one update on one replica; the only module with a tape.

    rows -> loss_fn -> tallies, sum(w * v) and sum(w) -> gradients of sum(w * loss) -> packed, summed over microbatches

    update_pass = ForwardBackward(state, update, microbatches=4)
    local = update_pass(batch, layout, loss_factor)            # in replica context
    update_pass.trace.names                                    # ["loss", "accuracy"]; known once the pass is traced

It sums nothing over replicas and changes no weight.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from distloop.data import shards
from distloop.data.shards import Batch, Layout
from distloop.distributed import gathering
from distloop.distributed.devices import HOST
from distloop.distributed.placement import Placement
from distloop.optimizers.gradients import Packing
from distloop.training import broadcasts, metrics, variable_writes
from distloop.training.metric_state import Join, KerasMetrics, Rows, check_arguments, take_rows
from distloop.training.spec import Update
from distloop.training.state import TrainState
from distloop.training.written_values import WrittenValues
from distloop.variables import tensorflow_variable

REGULARIZATION = "regularization"
# Of the regularization on a shard whose loss has none: it counts where the whole batch has none, and elsewhere is less
# than rounding.
_LEAST_WEIGHT = 1e-12
# The mean over a shard's rows, as Keras takes it, would count by the shard's sum of weights instead of its rows.
_UNSHARED_REGULARIZATION = (
    "The layers {} have an activity regularizer or an add_loss, the loss has weights or masks of its own, and each "
    "batch is cut in {} shards, so the term would depend on how it is cut: return the term from loss_fn, one value per "
    "example, or train on one replica without microbatches."
)


@dataclass(frozen=True)
class Trace:
    """What tracing reveals about a pass: Python values, the same on every replica.

    Attributes:
        names: of the tallies, "loss" first, without the update's own name.
        outputs: the names that `loss_fn` returned, those of Keras metrics included.
        reached: by variable, whether the loss depends on it.
        written: the variables that the forward pass writes.
        join: puts together the arguments of the Keras metrics.
    """

    names: list[str]
    outputs: set[str]
    reached: list[bool]
    written: list[Any]
    join: Join

    @property
    def divisor(self) -> int:
        """The place of the weight that divides the gradients, among the flat tallies `[2 * M]`."""
        return 2 * self.names.index(REGULARIZATION) + 1 if REGULARIZATION in self.names else 1


class Local(NamedTuple):
    """What a replica computes before the reduction."""

    segments: list[tf.Tensor]  # packed gradients of the scaled sum(w * loss)
    sums: dict[str, Any]  # what is summed over the replicas along with them, by name
    before: list[tf.Tensor]  # the values of the written variables before the forward pass
    after: list[tf.Tensor]  # and after it, those with a mean apart


class ForwardBackward:
    """The forward and backward pass of one update.

    Attributes:
        update: the user's `loss_fn` and optimizer.
        variables: the variables to differentiate by.
        overwritten: the variables whose "gradient" is their new value, such as the scales of float8 layers: neither
            summed nor scaled, they get the maximum over microbatches and replicas.
        written_values: what becomes of the values that the forward pass writes.
        packing: the layout of their gradients.
        loss_scaler: the `LossScaleOptimizer` if the loss is scaled, else None.
    """

    def __init__(self, state: TrainState, update: Update, *, microbatches: int = 1, jit_compile: bool = False):
        """Prepares; nothing is traced yet.

        Args:
            state: what is trained.
            update: one of its updates.
            microbatches: the number of parts that each replica's shard is cut into.
            jit_compile: whether XLA compiles the pass.
        """
        self.update = update
        variables = state.variables_of_update[update.name]
        self.overwritten = [v for v in variables if getattr(v, "overwrite_with_gradient", False)]
        self.variables = [v for v in variables if not getattr(v, "overwrite_with_gradient", False)]
        self.loss_scaler = state.loss_scalers.get(update.name)
        self.packing = Packing(self.variables, state.placement.gradient_devices(self.variables))
        self._state = state
        self._microbatches = microbatches
        self._jit_compile = jit_compile
        self._trace: Trace | None = None
        self._writable = [
            *state.untrained_variables,
            *state.keras_metrics.variables().values(),
            *state.trained_variables,
        ]
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

    def __call__(self, batch: Batch, layout: Layout, factor: tf.Tensor | None) -> Local:
        """Computes gradients and tallies of a replica's shard, and sets `trace`; call in replica context.

        Args:
            batch: the global batch.
            layout: its layout.
            factor: of the loss, as `loss_factor` returns it.

        Returns:
            Packed gradients, and the sums to be reduced with them: "tallies", `[2 * m]`; with several replicas also
            "secs", `[R]`, the seconds that each replica took; where values that parts of the batch write are merged,
            "writes", `[F]`.
        """
        replicas = self._state.strategy.num_replicas_in_sync
        started = _time_after(tf.nest.flatten(batch.rows, expand_composites=True)[:1]) if replicas > 1 else None
        before = {id(v): tf.identity(v) for v in self._writable}  # TensorFlow prunes the values that nobody needs
        keras_metrics, joins = self._state.keras_metrics, list[Join]()
        traces: list[Trace] = []

        def compute(rows: Any, row_weights: tf.Tensor | None, factor: tf.Tensor | None) -> Any:
            *results, trace = self.compute(rows, row_weights, factor)
            traces.append(trace)
            return tuple(results)

        if self._jit_compile:
            # No more than this: XLA cannot follow variables to another device, or a reduction. A function of its own
            # for each replica, which reads that replica's variables.
            compute = tf.function(compute, autograph=False, jit_compile=True)

        def microbatch(index: tf.Tensor | int) -> Any:
            rows, row_weights = shards.take_shard(batch, layout, self._microbatches, index)
            segments, tallies, fed, new_values = compute(rows, row_weights, factor)
            metric_rows = keras_metrics.add(traces[-1].join(fed), row_weights)
            joins.append(metric_rows.join)
            written = traces[-1].written
            count = shards.batch_size(rows) if row_weights is None else tf.reduce_sum(row_weights)
            flat = self.written_values.flatten(written, new_values, count, index)
            self.written_values.rewind(written, before, index)
            return segments, tallies if flat is None else tf.concat([tallies, flat], 0), metric_rows.tensors

        row_specs = keras_metrics.row_specs.get(self.name, ())
        with _explain_merge_call_error(self._microbatches, self._jit_compile):
            segments, vector, metric_rows = self._state.placement.sum_microbatches(
                self.packing, self._microbatches, microbatch, row_specs
            )
        self._set_trace(traces)
        keras_metrics.update_gathered(metric_rows, joins[-1])
        size, written = 2 * len(self.trace.names), self.trace.written
        has_writes = vector.shape[0] > size
        sums = {"tallies": vector[:size], "writes": vector[size:]} if has_writes else {"tallies": vector}
        if started is not None:
            with tf.device(HOST):  # a copy: a mere dependency on a GPU's tensor is met before that is computed
                last = tf.identity(segments[-1][:1])
            secs = tf.cast(_time_after([*segments, last]) - started, tf.float32)
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            sums["secs"] = tf.one_hot(replica, replicas) * secs
        return Local(segments, sums, [before[id(v)] for v in written], [tf.identity(v) for v in written])

    def unsynchronized_variables(self) -> list[Any]:
        """Returns the written variables that have no mean, and of which each replica keeps a value of its own."""
        kept_equal = {id(v) for v in self.written_values.with_mean(self.trace.written)} | self.written_values.carried
        none = tf.VariableAggregation.NONE
        return [v for v in self.trace.written if id(v) not in kept_equal and tensorflow_variable(v).aggregation == none]

    def compute(
        self, rows: Any, row_weights: tf.Tensor | None, factor: tf.Tensor | None
    ) -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor], list[tf.Tensor], Trace]:
        """Runs forward and backward over some rows of a replica; call in replica context.

        Args:
            rows: `[b, ...]`.
            row_weights: `[b]`, 0 for padding; None: all rows count.
            factor: of the loss; None: 1.

        Returns:
            Packed gradients of `factor * sum(w * loss)`; the tallies of all values that `loss_fn` returned, `[2 * m]`;
            the rows for Keras metrics; the new values of the overwritten variables; and
            what tracing revealed.

        Raises:
            ValueError: if the loss depends on no variable.
        """
        with variable_writes.recorded_writes(self._writable) as written:
            outputs, gradients, new_values, tallies, metric_rows = self._differentiate(rows, row_weights, factor)
        reached = [gradient is not None for gradient in gradients]
        if not any(reached):
            raise ValueError(
                f"The loss{' of update ' + repr(self.update.name) if self.update.name else ''} does not depend on "
                "any variable that is to be trained: compute it from the model's outputs."
            )
        filled = [
            tf.zeros(v.shape, v.dtype) if g is None else g for g, v in zip(gradients, self.variables, strict=True)
        ]
        names = ["loss", *(name for name in tallies if name != "loss")]
        flat_tallies = metrics.flatten([tallies[name] for name in names])
        trace = Trace(names, outputs, reached, written, metric_rows.join)
        return self.packing.pack(filled), flat_tallies, metric_rows.tensors, new_values, trace

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
        _, gradients, _, tallies, _ = self._differentiate(rows, None, factor, training=training, has_metrics=False)
        by_path = {
            self._state.paths[id(v)]: None
            if g is None
            else tf.convert_to_tensor(g) / (1.0 if factor is None else factor)
            for v, g in zip(self.variables, gradients, strict=True)
        }
        return by_path, tallies

    def _differentiate(
        self,
        rows: Any,
        row_weights: tf.Tensor | None,
        factor: tf.Tensor | None,
        *,
        training: bool = True,
        has_metrics: bool = True,
    ) -> tuple[set[str], list[tf.Tensor | None], list[tf.Tensor], dict[str, metrics.Tally], Rows]:
        """Returns the names that `loss_fn` returned, gradients, new values, and the results of `tally_outputs`."""
        state = self._state
        tensors = [tensorflow_variable(v) for v in (*self.variables, *self.overwritten)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for tensor in tensors:
                tape.watch(tensor)
            with gathering.shard(row_weights, self._microbatches):
                outputs = self.update.loss_fn(rows, training)
            if not has_metrics and isinstance(outputs, Mapping):
                outputs = {name: value for name, value in outputs.items() if name not in state.keras_metrics}
            tallies, metric_rows = tally_outputs(outputs, rows, row_weights, state.keras_metrics)
            loss = tallies["loss"]
            objective = loss.total
            regularization, of_outputs = _sum_regularization(state.layers_of_update[self.update.name], state.placement)
            shards_of_batch = state.strategy.num_replicas_in_sync * self._microbatches
            if of_outputs and isinstance(outputs["loss"], metrics.Weighted) and shards_of_batch > 1:
                raise ValueError(_UNSHARED_REGULARIZATION.format(", ".join(map(repr, of_outputs)), shards_of_batch))
            if regularization is not None:
                # Weighted like a value of every example, so that the one division makes it count once.
                weight = tf.maximum(loss.weight, _LEAST_WEIGHT)
                tallies[REGULARIZATION] = metrics.Tally(regularization * weight, weight)
                objective += tallies[REGULARIZATION].total
            if factor is not None:
                objective *= factor
        # Last, since tracing the loss again replaces the losses that Keras layers carry.
        broadcasts.refuse_pairs(outputs, self.update.loss_fn, rows, training)
        gradients = state.placement.differentiate(tape, objective, tensors)
        new_values = [
            tf.convert_to_tensor(variable if gradient is None else gradient)
            for variable, gradient in zip(self.overwritten, gradients[len(self.variables) :], strict=True)
        ]
        return set(outputs), gradients[: len(self.variables)], new_values, tallies, metric_rows

    def _set_trace(self, traces: Sequence[Trace]) -> None:
        """Sets `trace` from the traces of all microbatches; nothing else sets it."""
        for trace in traces:
            if self._trace is not None and trace.names != self._trace.names:
                raise ValueError(
                    f"loss_fn returned {trace.names}, and {self._trace.names} before; it returns the same names for "
                    "all data."
                )
            self._trace = trace
        are_written = {id(v) for trace in traces for v in trace.written}
        are_written |= {id(v) for v in self._state.keras_metrics.variables_of(self.trace.outputs)}
        self._trace = replace(self.trace, written=[v for v in self._writable if id(v) in are_written])


def tally_outputs(
    outputs: Any, rows: Any, row_weights: tf.Tensor | None, keras_metrics: KerasMetrics
) -> tuple[dict[str, metrics.Tally], Rows]:
    """Returns the weighted sums of what `loss_fn` returned, by name, and the arguments of Keras metrics.

    Args:
        outputs: of `loss_fn`.
        rows: its batch.
        row_weights: `[b]`, 0 for padding; None: all rows count.
        keras_metrics: those that `loss_fn` may return arguments for.

    Returns:
        Name -> sums, and the rows for Keras metrics, with padding.

    Raises:
        ValueError: if `loss_fn` returned a value that is not per example.
    """
    metrics.check_names(outputs, keras_metrics)
    size = shards.batch_size(rows)
    tallies, fed = {}, {}
    for name, value in outputs.items():
        if name in keras_metrics:
            fed[name] = check_arguments(name, value)
        else:
            tallies[name] = metrics.weigh(name, value, size, row_weights)
    if checks := [check for tally in tallies.values() for check in tally.checks]:
        # The step fails anyway; a loss that is not finite keeps it from applying anything before it does.
        failed = tf.where(tf.reduce_all(tf.stack(checks)), 0.0, np.nan)
        tallies["loss"] = tallies["loss"]._replace(total=tallies["loss"].total + failed)
    return tallies, take_rows(fed)


@contextlib.contextmanager
def _explain_merge_call_error(microbatches: int, jit_compile: bool) -> Iterator[None]:
    """Explains TensorFlow's error about a forward pass that talks to other replicas inside a loop or under XLA."""
    try:
        yield
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        setting, allowed = (
            ("jit_compile=True", "jit_compile=False") if jit_compile else (f"{microbatches=}", "microbatches=1")
        )
        raise ValueError(
            f"{setting} was given with a model that talks to other replicas in its forward pass, such as "
            "BatchNormalization(synchronized=True), which TensorFlow cannot do inside a loop or what XLA compiles: use "
            f"{allowed}."
        ) from error


def _sum_regularization(layers: Sequence[Any], placement: Placement) -> tuple[tf.Tensor | None, list[str]]:
    """Returns the sum of the losses that Keras layers carry, such as L2 terms, each once; None if there are none.

    Also returns the names of the layers whose losses are of what they computed, rather than of their weights.
    """
    losses: list[Any] = []
    of_outputs: list[str] = []
    counted: set[int] = set()  # layers and variables: one model may be a part of another
    for layer in layers:
        with placement.layer_scope(layer):
            parts = [part for part in layer._flatten_layers() if id(part) not in counted]
            weights = [v for v in layer.trainable_weights if id(v) not in counted]
            for part in parts:
                added = part._get_own_losses()  # private: `losses` of a layer are also those of its parts
                losses += added
                of_outputs += [part.name] if added else []
            losses += [v.regularizer(v) for v in weights if v.regularizer is not None]
            counted |= {id(counted_once) for counted_once in (*parts, *weights)}
    return (tf.add_n([tf.cast(loss, tf.float32) for loss in losses]) if losses else None), of_outputs


def _time_after(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the time at which all of some tensors are computed, in seconds."""
    with tf.control_dependencies(tensors):
        return tf.timestamp()
