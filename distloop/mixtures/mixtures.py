"""Mixtures: several sources of examples, each with its fraction of one stream.

    mixture = Mixture({"web": web, "books": books}, {"web": 0.7, "books": 0.3})
    train = make_dataset(mixture, 64, shuffle=True, seed=0)

The order of the stream is that of `MixedOrder`.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.data.make_dataset import by_batch
from distloop.data.order import Order
from distloop.data.python_rows import read_rows
from distloop.data.rows import ArrayRows, SourceRows, is_arrays, spread
from distloop.log import shown
from distloop.mixtures.orders import MixedOrder, by_length
from distloop.settings.durations import finite_number, whole_number

_MOST_SLOTS = 10_000  # of a block
_MOST_FINGERPRINT = 400  # characters


class Mixture:
    """Several sources with weights, as a source for `make_dataset`.

    Sources alternate as evenly as can be: among the first t examples, a source with the fraction p has more than pt - 1
    and less than pt + 1. A source that is read to its end starts again, in another order where it is shuffled.
    Fractions are exact if all have one denominator up to 10,000. Else they are rounded to multiples of 1/10,000, those
    with the largest remainders upwards.

    Attributes:
        names: of the sources.
        rows_of: the number of rows of each source.
        ratios: pairs of a batch and the slots of each source in a block from this batch on.
        examples_per_epoch: of the mixture.
        rows_to_inspect: numbers of rows of all sources.
        fingerprint: of the sources that have a fingerprint.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[Any, Any],
        *,
        examples_per_epoch: int = 0,
    ):
        """Looks at a few rows of each source.

        Args:
            sources: by name, each as for `make_dataset`, but no `tf.data.Dataset`. Their examples have the same
                structure, types and numbers of axes, which `make_dataset` checks.
            weights: of each source, by name; they need not add up to 1. To change them in the course of training: a
                dict from the number of a batch to the weights from this batch on, such as
                `{0: {"web": 1, "books": 0}, 10_000: {"web": 0.7, "books": 0.3}}`.
            examples_per_epoch: what counts as an epoch of the mixture; 0: the rows of all sources together.

        Raises:
            ValueError: if one of both is no dict, names and weights do not fit together, a weight is negative or too
                small, or a source cannot be read by number.
        """
        for name, value in (("sources", sources), ("weights", weights)):
            if not isinstance(value, Mapping):
                raise ValueError(
                    f"A Mixture was given {name}={shown(value)}; sources and weights are dicts by name, as in "
                    'Mixture({"a": a, "b": b}, {"a": 3, "b": 1}).'
                )
        if not sources:
            raise ValueError("A Mixture was given no sources; it needs one at least.")
        if (count := whole_number(examples_per_epoch)) is None or count < 0:
            raise ValueError(
                f"examples_per_epoch={shown(examples_per_epoch)} was given; an epoch has one example at least."
            )
        self.names = tuple(sources)
        is_by_batch = any(isinstance(value, Mapping) for value in weights.values())
        stages = by_batch(weights, "weights") if is_by_batch else {0: weights}
        self.ratios = tuple((batch, self._slots(stage)) for batch, stage in stages.items())
        self._given = list(sources.values())
        self._sources = [_open(name, source) for name, source in sources.items()]
        self.rows_of = tuple(map(len, self._sources))
        self.examples_per_epoch = count or sum(self.rows_of)
        self._ends = np.cumsum(self.rows_of)
        parts = [end - rows + spread(rows) for end, rows in zip(self._ends, self.rows_of, strict=True)]
        self.rows_to_inspect = np.concatenate(parts)
        marks = [getattr(source, "fingerprint", None) for source in self._sources]
        digests = ":".join(_digest(mark) if mark else "" for mark in marks) if any(marks) else ""
        self.fingerprint = digests if len(digests) <= _MOST_FINGERPRINT else _digest(digests)

    def __len__(self) -> int:
        return sum(len(source) for source in self._sources)

    def __getitem__(self, row: int) -> Any:
        """Returns one row, by its number in all sources one after the other."""
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Returns some rows, read together where their source can."""
        located, examples = [self._locate(row) for row in rows], {}
        for index in {index for index, _ in located}:
            examples[index] = iter(read_rows(self._sources[index], [number for i, number in located if i == index]))
        return [next(examples[index]) for index, _ in located]

    def row_name(self, row: int) -> str:
        """Returns which row of which source a number is, for a sentence."""
        source, number = self._locate(row)
        return f"Row {number} of {self.names[source]!r}"

    def make_order(self, order: Order, sizes: Mapping[int, int], lengths: np.ndarray | None) -> MixedOrder:
        """Returns the order of its examples; the arguments are those of the function `make_order`."""
        sources = {name: getattr(self, name) for name in ("names", "rows_of", "ratios", "examples_per_epoch")}
        return _mixed(order, sizes, lengths, **sources)

    def as_arrays(self) -> Any:
        """Returns the rows of all sources as arrays `[N, ...]`; None if one is no array in memory, or shapes differ."""
        in_memory = [s for s in self._sources if isinstance(s, ArrayRows) and s.is_in_memory]
        if len(in_memory) < len(self._sources) or any(s.spec != in_memory[0].spec for s in in_memory):
            return None
        return tf.nest.map_structure(lambda *arrays: np.concatenate(list(map(np.asarray, arrays))), *self._given)

    def _locate(self, row: int) -> tuple[int, int]:
        source = int(np.searchsorted(self._ends, row, side="right"))
        return source, int(row - self._ends[source] + self.rows_of[source])

    def _slots(self, weights: Mapping[str, float]) -> tuple[int, ...]:
        """Returns the slots of each source in a block."""
        if set(weights) != set(self.names):
            raise ValueError(
                f"The sources of a Mixture are {', '.join(map(repr, self.names))}, and weights were given for "
                f"{', '.join(map(repr, weights)) or 'none'}: give each source a weight, 0 for one that is left out."
            )
        values = [-1.0 if (value := finite_number(weights[name])) is None else value for name in self.names]
        if min(values) < 0 or not 0 < sum(values) < math.inf:
            given = shown(dict(weights))
            raise ValueError(f"The weights {given} were given; weights are 0 or more, and one is more than 0.")
        slots = round_fractions([value / math.fsum(values) for value in values])
        for name, value, count in zip(self.names, values, slots, strict=True):
            if value and not count:
                raise ValueError(
                    f"The weight of {name!r} is {value / math.fsum(values):.2g} of all, less than the smallest "
                    f"fraction, 1/{_MOST_SLOTS:,}: give it more, or join it with a like source."
                )
        return slots


def round_fractions(fractions: list[float]) -> tuple[int, ...]:
    """Returns how many slots of a block each fraction gets, in a block of as few slots as it takes, up to 10,000.

    Args:
        fractions: 1 together.
    """
    ratios = [Fraction(fraction).limit_denominator(_MOST_SLOTS) for fraction in fractions]
    block = math.lcm(*(ratio.denominator for ratio in ratios))
    is_exact = all(map(math.isclose, ratios, fractions))
    if block <= _MOST_SLOTS and is_exact and sum(ratios) == 1:
        return tuple(int(ratio * block) for ratio in ratios)
    slots = [math.floor(fraction * _MOST_SLOTS) for fraction in fractions]
    by_remainder = sorted(range(len(fractions)), key=lambda i: slots[i] - fractions[i] * _MOST_SLOTS)
    for index in by_remainder[: _MOST_SLOTS - sum(slots)]:
        slots[index] += 1
    return tuple(slots)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _open(name: str, source: Any) -> Any:
    """Returns a source whose rows can be read by number, after a look at a few of them."""
    if is_arrays(source):
        return ArrayRows(source)
    is_readable = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    if not is_readable or isinstance(source, (str, bytes, tf.data.Dataset, Mixture)):
        raise ValueError(
            f"The source {name!r} of a Mixture is a {type(source).__name__}; a Mixture takes arrays and anything with "
            "__len__ and __getitem__."
        )
    SourceRows(source)
    return source


def make_order(order: Order, sizes: Mapping[int, int], lengths: np.ndarray | None, pad_to: Sequence[int]) -> Any:
    """Returns the order of one source whose batch size changes, or of batches of like lengths.

    Args:
        order: of its rows, as if it were neither.
        sizes: the size of batches by the batch from which on they have it.
        lengths: of the rows; None: batches are not of like lengths.
        pad_to: as for `make_dataset`.

    Raises:
        ValueError: if the lengths do not fit the source, or are given with a batch size that changes.
    """
    if lengths is not None and len(sizes) == 1:
        return by_length(order, lengths, pad_to)
    rows = order.num_rows
    return _mixed(order, sizes, lengths, names=("data",), rows_of=(rows,), ratios=((0, (1,)),), examples_per_epoch=rows)


def _mixed(order: Order, sizes: Mapping[int, int], lengths: np.ndarray | None, **sources: Any) -> MixedOrder:
    """Returns the order of some sources, with the seed of a plain order; refuses lengths."""
    if lengths is not None:
        raise ValueError("lengths were given with a Mixture or a batch_size that changes; use distloop.pack.")
    batch_sizes = tuple(sizes.items())
    return MixedOrder(**sources, batch_sizes=batch_sizes, seed=order.seed, is_shuffled=order.is_shuffled)
