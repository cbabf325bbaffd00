"""Names of actions, and their states in a checkpoint."""

import enum
import json
import math

import numpy as np
import pytest

import distloop
from distloop.actions import action_state
from distloop.actions.action import Action


class Counts(Action):
    """An action with any state."""

    every = 1

    def __init__(self, state=None, name=None):
        self.state = state
        if name is not None:
            self.name = name

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


class Other(Counts):
    pass


def kept(state):
    """Returns a state as it comes back from a checkpoint's text."""
    return json.loads(json.dumps(action_state.states_of({"counts": Counts(state)})))["counts"]


@pytest.mark.parametrize(
    "state",
    [
        {"a": [1, 2.5, -0.0, "x", True, None, {"b": []}]},
        [math.inf, -math.inf, 10**400, "\ud800", ""],
        0,
    ],
)
def test_a_state_comes_back_as_it_was(state):
    assert repr(kept(state)) == repr(state)  # True is not 1, and -0.0 is not 0.0


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(7), 7),
        (np.float32(0.1), 0.10000000149011612),
        (np.float16(-0.0), -0.0),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (enum.IntEnum("Phase", "warm cold").cold, 2),
    ],
)
def test_numbers_of_other_types_come_back_as_those_of_python_that_are_equal(value, plain):
    assert repr(kept({"value": value})) == repr({"value": plain}) and plain == value


def test_nan_comes_back_as_nan():
    assert math.isnan(kept({"best": math.nan})["best"]) and math.isnan(kept({"best": np.float32("nan")})["best"])


def test_a_state_is_copied_when_it_is_read():
    state = {"seen": [1], "inner": {"a": 1}}
    states = action_state.states_of({"counts": Counts(state)})
    state["seen"].append(2)
    state["inner"]["b"] = 2
    assert states == {"counts": {"seen": [1], "inner": {"a": 1}}}


@pytest.mark.parametrize(
    ("state", "entry"),
    [
        ({"seen": {3: 1}}, "at ['seen'] the key 3 of type int"),
        ({None: 1}, "the key None of type NoneType"),
        ({"best": [(1.0, 2)]}, "at ['best'][0] (1.0, 2) of type tuple"),
        ({"weights": np.zeros(2)}, "at ['weights'] array([0., 0.]) of type ndarray"),
        ({"a", "b"}, "of type set"),
        ([1 << 50_000], "at [0] an integer of 50001 bits"),
        (b"x", "b'x' of type bytes"),
        (np.longdouble(1) / 3, "of type longdouble"),
        (np.complex64(1j), "of type complex64"),
        (np.datetime64("2026-01-01"), "of type datetime64"),
    ],
)
def test_what_json_would_change_is_refused_with_the_action_and_the_entry(state, entry):
    for look in (action_state.states_of, action_state.check):
        with pytest.raises(ValueError, match="get_state of the action 'counts' returned") as error:
            look({"counts": Counts(state)})
        assert entry in str(error.value)


def test_an_action_that_has_no_state_before_its_first_call_passes_the_check():
    class Late(Counts):
        def get_state(self):
            return self.missing

    action_state.check({"late": Late(), "none": Counts()})
    with pytest.raises(AttributeError):
        action_state.states_of({"late": Late()})


def test_actions_without_a_state_of_their_own_need_no_name():
    def function(report):
        pass

    class Plain(Action):
        every = 1

    assert action_state.by_name([function, function, Plain(), Plain(), Counts(), Other(name="mine")]).keys() == {
        "Counts",
        "mine",
    }


def test_the_package_names_its_actions_by_what_they_watch():
    actions = [
        distloop.StopEarly("test/loss"),
        distloop.StopEarly("loss"),
        distloop.SaveBest("test/loss"),
    ]
    assert list(action_state.by_name(actions)) == ["StopEarly(test/loss)", "StopEarly(loss)", "SaveBest(test/loss)"]


def test_two_actions_of_one_name_are_refused_and_one_given_twice_is_not():
    with pytest.raises(ValueError, match="Two actions are called 'Counts'.*another attribute `name`"):
        action_state.by_name([Counts(), Other(), Counts()])
    with pytest.raises(ValueError, match="Two actions are called 'mine'"):
        action_state.by_name([Counts(name="mine"), Other(name="mine")])
    action = Counts()
    assert action_state.by_name([action, action]) == {"Counts": action}


def test_states_follow_their_names_when_an_action_is_inserted():
    states = action_state.states_of(action_state.by_name([Counts(1, "a"), Other(2), Counts(3, "c")]))
    again = [Counts(name="c"), Counts(name="new"), Other(), Counts(name="a")]
    action_state.restore(again, states)
    assert [action.state for action in again] == [3, None, 2, 1]


@pytest.mark.parametrize(
    ("actions", "states", "restored"),
    [
        ([Counts, Other], {"Counts/0": 1, "Other/1": 2}, [1, 2]),
        ([Other, Counts], {"Counts/0": 1}, [None, 1]),  # another action was inserted before it
        ([Other, Counts, Counts], {"Counts/0": 1, "Counts/1": 2}, [None, 1, 2]),
        ([Counts, Counts], {"Counts/1": 2}, [None, 2]),  # the state of the first was None
        ([Counts], {"Counts/x": 1, "Counts/²": 2, "Counts": None}, [None]),
    ],
)
def test_states_that_were_named_by_class_and_position_find_their_actions(actions, states, restored):
    actions = [kind(name=f"{kind.__name__} {i}") for i, kind in enumerate(actions)]
    action_state.restore(actions, states)
    assert [action.state for action in actions] == restored


def test_a_state_that_no_action_takes_is_named_in_the_log(caplog):
    with caplog.at_level("WARNING", "distloop"):
        action_state.restore([Counts()], {"Counts": 1, "Gone": 2})
    (record,) = caplog.records
    assert "the state of 'Gone', which is no action of this run" in record.getMessage()
