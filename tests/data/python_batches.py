"""Data whose batches or rows Python makes, and ways to read it, for tests."""

import json
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

from distloop.errors import as_user_error
from tests.problems import batch_taker

ONE = tf.distribute.get_strategy()


def batch(number, rows=2):
    return {"x": np.full([rows], number, np.float32)}


def taken(source, count):
    """Takes batches and returns the number in each."""
    take = batch_taker(source, source.iterator())
    numbers = [int(take().rows["x"].numpy().flat[0]) for _ in range(count)]
    source.count(count)
    return numbers


class Numbers(keras.utils.PyDataset):
    """Batch i of epoch e holds 10 e + i; `read` lists the batches that were asked for."""

    def __init__(self, count=3, **settings):
        super().__init__(**settings)
        self.count, self.epoch, self.read = count, 0, []

    @property
    def num_batches(self):
        return self.count

    def __getitem__(self, index):
        self.read.append(index)
        return batch(10 * self.epoch + index)

    def on_epoch_end(self):
        self.epoch += 1


class Drawn(keras.utils.PyDataset):
    """Each epoch has batches 0 to 4 in an order of its own, which a hook draws; `drawn` lists the orders."""

    def __init__(self, hook, **settings):
        super().__init__(**settings)
        self.random, self.drawn = np.random.default_rng(5), [range(5)]
        if hook == "on_epoch_end":
            self.draw()
        setattr(self, f"_{hook}", self.draw)

    def draw(self):
        self.drawn.append(self.random.permutation(5))

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return batch(self.drawn[-1][index])

    def on_epoch_begin(self):
        getattr(self, "_on_epoch_begin", lambda: None)()

    def on_epoch_end(self):
        getattr(self, "_on_epoch_end", lambda: None)()


def endless():
    for number in range(1000):
        yield batch(number)


def three():
    yield from (batch(number) for number in range(3))


class Stateful:
    """As a Grain dataset: its iterators have a state. `read` counts the batches that were made."""

    read: ClassVar[list] = []

    class Iterator:
        def __init__(self, convert):
            self.place, self.convert = 0, convert

        def __iter__(self):
            return self

        def __next__(self):
            if self.place == 5:
                raise StopIteration
            self.place += 1
            Stateful.read.append(self.place)
            return batch(self.place)

        def get_state(self):
            return self.convert(json.dumps({"place": self.place}))

        def set_state(self, state):
            assert isinstance(state, type(self.get_state()))
            self.place = (state if isinstance(state, dict) else json.loads(state))["place"]

    def __init__(self, convert=json.loads):
        self.convert = convert

    def __iter__(self):
        return self.Iterator(self.convert)


class Loader:
    """As PyTorch's DataLoader: its order comes from a generator, which each pass draws from, or from set_epoch."""

    class Generator:
        state = 0

        def get_state(self):
            return self.state

        def set_state(self, state):
            self.state = state

    class Sampler:
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

    def __init__(self):
        self.generator, self.sampler = self.Generator(), self.Sampler()

    def __len__(self):
        return 2

    def __iter__(self):
        self.generator.state += 100
        start = self.generator.state + 10 * self.sampler.epoch
        return iter([batch(start), batch(start + 1)])


class Orders:
    """As a loader with `set_epoch`: each epoch has batches 0 to 5 in an order of its own."""

    epoch = 0

    def __len__(self):
        return 6

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return map(batch, self.order(self.epoch))

    @staticmethod
    def order(epoch):
        return np.random.default_rng(epoch).permutation(6).tolist()


class Shuffled:
    """As a shuffled `MapDataset` of Grain: `repeat` shuffles each epoch anew, and iterators have a state."""

    class Iterator(Stateful.Iterator):
        def __next__(self):
            if self.place == len(self.convert):
                raise StopIteration
            self.place += 1
            return batch(self.convert[self.place - 1])

        def get_state(self):
            return {"place": self.place}

    def __init__(self, numbers=range(6)):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Shuffled(self.numbers[index])
        epoch, place = divmod(self.numbers[index], 6)
        return Orders.order(epoch)[place]

    def repeat(self):
        return Shuffled(range(10**9))

    def to_iter_dataset(self):
        return self

    def __iter__(self):
        return self.Iterator(self)


class Rows:
    """A source of the rows that a function makes of their numbers; `read` lists those that were asked for."""

    def __init__(self, make, count=10):
        self.make, self.count, self.read = make, count, []

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        self.read.append(row)
        return self.make(row)


class Tensor:
    """As PyTorch's, on another device and with a gradient."""

    def __init__(self, values):
        self.values = values

    def detach(self):
        return self

    def cpu(self):
        return np.asarray(self.values)


def failure(source, count):
    """Returns what the user gets to see when so many batches are taken."""
    with pytest.raises(tf.errors.OpError) as caught:
        taken(source, count)
    return as_user_error(caught.value)
