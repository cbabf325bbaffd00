"""Four virtual CPUs for every test: strategies over 1 to 4 of them live side by side in one process.

TensorFlow's collectives would clash between strategies over the same devices; those of distloop on CPUs use none.
"""

import atexit
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest  # noqa: E402
from tensorflow.python.data.ops import multi_device_iterator_ops  # noqa: E402

import distloop  # noqa: E402

distloop.prepare(distloop.Config(device="cpu", num_devices=4))

# The files that take longest, which two processes had better begin with.
LONG = ["test_workers", "test_failures", "test_interrupts", "test_laws", "test_experiments", "test_summaries"]

# Deleting an iterator of a DistributedDataset waits for a thread that sleeps for up to a minute, in whatever test
# Python collects it. So they stay until the process ends, which then does not wait for them.
_iterators = []


@pytest.fixture(scope="session", autouse=True)
def iterators_stay():
    kind = multi_device_iterator_ops.OwnedMultiDeviceIterator
    make = kind.__init__

    def make_and_keep(self, *arguments, **named):
        make(self, *arguments, **named)
        _iterators.append(self)

    kind.__init__ = make_and_keep


def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):  # of pytest-xdist, whose exit code nobody asks for
        atexit.register(os._exit, 0)


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))
