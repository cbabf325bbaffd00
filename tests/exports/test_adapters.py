"""Adapters: LoRA trains a few weights, which are saved and read alone, and merged when the model is exported."""

import functools
import os
import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file

import distloop
from distloop.warm_start.warm_start import warm_start
from tests.problems import on

ROWS = 8
TOKENS = np.random.default_rng(0).integers(0, 20, (ROWS, 6)).astype("int32")
LABELS = TOKENS[:, 0] % 3
DATA = TOKENS, LABELS


def model_fn(rank=1):
    """Returns the spec of a network whose three large layers have adapters of a rank, and whose head trains."""
    keras.utils.set_random_seed(1)  # the "pretrained" weights
    body = [
        keras.layers.Embedding(20, 32),
        keras.layers.EinsumDense("abc,cd->abd", (None, 64)),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(64, activation="relu", use_bias=False),
    ]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *body, keras.layers.Dense(3)])
    for layer in body:
        if rank and hasattr(layer, "enable_lora"):
            layer.enable_lora(rank)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return distloop.supervised(model, loss, keras.optimizers.Adam(0.05))


def make_trainer(model_fn=model_fn, **settings):
    return distloop.Trainer(model_fn, on(1, batch_size=ROWS, console="quiet", **settings))


@functools.cache
def trained():
    trainer = make_trainer()
    trainer.fit(DATA, steps=5)
    return trainer


def arrays_of(path):
    """Returns the arrays of a file of weights by name."""
    if path.endswith(".safetensors"):
        return load_file(path)
    with np.load(path) as file:
        return dict(file)


def frozen_weights(trainer):
    return [w.numpy() for w in trainer.model.weights if not w.trainable]


@pytest.mark.slow
def test_training_changes_adapters_and_head_alone():
    changed, fresh = trained(), make_trainer()
    np.testing.assert_equal(frozen_weights(changed), frozen_weights(fresh))
    assert np.abs(changed.predict(DATA) - fresh.predict(DATA)).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_adapters_are_written_and_read_without_the_frozen_weights(tmp_path, suffix):
    trained().export(path := str(tmp_path / f"adapters{suffix}"))
    arrays = arrays_of(path)
    assert "sequential/dense/lora_kernel_a" in arrays and "sequential/dense/kernel" not in arrays
    assert len(arrays) == 2 * 3 + 2
    trainer = make_trainer()
    trainer.restore(path)
    np.testing.assert_array_equal(trainer.predict(DATA), trained().predict(DATA))
    assert warm_start(make_trainer().state, path).startswith("8 of 11 variables start from")  # as init_from does


@pytest.mark.parametrize(("suffix", "package"), [(".safetensors", "safetensors.numpy"), (".onnx", "tf2onnx")])
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, suffix, package):
    monkeypatch.setitem(sys.modules, package, None)
    trainer = make_trainer()
    with pytest.raises(ValueError, match=package.partition(".")[0]):
        trainer.export(str(tmp_path / f"model{suffix}"))
    assert list(tmp_path.iterdir()) == []


def test_onnx_is_written_by_keras_with_the_averaged_weights(tmp_path, monkeypatch):
    written = {}

    def export(model, path, *, format, verbose):
        written[format] = model.get_weights()
        pathlib.Path(path).write_bytes(b"onnx")

    monkeypatch.setattr(keras.Model, "export", export)
    trainer = make_trainer(half_fn, average_decay=0.5)
    trainer.fit((np.ones((8, 3), np.float32), np.ones((8, 2), np.float32)), steps=3)
    trainer.export(str(tmp_path / "model.onnx"))
    with trainer.state.averaged():
        expected = trainer.model.get_weights()
    assert (tmp_path / "model.onnx").read_bytes() == b"onnx"
    np.testing.assert_equal(written["onnx"], expected)


