"""Handwritten digits with a small convnet: the first experiment; the others are variations of it.

    python -m experiments.digits --workdir=runs/digits --device=cpu --num_devices=2

The UCI digits that come with scikit-learn: 1,797 images of 8 x 8, one in five held out.

Measured on 2 virtual CPUs (2 cores): test accuracy 0.997, loss 0.022 after 500 steps, 9 s of training, 16 s in total;
0.997 on 1 and 4 replicas too.
"""

import os

import keras
import numpy as np
from absl import app, flags

import distloop
from experiments import datasets

distloop.define_flags(steps=500, batch_size=128, eval_every=100, checkpoint_every=100)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 2e-3, "Peak learning rate of AdamW, after the warm-up.")


def block(filters):
    # Synchronized: statistics of the global batch, so any number of replicas trains to the same weights.
    return [
        keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
        keras.layers.BatchNormalization(momentum=0.9, synchronized=True),
        keras.layers.ReLU(),
    ]


def model_fn():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            *block(32),
            *block(64),
            keras.layers.MaxPooling2D(2),
            *block(128),
            keras.layers.GlobalAveragePooling2D(),
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

    rate = distloop.make_schedule(LEARNING_RATE.value, "100 %", warmup="10 %")
    return distloop.ModelSpec(
        model,
        keras.optimizers.AdamW(rate, weight_decay=0.05),
        loss_fn,
        predict_fn=lambda batch: model(batch["image"], training=False),
    )


def confusion(state):
    held_out = next(datasets.digits("test", 360).as_numpy_iterator())
    with state.averaged():
        logits = state.spec.predict_fn(held_out)  # [360, 10]
    counts = np.zeros([10, 10], int)  # of the examples by label and prediction
    np.add.at(counts, (held_out["label"], np.argmax(logits, 1)), 1)
    rows = [["label", *range(10)], ["---"] * 11, *([label, *row] for label, row in enumerate(counts))]
    return distloop.Text("\n".join(" | ".join(map(str, row)) for row in rows))  # a table in Markdown


def main(_):
    config = distloop.Config.from_flags()
    distloop.prepare(config)  # before the first dataset
    train = datasets.digits("train", config.batch_size)
    test = datasets.digits("test", config.batch_size)
    trainer = distloop.Trainer(model_fn, config)
    trainer.fit(train, evals={"test": test}, actions=[distloop.Summary("test/confusion", confusion)])
    result = trainer.evaluate(test)
    print(f"test accuracy {result['accuracy']:.4f}  loss {result['loss']:.4f}")
    if config.workdir:
        trainer.export(os.path.join(config.workdir, "export"))


if __name__ == "__main__":
    app.run(main)
