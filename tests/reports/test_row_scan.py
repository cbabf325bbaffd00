"""The numbers of many rows, of which few are parsed: those of a full parse, on odd files too."""

import json
import math
import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from distloop.reports import row_scan
from distloop.reports.row_scan import read_blocks, scan_rows
from distloop.workdir import records
from distloop.workdir.run_files import Series

ODD_LINES = [
    *('{"step": 7, "lo', "", "[1]", "null", "{}", '{"step": true, "loss": 1.0}', '{"step": -1}', '{"loss": 0.0001}'),
    *('{"step": 7, "time": "x", "loss": "0.00001"}', '{"step": 7, "loss": [0.1]}', '{"step": 7, "loss": {"a": 1}}'),
    *('{"step": 7, "loss": NaN, "size": -Infinity}', '{"step": 7, "time": 1.0, "loss": 1e999, "size": 1E2}'),
    *('{"step": 7, "time": 5.5, "loss": 1..2}', '{"step": 7, "time": 5.5, "loss": 0.5-3, "test/accuracy": 0.5}'),
    *('{"step": 7.0, "loss": 0.1}', '{"step": 99999999999999999999, "loss": 0.1}', '{"step":8,"loss":0.25}'),
    *(f'{{"step": 9, "loss": 1{"0" * 400}}}', '{"step": 7, "loss": 0.50, "loss": 0.25}', "\ufeff" + '{"step": 8}'),
    *('{"step": 7, "time": 5.0, "loss": true}', '{"step": 7, "a\\"b": 1.0}', '{"step": 7, "steps_per_sec": -1.0}'),
]


def random_file(path, rng):
    """Writes a file as runs leave them: shapes, sizes, signs and exponents that change, rows twice, damaged lines."""
    scales = {name: 10.0 ** rng.randint(-6, 12) for name in ("loss", "size", "test/accuracy", "ppl")}
    with open(path, "w", encoding="utf-8", newline="") as file:
        step = 0
        for i in range(rng.randint(0, 400)):
            step = max(0, step + rng.choice([10, 10, 10, 10, -40]))
            row = {"step": step, "time": 1.7e9 + i, "loss": scales["loss"] * rng.random() ** rng.choice([1, 1, 9])}
            row["size"] = rng.choice([1, -1, 1]) * scales["size"] * rng.random()
            row["ppl"] = rng.choice([rng.randint(0, 3), None, math.exp(rng.gauss(2, 3)), 0.5])
            row |= {"steps_per_sec": rng.random() * 100, "examples_per_sec": 1e3, "skipped_steps": float(i > 300)}
            row |= {"test/accuracy": rng.choice([0.5, 0.75, rng.random()])} if i % 7 == 3 else {}
            row |= {"learning_rate": 1e-5 * rng.random(), "gradient_noise_scale": None} if rng.random() < 0.9 else {}
            line = json.dumps(row) if rng.random() < 0.97 else rng.choice(ODD_LINES)
            file.write(line + rng.choice(["\n"] * 30 + ["\r\n", "\n\n"]))
        file.write('{"step": 5, "ti' if rng.random() < 0.5 else "")


def full_parse(path):
    """Returns name -> the series, in order of appearance, and the rows: each line is parsed."""
    rows = [records.as_metrics(row) for row in records.read_rows(str(path))]
    names = dict.fromkeys(name for row in rows for name in row)
    shown = [n for n in names if n not in ("step", "time") and n.rpartition("/")[2] not in row_scan._HIDDEN]
    having = {name: [row for row in rows if name in row] for name in shown}
    return {n: Series(n, [r["step"] for r in of], [r[n] for r in of]) for n, of in having.items()}, rows


def times_of(rows, previous):
    """Returns the steps, seconds and examples of training, and the seconds before the first row."""
    windows = []
    for i, row in enumerate(rows):
        steps, speed, previous = row["step"] - previous, row.get("steps_per_sec", math.nan), row["step"]
        if 0 < speed < math.inf and steps > 0:
            windows.append((steps, steps / speed, steps / speed * row.get("examples_per_sec", math.nan), i == 0))
    return *(sum(window[i] for window in windows) for i in range(3)), sum(secs for _, secs, _, is_0 in windows if is_0)


