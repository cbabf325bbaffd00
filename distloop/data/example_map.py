"""A user's function over single examples, applied to the rows of a batch inside tf.data.

    apply = trace(map_fn, reader.spec)
    batch = apply(reader.read(rows, seeds), seeds)        # a structure of [b, ...]

It does not know where examples come from.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.data.examples import pad_row
from distloop.graph_functions import graph_function
from distloop.operations import DRAWS_FROM_KERNEL, with_called

_PARALLEL_ROWS = 16

ExampleMap = Callable[[Any, Any], Any]


class NotTraceable(Exception):
    """A function cannot be traced, so it may be one of Python."""


@dataclasses.dataclass(frozen=True)
class TracedMap:
    """A function over single examples, applied to the rows of a batch by TensorFlow.

    Attributes:
        function: of an example and its seed.
        spec: of what it returns, a structure of `tf.TensorSpec`.
    """

    function: Any
    spec: Any

    def __call__(self, batch: Any, seeds: tf.Tensor, width: tf.Tensor | None = None) -> Any:
        """Returns what it returns for each row, `[b, ...]`; call it in a map of tf.data.

        Args:
            batch: a structure of tensors `[b, ...]`, or of `rows.Uneven`.
            seeds: int64 [b, 2].
            width: to which axes that are free in `spec` are padded, int64 []; None: there are none.
        """

        def changed(row: tf.Tensor) -> Any:
            example = self.function(tf.nest.map_structure(lambda entry: entry[row], batch), seeds[row])
            if width is None:
                return example
            return tf.nest.map_structure(lambda entry, spec: pad_row(entry, spec, width), example, self.spec)

        return tf.map_fn(
            tf.autograph.experimental.do_not_convert(changed),
            tf.range(tf.shape(seeds)[0]),
            fn_output_signature=self.spec,
            parallel_iterations=_PARALLEL_ROWS,
        )


def trace(map_fn: ExampleMap, example_spec: Any) -> TracedMap:
    """Returns a function of an example and its seed, traced.

    Args:
        map_fn: of TensorFlow's operations.
        example_spec: of an example, a structure of `tf.TensorSpec`.

    Raises:
        NotTraceable: if tracing fails.
        ValueError: if it draws random numbers that do not come from its seed, which a resumed run could not repeat, or
            returns None.
    """
    states, function = _states_of_python(), graph_function(map_fn, autograph=True)
    try:
        traced = function.get_concrete_function(example_spec, tf.TensorSpec([2], tf.int64))
    except Exception as error:
        raise NotTraceable(str(error).strip().partition("\n")[0]) from error
    operations = with_called(traced.graph.get_operations())
    draws = [op.type for op in operations if DRAWS_FROM_KERNEL.fullmatch(op.type)]
    if draws or states != _states_of_python():
        what = f"TensorFlow's {draws[0]}" if draws else "Python's or NumPy's global random numbers"
        raise ValueError(
            f"map_fn draws from {what}, which a resumed run cannot repeat: draw from the seed it gets, as in "
            "tf.image.stateless_random_crop(image, size, seed) or np.random.default_rng(seed)."
        )
    if any(entry is None for entry in tf.nest.flatten(traced.structured_outputs)):
        what = "None" if traced.structured_outputs is None else "an example with None in it"
        raise ValueError(f"map_fn returned {what}; its examples hold tensors: let it return the example to train on.")
    spec = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), traced.structured_outputs)
    return TracedMap(function, spec)


def _states_of_python() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest
