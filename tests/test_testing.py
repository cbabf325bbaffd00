"""Tests what users test with."""

import contextlib
import dataclasses
import functools
import subprocess
import sys
import unittest.mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop import testing
from distloop.distributed import collectives
from distloop.distributed.strategies import TreeSum
from tests import forked
from tests.problems import batches, classification, classifier, cross_entropy, loss_fn_of, mostly_wide, on, refused


def count_devices_and_replicas(shift):
    trainer = distloop.Trainer(classifier(), distloop.Config(device="cpu", console="quiet"))
    trainer.fit(batches(), steps=1)
    strategy = trainer.strategy
    index = collectives.worker_index(strategy)
    return collectives.num_local_replicas(strategy), strategy.num_replicas_in_sync, index + shift


def fail():
    raise KeyError("what went wrong")


@pytest.mark.wide
def test_a_function_runs_on_devices_of_a_process_of_its_own():
    assert testing.run_on_devices(count_devices_and_replicas, 3, 5) == (3, 3, 5)


@pytest.mark.slow
@pytest.mark.parametrize("run_in_workers", mostly_wide([forked.run_in_workers, testing.run_in_workers]))
def test_a_function_runs_in_each_worker(run_in_workers):
    results = run_in_workers(count_devices_and_replicas, 2, 0, devices_per_worker=2)
    assert results == [(2, 4, 0), (2, 4, 1)]


@pytest.mark.slow
def test_a_partial_runs_in_another_process():
    assert testing.run_on_devices(functools.partial(count_devices_and_replicas, 5), 1) == (1, 1, 5)


@pytest.mark.wide
def test_an_error_in_another_process_is_raised_with_its_output():
    with pytest.raises(RuntimeError, match="fail failed with exit code 1:(.|\n)*KeyError: 'what went wrong'"):
        testing.run_on_devices(fail, 1)


def test_a_function_that_another_process_cannot_import_is_refused():
    refused(lambda: testing.run_on_devices(lambda: 1, 1), "<lambda>", "put it at the top of a module")
    refused(lambda: testing.run_in_workers(fail, 1.5), "workers=1.5", "a whole number, 1 or more")


@pytest.mark.wide
def test_layers_need_no_names_to_be_compared():
    def model_fn():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])  # dense, then dense_1
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn_of(model))

    testing.assert_replica_law(model_fn, batches(), (1, 2), steps=2)


@pytest.mark.slow
def test_a_model_that_keeps_the_replica_law_passes():
    model_fn = classifier(batch_norm="synchronized", is_weighted=True)
    testing.assert_replica_law(model_fn, batches(), (1, 2), steps=3, clip_norm=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_wide(["arrays", "function"]))
def test_all_data_of_fit_can_be_given(kind):
    rows = classification(24)
    data = rows if kind == "arrays" else lambda: tf.data.Dataset.from_tensor_slices(rows).batch(8)
    testing.assert_replica_law(classifier(), data, replicas=(1, 2), steps=2, batch_size=8)


def test_data_that_can_be_read_once_is_refused():
    generator = (classification(8) for _ in range(9))
    with pytest.raises(ValueError, match="give the function that makes it"):
        testing.assert_replica_law(classifier(), generator, replicas=(1, 2), steps=2)


@pytest.mark.parametrize("given", [{"workdir": "run"}, {"num_devices": 1}])
@pytest.mark.parametrize("check", [testing.assert_replica_law, testing.assert_same_bits])
def test_settings_by_which_nothing_is_compared_are_refused(check, given):
    refused(lambda: check(classifier(), batches(), (1, 2), **given), f"{[*given][0]} was given", "replicas=")


@pytest.mark.parametrize("replicas", [(2,), (1, 1), ()])
@pytest.mark.parametrize("check", [testing.assert_replica_law, testing.assert_same_bits])
def test_numbers_of_replicas_that_are_not_compared_are_refused(check, replicas):
    refused(lambda: check(classifier(), batches(), replicas), f"{replicas=}", "give two numbers or more")


def test_a_model_that_breaks_the_replica_law_is_named_with_the_difference():
    with pytest.raises(AssertionError, match="After 3 steps .* between 1 and 2 replicas"):
        testing.assert_replica_law(classifier(batch_norm="plain"), batches(), (1, 2), steps=3)


@pytest.mark.slow
def test_a_value_that_breaks_the_replica_law_is_an_error():
    def model_fn():
        weight = tf.Variable(1.0, name="w")

        def loss_fn(batch, training):
            rows = tf.ones_like(batch["x"][:, 0])
            return {"loss": weight * rows, "rows": rows * tf.reduce_sum(rows)}

        return distloop.ModelSpec([weight], keras.optimizers.SGD(0.1), loss_fn)

    with pytest.raises(AssertionError, match="After 2 steps rows differs"):
        testing.assert_replica_law(model_fn, batches(), (1, 2), steps=2)


def attentive():
    """A spec with biases of which the loss is independent but for rounding: `key/bias` and `before/bias`."""
    rows = keras.Input((8,))
    tokens = keras.layers.Reshape((4, 2))(rows)
    hidden = keras.layers.Flatten()(keras.layers.MultiHeadAttention(1, 2, name="attention")(tokens, tokens))
    hidden = keras.layers.Dense(4, name="before")(hidden)
    hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
    model = keras.Model(rows, keras.layers.Dense(4)(keras.ops.relu(hidden)))
    return distloop.ModelSpec(model, keras.optimizers.Adam(0.01), loss_fn_of(model))


@pytest.mark.wide
def test_biases_whose_gradients_are_rounding_alone_keep_the_replica_law():
    testing.assert_replica_law(attentive, batches(), (1, 2), steps=2)


@pytest.mark.wide
@pytest.mark.parametrize("violation", mostly_wide([0.0, 1e-4]))
def test_a_variable_that_depends_on_the_replicas_breaks_the_replica_law(violation):
    def model_fn():
        kernel, shift = tf.Variable(np.eye(8, 4, dtype=np.float32), name="kernel"), tf.Variable(0.0, name="shift")

        def loss_fn(batch, training):
            logits = batch["x"] @ kernel + shift  # the softmax takes no notice of the shift
            loss = cross_entropy(batch["label"], logits)
            replicas = tf.distribute.get_replica_context().num_replicas_in_sync
            return {"loss": loss + violation * (replicas - 1.5) * (shift - tf.stop_gradient(shift))}

        return distloop.ModelSpec([kernel, shift], keras.optimizers.Adam(0.01), loss_fn)

    with pytest.raises(AssertionError, match="After 2 steps 1 differs") if violation else contextlib.nullcontext():
        testing.assert_replica_law(model_fn, batches(), (1, 2), steps=2)


def test_gradients_are_zeroed_beside_larger_ones_in_the_innermost_scope():
    gradients = {"a/key/kernel": [1.0], "a/key/bias": [1e-8, 2e-5], "a/alone/bias": [1e-6], "b/kernel": [1e-9]}
    tensors = {path: tf.constant(values) for path, values in gradients.items()}
    zeroed = testing._zero_noise(1e-5, None, tensors)
    kept = {path: (gradient != 0).numpy().tolist() for path, gradient in zeroed.items()}
    assert kept == {"a/key/kernel": [True], "a/key/bias": [False, True], "a/alone/bias": [False], "b/kernel": [False]}
    doubled = testing._zero_noise(1e-5, lambda by_path: {p: 2 * g for p, g in by_path.items()}, tensors)
    assert doubled["a/key/kernel"].numpy() == [2.0] and doubled["b/kernel"].numpy() == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize("has_updates", mostly_wide([False, True]))
def test_without_noise_gradients_below_a_hundred_thousandth_are_left_out(has_updates):
    slopes = [1.0, 0.9e-5, 1.1e-5, -0.9e-5, -1.1e-5]

    def model_fn():
        weight, optimizer = tf.Variable(tf.zeros([5])), keras.optimizers.SGD(1.0)
        double = lambda gradients: {path: 2 * gradient for path, gradient in gradients.items()}  # noqa: E731
        loss_fn = lambda batch, training: {"loss": tf.reduce_sum(slopes * weight) * batch}  # noqa: E731
        if has_updates:
            update = distloop.Update("only", loss_fn, optimizer, [weight], gradient_fn=double)
            return distloop.ModelSpec([weight], updates=[update])
        return distloop.ModelSpec([weight], optimizer, loss_fn, gradient_fn=double)

    for quiet_fn, is_quiet in ((model_fn, False), (testing.without_rounding_noise(model_fn), True)):
        trainer = distloop.Trainer(quiet_fn, on(1))
        trainer.fit(tf.data.Dataset.from_tensors([1.0]), steps=1)
        kept = [slope if abs(slope) > 1e-5 or not is_quiet else 0.0 for slope in slopes]
        np.testing.assert_allclose(trainer.model[0], -2 * np.float32(kept), rtol=1e-6)


def noisy(change=lambda loss: loss):
    """A `model_fn` with dropout and plain BatchNormalization, whose losses are changed."""

    def model_fn():
        spec = classifier(batch_norm="plain", dropout=0.3)()

        def loss_fn(batch, training):
            outputs = spec.loss_fn(batch, training)
            return {**outputs, "loss": change(outputs["loss"])}

        return dataclasses.replace(spec, loss_fn=loss_fn, updates=())

    return model_fn


