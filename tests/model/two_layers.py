"""A model of two layers, `encoder` and `head`, its loss, and a spec of both."""

import keras
import tensorflow as tf

from distloop.model.spec import ModelSpec


def two_layers():
    layers = [keras.layers.Dense(4, name="encoder"), keras.layers.Dense(2, name="head")]
    return keras.Sequential([keras.Input((3,)), *layers], name="net")


def loss_of(model):
    return lambda batch, training: {"loss": tf.reduce_sum(model(batch["x"], training=training), -1)}


def spec_of(model, optimizer=None, **more):
    return ModelSpec(model, optimizer or keras.optimizers.SGD(0.1), loss_of(model), **more)
