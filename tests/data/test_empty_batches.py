"""Batches without rows: steps by default; left out, with a line or without, or refused, as `empty_batches` says."""

import itertools
import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data import opening
from distloop.data.info import cardinality
from distloop.data.source import Source
from tests.data.python_batches import ONE, Loader, Numbers, Orders, Stateful, batch, taken
from tests.problems import (
    assert_close,
    assert_equal,
    classification,
    classifier,
    everything,
    mostly_wide,
    on,
    refused,
    train,
    weights,
)

SIZES = [0, 5, 0, 0, 7, 1, 0]  # of the batches of a pass


def cut(sizes):
    """Returns batches of these sizes, from one order of rows; which are empty is not known before they are read."""
    rows = {name: tf.constant(value) for name, value in classification().items()}
    ends = np.cumsum(sizes)
    pairs = tf.data.Dataset.from_tensor_slices((ends - sizes, ends))
    return pairs.map(lambda start, end: {name: value[start:end] for name, value in rows.items()})


def without_empty(sizes):
    return [size for size in sizes if size]


def model_fn():
    return classifier(dropout=0.3, optimizer=lambda: keras.optimizers.Adam(0.01))()


def trained(replicas, sizes, steps=8, **settings):
    return everything(train(model_fn, on(replicas, console="quiet", **settings), cut(sizes), steps))


@pytest.mark.parametrize("replicas", mostly_wide([1, 2], 2))
def test_ignored_batches_change_no_bit_wherever_the_run_stops(replicas, tmp_path):
    expected = trained(replicas, without_empty(SIZES))
    assert_equal(trained(replicas, SIZES, empty_batches="ignore"), expected)
    trained(replicas, SIZES, 4, empty_batches="ignore", workdir=tmp_path)
    assert_equal(trained(replicas, SIZES, empty_batches="ignore", workdir=tmp_path), expected)


def test_a_position_counts_batches_with_rows(tmp_path):
    data = cut([1, 0, 2, 0, 0, 3])
    whole = Source(data, ONE, empty_batches="ignore")
    expected = [sizes_of(whole, 1)[0] for _ in range(9)]
    assert expected == [1, 2, 3] * 3
    for position in range(6):
        source = Source(data, ONE, empty_batches="ignore")
        source.go_to({"batches": position, "skipped": []})
        assert sizes_of(source, 3) == expected[position : position + 3]


def sizes_of(source, count):
    sizes = [len(next(source.iterator())["x"]) for _ in range(count)]
    source.count(count)
    return sizes


def rows_in(number):
    return 0 if number % 10 in (1, 4) else 2


class SomeEmpty(Numbers):
    def __getitem__(self, index):
        return batch(10 * self.epoch + index, rows_in(index))


class StatefulSomeEmpty(Stateful):
    class Iterator(Stateful.Iterator):
        def __next__(self):
            made = super().__next__()
            return batch(self.place, rows_in(self.place)) if made else made


class LoaderSomeEmpty(Loader):
    def __iter__(self):
        return (batch(int(made["x"][0]), rows_in(int(made["x"][0]))) for made in super().__iter__())


def five():
    yield from (batch(number, rows_in(number)) for number in range(5))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: SomeEmpty(3), [0, 2, 10, 12, 20, 22]),
        (StatefulSomeEmpty, [2, 3, 5, 2, 3, 5]),
        (LoaderSomeEmpty, [100, 210, 320, 430, 540, 650]),
        (lambda: five, [0, 2, 3, 0, 2, 3]),
        (lambda: itertools.chain(five(), five()), [0, 2, 3, 0, 2, 3]),
    ],
    ids=["PyDataset", "with states", "loader", "function", "generator"],
)
def test_batches_that_python_makes_are_left_out_and_found_again(make, expected):
    def source(**settings):
        return Source(make(), ONE, empty_batches="ignore", **settings)

    first = source()
    assert taken(first, 4) == expected[:4]
    second = source()
    second.go_to(json.loads(json.dumps(first.position())))
    assert taken(second, 2) == expected[4:6]


class OrdersSomeEmpty(Orders):
    def __iter__(self):
        return (batch(number, rows_in(number)) for number in self.order(self.epoch))


