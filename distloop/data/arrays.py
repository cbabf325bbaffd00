"""Arrays as data: NumPy arrays, tensors, lists of numbers, data frames, and datasets of arrays.

    arrays = as_arrays((x, labels.tolist()))        # a structure of NumPy arrays; None: it is other data
    dataset = as_dataset({"x": x, "label": labels}, 64, shuffle_seed=0)

It does not know replicas or positions in the data.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from distloop.data.columns import is_on_disk
from distloop.data.make_dataset import make_dataset
from distloop.data.python_rows import as_example, is_rectangular

Arrays: TypeAlias = np.ndarray | Mapping[str, Any] | Sequence[Any]  # one or a structure of them, [N, ...]


class _OtherDataError(Exception):
    """Data that is no array, or has an entry that is none."""


def with_labels(x: Any, y: Any = None, sample_weight: Any = None) -> Any:
    """Returns data in the form of one argument: `x`, `(x, y)` or `(x, y, sample_weight)`.

    Raises:
        ValueError: if labels come with data that has labels of its own, or weights without labels.
    """
    if y is None and sample_weight is None:
        return x
    if y is None:
        raise ValueError("sample_weight was given without y: give the labels, too, as in fit(x, y, sample_weight=w).")
    if not are_arrays(x):
        raise ValueError(
            f"Labels were given beside a {type(x).__name__}, whose batches hold labels of their own: give it alone, or "
            "arrays, as in fit(x, y)."
        )
    rest = {"labels": y} if sample_weight is None else {"labels": y, "sample weights": sample_weight}
    for name, value in rest.items():
        if not are_arrays(value):
            raise ValueError(
                f"A {type(value).__name__} was given as the {name} of arrays; {name} are arrays, [N, ...], too: make "
                "one of them with np.asarray."
            )
    return (x, *rest.values())


def are_arrays(data: Any) -> bool:
    """Returns whether data is arrays `[N, ...]`, alone or in a nested structure."""
    return _structure_of(lambda array: True, data) is not None


def are_same_arrays(data: Any, other: Any) -> bool:
    """Returns whether two structures are alike and hold the same arrays, whatever is in them."""
    structure = _structure_of(id, data)
    return structure is not None and bool(structure == _structure_of(id, other))


def as_arrays(data: Any) -> Any:
    """Returns a structure of arrays with NumPy arrays, or arrays on disk, as leaves; None: it is other data.

    Args:
        data: an array of NumPy, TensorFlow, PyTorch, JAX or pandas, an array on disk, or a list of numbers or texts, or
            of such lists of one length; or a dict, tuple, or list of these. Lists of arrays become tuples.

    Raises:
        ValueError: if an entry is a ragged or sparse tensor.
    """
    return _structure_of(_as_array, data)


def as_dataset(data: Any, batch_size: int, shuffle_seed: int | None = None) -> Any:
    """Returns arrays as a dataset of global batches; any other data as it is.

    Args:
        data: as for `Trainer.fit`; a list of arrays gives batches that are tuples.
        batch_size: examples of a global batch; the last one of an epoch may have fewer.
        shuffle_seed: of the order, which is another one each epoch; None: the order of the arrays.

    Raises:
        ValueError: if arrays differ in length.
    """
    if (arrays := as_arrays(data)) is None:
        return data
    return make_dataset(arrays, batch_size, shuffle=shuffle_seed is not None, seed=(shuffle_seed or 0) % 2**31)


def _structure_of(fn: Callable[[Any], Any], data: Any) -> Any:
    """Returns a structure with a function applied to its arrays and lists of numbers; None: it is other data."""
    try:
        return _map_arrays(fn, data)
    except _OtherDataError:
        return None


def _map_arrays(fn: Callable[[Any], Any], data: Any, is_in_list: bool = False) -> Any:
    if _is_array(data):
        return fn(data)
    if not isinstance(data, list if is_in_list else (Mapping, tuple, list)) or not data:
        raise _OtherDataError  # tuples and dicts in a list are batches, or examples
    if isinstance(data, Mapping):
        return {name: _map_arrays(fn, entry) for name, entry in data.items()}
    entries = [_map_arrays(fn, entry, isinstance(data, list)) for entry in data]
    return type(data)(*entries) if hasattr(data, "_fields") else tuple(entries)


def _is_array(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and is_rectangular(value)
    is_tensor = tf.is_tensor(value) and not tf.is_symbolic_tensor(value)
    has_rows = hasattr(value, "shape") and hasattr(value, "__array__")  # JAX, PyTorch, pandas
    return is_tensor or has_rows or isinstance(value, tf.Variable) or _is_sparse(value) or is_on_disk(value)


def _is_sparse(value: Any) -> bool:
    return isinstance(value, tf.SparseTensor) or (hasattr(value, "nnz") and hasattr(value, "toarray"))


def _as_array(array: Any) -> Any:
    """Returns a NumPy array, or an array on disk as it is."""
    if isinstance(array, tf.RaggedTensor) or _is_sparse(array):
        raise ValueError(
            f"A {type(array).__name__} was given as an array; distloop takes dense ones, [N, ...]: make it dense "
            "(to_tensor, toarray), or batches of it with tf.data.Dataset.from_tensor_slices(...).batch(size)."
        )
    if isinstance(array, np.ndarray) or (is_on_disk(array) and not hasattr(array, "iloc")):
        is_of_objects = array.dtype == object and isinstance(array, np.ndarray) and array.size
        is_of_numbers = is_of_objects and not isinstance(array.flat[0], (str, bytes))
        return np.asarray(as_example(array.tolist())) if is_of_numbers and is_rectangular(array.tolist()) else array
    if hasattr(array, "to_numpy"):  # a frame, or a column of one
        array = array.to_numpy()
    return np.asarray(as_example(array.numpy() if tf.is_tensor(array) else array))
