"""What `fit` does in place of training, chosen by the settings."""

import types

import pytest

import distloop
from distloop.diagnostics import tryouts
from distloop.keras_models.fit_arguments import read_arguments


def run(monkeypatch, **settings):
    """Returns what was called, and the code with which the process ended."""
    calls = []
    monkeypatch.setattr(tryouts.tuning, "autotune_batch", lambda trainer, data: calls.append("autotune_batch"))
    monkeypatch.setattr(tryouts.memory_estimate, "print_and_exit", lambda trainer, data: calls.append("memory"))
    monkeypatch.setattr(tryouts.audit, "print_and_exit", lambda result: calls.append(result))
    trainer = types.SimpleNamespace(config=distloop.Config(**settings), audit=lambda data: "audit")
    tryouts.run_instead(trainer, read_arguments((), None, {}))
    return calls


def test_nothing_is_done_unless_a_setting_asks_for_it(monkeypatch):
    assert run(monkeypatch) == []


@pytest.mark.parametrize("name", ["audit", "memory"])
def test_a_setting_chooses_what_is_done(monkeypatch, name):
    assert run(monkeypatch, **{name: True}) == [name]


def test_a_search_for_a_batch_size_ends_the_process_with_code_0(monkeypatch):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, autotune_batch=True)
    assert ended.value.code == 0
