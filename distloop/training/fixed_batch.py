"""Models made for a fixed number of rows, by `keras.Input(batch_shape=...)`: errors where a replica gets another.

Most of them take any number of rows, so only the errors of those that do not are explained.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from distloop.data import shards
from distloop.variables import top_layers


def fixed_sizes(model: Any) -> dict[int, str]:
    """Returns the numbers of rows that models were made for, each with the name of one.

    Args:
        model: as for `named_variables`.
    """
    inputs = [(layer.name, tensor) for layer in top_layers(model) for tensor in getattr(layer, "inputs", None) or ()]
    return {tensor.shape[0]: name for name, tensor in inputs if len(tensor.shape) and tensor.shape[0] is not None}


def explaining_fixed_sizes(fn: Callable[..., Any], *, sizes: Mapping[int, str], replicas: int) -> Callable[..., Any]:
    """Returns a function that raises ValueError where `fn` fails by a fixed number of rows, or computes so many.

    Args:
        fn: takes a replica's rows first.
        sizes: the result of `fixed_sizes`, with one number at least.
        replicas: their number.
    """
    size, model = next(iter(sizes.items()))

    @functools.wraps(fn)
    def call(batch: Any, *arguments: Any) -> Any:
        rows = shards.batch_size(batch)
        if isinstance(rows, int) and rows in sizes:
            return fn(batch, *arguments)
        actual = f"{rows}" if isinstance(rows, int) else "a number that is known when it runs"
        explanation = (
            f"The model {model!r} is made for {size} rows by keras.Input(batch_shape=...), and a replica gets {actual}"
            f": give keras.Input a shape in place of batch_shape, or batches of {size * replicas} rows, with "
            "drop_remainder=True."
        )
        try:
            outputs = fn(batch, *arguments)
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
            if not re.search(rf"\b{size}\b", str(error)):  # a Sequential built by a call has that call's size, too
                raise
            raise ValueError(explanation) from error
        tensors = [value for value in tf.nest.flatten(outputs) if isinstance(value, tf.Tensor) and value.shape.rank]
        if any(tensor.shape[0] in sizes for tensor in tensors):
            raise ValueError(explanation)
        return outputs

    return call
