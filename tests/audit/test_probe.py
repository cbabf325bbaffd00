"""The probe: what it sees of a model, and that it changes nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.audit.probe import Probe
from tests.problems import assert_equal, classification, classifier, everything, on

OUTSIDE = tf.Variable(1.0, name="outside")


@pytest.fixture(scope="module")
def trainer():
    return distloop.Trainer(classifier(optimizer=lambda: keras.optimizers.SGD(0.1)), on(1))


def data():
    return distloop.make_dataset(classification(48), 16)


@pytest.fixture(scope="module")
def probe(trainer):
    return Probe(trainer.state, data())


def test_the_halves_are_the_first_batch(probe):
    np.testing.assert_array_equal(tf.concat([half["x"] for half in probe.halves], 0), probe.rows["x"])
    assert [len(half["x"]) for half in probe.halves] == [8, 8]


def test_two_passes_over_data_with_a_seed_are_alike(probe):
    first, second = probe.passes
    assert first == second and len(first) == 3


@pytest.mark.slow
def test_halves_measure_what_the_whole_does(probe, trainer):
    (update,) = trainer.state.spec.updates
    (whole,), collectives = probe.measure(update, [probe.rows], training=True)
    halves, _ = probe.measure(update, probe.halves, training=True)
    assert whole.weight == sum(half.weight for half in halves) == 16 and not collectives
    assert whole.values["loss"] == pytest.approx(np.mean([half.values["loss"] for half in halves]))
    for path, gradient in whole.gradients.items():
        mean = np.mean([half.gradients[path] for half in halves], 0)
        np.testing.assert_allclose(gradient, mean, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_every_observation_restores_all_variables(trainer):
    probe, before = Probe(trainer.state, data()), everything(trainer)
    (update,) = trainer.state.spec.updates
    assert probe.trace.created is None and len(probe.trace.calls) == 3 and not probe.draws
    assert probe.compare_operations(update, training=True)
    steps = probe.two_steps
    assert not steps.paths_apart
    assert any(not np.array_equal(steps.gradients_after[path], g) for path, g in steps.gradients_before.items())
    assert_equal(everything(trainer), before)


@pytest.mark.slow
def test_a_variable_of_nobodys_is_seen_and_restored():
    def model_fn():
        spec = classifier()()
        loss_fn = spec.loss_fn

        def counting(batch, training):
            OUTSIDE.assign_add(1.0)
            return loss_fn(batch, training)

        return distloop.ModelSpec(spec.model, keras.optimizers.SGD(0.1), counting)

    probe = Probe(distloop.Trainer(model_fn, on(1)).state, data())
    assert [(variable is OUTSIDE, is_written) for variable, is_written in probe.foreign_variables] == [(True, True)]
    assert probe.two_steps.gradients_after and OUTSIDE.numpy() == 1.0