@pytest.mark.parametrize("treated", ["ignore", "step"])
def test_batches_that_are_left_out_do_not_count_for_the_limit(treated):
    orders = [Orders.order(epoch) for epoch in range(3)]
    kept = [[number for number in order if treated == "step" or rows_in(number)][:2] for order in orders]
    assert kept != [order[:2] for order in orders] or treated == "step"

    def make():
        return Source(OrdersSomeEmpty(), ONE, empty_batches=treated, limit=2)

    assert sizes_of(make(), 6) == [rows_in(number) for number in sum(kept, [])]
    if treated == "ignore":
        assert taken(make(), 6) == sum(kept, [])
        for position in range(1, 6):
            source = make()
            source.go_to({"batches": position, "skipped": []})
            assert taken(source, 6 - position) == sum(kept, [])[position:]


def test_a_shuffled_pydataset_keeps_its_orders():
    orders = taken(Source(Numbers(8), ONE, shuffle_seed=1), 16)
    source = Source(SomeEmpty(8), ONE, shuffle_seed=1, empty_batches="ignore")
    assert taken(source, 12) == [number for number in orders if rows_in(number)]


def test_a_warning_says_one_line_once(caplog):
    opening._warn_of_empty.__wrapped__.cache_clear()
    assert sizes_of(Source(cut(SIZES), ONE, empty_batches="warn"), 6) == [5, 7, 1] * 2
    Source(cut(SIZES), ONE, empty_batches="warn").count_batches()
    assert caplog.messages == ["A batch without rows is left out, as all others will be: empty_batches=warn was given."]


@pytest.mark.parametrize("data", [lambda: cut([3, 0]), lambda: five], ids=["dataset", "function"])
def test_an_empty_batch_is_refused_before_its_step(data):
    trainer = distloop.Trainer(model_of_x(), on(1, console="quiet", empty_batches="refuse"))
    sentence = "A batch has no rows, and empty_batches=refuse was given", "Dataset.filter", "empty_batches=ignore"
    refused(lambda: trainer.fit(data(), steps=5), *sentence)
    assert trainer.step == 1
    for read in (trainer.evaluate, trainer.predict):
        refused(lambda read=read: read(data()), *sentence)


def model_of_x():
    def model_fn():
        model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
        model_of = lambda batch: model(tf.reshape(batch["x"], [tf.shape(batch["x"])[0], -1])[:, :1])  # noqa: E731
        loss_fn = lambda batch, training: {"loss": tf.reduce_sum(model_of(batch), 1)}  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, predict_fn=model_of)

    return model_fn


def test_evaluations_and_predictions_leave_them_out_too():
    trainer = distloop.Trainer(model_fn, on(2, console="quiet", empty_batches="ignore"))
    data, plain = cut(SIZES), cut(without_empty(SIZES))
    assert trainer.evaluate(data) == trainer.evaluate(plain)
    assert len(list(trainer.stream_predictions(data))) == 3
    np.testing.assert_array_equal(trainer.predict(data), trainer.predict(plain))


def test_an_epoch_ends_with_its_last_batch_with_rows():
    trainer = distloop.Trainer(model_fn, on(1, console="quiet", empty_batches="ignore"))
    trainer.fit(cut(SIZES), epochs=2)
    assert trainer.step == 6
    refused(lambda: trainer.fit(SomeEmpty(3), epochs=1), "unknown length", "give steps instead")


def endless():
    return cut(SIZES).repeat()


@pytest.mark.parametrize("treated", opening.DROPS_EMPTY)
@pytest.mark.parametrize("data", [endless, lambda context: five()], ids=["repeated", "of a worker"])
def test_endless_data_stays_endless(data, treated):
    assert cardinality(opening.open_data(data, 2, 0, empty_batches=treated).dataset) == math.inf


def test_endless_data_is_refused_where_it_is_counted():
    trainer = distloop.Trainer(model_fn, on(1, console="quiet", empty_batches="ignore"))
    refused(lambda: trainer.evaluate(endless()), "endless", "use take(batches)")
    refused(lambda: trainer.fit(endless(), epochs=2), "endless", "give steps instead")
    without_any = cut(SIZES).filter(lambda batch: tf.shape(batch["x"])[0] > 50).repeat()
    refused(lambda: trainer.fit(without_any, steps=1), "The dataset given is empty")


