"""Tests that nobody waits for the end of an iterator."""

import threading
import time

import pytest
import tensorflow as tf

import distloop
from distloop.data import iterators
from distloop.data.iterators import iterate
from distloop.data.source import Source
from distloop.distributed import strategies


class SlowPart:
    """Stands for what takes long to end; notes the thread that it ended in."""

    def __init__(self, ended):
        self._ended = ended

    def __del__(self):
        self._ended.append(threading.current_thread().name)


class Data:
    def __init__(self, ended, parts_name):
        self._ended, self._parts_name = ended, parts_name

    def __iter__(self):
        iterator = type("Iterator", (), {"__next__": lambda self: None})()
        part = SlowPart(self._ended)
        setattr(iterator, self._parts_name, [part] if self._parts_name == "_iterators" else part)
        return iterator


@pytest.mark.parametrize("parts_name", ["_iterators", "_iterator_resource"])
def test_an_iterator_ends_in_a_thread_of_its_own(parts_name):
    ended = []
    iterator = iterate(Data(ended, parts_name))
    time.sleep(2 * iterators._MOMENT_SECS)
    assert not ended
    del iterator
    assert not ended
    deadline = time.monotonic() + 10
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == ["distloop-iterator"]


def test_what_iterators_are_made_of_is_where_it_is_looked_for():
    dataset = tf.data.Dataset.range(8).batch(4)
    assert iterate(dataset)._iterator_resource.dtype == tf.resource
    strategy = strategies.make_strategy(distloop.Config(device="cpu", num_devices=2))
    distributed = iterate(strategy.experimental_distribute_dataset(dataset))
    assert len(distributed._iterators) == 1
    assert next(distributed).values[0].numpy().tolist() == [0, 1]


@pytest.mark.parametrize("is_split", [False, True])
def test_training_evaluation_and_a_restore_make_their_iterators_with_it(is_split, monkeypatch):
    made = []

    def remembering(dataset):
        made.append(iterate(dataset))
        return made[-1]

    monkeypatch.setattr("distloop.data.source.iterate", remembering)
    strategy = strategies.make_strategy(distloop.Config(device="cpu", num_devices=2))
    data = tf.data.Dataset.range(8).map(lambda x: {"x": x}).batch(4)
    source = Source(strategy.experimental_distribute_dataset(data) if is_split else data, strategy)
    found = [source.iterator(), source.new_iterator()]
    source.restore_position(source.save_position())
    found.append(source.iterator())
    assert len(set(map(id, found))) == 3
    assert [id(one) for one in made] == [id(one) for one in found]
