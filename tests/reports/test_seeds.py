"""Runs that differ in their seeds alone, as one line; checked with NumPy."""

import json
import math

import numpy as np
import pytest

from distloop import report
from tests.problems import write_run


@pytest.fixture
def values(tmp_path):
    """Writes seven runs: seeds 0 to 3 with 16 hidden units, and 1 to 3 with 64; returns the last losses of each."""
    rng = np.random.default_rng(0)
    losses = {(hidden, seed): rng.random(3) for hidden, seeds in ((16, 4), (64, 3)) for seed in range(4 - seeds, 4)}
    for (hidden, seed), loss in losses.items():
        rows = [{"step": i, "test/loss": x, "size": 7.0 * x} for i, x in enumerate(loss.tolist(), 1)]
        write_run(tmp_path / f"{hidden}-{seed}", rows, {"steps": 3, "seed": seed, "hidden": hidden})
    return losses


def summary(tmp_path, capsys):
    assert report.main([str(tmp_path), "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["seeds"]


def test_mean_deviation_and_number_of_each_group_and_the_paired_difference(tmp_path, capsys, values):
    best = {key: loss.min() for key, loss in values.items()}
    last = {key: 7.0 * loss[-1] for key, loss in values.items()}
    lines = summary(tmp_path, capsys)
    assert [line["metric"] for line in lines] == ["test/loss"] * 3 + ["size"] * 3
    for kind, of, three in (("best", best, lines[:3]), ("last", last, lines[3:])):
        expected = [[of[hidden, seed] for seed in seeds] for hidden, seeds in ((16, range(4)), (64, range(1, 4)))]
        expected.append([of[64, seed] - of[16, seed] for seed in range(1, 4)])
        for line, group, numbers in zip(
            three, ["hidden=16", "hidden=64", "second minus first, by seed"], expected, strict=True
        ):
            assert (line["group"], line["value"], line["number"]) == (group, kind, len(numbers))
            measured = [line["mean"], line["deviation"]]
            np.testing.assert_allclose(measured, [np.mean(numbers), np.std(numbers, ddof=1)], 1e-12)


def test_the_table_has_a_line_for_each_group(tmp_path, capsys, values):
    assert report.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    lines = out[out.index("metric     settings") :].split("\n\n")[0].splitlines()
    mean = np.mean([loss.min() for (hidden, _), loss in values.items() if hidden == 16])
    assert lines[1].split()[:4] == ["test/loss", "hidden=16", "best", f"{mean:.4g}"] and len(lines) == 7


def test_runs_of_one_group_are_one_line_and_runs_that_all_differ_none(tmp_path, capsys):
    for seed, loss in enumerate((1.0, 2.0, None)):
        write_run(tmp_path / "same" / str(seed), [{"step": 1, "loss": loss}], {"seed": seed})
        write_run(tmp_path / "other" / str(seed), [{"step": 1, "loss": loss}], {"seed": 0, "rate": seed})
    (line,) = summary(tmp_path / "same", capsys)
    assert line["group"] == "all runs" and line["number"] == 3 and line["mean"] is None  # of nan
    assert summary(tmp_path / "other", capsys) == []


def test_runs_of_one_seed_or_none_and_a_single_value(tmp_path, capsys):
    write_run(tmp_path / "a", [{"step": 1, "loss": 1.0}], {"rate": 1})
    write_run(tmp_path / "b", [{"step": 1, "loss": 3.0}], {"rate": 1})
    write_run(tmp_path / "c", [{"step": 1, "loss": 4.0, "auc": 0.5}], {"rate": 2})
    first, second, difference, auc = summary(tmp_path, capsys)
    assert (first["mean"], first["deviation"], first["number"]) == (2.0, math.sqrt(2), 2)
    assert (second["mean"], second["deviation"], second["number"]) == (4.0, None, 1)
    assert (difference["mean"], difference["number"], auc["number"]) == (1.0, 1, 1)
