"""Action state: the state of each action in a checkpoint, by the action's name, as JSON values.

    states = RunStates()                        # of one run
    states.attach(actions, saved=None)          # by each `fit`: an action of another run is refused
    states.read()                               # {"StopEarly(test/loss)": {"best": 0.12, "waited": 1}}

A state is copied when it is read, so an action may change its own dict at once. A value that JSON would give back as
another one (a tuple, a dict with integer keys) is refused. This module does not know where states are written.
"""

import contextlib
import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distloop.log import log, shown
from distloop.training.action import Action, member, name_of

_MAX_BITS = 10_000  # Python converts larger integers neither to text nor back
_RUN = "_distloop_run"  # an attribute of each action with a state: the key of its run


class RunStates:
    """The states of one run's actions, over several calls of `fit`, some of which may lack an action."""

    def __init__(self) -> None:
        """Begins without any."""
        self._key = object()
        self._states: dict[str, Any] = {}  # by name, of actions that `fit` had before
        self._actions: dict[str, Action] = {}  # of the present `fit`, by name
        self._first: dict[str, Any] = {}  # the states of these when the run got them

    def attach(self, actions: Sequence[Action], saved: Mapping[str, Any] | None, *, is_written: bool = True) -> None:
        """Gives each action its state in this run: that of a checkpoint, or of this run, or the one of a new action.

        Args:
            actions: all actions of a `fit`, in the order in which they were given.
            saved: the states of the checkpoint that was restored, by name; None: none was restored.
            is_written: whether the states go into checkpoints.

        Raises:
            ValueError: if an action was given to another run before; or if states are written, and two actions have the
                same name, or JSON does not give back a state as it was.
        """
        named = by_name(actions, must_differ=is_written)
        for name, action in named.items():
            self._claim(action, name)
        kept = self._states | _states_of(self._actions)
        states = kept if saved is None else saved
        for name, action in named.items():
            is_new = self._actions.get(name) is not action
            if is_new:
                self._first |= _states_of({name: action})
            if name in states and (is_new or saved is not None):
                member(action, "set_state")(copy.deepcopy(states[name]))
            elif saved is not None and name in self._first:
                member(action, "set_state")(copy.deepcopy(self._first[name]))
        absent = {name: state for name, state in states.items() if name not in named}
        if absent and saved is not None and is_written:
            log.warning(
                "The checkpoint holds the state of %s, which is no action of this run: it is kept for a later start.",
                ", ".join(map(repr, sorted(absent))),
            )
        for action in named.values():
            member(action, "take_over")(absent)
        self._states, self._actions = absent, named
        for name, state in _states_of(named).items() if is_written else ():
            _copy(state, name)

    def _claim(self, action: Action, name: str) -> None:
        """Notes at an action that it belongs to this run; refuses one of another run."""
        if getattr(action, "__dict__", {}).get(_RUN, self._key) is not self._key:
            raise ValueError(
                f"The action {name!r} was given to another run before, and has the state of that run: make another one "
                "for each run."
            )
        with contextlib.suppress(AttributeError, TypeError):  # of a class with slots
            setattr(action, _RUN, self._key)

    def read(self) -> dict[str, Any]:
        """Returns the states by name, for a checkpoint: those of the present actions, and what earlier ones have left.

        Raises:
            ValueError: if a state holds a value that JSON does not give back as it was.
        """
        return self._states | states_of(self._actions)


def by_name(actions: Sequence[Action], *, must_differ: bool = True) -> dict[str, Action]:
    """Returns the actions that have a state to keep, by name.

    The name of an action is its attribute `name`; without one, a function's `__name__` or the name of the class.

    Args:
        actions: in order.
        must_differ: whether names must differ; else the second of a name has `#2` behind it.

    Raises:
        ValueError: if two of them have the same name.
    """
    named: dict[str, Action] = {}
    for action in actions:
        if not _has_state(action):
            continue
        name = name_of(action)
        while not must_differ and named.get(name, action) is not action:
            name = f"{name_of(action)} #{len(named) + 1}"
        if named.setdefault(name, action) is not action:
            raise ValueError(
                f"Two actions are called {name!r}, and a checkpoint keeps the state of each by its name: give one of "
                "them another attribute `name`."
            )
    return named


def states_of(named: Mapping[str, Action]) -> dict[str, Any]:
    """Returns the actions' states by name, copied; an action whose state is None has none.

    Raises:
        ValueError: if a state holds a value that JSON does not give back as it was.
    """
    states = {name: _state_of(action) for name, action in named.items()}
    return {name: _copy(state, name) for name, state in states.items() if state is not None}


def _states_of(named: Mapping[str, Action]) -> dict[str, Any]:
    """Returns copies of the states of actions, without those that may have one only once they were called."""
    states = {}
    for name, action in named.items():
        with contextlib.suppress(Exception):
            states[name] = copy.deepcopy(_state_of(action))
    return {name: state for name, state in states.items() if state is not None}


def _state_of(action: Action) -> Any:
    """Returns an action's state, without the key of its run, which `vars(self)` has."""
    state = member(action, "get_state")()
    return {name: value for name, value in state.items() if name != _RUN} if isinstance(state, dict) else state


def _has_state(action: Action) -> bool:
    method = getattr(action, "get_state", None)
    return method is not None and getattr(method, "__func__", None) is not Action.get_state


def plain(value: Any) -> Any:
    """Returns the value that JSON gives back; it is equal to the one given.

    Raises:
        TypeError: if JSON gives back another value; with the part of the value that it changes.
    """
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    scalar = value.item() if isinstance(value, np.generic) else value
    is_short = not isinstance(scalar, int) or scalar.bit_length() <= _MAX_BITS
    if scalar is None or isinstance(scalar, (int, float, str)) and is_short:
        scalar = json.loads(json.dumps(scalar))
        if scalar == value or scalar != scalar:
            return scalar
    raise TypeError(f"{' '.join(shown(value).split())} of type {type(value).__name__}")


def _copy(state: Any, name: str) -> Any:
    """Returns what `plain` makes of an action's state; raises a ValueError with the action's name."""
    try:
        return plain(state)
    except TypeError as error:
        raise ValueError(
            f"get_state of the action {name!r} returned {error}, which a checkpoint cannot give back as it was: return "
            "dicts with strings as keys, lists, numbers, strings, booleans and None, and convert others, by str(key), "
            "list(tuple) or array.tolist(), and back in set_state."
        ) from None
