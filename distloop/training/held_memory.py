"""Held memory: the bytes of variables that stay from step to step, by the device on which each lies.

    held_by_device(state)          # {"CPU:0": {"weights": 41_000_000, "optimizer slots": 82_000_000}, ...}

It is read from the variables as they are placed, not from settings. What a step needs besides is not known here.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from distloop.distributed.devices import short_device
from distloop.training.state import TrainState
from distloop.variables import layers_by_path, tensorflow_variable

TABLES = "embedding tables"


def held_by_device(state: TrainState) -> dict[str, dict[str, int]]:
    """Returns the bytes of this worker's variables by device, and by what they are; what takes none is left out."""
    tables = {id(tensorflow_variable(v)) for v in embedding_tables(state.model).values()}
    copies = state.sharding.copies if state.sharding is not None else []
    parts: dict[str, Iterable[Any]] = {
        "weights": [*(v for v in state.model_variables() if id(v) not in tables), *copies],
        TABLES: [v for v in state.model_variables() if id(v) in tables],
        "optimizer slots": state.slots,
        "averages of weights": state.average.stored if state.average is not None else [],
    }
    held: dict[str, dict[str, int]] = {}
    for name, variables in parts.items():
        for device, size in _sizes(state, variables):
            of_device = held.setdefault(device, {})
            of_device[name] = of_device.get(name, 0) + size
    return {device: held[device] for device in sorted(held)}


def held_bytes(state: TrainState) -> dict[str, int]:
    """Returns the bytes by what they are on the device that holds most."""
    held = held_by_device(state).values()
    return max(held, key=lambda parts: sum(parts.values()), default={})


def embedding_tables(model: Any) -> dict[str, Any]:
    """Returns the tables of a model's embedding layers, by the paths of the layers.

    Args:
        model: as for `named_variables`.
    """
    layers = [(path, v) for path, v in layers_by_path(model).items() if isinstance(v, keras.layers.Embedding)]
    return {path: layer._embeddings for path, layer in layers if layer.built}  # one may be unused


def table_bytes(model: Any, least: int = 0) -> Mapping[str, int]:
    """Returns the bytes of each table of `least` bytes or more, by the paths of their layers, the largest first."""
    sizes = {path: _bytes(tensorflow_variable(table)) for path, table in embedding_tables(model).items()}
    return dict(sorted(((path, n) for path, n in sizes.items() if n >= least), key=lambda item: -item[1]))


def _sizes(state: TrainState, variables: Iterable[Any]) -> Iterator[tuple[str, int]]:
    """Yields device and bytes of each variable's component on each replica of this worker."""
    for variable in variables:
        for component in state.replica_variables(variable):
            yield short_device(component.device), _bytes(component)


def _bytes(variable: Any) -> int:
    return int(variable.shape.num_elements() or 0) * int(tf.as_dtype(variable.dtype).size)
