"""Keras models: specs for `(x, y)` and `(x, y, sample_weight)` batches with Keras losses, and for compiled models.

    spec = supervised(model, "mse", keras.optimizers.Adam(), metrics=["mae"])                # inside model_fn
    distloop.Trainer(from_keras(compiled_model)).fit(dataset, epochs=3)                      # an existing script

It does not know how a step goes. Keras's reductions are not used: values stay per example, and are divided once.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.optimizers.loss_scale import LossScaleOptimizer
from distloop.training.metrics import Weighted, weighted
from distloop.training.spec import ModelSpec


def supervised(
    model: keras.Model,
    loss: Any,
    optimizer: keras.optimizers.Optimizer,
    metrics: Any = (),
    *,
    weighted_metrics: Any = (),
    loss_weights: Any = None,
) -> ModelSpec:
    """Returns the spec for batches `(x, y)` or `(x, y, sample_weight)`; to be called inside `model_fn`.

    Args:
        model: called as `model(x, training=training)`.
        loss: a Keras loss, its name, or a function of `(y_true, y_pred)` that returns values per example; for several
            outputs a dict or list of losses.
        optimizer: a plain Keras optimizer.
        metrics: Keras metrics, their names, or functions as for `loss`; not weighted by `sample_weight`, as in Keras.
            For several outputs a dict or list of lists.
        weighted_metrics: the same, weighted.
        loss_weights: for several outputs a dict or list of factors; else a factor.

    Returns:
        The spec. `loss` is the mean over examples, weighted by `sample_weight` and divided by the sum of the weights
        (Keras divides by their number); several outputs report `<output>_loss` too.

    Raises:
        ValueError: if a loss sums over the batch, or dicts and lists do not match the outputs.
    """
    names = list(getattr(model, "output_names", None) or [])
    measures = [*_measures(metrics, names, is_weighted=False), *_measures(weighted_metrics, names, is_weighted=True)]
    stateful = {measure.name: measure.metric for measure in measures if measure.metric is not None}

    def loss_fn(batch: Any, training: bool) -> dict[str, Any]:
        if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
            length = f" and length {len(batch)}" if hasattr(batch, "__len__") else ""
            raise ValueError(
                f"A batch of type {type(batch).__name__}{length} was given; supervised training takes (x, y) or "
                "(x, y, sample_weight): map the dataset to such tuples."
            )
        x, y, *rest = batch
        outputs = _by_name(model(x, training=training), names, "outputs")
        targets = _by_name(y, list(outputs), "targets")
        needed = [name for name in outputs if _spread(loss, list(outputs)).get(name) is not None]
        if missing := [name for name in needed if name not in targets]:
            raise ValueError(
                f"The targets {list(targets)} were given, but none for the outputs {missing}, which have a loss: give "
                "one for each, by the output's name."
            )
        if len(outputs) > 1 and rest and isinstance(rest[0], (Mapping, list, tuple)):
            raise ValueError(
                "A model with several outputs was given sample weights for each of them; their losses have no common "
                "weights: write a ModelSpec with a loss_fn of your own, and distloop.weighted."
            )
        weights = _spread(rest[0] if rest else None, list(outputs))
        losses = _spread(loss, list(outputs))
        factors = _spread(loss_weights, list(outputs))
        values: dict[str, Any] = {}
        for name, output in outputs.items():
            if losses.get(name) is not None:
                value = _weigh(_loss_values(losses[name], targets[name], output), weights.get(name))
                values[name] = (value, 1.0 if factors.get(name) is None else float(factors[name]))
        reported = {"loss": _sum_of_losses(values)}
        if len(outputs) > 1:
            reported |= {f"{name}_loss": value for name, (value, _) in values.items()}
        for measure in measures:
            target, output = targets[measure.output or names[0]], outputs[measure.output or names[0]]
            weight = weights.get(measure.output or names[0]) if measure.is_weighted else None
            reported[measure.name] = measure(target, output, weight)
        return reported

    if not names:
        names = ["output"]

    def predict_fn(batch: Any) -> Any:
        return model(batch[0] if isinstance(batch, (tuple, list)) else batch, training=False)

    return ModelSpec(model, optimizer, loss_fn, predict_fn=predict_fn, metrics=stateful)


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


class _Measure:
    """A metric of one output: a mean of values per example if possible, else a Keras metric with state."""

    def __init__(self, identifier: Any, output: str | None, prefix: str, is_weighted: bool):
        self.output = output
        self.is_weighted = is_weighted
        self._identifier = identifier
        self.metric: keras.metrics.Metric | None = None
        name: Any
        if isinstance(identifier, str):
            # The function for "accuracy" depends on the shapes of target and output, known when the step is traced.
            name = identifier
            if identifier.lower() not in ("accuracy", "acc", "crossentropy", "ce"):
                self._identifier = keras.metrics.get(identifier)
        else:
            name = getattr(identifier, "name", None) or getattr(identifier, "__name__", type(identifier).__name__)
        if isinstance(self._identifier, type):
            self._identifier = self._identifier()
        if isinstance(self._identifier, keras.metrics.Metric) and not _mean_fn(self._identifier):
            self.metric = type(self._identifier).from_config(self._identifier.get_config())
        self.name = prefix + name

    def __call__(self, target: Any, output: Any, weight: Any) -> Any:
        """Returns the value of `loss_fn` under the metric's name."""
        if self.metric is not None:
            return (target, output) if weight is None else (target, output, weight)
        measure = self._identifier
        if isinstance(measure, str):
            measure = _by_shapes(measure, target, output)
        fn = _mean_fn(measure) or measure
        return _weigh(fn(*_same_rank(target, output)), weight)


