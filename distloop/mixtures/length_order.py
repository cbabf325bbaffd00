"""The order of examples in batches of like lengths, as a function of a batch's number.

    order = LengthOrder(num_rows=60_000, batch_size=64, lengths=lengths, seed=0, is_shuffled=True)
    rows, epochs = order.rows(tf.constant(1_000_000, tf.int64))      # [b], [b]
    width = order.width(tf.constant(1_000_000, tf.int64))            # []

The order of `Order` is cut into windows of 100 batches. The rows of a window are sorted by length and cut into batches,
whose order is then shuffled. It does not know what an example is.
"""

import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.data.order import Order, permute
from distloop.distributed.devices import HOST
from distloop.durations import shown, whole_number

_WINDOW_BATCHES = 100
_KEPT_WINDOWS = 4  # several threads read batches near each other


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
        rows = tf.numpy_function(self._rows, [batch], tf.int64)
        rows.set_shape([None])
        rows = rows[first:] if end is None else rows[first:end]
        return rows, tf.fill(tf.shape(rows), self._epoch(batch))

    def width(self, batch: tf.Tensor) -> tf.Tensor:
        """Returns the length to which the rows of a batch are padded, int64 []."""
        width = tf.numpy_function(self._width, [batch], tf.int64)
        width.set_shape([])
        return width

    def facts_at(self, place: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a place depends on beside the rows and their order, for JSON."""
        rows = f"of {self.batch_size} examples in windows of {self.batch_size * _WINDOW_BATCHES:,}"
        return {**super().facts_at(place), "lengths": f"{rows} ({self._digest})"}

    def seen(self, batch: int) -> dict[str, int]:
        """Returns the number of examples in all batches before one, under the name "data"."""
        window, place = divmod(batch % self.batches_per_epoch, _WINDOW_BATCHES)
        before = super().seen(batch - place)["data"]
        is_whole = (window + 1) * _WINDOW_BATCHES * self.batch_size <= self.num_rows
        if is_whole or not place:
            return {"data": before + place * self.batch_size}
        return {"data": before + sum(map(len, self._window(int(self._epoch(batch)), window)[:place]))}

    def _epoch(self, batch: Any) -> Any:
        return batch * 0 if self.is_one_epoch else batch // self.batches_per_epoch

    def _width(self, batch: np.ndarray) -> np.ndarray:
        longest = self.lengths[self._rows(batch)].max()
        return np.int64(next((width for width in self.pad_to if width >= longest), longest))

    def _rows(self, batch: np.ndarray) -> np.ndarray:
        window, place = divmod(int(batch) % self.batches_per_epoch, _WINDOW_BATCHES)
        return self._window(int(self._epoch(batch)), window)[place]

    @functools.cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self.lengths.tobytes()).hexdigest()[:12]

    @functools.cached_property
    def _window(self) -> Callable[[int, int], list[np.ndarray]]:
        """Returns the rows of each batch of a window of an epoch; those of the latest windows are kept."""
        lock, make = threading.Lock(), functools.lru_cache(_KEPT_WINDOWS)(self._make_window)

        def window(epoch: int, number: int) -> list[np.ndarray]:
            with lock:
                return make(epoch, number)

        return window

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
    fields = {field.name: getattr(order, field.name) for field in dataclasses.fields(order)}
    return LengthOrder(**fields, lengths=lengths.astype(np.int64), pad_to=widths)
