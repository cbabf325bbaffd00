"""Owns what is served: `predict_fn` as a SavedModel that loads without distloop.

The signature `serving_default` takes those entries of a batch that `predict_fn` reads, by their names, and gives its
outputs by theirs; the batch dimension is free.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from distloop.state import TrainState
from distloop.step import check_outputs


def export(
    state: TrainState, predict_fn: Callable[[Any], Any], element_spec: Any, path: str, keep_dtypes: bool = False
) -> None:
    """Writes a SavedModel, with the averaged weights where there are some; whole or not at all.

    Args:
        state: holds the weights.
        predict_fn: `batch -> outputs`, `[B, ...]`.
        element_spec: of a batch.
        path: a directory; one that is there is replaced when the new one is whole.
        keep_dtypes: whether half-precision outputs stay as they are; else they become float32.

    Raises:
        ValueError: if two entries of a batch would get the same name, something that is no SavedModel is in the way, or
            what was written, read back, gives other outputs.
    """
    is_free = not os.path.exists(path) or (os.path.isdir(path) and not os.listdir(path))
    if not is_free and not os.path.exists(os.path.join(path, "saved_model.pb")):
        raise ValueError(f"{path!r} holds something that is no SavedModel; give a path that is free, or remove it.")
    specs = _named_specs(element_spec)
    read = _entries_read(predict_fn, element_spec, specs)

    def serve(**entries: tf.Tensor) -> dict[str, tf.Tensor]:
        rows = tf.shape(next(iter(entries.values())), out_type=tf.int32)[0]
        # Entries that predict_fn does not read are still part of the structure that it takes apart.
        flat = [entries[name] if name in entries else _absent(spec, rows) for name, spec in specs.items()]
        batch = tf.nest.pack_sequence_as(element_spec, flat)
        return _named_outputs(check_outputs(predict_fn(batch), rows, keep_dtypes))

    module = tf.Module()
    module.variables_served = [*state.model_variables()]
    signature = tf.function(serve, autograph=False).get_concrete_function(**{name: specs[name] for name in read})
    aside = f"{os.path.normpath(path)}.{os.getpid()}.tmp"
    try:
        with state.averaged(), _quiet():
            tf.saved_model.save(module, aside, signatures={"serving_default": signature})
            _compare(aside, signature, {name: specs[name] for name in read})
        if os.path.exists(path):
            old = f"{os.path.normpath(path)}.{os.getpid()}.old"
            os.replace(path, old)
            os.replace(aside, path)
            shutil.rmtree(old)
        else:
            os.replace(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _compare(path: str, signature: Any, specs: dict[str, Any]) -> None:
    """Reads a SavedModel back and checks that it answers as the model does, on two rows of ones."""
    rows = {name: _ones(spec) for name, spec in specs.items()}
    served = tf.saved_model.load(path).signatures["serving_default"](**rows)
    for name, expected in signature(**rows).items():
        if not isinstance(expected, tf.Tensor) or not expected.dtype.is_floating:
            continue
        found, expected = (tf.cast(value, tf.float32).numpy() for value in (served[name], expected))
        if not np.allclose(found, expected, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise ValueError(
                f"What was exported gives {name!r} otherwise than predict_fn does, by up to "
                f"{np.abs(found - expected).max():.3g}: compute from the batch and from variables of the model alone."
            )


def _ones(spec: Any) -> Any:
    """Makes two rows."""
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.ones([2, *(size or 1 for size in spec.shape[2:])], spec.dtype)
        return tf.RaggedTensor.from_row_splits(values, tf.constant([0, 1, 2], spec.row_splits_dtype))
    shape = [2, *(size or 1 for size in spec.shape[1:])]
    return tf.fill(shape, "1") if spec.dtype == tf.string else tf.ones(shape, spec.dtype)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps TensorFlow from telling how it writes."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _named_specs(element_spec: Any) -> dict[str, tf.TensorSpec]:
    """Names each entry of a batch by its path, with a free first axis: {"a": {"b": x}} gives a_b, a tuple x0, x1."""
    specs: dict[str, tf.TensorSpec] = {}
    for name, spec in _walk(element_spec, ""):
        name = f"x{name}" if name[:1].isdigit() or not name else name
        if name in specs:
            raise ValueError(f"Two entries of a batch would both be named {name!r} in the signature: rename one.")
        specs[name] = _free(spec, name)
    return specs


def _walk(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Goes through a structure in the order of `tf.nest.flatten`."""
    if isinstance(node, Mapping):
        children = [(key, node[key]) for key in sorted(node)]
    elif isinstance(node, tuple) and hasattr(node, "_fields"):
        children = list(zip(node._fields, node, strict=True))
    elif isinstance(node, (list, tuple)):
        children = list(enumerate(node))
    else:
        yield prefix, node
        return
    for key, child in children:
        yield from _walk(child, f"{prefix}_{key}" if prefix else str(key))


def _free(spec: Any, name: str) -> Any:
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec([None, *spec.shape[1:]], spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype, name=name)


def _entries_read(predict_fn: Callable[[Any], Any], element_spec: Any, specs: dict[str, Any]) -> list[str]:
    """Traces `predict_fn` to see which entries it reads."""

    def trace(*flat: Any) -> Any:
        return predict_fn(tf.nest.pack_sequence_as(element_spec, flat))

    graph = tf.function(trace, autograph=False).get_concrete_function(*specs.values()).graph
    inputs = iter(graph.inputs)
    read = []
    for name, spec in specs.items():
        count = len(tf.nest.flatten(spec, expand_composites=True))
        if any([next(inputs).consumers() for _ in range(count)]):
            read.append(name)
    if not read:
        raise ValueError(
            "predict_fn reads nothing from its batch, so there is nothing to serve: compute from the batch."
        )
    return read


def _absent(spec: Any, rows: tf.Tensor) -> Any:
    if isinstance(spec, tf.RaggedTensorSpec):
        empty = tf.RaggedTensor.from_row_splits(tf.zeros([0], spec.dtype), tf.zeros([rows + 1], spec.row_splits_dtype))
        return empty
    return tf.zeros([rows, *(size or 1 for size in spec.shape[1:])], spec.dtype)


def _named_outputs(outputs: Any) -> dict[str, tf.Tensor]:
    if isinstance(outputs, dict) and all(not isinstance(v, (dict, list, tuple)) for v in outputs.values()):
        return outputs
    flat = tf.nest.flatten(outputs)
    return {"output": flat[0]} if len(flat) == 1 else {f"output_{i}": value for i, value in enumerate(flat)}
