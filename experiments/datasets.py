"""The real data of the experiments, as tf.data datasets of global batches.

Every function takes the split ("train" or "test"), the global batch size, `shuffle` (whether each pass has a new
order; by default "train" is shuffled and "test" is not) and the `seed` of the shuffling. It returns one pass of batches
{"image": float32 [B, H, W, C] in 0..1, "label": int32 [B]}; the last batch holds what is left, no row is dropped.

    train, test = datasets.digits("train", 256), datasets.digits("test", 256)
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def digits(split: str, batch_size: int, *, shuffle: bool | None = None, seed: int = 0) -> tf.data.Dataset:
    """Makes a dataset of the UCI handwritten digits that scikit-learn carries: 1437 to train, 360 to test, 8 x 8 x 1.

    The split never changes; both parts hold the same share of every digit.

    Raises:
        ValueError: the split is neither "train" nor "test".
    """
    _check_split(split)
    images, labels = load_digits(return_X_y=True)  # [1797, 64] in 0..16, [1797]
    train_rows, test_rows = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    rows = train_rows if split == "train" else test_rows
    images = images[rows].reshape(-1, 8, 8, 1).astype(np.uint8)
    return _make_dataset(images, 16, labels[rows], batch_size, _is_shuffled(split, shuffle), seed)


def mnist(split: str, batch_size: int, *, shuffle: bool | None = None, seed: int = 0) -> tf.data.Dataset:
    """Makes a dataset of MNIST: 60,000 digits to train, 10,000 to test, 28 x 28 x 1.

    Raises:
        ValueError: the split is neither "train" nor "test".
        RuntimeError: the data is not on this machine and cannot be fetched.
    """
    _check_split(split)
    images, labels = _load("MNIST", split, keras.datasets.mnist.load_data, "mnist.npz")
    return _make_dataset(images[..., None], 255, labels, batch_size, _is_shuffled(split, shuffle), seed)


def cifar10(split: str, batch_size: int, *, shuffle: bool | None = None, seed: int = 0) -> tf.data.Dataset:
    """Makes a dataset of CIFAR-10: 50,000 photographs of ten things to train, 10,000 to test, 32 x 32 x 3.

    Raises:
        ValueError: the split is neither "train" nor "test".
        RuntimeError: the data is not on this machine and cannot be fetched.
    """
    _check_split(split)
    archive = "cifar-10-python.tar.gz under the name cifar-10-batches-py-target_archive"
    images, labels = _load("CIFAR-10", split, keras.datasets.cifar10.load_data, archive)
    return _make_dataset(images, 255, labels, batch_size, _is_shuffled(split, shuffle), seed)


def _check_split(split: str) -> None:
    """Refuses an unknown split before anything is loaded."""
    if split not in ("train", "test"):
        raise ValueError(f'split is {split!r}; use "train" or "test".')


def _is_shuffled(split: str, shuffle: bool | None) -> bool:
    """Tells whether to shuffle: as asked, else "train" only."""
    return split == "train" if shuffle is None else shuffle


def _load(name: str, split: str, load_fn: Callable[[], Any], file: str) -> tuple[np.ndarray, np.ndarray]:
    """Loads one split with a function of keras.datasets, which downloads what is not on this machine."""
    try:
        train, test = load_fn()
    except Exception as error:  # Keras raises a plain Exception when the download fails
        raise RuntimeError(
            f"{name} is not on this machine and could not be fetched ({error}); "
            f"Keras looks in ~/.keras/datasets: put {file} there."
        ) from error
    return train if split == "train" else test


def _make_dataset(
    images: np.ndarray, white: int, labels: np.ndarray, batch_size: int, shuffle: bool, seed: int
) -> tf.data.Dataset:
    """Makes a dataset that shuffles row numbers and gathers a batch's rows at once, from arrays kept in memory.

    Row numbers are what the shuffle buffer holds, and so what a checkpoint of the iterator stores, not images.

    Args:
        images: uint8 [N, H, W, C].
        white: the pixel value that becomes 1.
        labels: [N] or [N, 1].
        batch_size: examples in a global batch.
        shuffle: whether each pass has a new order.
        seed: of the shuffling.
    """
    with tf.device("CPU"):
        images, labels = tf.constant(images), tf.constant(labels.reshape(-1), tf.int32)

    def gather(rows: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"image": tf.cast(tf.gather(images, rows), tf.float32) / white, "label": tf.gather(labels, rows)}

    rows = tf.data.Dataset.range(len(labels))
    if shuffle:
        rows = rows.shuffle(len(labels), seed=seed, reshuffle_each_iteration=True)
    return rows.batch(batch_size).map(gather).prefetch(tf.data.AUTOTUNE)
