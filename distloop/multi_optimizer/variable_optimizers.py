"""Variable optimizers: Keras's `MultiOptimizer` with the methods that the loop calls on every Keras optimizer.

    optimizer = make_optimizer(multi_optimizer)
    optimizer.apply(gradients, variables)        # each variable by the optimizer that the map gives it

Keras's own calls `apply` of each optimizer inside it, with all gradients or an error. This one has the gradients
applied a variable at a time by `update_step`, so that what the loop does to an optimizer, such as placing its updates,
holds here, too. Its variables have the names and the order of Keras's.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from distloop.optimizers.keras_hooks import is_schedule_free


class VariableOptimizers(keras.optimizers.MultiOptimizer):
    """A `MultiOptimizer` that updates variables by the rules of the optimizers inside it."""

    def build(self, var_list: Sequence[Any]) -> None:
        """Makes the slots of each optimizer for its variables."""
        for optimizer in self.optimizers:
            optimizer._distribution_strategy = self._distribution_strategy
            optimizer._use_weight_decay = lambda variable: self._use_weight_decay(variable)  # which others replace
        super().build(var_list)

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the default optimizer; can be set in `optimizers` alone."""
        return self._optimizer_map.default_optimizer.learning_rate

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Applies gradients, one a variable; they may be those of some variables alone."""
        keras.optimizers.Optimizer.apply(self, grads, trainable_variables)
        for optimizer in self.optimizers:
            optimizer.iterations.assign_add(1)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable by its optimizer's rule and learning rate; the one that is given is the default's."""
        optimizer = self._optimizer_of(variable)
        optimizer.update_step(gradient, variable, optimizer.learning_rate)

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        for optimizer in self.optimizers:
            # What `_use_weight_decay` asks for the variables of this optimizer: the method that `build` has replaced.
            self._is_decayed = functools.partial(type(optimizer)._use_weight_decay, optimizer)
            optimizer._apply_weight_decay([v for v in variables if self._optimizer_of(v) is optimizer])

    def _use_weight_decay(self, variable: Any) -> bool:
        return bool(self._is_decayed(variable))

    def describe_rule(self, variable: Any) -> str:
        """Returns which optimizer updates a variable, as in `, by optimizer 2 (Adam),`."""
        optimizer = self._optimizer_map(variable)
        return f", by optimizer {self.optimizers.index(optimizer) + 1} ({type(optimizer).__name__}),"

    def _optimizer_of(self, variable: Any) -> Any:
        return self.optimizers[self._var_to_optimizer_idx[self._var_key(variable)]]


def make_optimizer(given: Any, make_one: Callable[[Any], Any] = lambda optimizer: optimizer) -> VariableOptimizers:
    """Returns the optimizer for the loop.

    Args:
        given: a `keras.optimizers.MultiOptimizer`.
        make_one: returns what takes the place of an optimizer inside it.

    Raises:
        ValueError: if it chooses by a function, or has an optimizer whose step is more than that of each variable.
    """
    if not isinstance(given._optimizer_map, keras.optimizers.OptimizerMap):  # private
        raise ValueError(
            "A MultiOptimizer was given that chooses optimizers by a function, which says too late what they are: give "
            "keras.optimizers.OptimizerMap(default_optimizer, {'a regular expression on paths': optimizer})."
        )
    for optimizer in given.optimizers:
        has_own_step = type(optimizer)._backend_update_step is not keras.optimizers.Optimizer._backend_update_step
        if has_own_step or is_schedule_free(optimizer) or getattr(optimizer, "is_lazy", False):
            raise ValueError(
                f"A MultiOptimizer was given with {type(optimizer).__name__}, which does more in a step than to update "
                "each variable by its gradient: give it another one, such as Adam or SGD, or this one alone."
            )
    made = {id(optimizer): make_one(optimizer) for optimizer in given.optimizers}
    by_pattern = {pattern: made[id(optimizer)] for pattern, optimizer in given._optimizer_map.items()}
    default = made[id(given._optimizer_map.default_optimizer)]
    return VariableOptimizers(keras.optimizers.OptimizerMap(default, by_pattern), name=given.name)
