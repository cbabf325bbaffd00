"""Clipping of summed gradients by the global norm, by the norm of each variable, or by value.

    segments, scale, is_clipped = Clipping(norm=1.0).clip(packing, segments, norm, scale, tf.math.is_finite(norm))

This is where a gradient is clipped. It does not know how the sums were made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from distloop.optimizers.gradients import Packing, scaled
from distloop.optimizers.rows import Segment, map_values, values_of


@dataclass(frozen=True)
class Clipping:
    """The limit of an update's gradients; one of the three at most is not 0.

    Attributes:
        norm: the largest norm over all variables (Pascanu et al. 2013, arXiv:1211.5063).
        variable_norm: the largest norm of each variable's gradient.
        value: the largest absolute value of each element.
    """

    norm: float = 0.0
    variable_norm: float = 0.0
    value: float = 0.0

    @classmethod
    def from_settings(cls, settings: Any) -> "Clipping":
        """Returns the limit that the settings of a run give."""
        return cls(settings.clip_norm, settings.clip_variable_norm, settings.clip_value)

    def __bool__(self) -> bool:
        """Returns whether there is a limit."""
        return bool(self.norm or self.variable_norm or self.value)

    def clip(
        self, packing: Packing, segments: Sequence[Segment], norm: tf.Tensor, scale: tf.Tensor, finite: tf.Tensor
    ) -> tuple[list[Segment], tf.Tensor, tf.Tensor]:
        """Clips gradients.

        Args:
            packing: their layout.
            segments: the packed gradients, summed.
            norm: of all after the division, a scalar.
            scale: the factor that divides them, a scalar.
            finite: whether they are finite, a scalar; those that are not stay, so that they can be found.

        Returns:
            Segments, the factor that is left to multiply them by, and whether any gradient was clipped.
        """
        if self.norm:
            return list(segments), scale * (self.norm / tf.maximum(norm, self.norm)), norm > self.norm
        if self.value:
            pairs = [self._clip_values(segment, scale, finite) for segment in segments]
            are_clipped = [size > self.value for _, size in pairs]
            return [segment for segment, _ in pairs], tf.ones_like(scale), tf.reduce_any(are_clipped)
        if self.variable_norm:
            parts = packing.unpack(segments, scale, keeps_sparse=True)
            norms = [tf.norm(tf.cast(values_of(part), tf.float32)) for part in parts]
            factors = [self.variable_norm / tf.maximum(size, self.variable_norm) for size in norms]
            clipped = packing.pack([_times(part, factor) for part, factor in zip(parts, factors, strict=True)])
            kept = [
                map_values(lambda new, old: tf.where(finite, new, old), *pair)
                for pair in zip(clipped, segments, strict=True)
            ]
            return kept, tf.ones_like(scale), tf.reduce_any([size > self.variable_norm for size in norms])
        return list(segments), scale, tf.constant(False)

    def _clip_values(self, segment: Segment, scale: tf.Tensor, finite: tf.Tensor) -> tuple[Segment, tf.Tensor]:
        """Returns a segment, scaled and clipped where it is, if it is finite; and its largest absolute value before."""
        with tf.device(values_of(segment).device):
            (whole,) = scaled([segment], scale)

            def clip(new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
                limits = tf.unstack(tf.cast([-self.value, self.value], new.dtype))
                return tf.where(finite, tf.clip_by_value(new, *limits), old)

            largest = tf.reduce_max(tf.abs(values_of(whole)))
            return map_values(clip, whole, segment), tf.cast(largest, tf.float32)


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    return map_values(lambda values: values * tf.cast(factor, values.dtype), gradient)
