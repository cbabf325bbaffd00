"""Layers that the backward pass computes again: which ones, and runs that train with them to the same weights."""

import keras
import pytest
import tensorflow as tf

import distloop
from tests.problems import assert_close, assert_equal, classification, everything, mostly_wide, on

layers = keras.layers


def make_chain(width=8, blocks=3, **norm):
    """A model of blocks, one after the other."""

    def make_block(i):
        inputs = keras.Input((width,))
        hidden = layers.Dense(4 * width, activation="gelu", name=f"up_{i}")(inputs)
        hidden = layers.BatchNormalization(name=f"norm_{i}", **norm)(layers.Dropout(0.3)(hidden))
        return keras.Model(inputs, inputs + layers.Dense(width, name=f"down_{i}")(hidden), name=f"block_{i}")

    modules = [make_block(i) for i in range(blocks)]
    return keras.Sequential([keras.Input((width,)), *modules, layers.Dense(4, name="logits")], name="net")


def model_fn_of(**norm):
    def model_fn():
        model = make_chain(blocks=1, **norm)

        def loss_fn(batch, training):
            logits = model(batch["x"], training=training)
            return {"loss": keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)}

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1, momentum=0.9), loss_fn)

    return model_fn


def trained(replicas, steps, *, norm=None, **settings):
    """Returns all that training changes, after some steps."""
    trainer = distloop.Trainer(model_fn_of(**norm or {}), on(replicas, steps=steps, batch_size=16, **settings))
    trainer.fit(classification())
    return everything(trainer)


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_of_other_tests_are_optimized")
def test_a_run_has_the_same_bits_and_resumes_without_recomputation(tmp_path, capsys):
    settings = {"virtual_replicas": 2, "microbatches": 2, "precision": "mixed_float16"}
    expected = trained(1, 2, **settings)
    trained(1, 1, recompute="block", workdir=str(tmp_path), **settings)
    capsys.readouterr()
    assert_equal(trained(1, 2, workdir=str(tmp_path), **settings), expected)
    assert "recompute" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "settings"), mostly_wide([(1, {"microbatches": 2}), (2, {"norm": {"synchronized": True}})])
)
def test_weights_and_statistics_are_the_same(replicas, settings):
    found, expected = (trained(replicas, 1, recompute=pattern, **settings) for pattern in ("block", ""))
    assert_close(found, expected, 1e-6)


def test_a_pattern_without_a_match_names_layers_and_stages_count_as_one():
    def stages():
        network = distloop.stages([layers.Dense(4), layers.Dense(4)], devices=["CPU:0", "CPU:0"])
        network(tf.ones([1, 4]))
        return distloop.ModelSpec(network, keras.optimizers.SGD(), lambda batch, training: {"loss": batch["x"]})

    message = r"recompute='bloc_' was given, which is found in no path of a layer of the model \(net, .*block_0"
    with pytest.raises(ValueError, match=message):
        distloop.Trainer(model_fn_of(), on(1, recompute="bloc_"))
    with pytest.raises(ValueError, match="recompute='dense' was given with a network of 2 stages, which are recom"):
        distloop.Trainer(stages, on(1, strategy="none", recompute="dense"))
