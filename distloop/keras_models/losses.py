"""Keras losses as values per example, before any reduction, and the mask that Keras adds.

loss = resolve_loss("crossentropy", target, output)            # a keras.losses.Loss
values, mask = loss_values(loss, target, output)               # [B, ...], float32; [B, ...], bool, or None
weigh(values, mask, sample_weight)                             # for loss_fn: values with weights
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses.loss import squeeze_or_expand_to_same_rank

from distloop.distributed.gathering import gather_rows
from distloop.model import broadcasts
from distloop.model.metrics import Weighted, weighted
from distloop.optimizers.keras_hooks import mask_of


class _Unreduced(keras.losses.Loss):
    """`Loss.__call__` as in Keras 3.15, less the reduction; it keeps the mask.

    It comes right before `Loss` among the ancestors of a loss, so a `__call__` of the user's reaches it by `super`.

    Attributes:
        mask: of the values: that of the outputs and that of the values. None: there is neither.
    """

    mask: tf.Tensor | None = None

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Returns values per example; a `sample_weight` that the loss gives itself is a factor, as in Keras."""
        y_true, y_pred_cast = keras.tree.map_structure(lambda tensor: tf.cast(tensor, self.dtype), (y_true, y_pred))
        values = self.call(y_true, y_pred_cast)
        masks = [tf.cast(m, tf.bool) for m in (mask_of(y_pred), mask_of(values)) if m is not None]
        self.mask = functools.reduce(tf.logical_and, masks) if masks else None
        if sample_weight is None:
            return values
        values, sample_weight = squeeze_or_expand_to_same_rank(values, tf.cast(sample_weight, values.dtype))
        return values * sample_weight


class _FunctionLoss(keras.losses.Loss):
    """A function of `(y_true, y_pred)` as a loss."""

    def __init__(self, fn: Callable[[Any, Any], Any], name: str):
        super().__init__(name=name)
        self.fn = fn

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns what the function returns."""
        return self.fn(*squeeze_or_expand_to_same_rank(y_true, y_pred))


def resolve_loss(identifier: Any, target: tf.Tensor, output: tf.Tensor) -> keras.losses.Loss:
    """Returns the loss that Keras would use; "crossentropy" depends on the shapes of target and output.

    Raises:
        ValueError: if the loss sums over the batch.
    """
    if isinstance(identifier, str) and identifier.lower() in ("crossentropy", "ce"):
        identifier = by_shapes("crossentropy", target, output)
    loss = keras.losses.get(identifier)
    if not isinstance(loss, keras.losses.Loss):
        loss = _FunctionLoss(loss, getattr(loss, "__name__", type(loss).__name__))
    if all(getattr(type(loss), method) is getattr(keras.losses.Loss, method) for method in ("call", "__call__")):
        raise ValueError(f"The loss {loss.name!r} has no call(y_true, y_pred): define it in {type(loss).__name__}.")
    if getattr(loss, "reduction", None) == "sum":
        raise ValueError(
            f"The loss {loss.name!r} has reduction='sum', which makes the step's size depend on the batch's; "
            "distloop divides by the number of examples: leave reduction out."
        )
    return loss


def loss_values(loss: keras.losses.Loss, target: tf.Tensor, output: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns a loss per example, `[B, ...]`, float32, and which values count, `[B, ...]`, bool; None: all do.

    Raises:
        ValueError: if the loss returns no value per example.
    """
    kind = type(loss)
    unreduced: Any = object.__new__(type(kind.__name__, (kind, _Unreduced), {}))  # Keras's losses cannot be copied
    unreduced.__dict__.update(vars(loss), reduction=None)
    if getattr(loss, "fn", None) is not keras.losses.circle:
        values, mask = unreduced(target, output), unreduced.mask
        _refuse_pairs(loss, unreduced, target, output, values)
        return per_example(f"loss {loss.name!r}", values, output.shape[0]), mask
    # A circle loss compares the rows of a batch with each other, also with those of other replicas.
    (targets, positions), (outputs, _) = gather_rows(target), gather_rows(output)
    values = tf.cast(unreduced(targets, outputs), tf.float32)
    return tf.gather(values, positions), None if unreduced.mask is None else tf.gather(unreduced.mask, positions)


