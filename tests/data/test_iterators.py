"""Iterators that nobody waits for when they are deleted."""

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
    """A part of an iterator; records the name of the thread that deletes it."""

    def __init__(self, deleted):
        self._deleted = deleted

    def __del__(self):
        self._deleted.append(threading.current_thread().name)


class Data:
    def __init__(self, deleted, parts_name):
        self._deleted, self._parts_name = deleted, parts_name

    def __iter__(self):
        iterator = type("Iterator", (), {"__next__": lambda self: None})()
        part = SlowPart(self._deleted)
        setattr(iterator, self._parts_name, [part] if self._parts_name == "_iterators" else part)
        return iterator


@pytest.mark.parametrize("parts_name", ["_iterators", "_iterator_resource"])
def test_an_iterator_is_deleted_in_a_thread_of_its_own(parts_name):
    deleted = []
    iterator = iterate(Data(deleted, parts_name))
    time.sleep(2 * iterators._RELEASE_SECS)
    assert not deleted
    del iterator
    assert not deleted
    deadline = time.monotonic() + 10
    while not deleted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert deleted == ["distloop-iterator"]


def test_the_parts_of_tensorflow_iterators_are_found():
    dataset = tf.data.Dataset.range(8).batch(4)
    assert iterate(dataset)._iterator_resource.dtype == tf.resource
    strategy = strategies.make_strategy(distloop.Config(device="cpu", num_devices=2))
    distributed = iterate(strategy.experimental_distribute_dataset(dataset))
    assert len(distributed._iterators) == 1
    assert next(distributed).values[0].numpy().tolist() == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("is_split", [False, True])
def test_every_iterator_of_a_source_is_made_with_iterate(is_split, monkeypatch):
    made = []

    def remembering(dataset):
        made.append(iterate(dataset))
        return made[-1]

    monkeypatch.setattr("distloop.data.source.iterate", remembering)
    strategy = strategies.make_strategy(distloop.Config(device="cpu", num_devices=2))
    data = tf.data.Dataset.range(8).map(lambda x: {"x": x}).batch(4)
    source = Source(strategy.experimental_distribute_dataset(data) if is_split else data, strategy)
    used = [source.iterator(), source.new_iterator()]
    source.restore_position(source.save_position())
    used.append(source.iterator())
    assert len(set(map(id, used))) == 3
    assert [id(one) for one in made] == [id(one) for one in used]
