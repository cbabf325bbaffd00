"""Owns *in what numbers*: the dtype policy that is in force where models are made.

Weights stay float32 under every policy; `mixed_bfloat16` has float32's range and needs no loss scale.
"""

import contextlib
from collections.abc import Iterator

import keras


@contextlib.contextmanager
def policy(name: str) -> Iterator[None]:
    """Sets Keras's global dtype policy, which layers take on when they are made, and puts the old one back.

    Args:
        name: such as "float32" or "mixed_bfloat16".
    """
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
