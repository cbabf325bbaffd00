"""Copies of Keras models and optimizers: made again in the current scope, with all that their configs leave out.

    model = copy_model(original)
    optimizer = copy_optimizer(original.optimizer, original, model)

The originals stay as they are. This module does not know what trains the copies.
"""

import contextlib
import inspect
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from distloop.variables import slot_names


def copy_model(model: keras.Model) -> keras.Model:
    """Returns a copy of a built Keras model: its layers, weights, vocabularies and statistics, and what is trained.

    Args:
        model: its random streams are not copied.

    Raises:
        ValueError: if the model cannot be made again from its config.
    """
    try:
        classes = {type(layer).__name__: type(layer) for layer in model._flatten_layers()}
        # A compiled model's losses and metrics would be rebuilt too, and Keras finds functions and classes by name.
        with _uncompiled(model), keras.saving.custom_object_scope(classes):
            copy = keras.models.clone_model(model)
        _require_methods(model, copy)
        if not copy.built:
            copy.build(model.input_shape if hasattr(model, "input_shape") else None)
        _copy_layers(model, copy)
        _copy_weights(model, copy)
    except Exception as error:
        first_line = str(error).partition("\n")[0].rstrip(" .:")
        raise ValueError(
            f"The model {model.name!r} cannot be rebuilt from its config ({first_line}): give from_keras a function "
            "that builds and compiles it."
        ) from error
    return copy


def copy_optimizer(
    optimizer: keras.optimizers.Optimizer, model: keras.Model, copy: keras.Model
) -> keras.optimizers.Optimizer:
    """Returns a copy of an optimizer: its settings, schedule and slots, and the variables that have no weight decay.

    Args:
        optimizer: what trains `model`; a schedule as learning rate is shared, as it has no state.
        model: the original model.
        copy: the result of `copy_model`.

    Raises:
        ValueError: if the optimizer cannot be made again from its config.
    """
    try:
        new = type(optimizer).from_config(_config(optimizer))
    except (NotImplementedError, TypeError) as error:
        raise ValueError(
            f"The optimizer {optimizer.name!r}, a {type(optimizer).__name__}, cannot be made again from its "
            f"get_config() ({error}): let get_config return every argument of __init__, or give from_keras a function "
            "that builds and compiles the model."
        ) from error
    copies = {id(old): new for old, new in zip(model.weights, copy.weights, strict=True)}
    # Private: Keras keeps no list of these variables, only their ids and patterns of their names.
    not_decayed = [copies[id(v)] for v in model.trainable_weights if not optimizer._use_weight_decay(v)]
    if not_decayed:
        new.exclude_from_weight_decay(not_decayed)
    if optimizer.built:
        new.build(copy.trainable_weights)
        # Private: the variables that the optimizer was built with, which may be others than those that train now.
        old_slots = slot_names(optimizer, *_named(optimizer._trainable_variables, model.weights))
        for name, slot in slot_names(new, *_named(copy.trainable_weights, copy.weights)).items():
            if name in old_slots:
                slot.assign(old_slots[name])
    return new


@contextlib.contextmanager
def _uncompiled(model: keras.Model) -> Iterator[None]:
    """Enters a scope in which a model counts as not compiled."""
    was_compiled, model.compiled = model.compiled, False
    try:
        yield
    finally:
        model.compiled = was_compiled


def _require_methods(model: keras.Model, copy: keras.Model) -> None:
    """Refuses a copy without methods of the model: Keras makes plain Sequentials and Functionals of subclasses."""
    ignored = {"get_config", "from_config"}
    for name in dir(keras.Model):
        method, copied = (inspect.getattr_static(type(m), name, None) for m in (model, copy))
        if method is not copied and callable(method) and name not in ignored and not name.startswith("__"):
            raise ValueError(f"Keras makes a {type(copy).__name__} of it, without its {name}")


def _copy_layers(model: keras.Model, copy: keras.Model) -> None:
    """Copies what layers keep beside their config, as Keras does when it writes and reads a file."""
    # Private: all layers at all depths, in an order that is the same for both.
    for old, new in zip(model._flatten_layers(), copy._flatten_layers(), strict=True):
        if type(old) is not type(new) and old is not model:
            raise ValueError(f"its {type(old).__name__} {old.name!r} becomes a {type(new).__name__}")
        if new.dtype_policy != old.dtype_policy:
            new.dtype_policy = old.dtype_policy
        if new.trainable != old.trainable:
            new.trainable = old.trainable  # of all layers below, too, whose turn comes later
        values: dict[str, Any] = {}
        old.save_own_variables(values)
        new.load_own_variables({key: keras.ops.convert_to_numpy(value) for key, value in values.items()})
        if hasattr(old, "save_assets"):
            with tempfile.TemporaryDirectory() as directory:
                old.save_assets(directory)
                new.load_assets(directory)


def _copy_weights(model: keras.Model, copy: keras.Model) -> None:
    """Copies values and attributes of the variables, as layers may have stored them in another form."""
    trained = {id(v) for v in model.trainable_weights}
    for old, new in zip(model.weights, copy.weights, strict=True):
        if (old.name, tuple(old.shape), old.dtype) != (new.name, tuple(new.shape), new.dtype):
            raise ValueError(
                f"its variable {old.path!r}, {old.dtype}{list(old.shape)}, becomes {new.path!r}, "
                f"{new.dtype}{list(new.shape)}"
            )
        new.assign(old)
        new.trainable = id(old) in trained
        new.regularizer, new.constraint = old.regularizer, old.constraint
        new.overwrite_with_gradient = old.overwrite_with_gradient


def _config(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Returns an optimizer's config, with a schedule as the object that it is: it may have no config of its own."""
    schedule = optimizer._learning_rate
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        config: dict[str, Any] = optimizer.get_config()
        return config
    optimizer._learning_rate = 0.0
    try:
        return {**optimizer.get_config(), "learning_rate": schedule}
    finally:
        optimizer._learning_rate = schedule


def _named(variables: Sequence[Any], weights: Sequence[Any]) -> tuple[Sequence[Any], list[str]]:
    """Returns variables and a name for each: its place among the model's weights."""
    places = {id(weight): str(place) for place, weight in enumerate(weights)}
    return variables, [places.get(id(v), f"other {i}") for i, v in enumerate(variables)]