def assert_same_bits():
    testing.assert_same_bits(noisy(), batches(), (1, 2, 4), steps=2)


def assert_same_bits_of_arrays():
    testing.assert_same_bits(noisy(), classification(24), (1, 2), steps=2, batch_size=8)


def assert_same_bits_of_a_model():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before, rows = model.get_weights(), classification(24)
    testing.assert_same_bits(distloop.from_keras(model), (rows["x"], rows["label"]), (1, 2), steps=1, batch_size=8)
    assert all(map(np.array_equal, before, model.get_weights()))


def assert_same_bits_of_one_that_asks_where_it_runs():
    replica = lambda: tf.distribute.get_replica_context().replica_id_in_sync_group  # noqa: E731
    model_fn = noisy(lambda loss: loss + 1e-6 * tf.cast(replica(), tf.float32))
    testing.assert_same_bits(model_fn, batches(), (1, 2), steps=2)


def add_in_series(tree, value):
    """Stands in for `TreeSum.append`: adds each value to the sum of all before it."""
    tree._partial = [(1, tree._add(tree._partial[0][1], value) if tree._partial else value)]
    return tree._partial[0][1]


def assert_same_bits_of_sums_in_series():
    with unittest.mock.patch.object(TreeSum, "append", add_in_series):
        testing.assert_same_bits(noisy(), batches(), (1, 2), steps=1)


@pytest.mark.wide
def test_dropout_and_the_statistics_of_virtual_replicas_have_the_same_bits():
    forked.run_on_devices(assert_same_bits, 4)
    forked.run_on_devices(assert_same_bits_of_arrays, 2)


@pytest.mark.slow
def test_a_compiled_model_has_the_same_bits_and_keeps_its_weights():
    forked.run_on_devices(assert_same_bits_of_a_model, 2)


@pytest.mark.wide
def test_a_loss_that_asks_where_it_runs_has_other_bits_which_are_named():
    message = r"After step 1, loss has other bits on 1 and 2 devices with virtual_replicas=4: 1\.\d+ and"
    with pytest.raises(RuntimeError, match=f"AssertionError: {message}"):
        forked.run_on_devices(assert_same_bits_of_one_that_asks_where_it_runs, 2)


@pytest.mark.wide
def test_sums_in_another_order_have_other_bits():
    with pytest.raises(RuntimeError, match="AssertionError: After step 1, .* has other bits on 1 and 2 devices"):
        forked.run_on_devices(assert_same_bits_of_sums_in_series, 2)


def test_a_difference_of_bits_is_shown_with_its_size():
    zeros = np.zeros(3, np.float32)
    assert testing._show_difference(zeros[:1], np.float32(-0.0)) == "the shape is [1] and []"
    assert testing._show_difference(np.float32(-0.0), np.float32(0.0)) == "0.0 and -0.0"
    assert testing._show_difference(zeros + [3, 4, 1], zeros + [3, 4, 0]) == "1 of 3 numbers, by 2.0e-01 of the norm"


@pytest.mark.wide
def test_activity_regularizers_keep_the_replica_law():
    def model_fn():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activity_regularizer="l2")])

        def loss_fn(batch, training):
            return {"loss": tf.reduce_mean(model(batch["x"], training=training), -1)}

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)

    testing.assert_replica_law(model_fn, batches(), (1, 2), steps=5)  # the last of them has 3 rows


@pytest.mark.slow
def test_tiny_data_can_be_learned():
    rows = testing.tiny_classification(200, 6, 3)
    assert rows["x"].shape == (200, 6) and set(rows["label"]) == {0, 1, 2}
    numbers = distloop.Trainer(small, on(1)).fit(distloop.make_dataset(rows, 50), steps=150)
    assert numbers["accuracy"] > np.bincount(rows["label"]).max() / 200 + 0.2


def small():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(3)])

    def loss_fn(batch, training):
        logits = model(batch["x"], training=training)
        hit = keras.metrics.sparse_categorical_accuracy(batch["label"], logits)
        return {"loss": cross_entropy(batch["label"], logits), "accuracy": hit}

    return distloop.ModelSpec(model, keras.optimizers.Adam(0.02), loss_fn)


@pytest.mark.wide
def test_neither_distloop_nor_its_testing_imports_what_it_needs_not():
    program = "import sys, distloop; assert 'distloop.testing' not in sys.modules; "
    program += "import distloop.testing; assert not {'pytest', '_pytest'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
