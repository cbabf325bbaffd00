"""Digits from TFRecord shards: each worker reads its own files.

    python -m distloop.launch --workers=2 -m experiments.files --workdir=runs/files --device=cpu

The program writes the shards first. With 2 workers, the function of `tf.distribute.InputContext` gives each worker
every second file, in batches of half the global batch. If one worker has fewer rows, distloop pads them with rows of
weight 0, so all workers end an epoch at the same step.

Measured on 2 workers with one CPU each (2 cores, busy): test accuracy 0.981 after 600 steps, 9 s of training, 21 s in
total; 0.978 on one worker, which reads all files in another order.
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
LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "The peak step size of Adam, reached after a warm-up.")
SHARED = os.path.join(tempfile.gettempdir(), "digits_shards")
DATA = flags.DEFINE_string("data", SHARED, "Directory of the shards, shared by all workers.")
SHARDS = flags.DEFINE_integer("shards", 8, "Files per split; at least as many as workers.")


def write_shards(split):
    """Writes a split's images to its files round-robin; each file appears only when it is complete."""
    os.makedirs(DATA.value, exist_ok=True)
    rows = next(datasets.digits(split, 2_000, shuffle=False).as_numpy_iterator())
    pixels = np.round(16 * rows["image"]).reshape(-1, 64)
    records = np.column_stack([pixels, rows["label"]]).astype(np.uint8)  # [N, 65]
    for shard, path in enumerate(shard_paths(split)):
        temporary = f"{path}.{os.getpid()}.tmp"  # several workers may write the same file at once
        with tf.io.TFRecordWriter(temporary) as writer:
            for record in records[shard :: SHARDS.value]:
                writer.write(record.tobytes())
        os.replace(temporary, path)


def shard_paths(split):
    return [os.path.join(DATA.value, f"{split}-{i:02}-of-{SHARDS.value:02}.tfrecord") for i in range(SHARDS.value)]


def read_shards(split, batch_size):
    """Returns the function of `InputContext` that reads one worker's shards."""

    def parse(records):  # [B]
        rows = tf.io.decode_raw(records, tf.uint8, fixed_length=65)  # [B, 65]: 64 pixels and the label
        return {
            "image": tf.cast(tf.reshape(rows[:, :64], [-1, 8, 8, 1]), tf.float32) / 16,
            "label": tf.cast(rows[:, 64], tf.int32),
        }

    def read_worker_shards(context):
        paths = tf.data.Dataset.from_tensor_slices(shard_paths(split))
        paths = paths.shard(context.num_input_pipelines, context.input_pipeline_id)
        records = paths.interleave(tf.data.TFRecordDataset, cycle_length=4)
        if split == "train":
            records = records.shuffle(2_000, seed=context.input_pipeline_id)
        return records.batch(batch_size // context.num_input_pipelines).map(parse)

    return read_worker_shards


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

    steps = distloop.Config.from_flags().steps or 600
    rate = distloop.make_schedule(LEARNING_RATE.value, steps, warmup=min(50, steps // 2))
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
