"""Owns the way from sums of gradients to an update: pack, reduce once, clip, apply.

Everything here runs in a replica's context. It does not know where gradients come from.

    segments = packing.pack(gradients)                               # few vectors instead of many small tensors
    segments, sums = packing.all_reduce(segments, sums)              # the one reduction of the step
    _, norm, scale = norm_and_scale(segments, weight, clip_norm)     # norm is finite only if every gradient is
    apply(optimizer, packing.unpack(scaled(segments, scale)), variables)
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Larger tensors travel alone: copying them into one vector costs more than launching one more reduction.
LARGEST_PACKED_BYTES = 256 * 1024


class Packing:
    """The layout of some variables' gradients in few tensors: one vector a dtype for small ones, each big one alone."""

    def __init__(self, variables: Sequence[Any], devices: Sequence[str] | None = None):
        """Plans the layout.

        Args:
            variables: with static shapes.
            devices: where each one's gradient is to stay, and be worked on; None: wherever they are.
        """
        self._shapes = [tuple(v.shape) for v in variables]
        self._groups: list[list[int]] = []  # positions of the gradients in each segment
        devices = devices or [""] * len(variables)
        vectors: dict[tuple[tf.DType, str], list[int]] = {}
        for i, variable in enumerate(variables):
            dtype = tf.as_dtype(variable.dtype)
            if self._size(i) * dtype.size > LARGEST_PACKED_BYTES:
                self._groups.append([i])
            else:
                vectors.setdefault((dtype, devices[i]), []).append(i)
        self._groups.extend(vectors.values())
        self._devices = [devices[group[0]] for group in self._groups]
        self.dtypes = [tf.as_dtype(variables[group[0]].dtype) for group in self._groups]

    def _size(self, i: int) -> int:
        return int(tf.TensorShape(self._shapes[i]).num_elements())

    @property
    def shapes(self) -> list[tf.TensorShape]:
        """The shape of each segment."""
        return [tf.TensorShape([sum(self._size(i) for i in group)]) for group in self._groups]

    def pack(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Lays gradients out in segments, flat; sparse ones (of an embedding) become dense."""
        segments = []
        for group, device in zip(self._groups, self._devices, strict=True):
            with tf.device(device):
                # The size is given, as TensorFlow does not always know that of a sparse gradient.
                flat = [tf.reshape(tf.convert_to_tensor(gradients[i]), [self._size(i)]) for i in group]
                segments.append(tf.concat(flat, 0) if len(group) > 1 else flat[0])
        return segments

    def unpack(self, segments: Sequence[tf.Tensor], scale: tf.Tensor | None = None) -> list[tf.Tensor]:
        """Undoes `pack`, and multiplies with a scale as `scaled` does."""
        gradients: list[Any] = [None] * len(self._shapes)
        for group, segment, device in zip(self._groups, segments, self._devices, strict=True):
            with tf.device(device):
                (segment,) = [segment] if scale is None else scaled([segment], scale)
                pieces = tf.split(segment, [self._size(i) for i in group]) if len(group) > 1 else [segment]
                for i, piece in zip(group, pieces, strict=True):
                    gradients[i] = tf.reshape(piece, self._shapes[i])
        return gradients

    def add(self, segments: Sequence[tf.Tensor], others: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Adds up the gradients of two microbatches."""
        sums = []
        for a, b, device in zip(segments, others, self._devices, strict=True):
            with tf.device(device):
                sums.append(a + b)
        return sums

    def diagnosis(self, segments: Sequence[tf.Tensor], squares: Sequence[tf.Tensor]) -> tf.Tensor:
        """Gathers what the host needs to find the variables whose gradients are not finite, without working it out.

        Args:
            segments: what `pack` gave.
            squares: the squared norm of each.

        Returns:
            The vectors of small gradients, and for each big one its square: `[diagnosis_size]`, float32.
        """
        parts = [
            segment if len(group) > 1 else square[tf.newaxis] for group, segment, square in self._zip(segments, squares)
        ]
        return tf.concat([tf.cast(part, tf.float32) for part in parts], 0)

    @property
    def diagnosis_size(self) -> int:
        """The length of `diagnosis`."""
        return sum(sum(self._size(i) for i in group) if len(group) > 1 else 1 for group in self._groups)

    def find_nonfinite(self, diagnosis: np.ndarray) -> list[int]:
        """Finds the positions of the variables whose gradients are not finite."""
        found = []
        for group in self._groups:
            for i in group:
                size = self._size(i) if len(group) > 1 else 1
                part, diagnosis = np.split(diagnosis, [size])
                if not np.isfinite(part).all():
                    found.append(i)
        return sorted(found)

    def _zip(self, *parts: Sequence[tf.Tensor]) -> Any:
        return zip(self._groups, *parts, strict=True)

    def all_reduce(self, segments: Sequence[tf.Tensor], extras: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Adds up gradients and a vector of other sums over all replicas and workers, in one reduction.

        Args:
            segments: what `pack` gave.
            extras: `[E]`, float32.

        Returns:
            Both, summed.
        """
        context = tf.distribute.get_replica_context()
        if context.num_replicas_in_sync == 1:
            return list(segments), extras
        reduced = list(segments)
        for i, segment in enumerate(segments):
            # Riding at the end of a vector that travels anyway, the extras cost nothing.
            if segment.dtype == extras.dtype and segment.shape[0] * segment.dtype.size <= LARGEST_PACKED_BYTES:
                size = segment.shape[0]
                reduced[i] = tf.concat([segment, extras], 0)
                reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, reduced)
                reduced[i], extras = reduced[i][:size], reduced[i][size:]
                return reduced, extras
        *reduced, extras = context.all_reduce(tf.distribute.ReduceOp.SUM, [*reduced, extras])
        return reduced, extras


def norm_and_scale(
    segments: Sequence[tf.Tensor], weight: tf.Tensor, clip_norm: float
) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
    """Finds the global norm of gradients, and the factor that divides and clips them.

    Args:
        segments: gradients summed over everything that took part in the step.
        weight: what to divide them by, a scalar: the sum of the weights, times a loss scale if there is one; where it
            is 0 the gradients count as 0.
        clip_norm: the largest global norm (Pascanu et al. 2013, arXiv:1211.5063); 0: no clipping.

    Returns:
        The squared norm of each segment, the norm of all after the division and before clipping, and the factor:
        float32 scalars. The norm is finite only if every gradient is.
    """
    squares = []
    for segment in segments:
        with tf.device(segment.device):  # a number is cheaper to move than a gradient
            squares.append(2.0 * tf.nn.l2_loss(tf.cast(segment, tf.float32)))
    scale = tf.math.divide_no_nan(1.0, weight)
    norm = tf.sqrt(tf.add_n(squares)) * scale
    if clip_norm:
        scale *= clip_norm / tf.maximum(norm, clip_norm)
    return squares, norm, scale


def scaled(segments: Sequence[tf.Tensor], scale: tf.Tensor) -> list[tf.Tensor]:
    """Multiplies; a factor of 0 gives 0, whatever the gradients are."""
    return [tf.math.multiply_no_nan(segment, tf.cast(scale, segment.dtype)) for segment in segments]


def apply(optimizer: keras.optimizers.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> None:
    """Applies reduced gradients; every replica gives the same ones."""
    with tf.control_dependencies(gradients):
        # A step whose data fails is not counted: the count's write waits for every read, and this read for the
        # gradients. All of `apply` could wait for them, but what does not need them would start later (25 us of 90).
        tf.identity(optimizer.iterations)
    optimizer.apply(gradients, variables)
