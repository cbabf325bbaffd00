"""The variational autoencoder of docs/ported_scripts.md: its port has the losses of Keras's train_step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.campaigns.ported.scripts import assert_equal_losses, epochs_of_a_step, run, run_port, section, this_replica

pytestmark = pytest.mark.slow

MODELS, ORIGINAL, PORT = section("A train_step of Keras: a variational autoencoder")
NAMES = ("loss", "reconstruction_loss", "kl_loss")
SMALLER = ("batch(128)", "batch(32, drop_remainder=True)")
STEPS = 6  # an epoch


@pytest.mark.wide
def test_each_step_has_the_losses_of_the_train_step(monkeypatch):
    noise = tf.constant(np.random.default_rng(1).normal(size=(32, 2)), tf.float32)  # a replica draws that of its rows
    monkeypatch.setattr(keras.random, "normal", lambda shape, seed: this_replica(noise))
    replacements = [SMALLER, epochs_of_a_step(ORIGINAL, STEPS)]
    history = run(MODELS, ORIGINAL, replacements=replacements)["vae"].history.history
    _, rows = run_port(MODELS, PORT, replicas=2, steps=STEPS, replacements=[SMALLER])
    assert_equal_losses([[row[name] for name in NAMES] for row in rows], np.stack([history[n] for n in NAMES], 1))
