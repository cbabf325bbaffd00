"""`make_dataset`: datasets of global batches from arrays, sources by number or datasets of examples.

    train = make_dataset({"x": x, "label": labels}, 64, shuffle=True, seed=0)

`map_fn` is applied to the rows of a batch inside tf.data where TensorFlow can trace it, else to single rows in Python.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.data.examples import pad_row
from distloop.data.info import cardinality
from distloop.data.numbered import NumberedDataset, seeds_of_their_own
from distloop.data.order import Order
from distloop.data.rows import ArrayRows, SourceRows, is_arrays
from distloop.errors import first_line, require_bool, require_call
from distloop.graph_functions import DRAWS_FROM_KERNEL, graph_function, with_called
from distloop.installed import import_part
from distloop.log import log
from distloop.settings.durations import require_integer

_PARALLEL_ROWS = 16

ExampleMap = Callable[[Any, Any], Any]


def make_dataset(
    source: Any,
    batch_size: int | Mapping[int, int],
    *,
    shuffle: bool | int = False,
    seed: int = 0,
    map_fn: ExampleMap | None = None,
    cache: bool = False,
    drop_remainder: bool = False,
    lengths: Sequence[int] | np.ndarray | None = None,
    pad_to: Sequence[int] = (),
    processes: int = 0,
) -> tf.data.Dataset:
    """Returns a dataset of global batches, from arrays, from a source by number, or from a dataset of examples.

    Examples of arrays and of sources are read by number. Their order is a function of seed, epoch and row number, so a
    run resumes at its position at once, however far it has come. A dataset of examples is read again up to there.

    Args:
        source: arrays `[N, ...]` in any nested structure, of which those on disk (NumPy's memmap, h5py's datasets,
            arrays of zarr) are read row by row; anything with `__len__` and `__getitem__` that several threads may
            read, such as a PyTorch dataset, a Grain `MapDataset`, a Hugging Face dataset or a list; a `Mixture` of
            these; or an unbatched `tf.data.Dataset`.
        batch_size: examples of a global batch. To change it in the course of training: a dict from the number of a
            batch to the size from this batch on, such as `{0: 64, 10_000: 128}`.
        shuffle: whether each epoch has another order. For a `tf.data.Dataset`, a number shuffles within a buffer of
            that many examples; all others are always shuffled whole.
        seed: of the order and of `map_fn`, from 0 up to 2**31.
        map_fn: a function of an example and a seed, int64 [2], that returns the example to train on. The seed
            belongs to row and epoch. A function of TensorFlow's operations runs in parallel inside tf.data; one that
            cannot be traced runs in Python, in threads or in processes.
        cache: whether the examples of a `tf.data.Dataset` stay in memory after the first pass.
        drop_remainder: whether to leave out the odd last batch; training on it is exact, so there is no need.
        lengths: of the examples of a source, [N], to batch those of like lengths. Axes whose size differs from example
            to example are padded with zeros to the longest of their batch.
        pad_to: lengths to which batches are padded instead, each to the next one, so that steps see few shapes.
        processes: worker processes that read the rows of a source, and apply a `map_fn` that runs in Python; 0: threads
            do. The batches are the same. Each process has a copy of the source, which is pickled.

    Returns:
        The dataset: shuffled, mapped, batched, prefetched.

    Raises:
        ValueError: if a size or the seed is no integer, arrays differ in length, the source has no rows or is none of
            these, `map_fn` draws random numbers that do not come from its seed, `lengths` do not fit the source,
            `pad_to` is given without `lengths`, `shuffle=True` is given with a dataset of unknown length, or
            `processes` is given with a source or `map_fn` that cannot be pickled, or where Python reads no rows.
    """
    sizes = by_batch(batch_size, "batch_size") if isinstance(batch_size, Mapping) else {0: batch_size}
    for size in sizes.values():
        require_integer("make_dataset", 1, batch_size=size)
    require_integer("make_dataset", 0, seed=seed, processes=processes)
    require_bool("make_dataset", cache=cache, drop_remainder=drop_remainder)
    if not (is_bool := isinstance(shuffle, (bool, np.bool_))):
        require_integer("make_dataset", 0, "True, False or ", shuffle=shuffle)
    if seed >= 2**31:
        raise ValueError(f"seed={seed} was given; a seed of the order is from 0 up to 2**31 - 1.")
    shuffle = bool(shuffle) if is_bool else int(shuffle)
    if lengths is None and np.size(pad_to):
        raise ValueError(f"pad_to={pad_to} was given without lengths, the size of each example: give lengths, too.")
    sizes, seed = {batch: int(size) for batch, size in sizes.items()}, int(seed)  # which JSON can hold
    if isinstance(source, tf.data.Dataset):
        if map_fn is not None or len(sizes) > 1 or lengths is not None or processes:
            raise ValueError(
                "map_fn, lengths, processes or a batch_size that changes were given with a tf.data.Dataset, whose "
                "examples have no number: use Dataset.map, or give arrays, or a source by number."
            )
        return _batches_of_examples(source, sizes[0], shuffle, seed, cache, drop_remainder)
    if cache:
        raise ValueError("cache=True is for a tf.data.Dataset; rows by number are read from their source each time.")
    row_lengths = None if lengths is None else np.asarray(lengths)
    reader, apply = _make_reader(source, map_fn, row_lengths)
    if processes:
        reader.use_processes(int(processes))
    _require_one_shape(reader.spec if apply is None else apply.spec, row_lengths, is_mapped=apply is not None)
    order: Any = Order(
        num_rows=len(reader), batch_size=sizes[0], seed=seed, is_shuffled=bool(shuffle), drop_remainder=drop_remainder
    )
    if hasattr(source, "make_order"):  # which a Mixture has
        order = source.make_order(order, sizes, row_lengths)
    elif len(sizes) > 1 or row_lengths is not None:
        mixtures = import_part("mixtures.mixtures", "lengths or a batch_size that changes")
        order = mixtures.make_order(order, sizes, row_lengths, pad_to)
    if not order.batches_per_epoch:
        raise ValueError(
            f"The {order.num_rows} rows given are no whole batch of {batch_size}: set drop_remainder=False."
        )
    return NumberedDataset(reader, order, apply)


def by_batch(values: Mapping[int, Any], what: str) -> dict[int, Any]:
    """Returns values by the batch from which on they hold, in the order of the batches.

    Raises:
        ValueError: if one is no number of a batch, or the first batch is not 0.
    """
    for batch in values:
        require_integer(f"The dict of {what}", 0, batch=batch)
    if sorted(values)[:1] != [0]:
        raise ValueError(
            f"{what} from batch {', '.join(map(str, sorted(values))) or 'none'} on were given; the first batch is 0."
        )
    return {int(batch): values[batch] for batch in sorted(values)}


def _require_one_shape(spec: Any, lengths: np.ndarray | None, *, is_mapped: bool) -> None:
    """Raises a ValueError unless rows have one shape, or lengths by which they are padded."""
    uneven = [entry for entry in tf.nest.flatten(spec) if not entry.shape.is_fully_defined()]
    if uneven and lengths is None:
        raise ValueError(
            f"{'map_fn returns' if is_mapped else 'Examples have'} an entry of {uneven[0].dtype.name} "
            f"{uneven[0].shape}, and the rows of a batch need one shape: give a map_fn that pads or cuts the entry and "
            "returns tf.ensure_shape(entry, its_shape), or lengths, by which rows of like lengths are padded and "
            "stacked."
        )
    if lengths is not None and not uneven:
        raise ValueError("lengths were given, but all examples have the same shape: leave lengths out.")


def _make_reader(
    source: Any, map_fn: ExampleMap | None, lengths: np.ndarray | None
) -> "tuple[ArrayRows | SourceRows, TracedMap | None]":
    """Returns the reader of a source, and what applies `map_fn` to a batch of it, if TensorFlow does."""
    is_of_rows = lengths is not None and hasattr(source, "__len__") and lengths.shape == (len(source),)
    is_of_rows = is_of_rows and lengths is not None and lengths.dtype.kind in "iu"
    extremes = [int(np.argmin(lengths)), int(np.argmax(lengths))] if lengths is not None and is_of_rows else []
    is_columns = is_arrays(source) and not (isinstance(source, list) and is_of_rows)
    arrays = source.as_arrays() if hasattr(source, "as_arrays") else source if is_columns else None
    if arrays is not None:
        reader: ArrayRows | SourceRows = ArrayRows(arrays)
    elif not hasattr(source, "__getitem__") or not hasattr(source, "__len__") or isinstance(source, (str, bytes)):
        raise ValueError(
            f"The source given is a {type(source).__name__}; make_dataset takes arrays, anything with __len__ and "
            "__getitem__, or a tf.data.Dataset of examples: give an iterator or a loader of batches to fit itself."
        )
    else:
        reader = SourceRows(source, rows_to_inspect=extremes)
    if map_fn is None:
        return reader, None
    require_call(map_fn, "map_fn", "example", "seed")
    try:
        return reader, trace(map_fn, reader.spec)
    except NotTraceable as error:
        log.warning("map_fn runs in Python, as TensorFlow cannot trace it (%s).", error)
        return SourceRows(source if isinstance(reader, SourceRows) else reader, map_fn, extremes), None


def _batches_of_examples(
    examples: tf.data.Dataset, batch_size: int, shuffle: bool | int, seed: int, cache: bool, drop_remainder: bool
) -> tf.data.Dataset:
    dataset, count = examples.cache() if cache else examples, cardinality(examples)
    if shuffle is True and (count is None or count == np.inf):
        raise ValueError(
            "shuffle=True was given with a dataset of unknown length; give the number of examples to hold and "
            "draw from, such as shuffle=10_000."
        )
    if shuffle:
        with seeds_of_their_own():
            dataset = dataset.shuffle(int(count) if shuffle is True else shuffle, seed=seed)  # type: ignore[arg-type]
    return dataset.batch(batch_size, drop_remainder=drop_remainder).prefetch(tf.data.AUTOTUNE)


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
        raise NotTraceable(first_line(error)) from error
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