def _same_rank(target: tf.Tensor, output: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns labels and outputs; labels [B] of outputs [B, 1] get a last axis, as in Keras."""
    if target.shape.rank + 1 == output.shape.rank and output.shape[-1] == 1:
        return target[..., tf.newaxis], output
    return target, output


def _mean_fn(metric: Any) -> Callable[[Any, Any], Any] | None:
    """Returns the function of a metric that is a mean of a function's values; None for other metrics."""
    is_metric = isinstance(metric, keras.metrics.Metric)
    if not is_metric or type(metric).update_state is not keras.metrics.MeanMetricWrapper.update_state:
        return None
    return lambda y_true, y_pred: metric._fn(y_true, y_pred, **metric._fn_kwargs)


def _by_shapes(name: str, target: tf.Tensor, output: tf.Tensor) -> Callable[[Any, Any], Any]:
    """Returns the function that Keras chooses for "accuracy" or "crossentropy"."""
    if output.shape[-1] == 1:
        kind = "binary"
    elif target.shape.rank < output.shape.rank or target.shape[-1] == 1:
        kind = "sparse_categorical"
    else:
        kind = "categorical"
    measure = "accuracy" if name.lower() in ("accuracy", "acc") else "crossentropy"
    return getattr(keras.metrics, f"{kind}_{measure}")


def _loss_values(loss: Any, target: Any, output: Any) -> Any:
    """Computes a loss per example, `[B, ...]`, float32, with the mask of the output as weights."""
    if isinstance(loss, str) and loss.lower() in ("crossentropy", "ce"):
        loss = _by_shapes(loss, target, output)
    if isinstance(loss, (str, dict)):
        loss = keras.losses.get(loss)
    mask = getattr(output, "_keras_mask", None)
    if isinstance(loss, keras.losses.Loss):
        if loss.reduction == "sum":
            raise ValueError(
                f"The loss {loss.name!r} has reduction='sum', which makes the step's size depend on the batch's; "
                "distloop divides by the number of examples: leave reduction out."
            )
        values = loss.call(tf.cast(target, loss.dtype), tf.cast(output, loss.dtype))
    else:
        values = loss(*_same_rank(tf.cast(target, tf.float32), tf.cast(output, tf.float32)))
    return values if mask is None else weighted(values, tf.cast(mask, tf.float32))


def _weigh(values: Any, weights: Any) -> Any:
    """Returns values with additional weights; None adds none."""
    if weights is None:
        return values
    weights = tf.cast(weights, tf.float32)
    if not isinstance(values, Weighted):
        if weights.shape.rank == 2 and weights.shape[-1] == 1 and values.shape.rank == 1:
            weights = tf.squeeze(weights, -1)  # [B, 1] -> [B], as Keras does
        return weighted(values, weights)
    missing = values.weights.shape.rank - weights.shape.rank
    weights = tf.reshape(weights, tf.concat([tf.shape(weights), [1] * missing], 0))
    return weighted(values.values, values.weights * weights)


def _sum_of_losses(values: Mapping[str, tuple[Any, float]]) -> Any:
    """Returns the weighted sum of the outputs' losses."""
    if not values:
        raise ValueError("The model was given no loss for any of its outputs: compile it with one.")
    if len(values) == 1:
        value, factor = next(iter(values.values()))
        if factor == 1.0:
            return value
        return Weighted(value.values * factor, value.weights) if isinstance(value, Weighted) else value * factor
    # Each output has its own mean; the losses can be summed per example only if all have the same weights.
    if any(isinstance(value, Weighted) and value.weights.shape.rank != 1 for value, _ in values.values()):
        raise ValueError(
            "A model with several outputs was given masks or weights within examples; their losses have no common "
            "weight: write a ModelSpec with a loss_fn of your own."
        )
    total: Any = 0.0
    for value, factor in values.values():
        per_example = value.values if isinstance(value, Weighted) else value
        per_example = tf.reduce_mean(per_example, axis=list(range(1, per_example.shape.rank)))  # [B, ...] -> [B]
        total += per_example * factor
    shared = [value.weights for value, _ in values.values() if isinstance(value, Weighted)]
    return weighted(total, shared[0]) if shared else total


def _by_name(structure: Any, names: Sequence[str], role: str) -> dict[str, Any]:
    """Returns outputs or targets (one tensor, a list or a dict) as a dict by name."""
    if isinstance(structure, Mapping):
        return dict(structure)
    if not isinstance(structure, (list, tuple)):
        return {(names or ["output"])[0]: structure}
    if role == "targets" and len(names) != len(structure):
        raise ValueError(f"{len(structure)} targets were given for {len(names)} outputs: give one for each.")
    names = names if len(names) == len(structure) else [f"output_{i}" for i in range(len(structure))]
    return dict(zip(names, structure, strict=True))


def _spread(given: Any, names: Sequence[str]) -> dict[str, Any]:
    """Returns an argument by output: from a dict by name, a list in order, or one value for all outputs."""
    if isinstance(given, Mapping) and not set(given) - set(names):
        return dict(given)
    if isinstance(given, Mapping):
        raise ValueError(f"{sorted(given)} were given by name; the outputs are {list(names)}: use those names.")
    if isinstance(given, (list, tuple)):
        if len(given) != len(names):
            raise ValueError(
                f"A list of {len(given)} was given for the {len(names)} outputs {list(names)}: give one for each."
            )
        return dict(zip(names, given, strict=True))
    return dict.fromkeys(names, given)


def _measures(given: Any, names: Sequence[str], *, is_weighted: bool) -> list[_Measure]:
    """Returns the metrics of all outputs; if there are several, the output's name is a prefix of the metric's."""
    if not given:
        return []
    if len(names) < 2:
        if isinstance(given, Mapping):
            given = next(iter(given.values()))
        flat = given if isinstance(given, (list, tuple)) else [given]
        return [_Measure(identifier, None, "", is_weighted) for identifier in flat]
    measures = []
    for name, identifiers in _spread(given, names).items():
        flat = identifiers if isinstance(identifiers, (list, tuple)) else [identifiers]
        measures += [_Measure(i, name, f"{name}_", is_weighted) for i in flat if i is not None]
    return measures


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
