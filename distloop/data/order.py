"""The examples and the epochs of a batch, as a function of the batch's number.

    order = Order(num_rows=60_000, batch_size=128, seed=0, is_shuffled=True)
    rows, epochs = order.rows(tf.constant(1_000_000, tf.int64))      # [b], [b]

Nothing is remembered from batch to batch, so any batch costs the same.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

_SHUFFLE_KEY = 498247692  # the first part of a seed, which TensorFlow's own index_shuffle puts there
# Of the cipher. With the 4 of tf.random.experimental.index_shuffle, neighbours in the order correlate (0.11 over
# 200,000 of 10 million rows, where chance gives 0.002); from 8 on, chance alone is left. 16 take 0.5 us a row.
_ROUNDS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """The order of the examples of one source, over all epochs.

    Attributes:
        num_rows: of the source.
        batch_size: examples of a batch; the last one of an epoch may have fewer.
        seed: of the permutations, 0 up to 2**31.
        is_shuffled: whether each epoch has a permutation of its own; else the order is that of the source.
        drop_remainder: whether the odd last batch of each epoch is left out.
        limit: the most batches of an epoch; 0: all.
        is_stationary: whether all epochs are alike but for their order.
        static_width: the length to which all batches are padded; None: they are not, or differ.
    """

    is_stationary: ClassVar[bool] = True
    static_width: ClassVar[int | None] = None

    num_rows: int
    batch_size: int
    seed: int = 0
    is_shuffled: bool = False
    drop_remainder: bool = False
    limit: int = 0

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches of an epoch."""
        count = self.num_rows // self.batch_size if self.drop_remainder else math.ceil(self.num_rows / self.batch_size)
        return min(count, self.limit) if self.limit else count

    @property
    def largest_batch(self) -> int:
        """The examples of the largest batch."""
        return min(self.batch_size, self.num_rows)

    @property
    def static_size(self) -> int | None:
        """The examples of each batch; None: the last one of an epoch may have fewer."""
        return self.batch_size if self.drop_remainder else None

    def size(self, batch: tf.Tensor) -> tf.Tensor:
        """Returns the number of examples in a batch, int64 []."""
        start = (batch % self.batches_per_epoch) * self.batch_size
        return tf.minimum(start + self.batch_size, self.num_rows) - start

    def rows(self, batch: tf.Tensor, first: tf.Tensor | int = 0, end: tf.Tensor | int | None = None) -> tuple:
        """Returns the numbers of the examples in a batch, and their epochs.

        Args:
            batch: its number from 0, counted over all epochs, int64 [].
            first: the first example of the batch to return, counted from 0.
            end: the one after the last; None: the end of the batch.

        Returns:
            Two tensors of int64, [b].
        """
        epoch, start = batch // self.batches_per_epoch, (batch % self.batches_per_epoch) * self.batch_size
        rows = tf.range(start + first, tf.minimum(start + (self.batch_size if end is None else end), self.num_rows))
        epochs = tf.fill(tf.shape(rows), epoch)
        return (permute(rows, self.num_rows, self.seed, epoch) if self.is_shuffled else rows), epochs

    def width(self, batch: tf.Tensor) -> tf.Tensor | None:
        """Returns the length to which the rows of a batch are padded, int64 []; None: they are not."""
        return None

    def seen(self, batch: int) -> dict[str, int]:
        """Returns the number of examples in all batches before one, under the name "data"."""
        epoch, batch = divmod(batch, self.batches_per_epoch)
        of_epoch = min(self.batches_per_epoch * self.batch_size, self.num_rows)
        return {"data": epoch * of_epoch + batch * self.batch_size}

    def facts_at(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a position depends on beside the rows and their order, for JSON."""
        return {"batch_size": self.batch_size, "batches_per_epoch": self.batches_per_epoch}


def permute(
    indices: tf.Tensor, count: tf.Tensor | int, seed: int, epoch: tf.Tensor, source: tf.Tensor | int = 0
) -> tf.Tensor:
    """Returns where some indices are in permutations that a seed and an epoch choose, int64 [n].

    The permutation is the block cipher of `tf.random.experimental.index_shuffle`, with more rounds.

    Args:
        indices: from 0, int64 [n].
        count: of what is permuted, for each index or for all.
        seed: of all permutations.
        epoch: for each index or for all, int64.
        source: a number that chooses the permutations too, as `epoch`.
    """
    seeds = tf.stack([tf.ones_like(epoch) * _SHUFFLE_KEY + source, tf.ones_like(epoch) * seed, epoch], axis=-1)
    return tf.raw_ops.RandomIndexShuffle(
        index=indices, seed=seeds, max_index=tf.cast(count, tf.int64) - 1, rounds=_ROUNDS
    )


def example_seeds(seed: int, rows: tf.Tensor, epochs: tf.Tensor) -> tf.Tensor:
    """Returns a seed for each example in each epoch, int64 [n, 2], for TensorFlow's stateless operations or NumPy's."""
    return tf.stack(
        [tf.bitwise.left_shift(tf.fill(tf.shape(epochs), tf.constant(seed, tf.int64)), 32) | epochs, rows], 1
    )
