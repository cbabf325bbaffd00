"""The WGAN-GP of docs/ported_scripts.md: several critic steps on fresh batches, one of the generator."""

import pytest
import tensorflow as tf

from tests.campaigns.ported.scripts import assert_equal_losses, run, run_port, section

pytestmark = pytest.mark.slow

MODELS, ORIGINAL, PORT = section("Several critic steps on fresh batches: WGAN-GP")
SMALLER = [("CRITIC_STEPS, PENALTY = 64, 8, 5", "CRITIC_STEPS, PENALTY = 12, 8, 2")]
NAMES = [*(f"critic_{i}/loss" for i in range(2)), "generator/loss"]
STEPS = 4


@pytest.mark.wide
def test_each_step_has_the_losses_of_the_loop(monkeypatch):
    known, rows = run_port(MODELS, PORT, replicas=2, steps=STEPS, replacements=SMALLER)
    steps = list(known["batches"].take(STEPS))
    noise = iter([batch["noise"][:, i] for batch in steps for i in range(3)])
    mix = iter([batch["mix"][:, i] for batch in steps for i in range(2)])
    monkeypatch.setattr(tf.random, "normal", lambda shape: next(noise))
    monkeypatch.setattr(tf.random, "uniform", lambda shape: next(mix))
    original = run(MODELS, ORIGINAL, replacements=[*SMALLER, ("range(20_000)", f"range({STEPS})")])
    assert_equal_losses([[row[name] for name in NAMES] for row in rows], [losses for _, *losses in original["printed"]])
    assert known["trainer"].optimizer["critic_0"].iterations.numpy() == 2 * STEPS
