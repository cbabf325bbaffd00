"""Creation of variables: recorded while a model is made, and refused in steps, where it would be too late.

    with recorded(created):                     # created: {id(variable): variable}
        spec = model_fn()
    loss_fn = refusing_new_variables(loss_fn)   # raises VariableCreatedError where it creates a variable

A variable that the first step creates would not be trained, averaged or saved.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

Creator = Callable[..., Any]


class VariableCreatedError(ValueError):
    """A step created a variable.

    Attributes:
        variable: its name.
    """

    def __init__(self, message: str, variable: str):
        """Keeps the name beside the message."""
        super().__init__(message)
        self.variable = variable


def recorded(created: dict[int, Any]) -> contextlib.AbstractContextManager[None]:
    """Returns a scope that stores each new variable by its identity; as it is held, no other object gets the same."""

    def record(next_creator: Creator, **settings: Any) -> Any:
        variable = next_creator(**settings)
        created[id(variable)] = variable
        return variable

    scope: contextlib.AbstractContextManager[None] = tf.variable_creator_scope(record)
    return scope


def refusing_new_variables(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that raises VariableCreatedError where `fn`, which a step calls, creates a variable."""

    @functools.wraps(fn)
    def call(*arguments: Any, **settings: Any) -> Any:
        refused: list[str] = []
        try:
            with _refused(refused):
                return fn(*arguments, **settings)
        except Exception as error:  # Keras raises others from it, with the arguments of layers
            if not refused:
                raise
            raise VariableCreatedError(explain_new_variable(refused[0]), refused[0]) from error

    return call


def explain_new_variable(variable: str) -> str:
    """Returns the message about a variable that was created too late."""
    advice = (
        "give keras.random functions and layers a keras.random.SeedGenerator that is an attribute of the model"
        if "seed_generator_state" in variable
        else "create it with the model, by a call of the whole model on an example or by the build of its layer, and "
        "let it belong to ModelSpec's model"
    )
    return f"The variable {variable!r} was created by a step, so it would not be trained or saved: {advice}."


@contextlib.contextmanager
def _refused(refused: list[str]) -> Iterator[None]:
    """Enters a scope in which a new variable is an error; adds its name to `refused`."""

    def refuse(next_creator: Creator, **settings: Any) -> Any:
        scope = re.sub("^(while/|replica_[0-9]+/)+", "", tf.get_current_name_scope() + "/").lstrip("/")
        refused.append(scope + (settings.get("name") or "variable"))
        raise ValueError("too late for a new variable")

    with tf.variable_creator_scope(refuse), contextlib.ExitStack() as stack:
        with tf.init_scope():  # Keras's layers create variables there, under creators of its own
            stack.enter_context(tf.variable_creator_scope(refuse))
        yield
