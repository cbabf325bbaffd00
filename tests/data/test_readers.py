"""Readers of batches that Python makes: the place of a resumed run, passes, orders, data that cannot start again."""

import json
import re
import threading
import types
from typing import ClassVar

import pytest
import tensorflow as tf

from distloop.data.order import Access
from distloop.data.source import Passes, Source
from distloop.run.fit_call import batches_per_epoch
from tests.data.python_batches import (
    ONE,
    Drawn,
    Loader,
    Numbers,
    Orders,
    Shuffled,
    Stateful,
    batch,
    endless,
    failure,
    taken,
    three,
)
from tests.problems import batch_taker, mostly_wide, refused


@pytest.mark.slow
@pytest.mark.parametrize("make", mostly_wide([endless, lambda: three, Stateful, Loader, Numbers]))
@pytest.mark.parametrize("num_batches", mostly_wide([1, 7]))
def test_a_run_resumes_at_its_place(make, num_batches):
    going_on, again = resumed(make, num_batches)
    assert going_on == again


def resumed(make, num_batches):
    """Returns the batches behind a place, of data that goes on there and of a new run's that resumes there."""
    first, second = Source(make(), ONE), Source(make(), ONE)
    taken(first, num_batches)
    second.go_to(json.loads(json.dumps(first.position())))
    return taken(first, 4), taken(second, 4)


@pytest.mark.slow
def test_states_of_bytes_are_kept_as_text():
    going_on, again = resumed(lambda: Stateful(str.encode), 7)
    assert going_on == again == [3, 4, 5, 1]


def test_a_generator_is_read_from_the_start_and_called_again_at_the_end():
    assert taken(Source(three, ONE), 7) == [0, 1, 2, 0, 1, 2, 0]
    generator = endless()
    assert Source(generator, ONE).first_rows()["x"].numpy().tolist() == [0, 0]
    assert taken(Source(generator, ONE), 4) == [0, 1, 2, 3]  # sources of one generator lose no batch
    assert taken(Source(endless, ONE, limit=2), 4) == [0, 1, 0, 1]
    assert "reads it again" in Source(Loader(), ONE, limit=2).resume


def source_at(data, batches, **facts):
    source = Source(data, ONE)
    source.go_to({"batches": batches, "skipped": [], **facts})
    return source


def test_a_state_is_restored_without_reading_on_unless_it_is_refused():
    source = source_at(Stateful(), 9, state={"pass": 1, "iterator": {"place": 4}})
    Stateful.read.clear()
    assert taken(source, 1) == [5]
    assert Stateful.read[0] == 5
    assert source.access is Access.SEEKS and "at its position at once" in source.resume
    assert taken(source_at(Stateful(), 7, state={"pass": 1, "iterator": {"another": 4}}), 2) == [3, 4]


def test_states_of_trained_batches_are_forgotten_and_shards_keep_none():
    source = Source(Stateful(), ONE)
    for _ in range(12):
        taken(source, 1)
    assert len(source.feed._states) < 12
    assert "state" in source.position()
    source.layout = source.layout._replace(is_sharded=True)
    assert "state" not in source.position()


def test_a_lost_position_is_found_again_in_a_part_of_data_with_states():
    source = Source(Stateful(), ONE, limit=3)
    assert taken(source, 2) == [1, 2]
    batch_taker(source, source.iterator())()  # a loop that fails on this batch
    source.count(0, is_lost=True)
    assert taken(source, 2) == [3, 1]


