"""Regression with a plain `tf.Module` in place of a Keras model.

    python -m experiments.regression --workdir=runs/regression --device=cpu --num_devices=2

Ten measurements of 442 patients predict the progress of their diabetes; one patient in five is held out. One tanh layer
of 16 units, with a moving average of the weights. `r2` is the fraction of the target's variance that is explained.

Measured on 2 virtual CPUs (2 cores): test r2 0.298, mean absolute error 0.582 after 600 steps, 6 s in total.
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import distloop
from experiments import datasets

distloop.define_flags(steps=600, batch_size=64, eval_every=200, average_decay=0.99)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Learning rate of AdamW.")
HIDDEN = flags.DEFINE_integer("hidden", 16, "Units of the hidden layer.")


class Network(tf.Module):
    """Two layers on plain variables."""

    def __init__(self, units):
        super().__init__()
        draw = keras.initializers.GlorotUniform(seed=0)
        self.hidden_kernel = tf.Variable(draw((10, units)))
        self.hidden_bias = tf.Variable(tf.zeros([units]))
        self.output_kernel = tf.Variable(draw((units, 1)))
        self.output_bias = tf.Variable(tf.zeros([1]))

    def __call__(self, features):  # [B, 10] -> [B]
        hidden = tf.tanh(features @ self.hidden_kernel + self.hidden_bias)  # [B, units]
        return tf.squeeze(hidden @ self.output_kernel + self.output_bias, -1)


def model_fn():
    network = Network(HIDDEN.value)

    def loss_fn(batch, training):
        error = network(batch["features"]) - batch["target"]  # [B]
        return {"loss": tf.square(error), "absolute_error": tf.abs(error)}

    return distloop.ModelSpec(
        network,
        keras.optimizers.AdamW(LEARNING_RATE.value, weight_decay=0.05),
        loss_fn,
        predict_fn=lambda batch: network(batch["features"]),
    )


def main(_):
    config = distloop.Config.from_flags()
    distloop.prepare(config)
    train, test = (datasets.diabetes(split, config.batch_size) for split in ("train", "test"))
    trainer = distloop.Trainer(model_fn, config)
    trainer.fit(train, evals={"test": test})
    target = np.concatenate([batch["target"] for batch in test.as_numpy_iterator()])
    error = target - trainer.predict(test)
    print(f"test r2 {1 - np.mean(error**2) / np.var(target):.3f}  mean absolute error {np.abs(error).mean():.3f}")


if __name__ == "__main__":
    app.run(main)
