"""Law `settings`: each setting, alone and with three others, trains to the weights of the run without it.

Or it is refused in one sentence before the first step. A setting that changes numbers by intent is compared with
itself: with the run that has those settings alone, on one device. Every run is real, on virtual CPUs of a fork. Those
of several settings are in test_settings_draws.py.
"""

import pytest

from distloop.settings import config
from tests.settings_runs import CASES, chunks, in_a_process


def test_every_setting_has_a_case_away_from_its_default():
    fields = config.fields()
    assert {name.partition("=")[0] for name in CASES} == fields.keys()
    defaults = {name: field.metadata["default"] for name, field in fields.items()}
    assert not [name for name, case in CASES.items() if case.value == defaults[name.partition("=")[0]]]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("sets", chunks([(name,) for name in CASES]), ids=lambda sets: "+".join(sets[0]))
def test_a_setting_alone_trains_to_the_same_weights(sets, devices, pytestconfig):
    ends = in_a_process(sets, pytestconfig.getoption("wide"))[devices - 1]
    expected = [(CASES[name].ends[devices - 1], "") for (name,) in sets]
    assert dict(zip(sets, ends, strict=True)) == dict(zip(sets, expected, strict=True))
