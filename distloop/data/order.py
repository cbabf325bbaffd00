"""The order of examples by number, and positions in data: what a checkpoint records of one, and its conversion.

    order = Order(num_rows=60_000, batch_size=128, seed=0, is_shuffled=True)
    rows, epochs = order.rows(tf.constant(1_000_000, tf.int64))      # [b], [b]
    position = order.convert({"batches": 250, **facts_then}, facts)  # after as many examples

    facts = facts_of(num_batches=100, batch_size=32)            # of a tf.data.Dataset or batches that Python makes
    position = convert_batches({"batches": 250, **facts_then}, facts)

Nothing is remembered from batch to batch, so any batch costs the same. Data by number has an order that does not
depend on its batches, so its position is exact.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

import tensorflow as tf

from distloop.log import log

_SHUFFLE_KEY = 498247692  # the first part of a seed, which TensorFlow's own index_shuffle puts there
# Of the cipher. With the 4 of tf.random.experimental.index_shuffle, neighbours in the order correlate (0.11 over
# 200,000 of 10 million rows, where chance gives 0.002); from 8 on, chance alone is left. 16 take 0.5 us a row.
_ROUNDS = 16

# How data gets to a position: it SEEKS, by the number of a batch or a state of its own; it is read AGAIN from its
# beginning; or it can be read ONCE, so that it gets to later positions alone.
Access = enum.Enum("Access", "SEEKS AGAIN ONCE")

Position: TypeAlias = dict[str, Any]  # as JSON can hold it: "batches", "skipped", what they depend on, maybe a "state"

CONTENT = "content"  # the digest of arrays in memory, which may change while the order of their rows stays
_OTHER_VALUES = (
    "The arrays given hold other values than the checkpoint's (content %s, now %s): going on at the same position in "
    "their order, with the values of now; if that is not meant, give the arrays that the run began with, or begin "
    "another run in a new workdir."
)
OTHER_SIZE = "The checkpoint's batches had %d examples, these have %d: going on at batch %d, at the same examples."
_OTHER_BATCHES = (
    "The checkpoint's data had %s, the data given has %s: going on at batch %d in place of %d, %s. Examples that are "
    "shuffled after they are batched are then seen twice or not in this epoch: give batches as they were, or "
    "distloop.make_dataset, whose order does not depend on them."
)


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

    def require_pass(self, limit: int) -> None:
        """Raises a ValueError if a pass over up to `limit` batches, 0: all, would not have every row once."""

    def seen(self, batch: int) -> dict[str, int]:
        """Returns the number of examples in all batches before one, under the name "data"."""
        epoch, batch = divmod(batch, self.batches_per_epoch)
        of_epoch = min(self.batches_per_epoch * self.batch_size, self.num_rows)
        return {"data": epoch * of_epoch + batch * self.batch_size}

    def facts_at(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a position depends on beside the rows and their order, for JSON."""
        return {"batch_size": self.batch_size, "batches_per_epoch": self.batches_per_epoch}

    def convert(self, position: Mapping[str, Any], facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a position in other batches, or in epochs of another length, with a warning.

        The order of the examples does not depend on the batch size. No example is left out: the position is the last
        batch that begins at the saved position or before it, so up to `batch_size - 1` examples are read once more. A
        position behind the end of a shorter epoch is the start of the next one.

        Args:
            position: as it was saved, in this data.
            facts: of the data now, from `NumberedDataset.facts_at`.
        """
        saved_size, size = position.get("batch_size"), facts.get("batch_size")
        counts = position.get("batches_per_epoch"), facts.get("batches_per_epoch")
        if not size or not saved_size or (saved_size == size and counts[0] in (counts[1], None)):
            return position
        if counts[0] is None:  # of a version that did not save it, and had no limit
            counts = math.ceil(facts["num_rows"] / saved_size), math.ceil(facts["num_rows"] / size)
        found = _in_other_batches(position, (saved_size, size), counts)  # type: ignore[arg-type]
        if saved_size != size:
            log.warning(OTHER_SIZE, saved_size, size, found["batches"])
        else:
            log.warning(
                "The checkpoint's epochs had %d batches, these have %d: going on at batch %d, in the same epoch.",
                *(*counts, found["batches"]),
            )
        return found


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
    last = tf.cast(count, tf.int64) - 1
    return tf.raw_ops.RandomIndexShuffle(index=indices, seed=seeds, max_index=last, rounds=_ROUNDS)


def example_seeds(seed: int, rows: tf.Tensor, epochs: tf.Tensor) -> tf.Tensor:
    """Returns a seed for each example in each epoch, int64 [n, 2], for TensorFlow's stateless operations or NumPy's."""
    seeds = tf.fill(tf.shape(epochs), tf.constant(seed, tf.int64))
    return tf.stack([tf.bitwise.left_shift(seeds, 32) | epochs, rows], 1)


def facts_of(*, num_batches: float | None, batch_size: int | None, num_workers: int | None = None) -> dict[str, Any]:
    """Returns what a position in data without numbers depends on, as far as it is known, for JSON.

    Args:
        num_batches: of a pass; None: unknown; inf: endless.
        batch_size: of a whole batch.
        num_workers: of the run, if other workers have other batches.
    """
    is_finite = num_batches is not None and num_batches != math.inf
    facts = {"batch_size": batch_size, "batches_per_epoch": int(num_batches or 0) if is_finite else None}
    return facts if num_workers is None else {**facts, "workers": num_workers}


def convert_batches(position: Mapping[str, Any], facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a position in batches of another size, or in epochs of another length; a warning names both.

    The position is after as many examples of the same epoch, rounded down to a batch, so no example is left out if the
    order of the examples does not depend on the batches.

    Args:
        position: as `Source.position` returned it; of an older version, without facts, it is returned as it is.
        facts: of the data now, from `facts_of`.

    Raises:
        ValueError: if the position is one in data by number.
    """
    if not position["batches"]:
        return position
    if "order" in position:
        raise _is_other_data("the checkpoint is of data by number, such as arrays, and the given data is not")
    if position.get("workers") != facts.get("workers"):
        return position

    def then_and_now(name: str) -> Any:
        pair = position.get(name), facts.get(name)
        return pair if all(pair) else None

    sizes, counts = then_and_now("batch_size"), then_and_now("batches_per_epoch")
    is_one_size = sizes is None or sizes[0] == sizes[1]
    if is_one_size and (counts is None or counts[0] == counts[1]):
        return position
    converted = _in_other_batches(position, sizes or (1, 1), counts)

    def shown(side: int) -> str:
        words = [f"batches of {sizes[side]} examples"] if sizes else []
        return " and ".join([*words, *([f"{counts[side]} batches an epoch"] if counts else [])])

    where = "in the same epoch" if is_one_size else "after as many examples"
    log.warning(_OTHER_BATCHES, shown(0), shown(1), converted["batches"], position["batches"], where)
    return converted


def _in_other_batches(
    position: Mapping[str, Any], sizes: tuple[int, int], counts: tuple[int, int] | None
) -> dict[str, Any]:
    """Returns a position after as many examples, rounded down; behind the end of a shorter epoch, the next one's start.

    Args:
        position: as it was saved.
        sizes: the examples of a batch, then and now.
        counts: the batches of an epoch, then and now; None: unknown.
    """

    def converted(num_batches: int) -> tuple[int, int]:
        epoch, batch = divmod(num_batches, counts[0]) if counts else (0, num_batches)
        first, most = (epoch * counts[1], counts[1]) if counts else (0, math.inf)
        return first, int(min(batch * sizes[0] // sizes[1], most))

    skipped = [(first, batch) for first, batch in map(converted, position["skipped"])]
    kept = [first + batch for first, batch in skipped if not counts or batch < counts[1]]  # others are in no batch
    others = {name: value for name, value in position.items() if name != "state"}  # which counts batches of then
    return {**others, "batches": sum(converted(position["batches"])), "skipped": kept}


def _is_other_data(change: str) -> ValueError:
    """Returns the error about a position that does not exist in the given data."""
    return ValueError(
        f"The run cannot go on at its position in the data, as {change}: give the data and the seed that it began "
        "with, or begin another run in a new workdir (from these weights, with init_from)."
    )


def require_same_data(
    position: Mapping[str, Any], facts: Mapping[str, Any], describe_change: Callable[[str], str] | None = None
) -> None:
    """Checks that a position is one in this data by number, in this order; warns of arrays that have other values.

    Args:
        position: as it was saved.
        facts: of the data now, from `NumberedDataset.facts_at`.
        describe_change: returns how the data differs from that of a fingerprint, as a part of a sentence.

    Raises:
        ValueError: if the position is one in other data, or in another order of it.
    """
    words = {
        "mixture": "the fractions %s",
        "lengths": "batches by length, %s",
        "num_rows": "%s rows",
        "seed": "seed=%s",
        "order": "version %s of the order",
        "fingerprint": "content %s",
    }
    name = next((name for name in words if position.get(name) != facts.get(name)), "")
    if not name:
        if CONTENT in position and position[CONTENT] != facts.get(CONTENT, position[CONTENT]):
            log.warning(_OTHER_VALUES, position[CONTENT], facts[CONTENT])
        return
    if "order" not in position:
        raise _is_other_data("the checkpoint is of other data, such as a tf.data.Dataset, or arrays in an older order")
    if name == "fingerprint" and position.get(name) and describe_change is not None:
        raise _is_other_data(describe_change(position[name]))
    before, after = (f"no {name}" if (v := side.get(name)) is None else words[name] % v for side in (position, facts))
    raise _is_other_data(f"the checkpoint's data had {before}, and the data given has {after}")
