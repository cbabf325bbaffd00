"""Sources whose rows Python reads, in a file without TensorFlow, from which worker processes import them."""

import os
import signal
import sys
import time

import numpy as np


class Waves:
    """Rows of several kinds; it may end its process, fail, or wait in a row."""

    def __init__(self, count=37, **special):
        self.count, self.special = count, special

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        if row == self.special.get("killed") and "tensorflow" not in sys.modules:
            os.kill(os.getpid(), signal.SIGKILL)
        if row == self.special.get("waits") and "tensorflow" not in sys.modules:
            time.sleep(600)
        wave = np.sin(np.arange(12, dtype=np.float32).reshape(4, 3) * (1 + row % 5))
        return {"x": wave[::-1], "label": row % 4, "row": 10 // (row - self.special.get("fails", -1)) * 0 + row}


class Kinds(Waves):
    """Rows with texts, an empty array, and arrays of several lengths."""

    def __getitem__(self, row):
        empty, text = np.zeros([0, 3]), f"row {row}"
        return {"ids": list(range(1 + row % 5)), "pair": (np.float16(row), empty), "text": text, "bytes": b"%d\0" % row}


class Imports(Waves):
    """Rows that say whether their process has imported TensorFlow."""

    def __getitem__(self, row):
        return np.array(["tensorflow" in sys.modules, os.getpid()])


class Sizes(Waves):
    """Rows of so many megabytes."""

    def __getitem__(self, row):
        return np.full([self.special["megabytes"] << 18], row, np.float32)


def add_noise(example, seed):
    """A map_fn that TensorFlow cannot trace."""
    noise = np.random.default_rng(seed).normal(size=example["x"].shape).astype(np.float32)
    return {**example, "x": example["x"] + noise}
