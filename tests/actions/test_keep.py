"""`keep`: a tensor of `loss_fn` is shown at due steps, the same one on any devices, and costs nothing at others."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.actions import keep as keep_module
from distloop.monitoring.media import Histogram, Images
from tests.event_files import steps_in_tensorboard
from tests.problems import assert_equal, classification, classifier, mostly_wide, on, refused, weights

SIZE, STEPS = 8, 6


def keeping_model(keep=None, dropout=0.2, **options):
    """A `model_fn` whose `loss_fn` keeps its rows, or calls `keep(spec, batch)`."""

    def model_fn():
        spec = classifier(dropout=dropout)()

        def loss_fn(batch, training):
            if keep:
                keep(spec, batch)
            else:
                distloop.keep("rows", batch["x"], **{"every": 2, "show": shown, **options})
            return spec.loss_fn(batch, training)

        return distloop.ModelSpec(spec.model, spec.optimizer, loss_fn)

    return model_fn


seen = []


def shown(array):
    seen.append(array)
    return distloop.Histogram(array)


def data():
    return distloop.make_dataset(classification(64), SIZE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "settings"),
    mostly_wide(
        [
            (1, {}),
            (2, {}),
            (3, {"microbatches": 2}),
            (2, {"virtual_replicas": 4, "microbatches": 2}),
            (2, {"precision": "mixed_float16"}),
            (1, {"eager": True}),
            (2, {"shard_optimizer": True}),
        ],
        (2, {}),
        (2, {"virtual_replicas": 4, "microbatches": 2}),
    ),
)
def test_the_first_row_of_the_batch_of_each_due_step_is_shown(replicas, settings):
    seen.clear()
    trainer = distloop.Trainer(keeping_model(), on(replicas, log_every=4, **settings))
    trainer.fit(data(), steps=STEPS)
    assert [array.shape for array in seen] == [(1, 8)] * 3
    for array, step in zip(seen, (2, 4, 6), strict=True):
        row = np.asarray(classification(64)["x"])[SIZE * (step - 1)]
        np.testing.assert_array_equal(array[0], np.float16(row) if array.dtype == "f2" else row)


@pytest.mark.slow
def test_weights_are_those_of_a_run_that_keeps_nothing_and_other_steps_hand_out_nothing(monkeypatch):
    calls, found = [], []
    store = keep_module.tf.numpy_function

    def count(fn, *arguments):
        return store(lambda array: calls.append(1) or fn(array), *arguments)

    monkeypatch.setattr(keep_module.tf, "numpy_function", count)
    for model_fn in (keeping_model(every="3 steps"), classifier(dropout=0.2)):
        trainer = distloop.Trainer(model_fn, on(2))
        trainer.fit(data(), steps=STEPS)
        found.append(weights(trainer))
    assert len(calls) == 2
    assert_equal(*found)


@pytest.mark.slow
def test_tensors_are_shown_in_tensorboard_under_their_names(tmp_path):
    def keep(spec, batch):
        distloop.keep("pictures", tf.reshape(batch["x"], [-1, 2, 4, 1]), every=3, rows=2)
        distloop.keep("logits", spec.predict_fn(batch), every=2, rows=2)

    trainer = distloop.Trainer(keeping_model(keep, dropout=0.0), on(1, workdir=str(tmp_path), log_every=4))
    trainer.fit(data(), steps=6)
    assert steps_in_tensorboard(tmp_path / "train", "pictures") == [3, 6]
    assert steps_in_tensorboard(tmp_path / "train", "logits") == [2, 4, 6]


@pytest.mark.slow
def test_updates_keep_tensors_under_their_own_names():
    def model_fn():
        models = {name: keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)], name=name) for name in "ab"}

        def loss_of(name):
            def loss_fn(batch, training):
                distloop.keep("x", batch["x"], every=1)
                return {"loss": models[name](batch["x"])[:, 0] ** 2}

            return distloop.Update(name, loss_fn, keras.optimizers.SGD(0.1), models[name].trainable_variables)

        return distloop.ModelSpec(models, updates=[loss_of("a"), loss_of("b")])

    trainer = distloop.Trainer(model_fn, on(1))
    trainer.fit(data(), steps=1)
    assert {*trainer.state.kept} == {"a/x", "b/x"}


def test_pictures_are_images_and_all_else_a_histogram():
    assert isinstance(keep_module._as_media(np.zeros([2, 4, 4, 3], np.float32)), Images)
    assert isinstance(keep_module._as_media(np.zeros([2, 4, 4], np.float32)), Histogram)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": "1 epoch"}, "keep('rows', every='1 epoch') was called; give a number of steps, 1 or more."),
        ({"every": 0}, "keep('rows', every=0) was called; give a number of steps"),
        ({"rows": 0}, "keep('rows', rows=0) was called; give a whole number, 1 or more."),
    ],
)
def test_what_cannot_be_kept_is_refused(options, message):
    refused(lambda: distloop.keep("rows", tf.zeros([2, 3]), **{"every": 1, **options}), message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        ([tf.reduce_sum], {}, "a scalar: give a tensor with a row for each example"),
        ([tf.identity, tf.identity], {}, "the same name twice in one loss_fn"),
        ([tf.identity], {"jit_compile": True}, "XLA cannot hand a tensor to the host: use jit_compile=False"),
    ],
)
def test_mistakes_in_a_loss_fn_are_told(tensors, settings, message):
    def keep(spec, batch):
        for compute in tensors:
            distloop.keep("a", compute(batch["x"]), every=1)

    trainer = distloop.Trainer(keeping_model(keep, dropout=0.0), on(1, **settings))
    refused(lambda: trainer.fit(data(), steps=1), message)


@pytest.mark.slow
def test_what_is_no_media_is_refused():
    trainer = distloop.Trainer(keeping_model(show=lambda array: 3.0), on(1))
    refused(lambda: trainer.fit(data(), steps=2), "The function show of keep('rows') returned a float")


@pytest.mark.slow
def test_evaluation_prediction_and_models_without_steps_keep_nothing():
    seen.clear()
    trainer = distloop.Trainer(keeping_model(every=1), on(1))
    trainer.evaluate(data())
    assert not seen and not trainer.state.kept
    assert isinstance(trainer.model, keras.Model)
