"""Losses, metrics and layers that a user wrote, for drawn programs; none of them has a config."""

import keras
import numpy as np


def own_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 1.5, axis=-1)


def own_metric(y_true, y_pred):
    return keras.ops.max(keras.ops.abs(keras.ops.cast(y_true, "float32") - y_pred), axis=-1)


class Pinball(keras.losses.Loss):
    def __init__(self, quantile):
        super().__init__(name="pinball")
        self.quantile = quantile

    def call(self, y_true, y_pred):
        error = y_true - y_pred
        return keras.ops.mean(keras.ops.maximum(self.quantile * error, (self.quantile - 1) * error), axis=-1)


class Biased(keras.losses.MeanSquaredError):
    """A loss with a `__call__` of its own."""

    def __init__(self, bias):
        super().__init__()
        self.bias = bias

    def __call__(self, y_true, y_pred, sample_weight=None):
        return super().__call__(y_true + self.bias, y_pred, sample_weight)


class LargestError(keras.metrics.Metric):
    """A metric whose state is a maximum."""

    def __init__(self):
        super().__init__(name="largest_error")
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        errors = keras.ops.abs(keras.ops.cast(y_true, "float32") - y_pred)
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(errors)))

    def result(self):
        return self.largest


class Scale(keras.layers.Layer):
    """A layer with a weight and a penalty of its own."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, inputs):
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(self.scale)))
        return inputs * self.scale


class Counter(keras.layers.Layer):
    """A layer that counts its calls in training, in a variable that it reads."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, inputs, training=False):
        if training:
            self.count.assign_add(1.0)
        return inputs * (1.0 + 0.1 * keras.ops.convert_to_tensor(self.count))


def adapted(layer, values):
    """Returns a preprocessing layer after `adapt`."""
    layer.adapt(np.asarray(values))
    return layer
