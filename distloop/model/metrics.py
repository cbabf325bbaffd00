"""Metrics as weighted sums of values per example, added up and divided once, in float32.

    metric = sum(w * v) / sum(w)

over all replicas, workers, microbatches and steps that took part. A `Tally` holds both sides of the division until
then. A `LossWatch` detects a loss that is far above its moving mean:

    watch = LossWatch(2)                                          # two losses
    has_jumped = watch.check(losses, has_weight, jump=10.0)       # in a `tf.function`, once a step
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from distloop.errors import require
from distloop.model.user_functions import as_tensor
from distloop.workdir.records import ABOUT_THE_RUN, IN_EACH_ROW

# Names of distloop's own metrics; the user's values need other names.
RESERVED_NAMES = ABOUT_THE_RUN | IN_EACH_ROW | {"regularization", "skipped_steps"}
IS_OF_LAYER = "is_of_layer"  # attribute of a Keras metric that a layer may update in its call, or not
_WINDOW_STEPS = 100  # of the moving mean and deviation of a loss
_MIN_STEPS = 20  # the statistics of fewer steps are too uncertain to compare with


class Weighted(NamedTuple):
    """Values per example with their own weights; made by `weighted`."""

    values: tf.Tensor | tf.RaggedTensor
    weights: tf.Tensor | tf.RaggedTensor


class Tally(NamedTuple):
    """Both sides of one mean, before the division: float32 scalars."""

    total: tf.Tensor  # []: sum(w * v)
    weight: tf.Tensor  # []: sum(w)
    checks: tuple[tf.Tensor, ...] = ()  # []: conditions on the values' shapes that tracing cannot check
    is_per_token: bool = False  # whether the weight counts tokens


def weighted(values: Any, weights: Any) -> Weighted:
    """Returns a value of `loss_fn` with its own weights, such as token masks or sample weights.

    Args:
        values: one value per example or per part of one, `[B, ...]`.
        weights: `[B]` up to the shape of `values`; they are broadcast over missing trailing axes. Any scale: the mean
            is `sum(weights * values) / sum(weights)`.

    Returns:
        The value, to be returned by `loss_fn` under its name.
    """
    return Weighted(values, weights)


def weigh(name: str, value: Any, batch_size: tf.Tensor | int, row_weights: tf.Tensor | None) -> Tally:
    """Returns the weighted sum of one of `loss_fn`'s values over its examples.

    Args:
        name: the value's name, for messages.
        value: a tensor `[B, ...]` or a `Weighted`.
        batch_size: B; an int if it is known while tracing.
        row_weights: `[B]`, 1 for examples that count and 0 for padding; None: every row counts.

    Returns:
        The sums, float32, whatever the value's dtype.

    Raises:
        ValueError: if the value is not per example, or its weights do not fit it.
    """
    values, weights = value if isinstance(value, Weighted) else (value, None)
    values = _as_numbers(name, values)
    checks = _check_per_example(name, values, batch_size)
    with tf.control_dependencies(checks):  # our error message comes before TensorFlow's about shapes
        values = tf.nest.map_structure(tf.identity, values)
    if isinstance(values, tf.RaggedTensor):
        values, weights, row_weights = _flatten_ragged(name, values, weights, row_weights)
    values = tf.cast(values, tf.float32)  # [B, ...]
    if weights is not None:
        weights = tf.cast(_as_numbers(name, weights), tf.float32)
        checks += _check_weights(name, weights, values)
        weights = _spread(weights, values)
    if row_weights is not None:
        rows = _spread(row_weights, values)
        weights = rows if weights is None else weights * rows
    if weights is None:
        return Tally(tf.reduce_sum(values), tf.cast(tf.size(values), tf.float32), checks)
    weights = tf.broadcast_to(weights, tf.shape(values))
    # A row of weight 0 does not count, even if its value is NaN.
    return Tally(tf.reduce_sum(tf.math.multiply_no_nan(values, weights)), tf.reduce_sum(weights), checks)


def is_per_token(value: Any, rows: Any) -> bool:
    """Returns whether a value of `loss_fn` counts tokens: values `[B, T]`, or `[B]` with weights, of a batch of text.

    A batch of text has weights `[B, T]` or an entry of integers with two axes; the rows of an image are no tokens.
    """
    values, weights = value if isinstance(value, Weighted) else (value, None)
    shape, weights_shape = (tf.TensorShape(getattr(value, "shape", None)) for value in (values, weights))
    is_text = any(e.dtype.is_integer and e.shape.rank == 2 and e.shape[1] != 1 for e in tf.nest.flatten(rows))
    if shape.rank == 1:
        return weights_shape.rank == 1 and is_text
    return shape.rank == 2 and shape[1] != 1 and (weights_shape.rank == 2 or is_text)


def flatten(tallies: Iterable[Tally]) -> tf.Tensor:
    """Returns tallies as one vector, `[2 * M]`: a total, its weight, the next total, ..."""
    return tf.stack([side for tally in tallies for side in (tally.total, tally.weight)])


def elements(vector: tf.Tensor) -> list[tf.Tensor]:
    """Returns the elements of a vector; of one that was stacked in this graph, those that it was stacked from."""
    is_stacked = not tf.executing_eagerly() and vector.op.type == "Pack"  # to cut it would take an operation each
    return list(vector.op.inputs) if is_stacked else tf.unstack(vector)


def means(names: Sequence[str], tallies: np.ndarray) -> dict[str, float]:
    """Returns the mean of each of M tallies, `[2 * M]` as `flatten` returns them, by name; NaN if its weight is 0."""
    totals, weights = np.reshape(np.asarray(tallies, np.float64), [-1, 2]).T
    with np.errstate(divide="ignore", invalid="ignore"):
        return dict(zip(names, (totals / weights).tolist(), strict=True))


def flatten_results(results: Mapping[str, Any]) -> dict[str, float]:
    """Returns results of Keras metrics as floats by name; a dict or a vector becomes `name/key` or `name/0`, ..."""
    numbers: dict[str, float] = {}
    for name, result in results.items():
        if isinstance(result, Mapping):
            numbers |= flatten_results({f"{name}/{key}": value for key, value in result.items()})
        elif np.ndim(result):
            numbers |= {f"{name}/{i}": float(value) for i, value in enumerate(np.ravel(result))}
        else:
            numbers[name] = float(result)
    return numbers


def check_names(outputs: Any, keras_metrics: Mapping[str, Any], *, needs_loss: bool = True) -> None:
    """Checks the result of `loss_fn` before anything is summed.

    Args:
        outputs: the result.
        keras_metrics: by name, the metrics whose arguments it may hold.
        needs_loss: whether it must hold "loss", as it must for training.

    Raises:
        ValueError: if it is no dict, lacks "loss", or feeds a Keras metric that was not declared.
    """
    if not isinstance(outputs, Mapping):
        raise ValueError(
            f"loss_fn returned a {type(outputs).__name__}; distloop needs a dict of values per example: "
            'return {"loss": values}.'
        )
    if needs_loss and "loss" not in outputs:
        raise ValueError(
            f'loss_fn returned {sorted(map(str, outputs))} without "loss"; distloop minimizes the value of that name: '
            'return {"loss": values, ...}.'
        )
    for name, value in outputs.items():
        check_name(name, "loss_fn returned a value")
        if value is None or isinstance(value, str):
            raise ValueError(
                f'loss_fn returned {value!r} under "{name}"; distloop needs values per example, [B]: leave it out.'
            )
        if isinstance(value, (tuple, list)) and not isinstance(value, Weighted) and name not in keras_metrics:
            raise ValueError(
                f'loss_fn returned a tuple under "{name}", but ModelSpec(metrics=...) holds {sorted(keras_metrics)}; '
                "declare a Keras metric of that name there, or return values per example."
            )


def check_name(name: Any, subject: str) -> None:
    """Checks the name of a number of the user's; `subject` begins the message, as in "loss_fn returned a value".

    Raises:
        ValueError: if it is no name, or one of distloop's own.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"{subject} under the name {name!r}; names are non-empty strings: rename it.")
    if name in RESERVED_NAMES:
        raise ValueError(f"{subject} under the name {name!r}, which distloop itself reports: rename it.")


