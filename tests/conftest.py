"""Four virtual CPUs for every test: strategies over 1 to 4 of them live side by side in one process.

TensorFlow's collectives would clash between strategies over the same devices; those of distloop on CPUs use none.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import distloop  # noqa: E402

distloop.prepare(distloop.Config(device="cpu", num_devices=4))
