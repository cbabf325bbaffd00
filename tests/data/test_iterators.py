"""Iterators that nobody waits for when they are deleted."""

import threading
import time

import pytest
import tensorflow as tf

from distloop.data import iterators
from distloop.data.iterators import iterate
from distloop.data.source import Source
from tests.problems import mirrored, numbers


class SlowPart:
    """A part of an iterator; records the name of the thread that deletes it."""

    def __init__(self, deleted):
        self._deleted = deleted

    def __del__(self):
        self._deleted.append(threading.current_thread().name)


class Data:
    def __init__(self, deleted):
        self._deleted = deleted

    def __iter__(self):
        iterator = type("Iterator", (), {"__next__": lambda self: None})()
        iterator._iterator_resource = SlowPart(self._deleted)
        return iterator


def test_iterators_that_end_together_are_each_deleted_in_a_thread():
    everybody = threading.Barrier(20)  # which deletions one after the other would not pass

    class Deleted(list):
        def append(self, name):
            everybody.wait(300)
            super().append(name)

    deleted = Deleted()
    alive = [iterate(Data(deleted)) for _ in range(20)]
    time.sleep(2 * iterators._RELEASE_SECS)
    assert not deleted
    alive.clear()
    assert not deleted
    until(lambda: len(deleted) == 20)
    assert set(deleted) == {"distloop-iterator"}


def until(is_done, secs=60):
    deadline = time.monotonic() + secs
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_done()


def test_a_clock_that_was_set_back_holds_up_no_deletion():
    deletions, deleted = iterators._Deletions(1), []
    deletions._ended.put((time.monotonic() + 1e6, [SlowPart(deleted)]))
    until(lambda: deleted)


def test_a_new_iterator_waits_for_room_where_many_are_not_yet_deleted(monkeypatch):
    deletions = iterators._Deletions(most=3)  # of this test alone: those of other tests may take a minute
    monkeypatch.setattr(iterators, "_deletions", lambda: deletions)
    is_slow, made = threading.Event(), []

    class Stuck(list):
        def append(self, name):
            is_slow.wait(300)

    def evaluate():
        for _ in range(10):
            made.append(None)
            iterate(Data(Stuck()))

    thread = threading.Thread(target=evaluate)
    thread.start()
    until(lambda: len(made) == 4)
    time.sleep(2 * iterators._RELEASE_SECS)
    assert len(made) == 4  # the last one waits
    is_slow.set()
    thread.join(300)
    assert len(made) == 10


def test_the_resource_of_a_tensorflow_iterator_is_found():
    assert iterate(tf.data.Dataset.range(8).batch(4))._iterator_resource.dtype == tf.resource


@pytest.mark.slow
def test_every_iterator_of_a_source_is_made_with_iterate(monkeypatch):
    made = []
    monkeypatch.setattr("distloop.data.source.iterate", lambda dataset: made.append(iterate(dataset)) or made[-1])
    source = Source(numbers(8, 4), mirrored(2))
    used = [source.iterator(), source.new_iterator()]
    source.go_to(source.position())
    used.append(source.iterator())
    assert len(set(map(id, used))) == 3
    assert [id(one) for one in made] == [id(one) for one in used]