def test_a_pydataset_is_at_its_position_at_once_after_ended_epochs():
    data = Numbers()
    source = source_at(data, 7)
    data.read.clear()
    assert taken(source, 3) == [21, 22, 30]
    assert data.read[0] == 1
    endless_source = source_at(Numbers(None), 5)
    assert endless_source.info.is_endless and taken(endless_source, 2) == [5, 6]


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end"])
def test_a_pydataset_that_draws_its_order_in_a_hook_resumes_in_that_order(hook):
    whole = taken(Source(Drawn(hook), ONE), 16)
    assert [sorted(whole[i : i + 5]) for i in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3 and whole[:5] != whole[5:10]
    for position in (3, 5, 11):
        assert taken(source_at(Drawn(hook), position), 4) == whole[position : position + 4]
    assert taken(source_at(Drawn(hook, workers=2), 6), 4) == whole[6:10]


def test_an_evaluation_on_data_that_is_trained_on_leaves_its_order():
    whole = taken(Source(Drawn("on_epoch_begin"), ONE), 10)
    data = Drawn("on_epoch_begin")
    source = Source(data, ONE)
    first = taken(source, 3)
    assert sorted(taken(Source(data, ONE, repeat=False), 5)) == [0, 1, 2, 3, 4]
    assert first + taken(source, 7) == whole
    alone = Drawn("on_epoch_begin")
    passes = [taken(Source(alone, ONE, repeat=False), 5) for _ in range(2)]  # as Keras's evaluate
    assert passes == [list(order) for order in alone.drawn[1:3]]


def test_passes_leave_a_loaders_generator_and_are_refused_in_training():
    loader, passes = Loader(), Passes(ONE, {})
    source = passes.source(loader)
    for _ in range(2):
        assert loader.generator.state == 0
        assert int(sum(rows["x"][0] for rows in source.new_iterator())) == 201
    training = Source(loader, ONE)
    first = taken(training, 1)
    for remembered in (passes, Passes(ONE, {})):
        refused(lambda remembered=remembered: remembered.source(loader), "make another loader")
    assert first + taken(training, 4) == taken(Source(Loader(), ONE), 5)


def test_what_changed_its_order_for_an_earlier_run_is_refused_midway(caplog):
    for data in (Drawn("on_epoch_end"), Loader()):
        taken(Source(data, ONE), 7)
        assert len(taken(Source(data, ONE), 3)) == 3  # a run of its own
        refused(lambda data=data: source_at(data, 3), "trained on before in this process", "make it anew")
    data = Drawn("on_epoch_end")
    source = Source(data, ONE, may_go_back=True)
    taken(source, 7)
    source.go_to({"batches": 1, "skipped": []})
    taken(source, 1)
    # An epoch may have begun that is read ahead.
    assert re.search("Going back to epoch 1 of the Drawn given, which has begun epoch [23]:", caplog.text)


@pytest.mark.slow
def test_a_pydatasets_batches_have_another_order_each_epoch_with_a_seed():
    orders = [taken(Source(Numbers(8), ONE, shuffle_seed=seed), 16) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0][:8]) == list(range(8)) and sorted(orders[0][8:]) == list(range(10, 18))
    assert [n - 10 for n in orders[0][8:]] != orders[0][:8]
    data = Numbers(5, workers=3, max_queue_size=4)
    assert taken(Source(data, ONE), 12) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14, 20, 21]


def test_lengths_are_known_where_the_data_tells():
    assert batches_per_epoch(Source(Numbers(), ONE)) == 3
    assert batches_per_epoch(Source(Loader(), ONE)) == 2
    refused(lambda: batches_per_epoch(Source(three, ONE)), "unknown length", "give steps instead")


@pytest.mark.slow
def test_a_pass_over_each_kind_ends():
    for data, count in ((Numbers(), 3), (three, 3), (three(), 3), (Stateful(), 5), (Loader(), 2)):
        source = Source(data, ONE, repeat=False)
        taken(source, count)
        with pytest.raises(tf.errors.OutOfRangeError):
            taken(source, 1)


@pytest.mark.slow
def test_data_that_cannot_start_again_is_explained():
    class Exhausted:
        def __init__(self):
            self.batches = iter([batch(n) for n in range(4)])

        def __iter__(self):
            yield from self.batches

    assert "Pass 2 over the data had no batch: give an object" in str(failure(Source(Exhausted(), ONE), 4))
    error = failure(Source(three(), ONE), 4)
    assert "generator given ended after 3 batches and cannot start again: give the function" in str(error)
    generator = endless()
    taken(Source(generator, ONE), 2)
    refused(lambda: Source(generator, ONE), "was read before and cannot start again")
    refused(lambda: Source(endless(), ONE, may_go_back=True), "cannot be read again from an earlier batch")


