"""Differentiation: the gradients of one loss over some rows of a batch, by a tape around `loss_fn`.

    differentiate = Differentiation(state, update, variables, replaced, microbatches=1)
    derivatives = differentiate(rows, None, Objective(factor=None))
    derivatives.gradients                                      # one for each variable, or None

The only module with a tape, but for recomputed layers.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from distloop.data import shards
from distloop.distributed import gathering
from distloop.model import broadcasts, metrics
from distloop.model.keras_metrics import Join, KerasMetrics, MetricRows, check_arguments, take_rows
from distloop.model.placement import Placement
from distloop.model.spec import Update
from distloop.model.state import TrainState
from distloop.model.user_functions import Reads
from distloop.variables import is_left_out, tensorflow_variable

REGULARIZATION = "regularization"  # the name of the tally of the losses that layers carry
# Of the regularization on a shard whose loss has none: it counts where the whole batch has none, and elsewhere is less
# than rounding.
_LEAST_WEIGHT = 1e-12
# The mean over a shard's rows, as Keras takes it, would count by the shard's sum of weights instead of its rows.
_UNSHARED = (
    "The layers {} have an activity regularizer or an add_loss, the loss is ragged or has weights or masks of its own, "
    "and each batch is cut in {} shards, so the term would depend on how it is cut: return the term from loss_fn, one "
    "value per example, or train on one replica without microbatches and virtual replicas."
)


@dataclass(frozen=True)
class Trace:
    """What tracing reveals about a pass: Python values, the same on every replica.

    Attributes:
        names: of the tallies, "loss" first, without the update's own name.
        outputs: the names that `loss_fn` returned, those of Keras metrics included.
        reached: by variable, whether the loss depends on it, or a `step_fn` made a gradient for it.
        mutated: the variables that the forward pass writes.
        has_tokens: whether the weight of the loss counts tokens.
        join: puts together the arguments of the Keras metrics.
    """

    names: list[str]
    outputs: set[str]
    reached: list[bool]
    mutated: list[Any]
    has_tokens: bool
    join: Join

    def divisor(self, value: str) -> int:
        """Returns the position of the weight that divides a value's gradients, among the flat tallies `[2 * M]`."""
        return 2 * self.names.index(divisor_of(value, self.names)) + 1


class Objective(NamedTuple):
    """What a pass over a batch differentiates."""

    factor: tf.Tensor | None  # of the value; None: 1
    value: str = "loss"  # its name
    is_first: bool = True  # whether it is the first pass over the batch, in which arguments of Keras metrics count


class Derivatives(NamedTuple):
    """What comes of some rows."""

    outputs: set[str]  # the names that `loss_fn` returned
    gradients: list[Any]  # of `factor * sum(w * value)`, one for each variable; None: the value does not depend on it
    replacements: list[tf.Tensor]  # the new values of the replaced variables
    tallies: dict[str, metrics.Tally]  # as of `tally_outputs`, and of the losses that layers carry
    metric_rows: MetricRows  # as of `tally_outputs`