def require_same_names(subject: str, names: Sequence[str], before: Sequence[str]) -> None:
    """Checks the names of values against those of earlier data; `subject` begins the message, as in "loss_fn returned".

    Raises:
        ValueError: if they differ.
    """
    if names != before:
        raise ValueError(f"{subject} {names}, and {before} before: give the same names for all data.")


def check_fed(keras_metrics: Mapping[str, Any], fed: Iterable[str]) -> None:
    """Checks that `loss_fn` returned arguments for every Keras metric, but for those that layers may leave alone.

    Raises:
        ValueError: if it did not.
    """
    needed = [name for name, metric in keras_metrics.items() if not getattr(metric, IS_OF_LAYER, False)]
    if unfed := sorted(set(needed) - set(fed)):
        raise ValueError(
            f"ModelSpec(metrics=...) holds {unfed}, for which no loss_fn returned anything; distloop needs the tuple "
            "of arguments for update_state under each name: return it, or leave the metric out."
        )


class LossWatch(tf.Module):
    """Moving mean and deviation of each loss.

    Attributes:
        statistics: `[U, 3]`, float64: number of steps, mean and variance of each loss.
    """

    def __init__(self, num_losses: int):
        """Creates the statistics of U losses, of no steps yet."""
        super().__init__(name="loss_watch")
        self.statistics = tf.Variable(tf.zeros([num_losses, 3], tf.float64), trainable=False, name="statistics")

    def check(self, losses: tf.Tensor, has_weight: tf.Tensor, jump: float) -> tf.Tensor:
        """Compares the losses of a step with their statistics, and updates the statistics of the losses that fit.

        A loss has jumped if `loss - mean > jump * (deviation + |mean|)`. The deviation separates spikes from noise; the
        mean's size keeps a loss that hardly varies from jumping by a small number. Mean and variance follow the
        incremental formulas of Finch, "Incremental calculation of weighted mean and variance" (2009), with weight
        1 / 100, and 1 / n in the first hundred steps.

        Args:
            losses: `[U]`, of one step; a loss that is not finite neither jumps nor changes its statistics.
            has_weight: `[U]`, bool: whether any example had a weight; a loss without examples is ignored.
            jump: the factor in the formula.

        Returns:
            A scalar bool: whether any loss has jumped.
        """
        losses = tf.cast(losses, tf.float64)
        count, mean, variance = tf.unstack(self.statistics.read_value(), axis=1)
        counts = has_weight & tf.math.is_finite(losses)
        difference = tf.where(counts, losses - mean, 0.0)
        has_jumped = (count >= _MIN_STEPS) & (difference > jump * (tf.sqrt(variance) + tf.abs(mean)))
        weight = 1.0 / tf.minimum(count + 1, _WINDOW_STEPS)
        moved = [count + 1, mean + weight * difference, (1 - weight) * (variance + weight * difference**2)]
        learns = (counts & ~has_jumped)[:, None]
        self.statistics.assign(tf.where(learns, tf.stack(moved, 1), self.statistics))
        return tf.reduce_any(has_jumped)


