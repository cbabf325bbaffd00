"""Row updates: makes Keras optimizers update only the rows of a table that have a gradient.

    update_rows(optimizer)                             # a Keras optimizer, built: SGD and Adagrad
    if why_dense(optimizer, table) is None:
        optimizer.apply([slices], [table])             # a sparse gradient whose row numbers differ

`lazy.py` has optimizers that take a sparse gradient by a rule of their own.
"""

from typing import Any

import keras
import tensorflow as tf

from distloop.optimizers.gradients import write_rows
from distloop.variables import tensorflow_variable


def why_dense(optimizer: keras.optimizers.Optimizer, table: Any) -> str | None:
    """Returns why an optimizer has to update a whole table, the end of a sentence; None: it can update rows alone."""
    name = type(optimizer).__name__
    if getattr(table, "constraint", None) is not None:
        return "its constraint looks at every row"
    if getattr(optimizer, "is_lazy", False):
        return None
    if optimizer.weight_decay is not None and optimizer._use_weight_decay(table):
        lazy = {"AdamW": "LazyAdamW", "SGD": "LazySGD"}.get(name)
        return "weight decay moves every row" + (f": distloop.{lazy} updates those of the batch alone" if lazy else "")
    kind = type(optimizer)
    if kind is keras.optimizers.Adagrad or (kind is keras.optimizers.SGD and not optimizer.momentum):
        return None
    lazy = {"Adam": "LazyAdam", "AdamW": "LazyAdamW", "SGD": "LazySGD"}.get(name, "LazyAdam")
    rule = "SGD with momentum" if name == "SGD" else name
    return f"{rule} moves rows without a gradient too: distloop.{lazy} updates those of the batch alone"


def update_rows(optimizer: keras.optimizers.Optimizer) -> None:
    """Lets Keras's SGD and Adagrad update rows; gives the same bits as the update of the whole table.

    Keras would scatter into the variable, after which TensorFlow copies the whole table at each read.
    """
    rule = {keras.optimizers.SGD: _sgd, keras.optimizers.Adagrad: _adagrad}.get(type(optimizer))
    if rule is None:
        return
    update_step = optimizer.update_step

    def update_some(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not isinstance(gradient, tf.IndexedSlices):
            update_step(gradient, variable, learning_rate)
            return
        plain = tensorflow_variable(variable)
        rule(optimizer, gradient.indices, tf.cast(gradient.values, plain.dtype), variable, learning_rate)

    optimizer.update_step = update_some


def _sgd(optimizer: Any, numbers: tf.Tensor, values: tf.Tensor, variable: Any, learning_rate: Any) -> None:
    subtract_rows(variable, numbers, values * tf.cast(learning_rate, values.dtype))


def _adagrad(optimizer: Any, numbers: tf.Tensor, values: tf.Tensor, variable: Any, learning_rate: Any) -> None:
    """Updates rows as `keras.optimizers.Adagrad` does (Duchi et al. 2011)."""
    accumulator = optimizer._accumulators[optimizer._get_variable_index(variable)]
    sums = read_rows(accumulator, numbers) + tf.square(values)
    write_rows(accumulator, numbers, sums)
    rate = tf.cast(learning_rate, values.dtype)
    subtract_rows(variable, numbers, rate * values / tf.sqrt(sums + tf.cast(optimizer.epsilon, values.dtype)))


def subtract_rows(variable: Any, numbers: tf.Tensor, differences: tf.Tensor) -> None:
    """Subtracts from rows of a variable; their numbers `[n]` differ."""
    with tf.control_dependencies([differences]):
        rows = read_rows(variable, numbers)
    write_rows(variable, numbers, rows - differences)


def read_rows(variable: Any, numbers: tf.Tensor) -> tf.Tensor:
    """Returns rows of a variable by their numbers, `[n]`."""
    plain = tensorflow_variable(variable)
    rows = tf.raw_ops.ResourceGather(resource=plain.handle, indices=numbers, dtype=plain.dtype)
    return tf.ensure_shape(rows, [None, *plain.shape[1:]])
