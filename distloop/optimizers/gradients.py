"""Gradients: packs gradients into few vectors, reduces them once, and clips the sums.

All functions run in replica context.

    segments = packing.pack(gradients)                               # few vectors instead of many small tensors
    segments, sums = packing.all_reduce(segments, {"tallies": t})    # the one reduction of the step
    norm, scale = norm_and_scale(squared_norms(segments), weight)    # norm is finite only if every gradient is
    segments, scale, is_clipped = Clipping(norm=1.0).clip(packing, segments, norm, scale, tf.math.is_finite(norm))
    optimizer.apply(packing.unpack(segments, scale), variables)

A segment is a flat vector, or the rows of a large table, a variable whose first axis counts its rows, that a sparse
gradient consists of: `tables/` makes and applies such gradients.

    rows = map_values(lambda values: 2.0 * values, Rows(numbers, values))          # as of a dense gradient
    write_rows(table, rows.numbers, values)
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from distloop.variables import tensorflow_variable

# Larger tensors travel alone: copying them into one vector costs more than launching one more reduction.
LARGEST_PACKED_BYTES = 256 * 1024

Reduce = Callable[[list[tf.Tensor]], Sequence[tf.Tensor]]


class Rows(NamedTuple):
    """A sparse gradient; a number that occurs more than once stands for the sum of its values."""

    numbers: tf.Tensor  # [n] int64: which rows of the table
    values: tf.Tensor  # [n, width]: a row of several axes is flat


Segment: TypeAlias = tf.Tensor | Rows  # the flat gradients of some variables, or the rows of one table


def values_of(gradient: Any) -> tf.Tensor:
    """Returns the elements of a gradient that may differ from 0; of merged rows, each element once."""
    return gradient.values if isinstance(gradient, (Rows, tf.IndexedSlices)) else gradient


def map_values(fn: Callable[..., tf.Tensor], gradient: Any, *others: Any) -> Any:
    """Returns a gradient with other values, which `fn` computes from its own and those of `others`; it maps 0 to 0."""
    values = fn(values_of(gradient), *map(values_of, others))
    if isinstance(gradient, Rows):
        return gradient._replace(values=values)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


class Packing:
    """The layout of some variables' gradients in a few tensors, called segments.

    Small gradients of one dtype share a vector; each large gradient is a segment of its own. One that the tape returns
    as `tf.IndexedSlices` becomes dense here; `tables/` has a packing that keeps it.

    Attributes:
        dtypes: of each segment.
        devices: of each segment; empty if no device is prescribed.
        sparse: the segments that were `Rows` when a loop over microbatches was traced last.
        reasons: by `id`, the variables whose gradients are sparse, and why all of one is updated, the end of a
            sentence, or None; known once a step is traced.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        devices: Sequence[str] | None = None,
        workers: Sequence[int] | None = None,
        *,
        why_dense: str | None = None,
    ):
        """Plans the layout.

        Args:
            variables: with static shapes and dtypes.
            devices: on which each variable's gradient is packed and unpacked; None: no device is prescribed.
            workers: the worker of this device; None: all have the same.
            why_dense: why a sparse gradient is made dense, if that is to be reported.
        """
        self._shapes = [tuple(v.shape) for v in variables]
        self._numbers = {id(v): i for i, v in enumerate(variables)}
        self._devices = list(devices or [""] * len(variables))
        workers = workers or [0] * len(variables)
        self._groups: list[list[int]] = []  # positions of the variables in each segment
        vectors: dict[tuple[tf.DType, int, str], list[int]] = {}
        for i, variable in enumerate(variables):
            dtype = tf.as_dtype(variable.dtype)
            if self._size(i) * dtype.size > LARGEST_PACKED_BYTES:
                self._groups.append([i])
            else:
                vectors.setdefault((dtype, workers[i], self._devices[i]), []).append(i)
        self._groups.extend(vectors.values())
        self.devices = [self._devices[group[0]] for group in self._groups]
        self._packed_on = self.devices  # where replicas pack and add
        self._why_dense = why_dense
        self.sparse: set[int] = set()
        self.reasons: dict[int, str | None] = {}
        self.dtypes = [tf.as_dtype(variables[group[0]].dtype) for group in self._groups]

    _on = staticmethod(tf.device)  # enters the scope of a device

    def _size(self, i: int) -> int:
        return int(tf.TensorShape(self._shapes[i]).num_elements())

    def _sizes(self, group: Sequence[int]) -> list[int]:
        return [self._size(i) for i in group]

    @property
    def shapes(self) -> list[tf.TensorShape]:
        """The shape of each segment, as if all were dense."""
        return [tf.TensorShape([sum(self._sizes(group))]) for group in self._groups]

    @property
    def may_be_sparse(self) -> bool:
        """Whether any segment belongs to one variable alone, whose gradient may be sparse."""
        return any(len(group) == 1 for group in self._groups)

    @property
    def by_rows(self) -> set[int]:
        """The variables, by `id`, of which the optimizer updates the rows of the batch alone."""
        return {i for i, reason in self.reasons.items() if reason is None}

    def sized(self, gradient: Any, variable: Any) -> Any:
        """Returns a variable's gradient from a tape as it can be packed."""
        if not isinstance(gradient, tf.IndexedSlices) or self._why_dense is None:
            return gradient
        self.reasons[id(variable)] = self._why_dense
        return tf.convert_to_tensor(gradient)

    def pack(self, gradients: Sequence[Any], *, keeps_sparse: bool = True) -> list[Segment]:
        """Packs one gradient a variable into segments; with `keeps_sparse=False`, into flat vectors alone."""
        segments: list[Segment] = []
        for group, device in zip(self._groups, self._packed_on, strict=True):
            with self._on(device):
                segments.append(self._segment(group, gradients, keeps_sparse=keeps_sparse))
        return segments

    def _segment(self, group: Sequence[int], gradients: Sequence[Any], *, keeps_sparse: bool) -> Segment:
        # The size is explicit because TensorFlow does not always know the size of a sparse gradient.
        flat = [tf.reshape(tf.convert_to_tensor(gradients[i]), [self._size(i)]) for i in group]
        return tf.concat(flat, 0) if len(group) > 1 else flat[0]

    def unpack(
        self, segments: Sequence[Segment], scale: tf.Tensor | None = None, *, keeps_sparse: bool = False
    ) -> list[Any]:
        """Returns the gradients in segments, one a variable, multiplied by `scale` as in `scaled`.

        With `keeps_sparse`, sparse gradients are returned as `tf.IndexedSlices`.
        """
        gradients: list[Any] = []
        for flat, shape, device in zip(self.unpack_flat(segments, scale), self._shapes, self._devices, strict=True):
            with self._on(device):
                gradients.append(self._shaped(flat, shape, keeps_sparse=keeps_sparse))
        return gradients

    def _shaped(self, flat: Segment, shape: Sequence[int], *, keeps_sparse: bool) -> Any:
        return tf.reshape(flat, shape)

    def unpack_for(
        self, optimizer: keras.optimizers.Optimizer, segments: Sequence[Segment], scale: tf.Tensor
    ) -> list[Any]:
        """Returns the gradients for an optimizer, one a variable, times a scale; sparse where it updates rows alone."""
        return self.unpack(segments, scale)

    def join(self, segments: Sequence[Segment], scale: tf.Tensor | None, variables: Sequence[Any]) -> tf.Tensor:
        """Returns the dense gradients of variables as one vector, multiplied by `scale` as in `scaled`."""
        positions = [self._numbers[id(variable)] for variable in variables]
        if positions in self._groups:
            segment = segments[self._groups.index(positions)]
            return segment if scale is None else scaled([segment], scale)[0]
        flats = self.unpack_flat(segments, scale)
        return tf.concat([flats[i] for i in positions], 0)

    def unpack_flat(self, segments: Sequence[Segment], scale: tf.Tensor | None = None) -> list[Segment]:
        """Returns the flat gradient of each variable, times `scale` as in `scaled`."""
        flats: list[Any] = [None] * len(self._shapes)
        for group, segment, device in zip(self._groups, segments, self.devices, strict=True):
            with self._on(device):
                (segment,) = [segment] if scale is None else scaled([segment], scale)
                flat = [segment] if len(group) == 1 else self._split(segment, self._sizes(group))
                for i, each in zip(group, flat, strict=True):
                    flats[i] = each
        return flats

    def _split(self, segment: tf.Tensor, sizes: Sequence[int]) -> Sequence[tf.Tensor]:
        return tf.split(segment, sizes)

    def _shape(self, group: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the variable that a segment begins with."""
        return self._shapes[group[0]]

    def add(self, segments: Sequence[Segment], others: Sequence[Segment]) -> list[Segment]:
        """Returns the sums of two microbatches' segments."""
        sums: list[Segment] = []
        for a, b, group, device in zip(segments, others, self._groups, self._packed_on, strict=True):
            with self._on(device):
                sums.append(self._sum(group, a, b))
        return sums

    def _sum(self, group: Sequence[int], a: Segment, b: Segment) -> Segment:
        return a + b

    def has_other_sparse(self, segments: Sequence[Segment]) -> bool:
        """Records in `sparse` which segments are `Rows`; returns whether that was not known."""
        before, self.sparse = self.sparse, {i for i, segment in enumerate(segments) if isinstance(segment, Rows)}
        return self.sparse != before

    def row_specs(self, segment: int) -> tuple[tf.TensorSpec, tf.TensorSpec]:
        """Returns what numbers and values of a sparse segment look like, given its index."""
        width = math.prod(self._shape(self._groups[segment])[1:])
        return tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, width], self.dtypes[segment])

    def diagnosis(self, segments: Sequence[Segment], squares: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns a vector, `[diagnosis_size]`, from which `find_nonfinite` finds what gradients are not finite.

        The step evaluates nothing for it: it is a copy of small gradients, and of the squared norms of large ones.
        """
        pairs = zip(self._groups, segments, squares, strict=True)
        vectors = [square[tf.newaxis] if len(group) == 1 else segment for group, segment, square in pairs]
        return tf.concat([tf.cast(vector, tf.float32) for vector in vectors], 0)

    @property
    def diagnosis_size(self) -> int:
        """The length of `diagnosis`."""
        return sum(size for _, size in self._diagnosis_sizes())

    def find_nonfinite(self, diagnosis: np.ndarray) -> list[int]:
        """Returns the positions of the variables whose gradients are not finite."""
        positions, sizes = zip(*self._diagnosis_sizes(), strict=True)
        pieces = np.split(diagnosis, np.cumsum(sizes)[:-1])
        return sorted({i for i, piece in zip(positions, pieces, strict=True) if not np.isfinite(piece).all()})

    def _diagnosis_sizes(self) -> Iterator[tuple[int, int]]:
        """Yields each variable and how many numbers of `diagnosis` are about it."""
        for group in self._groups:
            yield from ((i, self._size(i) if len(group) > 1 else 1) for i in group)

    def all_reduce(
        self,
        segments: Sequence[Segment],
        sums: Mapping[str, Any],
        reduce: Reduce | None = None,
        shard: tuple[Any, Any] | None = None,
    ) -> tuple[list[Segment], dict[str, Any]]:
        """Sums gradients, and other values by name, over all replicas and workers in one reduction.

        Args:
            segments: the packed gradients.
            sums: by name, a float32 tensor of static shape, or a list of such tensors.
            reduce: returns the sums of some tensors over all replicas; None: in the order that TensorFlow chooses.
            shard: the global batch and its layout, which say how many rows replicas have.

        Returns:
            The summed segments, in which each row of a table occurs once, and name -> sum.
        """
        context = tf.distribute.get_replica_context()
        if context.num_replicas_in_sync == 1:
            return list(segments), dict(sums)
        alone = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=1)  # packed already, each of one dtype
        reduce = reduce or functools.partial(context.all_reduce, tf.distribute.ReduceOp.SUM, options=alone)
        tensors = [tensor for value in sums.values() for tensor in tf.nest.flatten(value)]
        if not tensors:
            return list(reduce(list(segments))) if segments else [], {}
        vector = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
        segments, vector = self._reduce_with(vector, segments, reduce)
        pieces = iter(tf.split(vector, [tensor.shape.num_elements() for tensor in tensors]))
        return segments, {
            name: tf.nest.map_structure(lambda tensor: tf.reshape(next(pieces), tensor.shape), value)
            for name, value in sums.items()
        }

    def _reduce_with(
        self, vector: tf.Tensor, segments: Sequence[tf.Tensor], reduce: Reduce
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sums segments and one more vector over the replicas; at the end of a small segment, the vector is free."""
        for i, segment in enumerate(segments):
            size = segment.shape[0]
            if segment.dtype == vector.dtype and size * segment.dtype.size <= LARGEST_PACKED_BYTES:
                joined = [*segments[:i], tf.concat([segment, vector], 0), *segments[i + 1 :]]
                reduced = list(reduce(joined))
                reduced[i], vector = reduced[i][:size], reduced[i][size:]
                return reduced, vector
        *reduced, vector = reduce([*segments, vector])
        return reduced, vector


def squared_norms(segments: Sequence[Segment]) -> list[tf.Tensor]:
    """Returns the squared norm of each segment, float32 scalars; one is finite only if its gradients are."""
    squares = []
    for segment in segments:
        values = values_of(segment)
        with tf.device(values.device):  # a number is cheaper to move than a gradient
            squares.append(2.0 * tf.nn.l2_loss(tf.cast(values, tf.float32)))
    return squares


def norm_and_scale(squares: Sequence[tf.Tensor], weight: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes the norm of all gradients after their division by a weight, and the factor that divides them.

    The gradients are those of which `squared_norms` are given; a weight of 0 makes them 0.
    """
    scale = tf.math.divide_no_nan(1.0, weight)
    return tf.sqrt(tf.add_n(squares)) * scale, scale


def scaled(segments: Sequence[Segment], scale: tf.Tensor) -> list[Segment]:
    """Returns segments times a factor; a factor of 0 gives 0, even for gradients that are not finite."""
    return [map_values(lambda v: tf.math.multiply_no_nan(v, tf.cast(scale, v.dtype)), s) for s in segments]


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
        return bool(self.norm or self.variable_norm or self.value)

    def clip(
        self, packing: Packing, segments: Sequence[Segment], norm: tf.Tensor, scale: tf.Tensor, finite: tf.Tensor
    ) -> tuple[list[Segment], tf.Tensor, tf.Tensor]:
        """Clips summed gradients, given their layout, the results of `norm_and_scale` and whether all are finite.

        Returns:
            Segments, unchanged if not finite, so that those gradients can be found; the factor that is left to multiply
            them by; and whether any gradient was clipped.
        """
        if self.norm:
            return list(segments), scale * (self.norm / tf.maximum(norm, self.norm)), norm > self.norm
        if self.value:
            pairs = [self._clip_values(segment, scale, finite) for segment in segments]
            are_clipped = [size > self.value for _, size in pairs]
            return [segment for segment, _ in pairs], tf.ones_like(scale), tf.reduce_any(are_clipped)
        if self.variable_norm:
            unpacked = packing.unpack(segments, scale, keeps_sparse=True)
            norms = [tf.norm(tf.cast(values_of(each), tf.float32)) for each in unpacked]
            factors = [self.variable_norm / tf.maximum(size, self.variable_norm) for size in norms]
            factored = zip(unpacked, factors, strict=True)
            clipped = packing.pack([map_values(lambda v, f: v * tf.cast(f, v.dtype), *pair) for pair in factored])
            kept = [
                map_values(lambda new, old: tf.where(finite, new, old), *pair)
                for pair in zip(clipped, segments, strict=True)
            ]
            return kept, tf.ones_like(scale), tf.reduce_any([size > self.variable_norm for size in norms])
        return list(segments), scale, tf.constant(False)

    def _clip_values(self, segment: Segment, scale: tf.Tensor, finite: tf.Tensor) -> tuple[Segment, tf.Tensor]:
        """Returns a segment, scaled and clipped where it is, if it is finite; and its largest absolute value before."""
        with tf.device(values_of(segment).device):
            (divided,) = scaled([segment], scale)

            def clip(new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
                limits = tf.unstack(tf.cast([-self.value, self.value], new.dtype))
                return tf.where(finite, tf.clip_by_value(new, *limits), old)

            largest = tf.reduce_max(tf.abs(values_of(divided)))
            return map_values(clip, divided, segment), tf.cast(largest, tf.float32)


def write_rows(variable: Any, numbers: tf.Tensor, rows: tf.Tensor) -> None:
    """Writes rows of a variable; their numbers `[n]` differ."""
    handle = tensorflow_variable(variable).handle
    tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=numbers, updates=rows)
    # A scatter ends that reads share the variable's memory; else each step's forward pass copies the table: 229 ms
    # instead of 0.4 at a million rows of 32. A read that somebody still holds when the next scatter comes is copied.
    tf.raw_ops.DisableCopyOnRead(resource=handle)
