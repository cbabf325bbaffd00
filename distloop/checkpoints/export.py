"""Owns what is served: `predict_fn` as a SavedModel, or the Keras model as a file; both load without distloop.

    write_saved_model(state, {"serving_default": predict_fn}, element_spec, "model")    # a directory
    write_keras_file(state, "model.keras")

A signature takes those entries of a batch that its function reads, by their names, and gives its outputs by theirs; the
batch dimension is free. A Keras file holds layers and weights, no optimizer and no losses.

What is written is read back and compared before it takes its name, so that a name means a whole export. A directory
cannot be replaced in one step: a process killed in the middle leaves `<path>.<process>.old`, which the next export puts
back, and removes what else is left.
"""

import contextlib
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from distloop.data import shards
from distloop.distributed import workers
from distloop.errors import explain_data_error
from distloop.training.state import TrainState
from distloop.training.step import check_outputs
from distloop.variables import arranged

DEFAULT = "serving_default"  # the name of the signature that TensorFlow's tools take if they are given none

# What free axes are compared at: one that is small, or else one that a convolution's filter fits in.
_FREE_SIZES = (1, 32, 256)


def write_saved_model(
    state: TrainState,
    predict_fns: Mapping[str, Callable[[Any], Any]],
    element_spec: Any,
    path: str,
    keep_dtypes: bool = False,
) -> None:
    """Writes a SavedModel, with the averaged weights where there are some; whole or not at all.

    Args:
        state: holds the weights.
        predict_fns: name -> `batch -> outputs`, `[B, ...]`; each gets a signature of its name, and the first is also
            `serving_default` unless one has that name.
        element_spec: of a batch.
        path: a directory; one that is there is replaced when the new one is whole.
        keep_dtypes: whether half-precision outputs stay as they are; else they become float32.

    Raises:
        ValueError: if two entries of a batch would get the same name, a function reads none, something that is no
            SavedModel is in the way, or what was written, read back, gives other outputs.
    """
    path = _settled(state, path)
    is_free = not os.path.exists(path) or (os.path.isdir(path) and not os.listdir(path))
    if not is_free and not os.path.exists(os.path.join(path, "saved_model.pb")):
        raise ValueError(f"{path!r} holds something that is no SavedModel; give a path that is free, or remove it.")
    specs = _named_specs(element_spec)
    signatures, read = {}, {}
    for name, fn in predict_fns.items():
        read[name] = {entry: specs[entry] for entry in _entries_read(name, fn, element_spec, specs)}
        signatures[name] = _signature(fn, element_spec, specs, read[name], keep_dtypes)
    first = next(iter(predict_fns))
    signatures.setdefault(DEFAULT, signatures[first])
    read.setdefault(DEFAULT, read[first])
    module = tf.Module()
    module.variables_served = [*state.model_variables()]
    with contextlib.ExitStack() as stack, _aside(state, path, "") as aside, state.averaged(), _quiet():
        for network in state.staged:
            stack.enter_context(network.unplaced())  # who serves it has other devices
        tf.saved_model.save(module, aside, signatures=signatures)
        served = tf.saved_model.load(aside).signatures
        for name, signature in signatures.items():
            with state.seeds_kept():
                _compare_signature(name, served[name], signature, read[name])


def write_keras_file(state: TrainState, path: str) -> None:
    """Writes a `.keras` file, with the averaged weights where there are some; whole or not at all.

    Args:
        state: of one Keras model, which is built.
        path: ends with `.keras`; a file that is there is replaced when the new one is whole.

    Raises:
        ValueError: if the model is none that such a file can hold, a directory is in the way, or what was written
            cannot be read back, or has other weights or outputs then.
    """
    model = arranged(state.model)
    _require_keras(model)
    if not state.is_built:
        raise ValueError(
            f"The model {model.name!r} is not built, so it has no weights to write: call fit, evaluate or predict with "
            "a dataset before export, or give it an input shape."
        )
    path = _settled(state, path)
    if os.path.isdir(path):
        raise ValueError(f"{path!r} is a directory; a Keras model is a file: remove it, or give another path.")
    with _aside(state, path, ".keras") as aside, state.averaged(), _quiet():
        try:
            with _uncompiled(model):
                keras.saving.save_model(model, aside)
            with _random_kept():
                copy = keras.models.load_model(aside)
        except OSError:  # the disk's, not the model's
            raise
        except Exception as error:  # Keras raises whatever a layer's code does
            raise ValueError(
                f"The model {model.name!r} cannot be written and read back ({_reason(error)}): decorate layers and "
                "functions of your own with @keras.saving.register_keras_serializable(), give them a get_config, and "
                "use no lambda."
            ) from error
        _compare_weights(model, copy)
        with state.seeds_kept():
            _compare_outputs(model, copy)


