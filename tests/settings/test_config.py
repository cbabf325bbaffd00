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


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": 1.5}, "steps=1.5 is not allowed: give a whole number, 0 or more"),
        ({"steps": True}, "steps=True is not allowed: give a whole number"),
        ({"steps": "5"}, "steps='5' is not allowed: give a whole number"),
        ({"steps": None}, "steps=None is not allowed"),
        ({"steps": -1}, "steps=-1 is not allowed"),
        ({"steps": float("inf")}, "steps=inf is not allowed"),
        ({"microbatches": "some"}, "microbatches='some' is not allowed: give a whole number, 1 or more"),
        ({"microbatches": 0}, "microbatches=0 is not allowed: give a whole number, 1 or more"),
        ({"batch_size": 0}, "batch has 1 example or more: give batch_size or replica_batch_size"),
        ({"clip_norm": float("nan")}, "clip_norm=nan is not allowed"),
        ({"clip_norm": False}, "clip_norm=False is not allowed: give a number, 0 or more"),
        ({"average_decay": 1}, "average_decay=1 is not allowed: give a number, 0 or more and below 1"),
        ({"seed": 2**32}, "below 4294967296"),
        ({"precision": "float61"}, "precision='float61' is not allowed: give one of float32, mixed_"),
        ({"strategy": ["none"]}, "give one of auto, none, mirrored"),
        ({"deterministic": 1}, "deterministic=1 is not allowed: give True or False"),
        ({"workdir": 3}, "workdir=3 is not allowed: give a string"),
        ({"steps": 3, "epochs": 4}, "steps=3 and epochs=4 were both given"),
        ({"clip_norm": 1.0, "clip_value": 2}, "clip_norm=1 and clip_value=2 were both given"),
        (
            {"overfit_batches": 2, "limit_train_batches": 3},
            "overfit_batches=2 and limit_train_batches=3 were both given",
        ),
        ({"eager": True, "jit_compile": True}, "eager=True and jit_compile=True were both given"),
        ({"eager": True, "locate_nonfinite": True}, "eager=True and locate_nonfinite=True were both given"),
        ({"locate_nonfinite": True, "on_nonfinite": "skip"}, "locate_nonfinite=True and on_nonfinite=skip were both"),
        ({"strategy": "none", "num_devices": 2}, "strategy=none and num_devices=2 contradict"),
        ({"on_divergence": "rollback"}, "on_divergence=rollback was given without a workdir"),
        ({"recompute": "block_("}, "recompute='block_(' is no regular expression: give one that is found in"),
    ],
)
def test_a_wrong_value_fails_in_one_sentence(values, words):
    with pytest.raises(ValueError) as error:
        Config(**values)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(".")


def test_the_batch_of_a_replica_makes_the_global_one():
    class Strategy:
        num_replicas_in_sync = 4

    config = Config(replica_batch_size=32)
    assert config.batch_size == 0  # a program that reads it would train on another batch
    assert config.global_batch_size(Strategy) == 128
    assert Config(batch_size=64).global_batch_size(Strategy) == 64
    assert dataclasses.replace(config, seed=1).global_batch_size(Strategy) == 128


def test_two_batch_sizes_are_refused():
    for size in (64, 256):  # the default too, where it is given
        sentence = f"batch_size={size} and replica_batch_size=32 were both given; .* leave either out"
        with pytest.raises(ValueError, match=sentence):
            Config(batch_size=size, replica_batch_size=32)


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
