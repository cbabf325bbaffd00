"""Tests which settings a Config takes and refuses."""

import copy
import dataclasses
import math
import pathlib
import pickle
from fractions import Fraction

import numpy as np
import pytest

from distloop.settings.config import Config, fields

# What a Config takes.


def test_help_describes_every_field():
    assert all(field.metadata["help"] for field in fields().values())
    assert all(
        f"\n        {name} ({field.metadata['default']!r}): {field.metadata['help'][:20]}" in Config.__doc__
        for name, field in fields().items()
    )


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().steps = 3


DURATIONS = [name for name, field in fields().items() if field.type == int | str]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *[("steps", value, 2_000) for value in (2_000.0, np.int64(2_000), np.float32(2_000), np.uint16(2_000))],
        ("steps", 2**53 + 1, 2**53 + 1),  # above the whole numbers of a float
        *[(name, np.int64(value), value) for name in DURATIONS for value in (0, 100)],
        *[("clip_norm", value, 1.0) for value in (1, np.float64(1), np.int8(1))],
        ("workdir", pathlib.Path("/tmp/run"), "/tmp/run"),
        *[(name, "~/run", "/home/someone/run") for name in ("workdir", "init_from")],
    ],
)
def test_a_value_gets_the_type_of_its_setting(monkeypatch, name, value, expected):
    monkeypatch.setenv("HOME", "/home/someone")
    found = getattr(Config(**{"workdir": "run", name: value}), name)
    assert found == expected and type(found) is type(expected)


def test_the_batch_of_a_replica_makes_the_global_one():
    class Strategy:
        num_replicas_in_sync = 4

    config = Config(replica_batch_size=32)
    assert config.batch_size == 0  # a program that reads it would train on another batch
    assert config.global_batch_size(Strategy) == 128
    assert Config(batch_size=64).global_batch_size(Strategy) == 64
    assert dataclasses.replace(config, seed=1).global_batch_size(Strategy) == 128


def test_a_setting_that_does_not_exist_is_refused_with_what_may_be_meant():
    with pytest.raises(ValueError, match="'step' is no setting of distloop: did you mean steps"):
        Config(step=3)
    assert copy.deepcopy(pickle.loads(pickle.dumps(Config(steps=3)))) == Config(steps=3)


@pytest.mark.parametrize(
    "value", [10**400, 10**5_000, "1e400", "9" * 5_000, math.inf, math.nan, Fraction(10**400), 1j], ids=range(8)
)
@pytest.mark.parametrize("name", [name for name, field in fields().items() if field.type not in (str, bool)])
def test_a_number_that_no_float_can_hold_fails_in_one_sentence(name, value):
    with pytest.raises(ValueError, match=rf"^{name}=.{{1,100}} is not allowed: give .* or leave it out") as caught:
        Config(**{name: value})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", [f"1:{'9' * 5_000}", "1:2:3", "5:5", ":", "-1:3"])
def test_a_profile_of_other_steps_fails_in_one_sentence(text):
    with pytest.raises(ValueError, match=r"^profile='.{1,100} is not allowed: give two whole numbers"):
        Config(profile=text, workdir="run")