def _require_keras(model: Any) -> None:
    """Checks that there is one Keras model."""
    several: Mapping[Any, Any] = {}
    if isinstance(model, Mapping):
        several = model
    elif isinstance(model, (list, tuple)):
        several = dict(enumerate(model))
    if several and all(isinstance(one, keras.Model) for one in several.values()):
        raise ValueError(
            f"A .keras file holds one model, and there is a {type(model).__name__} of {len(several)}, each to be saved "
            f"by itself: with trainer.state.averaged(): trainer.model[{next(iter(several))!r}].save('path.keras')."
        )
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"A .keras file holds a Keras model, and the model is a {type(model).__name__}, no keras.Model: give a "
            "path without .keras, for a SavedModel of predict_fn."
        )


@contextlib.contextmanager
def _uncompiled(model: keras.Model) -> Iterator[None]:
    """Hides optimizer and losses: of no use to what serves, and they may know functions that are not registered."""
    if not model.compiled:
        yield
        return
    optimizer, model.optimizer, model.compiled = model.optimizer, None, False
    try:
        yield
    finally:
        model.optimizer, model.compiled = optimizer, True


@contextlib.contextmanager
def _random_kept() -> Iterator[None]:
    """Keeps Python's random numbers where they are: Keras draws seeds from them for the layers that it makes."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


def _reason(error: Exception) -> str:
    """Takes the sentence that matters out of what Keras tells."""
    text = " ".join(str(error).rpartition("Exception encountered: ")[2].split())
    return re.split(r"[.!?](?:\s|$)", text, maxsplit=1)[0][:200] or type(error).__name__


def _compare_weights(model: keras.Model, copy: keras.Model) -> None:
    """Checks that a model that was read back has the weights of the model, bit for bit."""
    found, expected = ([weight.numpy() for weight in one.weights] for one in (copy, model))
    names = [weight.path for weight in model.weights]
    if len(found) != len(expected):
        wrong = f"{len(found)} instead of {len(expected)}"
    elif different := [
        name
        for name, a, b in zip(names, found, expected, strict=True)
        if (a.shape, a.dtype) != (b.shape, b.dtype) or a.tobytes() != b.tobytes()
    ]:
        wrong = ", ".join(different[:3])
    else:
        return
    raise ValueError(
        f"The model {model.name!r}, written and read back, has other weights ({wrong}): make all of its layers and "
        "variables in __init__ or build, where Keras finds them."
    )


def _compare_outputs(model: keras.Model, copy: keras.Model) -> None:
    """Checks, where a model knows its inputs, that one that was read back answers as it does."""
    # Only a Sequential has no `input` before it was called by itself; it has one input.
    specs = model.inputs[0] if isinstance(model, keras.Sequential) else getattr(model, "input", None)
    if specs is None or (example := _example(model, specs, f"the model {model.name!r}")) is None:
        return
    rows, expected = example
    expected, again, found = (tf.nest.flatten(outputs) for outputs in (expected, model(rows), copy(rows)))
    if any(_difference(a, b) for a, b in zip(again, expected, strict=True)):
        return  # it draws random numbers when it predicts, and a file does not hold where they stand
    if difference := max(_difference(a, b) for a, b in zip(found, expected, strict=True)):
        raise ValueError(
            f"The model {model.name!r}, written and read back, gives other outputs, by up to {difference:.3g}: let the "
            "get_config of layers of your own return every argument of __init__."
        )


def _compare_signature(name: str, served: Any, signature: Any, read: Mapping[str, Any]) -> None:
    """Checks that a signature that was read back answers as its function does."""

    def answer(rows: Sequence[Any]) -> Any:
        return signature(*tf.nest.flatten(rows, expand_composites=True))

    if (example := _example(answer, list(read.values()), _called(name))) is None:
        return
    rows, expected = example
    names = [spec.name for spec in signature.input_signature]
    found = served(**dict(zip(names, tf.nest.flatten(rows, expand_composites=True), strict=True)))
    for output in expected:
        if difference := _difference(found[output], expected[output]):
            raise ValueError(
                f"What was exported gives {output!r} otherwise than {_called(name)} does, by up to {difference:.3g}: "
                "compute from the batch and from variables of the model alone."
            )


def _example(call: Callable[[Any], Any], specs: Any, name: str) -> tuple[Any, Any] | None:
    """Calls on two rows of ones; if that fails where axes are free, on larger ones.

    Returns:
        The rows and what the call gave for them, or None if it takes none of them.
    """
    for size in _FREE_SIZES:
        rows = tf.nest.map_structure(lambda spec, size=size: _ones(spec, size), specs)
        try:
            return rows, call(rows)
        except Exception as error:  # whatever the layers' code raises
            if isinstance(error, tf.errors.OpError) and (explained := explain_data_error(error)) is not None:
                raise explained from error
    logging.warning("What was exported is not compared with %s, which cannot be run on ones.", name)
    return None


def _difference(found: Any, expected: Any) -> float:
    """Measures by how much two outputs differ; 0.0 within the tolerance, and where they are no tensors of floats."""
    if not isinstance(expected, tf.Tensor) or not expected.dtype.is_floating:
        return 0.0
    found, expected = (tf.cast(value, tf.float32).numpy() for value in (found, expected))
    if found.shape == expected.shape and np.allclose(found, expected, rtol=1e-3, atol=1e-5, equal_nan=True):
        return 0.0
    return float(np.abs(found - expected).max()) if found.shape == expected.shape else np.inf


def _ones(spec: Any, free: int) -> Any:
    """Makes two rows; free axes have a size."""
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.ones([2, *(size or free for size in spec.shape[2:])], spec.dtype)
        return tf.RaggedTensor.from_row_splits(values, tf.constant([0, 1, 2], spec.row_splits_dtype))
    shape = [spec.shape[0] or 2, *(size or free for size in spec.shape[1:])]
    return tf.fill(shape, "1") if spec.dtype == "string" else tf.ones(shape, spec.dtype)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps TensorFlow from telling how it writes."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


# Files --------------------------------------------------------------------------------------------------------------


def _settled(state: TrainState, path: str) -> str:
    """Follows links, which are to stay, and settles what killed exports to a path have left.

    Returns:
        The path of what links point at.
    """
    path = os.path.realpath(path)
    if not workers.is_chief(state.strategy):
        return path
    directory, base = os.path.split(path)
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else []:
        left = re.fullmatch(re.escape(base) + r"\.(\d{1,9})\.(tmp|tmp\.keras|old)", name)
        if left is None or _is_running(int(left[1])):
            continue
        leftover = os.path.join(directory, name)
        if left[2] == "old" and not os.path.exists(path):
            os.rename(leftover, path)
            logging.warning("The export %s is back: a process ended while it replaced it.", path)
        else:
            _remove(leftover)
    return path


def _is_running(process: int) -> bool:
    """Says whether a process, other than this one, may still be writing."""
    if process == os.getpid():
        return False  # an earlier one that had our number: in containers the first has 1, always
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True


@contextlib.contextmanager
def _aside(state: TrainState, path: str, ending: str) -> Iterator[str]:
    """Gives a name to write to; what is there in the end takes the name `path`, unless there was an error.

    What a worker writes that is not the chief is removed: all write, as reading a variable may take them all.
    """
    if not workers.is_chief(state.strategy):
        with tempfile.TemporaryDirectory() as directory:
            yield os.path.join(directory, f"export{ending}")
        return
    directory = os.path.dirname(path)
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{path!r} cannot be written ({error.strerror}: {error.filename!r}): give another path."
        ) from error
    aside = f"{path}.{os.getpid()}.tmp{ending}"
    try:
        yield aside
        for folder, folders, files in os.walk(aside):
            for name in [*folders, *files]:
                _sync(os.path.join(folder, name))
        _sync(aside)
        _replace(path, aside)
        _sync(directory)
    finally:
        _remove(aside)


def _replace(path: str, aside: str) -> None:
    if not os.path.isdir(path):
        os.replace(aside, path)
        return
    old = f"{path}.{os.getpid()}.old"
    os.rename(path, old)  # for the time of one more rename; `_settled` knows it if that is never reached
    try:
        os.rename(aside, path)
    except OSError:
        os.rename(old, path)
        raise
    _remove(old)


def _remove(path: str) -> None:
    """Removes what may be there; what cannot be removed now is left to the next export."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.remove(path)


