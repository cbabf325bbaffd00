"""The window of a row; plain arrays, no TensorFlow operation."""

import dataclasses

import numpy as np
import pytest

from distloop.training.window import Row, Window


def row(**changes):
    plain = Row(
        steps=2,
        end=10.0,
        seconds=0.5,
        tallies=np.array([6.0, 3.0, 1.0, 4.0]),
        examples=16.0,
        input_secs=0.1,
        numbers={"learning_rate": 0.5},
        step_secs=np.array([0.2, 0.3]),
        replica_secs=np.array([]),
    )
    return dataclasses.replace(plain, **changes)


def window_of(*rows, saved=None):
    window = Window() if saved is None else Window.load(saved)
    for changes in rows:
        window = window.with_row(row(**changes))
    return window


OTHER = {"tallies": np.array([0.0, 5.0, 1.0, 0.0])}
NAMES = ["loss", "accuracy"]


def test_means_are_divided_once_over_all_rows():
    metrics = window_of({}, OTHER | {"numbers": {"learning_rate": 0.25}}).metrics(NAMES)
    assert metrics["loss"] == 6 / 8 and metrics["accuracy"] == 2 / 4 and metrics["learning_rate"] == 0.25


def test_rates_are_over_the_time_of_the_steps():
    metrics = window_of({"host_secs": 1.0}, {"host_secs": 0.0}).metrics(NAMES)
    assert metrics["steps_per_sec"] == 4 and metrics["examples_per_sec"] == 32
    assert metrics["input_wait"] == pytest.approx(0.2) and metrics["host_share"] == 0.5
    assert metrics["step_secs_p50"] == 0.2 and metrics["step_secs_p90"] == metrics["step_secs_p99"] == 0.3
    assert "replica_imbalance" not in metrics


def test_tokens_a_second_are_the_summed_weight_of_losses_of_tokens():
    window = window_of({}, OTHER)
    assert window.metrics(NAMES, ["loss"])["tokens_per_sec"] == (3 + 5) / 1.0
    assert window.metrics(["lm/loss", "lm/accuracy"], ["lm/loss"])["lm/tokens_per_sec"] == 8.0
    assert "tokens_per_sec" not in window.metrics(NAMES)


def test_examples_are_counted_over_windows_and_saves():
    window = window_of({})
    assert window.metrics(NAMES)["examples_seen"] == 16
    second = window_of({}, saved=Window(examples_seen=window.examples_seen).save())
    assert second.metrics(NAMES)["examples_seen"] == 32
    assert "examples_seen" not in window_of({}, saved={"sums": [], "steps": 0, "seconds": 0.0}).metrics(NAMES)


def test_imbalance_compares_the_slowest_replica_with_the_mean():
    window = window_of(*({"replica_secs": np.array(secs)} for secs in ([1.0, 3.0], [1.0, 1.0])))
    assert window.metrics(NAMES)["replica_imbalance"] == pytest.approx(4 / 3 - 1)


def test_a_saved_window_goes_on_where_it_was():
    whole, second = window_of({}, OTHER), window_of(OTHER, saved=window_of({}).save())
    assert second.save() == whole.save()
    assert second.metrics(NAMES)["loss"] == whole.metrics(NAMES)["loss"]


def test_a_window_saved_with_other_values_is_dropped():
    window = window_of({}, saved=window_of({"tallies": np.array([1.0, 1.0])}).save())
    assert window.steps == 2 and window.metrics(NAMES)["loss"] == 2
