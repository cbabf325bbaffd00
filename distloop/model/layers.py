"""Random streams and losses of Keras layers, apart for each replica; layers that are frozen.

    streams = RandomStreams(strategy, seeds)
    with streams.preserved():                # their states are restored on exit
        predict()
    keep_losses_apart([model])               # once, when the layers exist
    frozen = Frozen(frozen_layers(layers, updates, trained, paths))
    with frozen:
        model(x, training=True)              # BatchNormalization uses its statistics, and does not move them

The replicas' streams of one generator start `SEED_STRIDE` apart and advance together. Of virtual replicas each has a
stream, and the variable on a replica holds that of its first one. The states of recurrent layers go on from batch to
batch as the streams do, and are read and written along with them.

TensorFlow traces each replica of a process in a thread, and goes from one to the next where replicas exchange values,
maybe in the middle of the model. Keras has one list of losses a layer, by `add_loss` and activity regularizers, and
clears it when a thread begins to call the model. Layers that `trainable=` leaves out compute as `layer.trainable =
False` has them compute; outside the scope they are as the user has left them, which files keep.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.graph_functions import graph_function
from distloop.model.spec import Update


def keep_losses_apart(layers: Iterable[keras.Layer]) -> None:
    """Gives the layers, and all layers within them, separate lists of losses in each thread."""
    for layer in layers:
        for each in layer._flatten_layers():
            # Not by `setattr`, which would have TensorFlow track them for checkpoints. Private: Keras has no other way.
            vars(each).update(_losses=_OfThread(list), _loss_ids=_OfThread(set))


class _OfThread(threading.local):
    """A list or a set with a separate value in each thread, for which Python calls `__init__`."""

    def __init__(self, make: Callable[[], Any]):
        self._make, self._values = make, make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._values, name)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]

    def __contains__(self, value: Any) -> bool:
        return value in self._values

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> Any:  # a copy of the layer begins without losses
        return self._make, ()


def frozen_layers(
    layers: Iterable[keras.Layer], updates: Sequence[Update], trained: Collection[int], paths: Mapping[int, str]
) -> list[keras.Layer]:
    """Returns the trainable layers that regular expressions leave out: no update trains a variable of them.

    Lists of variables say nothing about layers, as in a loop written by hand: with one, no layer is frozen. A
    BatchNormalization without scale and center counts as trained if an expression is found in a path of its statistics.
    `trained` holds the variables that the updates train, by `id`, `paths` the paths of all.
    """
    patterns = [update.variables for update in updates if isinstance(update.variables, str)]
    if len(patterns) < len(updates):
        return []
    frozen = []
    for layer in {id(each): each for top in layers for each in top._flatten_layers()}.values():
        trainable = [v for v in layer.variables if v.trainable]
        if trainable:
            is_frozen = not any(id(v) in trained for v in trainable)
        else:
            named = [paths[id(v)] for v in layer.variables if id(v) in paths]
            is_without = isinstance(layer, keras.layers.BatchNormalization) and not layer._trainable_variables
            is_frozen = is_without and not any(re.search(p, path) for p in patterns for path in named)
        if is_frozen and layer.trainable:
            frozen.append(layer)
    return frozen


class Frozen:
    """A scope, and a guard of functions, in which layers are not trainable; several replicas' threads may be in it."""

    def __init__(self, layers: Sequence[keras.Layer]):
        self._layers, self._lock, self._depth = list(layers), threading.Lock(), 0

    def __call__(self, arguments: Sequence[Any], returned: list[Any]) -> "Frozen":
        """Returns the scope of a call of a function."""
        return self

    def __enter__(self) -> None:
        self._enter(1)

    def __exit__(self, *_: object) -> None:
        self._enter(-1)

    def _enter(self, change: int) -> None:
        with self._lock:
            self._depth += change
            for layer in self._layers:
                layer._trainable = self._depth == 0  # private: without the variables, which stay as they are


# Offset between the keys of the random streams of two replicas; a prime, so that few streams meet.
SEED_STRIDE = 1_000_003


class RandomStreams:
    """The random streams of a model on all replicas.

    Attributes:
        seeds: the variables with their states, `[2]` each: key and counter.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, seeds: Sequence[Any], recurrent_states: Any = (), *, per_device: int = 1
    ):
        """Moves the replicas' streams apart: Keras starts them all alike, with equal dropout masks.

        The seeds were created in the strategy's scope. Each device computes `per_device` of the replicas.
        """
        self.seeds = list(seeds)
        self._variables = [*seeds, *recurrent_states]

        def separate() -> None:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            for seed in self.seeds:
                seed.assign(stream_of(tf.convert_to_tensor(seed), replica * per_device))

        def read() -> list[tf.Tensor]:
            return [tf.identity(variable) for variable in self._variables]

        def write(values: list[tf.Tensor]) -> None:
            for variable, value in zip(self._variables, values, strict=True):
                variable.assign(value)

        if self.seeds and strategy.num_replicas_in_sync > 1:
            graph_function(lambda: strategy.run(separate))()
        self._read = graph_function(lambda: strategy.run(read))
        self._write = graph_function(lambda values: strategy.run(write, args=(values,)))

    def read(self) -> Any:
        """Returns the states, a value per replica."""
        return self._read() if self._variables else []

    def write(self, states: Any) -> None:
        """Sets the states to a result of `read`."""
        if self._variables:
            self._write(states)

    def preserved(self) -> contextlib.ExitStack:
        """Returns a scope that restores the states on exit."""
        scope = contextlib.ExitStack()
        scope.callback(self.write, self.read())
        return scope


def stream_of(state: tf.Tensor, replica: tf.Tensor | int) -> tf.Tensor:
    """Returns the state of the random stream, `[2]`, of so many replicas after the replica with a state."""
    offset = tf.cast(replica, state.dtype) * SEED_STRIDE
    return state + tf.stack([offset, tf.zeros([], state.dtype)])
