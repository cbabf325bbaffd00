"""Real data for the experiments, as tf.data datasets of global batches.

Every function takes the split ("train" or "test"), the global batch size, `shuffle` (whether each pass has a new order;
by default only "train" is shuffled) and the `seed` of the shuffling. It returns one pass of batches {"image": float32
[B, H, W, C] in 0..1, "label": int32 [B]}, except for `diabetes` and `python_source`. No row is dropped, so the last
batch may be smaller.

    train, test = datasets.digits("train", 256), datasets.digits("test", 256)
"""

import functools
import pathlib
import sysconfig
import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import train_test_split

import distloop


def digits(split: str, batch_size: int, *, shuffle: bool | None = None, seed: int = 0) -> tf.data.Dataset:
    """Returns the UCI handwritten digits that come with scikit-learn: 1437 to train, 360 to test, 8 x 8 x 1.

    The split never changes; every digit has the same fraction in both parts.

    Raises:
        ValueError: the split is neither "train" nor "test".
    """
    _check_split(split)
    images, labels = load_digits(return_X_y=True)  # [1797, 64] in 0..16, [1797]
    train_rows, test_rows = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    rows = train_rows if split == "train" else test_rows
    images = images[rows].reshape(-1, 8, 8, 1).astype(np.uint8)
    return _make_dataset(images, 16, labels[rows], batch_size, _is_shuffled(split, shuffle), seed)


def diabetes(split: str, batch_size: int, *, shuffle: bool | None = None, seed: int = 0) -> tf.data.Dataset:
    """Returns the diabetes data that comes with scikit-learn: 353 patients to train, 89 to test.

    Batches hold ten measurements, "features": float32 [B, 10], and the progress of the disease, "target": float32 [B].
    Both have mean 0 and variance 1 over the training patients.

    Raises:
        ValueError: the split is neither "train" nor "test".
    """
    _check_split(split)
    features, target = load_diabetes(return_X_y=True)  # [442, 10], [442]
    train_rows, test_rows = train_test_split(np.arange(len(target)), test_size=0.2, random_state=0)
    rows = train_rows if split == "train" else test_rows
    columns = np.column_stack([features, target])
    columns = (columns - columns[train_rows].mean(0)) / columns[train_rows].std(0)
    columns = columns[rows].astype(np.float32)
    arrays = {"features": columns[:, :-1], "target": columns[:, -1]}
    return distloop.make_dataset(arrays, batch_size, shuffle=_is_shuffled(split, shuffle), seed=seed)


def python_source(
    split: str, batch_size: int, length: int, *, shuffle: bool | None = None, seed: int = 0
) -> tf.data.Dataset:
    """Returns windows of the bytes of `python_files`.

    Batches hold "bytes": uint8 [B, length + 1], and "weight": float32 [B, length], which is 1 where byte t + 1 of a
    window counts as a target. Each byte of a file counts once. A 0 precedes the first byte, and the last window of a
    file is padded with zeros of weight 0. Windows of "test" overlap by half, so every byte that counts has half a
    window of context or more, or all that its file has.

    Raises:
        ValueError: the split is neither "train" nor "test".
    """
    stride = length if split == "train" else length // 2
    windows = [_cut(file, length, stride) for file in python_files(split)]
    arrays = {name: np.concatenate([window[name] for window in windows]) for name in ("bytes", "weight")}
    return distloop.make_dataset(arrays, batch_size, shuffle=_is_shuffled(split, shuffle), seed=seed)


@functools.cache
def python_files(split: str) -> list[bytes]:
    """Returns the source files of Python's standard library, without its tests: 11 MB to train on, 0.2 MB to test.

    One top-level module or package in twenty is for testing, chosen by a checksum of its name, so that no package is in
    both splits.

    Raises:
        ValueError: the split is neither "train" nor "test".
    """
    _check_split(split)
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    paths = {path.relative_to(root): path for path in sorted(root.rglob("*.py"))}
    left_out = {"site-packages", "test", "tests", "idle_test", "pydoc_data"}  # pydoc_data holds help texts, not source
    return [
        path.read_bytes()
        for name, path in paths.items()
        if not left_out & set(name.parts) and _is_held_out(name.parts[0].removesuffix(".py")) == (split == "test")
    ]


def mnist(split: str, batch_size: int, *, shuffle: bool | None = None, seed: int = 0) -> tf.data.Dataset:
    """Returns MNIST: 60,000 digits to train, 10,000 to test, 28 x 28 x 1.

    Raises:
        ValueError: the split is neither "train" nor "test".
        RuntimeError: the data is not on this machine and cannot be downloaded.
    """
    _check_split(split)
    images, labels = _load("MNIST", split, keras.datasets.mnist.load_data, "mnist.npz")
    return _make_dataset(images[..., None], 255, labels, batch_size, _is_shuffled(split, shuffle), seed)


def cifar10(split: str, batch_size: int, *, shuffle: bool | None = None, seed: int = 0) -> tf.data.Dataset:
    """Returns CIFAR-10: 50,000 photographs in ten classes to train, 10,000 to test, 32 x 32 x 3.

    Raises:
        ValueError: the split is neither "train" nor "test".
        RuntimeError: the data is not on this machine and cannot be downloaded.
    """
    _check_split(split)
    archive = "cifar-10-python.tar.gz under the name cifar-10-batches-py-target_archive"
    images, labels = _load("CIFAR-10", split, keras.datasets.cifar10.load_data, archive)
    return _make_dataset(images, 255, labels, batch_size, _is_shuffled(split, shuffle), seed)


def _check_split(split: str) -> None:
    """Raises ValueError for an unknown split."""
    if split not in ("train", "test"):
        raise ValueError(f'split is {split!r}; use "train" or "test".')


def _is_shuffled(split: str, shuffle: bool | None) -> bool:
    """Returns `shuffle`, or its default for the split."""
    return split == "train" if shuffle is None else shuffle


def _is_held_out(module: str) -> bool:
    """Returns whether a module of the standard library belongs to the test split."""
    return zlib.crc32(module.encode()) % 20 == 0


def _cut(file: bytes, length: int, stride: int) -> dict[str, np.ndarray]:
    """Cuts a file into windows, `stride` bytes apart; a byte counts in the first window that has it as a target."""
    count = max(1, -(-(len(file) - length) // stride) + 1)
    padded = np.zeros((count - 1) * stride + length + 1, np.uint8)
    padded[1 : len(file) + 1] = np.frombuffer(file, np.uint8)
    starts = stride * np.arange(count)[:, None]  # [N, 1]
    targets = starts + 1 + np.arange(length)  # [N, length]
    is_new = (targets > starts + length - stride) | (starts == 0)
    return {
        "bytes": padded[starts + np.arange(length + 1)],  # [N, length + 1]
        "weight": (is_new & (targets <= len(file))).astype(np.float32),
    }


def _load(name: str, split: str, load_fn: Callable[[], Any], file: str) -> tuple[np.ndarray, np.ndarray]:
    """Loads one split with a function of keras.datasets, which downloads missing data."""
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
    """Returns a dataset of batches from images in memory, uint8 [N, H, W, C]; `white` becomes 1.0."""
    rows = {"image": images, "label": labels.reshape(-1).astype(np.int32)}
    dataset = distloop.make_dataset(rows, batch_size, shuffle=shuffle, seed=seed)
    return dataset.map(lambda batch: {**batch, "image": tf.cast(batch["image"], tf.float32) / white})
