"""Tensors out of `loss_fn`: what `distloop.keep` hands to the writers at due steps, such as attention maps.

    distloop.keep("attention", maps, every=1000)            # in loss_fn, of a train step
    with part(number), keeping(state, update):              # around it: a part of the batch, the first is 0
        loss_fn(batch, True)
    KeptTensors(state)                                      # the action that shows them

At other steps a branch that is not taken is all that there is of it.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from distloop.actions.action import Action, Report
from distloop.distributed.devices import HOST
from distloop.log import shown
from distloop.monitoring.media import Histogram, Images, Media, are_pictures
from distloop.settings.durations import parse, whole_number

_number: contextvars.ContextVar[Any] = contextvars.ContextVar("number", default=None)
_scope: contextvars.ContextVar["_Keeping | None"] = contextvars.ContextVar("scope", default=None)


@dataclass
class Kept:
    """What is kept under one name."""

    every: int  # steps
    show: Callable[[np.ndarray], Media]
    array: np.ndarray | None = None  # the last one


class _Keeping(NamedTuple):
    state: Any
    update: str
    is_compiled: bool  # by XLA
    names: set[str]  # kept in it so far


def keep(
    name: str,
    tensor: Any,
    *,
    every: int | str,
    rows: int = 1,
    show: Callable[[np.ndarray], Media] | None = None,
) -> None:
    """Shows a tensor of `loss_fn` at every so many steps; call it in `loss_fn`. Elsewhere it does nothing.

        distloop.keep("attention", maps, every=1000, show=lambda maps: distloop.Images(maps[0, ..., None]))

    Args:
        name: to show it under; of several updates, behind the name of the update and a slash.
        tensor: `[B, ...]`, with a row for each example.
        every: steps, as 1000 or "1000 steps".
        rows: so many of the first rows of the global batch; less, where the first part of the batch, a microbatch of a
            replica, has less.
        show: takes the rows as an array, and returns media; None: images `[H, W, C]` with C in 1, 3, 4
            become `Images`, all else a `Histogram`.

    Raises:
        ValueError: for a name that was kept before, a tensor without rows, no whole number of steps, or in what XLA
            compiles.
    """
    amount, unit = parse(every)
    if unit != "steps" or amount < 1:
        raise ValueError(f"keep({name!r}, every={shown(every)}) was called; give a number of steps, 1 or more.")
    if (whole_number(rows) or 0) < 1:
        raise ValueError(f"keep({name!r}, rows={shown(rows)}) was called; give a whole number, 1 or more.")
    if (scope := _scope.get()) is None:
        return
    tensor = tf.stop_gradient(tf.convert_to_tensor(tensor))
    if name in scope.names or tensor.shape.rank == 0 or scope.is_compiled:
        why = (
            "the same name twice in one loss_fn: give another one"
            if name in scope.names
            else "a scalar: give a tensor with a row for each example, [B, ...]"
            if tensor.shape.rank == 0
            else "jit_compile=True, and XLA cannot hand a tensor to the host: use jit_compile=False"
        )
        raise ValueError(f"keep({name!r}) was called with {why}.")
    scope.names.add(name)
    kept, name = scope.state.kept, f"{scope.update}/{name}".lstrip("/")
    kept[name] = Kept(int(amount), show or _as_media)
    number, replica = _number.get(), tf.distribute.get_replica_context().replica_id_in_sync_group
    if tf.get_static_value(replica) != 0 or (isinstance(number, int) and number):
        return
    with tf.device(HOST):
        is_due = ((scope.state.step.read_value() + 1) % int(amount) == 0) & (tf.convert_to_tensor(number) == 0)
        tf.cond(is_due, lambda: _store(kept, name, tensor[:rows]), lambda: tf.constant(0))


def _store(kept: Mapping[str, Kept], name: str, rows: tf.Tensor) -> tf.Tensor:
    """Hands some rows to the host: to what is there under the name when that is done, as each replica is traced."""
    if rows.dtype.is_floating:
        rows = tf.cast(rows, tf.float32)

    def store(array: np.ndarray) -> np.int32:
        kept[name].array = np.array(array)
        return np.int32(0)

    return tf.numpy_function(store, [rows], tf.int32)


def _as_media(rows: np.ndarray) -> Media:
    return Images(rows) if are_pictures(rows, channels=(1, 3, 4)) else Histogram(rows)


@contextlib.contextmanager
def part(number: Any) -> Iterator[None]:
    """Enters a scope in which the rows are those of a part of a replica's batch: its number, an int or a scalar."""
    token = _number.set(number)
    try:
        yield
    finally:
        _number.reset(token)


@contextlib.contextmanager
def keeping(state: Any, update: str, *, is_compiled: bool = False, is_first: bool = True) -> Iterator[None]:
    """Enters a scope in which `keep` keeps tensors of an update, if it is in a `part` and in a first pass over it."""
    is_kept = is_first and _number.get() is not None
    token = _scope.set(_Keeping(state, update, is_compiled, set()) if is_kept else None)
    try:
        yield
    finally:
        _scope.reset(token)


class KeptTensors(Action):
    """Shows what `keep` has kept, at the steps where that is due."""

    name = "KeptTensors"

    def __init__(self, state: Any):
        """Stores the `TrainState`, whose `kept` is known once a step was traced."""
        self._state = state

    @property
    def every(self) -> int:  # type: ignore[override]  # it is known once a step was traced
        """The steps at which anything is due; 0: nothing is kept."""
        return math.gcd(*(kept.every for kept in self._state.kept.values()))

    def __call__(self, report: Report) -> dict[str, Any]:
        """Returns the media of the tensors that are due, on the worker that has them.

        Raises:
            ValueError: if `show` returned something else, such as a number, which the other workers would not have.
        """
        due = {name: kept for name, kept in self._state.kept.items() if report.step % kept.every == 0}
        media = {name: kept.show(kept.array) for name, kept in due.items() if kept.array is not None}
        for name, value in media.items():
            if not isinstance(value, Media):
                raise ValueError(
                    f"The function show of keep({name!r}) returned a {type(value).__name__}; it returns media, such as "
                    "distloop.Images(array) or distloop.Histogram(array)."
                )
        return media
