"""The origin of a number that is not finite: an operation and its layer, an entry of the batch, a variable."""

import inspect
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.problems import assert_equal, classification, everything, mostly_wide, on


class Faulty(keras.layers.Layer):
    """A layer whose output or gradient is not finite once its input is large, in one of several ways."""

    def __init__(self, how):
        super().__init__(name="faulty")
        self.how = how

    def call(self, x):
        return getattr(self, self.how)(x)

    def log(self, x):
        return x + tf.math.log(1.0 - tf.cast(x > 90, tf.float32))

    def exp(self, x):
        return tf.exp(x)

    def root(self, x):
        return x + tf.sqrt(tf.where(x > 90, 0.0, x**2) * x)

    def division(self, x):
        return x / (1.0 - tf.cast(x > 90, tf.float32))

    def mask(self, x):  # an infinity in every step, which is harmless
        return x + tf.nn.softmax(tf.where(x > 0, x, -np.inf)) + self.exp(x)


def make_trainer(how, replicas=1, **settings):
    def model_fn():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(4, kernel_initializer="ones"), Faulty(how), keras.layers.Dense(2)],
            name="net",
        )

        def loss_fn(batch, training):
            return {"loss": tf.reduce_sum(model(batch["x"], training=training), -1)}

        return distloop.ModelSpec(model, keras.optimizers.SGD(1e-4, momentum=0.9), loss_fn)

    return distloop.Trainer(model_fn, on(replicas, locate_nonfinite=True, **settings))


def data_with(rows_of_100):
    """Returns batches of 8 rows whose sums are small, except some rows whose sum is 100."""
    rows = {"x": np.full([32, 8], 0.1, np.float32)}
    rows["x"][rows_of_100] = 12.5
    return distloop.make_dataset(rows, 8)


def failure(trainer, data, steps=6):
    with pytest.raises(FloatingPointError) as caught:
        trainer.fit(data, steps=steps)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and not re.search(r"[.!?] +[A-Z]", message)
    return message


def line_of(how):
    return inspect.getsourcelines(getattr(Faulty, how))[1] + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas, microbatches, how, op, direction",
    mostly_wide(
        [
            (1, 1, "log", "Log", "forward"),
            (2, 1, "exp", "Exp", "forward"),
            (1, 2, "division", "RealDiv", "forward"),
            (2, 2, "root", "SqrtGrad", "backward"),
            (1, 1, "mask", "Exp", "forward"),  # a harmless infinity is not the origin
        ],
        (1, 1, "mask", "Exp", "forward"),
    ),
)
def test_the_operation_its_layer_and_its_line_are_named(how, op, direction, replicas, microbatches):
    trainer = make_trainer(how, replicas, microbatches=microbatches)
    data, line = data_with([21]), line_of("exp" if op == "Exp" else how)
    message = failure(trainer, data)
    assert message.startswith("Step 3 ")
    assert f"came from {op} in layer net/faulty in the {direction} pass (test_nonfinite.py:{line})" in message


@pytest.mark.wide
@pytest.mark.slow
def test_an_entry_of_the_batch_and_its_row_are_named():
    rows = classification(32)
    rows["x"][21, 3] = np.nan
    message = failure(make_trainer("exp", 2), distloop.make_dataset(rows, 8))
    assert message.startswith("Step 3 ") and "the batch itself holds such numbers, in x, first in row 5" in message
    assert ": correct the data or leave such rows out" in message and "learning rate" not in message


def plain_trainer(replicas=1, **settings):
    """A trainer of a small model with a finite loss for finite rows, which leaves out a target of NaN."""

    def model_fn():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, name="out")], name="net")

        def loss_fn(batch, training):
            target = tf.where(tf.math.is_nan(batch["target"]), 0.0, batch["target"])
            loss = tf.reduce_sum(tf.square(model(batch["x"], training=training)), -1) + target
            return {"loss": tf.math.log(loss - batch["least"])}

        return distloop.ModelSpec(model, keras.optimizers.SGD(1e-3), loss_fn)

    return distloop.Trainer(model_fn, on(replicas, **settings))


def plain_rows(**bad):
    rows = {"x": classification(32)["x"], "target": np.ones(32, np.float32), "least": np.full(32, -1.0, np.float32)}
    for name, row in bad.items():
        rows[name][row] = np.nan
    return rows


def by_tf_data(rows):
    return tf.data.Dataset.from_tensor_slices(rows).batch(8)


def by_a_function(rows):
    return lambda: iter(list(by_tf_data(rows).as_numpy_iterator()))


class Numbered(keras.utils.PyDataset):
    """Batches of some rows, by number."""

    def __init__(self, rows):
        super().__init__()
        self.batches = list(by_tf_data(rows).as_numpy_iterator())

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


class WithState:
    """An iterator over batches that can be put at any of them, such as Grain's."""

    def __init__(self, rows):
        self.batches, self.place = list(by_tf_data(rows).as_numpy_iterator()), 0

    def __iter__(self):
        return self

    def __next__(self):
        self.place += 1
        if self.place > len(self.batches):
            raise StopIteration
        return self.batches[self.place - 1]

    def get_state(self):
        return {"place": self.place}

    def set_state(self, state):
        self.place = state["place"]


SOURCES = {
    "by number": (lambda rows: distloop.make_dataset(rows, 8), "first in row 5, row 21 of the data:"),
    "shuffled": (lambda rows: distloop.make_dataset(rows, 8, shuffle=True, seed=3), ", row 21 of the data:"),
    "tf.data": (by_tf_data, "in x, first in row 5:"),
    "a function": (by_a_function, "in x, first in row 5:"),
    "a generator": (lambda rows: (batch for batch in by_a_function(rows)()), "in x, first in row 5:"),
    "a PyDataset": (Numbered, "in x, first in row 5:"),
    "with a state": (lambda rows: lambda: WithState(rows), "in x, first in row 5:"),
}


