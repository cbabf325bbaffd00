"""Lazy optimizers: updates only the rows that a table's sparse gradient has, in weights and slots.

    optimizer = distloop.LazyAdam(1e-3)      # takes the arguments of keras.optimizers.Adam

They are the optimizers of Keras but for sparse gradients. There a row without a gradient keeps its weights and slots,
where the rule of Keras would let its momentum decay and move it on. So a step costs what its rows cost, however large
the table is, and trains to other weights than the rule for all rows does. A row whose gradient is 0 counts as without
one, so that padding in a batch changes nothing. Weight decay applies to the rows of the gradient alone.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.optimizers.gradients import Rows, write_rows
from distloop.tables import sparse_packing
from distloop.tables.row_updates import read_rows, subtract_rows
from distloop.variables import tensorflow_variable

_Mixin: Any = object  # the methods of Keras come from the class that stands beside it


class _Lazy(_Mixin):
    """What lazy optimizers share; a mixin before an optimizer of Keras."""

    is_lazy = True
    _sparse_keys: frozenset[Any] = frozenset()  # of the variables with a sparse gradient in this `apply`

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """As in Keras."""
        variables: Any = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        pairs = zip(grads, variables, strict=True)
        self._sparse_keys = frozenset(self._var_key(v) for g, v in pairs if isinstance(g, tf.IndexedSlices))
        super().apply(grads, trainable_variables)

    def _use_weight_decay(self, variable: Any) -> bool:
        """Returns whether Keras decays all of a variable."""
        return self._var_key(variable) not in self._sparse_keys and super()._use_weight_decay(variable)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """As in Keras, except for a sparse gradient."""
        if not isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)
            return
        plain = tensorflow_variable(variable)
        rows = sparse_packing.merge(sparse_packing.from_slices(gradient, plain.shape))
        has_gradient = tf.reduce_any(tf.not_equal(rows.values, 0), 1)
        rows = Rows(*(tf.boolean_mask(tensor, has_gradient) for tensor in rows))
        values = tf.cast(sparse_packing.to_slices(rows, plain.shape).values, plain.dtype)
        rate = tf.cast(learning_rate, plain.dtype)
        if self.weight_decay is not None and super()._use_weight_decay(variable):
            weights = read_rows(variable, rows.numbers)
            subtract_rows(variable, rows.numbers, weights * tf.cast(self.weight_decay, plain.dtype) * rate)
        self._update_rows(rows.numbers, values, variable, rate)

    def _change(self, slots: Sequence[Any], variable: Any, numbers: tf.Tensor, change: Any) -> tf.Tensor:
        """Sets a slot's rows to what a function makes of them; returns the new ones."""
        slot = slots[self._get_variable_index(variable)]
        rows = change(read_rows(slot, numbers))
        write_rows(slot, numbers, rows)
        return rows


class _LazyAdamRule(_Lazy):
    """Adam for rows."""

    def _update_rows(self, numbers: tf.Tensor, values: tf.Tensor, variable: Any, rate: tf.Tensor) -> None:
        """Updates rows as `keras.optimizers.Adam` does (Kingma & Ba 2015, arXiv:1412.6980); t counts all steps."""
        step = tf.cast(self.iterations + 1, values.dtype)
        beta_1, beta_2 = (tf.cast(beta, values.dtype) for beta in (self.beta_1, self.beta_2))
        m = self._change(self._momentums, variable, numbers, lambda m: m + (values - m) * (1 - self.beta_1))
        v = self._change(self._velocities, variable, numbers, lambda v: v + (tf.square(values) - v) * (1 - self.beta_2))
        if self.amsgrad:
            v = self._change(self._velocity_hats, variable, numbers, lambda largest: tf.maximum(largest, v))
        rate *= tf.sqrt(1 - beta_2**step) / (1 - beta_1**step)
        subtract_rows(variable, numbers, m * rate / (tf.sqrt(v) + self.epsilon))


@keras.saving.register_keras_serializable(package="distloop")
class LazyAdam(_LazyAdamRule, keras.optimizers.Adam):
    """`keras.optimizers.Adam`, whose sparse gradients update their rows alone; takes the same arguments."""


@keras.saving.register_keras_serializable(package="distloop")
class LazyAdamW(_LazyAdamRule, keras.optimizers.AdamW):
    """`keras.optimizers.AdamW`, whose sparse gradients update and decay their rows alone; takes the same arguments."""


@keras.saving.register_keras_serializable(package="distloop")
class LazySGD(_Lazy, keras.optimizers.SGD):
    """`keras.optimizers.SGD`, whose sparse gradients update their rows alone; takes the same arguments."""

    def _update_rows(self, numbers: tf.Tensor, values: tf.Tensor, variable: Any, rate: tf.Tensor) -> None:
        """Updates rows as `keras.optimizers.SGD` does."""
        difference = values * rate
        if self.momentum:
            velocity = self._change(self.momentums, variable, numbers, lambda m: m * self.momentum - difference)
            difference = difference - self.momentum * velocity if self.nesterov else -velocity
        subtract_rows(variable, numbers, difference)
