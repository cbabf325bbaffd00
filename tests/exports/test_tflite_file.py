"""TFLite files: quantized models that predict as the model does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.problems import classification, on


def trainer_of(*layers, shape=(8,), rows=None):
    def model_fn():
        net = keras.Sequential([keras.Input(shape), *(layer() for layer in layers), keras.layers.Dense(4)])

        def loss_fn(batch, training):
            logits = net(batch["x"], training=training)
            return {"loss": keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)}

        return distloop.ModelSpec(
            net, keras.optimizers.Adam(0.01), loss_fn, predict_fn=lambda batch: {"logits": net(batch["x"])}
        )

    trainer = distloop.Trainer(model_fn, on(1))
    trainer.build(rows or distloop.make_dataset(classification(8), 8))
    return trainer


def assert_predicts(path, trainer, x, tolerance):
    """Compares what a file computes with the model, by the largest of its outputs."""
    outputs = tf.lite.Interpreter(str(path)).get_signature_runner("serving_default")(x=x)["logits"]
    expected = trainer.model(x).numpy()
    np.testing.assert_allclose(outputs, expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")
def test_a_quantized_file_predicts_as_the_model_does(tmp_path):
    trainer = trainer_of(lambda: keras.layers.Dense(64, "tanh"))
    trainer.export(path := tmp_path / "model.tflite")
    assert_predicts(path, trainer, classification(5)["x"], 0.02)
    weights = sum(variable.numpy().nbytes for variable in trainer.model.variables)
    assert path.stat().st_size < weights + 3000  # of which the larger part is 8-bit integers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")
def test_free_axes_get_a_size_that_a_filter_fits_in(tmp_path):
    def images():
        for size in (12, 16):
            yield {"x": np.ones((8, size, size, 1), np.float32), "label": np.zeros(8, np.int32)}

    spec = {"x": tf.TensorSpec((8, None, None, 1)), "label": tf.TensorSpec((8,), tf.int32)}
    rows = tf.data.Dataset.from_generator(images, output_signature=spec)
    layers = [lambda: keras.layers.Conv2D(4, 5), keras.layers.GlobalAveragePooling2D]
    trainer = trainer_of(*layers, shape=(None, None, 1), rows=rows)
    trainer.export(tmp_path / "model.tflite")
    x = np.random.default_rng(0).normal(size=(3, 20, 20, 1)).astype(np.float32)
    assert_predicts(tmp_path / "model.tflite", trainer, x, 0.05)


@pytest.mark.slow
def test_what_tflite_lacks_is_refused_in_a_sentence_and_the_old_file_stays(tmp_path):
    (tmp_path / "model.tflite").write_text("old")
    trainer = trainer_of(lambda: keras.layers.Lambda(lambda x: tf.math.lgamma(tf.abs(x) + 1.0), (8,)))
    with pytest.raises(ValueError, match="TensorFlow Lite cannot hold this model .*: export a SavedModel"):
        trainer.export(tmp_path / "model.tflite")
    assert (tmp_path / "model.tflite").read_text() == "old"


def test_a_directory_of_that_name_is_refused(tmp_path):
    (tmp_path / "model.tflite").mkdir()
    with pytest.raises(ValueError, match="is a directory"):
        trainer_of(lambda: keras.layers.Dense(2)).export(tmp_path / "model.tflite")
