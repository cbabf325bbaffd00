"""Mistakes of the user's functions, each a sentence before the first step; new variables; fixed numbers of rows."""

import functools
import math
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.model.guards import (
    VariableCreatedError,
    explain_fixed_sizes,
    fixed_sizes,
    guarded,
    recorded,
    refuse_new_variables,
)
from distloop.model.user_functions import Reads, report_unread
from tests.keras_models.compiled_models import X, Y, compiled
from tests.problems import classification, mirrored, mostly_wide, on, refused


def small(outputs=1):
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(outputs)])


def train(batch, read):
    def model_fn():
        model = small()
        return distloop.ModelSpec(model, keras.optimizers.SGD(), lambda batch, training: {"loss": model(read(batch))})

    distloop.Trainer(model_fn, on(1)).fit(tf.data.Dataset.from_tensors(batch), steps=1)


ROWS = np.zeros((4, 2), np.float32)


def if_positive(values):
    return values if tf.reduce_mean(values) > 0 else -values


def halved(values):
    while tf.reduce_mean(values) > 1:
        values /= 2
    return values


OF_TENSORS = {
    "if": (if_positive, "decided an `if`", "tf.where"),
    "while": (halved, "decided an `if`", "tf.where"),
    "and": (lambda values: values * (values[0] > 0 and 1.0), "decided an `if`", "tf.where"),
    "float": (lambda values: values * float(values[0]), "asked for its value", "keras.ops"),
    "int": (lambda values: values * int(values[0]), "asked for its value", "eager=True"),
    "math": (lambda values: values * math.log(values[0]), "asked for its value", "keras.ops"),
    "range": (lambda values: values * len(range(tf.shape(values)[0])), "asked for its value", "keras.ops"),
    "numpy": (lambda values: values * values.numpy(), "asked for its value", "keras.ops"),
    "np.mean": (lambda values: values * np.mean(values), "asked for its value", "keras.ops"),
    "for": (lambda values: tf.stack(list(values)), "a Python loop went over it", "keras.ops"),
    "len": (lambda values: values / len(values), "len() of a tensor", "tf.shape(x)[0]"),
}


@pytest.mark.parametrize("case", OF_TENSORS)
def test_a_tensor_that_is_asked_for_its_value_is_said_with_the_users_line(case):
    change, *parts = OF_TENSORS[case]
    with pytest.raises(ValueError) as found:  # noqa: PT011 - the parts are looked for
        train({"x": ROWS}, lambda batch: keras.ops.reshape(change(batch["x"][:, 0]), [-1, 1]) * [1.0, 1.0])
    assert all(part in str(found.value) for part in [*parts, "test_user_functions.py:"])
    assert "AutoGraph" not in "".join(traceback.format_exception(found.value))
    innermost = traceback.extract_tb(found.value.__traceback__)[-1]
    assert innermost.filename == __file__


LACKING = ("The key 'images' was looked up", "the entries 'image', 'label': use their names")
OF_BATCHES = {
    "key that is lacking": ({"image": ROWS, "label": ROWS}, lambda batch: batch["images"], *LACKING),
    "key of a tuple": ((ROWS, ROWS), lambda batch: batch["image"], "a tuple of 2 entries", "features, labels"),
    "key of an array": (
        ROWS,
        lambda batch: batch["image"],
        "'image' was looked up in a batch that is one array, float32",
    ),
    "unpacked array": (ROWS, lambda batch: [*batch][0], "one array, float32 [B, 2], was unpacked", "give (x, y)"),
    "attribute of a dict": ({"x": ROWS}, lambda batch: batch.x, "write batch['x']"),
    "key of an entry": ({"x": ROWS}, lambda batch: batch["x"]["y"], "'y' was looked up in a tensor"),
    "third of two": ((ROWS, ROWS), lambda batch: batch[2], "index out of range", "a tuple of 2 entries"),
    "two of three": ((ROWS,) * 3, lambda batch: (lambda x, y: x)(*two(batch)), "values to unpack", "a tuple of 3"),
    "unpacked dict": ({"x": ROWS, "y": ROWS}, lambda batch: keras.layers.Flatten()([*batch][0]), "gives its names"),
}


def two(batch):
    x, y = batch
    return x, y


@pytest.mark.parametrize("case", OF_BATCHES)
def test_a_batch_that_is_read_in_another_way_is_described(case):
    batch, read, *parts = OF_BATCHES[case]
    refused(lambda: train(batch, read), *parts)


def supervise(labels, loss):
    def model_fn():
        return distloop.supervised(small(4), loss(from_logits=True), keras.optimizers.SGD())

    distloop.Trainer(model_fn, on(1, batch_size=4)).fit(ROWS, labels, steps=1)