@pytest.mark.parametrize("treated", [*opening.DROPS_EMPTY, "refuse"])
def test_data_without_batches_is_refused_as_by_default(treated):
    for value in (np.arange(4), {"x": np.ones((4, 3)), "y": np.arange(4)}):
        data = tf.data.Dataset.from_tensor_slices(value)
        refused(lambda data=data: Source(data, ONE, empty_batches=treated), "call .batch(batch_size)")
    data = tf.data.Dataset.from_tensors((np.ones((4, 3)), None))
    refused(lambda: Source(data, ONE, empty_batches=treated), "such as None")


def test_data_without_any_row_is_refused():
    trainer = distloop.Trainer(model_fn, on(1, console="quiet", empty_batches="ignore"))
    refused(lambda: trainer.fit(cut([0, 0]), steps=1), "The dataset given is empty")


@pytest.mark.parametrize("replicas", mostly_wide([1, 2], 2))
def test_by_default_an_empty_batch_is_a_step_with_gradients_of_0(replicas):
    config = on(replicas, console="quiet")
    trainer = train(classifier(optimizer=lambda: keras.optimizers.SGD(0.1)), config, cut([5, 0, 5]), 1)
    before = weights(trainer)
    trainer.fit(cut([0, 5]), steps=2)
    assert trainer.step == trainer.optimizer.iterations.numpy() == 2
    assert_equal(weights(trainer), before)


@pytest.mark.parametrize("replicas", mostly_wide([1, 2], 2))
def test_an_empty_batch_is_a_finite_step_of_a_scaled_loss_too(replicas):
    config = on(replicas, console="quiet", precision="mixed_float16")
    trainer = train(classifier(), config, cut([5, 5]), 2)
    scale, skipped = float(trainer.optimizer.loss_scale.numpy()), int(trainer.state.skipped_steps)
    trainer.fit(cut([0, 5]), steps=3)
    assert (float(trainer.optimizer.loss_scale.numpy()), int(trainer.state.skipped_steps)) == (scale, skipped)


def filtered():
    """Batches by number whose function over batches leaves rows out: all of the second one, of three."""
    keep = tf.constant([True] * 8 + [False] * 8 + [True] * 8)
    rows = {**classification(24), "keep": keep.numpy()}
    cut_out = lambda batch: {name: tf.boolean_mask(value, batch["keep"]) for name, value in batch.items()}  # noqa: E731
    return distloop.make_dataset(rows, 8).map(cut_out)


def test_batches_by_number_that_a_map_has_emptied_are_treated_alike(tmp_path):
    refused(lambda: train(model_fn, on(1, empty_batches="refuse"), filtered(), 3), "A batch has no rows")
    for steps in (1, 2, 5):
        config = on(1, empty_batches="ignore", workdir=str(tmp_path))
        stopped = train(model_fn, config, filtered(), steps)
    whole = train(model_fn, on(1, empty_batches="ignore"), filtered(), 5)
    assert_equal(everything(stopped), everything(whole))
    by_hand = distloop.make_dataset({name: value.numpy() for name, value in kept_rows().items()}, 8)
    assert_equal(weights(train(model_fn, on(1), by_hand, 5)), weights(whole))


def kept_rows():
    batches = list(filtered())
    return {name: tf.concat([batch[name] for batch in batches], 0) for name in batches[0]}


def test_an_empty_batch_leaves_the_same_statistics_on_any_devices():
    one, two = (
        train(classifier(batch_norm="synchronized"), on(replicas, console="quiet"), cut([5, 0, 5]), 3)
        for replicas in (1, 2)
    )
    assert_close(weights(two), weights(one))


class OfTensors:
    """Batches of tensors of another library, each of which counts how often it is converted."""

    class Tensor:
        converted = 0

        def __init__(self, size):
            self.size = size

        def detach(self):
            self.converted += 1
            return self

        def cpu(self):
            return np.full([self.size], self.size)

    def __init__(self):
        self.made = []

    def __iter__(self):
        for size in (2, 0, 3, 1):
            self.made.append(self.Tensor(size))
            yield {"x": self.made[-1]}


@pytest.mark.parametrize("limit", [0, 2])
@pytest.mark.parametrize("treated", ["step", "ignore"])
def test_a_batch_is_converted_once_whatever_becomes_of_empty_ones(treated, limit):
    data = OfTensors()
    source = Source(data, ONE, limit=limit, empty_batches=treated)
    data.made.clear()
    assert len(list(source.feed.dataset().take(3))) == 3
    assert {tensor.converted for tensor in data.made} == {1}
