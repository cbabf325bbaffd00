"""The diffusion model of docs/ported_scripts.md: its port has the losses of Keras's train_step, and its averages."""

import numpy as np
import pytest
import tensorflow as tf

from tests.campaigns.ported.scripts import assert_equal_losses, epochs_of_a_step, run, run_port, section

pytestmark = pytest.mark.slow

MODELS, ORIGINAL, PORT = section("Averaged weights: a diffusion model")
SHORTER = ("TIMESTEPS, DECAY = 1000, 0.999", "TIMESTEPS, DECAY = 1000, 0.15")  # of distloop too, from the first step
STEPS = 6  # an epoch


@pytest.mark.wide
def test_each_step_has_the_losses_and_averages_of_the_train_step(monkeypatch):
    known, rows = run_port(MODELS, PORT, replicas=2, steps=STEPS, replacements=[SHORTER])
    drawn = list(known["noisy_batches"].take(STEPS))
    times, noise = (iter([batch[name] for batch in drawn]) for name in ("times", "noise"))
    monkeypatch.setattr(tf.random, "uniform", lambda *arguments: next(times))
    monkeypatch.setattr(tf.random, "normal", lambda shape: next(noise))
    eagerly = ("MeanSquaredError())", "MeanSquaredError(), run_eagerly=True)")
    model = run(MODELS, ORIGINAL, replacements=[SHORTER, eagerly, epochs_of_a_step(ORIGINAL, STEPS)])["model"]
    assert_equal_losses([row["loss"] for row in rows], model.history.history["loss"])
    trainer = known["trainer"]
    with trainer.state.averaged():
        averages = trainer.model.get_weights()
    for average, expected, weight in zip(averages, model.average.weights, trainer.model.get_weights(), strict=True):
        np.testing.assert_allclose(average, expected.numpy(), rtol=1e-5, atol=1e-7)
        assert not np.array_equal(average, weight)