def _sync(path: str) -> None:
    """Waits until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Signatures ---------------------------------------------------------------------------------------------------------


def _signature(
    predict_fn: Callable[[Any], Any],
    element_spec: Any,
    specs: Mapping[str, Any],
    read: Mapping[str, Any],
    keep_dtypes: bool,
) -> Any:
    """Makes a function of the tensors of those entries that `predict_fn` reads; their specs have their names."""

    def serve(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        given = tf.nest.pack_sequence_as(list(read.values()), tensors, expand_composites=True)
        rows = tf.cast(shards.batch_size(given), tf.int32)
        entries = dict(zip(read, given, strict=True))
        # Entries that predict_fn does not read are still part of the structure that it takes apart.
        flat = [entries[name] if name in entries else _absent(spec, rows) for name, spec in specs.items()]
        batch = tf.nest.pack_sequence_as(element_spec, flat)
        return _named_outputs(check_outputs(predict_fn(batch), rows, keep_dtypes))

    flat_specs: dict[str, tf.TensorSpec] = {}
    for entry, spec in read.items():
        for i, part in enumerate(tf.nest.flatten(spec, expand_composites=True)):  # a ragged entry has several
            name = f"{entry}_{i}" if i else entry
            if name in flat_specs:
                raise ValueError(_same_name(name))
            flat_specs[name] = tf.TensorSpec(part.shape, part.dtype, name=name)
    # Not a concrete function: TensorFlow traces it again while saving, where several replicas' variables are one.
    return tf.function(serve, autograph=False, input_signature=list(flat_specs.values()))


def _same_name(name: str) -> str:
    return f"Two entries of a batch would both be named {name!r} in the signature: rename one."


def _called(name: str) -> str:
    """Names a function as the user knows it."""
    return "predict_fn" if name == DEFAULT else f"predict_fn[{name!r}]"


def _named_specs(element_spec: Any) -> dict[str, tf.TensorSpec]:
    """Names each entry of a batch by its path, with a free first axis: {"a": {"b": x}} gives a_b, a tuple x0, x1."""
    specs: dict[str, tf.TensorSpec] = {}
    for name, spec in _walk(element_spec, ""):
        name = f"x{name}" if name[:1].isdigit() or not name else name
        if name in specs:
            raise ValueError(_same_name(name))
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


def _entries_read(name: str, predict_fn: Callable[[Any], Any], element_spec: Any, specs: dict[str, Any]) -> list[str]:
    """Traces `predict_fn` to see which entries it reads."""

    def trace(*flat: Any) -> Any:
        return predict_fn(tf.nest.pack_sequence_as(element_spec, flat))

    graph = tf.function(trace, autograph=False).get_concrete_function(*specs.values()).graph
    graph_inputs = iter(graph.inputs)
    read = []
    for entry, spec in specs.items():
        count = len(tf.nest.flatten(spec, expand_composites=True))
        if any([next(graph_inputs).consumers() for _ in range(count)]):
            read.append(entry)
    if not read:
        raise ValueError(
            f"{_called(name)} reads nothing from its batch, so there is nothing to serve: compute from the batch."
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
