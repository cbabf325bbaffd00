"""Action state: the state of each action in a checkpoint, by the action's name, as JSON values.

    states = RunStates()                        # of one run
    states.attach(actions, saved=None)          # by each `fit`: an action that another run has used begins anew
    states.read()                               # {"StopEarly(test/loss)": {"best": 0.12, "waited": 1}}

A state is copied when it is read, so an action may change its own dict at once. A value that JSON would give back as
another one (a tuple, a dict with integer keys) is refused. This module does not know where states are written.
"""

import copy
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distloop.actions.action import Action, member, name_of
from distloop.log import log, shown

_MAX_BITS = 10_000  # Python converts larger integers neither to text nor back


class _Use(NamedTuple):
    """What is known of an action since a run first had it."""

    action: Callable[[], Any]  # weak, where that is possible
    first: Any  # its state then; None: it said so, or had none yet
    run: Callable[[], Any]  # the `RunStates` of the run that had it last


_uses: dict[int, _Use] = {}  # by identity of the action


class RunStates:
    """The states of one run's actions, over several calls of `fit`, some of which may lack an action."""

    def __init__(self) -> None:
        """Begins without any."""
        self._states: dict[str, Any] = {}  # by name, of actions that `fit` has now or had before
        self._actions: dict[str, Action] = {}  # of the present `fit`, by name

    def attach(self, actions: Sequence[Action], saved: Mapping[str, Any] | None, *, is_written: bool = True) -> None:
        """Gives each action its state in this run: that of a checkpoint, or of this run, or the one of a new action.

        Args:
            actions: all actions of a `fit`, in the order in which they were given.
            saved: the states of the checkpoint that was restored, by name; None: none was restored.
            is_written: whether the states go into checkpoints.

        Raises:
            ValueError: if they do, and two actions have the same name, or JSON does not give back a state as it was.
        """
        named = by_name(actions, must_differ=is_written)
        self._keep()
        states = self._states if saved is None else saved
        for name, action in named.items():
            use = _use_of(action)
            first = _look(action) if use is None else use.first
            run = None if use is None else use.run()
            if run is self and saved is None:
                continue  # it goes on
            if run is not None:
                run._keep()
            if name in states:
                member(action, "set_state")(copy.deepcopy(states[name]))
            elif use is not None:
                _begin_anew(action, name, first)
            _note(action, self, first)
        absent = {name: state for name, state in states.items() if name not in named}
        if absent and saved is not None:
            log.warning(
                "The checkpoint holds the state of %s, which is no action of this run: it is kept for a later start.",
                ", ".join(map(repr, sorted(absent))),
            )
        for action in named.values():
            if (take_over := getattr(action, "take_over", None)) is not None:
                take_over(absent)
        self._states, self._actions = absent, named
        for name in named if is_written else ():
            _copy(_look(named[name]), name)

    def read(self) -> dict[str, Any]:
        """Returns the states by name, for a checkpoint: those of the present actions, and what earlier ones have left.

        Raises:
            ValueError: if a state holds a value that JSON does not give back as it was.
        """
        self._states |= states_of(self._own())
        return dict(self._states)

    def _keep(self) -> None:
        """Keeps the present states: the next `fit` may have other actions, and another run may take these."""
        looks = {name: _look(action) for name, action in self._own().items()}
        self._states |= {name: state for name, state in looks.items() if state is not None}

    def _own(self) -> dict[str, Action]:
        """Returns the present actions by name, without those that another run has taken since."""
        uses = {name: _use_of(action) for name, action in self._actions.items()}
        return {name: self._actions[name] for name, use in uses.items() if use is None or use.run() is self}


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
    states = {name: member(action, "get_state")() for name, action in named.items()}
    return {name: _copy(state, name) for name, state in states.items() if state is not None}


def _look(action: Action) -> Any:
    """Returns a copy of an action's state; None: it may have one only once it was called."""
    try:
        return copy.deepcopy(member(action, "get_state")())
    except Exception:
        return None


def _use_of(action: Action) -> _Use | None:
    use = _uses.get(id(action))
    return use if use is not None and use.action() is action else None


def _note(action: Action, run: RunStates, first: Any) -> None:
    """Notes that a run has an action, as long as the action lives."""
    key = id(action)
    try:
        reference: Callable[[], Any] = weakref.ref(action, lambda _: _uses.pop(key, None))
    except TypeError:  # of a class with slots
        reference = lambda: action  # noqa: E731
    _uses[key] = _Use(reference, first, weakref.ref(run))


def _begin_anew(action: Action, name: str, first: Any) -> None:
    """Gives an action that another run has used the state that it had when it was new."""
    try:
        member(action, "set_state")(copy.deepcopy(first))
    except Exception:
        if first is not None:
            raise
        log.warning(
            "The action %r was used by another run and keeps its state, as it had none when it was new: give each run "
            "its own.",
            name,
        )


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
