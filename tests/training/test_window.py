"""The log window and the layout of its rows; plain arrays, no TensorFlow operation."""

import dataclasses

import numpy as np
import pytest

from distloop.training.window import Row, RowLayout, Window

LAYOUT = RowLayout({"tallies": 4, "examples": 1, "replica_secs": 0})


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


def test_segments_come_back_by_name_whatever_order_they_were_given_in():
    segments = {"replica_secs": [], "examples": [16.0], "tallies": [6.0, 3.0, 1.0, 4.0]}
    packed = np.concatenate(LAYOUT.pack(segments))
    assert len(packed) == LAYOUT.width == 5
    unpacked = LAYOUT.unpack(np.stack([packed, 2 * packed]))
    assert {name: part.shape for name, part in unpacked.items()} == {
        "tallies": (2, 4),
        "examples": (2, 1),
        "replica_secs": (2, 0),
    }
    np.testing.assert_array_equal(unpacked["tallies"][1], [12, 6, 2, 8])
    np.testing.assert_array_equal(unpacked["examples"], [[16], [32]])


def test_a_segment_that_the_layout_does_not_name_is_refused():
    with pytest.raises(AssertionError):
        LAYOUT.pack({"tallies": [], "examples": []})


def test_means_are_divided_once_over_all_rows():
    window = Window()
    window.add(row())
    window.add(row(tallies=np.array([0.0, 5.0, 1.0, 0.0])))
    metrics = window.metrics(["loss", "accuracy"])
    assert metrics["loss"] == 6 / 8 and metrics["accuracy"] == 2 / 4


def test_rates_are_over_the_time_of_the_steps():
    window = Window()
    window.add(row(host_secs=1.0))
    window.add(row(host_secs=0.0))
    metrics = window.metrics(["loss", "accuracy"])
    assert metrics["steps_per_sec"] == 4 and metrics["examples_per_sec"] == 32
    assert metrics["input_wait"] == pytest.approx(0.2) and metrics["host_share"] == 0.5
    assert metrics["step_secs_p50"] == 0.2 and metrics["step_secs_p90"] == metrics["step_secs_p99"] == 0.3
    assert "replica_imbalance" not in metrics


def test_tokens_a_second_are_the_summed_weight_of_the_losses_that_count_tokens():
    window = Window()
    window.add(row())
    window.add(row(tallies=np.array([0.0, 5.0, 1.0, 0.0])))
    assert window.metrics(["loss", "accuracy"], ["loss"])["tokens_per_sec"] == (3 + 5) / 1.0
    assert window.metrics(["lm/loss", "lm/accuracy"], ["lm/loss"])["lm/tokens_per_sec"] == 8.0
    assert "tokens_per_sec" not in window.metrics(["loss", "accuracy"])


def test_numbers_are_those_at_the_end_of_the_window():
    window = Window()
    window.add(row())
    window.add(row(numbers={"learning_rate": 0.25}))
    assert window.metrics(["loss", "accuracy"])["learning_rate"] == 0.25


def test_examples_are_counted_over_windows_and_saves():
    window = Window()
    window.add(row())
    assert window.metrics(["loss", "accuracy"])["examples_seen"] == 16
    second = Window(Window(examples_seen=window.examples_seen).save())
    second.add(row())
    assert second.metrics(["loss", "accuracy"])["examples_seen"] == 32


def test_examples_before_an_older_checkpoint_are_unknown():
    window = Window({"sums": [], "steps": 0, "seconds": 0.0})
    window.add(row())
    assert "examples_seen" not in window.metrics(["loss", "accuracy"])


def test_imbalance_compares_the_slowest_replica_with_the_mean():
    window = Window()
    window.add(row(replica_secs=np.array([1.0, 3.0])))
    window.add(row(replica_secs=np.array([1.0, 1.0])))
    assert window.metrics(["loss", "accuracy"])["replica_imbalance"] == pytest.approx(4 / 3 - 1)


def test_a_saved_window_goes_on_where_it_was():
    whole, first = Window(), Window()
    for window in (whole, first):
        window.add(row())
    second = Window(first.save())
    for window in (whole, second):
        window.add(row(tallies=np.array([1.0, 1.0, 2.0, 2.0])))
    assert second.save() == whole.save()
    names = ["loss", "accuracy"]
    assert second.metrics(names)["loss"] == whole.metrics(names)["loss"]


def test_a_window_saved_with_other_values_is_dropped():
    saved = Window()
    saved.add(row(tallies=np.array([1.0, 1.0])))
    window = Window(saved.save())
    window.add(row())
    assert window.steps == 2 and window.metrics(["loss", "accuracy"])["loss"] == 2
