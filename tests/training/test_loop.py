"""What the workers agree on between two loops; how a run is cut changes no bit: tests/test_laws.py."""

import types

import numpy as np
import pytest

from distloop.distributed.preemption import Interrupted
from distloop.training.loop import TrainLoop


@pytest.fixture
def loop(monkeypatch):
    """A loop whose next length is 8 steps on this worker, which began to train 20 s ago."""
    monkeypatch.setattr("distloop.training.loop.time.monotonic", lambda: 120.0)
    loop = TrainLoop.__new__(TrainLoop)
    loop._state, loop._most_steps, loop._started_at = types.SimpleNamespace(strategy=None), 8, 100.0
    return loop


def answer(monkeypatch, *values):
    """Lets the workers answer so; returns what this worker sent."""
    sent = []
    monkeypatch.setattr(
        "distloop.training.loop.workers.gather", lambda _, value: (sent.append(value), np.array(values))[1]
    )
    return sent


def test_all_workers_run_as_many_steps_as_the_chief_has_time_for(loop, monkeypatch):
    sent = answer(monkeypatch, [3.0, 50.0], [8.0, 70.0])
    loop._agree_on_next_loop(None, 100)
    assert sent == [[8, 20.0]] and loop._most_steps == 3 and loop._secs == 50.0  # the chief's time


def test_every_worker_leaves_when_one_is_to_stop(loop, monkeypatch):
    answer(monkeypatch, [3.0, 50.0], [0.0, 70.0])
    with pytest.raises(Interrupted, match="^Interrupted by worker 1 at step 100$"):
        loop._agree_on_next_loop(types.SimpleNamespace(reason=None), 100)


def test_a_worker_that_is_to_stop_says_why(loop, monkeypatch):
    sent = answer(monkeypatch, [3.0, 50.0], [0.0, 70.0])
    with pytest.raises(Interrupted, match="^Interrupted by SIGTERM at step 100$"):
        loop._agree_on_next_loop(types.SimpleNamespace(reason="by SIGTERM"), 100)
    assert sent == [[0, 20.0]]
