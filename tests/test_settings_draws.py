"""Law `settings`, for several settings at a time, which fixed seeds draw; see test_settings_law.py."""

import random

import pytest

from tests.settings_runs import LOOP, SETTINGS, chunks, in_a_process

NUM_DRAWS, NUM_WIDE_DRAWS, SETTINGS_OF_A_DRAW = 60, 600, 4
NUM_DRAWS_OF_LOOP, NUM_WIDE_DRAWS_OF_LOOP = 4, 20


def draws(count):
    """Lists sets of settings, which a fixed seed draws; half of the runs have a workdir."""
    generator = random.Random(0)
    return [
        tuple(sorted({*generator.sample(SETTINGS, SETTINGS_OF_A_DRAW), *["workdir"][: generator.randrange(2)]}))
        for _ in range(count)
    ]


def draws_of_loop(count):
    """Lists sets of settings with that of the loop which XLA compiles."""
    generator, others = random.Random(1), [name for name in SETTINGS if name != "jit_compile"]
    return [tuple(sorted({*generator.sample(others, SETTINGS_OF_A_DRAW - 1), LOOP})) for _ in range(count)]


TESTED = [*draws(NUM_DRAWS), *draws_of_loop(NUM_DRAWS_OF_LOOP)]
WIDE = [*draws(NUM_WIDE_DRAWS)[NUM_DRAWS:], *draws_of_loop(NUM_WIDE_DRAWS_OF_LOOP)[NUM_DRAWS_OF_LOOP:]]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("sets", chunks(TESTED), ids=lambda sets: "+".join(sets[0]))
def test_four_settings_train_to_the_same_weights(sets, devices, pytestconfig):
    ends = in_a_process(sets, pytestconfig.getoption("wide"))[devices - 1]
    assert not {names: fault for names, (_, fault) in zip(sets, ends, strict=True) if fault}


@pytest.mark.wide
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("sets", chunks(WIDE), ids=lambda sets: "+".join(sets[0]))
def test_four_further_settings_train_to_the_same_weights(sets, devices, pytestconfig):
    test_four_settings_train_to_the_same_weights(sets, devices, pytestconfig)
