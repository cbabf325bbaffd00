"""SavedModels: `predict_fn` as signatures in a directory that loads without distloop.

    write_saved_model(state, {"serving_default": predict_fn}, element_spec, "model")

The SavedModel is written with the averaged weights if there are any and with LoRA adapters merged, read back and
compared before it takes its name.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from distloop.checkpoints.checkpoint import plain_path
from distloop.exports import signatures
from distloop.exports.adapters import merged
from distloop.exports.export import call_on_ones, output_difference, prepare_path, quiet_logging, writing
from distloop.log import log
from distloop.training.prediction import DEFAULT_SIGNATURE
from distloop.training.state import TrainState
from distloop.urls import is_url
from distloop.variables import lookup_tables


def write_saved_model(
    state: TrainState,
    predict_fns: Mapping[str, Callable[[Any], Any]],
    element_spec: Any,
    path: str,
    keep_dtypes: bool = False,
) -> None:
    """Writes a SavedModel, with the averaged weights if there are any; whole or not at all.

    Args:
        state: holds the weights.
        predict_fns: name -> `batch -> outputs`, `[B, ...]`; each gets a signature of its name, and the first is also
            `serving_default` unless one has that name.
        element_spec: of a batch; None: it is not known.
        path: a directory; an existing SavedModel is replaced when the new one is whole.
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
    specs = signatures.entry_specs(element_spec)
    functions, specs_read = {}, {}
    for name, fn in predict_fns.items():
        specs_read[name] = signatures.specs_read(name, fn, element_spec, specs)
        functions[name] = signatures.make_signature(fn, element_spec, specs, specs_read[name], keep_dtypes)
    first = next(iter(predict_fns))
    functions.setdefault(DEFAULT_SIGNATURE, functions[first])
    specs_read.setdefault(DEFAULT_SIGNATURE, specs_read[first])
    module = tf.Module()
    module.tables_served = lookup_tables(state.model)
    with (
        state.placement.unplaced(),  # the server has other devices
        writing(path, state.strategy) as temporary,
        state.averaged(),
        merged(state.model) as left_out,
        quiet_logging(),
    ):
        module.variables_served = [v for v in state.model_variables() if id(v) not in left_out]
        tf.saved_model.save(module, temporary, signatures=functions)
        with plain_path(temporary) as plain:
            served = tf.saved_model.load(plain).signatures
        for name, function in functions.items():
            with state.random_streams.preserved():
                _compare(name, served[name], function, list(specs_read[name].values()))
    if not is_url(path) and set(path) & set("[\\"):
        log.warning(
            "TensorFlow takes %r for a pattern, and loads no SavedModel from there: move it to be served.", path
        )


def _compare(name: str, served: Any, function: Any, specs: Sequence[Any]) -> None:
    """Raises ValueError if a signature that was read back gives other outputs than its function."""

    def call(entries: Sequence[Any]) -> Any:
        return function(*tf.nest.flatten(entries, expand_composites=True))

    title = signatures.title(name)
    if (example := call_on_ones(call, specs, title)) is None:
        return
    entries, expected = example
    names = [spec.name for spec in function.input_signature]
    outputs = served(**dict(zip(names, tf.nest.flatten(entries, expand_composites=True), strict=True)))
    for output in expected:
        if difference := output_difference(outputs[output], expected[output]):
            raise ValueError(
                f"The exported model gives {output!r} otherwise than {title} does, by up to {difference:.3g}: compute "
                "from the batch and from variables of the model alone."
            )
