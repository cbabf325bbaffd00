"""Opening data: recognizes the kind of a user's data on a worker, and calls functions that make data.

    opened = open_data(data, num_workers=2, worker=0)
    opened.dataset, opened.feed

It does not know the position in the data.
"""

import functools
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from distloop.data.arrays import are_arrays, as_dataset
from distloop.data.feeds import Feed, make_feed
from distloop.data.numbered import NumberedDataset
from distloop.data.order import Access
from distloop.data.shards import batch_size, pack_element, static_batch_size
from distloop.errors import require
from distloop.log import log
from distloop.threads import Gate, once

_do_not_convert = tf.autograph.experimental.do_not_convert
_EMPTY_BATCH = (
    "A batch has no rows, and empty_batches=refuse was given: let the dataset give none, as by Dataset.filter, or give "
    "empty_batches=ignore, which leaves them out."
)
DROPS_EMPTY = ("ignore", "warn")  # the values of `Config.empty_batches` by which batches without rows are left out
EACH_AN_ARRAY = "arrays or lists of numbers, [N, ...], alone or in a dict, tuple or list"


def worker_context(num_workers: int, worker: int) -> tf.distribute.InputContext:
    """Returns what an input function is given about its worker, one of several.

    One dataset serves all replicas of a worker, so each worker counts as one replica: what a function for
    `distribute_datasets_from_function` computes for a replica, by `get_per_replica_batch_size` or by hand, is then the
    worker's part of a global batch.
    """
    return tf.distribute.InputContext(num_workers, worker, num_replicas_in_sync=num_workers)


class OpenedData(NamedTuple):
    """A user's data, opened by a worker."""

    dataset: Any  # of one pass
    feed: Feed | NumberedDataset | None  # that gives the dataset, unless tf.data does
    takes_context: bool  # whether it was made by a function of a `worker_context`
    begins_anywhere: bool  # whether the feed gives the dataset from any batch on

    @property
    def gate(self) -> Gate:
        """At which threads wait that read the data; of other data than a feed's, none does."""
        return self.feed.gate if isinstance(self.feed, Feed) else Gate()


def open_data(
    data: Any,
    num_workers: int,
    worker: int,
    *,
    batch_size: int = 1,
    shuffle_seed: int | None = None,
    map_batch: Callable[..., Any] | None = None,
    limit: int = 0,
    is_cached: bool = False,
    empty_batches: str = "step",
) -> OpenedData:
    """Opens arrays, a dataset, or batches that Python makes, which a function may make for a worker.

    Args:
        data: what the user gave.
        num_workers: of the run.
        worker: the index of this one.
        batch_size: of arrays, the examples in a global batch.
        shuffle_seed: of the order of arrays and of a `PyDataset`'s batches, another one each epoch; None: as they are.
        map_batch: changes each row of a batch by itself; called as by `Dataset.map`; None: nothing does.
        limit: the most batches in a pass; 0: all.
        is_cached: whether each pass repeats the batches of the first one.
        empty_batches: as `Config.empty_batches`; batches without rows that are left out do not count, but for the
            `limit` of a `PyDataset`.

    Raises:
        ValueError: if it is none of these.
    """
    data = as_dataset(data, batch_size, shuffle_seed)
    takes_context, make = False, None
    if callable(data) and not isinstance(data, (tf.data.Dataset, keras.utils.PyDataset)):
        takes_context = _takes_argument(data)
        make = functools.partial(data, worker_context(num_workers, worker)) if takes_context else data
        data = make()
    if isinstance(data, tf.distribute.DistributedDataset):
        raise ValueError(
            "The data given is a DistributedDataset, which TensorFlow has split: give the dataset before it was "
            "distributed, or a function of a tf.distribute.InputContext."
        )
    map_batch = map_batch and _do_not_convert(map_batch)
    if isinstance(data, NumberedDataset) and not (data.mixes_rows and empty_batches != "step"):
        data = data if map_batch is None else data.map_rows(map_batch)
        data = data.take(limit) if limit else data
        data = data.first_pass_again() if is_cached else data
        return OpenedData(data, data.fresh(), takes_context, begins_anywhere=True)
    counts_empty = empty_batches not in DROPS_EMPTY
    feed = make_feed(data, shuffle_seed=shuffle_seed, make_again=make, limit=limit, counts_empty=counts_empty)
    limit = 0 if isinstance(data, keras.utils.PyDataset) else limit
    if feed is not None:
        feed.map_batch = map_batch
        dataset = feed.one_pass(is_endless_if_unknown=takes_context and num_workers > 1)  # shards may differ in length
    elif isinstance(data, tf.data.Dataset):
        dataset = data if map_batch is None else data.map(map_batch)
    else:
        raise ValueError(
            f"The data given is a {type(data).__name__}{_odd_entry(data)}; distloop takes a tf.data.Dataset of global "
            f"batches, a function of tf.distribute.InputContext that returns one, {EACH_AN_ARRAY}, or batches from a "
            "PyDataset, a generator, a Grain dataset or a DataLoader: give a list of batches as lambda: iter(batches), "
            "and a list of examples to distloop.make_dataset(examples, batch_size)."
        )
    dataset = with_empty_batches(dataset, empty_batches)
    dataset = dataset.take(limit) if limit else dataset
    dataset = dataset.cache() if is_cached else dataset
    begins_anywhere = feed is not None and not (is_cached or (limit and feed.access is Access.ONCE))
    return OpenedData(dataset, feed, takes_context, begins_anywhere)