def test_a_pass_begins_in_a_thread_that_python_knows():
    class Forking:
        threads: ClassVar[set] = set()

        def __iter__(self):
            self.threads.add(type(threading.current_thread()))  # a process that it forks ends well only in a Thread
            return iter([batch(0)])

    taken(Source(Forking(), ONE), 2)
    assert threading._DummyThread not in Forking.threads


@pytest.mark.parametrize("repeat", [True, False])
def test_a_pydataset_whose_length_changes_is_refused_in_the_next_pass(repeat):
    data = Numbers()
    source = Source(data, ONE, repeat=repeat)
    data.count = 5
    assert "had 3 batches when it was first read, and has 5 now" in str(failure(source, 1))


@pytest.mark.parametrize("seed", [None, 3])
def test_a_limited_epoch_of_a_pydataset_ends_with_its_hooks(seed):
    source = Source(Numbers(4), ONE, limit=2, shuffle_seed=seed)
    numbers = taken(source, 6)
    assert [number // 10 for number in numbers] == [0, 0, 1, 1, 2, 2]  # by the epoch
    resumed = Source(Numbers(4), ONE, limit=2, shuffle_seed=seed)
    resumed.go_to({**source.position(), "batches": 3})
    assert taken(resumed, 3) == numbers[3:]


class OfUnknownLength(Orders):
    __len__ = None


def of_first(count):
    """Returns the first batches of epochs 0, 1 and so on of `Orders`."""
    return [number for epoch in range(3) for number in Orders.order(epoch)[:count]]


@pytest.mark.parametrize(
    ("make", "limit", "expected"),
    [
        (Orders, 2, of_first(2)),
        (Orders, 6, of_first(6)),
        (Orders, 100, of_first(6)),
        (OfUnknownLength, 2, of_first(2)),
        (OfUnknownLength, 100, of_first(6)),
        (Shuffled, 2, of_first(2)),
        (Shuffled, 100, of_first(6)),
        (Stateful, 3, [1, 2, 3] * 3),
        (Stateful, 9, [1, 2, 3, 4, 5] * 2),
        (Loader, 1, [100, 210, 320, 430, 540]),
        (lambda: lambda: endless(), 2, [0, 1] * 3),
        (lambda: lambda: Orders(), 2, of_first(2)),
    ],
)
def test_each_epoch_ends_at_the_limit_and_keeps_its_order(make, limit, expected):
    assert taken(Source(make(), ONE, limit=limit), len(expected)) == expected
    for position in (1, 2, 5):
        first, second = Source(make(), ONE, limit=limit), Source(make(), ONE, limit=limit)
        taken(first, position)
        second.go_to(json.loads(json.dumps(first.position())))
        assert taken(second, len(expected) - position) == expected[position:], position


def test_a_limited_epoch_is_at_its_position_at_once_by_its_state():
    source = Source(Shuffled(), ONE, limit=3)
    taken(source, 4)
    assert source.access is Access.SEEKS
    assert source.position()["state"] == {"pass": 1, "taken": 1, "iterator": {"place": 1}}


def test_cached_batches_are_those_of_the_first_epoch():
    for make in (Orders, Shuffled):
        assert taken(Source(make(), ONE, limit=2, is_cached=True), 6) == Orders.order(0)[:2] * 3


def test_a_generator_that_cannot_start_again_ends_at_the_limit():
    source = Source(endless(), ONE, limit=2)
    assert taken(source, 2) == [0, 1]
    assert "was read before and cannot start again" in str(failure(source, 1))


class InParts:
    """As PyTorch's DataLoader: one of its parts has the order."""

    def __init__(self, name):
        self.order_of = Orders()
        owner, _, part = name.rpartition(".")
        owner = self if not owner else self.__dict__.setdefault(owner, types.SimpleNamespace())
        setattr(owner, part, self.order_of)

    def __len__(self):
        return 6

    def __iter__(self):
        return iter(self.order_of)


@pytest.mark.parametrize("name", ["sampler", "batch_sampler", "batch_sampler.sampler", "dataset"])
def test_each_part_of_a_loader_that_has_an_order_is_told_the_epoch(name):
    assert taken(Source(InParts(name), ONE), 18) == sum(map(Orders.order, range(3)), [])
