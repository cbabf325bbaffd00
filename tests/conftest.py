"""Four virtual CPUs for every test: strategies over 1 to 4 of them live side by side in one process.

TensorFlow's collectives would clash between strategies over the same devices; those of distloop on CPUs use none.
"""

import gc
import os
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import distloop  # noqa: E402

distloop.prepare(distloop.Config(device="cpu", num_devices=4))


def collect_garbage():
    """Deletes what errors' tracebacks held in a thread of its own: the end of an old iterator may take a minute."""
    while True:
        time.sleep(20)
        gc.collect()


gc.disable()
threading.Thread(target=collect_garbage, daemon=True).start()

# The files that take longest, which two processes had better begin with.
LONG = ["test_workers", "test_failures", "test_preemption", "test_laws", "test_experiments", "test_summaries"]


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))
