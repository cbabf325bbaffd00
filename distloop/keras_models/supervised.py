"""Supervised learning: specs of Keras models with Keras losses, for `(x, y)` and `(x, y, sample_weight)`.

spec = supervised(model, "mse", keras.optimizers.Adam(), metrics=["mae"])                # inside model_fn
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from distloop.data.shards import batch_size
from distloop.installed import import_part
from distloop.keras_models.losses import loss_values, per_example, resolve_loss, weigh
from distloop.keras_models.measures import LayerMetrics, Measure, make_measures, spread
from distloop.log import log
from distloop.model.metrics import Weighted
from distloop.model.spec import ModelSpec


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

    Losses and metrics are Keras's, less their reduction: masks of outputs and of values (`ignore_class`) count as in
    Keras. A `compute_loss` of the model's own replaces `loss`; it returns values per example. So does the loss of a
    compiled `keras.distillation.Distiller`, by Keras's formula.

    Args:
        model: called as Keras's `fit` calls it: with `training` if its `call` takes that, else as in inference.
        loss: a Keras loss, its name, or a function of `(y_true, y_pred)` that returns values per example; for several
            outputs a dict or list of losses. None for a model that is trained by its `add_loss` alone: batches may be
            `x` then, and `loss` is the sum of these losses.
        optimizer: a plain Keras optimizer.
        metrics: Keras metrics, their names, or functions as for `loss`; not weighted by `sample_weight`, as in Keras.
            For several outputs a dict or list of lists.
        weighted_metrics: the same, weighted.
        loss_weights: for several outputs a dict or list of factors; else a factor.

    Returns:
        The spec. `loss` is the mean over examples, weighted by `sample_weight` and divided by the sum of the weights
        (Keras divides by their number); several outputs report `<output>_loss` too, and where outputs of one layer
        have one name, that of the last, as in Keras. Lists match a dict of outputs in the order of its sorted keys.

    Raises:
        ValueError: if a loss sums over the batch, dicts and lists do not match the outputs, or the model is none of
            Keras's, such as a network in stages.
    """
    if not isinstance(model, keras.layers.Layer):
        raise ValueError(
            f"supervised was given a {type(model).__name__}; it takes a keras.Model: return ModelSpec(model, "
            "optimizer, loss_fn), whose loss_fn calls it."
        )
    measures = make_measures(metrics, weighted_metrics, _names_before_call(model))
    call = _caller(model)
    of_layers = LayerMetrics(model, [measure.name for measure in measures])
    has_own_loss = getattr(type(model), "compute_loss", None) not in (None, keras.Model.compute_loss)
    compute_loss = getattr(model, "compute_loss", None)
    if isinstance(model, keras.distillation.Distiller):
        module = import_part("distillation.distiller_values", "keras.distillation.Distiller")
        compute_loss = module.make_values(model)
    has_losses = not has_own_loss and any(each is not None for each in keras.tree.flatten(loss))

    def loss_fn(batch: Any, training: bool) -> dict[str, Any]:
        x, y, sample_weight = _unpack(batch, needs_targets=has_losses or bool(measures))
        with of_layers.recorded(batch_size(x)) as reported:
            y_pred = call(x, training)
            if has_own_loss:
                reported["loss"] = _own_loss(model, compute_loss, (x, y, y_pred, sample_weight), training)
        if not has_losses and not has_own_loss:
            reported["loss"] = _added_losses(model, batch_size(x))
        if has_losses or measures:
            named = _named_outputs(y_pred, getattr(model, "output_names", None) or [])
            outputs = _with_targets(named, y, sample_weight, loss if has_losses else None)
            if any(output.loss is not None for output in outputs):
                reported |= _compiled_losses(outputs, loss_weights)
            reported |= {measure.name: _measured(measure, outputs) for measure in measures}
        return reported

    def predict_fn(batch: Any) -> Any:
        with of_layers.recorded(1):  # and dropped
            return call(batch[0] if isinstance(batch, (tuple, list)) else batch, False)

    stateful = {measure.name: measure.metric for measure in measures if measure.metric is not None} | dict(of_layers)
    return ModelSpec(model, optimizer, loss_fn, predict_fn=predict_fn, metrics=stateful)


def _caller(model: keras.Model) -> Callable[[Any, bool], Any]:
    """Returns a function that calls a model as Keras's `fit` does; warns if `training` cannot reach a layer."""
    if "training" in signature(model.call).parameters:
        return lambda x, training: model(x, training=training)
    unreached = [layer.name for layer in model._flatten_layers() if _differs_in_training(layer)]
    if unreached:
        log.warning(
            "The model %r has no `training` argument in its call, so these layers run in inference mode while it is "
            "trained, as in Keras's fit: %s. To train with them, write call(self, inputs, training=None).",
            model.name,
            ", ".join(unreached),
        )
    return lambda x, training: model(x)


