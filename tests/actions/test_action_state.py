"""Names of actions, and their states in a checkpoint."""

import enum
import json
import math

import numpy as np
import pytest

import distloop
from distloop.actions import action_state
from distloop.training.action import Action
from tests.problems import refused


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


def attach(actions, states):
    """Gives actions their states in a new run."""
    action_state.RunStates().attach(actions, states)


def kept(state):
    """Returns a state as it comes back from a checkpoint's text."""
    return json.loads(json.dumps(action_state.states_of({"counts": Counts(state)})))["counts"]


@pytest.mark.parametrize(
    "state",
    [{"a": [1, 2.5, -0.0, "x", True, None, {"b": []}]}, [math.inf, -math.inf, math.nan, 10**400, "\ud800", ""], 0],
)
def test_a_state_comes_back_as_it_was(state):
    assert repr(kept(state)) == repr(state)  # True is not 1, and -0.0 is not 0.0


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(7), 7),
        (np.float32(0.1), 0.10000000149011612),
        (np.float32("nan"), math.nan),
        (np.float16(-0.0), -0.0),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (enum.IntEnum("Phase", "warm cold").cold, 2),
    ],
)
def test_numbers_of_other_types_come_back_as_equal_numbers_of_python(value, plain):
    assert repr(kept({"value": value})) == repr({"value": plain}) and (plain == value or math.isnan(plain))


def test_a_state_is_copied_when_it_is_read():
    state = {"seen": [1], "inner": {"a": 1}}
    states = action_state.states_of({"counts": Counts(state)})
    state["seen"].append(2)
    state["inner"]["b"] = 2
    assert states == {"counts": {"seen": [1], "inner": {"a": 1}}}


@pytest.mark.parametrize(
    ("state", "entry"),
    [
        ({"seen": {3: 1}}, "returned {3: 1} of type dict"),
        ({None: 1}, "returned {None: 1} of type dict"),
        ({"best": [(1.0, 2)]}, "returned (1.0, 2) of type tuple"),
        ({"weights": np.zeros(2)}, "returned array([0., 0.]) of type ndarray"),
        ({"a", "b"}, "of type set"),
        ([1 << 50_000], "returned a number of more than 4,300 digits of type int"),
        (b"x", "b'x' of type bytes"),
        (np.longdouble(1) / 3, "of type longdouble"),
        (np.complex64(1j), "of type complex64"),
        (np.datetime64("2026-01-01"), "of type datetime64"),
    ],
)
def test_what_json_would_change_is_refused_with_the_action_and_the_entry(state, entry):
    action = Counts(state, "counts")
    for look in (lambda: action_state.states_of({"counts": action}), lambda: attach([action], None)):
        with pytest.raises(ValueError, match="get_state of the action 'counts' returned") as error:
            look()
        assert entry in str(error.value)


def test_an_action_without_a_state_before_its_first_call_passes_the_check():
    class Late(Counts):
        def get_state(self):
            return self.missing

    attach([Late(), Counts(name="none")], None)
    with pytest.raises(AttributeError):
        action_state.states_of({"late": Late()})


def test_actions_are_named_by_what_they_watch_and_need_a_name_for_a_state():
    def function(report):
        pass

    class Plain(Action):
        every = 1

    actions = [distloop.StopEarly("test/loss"), distloop.StopEarly("loss"), distloop.SaveBest("test/loss")]
    assert list(action_state.by_name(actions)) == ["StopEarly(test/loss)", "StopEarly(loss)", "SaveBest(test/loss)"]
    named = action_state.by_name([function, function, Plain(), Plain(), Counts(), Other(name="mine")])
    assert named.keys() == {"Counts", "mine"}


def test_two_actions_of_one_name_are_refused_and_one_given_twice_is_not():
    with pytest.raises(ValueError, match="Two actions are called 'Counts'.*another attribute `name`"):
        action_state.by_name([Counts(), Other(), Counts()])
    with pytest.raises(ValueError, match="Two actions are called 'mine'"):
        action_state.by_name([Counts(name="mine"), Other(name="mine")])
    action = Counts()
    assert action_state.by_name([action, action]) == {"Counts": action}


def test_states_follow_their_names_when_an_action_is_inserted(caplog):
    states = action_state.states_of(action_state.by_name([Counts(1, "a"), Other(2), Counts(3, "c")]))
    again = [Counts(name="c"), Counts(name="new"), Other(), Counts(name="a")]
    attach(again, states)
    assert [action.state for action in again] == [3, None, 2, 1] and not caplog.records
    attach([Counts()], {"Counts": 1, "Gone": 2})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "the state of 'Gone', which is no action of this run" in record.getMessage()


def used(state, then):
    """Returns an action that a run has had, new with one state and now with another, and the states of that run."""
    action, run = Counts(state), action_state.RunStates()
    run.attach([action], None)
    action.state = then
    return action, run


@pytest.mark.parametrize("is_written", [True, False])
def test_an_action_of_another_run_is_refused_and_its_own_goes_on(is_written):
    action, run = used(0, 7)
    sentence = "The action 'Counts' was given to another run before, and has the state", "make another one for each run"
    refused(lambda: action_state.RunStates().attach([action], None, is_written=is_written), *sentence)
    refused(lambda: action_state.RunStates().attach([action], {"Counts": 1}, is_written=is_written), *sentence)
    run.attach([action], None, is_written=is_written)
    assert action.state == 7


def test_the_next_fit_keeps_its_state_unless_it_goes_back_before_it():
    action, run = used(0, 7)
    run.attach([action], None)
    assert action.state == 7
    run.attach([again := Counts(0)], None)
    assert again.state == 7
    run.attach([again], {})
    assert again.state == 0


def test_a_state_of_which_a_fit_lacks_the_action_is_kept_for_a_later_one():
    _, run = used(0, {"best": 1.0})
    run.attach([Other(1)], None)
    resumed = action_state.RunStates()
    resumed.attach([Other(0)], run.read())
    assert run.read() == resumed.read() == {"Counts": {"best": 1.0}, "Other": 1}
    resumed.attach([late := Counts(0)], None)
    assert late.state == {"best": 1.0}


def test_without_checkpoints_two_actions_may_have_one_name_and_any_state():
    actions, run = [Counts({1}), Counts({2})], action_state.RunStates()
    run.attach(actions, None, is_written=False)
    again = [Counts(set()), Counts(set())]
    run.attach(again, None, is_written=False)
    assert [action.state for action in again] == [{1}, {2}]


def test_all_attributes_of_an_action_may_be_its_state():
    class Whole(Counts):
        def get_state(self):
            return dict(vars(self))

        def set_state(self, state):
            vars(self).update(state)

    run, action = action_state.RunStates(), Whole(3)
    run.attach([action], None)
    assert run.read() == {"Whole": {"state": 3}}
    run.attach([action], {"Whole": {"state": 2}})
    assert action.state == 2 and run.read() == {"Whole": {"state": 2}}


def test_an_action_without_attributes_of_its_own_is_taken():
    class Slots:
        __slots__ = ("state",)
        every, get_state, set_state = 1, Counts.get_state, Counts.set_state

        def __call__(self, report):
            pass

    action = Slots()
    action.state = 5
    attach([action], None)
    attach([action], {"Slots": 3})
    assert action.state == 3
