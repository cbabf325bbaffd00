"""Compiled Keras models: the spec of a model that a `compile`/`fit` script has built.

    distloop.Trainer(from_keras(compiled_model)).fit(dataset, epochs=3)

It does not know how losses and metrics are computed.
"""

import contextlib
import functools
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distloop.distributed import devices
from distloop.errors import require_call
from distloop.keras_models.measures import metrics_made_again
from distloop.keras_models.model_copies import copy_model, copy_optimizer, for_loop, return_slots, return_weights
from distloop.keras_models.supervised import supervised
from distloop.log import log
from distloop.model.spec import ModelSpec, refuse_tf_keras
from distloop.model.state import TrainState
from distloop.optimizers.loss_scale import LossScaleOptimizer
from distloop.variables import tensorflow_variable

# Of a Keras model, what distloop does itself.
_NOT_CALLED = (
    *("train_step", "test_step", "predict_step", "make_train_function", "make_test_function", "make_predict_function"),
    *("compute_metrics", "get_metrics_result", "reset_metrics", "trainable_variables", "trainable_weights"),
)

# By copy: the original's fingerprint when it was copied or set, and the one that a warning told last.
_originals: "weakref.WeakKeyDictionary[Any, list[tuple[Any, ...]]]" = weakref.WeakKeyDictionary()


def from_keras(model: keras.Model | Callable[[], keras.Model]) -> Callable[[], ModelSpec]:
    """Returns a `model_fn` for a compiled Keras model: the one line that changes in a `compile`/`fit` script.

    Args:
        model: built and compiled; it is rebuilt inside the strategy's scope, with its weights, optimizer settings and
            slots. Whenever `fit` ends, after an error or Ctrl-C too, it gets the trained weights and statistics, and
            its optimizer the slots, iterations and learning rate. With `average_decay` it gets the averaged weights, as
            Keras's `fit` ends with them under `use_ema`; the Trainer goes on from those that train. With
            `ScheduleFreeAdamW` it gets the averages x, at which another Trainer begins. Or a function that builds and
            compiles one.

    Returns:
        A `model_fn` for `Trainer`.

    Raises:
        ValueError: if the model is not built, not compiled, or cannot be rebuilt from its config.
    """
    refuse_tf_keras(model)
    if isinstance(model, keras.Model):
        _require_compiled(model)
        if not model.built:
            raise ValueError(
                f"The model {model.name!r} is not built, so it has no weights to take over: give it an input shape, "
                "or give from_keras a function that builds and compiles it."
            )
        variables = map(tensorflow_variable, (*model.variables, *model.optimizer.variables))
        if any(isinstance(variable, tf.distribute.DistributedValues) for variable in variables):
            raise devices.another_scope(f"The model {model.name!r} was made within")
        return lambda: _spec_of_copy(model)
    if not callable(model):
        raise ValueError(f"from_keras was given {model!r}; give a compiled keras.Model or a function that makes one.")
    require_call(model, "The function given to from_keras")

    def model_fn() -> ModelSpec:
        made = model()
        refuse_tf_keras(made)
        if not isinstance(made, keras.Model):
            raise ValueError(f"The function given to from_keras returned {made!r}; it returns a compiled keras.Model.")
        _require_compiled(made)
        return _spec_of(made, made, for_loop(_unwrapped(made.optimizer)))

    return model_fn


@contextlib.contextmanager
def weights_returned(state: TrainState, *, is_dry_run: bool = False) -> Iterator[None]:
    """Gives the model that `from_keras` was given what was trained, on exit, after an error too: see `from_keras`.

    What others have changed in that model is lost then: call `warn_of_changes` before. A dry run leaves it as it is.
    """
    is_complete = False
    try:
        yield
        is_complete = True
    finally:
        if not is_dry_run:
            _return(state, is_complete=is_complete)


def warn_of_changes(state: TrainState) -> None:
    """Warns if the model that `from_keras` was given has changed since it was copied or set; once for each change."""
    if (model := state.spec.original) is not None and (now := _fingerprint(model)) not in _originals[state.model]:
        log.warning(
            "The model %r has changed (weights, learning rate or compile) since the Trainer copied or set it: the "
            "Trainer goes on from its copy, and fit and restore set the model; to go on from it, make another Trainer.",
            model.name,
        )
        _originals[state.model][1:] = [now]


