"""TFLite files: quantized models that predict as the model does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.problems import classification, on


def trainer_of(layer):
    def model_fn():
        net = keras.Sequential([keras.Input((8,)), layer(), keras.layers.Dense(4)])

        def loss_fn(batch, training):
            logits = net(batch["x"], training=training)
            return {"loss": keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)}

        return distloop.ModelSpec(
            net, keras.optimizers.Adam(0.01), loss_fn, predict_fn=lambda batch: {"logits": net(batch["x"])}
        )

    trainer = distloop.Trainer(model_fn, on(1))
    trainer.build(distloop.make_dataset(classification(8), 8))
    return trainer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")
def test_a_quantized_file_predicts_as_the_model_does(tmp_path):
    trainer = trainer_of(lambda: keras.layers.Dense(64, "tanh"))
    trainer.export(tmp_path / "model.tflite")
    interpreter = tf.lite.Interpreter(str(tmp_path / "model.tflite"))
    x = classification(5)["x"]
    outputs = interpreter.get_signature_runner("serving_default")(x=x)["logits"]
    expected = trainer.model(x).numpy()
    np.testing.assert_allclose(outputs, expected, atol=0.02 * np.abs(expected).max())
    weights = sum(variable.numpy().nbytes for variable in trainer.model.variables)
    assert (tmp_path / "model.tflite").stat().st_size < weights + 3000  # of which the larger part is 8-bit integers


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
