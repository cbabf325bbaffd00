"""Copies of Keras models and optimizers in the current scope, with what their configs leave out.

    model = copy_model(original)
    optimizer = copy_optimizer(original.optimizer, original, model)

The originals stay as they are.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.errors import cause
from distloop.installed import import_part
from distloop.optimizers.keras_hooks import is_schedule_free, lost_settings, made_again
from distloop.optimizers.learning_rates import config_of
from distloop.threads import replaced
from distloop.variables import portable_names, slot_names, tensorflow_variable


def copy_model(model: keras.Model) -> keras.Model:
    """Returns a copy of a built Keras model: its layers, weights, vocabularies and statistics, and what is trained.

    Raises:
        ValueError: if the model cannot be made again from its config.
    """
    try:
        kinds = {type(layer) for layer in model._flatten_layers()}
        classes = {kind.__name__: kind for kind in kinds if not kind.__module__.startswith("keras.")}
        # A compiled model's losses and metrics would be rebuilt too, and Keras finds functions and classes by name.
        with replaced(model, "compiled", False), keras.saving.custom_object_scope(classes):
            copy = keras.models.clone_model(model)
        _require_methods(model, copy)
        if not copy.built:
            copy.build(model.input_shape if hasattr(model, "input_shape") else None)
        _copy_layers(model, copy)
        _copy_weights(model, copy)
    except Exception as error:
        raise ValueError(
            f"The model {model.name!r} cannot be rebuilt from its config ({cause(error)}): give from_keras a function "
            "that builds and compiles it."
        ) from error
    return copy


def copy_optimizer(
    optimizer: keras.optimizers.Optimizer, model: keras.Model, copy: keras.Model
) -> keras.optimizers.Optimizer:
    """Returns a copy of a model's optimizer: its settings and slots, and the variables that have no weight decay.

    A schedule as learning rate is shared, as it has no state.

    Raises:
        ValueError: if the optimizer cannot be made again from its config.
    """
    pairs = list(_weight_pairs(model, copy))
    old_weights, new_weights = [old for old, _ in pairs], [new for _, new in pairs]
    copies = {id(old): new for old, new in zip(old_weights, new_weights, strict=True)}

    def copy_one(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        instead = "give from_keras a function that builds and compiles the model"
        new = made_again(optimizer, f"The optimizer {optimizer.name!r}", instead, config_of)
        # Private: Keras keeps no list of these variables, only their ids and patterns of their names.
        not_decayed = [copies[id(v)] for v in model.trainable_weights if not optimizer._use_weight_decay(v)]
        if not_decayed:
            new.exclude_from_weight_decay(not_decayed)
        return new

    new = for_loop(optimizer, copy_one)
    if optimizer.built:
        new.build(copy.trainable_weights)
        # Private: the variables that the optimizer was built with, which may be others than those that train now.
        old_slots = slot_names(optimizer, *_named(optimizer._trainable_variables, old_weights))
        for name, slot in slot_names(new, *_named(copy.trainable_weights, new_weights)).items():
            begins_at_weights = is_schedule_free(new) and name.startswith("momentum/")
            if name in old_slots and not begins_at_weights:
                slot.assign(old_slots[name])
    return new


def for_loop(optimizer: Any, make_one: Callable[[Any], Any] = lambda optimizer: optimizer) -> Any:
    """Returns what `make_one` makes of an optimizer, or of each inside a `MultiOptimizer`, which is new in Keras 3.15.

    Raises:
        ValueError: if a `MultiOptimizer` cannot be used.
    """
    if not isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        return make_one(optimizer)
    module = import_part("multi_optimizer.variable_optimizers", "keras.optimizers.MultiOptimizer")
    return module.make_optimizer(optimizer, make_one)


def return_weights(copy: keras.Model, model: keras.Model, averages: Mapping[int, Any]) -> None:
    """Assigns weights and statistics of a copy to the original model; `averages` has what to assign, by `id`."""
    for old, new in _weight_pairs(model, copy):
        old.assign(_value(averages.get(id(new), new)))


def return_slots(copy: keras.Model, model: keras.Model, values: Mapping[str, Any]) -> None:
    """Assigns slots, iterations, learning rate and loss scale of a copy's optimizer to the original's; builds it first.

    The values have the names of checkpoints, such as `optimizer/momentum/dense/kernel`.
    """
    names = {id(variable): name for name, variable in portable_names(copy).items()}
    names = {id(old): names[id(new)] for old, new in _weight_pairs(model, copy)}
    outer, optimizer = model.optimizer, getattr(model.optimizer, "inner_optimizer", model.optimizer)
    with optimizer._distribution_strategy.scope():  # private: where the optimizer was made
        if not outer.built:
            outer.build(model.trainable_variables)
        trained = optimizer._trainable_variables  # private, as in `copy_optimizer`
        slots = slot_names(optimizer, trained, [names.get(id(v), f"other {i}") for i, v in enumerate(trained)])
        if outer is not optimizer:
            slots["loss_scale"] = outer.dynamic_scale
        for name, slot in slots.items():
            if (value := values.get(f"optimizer/{name}")) is not None:
                slot.assign(_value(value))


def _value(variable: Any) -> Any:
    return tf.convert_to_tensor(tensorflow_variable(variable)).numpy()


def _require_methods(model: keras.Model, copy: keras.Model) -> None:
    """Refuses a copy without methods of the model: Keras makes plain Sequentials and Functionals of subclasses."""
    for name in ("call", "compute_mask", "compute_loss"):
        method = getattr(type(model), name)
        if method is not getattr(type(copy), name) and not method.__module__.startswith("keras."):
            raise ValueError(f"Keras makes a {type(copy).__name__} of it, without its {name}")


def _layer_pairs(model: keras.Model, copy: keras.Model) -> Iterator[tuple[keras.Layer, keras.Layer]]:
    """Yields each layer of a model, at all depths, with its copy; first those at the top.

    Children of two layers belong together by name, or by order if Keras has numbered them anew.

    Raises:
        ValueError: if a copy holds other layers.
    """
    waiting, seen = [(model, copy)], {id(model)}
    while waiting:
        yield (pair := waiting.pop(0))
        # Private: the layers directly inside. Their order is that of attributes, which Keras's copies may lack.
        old_layers, new_layers = (list({id(each): each for each in layer._layers}.values()) for layer in pair)
        by_name = {old.name: old for old in old_layers}
        if len(by_name) == len(old_layers) and all(new.name in by_name for new in new_layers):
            old_layers = [by_name[new.name] for new in new_layers]
        if [type(old) for old in old_layers] != [type(new) for new in new_layers]:
            raise ValueError(f"its {type(pair[0]).__name__} {pair[0].name!r} holds other layers than its copy")
        children = [(old, new) for old, new in zip(old_layers, new_layers, strict=True) if id(old) not in seen]
        seen |= {id(old) for old, _ in children}
        waiting += children


def _weight_pairs(model: keras.Model, copy: keras.Model) -> list[tuple[Any, Any]]:
    """Returns the variables of a model, without states of random streams, each with its copy."""
    pairs: dict[int, tuple[Any, Any]] = {}
    for layers in _layer_pairs(model, copy):
        # Private: the variables of a layer without those of its sublayers.
        old_weights, new_weights = (layer._trainable_variables + layer._non_trainable_variables for layer in layers)
        names = [weight.name for weight in old_weights]
        by_name = {weight.name: weight for weight in new_weights}
        if len(by_name) == len(new_weights) and by_name.keys() == set(names):  # quantized layers order them anew
            new_weights = [by_name[name] for name in names]
        if len(old_weights) != len(new_weights):
            raise ValueError(
                f"its layer {layers[0].name!r} has {len(old_weights)} variables, and now {len(new_weights)}"
            )
        pairs |= {id(old): (old, new) for old, new in zip(old_weights, new_weights, strict=True)}
    if lost := [old.path for old in model.weights if id(old) not in pairs]:
        raise ValueError(f"its variables {lost[:3]} have no copy")
    if {id(new) for new in copy.weights} - {id(new) for _, new in pairs.values()}:
        raise ValueError("its layers share a variable, and those of the copy would not")
    return list(pairs.values())


def _copy_layers(model: keras.Model, copy: keras.Model) -> None:
    """Copies what layers keep beside their config, as Keras does when it writes and reads a file."""
    for old, new in _layer_pairs(model, copy):
        # Compared as configs, since Keras cannot compare maps of policies; copied, since a map belongs to its layers.
        old_policy, new_policy = (keras.dtype_policies.serialize(layer.dtype_policy) for layer in (old, new))
        if new_policy != old_policy:
            new.dtype_policy = keras.dtype_policies.deserialize(old_policy)
        if new.trainable != old.trainable:
            new.trainable = old.trainable  # of all layers below, too, whose turn comes later
        if new.weights and not old.built:
            raise ValueError(f"its layer {old.name!r} has no weights yet; call the model on an example")
        values: dict[str, Any] = {}
        old.save_own_variables(values)
        new.load_own_variables({key: keras.ops.convert_to_numpy(value) for key, value in values.items()})
        if hasattr(old, "save_assets"):
            with tempfile.TemporaryDirectory() as directory:
                old.save_assets(directory)
                new.load_assets(directory)
        config: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # a layer that another layer makes needs no config
            config = old.get_config()
        # Of a model class that only makes a graph, Keras makes a plain Functional, which needs no arguments.
        if type(old) is type(new) and (lost := lost_settings(old, new, config)):
            raise ValueError(f"the copy of its layer {old.name!r} has another {lost[0]}; let its get_config return it")


def _copy_weights(model: keras.Model, copy: keras.Model) -> None:
    """Copies values and attributes of the variables, as layers may have stored them in another form."""
    trained = {id(v) for v in model.trainable_weights}
    for old, new in _weight_pairs(model, copy):
        if (tuple(old.shape), old.dtype) != (tuple(new.shape), new.dtype):
            raise ValueError(
                f"its variable {old.path!r}, {old.dtype}{list(old.shape)}, becomes {new.path!r}, "
                f"{new.dtype}{list(new.shape)}"
            )
        new.assign(old)
        new.trainable = id(old) in trained
        new.regularizer, new.constraint = old.regularizer, old.constraint
        new.overwrite_with_gradient = old.overwrite_with_gradient


def _named(variables: Sequence[Any], weights: Sequence[Any]) -> tuple[Sequence[Any], list[str]]:
    """Returns variables and a name for each: its index among the model's weights."""
    indices = {id(weight): str(i) for i, weight in enumerate(weights)}
    return variables, [indices.get(id(v), f"other {i}") for i, v in enumerate(variables)]