class Differentiation:
    """Differentiates the values of an update's `loss_fn`.

    Attributes:
        reads: the entries of a batch that `loss_fn` reads.
    """

    def __init__(
        self, state: TrainState, update: Update, variables: Sequence[Any], replaced: Sequence[Any], microbatches: int
    ):
        """Prepares.

        Args:
            state: what is trained.
            update: one of its updates.
            variables: to differentiate by.
            replaced: variables whose "gradient" is their new value.
            microbatches: into how many each replica's shard is cut.
        """
        self._state = state
        self._update = update
        self._variables = list(variables)
        self._replaced = list(replaced)
        self._microbatches = microbatches
        self.reads = Reads()

    def __call__(
        self, rows: Any, row_weights: tf.Tensor | None, objective: Objective, *, training: bool = True
    ) -> Derivatives:
        """Calls `loss_fn` and differentiates one of its values; in replica context.

        Args:
            rows: `[b, ...]`.
            row_weights: `[b]`, 0 for padding; None: all rows count.
            objective: which value to differentiate.
            training: the argument for `loss_fn`.

        Raises:
            ValueError: if there is no such value, or one is not per example.
        """
        state, value = self._state, objective.value
        tensors = [tensorflow_variable(v) for v in (*self._variables, *self._replaced)]
        exchange = gathering.current_exchange()
        gathered = [rows for rows in (exchange.rows if exchange and exchange.rows else ()) if rows.dtype.is_floating]
        layers = state.layers_of_update[self._update.name]
        for layer in layers:
            layer._clear_losses()  # private: a layer that this loss does not call would keep those of another one
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*tensors, *gathered])
            with gathering.shard(row_weights, self._microbatches), self.reads.recorded(rows) as returned:
                outputs = self._update.loss_fn(rows, training)
                returned.append(outputs)
            if not objective.is_first and isinstance(outputs, Mapping):
                outputs = {name: value for name, value in outputs.items() if name not in state.keras_metrics}
            tallies, metric_rows = tally_outputs(outputs, rows, row_weights, state.keras_metrics)
            is_weighted = isinstance(outputs["loss"], (metrics.Weighted, tf.RaggedTensor))
            shards = state.replicas.count * self._microbatches if is_weighted else 1
            tallies |= _tally_regularization(layers, state.placement, tallies["loss"], shards)
            if value not in tallies:
                raise ValueError(
                    f'step_fn asked for the gradients of "{value}", but loss_fn returns the values {sorted(tallies)}: '
                    "name one of them."
                )
            total = tallies[value].total
            if divisor_of(value, tallies) != value:
                total += tallies[REGULARIZATION].total
            if objective.factor is not None:
                total *= objective.factor
        # Last, since tracing the loss again replaces the losses that Keras layers carry.
        broadcasts.refuse_pairs(outputs, self._update.loss_fn, rows, training)
        with state.frozen:  # layers may be called again
            gradients = state.placement.differentiate(tape, total, [*tensors, *gathered])
        if exchange is not None:
            exchange.set_slopes(gathered, gradients[len(tensors) :])
        trained, replaced = gradients[: len(self._variables)], gradients[len(self._variables) : len(tensors)]
        replacements = [
            tf.convert_to_tensor(variable if gradient is None else gradient)
            for variable, gradient in zip(self._replaced, replaced, strict=True)
        ]
        return Derivatives(set(outputs), trained, replacements, tallies, metric_rows)

    def by_path(
        self, rows: Any, factor: tf.Tensor | None, *, training: bool
    ) -> tuple[dict[str, tf.Tensor | None], dict[str, metrics.Tally]]:
        """Computes the gradients over all of some rows, `[b, ...]`, to check the user's code; the factor cancels out.

        Returns:
            By path, the gradient of `sum(w * loss)`, or None if the loss does not depend on the variable; and the tally
            of each value except Keras metrics.
        """
        derivatives = self(rows, None, Objective(factor, is_first=False), training=training)
        divisor = 1.0 if factor is None else factor
        pairs = zip(self._variables, derivatives.gradients, strict=True)
        by_path = {self._state.paths[id(v)]: None if g is None else tf.convert_to_tensor(g) / divisor for v, g in pairs}
        return by_path, derivatives.tallies

    def pull_back(self, rows: Any, row_weights: tf.Tensor | None, slopes: Sequence[tf.Tensor]) -> list[Any]:
        """Differentiates by way of the rows that this virtual replica gave to all; in replica context.

        Args:
            rows: `[b, ...]`.
            row_weights: `[b]`, 0 for padding; None: all rows count.
            slopes: the derivative of the whole objective by the rows of all, of each floating `Exchange.rows`.

        Returns:
            For each variable the gradient of the objective, or None.
        """
        tensors = [tensorflow_variable(v) for v in self._variables]
        exchange = gathering.current_exchange()
        assert exchange is not None, "only virtual replicas exchange rows"
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(tensors)
            with gathering.shard(row_weights, self._microbatches):
                self._update.loss_fn(rows, True)
            given = [own for own in exchange.given if own.dtype.is_floating]
            pairs = zip(given, slopes, strict=True)
            terms = [tf.reduce_sum(tf.cast(rows, tf.float32) * exchange.own(slope, rows)) for rows, slope in pairs]
            objective = tf.add_n(terms)
        with self._state.frozen:
            return self._state.placement.differentiate(tape, objective, tensors)


