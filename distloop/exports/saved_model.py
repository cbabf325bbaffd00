"""Writes `predict_fn` as signatures of a directory that loads without distloop.

    write_saved_model(state, {"serving_default": predict_fn}, element_spec, "model")

The SavedModel is written with the averaged weights if there are any and with LoRA adapters merged, read back and
compared before it takes its name. A signature takes the entries of a batch that its function reads, by name, and
returns the outputs by name; the batch dimension is free.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.util import nest

from distloop.checkpoints.checkpoint import plain_path
from distloop.data import shards
from distloop.evaluation.prediction import DEFAULT_SIGNATURE, check_outputs
from distloop.exports.export import call_on_ones, merged, output_difference, prepare_path, quiet_logging, writing
from distloop.graph_functions import graph_function
from distloop.log import log
from distloop.model.state import TrainState
from distloop.model.variable_writes import preserved
from distloop.urls import is_url
from distloop.variables import top_layers, unwrap_model, walk


def write_saved_model(
    state: TrainState,
    predict_fns: Mapping[str, Callable[[Any], Any]],
    element_spec: Any,
    path: str,
    keep_dtypes: bool = False,
) -> None:
    """Writes a SavedModel, with the averaged weights if there are any; atomically.

    Args:
        state: holds the weights.
        predict_fns: name -> `batch -> outputs`, `[B, ...]`; each gets a signature of its name, and the first is also
            `serving_default` unless one has that name.
        element_spec: of a batch; None: it is not known.
        path: a directory; an existing SavedModel is replaced when the new one is complete.
        keep_dtypes: whether half-precision outputs stay as they are; else they become float32.

    Raises:
        ValueError: if it is not known what a batch looks like, two entries of one would get the same name, a function
            reads none, the path holds something other than a SavedModel, or the SavedModel, read back, gives other
            outputs than its function.
    """
    if element_spec is None:
        raise ValueError(
            "export needs to know what a batch looks like; call fit, evaluate or predict with a dataset before it."
        )
    path = prepare_path(path, state.strategy)
    is_free = not os.path.exists(path) or (os.path.isdir(path) and not os.listdir(path))
    if not is_free and not os.path.exists(os.path.join(path, "saved_model.pb")):
        raise ValueError(f"{path!r} holds something that is no SavedModel; give a path that is free, or remove it.")
    signatures = {name: make_signature(name, fn, element_spec, keep_dtypes) for name, fn in predict_fns.items()}
    signatures.setdefault(DEFAULT_SIGNATURE, next(iter(signatures.values())))
    module = tf.Module()
    module.tables_served = _lookup_tables(state.model)
    with (
        state.unplaced(),  # the server has other devices
        writing(path, state.strategy) as temporary,
        state.averaged(),
        merged(state.model) as left_out,
        quiet_logging(),
    ):
        module.variables_served = [v for v in state.model_variables() if id(v) not in left_out]
        tf.saved_model.save(
            module, temporary, signatures={name: function for name, (function, _) in signatures.items()}
        )
        with plain_path(temporary) as plain:
            served = tf.saved_model.load(plain).signatures
        for name, (function, specs) in signatures.items():
            with preserved(state):
                _compare(name, served[name], function, specs)
    if not is_url(path) and set(path) & set("[\\"):
        log.warning(
            "TensorFlow takes %r for a pattern, and loads no SavedModel from there: move it to be served.", path
        )


def _compare(name: str, served: Any, function: Any, specs: Sequence[Any]) -> None:
    """Raises ValueError if a signature that was read back gives other outputs than its function."""

    def call(entries: Sequence[Any]) -> Any:
        return function(*tf.nest.flatten(entries, expand_composites=True))

    what = title(name)
    if (example := call_on_ones(call, specs, what)) is None:
        return
    entries, expected = example
    names = [spec.name for spec in function.input_signature]
    outputs = served(**dict(zip(names, tf.nest.flatten(entries, expand_composites=True), strict=True)))
    for output in expected:
        if difference := output_difference(outputs[output], expected[output]):
            raise ValueError(
                f"The exported model returns other values of {output!r} than {what}, by up to {difference:.3g}: "
                "compute from the batch and from variables of the model alone."
            )


def make_signature(
    name: str, predict_fn: Callable[[Any], Any], element_spec: Any, keep_dtypes: bool = False
) -> tuple[Any, list[Any]]:
    """Returns a `tf.function` of the tensors that `predict_fn` reads, with the entries' names, and the entries' specs.

    Args:
        name: of the signature, for messages.
        predict_fn: `batch -> outputs`, `[B, ...]`.
        element_spec: of a batch.
        keep_dtypes: whether half-precision outputs stay as they are; else they become float32.

    Raises:
        ValueError: if it reads nothing, or two tensors would get the same name.
    """
    specs = entry_specs(element_spec)
    read = _read_specs(predict_fn, element_spec, specs)
    if not read:
        raise ValueError(
            f"{title(name)} reads nothing from its batch, so there is nothing to serve: compute from the batch."
        )

    def serve(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        values = tf.nest.pack_sequence_as(list(read.values()), tensors, expand_composites=True)
        rows = tf.cast(shards.batch_size(values), tf.int32)
        entries = dict(zip(read, values, strict=True))
        # predict_fn takes the whole structure, with the entries that it does not read.
        flat = [entries[name] if name in entries else _zeros(spec, rows) for name, spec in specs.items()]
        batch = tf.nest.pack_sequence_as(element_spec, flat)
        return _named_outputs(check_outputs(predict_fn(batch), rows, keep_dtypes))

    flat_specs: dict[str, tf.TensorSpec] = {}
    for entry, spec in read.items():
        for i, component in enumerate(tf.nest.flatten(spec, expand_composites=True)):  # a ragged entry has several
            full_name = f"{entry}_{i}" if i else entry
            if full_name in flat_specs:
                raise ValueError(_same_name(full_name))
            flat_specs[full_name] = tf.TensorSpec(component.shape, component.dtype, name=full_name)
    # Not a concrete function: TensorFlow traces it again while saving, where several replicas' variables are one.
    return graph_function(serve, input_signature=list(flat_specs.values())), list(read.values())


def entry_specs(element_spec: Any) -> dict[str, Any]:
    """Returns the spec of each entry of a batch, with a free first axis, by its path in the structure.

    `{"a": {"b": x}}` is named a_b; the entries of a tuple are named x0, x1, and those of a dict in a tuple, as in
    `({"a": x}, y)`, by the dict alone, unless another entry has that name.

    Raises:
        ValueError: if two entries would get the same name.
    """
    specs: dict[str, Any] = {}
    flat = nest.flatten_with_tuple_paths(element_spec)
    of_paths = [_name_of(path) for path, _ in flat]
    of_dicts = [_name_of(path[1:]) if [*map(type, path[:2])] == [int, str] else "" for path, _ in flat]
    for (_, spec), of_path, of_dict in zip(flat, of_paths, of_dicts, strict=True):
        is_free = of_dicts.count(of_dict) == 1 and of_dict not in of_paths
        name = of_dict if of_dict and is_free else of_path
        if name in specs:
            raise ValueError(_same_name(name))
        shape = [None, *spec.shape[1:]]
        if isinstance(spec, tf.RaggedTensorSpec):
            specs[name] = tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
        else:
            specs[name] = tf.TensorSpec(shape, spec.dtype, name=name)
    return specs


def _name_of(path: Sequence[Any]) -> str:
    """Returns the name of an entry in a structure."""
    name = "_".join(map(str, path))
    return f"x{name}" if name[:1].isdigit() or not name else name


def _read_specs(predict_fn: Callable[[Any], Any], element_spec: Any, specs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the specs of the entries that `predict_fn` reads; traces it to see which."""

    def trace(*flat: Any) -> Any:
        return predict_fn(tf.nest.pack_sequence_as(element_spec, flat))

    graph_inputs = iter(graph_function(trace).get_concrete_function(*specs.values()).graph.inputs)
    tensors = {
        name: [next(graph_inputs) for _ in tf.nest.flatten(spec, expand_composites=True)]
        for name, spec in specs.items()
    }
    return {name: spec for name, spec in specs.items() if any(tensor.consumers() for tensor in tensors[name])}