def _return(state: TrainState, *, is_complete: bool) -> None:
    """Assigns weights, or their averages, statistics and slots; after an error without what other workers store."""
    if (model := state.spec.original) is None:
        return

    def is_at_hand(value: Any) -> bool:
        return is_complete or getattr(value, "is_here", True)

    pairs = state.for_evaluation.pairs if state.for_evaluation is not None else []
    averages = {id(v): average for v, average in pairs if is_at_hand(average)}
    return_weights(state.model, model, averages)
    return_slots(state.model, model, {name: v for name, v in state.all_variables().items() if is_at_hand(v)})
    _originals[state.model] = [_fingerprint(model)]


def _fingerprint(model: keras.Model) -> tuple[Any, ...]:
    """Returns what changes with the weights, the learning rate and each call of `compile`."""
    optimizer = _unwrapped(model.optimizer)
    rates = (each._learning_rate for each in (optimizer, *getattr(optimizer, "optimizers", ())))
    values = (np.ravel(np.asarray(tensorflow_variable(w).value())) for w in model.weights)  # on CPUs without a copy
    weights = functools.reduce(lambda crc, value: zlib.crc32(value.view(np.uint8).data, crc), values, 0)
    return weights, *(float(r) if isinstance(r, keras.Variable) else r for r in rates), model._compile_config


def _spec_of_copy(model: keras.Model) -> ModelSpec:
    """Returns the spec of a copy of a compiled model, which is compiled as the model is, with the copied optimizer."""
    copy = copy_model(model)
    optimizer = copy_optimizer(_unwrapped(model.optimizer), model, copy)
    settings = dict(model._compile_config.config)
    settings |= {name: metrics_made_again(settings[name]) for name in ("metrics", "weighted_metrics")}
    settings["loss"] = getattr(model, "_student_loss_for_serialization", settings["loss"])  # private, of a Distiller
    copy.compile(**{**settings, "optimizer": optimizer, "auto_scale_loss": False})
    _originals[copy] = [_fingerprint(model)]
    return _spec_of(copy, model, optimizer).of_copy(model)


def _spec_of(model: keras.Model, compiled: keras.Model, optimizer: keras.optimizers.Optimizer) -> ModelSpec:
    settings = compiled._compile_config.config
    jit = settings.get("jit_compile")
    for name, value, field in (("run_eagerly", compiled.run_eagerly, "eager"), ("jit_compile", jit, "jit_compile")):
        if value is True:
            log.warning("%s=True of compile is left to the Config: set Config(%s=True) for it.", name, field)
    return supervised(
        model,
        settings["loss"],
        _rescaled(compiled.optimizer, optimizer),
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
    for method in _NOT_CALLED:
        owner = next(kind for kind in type(model).__mro__ if method in vars(kind))
        if method in vars(model) or not owner.__module__.startswith("keras."):
            computing = f"whose loss_fn or predict_fn computes what {method} does"
            instead = "with trainable, a pattern" if method.startswith("trainable") else computing
            raise ValueError(
                f"The model {model.name!r} has a {method} of its own, which distloop would not call: write a model_fn "
                f"that returns a ModelSpec {instead}."
            )


def _unwrapped(optimizer: Any) -> keras.optimizers.Optimizer:
    """Returns the optimizer inside Keras's loss-scale optimizer, which compile adds for float16."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _rescaled(old: Any, optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns an optimizer that scales the loss if Keras did: layers keep their precision, whatever the Config says."""
    if not isinstance(old, keras.optimizers.LossScaleOptimizer):
        return optimizer
    scale = float(old.dynamic_scale) if old.built else old.initial_scale
    # 2^15 is Keras's own start, at which the first steps of many models overflow.
    settings: dict[str, Any] = {} if scale == 2.0**15 else {"initial_scale": min(max(scale, 1.0), 2.0**24)}
    return LossScaleOptimizer(optimizer, growth_steps=old.dynamic_growth_steps, **settings)