def test_labels_of_the_other_cross_entropy_and_texts_for_numbers_are_said():
    sparse, whole = keras.losses.SparseCategoricalCrossentropy, keras.losses.CategoricalCrossentropy
    refused(lambda: supervise(np.eye(4), sparse), "labels of shape [B, 4]", "tf.argmax(labels, -1)")
    refused(lambda: supervise(np.arange(4), whole), "labels of shape [B]", "sparse_categorical_crossentropy")
    refused(lambda: supervise(np.array(["a"] * 4), sparse), "A text reached")

    def of_tensorflow(batch):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.one_hot([0, 1, 0, 1], 2), batch)[:, None]

    refused(lambda: train(ROWS, of_tensorflow), "got labels of shape [4, 2]", "takes the number of each class, [B]")


def test_shapes_that_do_not_fit_are_said_without_the_names_of_nodes():
    advice = "a loss takes labels of the shape of the outputs"
    wrong = np.zeros((4, 5), np.float32)
    refused(lambda: supervise(wrong, lambda **_: keras.losses.MeanSquaredError()), "[B,5], [B,4]: make", advice)
    batch, file = {"x": np.zeros((4, 4), np.float32), "y": wrong}, "(test_user_functions.py"
    sub = "Sub cannot take tensors of the shapes [4,5], [4,4]"
    refused(lambda: train(batch, lambda batch: batch["y"] - batch["x"]), sub, file, advice)
    refused(lambda: train(batch, lambda batch: tf.matmul(batch["y"], batch["x"])), "MatMul cannot take", file)


@pytest.mark.slow
def test_errors_about_something_else_stay():
    with pytest.raises(KeyError, match="image"):
        train({"image": ROWS}, lambda batch: {}["image"])
    with pytest.raises(TypeError):
        train((ROWS, ROWS), lambda batch: batch[0] + object())


def test_a_shape_that_a_layer_cannot_take_is_one_sentence_everywhere():
    words = ("A layer cannot take what it is called with", "expected axis -1 of input shape to have value 2", "[B, 3]")
    wide = np.zeros((4, 3), np.float32)
    refused(lambda: train(wide, lambda batch: batch), *words)
    trainer = distloop.Trainer(distloop.from_keras(compiled(small())), on(1))
    for fails in (lambda: trainer.predict(wide), lambda: trainer.fit(wide, wide[:, 0], steps=1, batch_size=4)):
        refused(fails, *words[:2])
    refused(lambda: trainer.predict({"image": ROWS}), "The structure of `inputs` doesn't match", "'image'")
    refused(lambda: trainer.evaluate(ROWS), "features without labels were given", "give labels, too, as in fit(x, y)")


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("is_eager", [False, True])
def test_a_layer_that_is_built_by_a_step_is_refused_by_name(replicas, is_eager):
    layer = keras.layers.Dense(2, name="head")
    fn = guarded(lambda: layer(tf.ones([1, 3])), refuse_new_variables)
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()

    def step():
        return strategy.run(fn)

    with pytest.raises(VariableCreatedError, match="^The variable 'head/kernel' was created by a step") as e:
        step() if is_eager else tf.function(step, autograph=False)()
    assert e.value.variable == "head/kernel"


def test_a_random_stream_of_its_own_gets_another_hint():
    fn = guarded(lambda: keras.layers.Dropout(0.5), refuse_new_variables)
    of_streams = "variable .* was created by a step, .*: give keras.random and"
    with pytest.raises(VariableCreatedError, match=of_streams):
        tf.function(fn, autograph=False)()
    assert guarded(lambda x: x + 1, refuse_new_variables)(1) == 2
    with pytest.raises(KeyError):
        guarded(lambda: {}["x"], refuse_new_variables)()
    created = {}
    with recorded(created):
        variable = tf.Variable(0.0)
    assert created[id(variable)] is variable and len(created) == 1


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_part_that_only_training_calls_is_refused_in_the_first_step(replicas):
    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.head, self.extra = keras.layers.Dense(4), keras.layers.Dense(4, name="extra")

        def call(self, x, training=False):
            return self.head(x) + (self.extra(x) if training else 0.0)

    def model_fn():
        model = Late()
        loss_fn = lambda batch, training: {"loss": model(batch["x"], training=training)}  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)

    trainer = distloop.Trainer(model_fn, on(replicas))
    with pytest.raises(ValueError, match="The variable 'late.*/extra/kernel' was created by a step"):
        trainer.fit(distloop.make_dataset(classification(), 16), steps=2)


class Centered(keras.layers.Layer):
    """Works with the number of rows that it was built for only."""

    def build(self, shape):
        self.rows = shape[0]

    def call(self, x):
        return x - tf.reduce_mean(tf.reshape(x, [self.rows, -1]), 1, keepdims=True)


def model_for(rows, layer):
    return compiled(keras.Sequential([keras.Input(batch_shape=(rows, 6)), layer, keras.layers.Dense(2)], name="net"))