def title(name: str) -> str:
    """Returns a prediction function's name as the user wrote it."""
    return "predict_fn" if name == DEFAULT_SIGNATURE else f"predict_fn[{name!r}]"


def _same_name(name: str) -> str:
    return f"Two entries of a batch would both be named {name!r} in the signature: rename one."


def _zeros(spec: Any, rows: tf.Tensor) -> Any:
    if isinstance(spec, tf.RaggedTensorSpec):
        splits = tf.zeros([rows + 1], spec.row_splits_dtype)
        return tf.RaggedTensor.from_row_splits(tf.zeros([0], spec.dtype), splits)
    return tf.zeros([rows, *(size or 1 for size in spec.shape[1:])], spec.dtype)


def _named_outputs(outputs: Any) -> dict[str, tf.Tensor]:
    if isinstance(outputs, dict) and all(not isinstance(v, (dict, list, tuple)) for v in outputs.values()):
        return outputs
    flat = tf.nest.flatten(outputs)
    return {"output": flat[0]} if len(flat) == 1 else {f"output_{i}": value for i, value in enumerate(flat)}


def _lookup_tables(model: Any) -> list[Any]:
    """Returns the tables of a model's layers and modules, such as the vocabularies of `keras.layers.StringLookup`.

    Args:
        model: as for `named_variables`.
    """
    leaves = [leaf for _, leaf in walk(unwrap_model(model))]
    layers = [layer for top in top_layers(model) for layer in top._flatten_layers()]
    values = [*leaves, *(value for layer in layers for value in vars(layer).values())]
    return [value for value in values if isinstance(value, tf.saved_model.experimental.TrackableResource)]
