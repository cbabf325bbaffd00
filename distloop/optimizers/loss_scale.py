"""The scale of the loss that float16 needs.

float16 ends at 65,504 and has no number between 0 and 6e-8, where many gradients lie. Multiplying the loss by a large
scale multiplies its gradients by the same scale; they are divided by it again in float32, after the sum over the
replicas. bfloat16 has the range of float32 and needs no scale.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.log import shown
from distloop.optimizers import gradients, slot_store
from distloop.settings.durations import finite_number, whole_number

# After this many overflows in a row at the smallest scale, the scale is not the cause.
MAX_OVERFLOWS_AT_FLOOR = 10

# Good steps between two doublings, until a step overflows.
_SEARCH_STEPS = 10


class LossScaleOptimizer(tf.Module):
    """An optimizer that scales the loss, and skips a step if a gradient on any replica or worker is not finite.

    The scale is halved when a step overflows, and doubled after `growth_steps` good ones (Micikevicius et al. 2018,
    arXiv:1710.03740, section 3.2); from then on, as from the first step, it doubles every 10 steps until the next
    overflow. It starts low, so that the first steps of common models do not overflow (`docs/precision.md`). A step that
    overflows changes no weight, no slot and no `iterations`.

    `keras.optimizers.LossScaleOptimizer` checks the first replica alone, before the reduction, so an overflow of
    another replica goes into every weight. This one sums first. Under `Config(precision="mixed_float16")` the Trainer
    puts it around the optimizer of a `ModelSpec`; create one yourself to choose its arguments. In a loop of your own:

        with strategy.scope():
            model = ...                                                          # made under "mixed_float16"
            optimizer = distloop.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
            optimizer.build(model.trainable_variables)

        def replica_step(x, y):                                                  # this replica's rows
            with tf.GradientTape() as tape:
                losses = loss_fn(y, model(x, training=True))                     # [b], one for each row
                loss = optimizer.scale_loss(tf.reduce_sum(losses) / BATCH_SIZE)  # of the global batch
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)                # sums over the replicas

        @tf.function
        def step(x, y):
            strategy.run(replica_step, args=(x, y))

    Attributes:
        inner_optimizer: the Keras optimizer; its `clipnorm` and similar settings get summed, unscaled gradients.
        loss_scale: the factor of the loss, a float32 scalar.
        streak: counts the steps applied, an int32 scalar: from 0 after an overflow to `growth_steps`, where the scale
            doubles; below 0: minus the number of overflows in a row at the smallest scale.
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        initial_scale: float = 2.0**4,
        *,
        dynamic: bool = True,
        growth_steps: int = 2_000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
    ):
        """Creates the variables; to be called in the strategy's scope, like the inner optimizer.

        Args:
            inner_optimizer: any Keras optimizer except a loss-scale optimizer.
            initial_scale: the first scale.
            dynamic: True if the scale changes; else it stays at `initial_scale`, and steps that overflow are skipped.
            growth_steps: number of good steps after an overflow until the scale is doubled.
            min_scale: the smallest scale.
            max_scale: the largest scale.

        Raises:
            ValueError: if the inner optimizer is not one, or the numbers contradict each other.
        """
        super().__init__(name="loss_scale_optimizer")
        if not isinstance(inner_optimizer, keras.optimizers.Optimizer) or hasattr(inner_optimizer, "inner_optimizer"):
            raise ValueError(
                f"LossScaleOptimizer was given {inner_optimizer!r}; it takes a Keras optimizer without a loss scale, "
                "such as keras.optimizers.Adam(1e-3)."
            )
        if not dynamic:
            min_scale = max_scale = initial_scale
        scales = [finite_number(scale) or 0.0 for scale in (min_scale, initial_scale, max_scale)]
        are_scales = 0 < scales[0] <= scales[1] <= scales[2] <= tf.float32.max
        if not are_scales or not 1 <= (whole_number(growth_steps) or 0) < 2**31:
            raise ValueError(
                f"LossScaleOptimizer was given initial_scale={shown(initial_scale)}, min_scale={shown(min_scale)}, "
                f"max_scale={shown(max_scale)} and growth_steps={shown(growth_steps)}; it needs 0 < min_scale <= "
                "initial_scale <= max_scale, all finite in float32, and a whole number of growth_steps, 1 or more."
            )
        self.inner_optimizer = inner_optimizer
        self.growth_steps = growth_steps = int(growth_steps)
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.loss_scale = tf.Variable(initial_scale, dtype=tf.float32, trainable=False, name="loss_scale")
        self._search_streak = growth_steps - min(growth_steps, _SEARCH_STEPS)  # where the count starts in a search
        self.streak = tf.Variable(self._search_streak, dtype=tf.int32, trainable=False, name="streak")
        slot_store.skip_reduction(inner_optimizer)

    @property
    def variables(self) -> tuple[Any, ...]:
        """The scale, the streak, and the inner optimizer's variables."""
        return (self.loss_scale, self.streak, *self.inner_optimizer.variables)

    @property
    def iterations(self) -> Any:
        """The number of steps applied."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the inner optimizer; can be set."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def built(self) -> bool:
        """Whether the inner optimizer has its slots."""
        return self.inner_optimizer.built

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the inner optimizer's slots; in the strategy's scope.

        Args:
            variables: the variables that `apply` will get.
        """
        self.inner_optimizer.build(variables)

    def scale_loss(self, loss: Any) -> tf.Tensor:
        """Returns a loss, `[...]`, times the scale, in float32."""
        return tf.cast(loss, tf.float32) * self.loss_scale

    def apply(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Sums gradients of a scaled loss over the replicas, unscales them, and applies them if all are finite.

        Call it in replica context, under a strategy that synchronizes.

        Args:
            grads: this replica's gradients; None for a variable that the loss does not depend on.
            variables: their variables, with which the optimizer was built.

        Raises:
            ValueError: if the optimizer is not built, or there is no gradient.
        """
        if not self.built:
            raise ValueError(
                "This LossScaleOptimizer is not built, and slots cannot be made within a step: call "
                "optimizer.build(model.trainable_variables) in the strategy's scope."
            )
        pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
        if not pairs:
            raise ValueError("apply was given no gradient: compute the loss from the model's variables in the tape.")
        packing = gradients.Packing([v for _, v in pairs])
        segments, _ = packing.all_reduce(packing.pack([g for g, _ in pairs]), {})
        norm, scale = gradients.norm_and_scale(gradients.squared_norms(segments), self.loss_scale)
        is_finite = tf.math.is_finite(norm)

        def apply_inner(segments: list[tf.Tensor], scale: tf.Tensor) -> None:
            summed = packing.unpack(gradients.scaled(segments, scale))
            self.inner_optimizer.apply(summed, [v for _, v in pairs])

        def apply_across(strategy: tf.distribute.Strategy, is_finite: Any, arguments: Any) -> None:
            first = strategy.experimental_local_results(is_finite)[0]
            tf.cond(first, lambda: strategy.run(apply_inner, args=arguments), lambda: None)
            self.update_scale(first)

        if tf.__internal__.distribute.strategy_supports_no_merge_call():  # GPUs, TPUs: no cross-replica context
            tf.cond(is_finite, lambda: apply_inner(segments, scale), lambda: None)
            self.update_scale(is_finite)
        else:  # a branch of one replica must not contain a synchronization
            tf.distribute.get_replica_context().merge_call(apply_across, args=(is_finite, (segments, scale)))

    def update_scale(self, is_finite: tf.Tensor, is_applied: tf.Tensor | None = None) -> None:
        """Halves the scale after an overflow, and doubles it after enough good steps; in cross-replica context.

        Args:
            is_finite: whether all gradients were finite, a scalar.
            is_applied: whether the step was applied; it may be skipped because of another update. None: as `is_finite`.
        """
        is_applied = is_finite if is_applied is None else is_applied
        scale, streak = tf.identity(self.loss_scale), tf.identity(self.streak)
        halved = tf.maximum(scale / 2, self.min_scale)
        at_floor = tf.where(scale > self.min_scale, 0, tf.minimum(streak, 0) - 1)
        good = tf.maximum(streak, 0) + 1
        is_grown = good >= self.growth_steps
        doubled = tf.where(is_grown, tf.minimum(scale * 2, self.max_scale), scale)
        self.loss_scale.assign(tf.where(is_finite, tf.where(is_applied, doubled, scale), halved))
        kept = tf.where(is_applied, tf.where(is_grown, self._search_streak, good), streak)
        self.streak.assign(tf.where(is_finite, kept, at_floor))