def with_empty_batches(dataset: tf.data.Dataset, treated: str) -> tf.data.Dataset:
    """Returns a dataset whose batches without rows are treated as `Config.empty_batches` says."""
    spec = dataset.element_spec
    ranks = {getattr(entry, "shape", tf.TensorShape([])).rank for entry in tf.nest.flatten(spec)}
    if treated == "step" or 0 in ranks or static_batch_size(spec):  # `inspect` refuses entries without rows
        return dataset

    def has_rows(*batch: Any) -> tf.Tensor:
        return tf.reduce_max([batch_size(entry) for entry in tf.nest.flatten(batch)]) > 0

    def has_rows_or_warns(*batch: Any) -> tf.Tensor:
        return tf.cond(has_rows(*batch), lambda: True, lambda: tf.numpy_function(_warn_of_empty, [], tf.bool))

    def refuse(*batch: Any) -> Any:
        require(has_rows(*batch), _EMPTY_BATCH)
        return pack_element(batch, spec)

    if treated == "refuse":
        return dataset.map(_do_not_convert(refuse))
    kept = dataset.filter(_do_not_convert(has_rows_or_warns if treated == "warn" else has_rows))
    # Dataset.repeat declares it endless; other than assert_cardinality, it does not fail where there is no batch.
    return kept.repeat() if dataset.cardinality() == tf.data.INFINITE_CARDINALITY else kept


@once
def _warn_of_empty() -> bool:
    log.warning("A batch without rows is left out, as all others will be: empty_batches=warn was given.")
    return False


def _odd_entry(data: Any) -> str:
    """Returns which entry of a dict is no array, for an error's message; empty: it is no dict with arrays, too."""
    entries = data if isinstance(data, Mapping) else {}
    odd = [name for name, value in entries.items() if not are_arrays(value)]
    is_mixed = 0 < len(odd) < len(entries)
    return f" that holds a {type(entries[odd[0]]).__name__} under {odd[0]!r}" if is_mixed else ""


def open_batches(data: Any, batch_size: int, *, again: bool = False) -> tf.data.Dataset:
    """Returns any data as a dataset of one pass over its global batches, all of which this worker reads.

    Args:
        data: as for `Trainer.fit`.
        batch_size: of arrays.
        again: whether it is read more than once.

    Raises:
        ValueError: if the data is of no kind that `fit` takes, or it can be read only once.
    """
    opened = open_data(data, 1, 0, batch_size=batch_size)
    if again and isinstance(opened.feed, Feed):
        opened.feed.require_restart()
    return opened.dataset


def _takes_argument(fn: Callable[..., Any]) -> bool:
    """Returns whether a function may be called with one argument."""
    try:
        signature(fn).bind(None)
    except TypeError:
        return False
    except ValueError:  # Python does not know the signatures of some functions of C
        return True
    return True
