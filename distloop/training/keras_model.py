"""Keras models trained with Keras losses and metrics: a spec for `(x, y)` and `(x, y, sample_weight)` batches.

    spec = supervised(model, "mse", keras.optimizers.Adam(), metrics=["mae"])                # inside model_fn

It does not know how a step goes. Keras's reductions are not used: values stay per example, and are divided once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

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