def tally_outputs(
    outputs: Any, rows: Any, row_weights: tf.Tensor | None, keras_metrics: KerasMetrics, *, needs_loss: bool = True
) -> tuple[dict[str, metrics.Tally], MetricRows]:
    """Returns the weighted sums of what `loss_fn` returned, by name, and the arguments of Keras metrics.

    Args:
        outputs: of `loss_fn`.
        rows: its batch.
        row_weights: `[b]`, 0 for padding; None: all rows count.
        keras_metrics: those that `loss_fn` may return arguments for.
        needs_loss: whether `loss_fn` must return "loss".

    Returns:
        Name -> sums, and the rows for Keras metrics, with padding.

    Raises:
        ValueError: if `loss_fn` returned a value that is not per example.
    """
    metrics.check_names(outputs, keras_metrics, needs_loss=needs_loss)
    size = shards.batch_size(rows)
    tallies, fed = {}, {}
    for name, value in outputs.items():
        if name in keras_metrics:
            fed[name] = check_arguments(name, value)
        else:
            tally = metrics.weigh(name, value, size, row_weights)
            tallies[name] = tally._replace(is_per_token=metrics.is_per_token(value, rows))
    if checks := [check for tally in tallies.values() for check in tally.checks]:
        # The step fails anyway; a loss that is not finite keeps it from applying anything before it does. A constant
        # NaN would stop a run under `tf.debugging.enable_check_numerics`.
        is_right = tf.cast(tf.reduce_all(tf.stack(checks)), tf.float32)
        failed = is_right / is_right - 1.0  # 0 / 0 is NaN
        name = "loss" if needs_loss else next(iter(tallies))
        tallies[name] = tallies[name]._replace(total=tallies[name].total + failed)
    return tallies, take_rows(fed)


def divisor_of(value: str, names: Collection[str]) -> str:
    """Returns the name of the value whose weight divides the gradients of a value; those of "loss" are regularized."""
    return REGULARIZATION if value == "loss" and REGULARIZATION in names else value


def _tally_regularization(
    layers: Sequence[Any], placement: Placement, loss: metrics.Tally, shards: int
) -> dict[str, metrics.Tally]:
    """Returns the sum of the losses that layers carry, weighted so that the one division makes it count once.

    Args:
        layers: those that the update trains, with all that are in them.
        placement: of the model.
        loss: the tally of the shard's loss.
        shards: into how many the batch is cut that may have other weights than rows, microbatches included.

    Returns:
        Its total and weight under its name; {} if the layers carry no loss.

    Raises:
        ValueError: if a loss of what a layer computed would count differently for another number of shards.
    """
    total, of_outputs = _sum_losses(layers, placement)
    if of_outputs and shards > 1:
        raise ValueError(_UNSHARED.format(", ".join(map(repr, of_outputs)), shards))
    if total is None:
        return {}
    weight = tf.maximum(loss.weight, _LEAST_WEIGHT)  # weighted like a value of every example
    return {REGULARIZATION: metrics.Tally(total * weight, weight)}


def _sum_losses(layers: Sequence[Any], placement: Placement) -> tuple[tf.Tensor | None, list[str]]:
    """Returns the sum of the losses that Keras layers carry, such as L2 terms, each once; None if there are none.

    Also returns the names of the layers whose losses are of what they computed, rather than of their weights.
    """
    losses: list[Any] = []
    of_outputs: list[str] = []
    counted: set[int] = set()  # layers and variables: one model may be within another
    for layer in layers:
        with placement.layer_scope(layer):
            nested = [each for each in layer._flatten_layers() if id(each) not in counted]
            weights = [v for v in layer.trainable_weights if id(v) not in counted and not is_left_out(v)]
            for each in nested:
                added = each._get_own_losses()  # private: `losses` of a layer are also those of its sublayers
                losses += added
                of_outputs += [each.name] if added else []
            losses += [v.regularizer(v) for v in weights if v.regularizer is not None]
            counted |= {id(counted_once) for counted_once in (*nested, *weights)}
    return (tf.add_n([tf.cast(loss, tf.float32) for loss in losses]) if losses else None), of_outputs
