"""Action state: the state of actions for a checkpoint, kept by the action's name, in values that JSON gives back equal.

    states = states_of(by_name(actions))        # {"StopEarly(test/loss)": {"best": 0.12, "waited": 1}}
    restore(actions, states)

A state is copied when it is read, so an action may change its own dict at once. A value that JSON would give back as
another one (a tuple, a dict with integer keys) is refused. This module does not know where states are written.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from distloop.actions.action import Action, member, name_of
from distloop.log import log

_MAX_BITS = 10_000  # Python converts larger integers neither to text nor back


def by_name(actions: Sequence[Action]) -> dict[str, Action]:
    """Returns the actions that have a state to keep, by name.

    The name of an action is its attribute `name`; without one, a function's `__name__` or the name of the class.

    Raises:
        ValueError: if two of them have the same name.
    """
    named: dict[str, Action] = {}
    for action in actions:
        if not _has_state(action):
            continue
        name = name_of(action)
        if named.setdefault(name, action) is not action:
            raise ValueError(
                f"Two actions are called {name!r}, and a checkpoint keeps the state of each by its name: give one of "
                "them another attribute `name`."
            )
    return named


def states_of(named: Mapping[str, Action]) -> dict[str, Any]:
    """Returns the states by name, copied; an action whose state is None has none.

    Raises:
        ValueError: if a state holds a value that JSON does not give back as it was.
    """
    states = {name: member(action, "get_state")() for name, action in named.items()}
    return {name: _copy(state, name, "") for name, state in states.items() if state is not None}


def check(named: Mapping[str, Action]) -> None:
    """Checks the states that the actions have before the first step, as `states_of` does."""
    for name, action in named.items():
        try:
            state = member(action, "get_state")()
        except Exception:  # noqa: S112 - it may have a state only once it was called
            continue
        if state is not None:
            _copy(state, name, "")


def restore(actions: Sequence[Action], states: Mapping[str, Any]) -> None:
    """Gives each action its state of a checkpoint; logs the names of states that no action takes.

    Args:
        actions: all actions, in the order in which they were given.
        states: as `states_of` returned them, or of versions that named a state by class and position: `StopEarly/0`.
    """
    unused = set(states)
    for name, action in by_name(actions).items():
        key = name if name in states else _earlier_key(action, actions, states)
        if key is not None:
            member(action, "set_state")(states[key])
            unused.discard(key)
    if unused:
        log.warning(
            "The checkpoint holds the state of %s, which is no action of this run: the state is left out.",
            ", ".join(map(repr, sorted(unused))),
        )


def _has_state(action: Action) -> bool:
    method = getattr(action, "get_state", None)
    return method is not None and getattr(method, "__func__", None) is not Action.get_state


def _earlier_key(action: Action, actions: Sequence[Action], states: Mapping[str, Any]) -> str | None:
    """Returns the key, by class and position, of an action's state; None if there is none.

    If there is a state for each action of the class, they belong together in order, whatever their positions: another
    action may have been inserted since.
    """
    kind = type(action).__name__
    parts = [key.rpartition("/") for key in states]
    positions = sorted(int(position) for name, _, position in parts if name == kind and position.isdecimal())
    alike = [i for i, other in enumerate(actions) if type(other).__name__ == kind and _has_state(other)]
    index = next(i for i in alike if actions[i] is action)
    position = positions[alike.index(index)] if len(positions) == len(alike) else index
    return f"{kind}/{position}" if position in positions else None


def _copy(value: Any, name: str, entry: str) -> Any:
    """Returns the value that JSON gives back; it is equal to the one given.

    Args:
        value: a state, or an entry of one.
        name: of the action, for the message.
        entry: where the value is in the state, such as `['counts'][0]`; empty for the state itself.

    Raises:
        ValueError: if JSON gives back another value.
    """
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                _refuse(f"the key {key!r} of type {type(key).__name__}", name, entry)
        return {key: _copy(item, name, f"{entry}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item, name, f"{entry}[{i}]") for i, item in enumerate(value)]
    plain = value.item() if isinstance(value, np.generic) else value
    is_short = not isinstance(plain, int) or plain.bit_length() <= _MAX_BITS
    if plain is None or isinstance(plain, (int, float, str)) and is_short:
        plain = json.loads(json.dumps(plain))
        if plain == value or plain != plain:
            return plain
    _refuse(_brief(value), name, entry)


def _brief(value: Any) -> str:
    if isinstance(value, int):
        return f"an integer of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 60 else f'{text[:57]}...'} of type {type(value).__name__}"


def _refuse(what: str, name: str, entry: str) -> NoReturn:
    place = f"at {entry} " if entry else ""
    raise ValueError(
        f"get_state of the action {name!r} returned {place}{what}, which a checkpoint cannot give back as it was: "
        "return dicts with strings as keys, lists, numbers, strings, booleans and None, and convert others, by "
        "str(key), list(tuple) or array.tolist(), and back in set_state."
    )