def _refuse_pairs(loss: keras.losses.Loss, unreduced: Any, target: tf.Tensor, output: tf.Tensor, values: Any) -> None:
    """Raises ValueError if a loss makes values `[B, B]`, as CategoricalGeneralizedCrossEntropy of targets `[B, 1]`.

    Of targets `[B, T, 1]` it makes `[B, T, T]`, where B is 1 or T, and an error for other batches. Keras's losses
    reduce the last axis, so that values of the output's rank show it.
    """
    shape = getattr(values, "shape", tf.TensorShape([]))
    is_of_keras = type(loss).__module__.startswith("keras.")
    may_be_pairs = len(shape) > 1 and (shape[0] == shape[1] or (is_of_keras and len(shape) == len(output.shape)))
    if tf.executing_eagerly() or not may_be_pairs:
        return
    apart = broadcasts.traced_apart(lambda rows, _: unreduced(*rows), (target, output), True)
    are_pairs = is_of_keras if apart is None else apart.shape[:2] == [broadcasts.NUM_ROWS] * 2
    if are_pairs:
        raise ValueError(
            f"The loss {loss.name!r} makes a number for each pair of rows, [B, B], of targets {target.shape} and "
            f"outputs {output.shape}; distloop needs one value per example, [B]: give targets without their last axis."
        )


def per_example(owner: str, values: Any, rows: int | None) -> tf.Tensor:
    """Returns what a loss or metric, the owner, has computed, `[rows, ...]`, in float32.

    Raises:
        ValueError: if there is not one value per example.
    """
    if values is None:
        raise ValueError(f"The {owner} returns None; distloop needs one value per example, [B] or [B, ...]: return it.")
    values = tf.cast(values, tf.float32)
    if not values.shape.rank or values.shape[0] not in (None, rows):
        size = "B" if rows is None else rows
        raise ValueError(
            f"The {owner} has values of shape {values.shape}; distloop needs one value per example, [{size}] or "
            f"[{size}, ...], and divides by their number itself: reduce over axes within examples only, as "
            "axis=(1, 2, 3) does in Dice and Tversky."
        )
    return values


def weigh(owner: str, values: tf.Tensor, mask: Any, sample_weight: Any) -> tf.Tensor | Weighted:
    """Returns values with a mask and sample weights as their weights, for `loss_fn`.

    Args:
        owner: for messages, such as "loss 'mse'".
        values: `[B, ...]`.
        mask: `[B]` up to the shape of the values, or None.
        sample_weight: the same; a last axis of size 1 too many is left out, as in Keras.

    Raises:
        ValueError: if one does not fit the values.
    """
    weights = [
        _fit(owner, role, factor, values)
        for role, factor in (("mask of the output has", mask), ("sample weights have", sample_weight))
        if factor is not None
    ]
    if not weights:
        return values
    if len(weights) == 1:
        return weighted(values, weights[0])
    rank = max(factor.shape.rank for factor in weights)
    shapes = [tf.concat([tf.shape(factor), [1] * (rank - factor.shape.rank)], 0) for factor in weights]
    first, second = map(tf.reshape, weights, shapes)
    return weighted(values, first * second)


def _fit(owner: str, role: str, weights: Any, values: tf.Tensor) -> tf.Tensor:
    """Returns weights, float32, with no more axes than the values."""
    weights = tf.cast(weights, tf.float32)
    rank = values.shape.rank
    if weights.shape.rank == rank + 1 and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, -1)
    pairs = enumerate(zip(weights.shape, values.shape, strict=False))
    if not 0 < weights.shape.rank <= rank or any(
        w != v and None not in (w, v) and (w != 1 or axis == 0) for axis, (w, v) in pairs
    ):
        raise ValueError(
            f"The {role} the shape {list(weights.shape)} and the values of the {owner} {list(values.shape)}; "
            "there is one weight per example, or per value: give them a shape that matches the leading axes."
        )
    return weights


def by_shapes(measure: str, target: tf.Tensor, output: tf.Tensor) -> Callable[[Any, Any], Any]:
    """Returns the function that Keras chooses for "accuracy" or "crossentropy"."""
    is_sparse = target.shape.rank < output.shape.rank or target.shape[-1] == 1
    kind = "binary" if output.shape[-1] == 1 else "sparse_categorical" if is_sparse else "categorical"
    return getattr(keras.metrics, f"{kind}_{measure}")
