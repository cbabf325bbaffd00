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
    until(lambda: deleted)
    assert deleted == ["distloop-iterator"]


def until(is_done, secs=10):
    deadline = time.monotonic() + secs
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_done()


def test_a_clock_that_was_set_back_holds_up_no_deletion():
    deletions, deleted = iterators._Deletions(1), []
    deletions._ended.put((time.monotonic() + 1e6, [SlowPart(deleted)]))
    until(lambda: deleted)


def test_iterators_that_end_together_are_deleted_together():
    deleted = []
    alive = [iterate(Data(deleted, "_iterator_resource")) for _ in range(20)]
    began = time.monotonic()
    alive.clear()
    until(lambda: len(deleted) == 20)
    assert time.monotonic() - began < 10 * iterators._RELEASE_SECS  # one after the other took 20 times as long


def test_a_new_iterator_waits_for_room_where_many_are_not_yet_deleted(monkeypatch):
    deletions = iterators._Deletions(most=3)  # of this test alone: those of other tests may take a minute
    monkeypatch.setattr(iterators, "_deletions", lambda: deletions)
    is_slow, made = threading.Event(), []

    class Stuck(list):
        def append(self, name):
            is_slow.wait(10)

    def evaluate():
        for _ in range(10):
            made.append(None)
            iterate(Data(Stuck(), "_iterator_resource"))

    thread = threading.Thread(target=evaluate)
    thread.start()
    until(lambda: len(made) == 4)
    time.sleep(2 * iterators._RELEASE_SECS)
    assert len(made) == 4  # the last one waits
    is_slow.set()
    thread.join(10)
    assert len(made) == 10


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
