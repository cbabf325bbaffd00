"""Settings that do not go together; most are tried with the settings themselves in test_config.py."""

import types

import pytest

from distloop.settings import contradictions
from distloop.settings.config import Config


def test_the_defaults_go_together():
    contradictions.check(Config())


def test_the_sentence_names_both_values():
    settings = vars(Config()) | {"local_workdir": "", "eager": True, "jit_compile": True}
    with pytest.raises(ValueError, match="^eager=True and jit_compile=True contradict each other; .*set either"):
        contradictions.check(types.SimpleNamespace(**settings))


def test_a_setting_that_is_no_regular_expression_is_refused():
    with pytest.raises(ValueError, match=r"^recompute='block_\(' is no regular expression: give one that is found in"):
        Config(recompute="block_(")