def test_sizes_are_those_of_the_top_models_and_other_errors_stay():
    assert fixed_sizes([model_for(8, keras.layers.Dense(2)), small()]) == {8: "net"}

    def fail(batch):
        raise ValueError("no targets")

    with pytest.raises(ValueError, match="^no targets$"):
        guarded(fail, functools.partial(explain_fixed_sizes, {8: "net"}, 2))({"x": tf.ones([4])})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_size", "is_whole", "rows"), mostly_wide([(8, True, "4"), (16, False, "a number that is known")])
)
def test_a_model_that_takes_other_rows_than_a_replica_gets_is_refused(batch_size, is_whole, rows):
    trainer = distloop.Trainer(distloop.from_keras(model_for(8, Centered())), on(2))
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size, drop_remainder=is_whole)
    with pytest.raises(ValueError, match=f"'net' is made for 8 rows by .* gets {rows}.*, or batches of 16 rows, with"):
        trainer.fit(data, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "rows"), mostly_wide([(Centered, 16), (lambda: keras.layers.Dense(3), 12)]))
def test_a_model_trains_where_its_rows_fit_or_do_not_matter(layer, rows):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(rows, drop_remainder=rows == 16)
    trainer = distloop.Trainer(distloop.from_keras(model_for(8, layer())), on(2))
    assert np.isfinite(trainer.fit(data, steps=2)["loss"])


ENTRIES = {"image": tf.TensorSpec([4, 2]), "meta": {"id": tf.TensorSpec([4], tf.string), "age": tf.TensorSpec([4])}}


def reads_of(fn, specs):
    """Returns what a function of a batch reads."""
    reads = Reads()

    def trace(batch):
        tf.shape(tf.nest.flatten(batch)[0])  # what reads them elsewhere does not count
        with reads.recorded(batch) as returned:
            returned.append(fn(batch))

    tf.function(trace, autograph=False).get_concrete_function(specs)
    return reads


def test_an_entry_is_read_if_an_operation_takes_it_or_the_loss_returns_it():
    reads = reads_of(lambda batch: tf.cond(tf.constant(True), lambda: batch["meta"]["age"], lambda: 0.0), ENTRIES)
    assert reads.entries == {"image": False, "meta/age": True, "meta/id": False}
    reads = reads_of(lambda batch: {"loss": distloop.weighted(batch["image"][:, 0], batch["meta"]["age"])}, ENTRIES)
    assert reads.entries == {"image": True, "meta/age": True, "meta/id": False}
    specs = (tf.RaggedTensorSpec([None, None], tf.int32),) * 2
    assert reads_of(lambda batch: tf.reduce_sum(batch[1]), specs).entries == {"0": False, "1": True}
    with (eagerly := Reads()).recorded({"x": tf.zeros([2])}):
        pass
    assert eagerly.entries == {}


def test_an_entry_that_one_of_several_losses_reads_is_read(capsys):
    images = reads_of(lambda batch: tf.reduce_sum(batch["image"]), ENTRIES)
    ages = reads_of(lambda batch: batch["meta"]["age"] + 1.0, ENTRIES)
    report_unread([images, ages], "print", is_shown=True)
    told = "distloop: entries of each batch that no loss_fn reads: meta/id (loaded all the same)\n"
    assert capsys.readouterr().out == told
    report_unread([images, ages], "print", is_shown=False)
    assert capsys.readouterr() == ("", "")
    report_unread([images], "warn", is_shown=True)
    assert "warning: No loss_fn reads these entries of a batch, which are loaded" in capsys.readouterr().err
    words = ("No loss_fn reads", "meta/age, meta/id", "dataset.map")
    refused(lambda: report_unread([images], "refuse", is_shown=False), *words)
    none = reads_of(lambda batch: None, {f"x{i}": tf.TensorSpec([2]) for i in range(9)})
    report_unread([none], "print", is_shown=True)
    assert capsys.readouterr().out.endswith("x0, x1, x2, x3, x4, x5, x6, x7, 1 more (loaded all the same)\n")


@pytest.mark.slow
def test_a_run_names_them_once_and_refuses_them_on_request(capsys):
    def model_fn():
        layer = keras.layers.Dense(1)
        loss_fn = lambda batch, training: {"loss": layer(batch["x"])[:, 0]}  # noqa: E731
        return distloop.ModelSpec(layer, keras.optimizers.SGD(0.1), loss_fn)

    rows = {"x": np.ones([7, 2], np.float32), "path": np.array(["a"] * 7), "meta": {"id": np.arange(7)}}
    data = distloop.make_dataset(rows, 7)
    trainer = distloop.Trainer(model_fn, on(1, microbatches=2))
    trainer.fit(data, steps=2)
    trainer.fit(data, steps=4)
    assert capsys.readouterr().out.count("entries of each batch that no loss_fn reads: meta/id, path (") == 1
    trainer = distloop.Trainer(model_fn, on(1, unread_entries="refuse"))
    refused(lambda: trainer.fit(data, steps=2), "No loss_fn reads these entries", "all the same: meta/id, path;")
    assert trainer.step == 0
