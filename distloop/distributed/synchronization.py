"""BatchNormalization over the rows of all replicas.

    model = distloop.synchronize(keras.applications.ResNet50(weights=None))

It does not know how the replicas communicate: Keras does that in the layer.
"""

from typing import Any, TypeVar

import keras

from distloop.variables import top_layers

Model = TypeVar("Model")


def synchronize(model: Model) -> Model:
    """Turns each BatchNormalization of a model, built or not, into `BatchNormalization(synchronized=True)`.

    Args:
        model: a Keras model or layer, a `tf.Module`, or a dict or list of them; layers in it at any depth are changed
            in place. A model without BatchNormalization stays as it is.

    Returns:
        The model.

    Raises:
        ValueError: if there is no Keras layer in it.
    """
    layers: list[Any] = [layer for top in top_layers(model) for layer in top._flatten_layers()]
    if not layers:
        raise ValueError(
            f"synchronize was given {model!r}, in which there is no Keras layer: give a Keras model, or a dict, list "
            "or tf.Module that holds some."
        )
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
    return model