def _as_numbers(name: str, value: Any) -> tf.Tensor | tf.RaggedTensor:
    """Returns values or weights as a tensor; refuses what cannot be summed."""
    is_ragged = isinstance(value, tf.RaggedTensor)
    numbers = value if is_ragged else as_tensor(value, "loss_fn returned", f' under "{name}"')
    if not (numbers.dtype.is_floating or numbers.dtype.is_integer or numbers.dtype.is_bool):
        raise ValueError(
            f'loss_fn returned "{name}" of dtype {numbers.dtype.name}; distloop sums real numbers: give those, such as '
            "tf.abs(values) of complex ones."
        )
    return numbers


def _check_per_example(name: str, values: Any, batch_size: tf.Tensor | int) -> tuple[tf.Tensor, ...]:
    """Refuses values without a leading axis of size B; returns a check for the running step if B is not static."""
    static = batch_size if isinstance(batch_size, int) else None
    rows = values.shape[0] if values.shape.rank else None
    # If B is not static, an axis of static size cannot be B.
    if values.shape.rank == 0 or (rows is not None and rows != static):
        of_batch = "B" if static is None else static
        advice = "keep the batch as the first axis"
        if values.shape.rank == 0 or rows == 1:
            advice = "drop the reduce_mean, the division is done here"
        elif static is None:
            advice += f"; if the model fixes it at {rows}, batch the dataset with drop_remainder=True"
        raise ValueError(
            f'loss_fn returned "{name}" of shape {list(values.shape)}; distloop needs one value per example, '
            f"[{of_batch}] or [{of_batch}, ...]: {advice}."
        )
    if rows is not None:
        return ()
    wrong = (
        f'The value "{name}" has another number of rows than its batch; distloop needs one value per example, '
        "[B] or [B, ...]: keep the batch as the first axis."
    )
    num_rows = values.nrows(tf.int32) if isinstance(values, tf.RaggedTensor) else tf.shape(values)[0]
    return (require(tf.equal(num_rows, batch_size), wrong),)