@pytest.mark.parametrize("seed", range(40))
def test_the_numbers_are_those_of_a_full_parse(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(row_scan, "_BLOCK_BYTES", 5000)
    rng = random.Random(seed)
    for i in range(5):
        path = str(tmp_path / f"{i}.jsonl")
        random_file(path, rng)
        expected, rows = full_parse(path)
        first_step = rng.choice([0, 15])
        scan = scan_rows(path, first_step)
        assert list(scan.curves) == list(expected)
        for name, series in expected.items():
            curve = scan.curves[name]
            for attribute in ("last", "least", "largest", "best"):
                np.testing.assert_equal(getattr(curve, attribute), getattr(series, attribute), f"{attribute} of {name}")
        assert list(scan.names) == list(dict.fromkeys(name for row in rows for name in row))
        np.testing.assert_equal([scan.first, scan.last], [rows[0], rows[-1]] if rows else [{}, {}])
        times = (scan.steps, scan.secs, scan.examples, scan.first_secs)
        np.testing.assert_allclose(times, times_of(rows, first_step), 1e-12)
        np.testing.assert_equal(scan.recent_times, [row.get("time", math.nan) for row in rows])


@pytest.mark.parametrize(
    "values", [[-1.5, -9.5, 12.5], [9.1e-5, 9.12e-5], [9.5, 10.5, 100.0], [1e22, 1e-7, 2.5], [3, 3.5]]
)
def test_the_least_and_the_largest_are_found_whatever_the_texts(tmp_path, values):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": i, "x": values[i % len(values)]}) + "\n" for i in range(60)))
    curve = scan_rows(str(path)).curves["x"]
    assert (curve.least, curve.largest) == (min(values), max(values))


def test_a_text_that_is_no_number_makes_its_line_no_row(tmp_path):
    lines = [f'{{"step": {i}, "loss": 0.{i + 11}}}\n' for i in range(50)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join([*lines[:20], '{"step": 20, "loss": 0.0-3}\n', *lines[20:]]))
    curve = scan_rows(str(path)).curves["loss"]
    assert curve.best == (0.11, 0) and len(curve.series.steps) == 50


def test_a_picture_has_all_points_of_a_short_run_and_some_of_a_long_one(tmp_path, monkeypatch):
    rows = [{"step": i, "loss": 1.0 / (i + 1)} | ({"test/loss": 2.0 + i} if i % 10 == 9 else {}) for i in range(500)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    series = scan_rows(str(path)).curves["loss"].series
    assert (series.steps, series.values) == ([row["step"] for row in rows], [row["loss"] for row in rows])
    monkeypatch.setattr(row_scan, "_MOST_POINTS", 100)
    monkeypatch.setattr(row_scan, "_BLOCK_BYTES", 1000)
    curves = scan_rows(str(path)).curves
    steps = curves["loss"].series.steps
    assert 50 <= len(steps) <= 100 and steps[0] == 0 and np.diff(steps).max() <= 16 and steps[-1] >= 484
    assert len(curves["test/loss"].series.steps) == 50


def test_lines_are_whole_wherever_a_block_ends(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content := b"".join(b"%d" % 10**i + b"\r\n" * (i % 2) + b"\n" for i in range(50)) + b"half")
    for size in (1, 7, 64, 2**20):
        monkeypatch.setattr(row_scan, "_BLOCK_BYTES", size)
        lines = [line for lines in read_blocks(str(path)) for line in lines if line]
        assert lines == [line for line in content.splitlines() if line]


@pytest.mark.slow
def test_few_of_many_rows_are_parsed_in_little_memory(tmp_path):
    rng = random.Random(0)
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(100_000):
            row = {"step": step, "time": 1e9 + step} | {f"m{i}": rng.random() for i in range(12)}
            file.write(json.dumps(row) + "\n")
    program = r"""
        import pathlib, re, sys, unittest.mock
        from distloop.reports.row_scan import records, scan_rows
        with unittest.mock.patch.object(records, "parse_row", side_effect=records.parse_row) as parse_row:
            scan = scan_rows(sys.argv[1] + "/metrics.jsonl")
        status = pathlib.Path("/proc/self/status").read_text()
        print(len(scan.curves), parse_row.call_count, int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1000)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    curves, parsed, megabytes = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert int(curves) == 12 and 0 < int(parsed) < 2_000  # the last rows, and one of each shape
    assert float(megabytes) < 100
