"""Random numbers that no checkpoint can continue: draws from a state inside an operation of TensorFlow.

    with refused(state):
        outcome = step(batch, layout)          # raises a ValueError if the traced step draws such numbers

`tf.random.normal`, `tf.nn.dropout` and others count their draws in the kernel of the operation, where nothing can read
or restore the count. A `tf.random.Generator` counts in a variable, which is saved only if it is in the model. It does
not know what the numbers are for; Keras's random numbers have their state in the model (`random_streams.py`).
"""

import contextlib
import re
from collections.abc import Iterable, Iterator

import tensorflow as tf

from distloop.operations import DRAWS_FROM_KERNEL, outermost, with_called
from distloop.training import nonfinite
from distloop.training.state import TrainState

ADVICE = (
    "use keras.random with a keras.random.SeedGenerator that is an attribute of the model or of a layer in it, or draw "
    "in the dataset"
)

# Types of operations, as in `operations.DRAWS_FROM_KERNEL`.
_DRAWS_FROM_VARIABLE = re.compile(
    r"Rng(Skip|ReadAndSkip)|Stateful(Uniform|UniformInt|UniformFullInt|StandardNormal|StandardNormalV2|"
    r"TruncatedNormal|RandomBinomial)"
)


@contextlib.contextmanager
def refused(state: TrainState) -> Iterator[None]:
    """Raises a ValueError if the operations traced in this block draw such numbers; eagerly, nothing is checked.

    Args:
        state: whose variables checkpoints hold.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    num_operations = len(graph.get_operations())
    yield
    for op in unsaved_draws(graph.get_operations()[num_operations:], state):
        layers = [part for tops in state.layers_of_update.values() for top in tops for part in top._flatten_layers()]
        raise ValueError(
            f"{nonfinite.describe(op, layers, has_direction=False)} draws random numbers from a state that no "
            f"checkpoint holds, so a resumed run would draw others: {ADVICE}."
        )


def unsaved_draws(operations: Iterable[tf.Operation], state: TrainState) -> Iterator[tf.Operation]:
    """Yields the operations that draw from a state that no checkpoint holds, those in called functions included.

    Args:
        operations: of a graph.
        state: whose variables checkpoints hold.
    """
    saved: set[int] | None = None
    for op in with_called(operations):
        if DRAWS_FROM_KERNEL.fullmatch(op.type):
            yield op
        elif _DRAWS_FROM_VARIABLE.fullmatch(op.type):
            if saved is None:
                variables = state.all_variables().values()
                saved = {id(part.handle) for variable in variables for part in state.replica_variables(variable)}
            if id(outermost(op.inputs[0])) not in saved:
                yield op
