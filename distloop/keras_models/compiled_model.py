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
import tensorflow as tf

from distloop.distributed import devices
from distloop.errors import require_call
from distloop.keras_models.measures import metrics_made_again
from distloop.keras_models.model_copies import copy_model, copy_optimizer, return_slots, return_weights
from distloop.keras_models.supervised import supervised
from distloop.log import log
from distloop.model.spec import ModelSpec, refuse_tf_keras
from distloop.model.state import TrainState
from distloop.optimizers.loss_scale import LossScaleOptimizer
from distloop.variables import tensorflow_variable

_originals: "weakref.WeakKeyDictionary[Any, tuple[Any, ...]]" = weakref.WeakKeyDictionary()  # fingerprints, by copy


def from_keras(model: keras.Model | Callable[[], keras.Model]) -> Callable[[], ModelSpec]:
    """Returns a `model_fn` for a compiled Keras model: the one line that changes in a `compile`/`fit` script.

    Args:
        model: built and compiled; it is rebuilt inside the strategy's scope, with its weights, optimizer settings and
            slots. Whenever `fit` ends, after an error or Ctrl-C too, it gets the trained weights and statistics, and
            its optimizer the slots, iterations and learning rate. With `average_decay` it gets the averaged weights, as
            Keras's `fit` ends with them under `use_ema`; the Trainer goes on from those that train. Or a function that
            builds and compiles one.

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
        raise ValueError(
            f"from_keras was given {model!r}; it takes a compiled keras.Model or a function that makes one."
        )
    require_call(model, "The function given to from_keras")

    def model_fn() -> ModelSpec:
        made = model()
        refuse_tf_keras(made)
        if not isinstance(made, keras.Model):
            raise ValueError(
                f"The function given to from_keras returned {made!r}; it must return a compiled keras.Model."
            )
        _require_compiled(made)
        return _spec_of(made, made, _unwrapped(made.optimizer))

    return model_fn


@contextlib.contextmanager
def weights_returned(state: TrainState, *, is_dry_run: bool = False) -> Iterator[None]:
    """Gives the model that `from_keras` was given what was trained, on exit, after an error too: see `from_keras`.

    A warning names what others have changed in that model since it was copied or set, which is lost then. A dry run
    leaves the model as it is.
    """
    if is_dry_run:
        yield
        return
    if (model := state.spec.original) is not None and _originals[state.model] != _fingerprint(model):
        log.warning(
            "The model %r has changed (weights, learning rate or compile) since the Trainer copied or set it: the "
            "Trainer goes on from its copy, and sets the model at the end; to go on from it, make another Trainer.",
            model.name,
        )
    try:
        yield
    except BaseException:
        _return(state, is_complete=False)
        raise
    _return(state, is_complete=True)


def _return(state: TrainState, *, is_complete: bool) -> None:
    """Assigns weights, or their averages, statistics and slots; after an error without what other workers store."""
    if (model := state.spec.original) is None:
        return

    def is_at_hand(value: Any) -> bool:
        return is_complete or getattr(value, "is_here", True)

    averages = {id(v): a for v, a in state.average.pairs if is_at_hand(a)} if state.average is not None else {}
    return_weights(state.model, model, averages)
    return_slots(state.model, model, {name: v for name, v in state.all_variables().items() if is_at_hand(v)})
    _originals[state.model] = _fingerprint(model)


def _fingerprint(model: keras.Model) -> tuple[Any, ...]:
    """Returns what changes with the weights, the learning rate and each call of `compile`."""
    rate = _unwrapped(model.optimizer)._learning_rate
    weights = functools.reduce(lambda sum, weights: zlib.crc32(weights.tobytes(), sum), model.get_weights(), 0)
    return weights, float(rate) if isinstance(rate, keras.Variable) else rate, model._compile_config


def _spec_of_copy(model: keras.Model) -> ModelSpec:
    """Returns the spec of a copy of a compiled model, which is compiled as the model is, with the copied optimizer."""
    copy = copy_model(model)
    optimizer = copy_optimizer(_unwrapped(model.optimizer), model, copy)
    spec = _spec_of(copy, model, optimizer).of_copy(model)
    settings = dict(model._compile_config.config)
    settings |= {name: metrics_made_again(settings[name]) for name in ("metrics", "weighted_metrics")}
    copy.compile(**{**settings, "optimizer": optimizer, "auto_scale_loss": False})
    _originals[copy] = _fingerprint(model)
    return spec


def _spec_of(model: keras.Model, compiled: keras.Model, optimizer: keras.optimizers.Optimizer) -> ModelSpec:
    settings = compiled._compile_config.config
    if type(optimizer).__name__ == "ScheduleFreeAdamW" and not optimizer.built and not compiled.run_eagerly:
        raise ValueError(
            "The optimizer is a ScheduleFreeAdamW that is not built: Keras's fit would make its momentum in a graph, "
            "where it begins at 0 and not at the weights, and train to others than distloop: call "
            "model.optimizer.build(model.trainable_variables) after compile, which is right for both."
        )
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
    for method in ("train_step", "test_step", "predict_step", "compute_metrics"):
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise ValueError(
                f"The model {model.name!r} has a {method} of its own, which distloop would not call: write a model_fn "
                f"that returns a ModelSpec whose loss_fn or predict_fn computes what {method} does."
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
