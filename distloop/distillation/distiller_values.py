"""Distiller values: the loss of a `keras.distillation.Distiller` as values per example, which replicas can add up.

    compute_loss = make_values(distiller)
    values = compute_loss(x, y, y_pred, sample_weight=None, training=True)      # [B]

The formula is Keras's (`compute_loss` in keras/src/distillation/distiller.py), less the mean over the batch:

    w * student_loss + (1 - w) * sum(weight * distillation_loss)          w: student_loss_weight

The teacher and the layers whose features are compared are called as Keras calls them.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from distloop.keras_models.losses import loss_values, resolve_loss
from distloop.log import log

_NETWORKS = ("teacher", "student")
_ADVICE = "write a model_fn whose loss_fn returns it, as experiments/distillation.py does"
# What `_values_of` computes in place of the Distiller; those with an underscore are private.
_REPLACED = ("compute_loss", *(f"_extract_all_{who}_features" for who in _NETWORKS), "_get_distillation_loss_features")
_OF_PROBABILITIES = ("kl_divergence", "categorical_crossentropy")  # losses


def make_values(model: Any) -> Callable[..., tf.Tensor]:
    """Returns a function of a batch that computes the loss of a compiled Distiller, `[B]`, in place of `compute_loss`.

    A warning names a loss that Keras computes otherwise than its documentation says.

    Raises:
        ValueError: if the Distiller is not compiled, has a method of its own in place of one that computes the loss, or
            a loss of it has no values per example.
    """
    for method in _REPLACED:
        if getattr(type(model), method, None) is not getattr(keras.distillation.Distiller, method, None):
            raise ValueError(
                f"The Distiller {model.name!r} has a {method} of its own, which distloop would not call: write a "
                "model_fn whose loss_fn computes one value per example, as experiments/distillation.py does."
            )
    if not hasattr(model, "_student_loss"):  # private: Keras gives the loss to no `compile_config`
        raise ValueError(
            f"The Distiller {model.name!r} is not compiled, so it has no student loss: call compile(optimizer, loss), "
            "and give it to distloop.from_keras."
        )
    logits, features = keras.distillation.LogitsDistillation, keras.distillation.FeatureDistillation
    for loss in model.distillation_losses:
        if type(loss).compute_loss not in (logits.compute_loss, features.compute_loss):
            raise ValueError(
                f"The Distiller {model.name!r} has a {type(loss).__name__}, whose compute_loss returns one number for "
                f"a batch; distloop needs one value per example: {_ADVICE}."
            )
        for of_output in keras.tree.flatten(loss.loss) if isinstance(loss, logits) else ():
            name = getattr(of_output, "__name__", getattr(of_output, "name", None))
            if name in _OF_PROBABILITIES and not isinstance(of_output, keras.losses.KLDivergence):
                log.warning(
                    "The Distiller %r compares logits by %s, to which Keras gives no softmax, nor to the loss of "
                    "LogitsDistillation() alone; for probabilities give loss=keras.losses.KLDivergence().",
                    *(model.name, name),
                )
    of_student = keras.tree.flatten(model._student_loss)
    if len(of_student) > 1 and not all(isinstance(loss, keras.losses.Loss) for loss in of_student):
        raise ValueError(
            f"The Distiller {model.name!r} has a loss function for one of several outputs, whose values Keras sums "
            "over the batch: give objects, such as keras.losses.MeanSquaredError() in place of 'mse'."
        )
    return functools.partial(_values_of, model)


def _values_of(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> tf.Tensor:
    """Returns the loss of each example, `[B]`; updates the Distiller's own metrics with its terms."""
    if sample_weight is not None:
        raise ValueError(
            f"The Distiller {model.name!r} was given sample weights or class_weight, which Keras leaves out of its "
            f"loss: give (x, y) alone, or weigh the loss yourself: {_ADVICE}."
        )
    of_student = of_teacher = tf.zeros([tf.shape(keras.tree.flatten(y_pred)[0])[0]])
    if model.student_loss_weight > 0 and y is not None:
        of_student = _sum(model._student_loss, y, y_pred)
    if model.student_loss_weight < 1:
        teacher, student = (_features(model, who, x, y_pred, training) for who in _NETWORKS)
        for loss, weight in zip(model.distillation_losses, model.distillation_loss_weights, strict=True):
            of_teacher_layer, of_student_layer = (getattr(loss, f"{who}_layer_name", None) for who in _NETWORKS)
            is_final = of_teacher_layer is None  # as in Keras, whatever the student's layer
            target = teacher[of_teacher_layer or "final_output"]
            output = y_pred if is_final else student[of_student_layer or "final_output"]
            loss.validate_outputs(target, output)
            of_teacher += weight * _distilled(loss, target, output)
    total = model.student_loss_weight * of_student + (1 - model.student_loss_weight) * of_teacher
    model.student_loss_tracker.update_state(of_student)
    model.distillation_loss_tracker.update_state(of_teacher)
    model.total_loss_tracker.update_state(total)
    return total


def _features(model: Any, who: str, x: Any, y_pred: Any, training: bool) -> dict[str, Any]:
    """Returns the outputs of the layers that losses compare, by name; an evaluation calls none in training mode."""
    extractor = getattr(model, f"_{who}_feature_extractor")  # private
    is_teacher = who == "teacher"
    if extractor is not None:
        features: dict[str, Any] = extractor(x, training=training and not is_teacher)
        return features
    return {"final_output": model.teacher(x, training=False) if is_teacher else y_pred}


def _distilled(loss: Any, target: Any, output: Any) -> tf.Tensor:
    """Returns a distillation loss of each example, `[B]`."""
    if not isinstance(loss, keras.distillation.LogitsDistillation):
        return _sum(loss.loss, target, output)

    def of_output(of_loss: Any, target: Any, output: Any) -> Any:
        target, output = target / loss.temperature, output / loss.temperature
        if not isinstance(of_loss, keras.losses.KLDivergence):
            return _mean(of_loss, target, output)
        return _mean(of_loss, tf.nn.softmax(target), tf.nn.softmax(output)) * loss.temperature**2

    return _sum(loss.loss, target, output, of_output)


def _sum(losses: Any, targets: Any, outputs: Any, of_output: Callable[..., Any] | None = None) -> tf.Tensor:
    """Returns the sum of the losses of all outputs for each example, `[B]`; None: an output has none."""
    flat = [keras.tree.flatten(each) for each in (losses, targets, outputs)]
    terms = [(of_output or _mean)(*each) for each in zip(*flat, strict=True) if each[0] is not None]
    return tf.add_n(terms)


def _mean(loss: Any, target: Any, output: Any) -> tf.Tensor:
    """Returns the mean of a loss within each example, `[B]`."""
    resolved = resolve_loss(loss, target, output)
    values, mask = loss_values(resolved, target, output)
    if mask is not None:
        raise ValueError(
            f"A Distiller compares an output with a mask by {resolved.name!r}, so its losses have no common weights: "
            f"{_ADVICE}."
        )
    return tf.reduce_mean(values, list(range(1, values.shape.rank)))
