"""Digits from TFRecord shards: their records by number, so a run that resumes is at its position at once.

    python -m distloop.launch --workers=2 -m experiments.files --workdir=runs/files --device=cpu

The program writes the shards first. On any number of workers the batches are the same; each worker reads the records
of its own replicas alone. `parse` gets a seed too, for augmentation that belongs to a record and an epoch.

Measured on 2026-11-23 on 2 busy cores: test accuracy 0.983, loss 0.0523 after 600 steps, on one worker and on two; 34 s
of training on one worker, 71 s on two workers with one CPU each.
"""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import distloop
from experiments import datasets

distloop.define_flags(steps=600, batch_size=128, eval_every=200)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Peak learning rate of Adam, after the warm-up.")
SHARED = os.path.join(tempfile.gettempdir(), "digits_shards")
DATA = flags.DEFINE_string("data", SHARED, "Directory of the shards, shared by all workers.")
SHARDS = flags.DEFINE_integer("shards", 8, "Files per split.")


def write_shards(split):
    """Writes a split's images to files that are missing, round-robin; each file appears only when it is complete."""
    os.makedirs(DATA.value, exist_ok=True)
    rows = next(datasets.digits(split, 2_000, shuffle=False).as_numpy_iterator())
    pixels = np.round(16 * rows["image"]).reshape(-1, 64)
    records = np.column_stack([pixels, rows["label"]]).astype(np.uint8)  # [N, 65]
    for shard, path in enumerate(shard_paths(split)):
        if os.path.exists(path):
            continue
        temporary = f"{path}.{os.getpid()}.tmp"  # several workers may write the same file at once
        with tf.io.TFRecordWriter(temporary) as writer:
            for record in records[shard :: SHARDS.value]:
                writer.write(record.tobytes())
        os.replace(temporary, path)


def shard_paths(split):
    return [os.path.join(DATA.value, f"{split}-{i:02}-of-{SHARDS.value:02}.tfrecord") for i in range(SHARDS.value)]


def read_shards(split, batch_size):
    """Returns the global batches of a split; of each batch, a worker reads the records of its own replicas alone."""

    def parse(record, seed):
        row = tf.io.decode_raw(record, tf.uint8)  # [65]: 64 pixels and the label
        return {
            "image": tf.cast(tf.reshape(row[:64], [8, 8, 1]), tf.float32) / 16,
            "label": tf.cast(row[64], tf.int32),
        }

    records = distloop.open_records(shard_paths(split))
    return distloop.make_dataset(records, batch_size, shuffle=split == "train", map_fn=parse)


def model_fn():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ],
        name="convnet",
    )

    def loss_fn(batch, training):
        logits = model(batch["image"], training=training)  # [B, 10]
        return {
            "loss": keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True),  # [B]
            "accuracy": keras.metrics.sparse_categorical_accuracy(batch["label"], logits),  # [B]
        }

    rate = distloop.make_schedule(LEARNING_RATE.value, "100 %", warmup="8.3 %")
    return distloop.ModelSpec(model, keras.optimizers.Adam(rate), loss_fn)


def main(_):
    config = distloop.Config.from_flags()
    distloop.prepare(config)
    for split in ("train", "test"):
        write_shards(split)
    train, test = (read_shards(split, config.batch_size) for split in ("train", "test"))
    trainer = distloop.Trainer(model_fn, config)
    trainer.fit(train, evals={"test": test})
    print(f"test accuracy {trainer.evaluate(test)['accuracy']:.3f}")


if __name__ == "__main__":
    app.run(main)
