"""Byte n-grams of Python's standard library: the baseline that `language_model.py` has to beat.

    python -m experiments.ngrams

Measured on Python 3.11: 1.955 bits per byte of the held-out files with 5 bytes of context, the best of 0 to 6; 5 s.
"""

import numpy as np
from absl import app

from experiments import datasets


def bits_per_byte(train, test, order):
    """Returns how well n-grams predict each byte from up to `order` bytes of context.

    Orders are interpolated by Witten and Bell's method C (1991, IEEE Trans. Inf. Theory 37): if a context occurred n
    times, followed by t different bytes, the prediction of the shorter context gets the weight t / (n + t).

    Args:
        train: contents of the files to count in.
        test: contents of the files to predict.
        order: the most bytes of context; up to 6.

    Returns:
        The mean of -log2(p) over all bytes of `test`, for 0 to `order` bytes of context.
    """
    train_bytes, train_is_target = _join(train, order)
    test_bytes, test_is_target = _join(test, order)
    train_context, test_context = np.zeros_like(train_bytes), np.zeros_like(test_bytes)
    probability = np.full(len(test_bytes), 1 / 256)
    bits = []
    for size in range(order + 1):
        if size:  # one byte more, further back
            train_context += np.roll(train_bytes, size) << 8 * (size - 1)
            test_context += np.roll(test_bytes, size) << 8 * (size - 1)
        ngrams, counts = np.unique((train_context << 8 | train_bytes)[train_is_target], return_counts=True)
        contexts, first, followers = np.unique(ngrams >> 8, return_index=True, return_counts=True)
        seen = _look_up(ngrams, counts, test_context << 8 | test_bytes)
        n = _look_up(contexts, np.add.reduceat(counts, first), test_context)
        t = _look_up(contexts, followers, test_context)
        probability = np.where(n > 0, (seen + t * probability) / np.maximum(n + t, 1), probability)
        bits.append(-np.log2(probability[test_is_target]).mean())
    return bits


def _join(files, order):
    """Returns the files joined, `order` zeros before each, int64 [N], and which bytes are not such zeros, bool [N]."""
    parts = [np.frombuffer(bytes(order) + file, np.uint8).astype(np.int64) for file in files]
    return np.concatenate(parts), np.concatenate([np.arange(len(part)) >= order for part in parts])


def _look_up(keys, values, wanted):
    """Returns the value of each wanted key, 0 if it is missing; `keys` are sorted."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)


def main(_):
    for size, bits in enumerate(bits_per_byte(datasets.python_files("train"), datasets.python_files("test"), 6)):
        print(f"{size} bytes of context: {bits:.3f} bits per byte")


if __name__ == "__main__":
    app.run(main)
