"""The loop on tf.distribute of docs/ported_scripts.md: its port has the same losses, and the same evaluations."""

import numpy as np
import pytest

from tests.campaigns.ported.scripts import MIRRORED, assert_equal_losses, run, run_port, section

pytestmark = pytest.mark.slow

ORIGINAL, PORT = section("A loop on tf.distribute")
EPOCHS, STEPS = 2, 6


@pytest.mark.wide
def test_each_step_and_each_evaluation_has_the_numbers_of_the_loop():
    changes = [("tf.distribute.MirroredStrategy()", MIRRORED[2]), ("range(10)", f"range({EPOCHS})")]
    printed = run(ORIGINAL, replacements=changes)["printed"]
    _, rows = run_port(PORT, replicas=2, steps=STEPS)
    assert_equal_losses([row["loss"] for row in rows], [loss for kind, loss, *_ in printed if kind == "train"])
    evaluations = [(row["test/loss"], row["test/accuracy"]) for row in rows if "test/loss" in row]
    np.testing.assert_allclose(evaluations, [numbers for kind, *numbers in printed if kind == "test"], rtol=1e-6)
