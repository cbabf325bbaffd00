"""Compiled Keras models: the spec of a model that a `compile`/`fit` script has built.

    distloop.Trainer(from_keras(compiled_model)).fit(dataset, epochs=3)

It does not know how losses and metrics are computed.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from distloop.optimizers.loss_scale import LossScaleOptimizer
from distloop.training.keras_model import supervised
from distloop.training.spec import ModelSpec


def from_keras(model: keras.Model | Callable[[], keras.Model]) -> Callable[[], ModelSpec]:
    """Returns a `model_fn` for a compiled Keras model: the one line that changes in a `compile`/`fit` script.

    Args:
        model: built and compiled; it is rebuilt inside the strategy's scope, with its weights, optimizer settings and
            slots, and stays as it is. Or a function that builds and compiles one.

    Returns:
        A `model_fn` for `Trainer`.

    Raises:
        ValueError: if the model is not built, not compiled, or cannot be rebuilt from its config.
    """
    if isinstance(model, keras.Model):
        _require_compiled(model)
        if not model.built:
            raise ValueError(
                f"The model {model.name!r} is not built, so it has no weights to take over: give it an input shape, "
                "or give from_keras a function that builds and compiles it."
            )
        return lambda: _spec_of(_rebuilt(model), model, _rebuilt_optimizer)
    if not callable(model):
        raise ValueError(
            f"from_keras was given {model!r}; it takes a compiled keras.Model or a function that makes one."
        )

    def model_fn() -> ModelSpec:
        made = model()
        if not isinstance(made, keras.Model):
            raise ValueError(
                f"The function given to from_keras returned {made!r}; it must return a compiled keras.Model."
            )
        _require_compiled(made)
        return _spec_of(made, made, lambda old, new: _rescaled(old.optimizer, _unwrapped(old.optimizer)))

    return model_fn


def _spec_of(model: keras.Model, compiled: keras.Model, optimizer_of: Callable[[Any, Any], Any]) -> ModelSpec:
    settings = compiled._compile_config.config
    return supervised(
        model,
        settings["loss"],
        optimizer_of(compiled, model),
        settings["metrics"] or (),
        weighted_metrics=settings["weighted_metrics"] or (),
        loss_weights=settings["loss_weights"],
    )


def _require_compiled(model: keras.Model) -> None:
    if not model.compiled:
        raise ValueError(
            f"The model {model.name!r} is not compiled; from_keras takes loss, optimizer and metrics from compile: "
            "call model.compile(...) first, or write a model_fn with distloop.supervised."
        )
    if type(model).train_step is not keras.Model.train_step:
        raise ValueError(
            f"The model {model.name!r} has a train_step of its own, which distloop would not call: write a model_fn "
            "with a loss_fn that computes what train_step minimizes."
        )


def _rebuilt(model: keras.Model) -> keras.Model:
    try:
        with _uncompiled(model):  # else Keras would also rebuild losses and metrics, and it finds no function by name
            copy = keras.models.clone_model(model)
        if not copy.built:
            copy.build(model.input_shape if hasattr(model, "input_shape") else None)
        copy.set_weights(model.get_weights())
    except Exception as error:
        first_line = str(error).partition("\n")[0].rstrip(" .:")
        raise ValueError(
            f"The model {model.name!r} cannot be rebuilt from its config ({first_line}): give from_keras a function "
            "that builds and compiles it."
        ) from error
    return copy


@contextlib.contextmanager
def _uncompiled(model: keras.Model) -> Iterator[None]:
    """Enters a scope in which a model counts as not compiled."""
    model.compiled = False
    try:
        yield
    finally:
        model.compiled = True


def _rebuilt_optimizer(compiled: keras.Model, model: keras.Model) -> keras.optimizers.Optimizer:
    old = _unwrapped(compiled.optimizer)
    optimizer = type(old).from_config(old.get_config())
    if old.built:
        optimizer.build(model.trainable_variables)
        for new_variable, old_variable in zip(optimizer.variables, old.variables, strict=True):
            new_variable.assign(old_variable)
    return _rescaled(compiled.optimizer, optimizer)


def _unwrapped(optimizer: Any) -> keras.optimizers.Optimizer:
    """Returns the optimizer inside Keras's loss-scale optimizer, which compile adds under mixed_float16."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _rescaled(old: Any, optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns an optimizer that scales the loss if Keras did: layers keep their precision, whatever the Config says."""
    if not isinstance(old, keras.optimizers.LossScaleOptimizer):
        return optimizer
    scale = float(old.dynamic_scale) if old.built else old.initial_scale
    return LossScaleOptimizer(optimizer, min(max(scale, 1.0), 2.0**24), growth_steps=old.dynamic_growth_steps)
