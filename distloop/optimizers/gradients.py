"""Gradients from their sums to an update: pack, reduce once, apply.

All functions run in replica context. They do not know how gradients are computed, or clipped.

    segments = packing.pack(gradients)                               # few vectors instead of many small tensors
    segments, sums = packing.all_reduce(segments, {"tallies": t})    # the one reduction of the step
    _, norm, scale = norm_and_scale(segments, weight)                # norm is finite only if every gradient is
    apply(optimizer, packing.unpack(segments, scale), variables)

A segment is a flat vector, or the rows of a large table that a sparse gradient consists of: `sparse_gradients.py`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from distloop.optimizers import sparse_gradients
from distloop.optimizers.parts import Part
from distloop.optimizers.sparse_gradients import Rows, Segment, map_values, values_of

# Larger tensors travel alone: copying them into one vector costs more than launching one more reduction.
LARGEST_PACKED_BYTES = 256 * 1024

Reduce = Callable[[list[tf.Tensor]], Sequence[tf.Tensor]]
Gather = Callable[[Rows], Rows]


class _Place(NamedTuple):
    """Where a piece is updated."""

    device: str  # "": on any
    worker: int = 0  # if all update it, 0
    is_here: bool = True  # on this worker


class _Piece(NamedTuple):
    """Some elements of a flat gradient: all of them, or those of a part that one device updates."""

    variable: int  # position
    start: int
    size: int
    place: _Place


class Packing:
    """The layout of some variables' gradients in a few tensors, called segments.

    Small gradients of one dtype share a vector; each large gradient is a segment of its own. One that the tape returns
    as `tf.IndexedSlices` stays sparse, so whether a segment is `Rows` is known once gradients are packed.

    Attributes:
        dtypes: of each segment.
        devices: on which each segment is updated; empty if no device is prescribed.
        owners: the worker that updates each segment; 0 if all do.
        sparse: the segments that were `Rows` when a loop over microbatches was traced last.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        devices: Sequence[str] | None = None,
        parts: Sequence[Sequence[Part]] | None = None,
        *,
        keeps_sparse: bool = False,
    ):
        """Plans the layout.

        Args:
            variables: with static shapes.
            devices: the device of each variable's gradient, on which it is packed and unpacked; None: no device is
                prescribed.
            parts: of each variable, in order; parts of different devices are in different segments. None: each is one.
            keeps_sparse: whether large sparse gradients stay sparse, those of variables in one part.
        """
        self._shapes = [tuple(v.shape) for v in variables]
        self._pieces: list[_Piece] = []
        self._groups: list[list[int]] = []  # positions of the pieces in each segment
        vectors: dict[tuple[tf.DType, _Place], list[int]] = {}
        self._of_variables = list(devices or [""] * len(variables))
        for i, variable in enumerate(variables):
            dtype = tf.as_dtype(variable.dtype)
            slices = [(0, self._size(i), _Place(self._of_variables[i]))]
            if parts is not None:
                slices = [(p.start, p.size, _Place(p.device, p.worker, p.is_here)) for p in parts[i]]
            for start, size, place in slices:
                number = len(self._pieces)
                self._pieces.append(_Piece(i, start, size, place))
                if size * dtype.size > LARGEST_PACKED_BYTES:
                    self._groups.append([number])
                else:
                    vectors.setdefault((dtype, place), []).append(number)
        self._groups.extend(vectors.values())
        places = [self._pieces[group[0]].place for group in self._groups]
        self.devices = [place.device for place in places]
        self.owners = [place.worker for place in places]
        self._are_here = [place.is_here for place in places]
        self._devices = self.devices if parts is None else [""] * len(self._groups)  # on which replicas pack and add
        self._keeps_sparse = keeps_sparse
        self.sparse: set[int] = set()
        self.dtypes = [tf.as_dtype(variables[self._pieces[group[0]].variable].dtype) for group in self._groups]

    def _size(self, i: int) -> int:
        return int(tf.TensorShape(self._shapes[i]).num_elements())

    def _sizes(self, group: Sequence[int]) -> list[int]:
        return [self._pieces[number].size for number in group]

    @property
    def shapes(self) -> list[tf.TensorShape]:
        """The shape of each segment, as if all were dense."""
        return [tf.TensorShape([sum(self._sizes(group))]) for group in self._groups]

    def pack(self, gradients: Sequence[Any], *, keeps_sparse: bool = True) -> list[Segment]:
        """Packs one gradient a variable into segments; with `keeps_sparse=False`, into flat vectors alone."""
        segments: list[Segment] = []
        for group, device in zip(self._groups, self._devices, strict=True):
            with tf.device(device):
                first = gradients[self._pieces[group[0]].variable]
                if keeps_sparse and self._keeps_sparse and len(group) == 1 and isinstance(first, tf.IndexedSlices):
                    segments.append(sparse_gradients.from_slices(first, self._shape(group)))
                    continue
                flat = [self._take(gradients, self._pieces[number]) for number in group]
                segments.append(tf.concat(flat, 0) if len(group) > 1 else flat[0])
        return segments

    def _take(self, gradients: Sequence[Any], piece: _Piece) -> tf.Tensor:
        # The size is explicit because TensorFlow does not always know the size of a sparse gradient.
        size = self._size(piece.variable)
        flat = tf.reshape(tf.convert_to_tensor(gradients[piece.variable]), [size])
        return flat if piece.size == size else tf.slice(flat, [piece.start], [piece.size])

    def unpack(
        self, segments: Sequence[Segment], scale: tf.Tensor | None = None, *, keeps_sparse: bool = False
    ) -> list[Any]:
        """Returns the gradients in segments, one a variable, multiplied by `scale` as in `scaled`.

        Args:
            segments: packed gradients.
            scale: a scalar; None: 1.
            keeps_sparse: whether sparse gradients are returned as `tf.IndexedSlices`.
        """
        of_variables: list[list[Any]] = [[] for _ in self._shapes]
        for piece, gradient in zip(self._pieces, self.unpack_parts(segments, scale), strict=True):
            of_variables[piece.variable].append(gradient)
        gradients: list[Any] = []
        for parts, shape, device in zip(of_variables, self._shapes, self._of_variables, strict=True):
            with tf.device(device):
                if keeps_sparse and isinstance(parts[0], Rows):
                    gradients.append(sparse_gradients.to_slices(parts[0], shape))
                    continue
                flats = [sparse_gradients.to_dense(part, shape) if isinstance(part, Rows) else part for part in parts]
                gradients.append(tf.reshape(tf.concat(flats, 0) if len(flats) > 1 else flats[0], shape))
        return gradients

    def unpack_parts(self, segments: Sequence[Segment], scale: tf.Tensor | None = None) -> list[Segment]:
        """Returns the flat gradient of each part of each variable, times `scale` as in `scaled`.

        Of the parts that another worker updates, it is empty.
        """
        flats: list[Any] = [None] * len(self._pieces)
        for group, segment, device, is_here in zip(self._groups, segments, self.devices, self._are_here, strict=True):
            with tf.device(device):
                (segment,) = [segment] if scale is None else scaled([segment], scale)
                pieces = tf.split(segment, self._sizes(group)) if len(group) > 1 and is_here else [segment] * len(group)
                for number, piece in zip(group, pieces, strict=True):
                    flats[number] = piece
        return flats

    def _shape(self, group: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the variable that a segment begins with."""
        return self._shapes[self._pieces[group[0]].variable]

    def _dense(self, group: Sequence[int], segment: Segment) -> tf.Tensor:
        """Returns a segment as a flat vector."""
        if not isinstance(segment, Rows):
            return segment
        return tf.reshape(sparse_gradients.to_dense(segment, self._shape(group)), self._sizes(group))

    def add(self, segments: Sequence[Segment], others: Sequence[Segment]) -> list[Segment]:
        """Returns the sums of two microbatches' segments."""
        sums: list[Segment] = []
        for a, b, group, device in zip(segments, others, self._groups, self._devices, strict=True):
            with tf.device(device):
                if isinstance(a, Rows) and isinstance(b, Rows):
                    sums.append(sparse_gradients.join([a, b]))
                else:
                    sums.append(self._dense(group, a) + self._dense(group, b))
        return sums

    def without_sparse(self, segments: Sequence[Segment]) -> list[tf.Tensor]:
        """Returns segments that are flat vectors all."""
        return [self._dense(group, segment) for group, segment in zip(self._groups, segments, strict=True)]

    def row_specs(self, segment: int) -> tuple[tf.TensorSpec, tf.TensorSpec]:
        """Returns what numbers and values of a sparse segment look like, given its index."""
        width = sparse_gradients.row_size(self._shape(self._groups[segment]))
        return tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, width], self.dtypes[segment])

    def diagnosis(self, segments: Sequence[Segment], squares: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns a vector from which the host can tell the variables whose gradients are not finite.

        The step evaluates nothing for it: it is a copy of small gradients, and of the squared norms of large ones.

        Args:
            segments: the packed gradients.
            squares: the squared norm of each segment.

        Returns:
            `[diagnosis_size]`, float32, for `find_nonfinite`; 0 for small gradients that another worker has.
        """
        parts: list[tf.Tensor] = []
        for group, segment, square, is_here in zip(self._groups, segments, squares, self._are_here, strict=True):
            if len(group) == 1:
                parts.append(square[tf.newaxis])
            else:
                parts.append(segment if is_here else tf.zeros([sum(self._sizes(group))]))
        return tf.concat([tf.cast(part, tf.float32) for part in parts], 0)

    @property
    def diagnosis_size(self) -> int:
        """The length of `diagnosis`."""
        return sum(size for _, size in self._diagnosis_sizes())

    def find_nonfinite(self, diagnosis: np.ndarray) -> list[int]:
        """Returns the positions of the variables whose gradients are not finite."""
        positions, sizes = zip(*self._diagnosis_sizes(), strict=True)
        parts = np.split(diagnosis, np.cumsum(sizes)[:-1])
        return sorted({i for i, part in zip(positions, parts, strict=True) if not np.isfinite(part).all()})

    def _diagnosis_sizes(self) -> Iterator[tuple[int, int]]:
        """Yields the variable of each piece and how many numbers of `diagnosis` are about it."""
        for group in self._groups:
            for piece in (self._pieces[number] for number in group):
                yield piece.variable, piece.size if len(group) > 1 else 1

    def all_reduce(
        self,
        segments: Sequence[Segment],
        sums: Mapping[str, Any],
        reduce: Reduce | None = None,
        gather: Gather | None = None,
    ) -> tuple[list[Segment], dict[str, Any]]:
        """Sums gradients, and other values by name, over all replicas and workers in one reduction.

        Args:
            segments: the packed gradients.
            sums: name -> a float32 tensor of static shape, or a list of such tensors.
            reduce: returns the sums of some tensors over all replicas; None: in the order that TensorFlow chooses.
            gather: returns sparse rows of all replicas in one list; None: none are sparse.

        Returns:
            The summed segments, in which each row of a table occurs once, and name -> sum.
        """
        context = tf.distribute.get_replica_context()
        if context.num_replicas_in_sync == 1:
            return [_merged(segment) for segment in segments], dict(sums)
        flat = [segment for segment in segments if not isinstance(segment, Rows)]
        reduce = reduce or functools.partial(context.all_reduce, tf.distribute.ReduceOp.SUM)
        flat, summed = self._reduce_dense(flat, sums, reduce)
        dense = iter(flat)
        assert gather is not None or len(flat) == len(segments), "sparse rows need a function that gathers them"
        return [
            sparse_gradients.merge(gather(segment)) if gather and isinstance(segment, Rows) else next(dense)
            for segment in segments
        ], summed

    def _reduce_dense(
        self, segments: Sequence[tf.Tensor], sums: Mapping[str, Any], reduce: Reduce
    ) -> tuple[list[tf.Tensor], dict[str, Any]]:
        """Sums flat segments, and other values by name, over the replicas."""
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


def norm_and_scale(
    segments: Sequence[Segment], weight: tf.Tensor, add: Callable[[tf.Tensor], tf.Tensor] | None = None
) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
    """Computes the global norm of gradients, and the factor that divides them.

    Args:
        segments: packed gradients, summed over all replicas, workers and microbatches of the step.
        weight: the divisor, a scalar: the sum of the weights, times the loss scale if there is one; if it is 0, the
            gradients count as 0.
        add: returns the sum of a tensor over the workers, if each has some of the segments, and empty ones for others.

    Returns:
        The squared norm of each segment, the norm of all gradients after the division, and the factor: float32 scalars.
        The norm is finite only if every gradient is.
    """
    squares = []
    for segment in segments:
        values = values_of(segment)
        with tf.device(values.device):  # a number is cheaper to move than a gradient
            squares.append(2.0 * tf.nn.l2_loss(tf.cast(values, tf.float32)))
    if add is not None:
        squares = tf.unstack(add(tf.stack(squares)))
    scale = tf.math.divide_no_nan(1.0, weight)
    return squares, tf.sqrt(tf.add_n(squares)) * scale, scale


def scaled(segments: Sequence[Segment], scale: tf.Tensor) -> list[Segment]:
    """Returns segments times a factor; a factor of 0 gives 0, even for gradients that are not finite."""

    def scale_values(values: tf.Tensor) -> tf.Tensor:
        return tf.math.multiply_no_nan(values, tf.cast(scale, values.dtype))

    return [map_values(scale_values, segment) for segment in segments]


def _merged(segment: Segment) -> Segment:
    return sparse_gradients.merge(segment) if isinstance(segment, Rows) else segment


def apply(optimizer: keras.optimizers.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> None:
    """Applies reduced gradients, the same on every replica."""
    with tf.control_dependencies(gradients):
        # A step whose data fails is not counted: the count's write waits for every read, and this read for the
        # gradients. All of `apply` could wait for them, but its independent operations would start later (25 us of 90).
        tf.identity(optimizer.iterations)
    optimizer.apply(gradients, variables)
