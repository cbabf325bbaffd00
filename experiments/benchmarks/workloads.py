"""Workloads: five models, their data, and the values that a step computes.

They use `tf.keras`, which is Keras 3, or Keras 2 in Orbit's process.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

LEARNING_RATE = 1e-3  # of Adam, in every system


class Workload(NamedTuple):
    """A model with its data.

    Attributes:
        make_model: returns a Keras model that computes logits.
        make_rows: (generator, number of examples) -> features and labels.
        batch_size: examples per step over all replicas; with `is_per_replica`, per replica.
        num_batches: number of different batches in the data.
        is_binary: whether there is one logit per example, else one per class.
    """

    make_model: Callable[[], tf.keras.Model]
    make_rows: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    batch_size: int = 64
    num_batches: int = 64
    is_per_replica: bool = False
    is_binary: bool = False

    def global_batch_size(self, replicas: int) -> int:
        return self.batch_size * (replicas if self.is_per_replica else 1)

    def dataset(self, batch_size: int, num_examples: int | None = None) -> tf.data.Dataset:
        """Returns global batches (features, labels): one pass over `num_examples`, or endless."""
        size = num_examples or batch_size * self.num_batches
        rows = tf.data.Dataset.from_tensor_slices(self.make_rows(np.random.default_rng(0), size))
        batches = rows.batch(batch_size, drop_remainder=num_examples is None).cache()
        return batches if num_examples else batches.repeat()

    def values(self, model: tf.keras.Model, features: tf.Tensor, labels: tf.Tensor, training: bool) -> dict:
        """Returns loss and accuracy per example: [B] each, or [B, T] for a sequence."""
        logits = model(features, training=training)
        if self.is_binary:
            return {
                "loss": tf.keras.losses.binary_crossentropy(labels, logits, from_logits=True),
                "accuracy": tf.keras.metrics.binary_accuracy(labels, logits, threshold=0.0),
            }
        return {
            "loss": tf.keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True),
            "accuracy": tf.keras.metrics.sparse_categorical_accuracy(labels, logits),
        }


def make_mlp(widths: list[int]) -> tf.keras.Model:
    """Returns an MLP; `widths` are those of the input, the hidden layers and the logits."""
    layers = [tf.keras.layers.Dense(width, activation="relu") for width in widths[1:-1]]
    return tf.keras.Sequential([tf.keras.Input((widths[0],)), *layers, tf.keras.layers.Dense(widths[-1])])


def make_convnet() -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def make_transformer(length: int, width: int, heads: int, depth: int, vocabulary: int) -> tf.keras.Model:
    """Returns a decoder for T tokens."""
    layers = tf.keras.layers
    tokens = tf.keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(tokens)  # [B, T, width]
    for _ in range(depth):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)])
        y = layers.Dense(4 * width, activation="relu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    return tf.keras.Model(tokens, layers.Dense(vocabulary)(layers.LayerNormalization()(x)))


def make_vectors(width: int) -> Callable:
    return lambda generator, size: (
        generator.standard_normal((size, width), np.float32),
        generator.integers(10, size=size).astype(np.int32),
    )


def make_images(shape: tuple[int, int, int], classes: int) -> Callable:
    return lambda generator, size: (
        generator.standard_normal((size, *shape), np.float32),
        generator.integers(classes, size=size).astype(np.int32),
    )


def make_texts(length: int, vocabulary: int) -> Callable:
    def rows(generator: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        texts = generator.integers(vocabulary, size=(size, length + 1)).astype(np.int32)
        return texts[:, :-1], texts[:, 1:]

    return rows


def make_yes_no(generator: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    features, labels = make_vectors(8000)(generator, size)
    return features, (labels[:, np.newaxis] % 2).astype(np.float32)


SMALL_LM = dict(length=64, width=128, heads=4, depth=2, vocabulary=1000)
LARGE_LM = dict(length=256, width=768, heads=12, depth=8, vocabulary=8000)  # 70 million parameters
MLP41M_WIDTHS = [8000, 4000, 2000, 500, 300, 1]

WORKLOADS = {
    "tiny": Workload(lambda: make_mlp([16, 32, 10]), make_vectors(16)),
    "deep": Workload(lambda: make_mlp([16, *[32] * 19, 10]), make_vectors(16)),
    "conv": Workload(make_convnet, make_images((28, 28, 1), 10)),
    "lm": Workload(lambda: make_transformer(**SMALL_LM), make_texts(64, 1000), batch_size=16),
    # Scaled down from 2,048 examples per replica, which would take some seconds per step and replica.
    "mlp41m": Workload(
        lambda: make_mlp(MLP41M_WIDTHS),
        make_yes_no,
        batch_size=64,
        num_batches=4,
        is_per_replica=True,
        is_binary=True,
    ),
}
EVERY = WORKLOADS | {  # and those of a size for a GPU, in gpu.py alone
    "lm70m": Workload(lambda: make_transformer(**LARGE_LM), make_texts(256, 8000), batch_size=32, num_batches=16),
    "resnet50": Workload(
        lambda: tf.keras.applications.ResNet50(weights=None, classifier_activation=None),
        make_images((224, 224, 3), 1000),
        num_batches=8,
    ),
}
