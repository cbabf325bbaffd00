"""Digits with the same bits on any number of devices and workers, with dropout and plain BatchNormalization.

    python -m experiments.same_bits --device=cpu --num_devices=1
    python -m experiments.same_bits --device=cpu --num_devices=2
    python -m experiments.same_bits --device=cpu --num_devices=4
    python -m distloop.launch --workers=2 -m experiments.same_bits --device=cpu --num_devices=1

Measured on 2026-11-28 (commit 291a15d) with TensorFlow 2.21.0 and Keras 3.15.1 on an AMD EPYC: after 200 steps all
four print

    test accuracy 0.9750  SHA-256 of the weights 6a1695d06425457ee2533b86b841aa6bacbc3c83d46e65649313ecf09fb15682

So does a run of 100 steps on 1 device that is resumed on 4. Another kind of CPU, or another version, may have another
digest. With --virtual_replicas=0 it is a1646fa5... on 1 device, and 4cd6fab0... on 2.
"""

import keras
from absl import app

import distloop
from experiments import datasets

distloop.define_flags(steps=200, batch_size=128, virtual_replicas=4)


def model_fn():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),  # plain: statistics of the 32 rows of a virtual replica
            keras.layers.ReLU(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10),
        ],
        name="convnet",
    )

    def loss_fn(batch, training):
        logits = model(batch["image"], training=training)  # [B, 10]
        label = batch["label"]  # [B]
        return {
            "loss": keras.losses.sparse_categorical_crossentropy(label, logits, from_logits=True),  # [B]
            "accuracy": keras.metrics.sparse_categorical_accuracy(label, logits),  # [B]
        }

    return distloop.ModelSpec(model, keras.optimizers.Adam(1e-3), loss_fn)


def main(_):
    config = distloop.Config.from_flags()
    distloop.prepare(config)  # before the first dataset
    trainer = distloop.Trainer(model_fn, config)
    trainer.fit(datasets.digits("train", config.batch_size))
    result = trainer.evaluate(datasets.digits("test", config.batch_size))
    print(f"test accuracy {result['accuracy']:.4f}  SHA-256 of the weights {distloop.digest(trainer.model)}")


if __name__ == "__main__":
    app.run(main)
