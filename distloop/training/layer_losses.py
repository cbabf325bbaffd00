"""The losses that Keras layers carry, by `add_loss` and activity regularizers, apart for each thread.

    layer_losses.keep_apart([model])     # once, when the layers exist

TensorFlow traces each replica of a process in a thread, and goes from one to the next where replicas exchange values,
maybe in the middle of the model. Keras has one list of losses a layer, and clears it when a thread begins to call the
model. This module does not know what a loss is.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras


def keep_apart(layers: Iterable[keras.Layer]) -> None:
    """Lets the layers, and all within them, have losses of each thread's own."""
    for layer in layers:
        for part in layer._flatten_layers():
            # Not by `setattr`, which would have TensorFlow track them for checkpoints. Private: Keras has no other way.
            vars(part).update(_losses=_OfThread(list), _loss_ids=_OfThread(set))


class _OfThread:
    """A list or a set, another one in each thread."""

    def __init__(self, make: Callable[[], Any]):
        self._make, self._local = make, threading.local()

    @property
    def _here(self) -> Any:
        if not hasattr(self._local, "values"):
            self._local.values = self._make()
        return self._local.values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here, name)

    def __getitem__(self, index: Any) -> Any:
        return self._here[index]

    def __contains__(self, value: Any) -> bool:
        return value in self._here

    def __iter__(self) -> Iterator[Any]:
        return iter(self._here)

    def __len__(self) -> int:
        return len(self._here)

    def __reduce__(self) -> Any:  # a copy of the layer begins without losses
        return self._make, ()