def _check_weights(name: str, weights: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Refuses weights that do not match the leading axes of the values; returns a check for dynamic sizes."""
    rank = weights.shape.rank
    wrong = (
        f'The value "{name}" of shape {list(values.shape)} with weights of shape {list(weights.shape)} was returned; '
        "distloop needs one weight per example, [B], or per value: give weights that match the leading axes."
    )
    if rank == 0 or rank > values.shape.rank:
        raise ValueError(wrong)
    pairs = list(zip(weights.shape, values.shape[:rank], strict=True))
    if any(None not in (w, v) and w != v and (w != 1 or axis == 0) for axis, (w, v) in enumerate(pairs)):
        raise ValueError(wrong)
    if all(None not in pair for pair in pairs):
        return ()
    sizes, expected = tf.shape(weights), tf.shape(values)[:rank]
    fits = tf.reduce_all(tf.equal(sizes, expected) | (tf.equal(sizes, 1) & (tf.range(rank) > 0)))
    return (require(fits, wrong),)


def _spread(weights: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns weights with as many axes as the values: [B] -> [B, 1, ...]."""
    if weights.shape.rank is None or values.shape.rank is None or weights.shape.rank == values.shape.rank:
        return weights
    missing = values.shape.rank - weights.shape.rank
    return tf.reshape(weights, tf.concat([tf.shape(weights), [1] * missing], 0))


def _flatten_ragged(
    name: str, values: tf.RaggedTensor, weights: Any, row_weights: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor | None]:
    """Returns ragged values [B, (T)] as flat ones [sum(T)], with weights and row weights of the same length."""
    if values.ragged_rank != 1:
        raise ValueError(
            f'loss_fn returned "{name}" with {values.ragged_rank} ragged axes; distloop sums over one: '
            "reduce the inner ones with weights, or return values.merge_dims(1, -1)."
        )
    rows = values.value_rowids()
    if isinstance(weights, tf.RaggedTensor):
        weights = weights.flat_values
    elif weights is not None:
        weights = tf.gather(tf.convert_to_tensor(weights), rows)
    return values.flat_values, weights, None if row_weights is None else tf.gather(row_weights, rows)