def _differs_in_training(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer of Keras computes something else in training: with batch statistics or random numbers."""
    return isinstance(layer, keras.layers.BatchNormalization) or getattr(layer, "seed_generator", None) is not None


def _unpack(batch: Any, *, needs_targets: bool) -> tuple[Any, Any, Any]:
    """Returns the inputs, targets and sample weights of a batch, the last two None if it has none."""
    if not needs_targets and not isinstance(batch, (tuple, list)):
        batch = (batch,)
    if not isinstance(batch, (tuple, list)) or not 2 - (not needs_targets) <= len(batch) <= 3:
        length = f" of length {len(batch)}" if isinstance(batch, (tuple, list, Mapping)) else ""
        given = "features without labels were" if tf.is_tensor(batch) else f"a {type(batch).__name__}{length} was"
        raise ValueError(
            f"In a batch {given} given; Keras's losses take (x, y) or (x, y, sample_weight): give labels, too, as in "
            "fit(x, y), or map the dataset to such tuples."
        )
    for role, entry in zip(("x", "y", "sample_weight"), batch, strict=False):
        if any(tensor is not None and tensor.shape.rank is None for tensor in tf.nest.flatten(entry)):
            raise ValueError(
                f"The dataset does not tell the number of axes of {role}, which losses and metrics depend on: set it, "
                "as in dataset.map(lambda x, y: (x, tf.ensure_shape(y, [None, 10])))."
            )
    x, y, sample_weight = [*batch, None, None][:3]
    return x, y, sample_weight


def _names_before_call(model: Any) -> list[str]:
    """Returns the names of a model's outputs; none if it does not know them before it is called."""
    names = getattr(model, "output_names", None)
    return [name for name, _ in _named_outputs(model.output, names)] if names else []


def _named_outputs(outputs: Any, names: Sequence[str]) -> list[tuple[str, Any]]:
    """Returns a model's outputs (one tensor, a list or a dict), each with its name, in Keras's order.

    Several may have one name, such as those of a layer that is called twice; and the model may have no names.
    """
    if isinstance(outputs, Mapping):
        named = [(path[0], outputs[path[0]]) for path, _ in keras.tree.flatten_with_path(outputs)]
    elif isinstance(outputs, (list, tuple)):
        names = names if len(names) == len(outputs) else [f"output_{i}" for i in range(len(outputs))]
        named = list(zip(names, outputs, strict=True))
    else:
        named = [((names or ["output"])[0], outputs)]
    if nested := sorted({name for name, output in named if isinstance(output, (Mapping, list, tuple))}):
        raise ValueError(
            f"The model's outputs {nested} are dicts or lists themselves; losses and metrics take one dict or list of "
            "tensors: return such, or write a ModelSpec with a loss_fn of your own."
        )
    return named


class _Output(NamedTuple):
    """An output of a model, with what belongs to it; None: it has no such."""

    name: str
    value: tf.Tensor
    target: Any
    weight: Any
    loss: Any


def _with_targets(named: Sequence[tuple[str, Any]], targets: Any, sample_weight: Any, loss: Any) -> list[_Output]:
    """Returns a model's outputs with targets, sample weights and losses, which are given by name, in lists or alone."""
    names = [name for name, _ in named]
    losses = spread(loss, names)
    columns = (_targets_by_output(targets, names, losses), _weights_by_output(sample_weight, names), losses)
    return [_Output(*each, *others) for each, *others in zip(named, *columns, strict=True)]


def _targets_by_output(targets: Any, names: Sequence[str], losses: Sequence[Any]) -> list[Any]:
    """Returns targets (one tensor, a list or a dict) by output; a list may hold targets of those with a loss alone."""
    with_loss = [name for name, loss in zip(names, losses, strict=True) if loss is not None]
    if isinstance(targets, Mapping):
        if missing := [name for name in with_loss if name not in targets]:
            raise ValueError(
                f"The targets {list(targets)} were given, but none for the outputs {missing}, which have a loss: give "
                "one for each, by the output's name."
            )
        return [targets.get(name) for name in names]
    targets = list(targets) if isinstance(targets, (list, tuple)) else [targets]
    if len(targets) == len(names):
        return targets
    if len(targets) != len(with_loss):
        raise ValueError(f"{len(targets)} targets were given for {len(with_loss)} outputs: give one for each.")
    return [targets.pop(0) if loss is not None else None for loss in losses]


def _weights_by_output(sample_weight: Any, names: Sequence[str]) -> list[Any]:
    """Returns sample weights by output."""
    if len(names) > 1 and isinstance(sample_weight, (Mapping, list, tuple)):
        raise ValueError(
            "A model with several outputs was given sample weights for each of them; their losses have no common "
            "weights: write a ModelSpec with a loss_fn of your own, and distloop.weighted."
        )
    return spread(sample_weight, names)


def _own_loss(model: keras.Model, compute_loss: Any, arguments: tuple[Any, Any, Any, Any], training: bool) -> tf.Tensor:
    """Returns the values of a `compute_loss` of the model's own."""
    settings = {"training": training} if "training" in signature(compute_loss).parameters else {}
    names = ("x", "y", "y_pred", "sample_weight")
    try:
        values = compute_loss(**dict(zip(names, arguments, strict=True)), **settings)
    except ValueError as error:
        if "No loss to compute" not in str(error):
            raise
        raise ValueError(
            f"compute_loss of the model {model.name!r} asks Keras for the loss of compile, which is a single number: "
            "compute one value per example in it, without super().compute_loss."
        ) from error
    if model.losses:
        raise ValueError(
            f"The model {model.name!r} has a compute_loss of its own and regularizers or an add_loss too, which "
            "distloop cannot tell from what compute_loss adds: write a ModelSpec with a loss_fn instead."
        )
    size = batch_size(arguments[0])
    return per_example(f"compute_loss of the model {model.name!r}", values, size if isinstance(size, int) else None)


def _added_losses(model: keras.Model, size: tf.Tensor | int) -> tf.Tensor:
    """Returns the losses that a model adds itself, as a value of every example, `[size]`.

    They have no gradient here: distloop adds the gradient of `model.losses` to that of every loss.
    """
    if not model.losses:
        raise ValueError("The model was given no loss for any of its outputs: compile it with one.")
    total = tf.add_n([tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in model.losses])
    return tf.fill([size], tf.stop_gradient(total))


def _compiled_losses(outputs: Sequence[_Output], loss_weights: Any) -> dict[str, Any]:
    """Returns the sum of the losses of the outputs; of several outputs each loss, too: of one name the last."""
    with_loss = [output for output in outputs if output.loss is not None]
    is_list_of_losses = isinstance(loss_weights, (list, tuple)) and len(loss_weights) == len(with_loss)
    weighed = with_loss if is_list_of_losses else outputs
    reported, scaled = {}, []
    for output, factor in zip(weighed, spread(loss_weights, [output.name for output in weighed]), strict=True):
        if output.loss is None:
            continue
        loss = resolve_loss(output.loss, output.target, output.value)
        value, mask = loss_values(loss, output.target, output.value)
        if mask is not None and len(outputs) > 1:
            raise ValueError(
                f"A model with several outputs was given masks or weights within examples; {output.name!r} has a mask, "
                "so its losses have no common weight: write a ModelSpec with a loss_fn of your own."
            )
        reported[f"{output.name}_loss"] = weigh(f"loss {loss.name!r}", value, mask, output.weight)
        scaled.append(_scaled(reported[f"{output.name}_loss"], factor))
    return {"loss": scaled[0]} if len(outputs) == 1 else {"loss": _sum_of_losses(scaled)} | reported


def _scaled(value: tf.Tensor | Weighted, factor: float | None) -> tf.Tensor | Weighted:
    if factor is None or float(factor) == 1.0:
        return value
    return value._replace(values=value.values * factor) if isinstance(value, Weighted) else value * factor


def _sum_of_losses(values: Sequence[tf.Tensor | Weighted]) -> tf.Tensor | Weighted:
    """Returns the sum of the outputs' losses per example, `[B]`, with the weights that they share."""
    if any(isinstance(value, Weighted) and value.weights.shape.rank != 1 for value in values):
        raise ValueError(
            "A model with several outputs was given masks or weights within examples; its losses have no common "
            "weight: write a ModelSpec with a loss_fn of your own."
        )
    total: Any = 0.0
    for value in values:
        per_value = value.values if isinstance(value, Weighted) else value
        total += tf.reduce_mean(per_value, axis=list(range(1, per_value.shape.rank)))  # [B, ...] -> [B]
    shared = [value.weights for value in values if isinstance(value, Weighted)]
    return Weighted(total, shared[0]) if shared else total


def _measured(measure: Measure, outputs: Sequence[_Output]) -> Any:
    """Returns the value of a metric for `loss_fn`."""
    count, where = len(outputs), measure.output
    measured = [output for i, output in enumerate(outputs) if count == 1 or where in (output.name, (i, count))]
    if not measured:
        given = "in a list of another length" if isinstance(where, tuple) else f"for {where!r}"
        raise ValueError(
            f"The metric {measure.name!r} was given {given}; the outputs are {[output.name for output in outputs]}: "
            "give metrics by those names."
        )
    output = measured[0]
    if output.target is None:
        raise ValueError(
            f"The metric {measure.name!r} measures the output {output.name!r}, which has no target: the targets are "
            f"{[each.name for each in outputs if each.target is not None]}."
        )
    return measure(output.target, output.value, output.weight if measure.is_weighted else None)
