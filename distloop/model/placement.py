"""Placement: the interface to a pipeline's placement, with a plain version for other models.

    placement = make_placement(spec.model)                # a pipeline if the model contains networks of several stages
    segments, tallies, rows = placement.sum_microbatches(packing, 4, compute)
    gradients = placement.differentiate(tape, loss, tensors)

`Placement` is the plain version: TensorFlow and the strategy place everything. A network of several stages has one with
the same methods, in `pipeline/`. A train step asks the placement of its `TrainState` for what it needs.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from distloop.optimizers.gradients import Packing, Rows, Segment
from distloop.variables import walk

# Packed gradients, tallies, `[2 * m]`, and rows of other values, `[b, ...]` each.
Sums: TypeAlias = tuple[list[Segment], tf.Tensor, list[tf.Tensor]]
Compute = Callable[[Any], Sums]  # of a microbatch by its index


class Placement:
    """The plain placement: every replica computes on its own device."""

    devices: Sequence[str] = ()  # of each stage, as in `GPU:0`; empty without stages

    def describe(self) -> list[str]:
        """Returns lines for the console."""
        return []

    def make_actions(self, profile: Any) -> list[Any]:
        """Returns the actions that report on the stages of a run, of which `profile` profiles some steps."""
        return []

    def require_stages(self, num_stages: int) -> None:
        """Checks that the model has as many stages as the settings say.

        Raises:
            ValueError: if `num_stages` is above 1 and no network has so many.
        """
        if num_stages > 1:
            raise wrong_num_stages(num_stages, "no network of several stages")

    def check_microbatches(self, microbatches: int, batch_size: int) -> None:
        """Checks that no microbatch is empty, which a pipeline cannot run.

        Raises:
            ValueError: if there are more microbatches than examples in a batch.
        """

    def adapt_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Lets a built optimizer work where its variables are."""

    def gradient_devices(self, variables: Sequence[Any]) -> list[str] | None:
        """Returns the device on which each variable's gradient stays; None if TensorFlow decides."""
        return None

    def layer_scope(self, layer: keras.Layer) -> contextlib.AbstractContextManager[Any]:
        """Returns a scope that places operations on a layer's device."""
        return contextlib.nullcontext()

    def differentiate(self, tape: Any, objective: tf.Tensor, tensors: Sequence[Any]) -> list[Any]:
        """Computes gradients.

        Args:
            tape: recorded the forward pass.
            objective: the scalar to differentiate.
            tensors: the TensorFlow variables.

        Returns:
            A gradient for each; None if the objective does not depend on the variable.
        """
        gradients: list[Any] = tape.gradient(objective, tensors)
        return gradients

    def sum_microbatches(
        self, packing: Packing, count: int, compute: Compute, row_specs: Sequence[tf.TensorSpec] = ()
    ) -> Sums:
        """Sums gradients and tallies over microbatches; the activations of one microbatch are in memory at a time.

        Args:
            packing: the layout of the gradients.
            count: how many microbatches.
            compute: computes packed gradients, tallies and rows of a microbatch by its index.
            row_specs: of the rows.

        Returns:
            Packed gradients and tallies, `[2 * m]`; the rows of all microbatches.
        """
        # Sparse segments become one list, as rows do.
        size = tf.TensorShape([None])  # of the tallies, known once the body was traced
        lengths: list[int | None] = []  # of the sparse segments of a microbatch; likewise
        sparse = sorted(packing.sparse)
        specs = [*(spec for i in sparse for spec in packing.row_specs(i)), *row_specs]
        is_dense = [i not in packing.sparse for i in range(len(packing.shapes))]

        def body(index: tf.Tensor, sums: list[tf.Tensor], tallies: tf.Tensor, arrays: list[tf.TensorArray]) -> Any:
            nonlocal size, lengths
            segments, more_tallies, rows = compute(index)
            if (found := {i for i, segment in enumerate(segments) if isinstance(segment, Rows)}) != set(sparse):
                raise _SparseSegmentsError(found)
            size, lengths = more_tallies.shape, [segments[i].numbers.shape[0] for i in sparse]
            rows = [*(tensor for i in sparse for tensor in segments[i]), *rows]
            arrays = [array.write(index, more) for array, more in zip(arrays, rows, strict=True)]
            sums = [a + b for a, b in zip(sums, itertools.compress(segments, is_dense), strict=True)]
            return index + 1, sums, tallies + more_tallies, arrays

        shapes, dtypes = (list(itertools.compress(of, is_dense)) for of in (packing.shapes, packing.dtypes))
        zeros = [tf.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        arrays = [tf.TensorArray(spec.dtype, count, infer_shape=False, element_shape=spec.shape) for spec in specs]
        start = tf.constant(0), zeros, tf.zeros([1]), arrays  # one zero for any number of tallies
        invariants = tf.TensorShape([]), shapes, tf.TensorShape([None]), [tf.TensorShape(None) for _ in arrays]
        settings = {"shape_invariants": invariants, "parallel_iterations": 1}
        try:
            _, sums, tallies, arrays = tf.while_loop(lambda index, *_: index < count, body, start, **settings)
        except _SparseSegmentsError as error:  # known once the loop's body was traced
            packing.sparse = error.segments
            return self.sum_microbatches(packing, count, compute, row_specs)
        joined, flat = iter([array.concat() for array in arrays]), iter(sums)
        lists = {i: Rows(next(joined), next(joined)) for i in sparse}
        for rows, length in zip(lists.values(), lengths, strict=True):  # TensorFlow does not know that all are alike
            rows.numbers.set_shape([None if length is None else count * length])
        segments = [lists[i] if i in lists else next(flat) for i in range(len(is_dense))]
        return segments, tf.ensure_shape(tallies, size), list(joined)

    def unplaced(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a scope in which the model is traced without devices, to be served anywhere."""
        return contextlib.nullcontext()


class _SparseSegmentsError(Exception):
    """Other segments are sparse than a loop was made for."""

    def __init__(self, segments: set[int]):
        """Stores the indices of those that are."""
        super().__init__()
        self.segments = segments


def make_placement(model: Any) -> Placement:
    """Returns the placement of a model: that of its stages if it contains networks of several.

    Args:
        model: as in `ModelSpec`.
    """
    networks = [leaf for _, leaf in walk(model) if hasattr(leaf, "make_placement") and leaf.devices]
    made: Placement = networks[0].make_placement(networks) if networks else Placement()
    return made


def wrong_num_stages(num_stages: int, made: str) -> ValueError:
    """Returns the error of a model that has another number of stages than the settings say."""
    return ValueError(
        f"num_stages={num_stages} was given, but model_fn made {made}: call distloop.split(model, {num_stages}) in "
        "it, or leave num_stages out."
    )
