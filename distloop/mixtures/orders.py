"""Orders of mixed sources and of batches of similar lengths, as functions of a batch's number.

    order = MixedOrder(
        names=("web", "books"), rows_of=(1000, 50), seed=0, is_shuffled=True, examples_per_epoch=1050,
        ratios=((0, (7, 3)),), batch_sizes=((0, 64), (10_000, 128)),
    )
    order = LengthOrder(num_rows=60_000, batch_size=64, lengths=lengths, seed=0, is_shuffled=True)
    rows, epochs = order.rows(tf.constant(1_000_000, tf.int64))      # [b], [b]

The stream of a mixture is cut into blocks of as many slots as the ratios have together; each source has its fraction of
the slots of every block. It has no end, and all batches are whole. For like lengths, the order of `Order` is cut into
windows of 100 batches; the rows of a window are sorted by length and cut into batches, whose order is then shuffled.
"""

import dataclasses
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf

from distloop.data.order import OTHER_SIZE, Order, permute
from distloop.distributed.devices import HOST
from distloop.log import log, shown
from distloop.settings.durations import whole_number

_MOST_TEXT = 300  # characters of `facts_at`'s text
_WINDOW_BATCHES = 100
_KEPT_WINDOWS = 4  # several threads read batches near each other


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedOrder:
    """The order of the examples of several sources; the same methods as `Order`, which is that of one source.

    The rows of all sources are numbered one source after the other. A source of fewer rows than are asked of it starts
    again, in another order where it is shuffled: each has its own epochs.

    Attributes:
        names: of the sources.
        rows_of: the number of rows of each.
        ratios: pairs of a batch and the slots of each source in a block from this batch on. The first batch is 0.
        batch_sizes: pairs of a batch and the size of batches from it on. The first batch is 0.
        examples_per_epoch: of the mixture; an epoch has the batches that hold so many at the first size.
        seed: of the permutations, 0 up to 2**31.
        is_shuffled: whether each epoch of a source has a permutation of its own; else the order is that of the source.
        limit: the most batches of an epoch; 0: all.
        static_width: None: rows are not padded.
    """

    static_width: ClassVar[None] = None

    names: tuple[str, ...]
    rows_of: tuple[int, ...]
    ratios: tuple[tuple[int, tuple[int, ...]], ...]
    batch_sizes: tuple[tuple[int, int], ...]
    examples_per_epoch: int
    seed: int = 0
    is_shuffled: bool = False
    limit: int = 0

    @property
    def is_stationary(self) -> bool:
        """Whether all epochs are alike but for their order, as neither ratios nor batch size change."""
        return len(self.ratios) == len(self.batch_sizes) == 1

    @property
    def num_rows(self) -> int:
        """The number of rows of all sources together."""
        return sum(self.rows_of)

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches of an epoch."""
        count = math.ceil(self.examples_per_epoch / self.batch_sizes[0][1])
        return min(count, self.limit) if self.limit else count

    @property
    def batch_size(self) -> int | None:
        """The examples of each batch; None: it changes."""
        return self.batch_sizes[0][1] if len(self.batch_sizes) == 1 else None

    static_size = largest_batch = batch_size

    def size(self, batch: tf.Tensor) -> tf.Tensor:
        """Returns the number of examples in a batch, int64 []."""
        return tf.gather(self._spans.sizes, tf.searchsorted(self._spans.firsts, batch[None], side="right")[0] - 1)

    def rows(self, batch: tf.Tensor, first: tf.Tensor | int = 0, end: tf.Tensor | int | None = None) -> tuple:
        """Returns the numbers of the examples in a batch, and their epochs; as `Order.rows`."""
        spans = self._spans
        span = tf.searchsorted(spans.firsts, batch[None], side="right")[0] - 1
        start = tf.gather(spans.starts, span) + (batch - tf.gather(spans.firsts, span)) * tf.gather(spans.sizes, span)
        stream = tf.range(start + first, start + (tf.gather(spans.sizes, span) if end is None else end))
        of_pattern, block = stream - tf.gather(spans.origins, span), tf.gather(spans.blocks, span)
        slot = of_pattern % block + tf.gather(spans.offsets, span)
        sources = tf.gather(spans.sources, slot)
        of_block = tf.gather(tf.gather(spans.counts, span), sources)
        before = tf.gather(tf.gather(spans.before, span), sources)
        numbers = before + of_pattern // block * of_block + tf.gather(spans.ranks, slot)  # of the source's examples
        counts = tf.gather(np.array(self.rows_of, np.int64), sources)
        epochs, rows = numbers // counts, numbers % counts
        if self.is_shuffled:
            rows = permute(rows, counts, self.seed, epochs, sources)
        return rows + tf.gather(np.cumsum([0, *self.rows_of[:-1]], dtype=np.int64), sources), epochs

    def width(self, batch: tf.Tensor) -> None:
        """Returns None: rows are not padded."""

    def require_pass(self, limit: int) -> None:
        """Raises a ValueError if a pass would have rows of the next epoch, or not all of its own; as `Order`'s."""
        count = min(self.batches_per_epoch, limit or self.batches_per_epoch)
        held, per_epoch = self.examples_before(count), self.examples_per_epoch
        if held > per_epoch or (held < per_epoch and not (limit or self.limit)):
            raise ValueError(
                f"The dataset given to measure on has {per_epoch:,} examples, and its {count} batches "
                f"hold {held:,}, so not each one would count once: give each source of a mixture by itself, and "
                "batches of one size."
            )

    def examples_before(self, batch: int) -> int:
        """Returns the number of examples in all batches before one."""
        span = int(np.searchsorted(self._spans.firsts, batch, side="right")) - 1
        first, start, size = (int(values[span]) for values in self._spans[:3])
        return start + (batch - first) * size

    def batch_at(self, examples: int) -> int:
        """Returns the last batch that begins at some number of examples or before."""
        span = int(np.searchsorted(self._spans.starts, examples, side="right")) - 1
        first, start, size = (int(values[span]) for values in self._spans[:3])
        return first + (examples - start) // size

    def convert(self, position: Mapping[str, Any], facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a position in batches of other sizes, after as many examples, with a warning; as `Order.convert`."""
        saved_size = position.get("batch_size")

        def converted(num_batches: int) -> int:  # exact unless batches to skip are beyond a change of the size
            return self.batch_at(position["examples"] + (num_batches - position["batches"]) * saved_size)

        if (batches := converted(position["batches"])) == position["batches"]:
            return position
        log.warning(OTHER_SIZE, saved_size, facts.get("batch_size"), batches)
        return {**position, "batches": batches, "skipped": [converted(number) for number in position["skipped"]]}

    def seen(self, batch: int) -> dict[str, int]:
        """Returns the number of examples of each source in all batches before one, by the sources' names."""
        spans, examples = self._spans, self.examples_before(batch)
        span = int(np.searchsorted(spans.firsts, batch, side="right")) - 1
        counts = _count(tuple(spans.counts[span].tolist()), examples - int(spans.origins[span]))
        return dict(zip(self.names, (spans.before[span] + counts).tolist(), strict=True))

    def facts_at(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a position depends on, for JSON.

        Ratios that begin at the position or after it are no part of this: they may still change.

        Args:
            position: has the number of `batches` or, as it was saved, of `examples`.
        """
        batches = position["batches"]
        examples = position.get("examples", self.examples_before(batches))
        starts = [(self.examples_before(batch), slots) for batch, slots in self.ratios]
        slots = [span for span in starts if span[0] < examples] or starts[:1]
        digest = hashlib.sha256(repr((self.names, self.rows_of, slots)).encode()).hexdigest()[:12]
        start, latest = slots[-1]
        text = ", ".join(f"{n} {100 * s / sum(latest):.4g} %" for n, s in zip(self.names, latest, strict=True))
        text = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."
        return {
            "examples": examples,
            "batch_size": self.examples_before(batches + 1) - self.examples_before(batches),
            "mixture": f"{text} from example {start:,} on ({digest})",
        }

    @functools.cached_property
    def _spans(self) -> "_Spans":
        ratios, sizes, rows = dict(self.ratios), dict(self.batch_sizes), []
        start, offset, before, slots = 0, 0, np.zeros(len(self.names), np.int64), self.ratios[0][1]
        latest = origin = size = 0
        for first in sorted({*ratios, *sizes}):
            start, latest = start + (first - latest) * size, first
            size = sizes.get(first, size)
            if first and first in ratios:
                before, offset = before + _count(slots, start - origin), offset + sum(slots)
                origin, slots = start, ratios[first]
            rows.append((first, start, size, origin, sum(slots), offset, slots, before))
        columns = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        return _Spans(*columns, *np.concatenate([arrange(slots) for _, slots in self.ratios], axis=1))


class _Spans(NamedTuple):
    """Spans of the stream with the same ratios and batch size, one after the other: arrays of int64."""

    firsts: np.ndarray  # [p] the first batch
    starts: np.ndarray  # [p] the first example
    sizes: np.ndarray  # [p] examples of a batch
    origins: np.ndarray  # [p] the example from which on the ratios hold, with which a block begins
    blocks: np.ndarray  # [p] the slots of a block
    offsets: np.ndarray  # [p] of the block's slots in `sources` and `ranks`
    counts: np.ndarray  # [p, sources] the slots of each source in a block
    before: np.ndarray  # [p, sources] examples of each source before the origin
    sources: np.ndarray  # [slots of all ratios] the source of a slot
    ranks: np.ndarray  # [slots of all ratios] how many slots of the block before it have this source


@functools.cache
def arrange(slots: tuple[int, ...]) -> np.ndarray:
    """Returns the source of each slot of a block, and how many slots before it have this source, int64 [2, n].

    Sources alternate: among the first t slots, a source with the fraction p has more than pt - 1 and less than pt + 1.
    This is the quota method of Balinski and Young, "The Quota Method of Apportionment", 1975.

    Args:
        slots: of each source; n together.
    """
    counts, block = np.array(slots, np.int64), sum(slots)
    taken, arranged = np.zeros(len(slots), np.int64), np.empty([2, block], np.int64)
    with np.errstate(divide="ignore"):
        for slot in range(block):
            due = np.where(taken * block < counts * (slot + 1), (taken + 1) / counts, np.inf)
            source = np.argmin(due)
            arranged[:, slot] = source, taken[source]
            taken[source] += 1
    return arranged


def _count(slots: tuple[int, ...], examples: int) -> np.ndarray:
    """Returns the number of examples of each source among the first ones with these ratios, int64 [sources]."""
    blocks, rest = divmod(examples, sum(slots))
    return blocks * np.array(slots, np.int64) + np.bincount(arrange(slots)[0, :rest], minlength=len(slots))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LengthOrder(Order):
    """The order of the examples of one source, in batches of like lengths.

    Attributes:
        lengths: of the rows, int64 [num_rows].
        pad_to: the lengths to which batches are padded, ascending; empty: that of their longest row.
    """

    lengths: np.ndarray
    pad_to: tuple[int, ...] = ()

    @property
    def static_width(self) -> int | None:  # type: ignore[override]
        """The length to which all batches are padded; None: they differ."""
        return self.pad_to[0] if len(self.pad_to) == 1 else None

    def size(self, batch: tf.Tensor) -> tf.Tensor:
        """Returns the number of examples in a batch, int64 []."""
        return tf.shape(self.rows(batch)[0], tf.int64)[0]

    def rows(self, batch: tf.Tensor, first: tf.Tensor | int = 0, end: tf.Tensor | int | None = None) -> tuple:
        """Returns the numbers of the examples in a batch, and their epochs; as `Order.rows`."""
        rows = tf.ensure_shape(tf.numpy_function(self._rows, [batch], tf.int64), [None])[first:end]
        return rows, tf.fill(tf.shape(rows), batch // self.batches_per_epoch)

    def width(self, batch: tf.Tensor) -> tf.Tensor:
        """Returns the length to which the rows of a batch are padded, int64 []."""
        return tf.ensure_shape(tf.numpy_function(self._width, [batch], tf.int64), [])

    def facts_at(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a position depends on beside the rows and their order, for JSON.

        Where the rows do not fill the last batch, the order of the last window depends on whether it is left out. An
        older version did not save that: of its positions, the number of batches tells, unless there was a limit.
        """
        text = f"of {self.batch_size} examples in windows of {self.batch_size * _WINDOW_BATCHES:,} ({self._digest})"
        saved = position.get("batches_per_epoch")
        other = self.num_rows // self.batch_size + self.drop_remainder  # if the odd last batch were treated otherwise
        is_as_before = position.get("lengths") == text and (saved == self.batches_per_epoch or saved != other)
        if self.num_rows % self.batch_size and not is_as_before:
            text += f", drop_remainder={self.drop_remainder}"
        return {**super().facts_at(position), "lengths": text}

    def seen(self, batch: int) -> dict[str, int]:
        """Returns the number of examples in all batches before one, under the name "data"."""
        of_window = batch % self.batches_per_epoch % _WINDOW_BATCHES
        before = super().seen(batch - of_window)["data"]
        return {"data": before + sum(len(self._rows(number)) for number in range(batch - of_window, batch))}

    def _width(self, batch: np.ndarray) -> np.ndarray:
        longest = self.lengths[self._rows(batch)].max()
        return np.int64(next((width for width in self.pad_to if width >= longest), longest))

    @functools.cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self.lengths.tobytes()).hexdigest()[:12]

    @functools.cached_property
    def _rows(self) -> Callable[[int | np.ndarray], np.ndarray]:
        """Returns the rows of a batch, given its number; those of the latest windows are kept."""
        lock, make = threading.Lock(), functools.lru_cache(_KEPT_WINDOWS)(self._make_window)

        def rows(batch: int | np.ndarray) -> np.ndarray:
            epoch, of_epoch = divmod(int(batch), self.batches_per_epoch)
            window, of_window = divmod(of_epoch, _WINDOW_BATCHES)
            with lock:
                return make(epoch, window)[of_window]

        return rows

    def _make_window(self, epoch: int, number: int) -> list[np.ndarray]:
        most = self.num_rows - self.num_rows % self.batch_size if self.drop_remainder else self.num_rows
        start = number * _WINDOW_BATCHES * self.batch_size
        rows = np.arange(start, min(start + _WINDOW_BATCHES * self.batch_size, most))
        rows = self._shuffled(rows, self.num_rows, epoch, 0)
        rows = rows[np.argsort(self.lengths[rows], kind="stable")]
        batches = np.split(rows, range(self.batch_size, len(rows), self.batch_size))
        return [batches[i] for i in self._shuffled(np.arange(len(batches)), len(batches), epoch, number + 1)]

    def _shuffled(self, indices: np.ndarray, count: int, epoch: int, stream: int) -> np.ndarray:
        if not self.is_shuffled:
            return indices
        with tf.init_scope(), tf.device(HOST):
            return permute(tf.constant(indices), count, self.seed, tf.constant(epoch, tf.int64), stream).numpy()


def by_length(order: Order, lengths: np.ndarray, pad_to: Sequence[int]) -> LengthOrder:
    """Returns the order in batches of like lengths.

    Args:
        order: of the examples.
        lengths: of the rows, [num_rows].
        pad_to: the lengths to which batches are padded; empty: that of their longest row.

    Raises:
        ValueError: if the lengths are not those of the rows, or one is longer than all of `pad_to`.
    """
    if lengths.shape != (order.num_rows,) or lengths.dtype.kind not in "iu" or lengths.min() < 0:
        raise ValueError(
            f"lengths of {lengths.dtype.name} {list(lengths.shape)} were given for {order.num_rows:,} rows; give the "
            "length of each row, an integer of 0 or more."
        )
    given = [whole_number(width) for width in pad_to]
    widths = tuple(sorted(width for width in given if width is not None))
    if len(widths) < len(given):
        raise ValueError(f"pad_to={shown(pad_to)} was given; it takes lengths, whole numbers.")
    if widths and (longest := int(lengths.max())) > widths[-1]:
        raise ValueError(
            f"The longest row has {longest}, and pad_to ends at {widths[-1]}: add {longest} to pad_to, or cut rows."
        )
    return LengthOrder(**vars(order), lengths=lengths.astype(np.int64), pad_to=widths)
