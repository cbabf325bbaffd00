"""Placement: the plain version leaves everything to TensorFlow, a pipeline places it on its stages."""

import dataclasses

import keras
import pytest
import tensorflow as tf

import distloop
from distloop.data.source import Source
from distloop.distributed import strategies
from distloop.model.placement import Placement, make_placement
from distloop.pipeline.stage_placement import StagePlacement
from distloop.run import overview
from distloop.settings.config import Config
from tests.problems import refused

PLACEMENTS = pytest.mark.parametrize("kind", ["plain", "pipeline"])


def layers():
    return [keras.layers.Dense(4, name=f"dense_{i}") for i in range(2)]


def network(num_stages=2):
    return distloop.split(keras.Sequential([keras.Input((3,)), *layers()]), num_stages)


def placement(kind):
    return make_placement(network(2 if kind == "pipeline" else 1))


def test_a_model_of_one_stage_has_the_plain_placement_which_places_nothing():
    for model in (network(1), {"a": network(1), "b": layers()}):
        assert type(make_placement(model)) is Placement
    plain = Placement()
    assert not plain.devices and not plain.describe()
    assert plain.make_packing(network().model.variables) is None


def test_networks_of_several_stages_are_found_at_any_depth():
    module = tf.Module()
    module.parts = [network(), {"inner": network(1)}]
    found = make_placement({"a": module, "b": network()})
    assert isinstance(found, StagePlacement)
    assert found.devices == ["CPU:0", "CPU:1"] * 2
    assert len(found.describe()) == 2


@PLACEMENTS
def test_gradients_are_those_of_a_tape(kind):
    variable, other, made = tf.Variable(3.0), tf.Variable(1.0), placement(kind)

    @tf.function(autograph=False)
    def gradients():
        with tf.GradientTape() as tape:
            objective = variable * variable
        first, second = made.differentiate(tape, objective, [variable, other])
        assert second is None
        return first

    assert float(gradients()) == 6.0


def test_another_number_of_stages_and_empty_microbatches_are_refused():
    plain, pipeline = placement("plain"), placement("pipeline")
    for right in (1, 2):
        pipeline.require_stages(right)
    plain.require_stages(1)
    without = "num_stages=3 was given, but model_fn made no network of several stages"
    refused(lambda: plain.require_stages(3), without, "distloop.split(model, 3)")
    refused(lambda: pipeline.require_stages(3), "num_stages=3 was given, but model_fn made a network of 2 stages")
    plain.check_microbatches(17, 16)
    refused(lambda: pipeline.check_microbatches(17, 16), "microbatches=17 was given")


def trainer_of(made, num_stages, microbatches=1):
    """Returns a trainer with a network of `made` stages, given `num_stages`."""

    def model_fn():
        model = network(made)
        loss_fn = lambda batch, training: {"loss": model(batch, training=training)}  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.SGD(), loss_fn)

    config = Config(device="cpu", strategy="none", console="quiet", log_every=0, num_stages=num_stages)
    return distloop.Trainer(model_fn, dataclasses.replace(config, microbatches=microbatches))


BATCHES = tf.data.Dataset.from_tensors(tf.ones([16, 3]))


def test_the_trainer_checks_the_number_of_stages_and_the_microbatches():
    refused(lambda: trainer_of(1, 2), "num_stages=2 was given")
    sentence = "microbatches=17 was given for batches of 16 rows", "give microbatches=16 or fewer"
    refused(lambda: trainer_of(2, 2, 17).fit(BATCHES, steps=1), *sentence)


@pytest.mark.parametrize(("stages", "expected"), [(1, strategies.SERIAL_EXECUTOR), (2, strategies.PARALLEL_EXECUTOR)])
def test_a_small_step_of_a_pipeline_keeps_the_parallel_executor(stages, expected):
    trainer = trainer_of(stages, stages)
    source = Source(BATCHES, trainer.strategy)
    assert overview.ForwardPass(trainer.state, trainer.config).choose_executor(source) == expected


def test_the_table_of_a_pipelines_variables_names_their_devices():
    table = overview.describe_model(trainer_of(2, 2).state)
    assert [table.count(f"`CPU:{i}`") for i in range(2)] == [2, 2] and "| device |" in table
    assert "| device |" not in overview.describe_model(trainer_of(1, 1).state)