def half_fn():
    dense = keras.layers.Dense(2, dtype="bfloat16", name="dense")
    layers = [keras.Input((3,)), keras.layers.BatchNormalization(), dense]
    return distloop.supervised(keras.Sequential(layers, name="net"), "mse", keras.optimizers.SGD(0.1))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_bfloat16_weights_and_statistics_that_training_moves_are_kept(tmp_path, suffix):
    trainer, other = make_trainer(half_fn), make_trainer(half_fn)
    trainer.export(path := str(tmp_path / f"half{suffix}"))
    other.restore(path)
    np.testing.assert_equal(*([v.numpy() for v in of.model.variables] for of in (other, trainer)))
    arrays = arrays_of(path)
    assert arrays["net/dense/kernel"].dtype == np.float32
    names = {name.rpartition("/")[2] for name in arrays}
    assert names == {"gamma", "beta", "moving_mean", "moving_variance", "kernel", "bias"}


class Codebook(keras.layers.Layer):
    def build(self, shape):
        self.means = self.add_weight(shape=(3,), initializer="zeros", trainable=False, name="means")

    def call(self, x, training=False):
        if training:
            self.means.assign(0.5 * self.means + 0.5 * keras.ops.mean(x, 0))
        return x - self.means


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_what_a_layer_of_the_users_writes_is_kept_and_no_recurrent_state(tmp_path, suffix):
    def model_fn():
        frozen, normalization = Codebook(name="frozen", trainable=False), keras.layers.Normalization(name="adapted")
        normalization.adapt(np.arange(6, dtype=np.float32).reshape(2, 3))
        recurrent = keras.layers.GRU(2, stateful=True, name="gru")
        layers = [
            keras.Input((3,), batch_size=8),
            normalization,  # whose numbers come from `adapt`
            Codebook(name="codes"),
            frozen,
            keras.layers.Reshape((3, 1)),
            recurrent,
        ]
        return distloop.supervised(keras.Sequential(layers, name="net"), "mse", keras.optimizers.SGD(0.1))

    rows = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32), np.ones((8, 2), np.float32)
    trainer, other = make_trainer(model_fn), make_trainer(model_fn)
    trainer.fit(tf.data.Dataset.from_tensors(rows).repeat(), steps=3)
    trainer.export(path := str(tmp_path / f"codes{suffix}"))
    assert sorted(arrays_of(path)) == ["net/codes/means", *(f"net/gru/gru_cell/{n}" for n in GRU_WEIGHTS)]
    other.restore(path)
    np.testing.assert_array_equal(*(of.model.layers[1].means.numpy() for of in (trainer, other)))
    assert np.abs(other.model.layers[1].means.numpy()).min() > 0.0


GRU_WEIGHTS = ["bias", "kernel", "recurrent_kernel"]


@pytest.mark.slow
def test_adapters_of_another_model_are_refused(tmp_path):
    trained().export(path := str(tmp_path / "adapters.npz"))
    with pytest.raises(ValueError, match="lora_embeddings_a.*, which the model lacks, and nothing was taken"):
        make_trainer(functools.partial(model_fn, rank=0)).restore(path)
    with pytest.raises(ValueError, match="other shapes"):
        make_trainer(functools.partial(model_fn, rank=2)).restore(path)


@pytest.mark.slow
def test_a_keras_file_has_the_adapters_merged(tmp_path):
    before = [w.numpy() for w in trained().model.weights]
    trained().export(path := str(tmp_path / "model.keras"))
    model = keras.models.load_model(path)
    assert not [w.path for w in model.weights if "lora" in w.path]
    np.testing.assert_allclose(model.predict(TOKENS, verbose=0), trained().predict(DATA), rtol=1e-5, atol=1e-6)
    np.testing.assert_equal([w.numpy() for w in trained().model.weights], before)  # the model itself goes on as it was
    assert all(layer.lora_rank == 1 for layer in trained().model.layers if getattr(layer, "lora_enabled", False))


@pytest.mark.slow
def test_a_saved_model_has_the_adapters_merged(tmp_path):
    trained().export(path := str(tmp_path / "model"))
    served = tf.saved_model.load(path)
    (logits,) = served.signatures["serving_default"](tf.constant(TOKENS)).values()
    np.testing.assert_allclose(logits, trained().predict(DATA), rtol=1e-5, atol=1e-6)
    names = [name for name, _ in tf.train.list_variables(os.path.join(path, "variables", "variables"))]
    assert len([name for name in names if name.startswith("variables_served")]) == 5  # three matrices and the head


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(ValueError, match=r"torn.npz'\) cannot be read"):
        make_trainer().restore(str(tmp_path / "torn.npz"))
