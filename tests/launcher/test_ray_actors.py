"""When a run in Ray has ended, with actors that a script plays; on a real one: tests/test_elastic_runs.py."""

import signal
import sys
import types

import pytest

from distloop import launch
from distloop.launcher import ray_actors


class Method:
    def __init__(self, call):
        self.call = call

    def options(self, **_):
        return self

    def remote(self, *arguments):
        return self.call(*arguments)


class Actor:
    """An actor whose launcher ends with one code after the other; None: it runs, "": it waits for a place."""

    def __init__(self, *ends):
        self.ends, self.starts, self.signals = list(ends), 0, []
        self.run, self.is_running, self.stop = Method(self._run), Method(self._is_running), Method(self.signals.append)

    def _run(self, *_):
        self.starts += 1
        return self, self.ends[min(self.starts, len(self.ends)) - 1]

    def _is_running(self):
        end = self.ends[min(self.starts, len(self.ends)) - 1]
        return self, "" if end == "" else end is None

    def end(self, code):
        self.ends[-1] = code


class Ray:
    """Answers are pairs of an actor and what it says; None and "" are not there yet."""

    exceptions = types.SimpleNamespace(RayError=RuntimeError)

    def __init__(self):
        self.waits = []
        self.after = {}  # number of a wait -> what happens then

    def wait(self, answers, num_returns, timeout):
        self.waits.append(timeout)
        self.after.pop(len(self.waits), lambda: None)()
        done = [answer for answer in answers if self._value(answer) not in (None, "")]
        return done, [answer for answer in answers if answer not in done]

    def get(self, answer):
        return self._value(answer)

    def _value(self, answer):
        actor, value = answer
        return actor.ends[-1] if value is None else value


class Signals:
    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def wait(self, secs):
        return self.numbers.pop(0) if self.numbers else None


def run(*actors, ray=None, signals=()):
    return ray_actors._Driver(ray or Ray(), actors, ([], "/", 0), Signals(*signals)).wait()


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((75, 75), 75), ((3, 76), 76), ((75, 3), 3)])
def test_the_code_of_the_run_is_that_of_its_launchers(codes, expected):
    assert run(*(Actor(code) for code in codes)) == expected


def test_actors_that_never_had_a_place_are_not_waited_for():
    assert run(Actor(0), Actor("")) == 0
    assert run(Actor(75), Actor("")) == 75


def test_a_host_that_left_a_run_that_goes_on_is_started_again():
    left, stays, ray = Actor(75, None), Actor(None), Ray()
    ray.after[6] = lambda: (left.end(0), stays.end(0))
    assert run(left, stays, ray=ray) == 0
    assert left.starts == 2 and stays.starts == 1


def test_the_first_signal_is_passed_on_and_the_second_is_not_waited_for():
    actor, ray = Actor(None), Ray()
    ray.after[3] = lambda: actor.end(75)
    assert run(actor, ray=ray, signals=[signal.SIGINT]) == 75
    assert actor.signals == [signal.SIGTERM] and actor.starts == 1
    assert run(Actor(None), signals=[signal.SIGINT, signal.SIGINT]) == 130


def test_without_ray_a_sentence_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert launch.main(["--ray", "--workers=1:2", __file__, "--workdir=runs/digits"]) == 2
    assert "--ray was given, but Ray is not installed: pip install 'distloop[ray]'." in capsys.readouterr().err