OF_SOURCES = mostly_wide([*((source, 1) for source in SOURCES), ("shuffled", 2)], ("shuffled", 2))


@pytest.mark.parametrize(("source", "replicas"), OF_SOURCES)
def test_a_nan_in_the_data_is_named_and_no_setting_is_advised(source, replicas):
    make, place = SOURCES[source]
    message = failure(plain_trainer(replicas), make(plain_rows(x=21, target=slice(None))))
    assert "the batch itself holds such numbers, in x, first in row" in message and place in message
    assert "as no setting of the training helps" in message and "learning rate" not in message
    located = failure(plain_trainer(replicas, locate_nonfinite=True), make(plain_rows(x=21, target=slice(None))))
    assert located == message


@pytest.mark.slow
def test_a_nan_in_a_second_run_over_other_data_of_the_same_kind_is_named():
    trainer = plain_trainer()
    trainer.fit(Numbered(plain_rows()), steps=4)
    message = failure(trainer, Numbered(plain_rows(x=21)), steps=8)
    assert "the batch itself holds such numbers, in x, first in row 5:" in message


@pytest.mark.slow
def test_a_nan_that_earlier_steps_held_too_is_not_to_blame():
    rows = plain_rows(target=slice(None)) | {"least": np.r_[np.full(16, -1.0), np.full(16, 1e6)].astype(np.float32)}
    message = failure(plain_trainer(), distloop.make_dataset(rows, 8))
    assert "often the weights grew too large, or the loss takes a log of 0: lower the learning rate" in message


@pytest.mark.slow
def test_data_that_is_read_once_is_not_read_again():
    rows = by_a_function(plain_rows(x=21))()
    assert "the batch itself holds such numbers, in x, first in row 5" in failure(plain_trainer(), rows, steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_a_variable_is_named(replicas):
    trainer = make_trainer("exp", replicas)
    kernel = trainer.model.layers[-1].kernel
    kernel.assign(np.full(kernel.shape, np.inf))
    assert "the variable net/dense" in failure(trainer, data_with([]))


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_a_second_update_is_searched_with_the_firsts_new_weights(replicas):
    def model_fn():
        a, b = (keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)], name=name) for name in "ab")

        def first(batch, training):
            return {"loss": a(batch["x"], training=training)[:, 0]}

        def second(batch, training):  # goes wrong once the first update has moved a's bias
            bias = tf.stop_gradient(a.layers[-1].bias)
            return {"loss": b(batch["x"], training=training)[:, 0] * tf.math.log(bias + 0.5)}

        updates = [
            distloop.Update("first", first, keras.optimizers.SGD(1.0), "^a/"),
            distloop.Update("second", second, keras.optimizers.SGD(1.0), "^b/"),
        ]
        return distloop.ModelSpec({"a": a, "b": b}, updates=updates)

    trainer = distloop.Trainer(model_fn, on(replicas, locate_nonfinite=True))
    message = failure(trainer, data_with([]))
    assert "second/loss is nan" in message and "came from Log in the forward pass (test_nonfinite.py:" in message
    assert message.startswith("Step 1 ")


@pytest.mark.slow
def test_neither_the_search_nor_the_failed_step_changes_anything():
    def model_fn():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.BatchNormalization(name="norm"),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(4, name="dense"),
                Faulty("exp"),
            ],
            name="net",
        )
        loss_fn = lambda batch, training: {"loss": tf.reduce_sum(model(batch["x"], training=training), -1)}  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.SGD(1e-4, momentum=0.9), loss_fn)

    rows = classification(32)
    expected = distloop.Trainer(model_fn, on(2, average_decay=0.9))
    expected.fit(distloop.make_dataset(rows, 8), steps=2)
    rows["x"][21, 3] = np.inf
    trainer = distloop.Trainer(model_fn, on(2, average_decay=0.9, locate_nonfinite=True))
    failure(trainer, distloop.make_dataset(rows, 8))
    after, wanted = everything(trainer), everything(expected)
    counts = [path for path in after if path.startswith(("step", "skipped_steps"))]
    assert len(counts) == 2 and trainer.step == 3
    assert_equal(after, wanted | {path: after[path] for path in counts})


@pytest.mark.slow
def test_ragged_rows_and_strings_can_be_searched():
    table = tf.ragged.constant([[1.0], [2.0, 3.0], [0.0], [4.0]])
    data = tf.data.Dataset.from_tensor_slices({"x": table, "name": ["a", "b", "c", "d"]}).batch(2)

    def model_fn():
        weight = tf.Variable(1.0)
        loss_fn = lambda batch, training: {"loss": weight * tf.reduce_sum(tf.math.log(batch["x"]), 1)}  # noqa: E731
        return distloop.ModelSpec({"weight": weight}, keras.optimizers.SGD(0.1), loss_fn)

    message = failure(distloop.Trainer(model_fn, on(1, locate_nonfinite=True)), data)
    assert message.startswith("Step 2 ") and "came from Log in the forward pass" in message


@pytest.mark.slow
def test_a_sum_that_is_too_large_has_no_origin():
    def model_fn():
        weight = tf.Variable(1.0)
        return distloop.ModelSpec(
            {"weight": weight}, keras.optimizers.SGD(0.1), lambda batch, training: {"loss": weight * batch}
        )

    trainer = distloop.Trainer(model_fn, on(2, locate_nonfinite=True))
    message = failure(trainer, tf.data.Dataset.from_tensors([3e38, 3e38]))
    assert "a second look at its batch found every number finite" in message
