"""Report: compares runs in tables, as JSON or as a picture; without TensorFlow.

    python -m distloop.report runs/a runs/b
    python -m distloop.report runs                  # all runs in a directory
    python -m distloop.report runs --json           # for programs
    python -m distloop.report runs --png=runs.png   # curves, with matplotlib
    python -m distloop.report runs --csv=runs.csv   # all rows, for a spreadsheet
    python -m distloop.report s3://bucket/runs      # runs in a bucket
    python -m distloop.report --diff runs/a runs/b  # where two runs differ
    python -m distloop.report --diff runs/a expected.jsonl --tolerance=1e-5     # for CI
    python -m distloop.report runs/a --rows 1234    # the examples of a step
    python -m distloop.report runs/a --card         # to repeat a run
    python -m distloop.report --environment         # for a bug report

It shows for each run the status, steps, training time (without tracing,
evaluations, saves and pauses), speed, examples and epochs that it has trained
on, with the fractions of a mixture, and the hours that devices were held over all
starts (with tracing, evaluations and saves); for each metric the last value,
the best and its step, the least and largest; incidents; settings that differ.

"busy" is the fraction of the time in which the GPUs, or without GPUs the cores,
computed at the last log. Of GPUs it shows the memory in use on the fullest, the
power of all, the temperature of the hottest, and the energy of all over all
starts, where NVIDIA's driver reports them.

Goodput is the fraction of the time, from the first process of a run to its last
log, that went to steps that count: not to steps that a later start did again,
nor to saving, starting, restoring, tracing, or waiting for a start.

Of runs that differ in `seed` alone it shows mean, deviation and number of the
best or last values, and of two such groups the differences by seed.

It also shows, by device, the memory of weights, optimizer slots and averages as
they are placed, of activations and gradients if `--memory` estimated them in
this workdir ("-": it did not).

Whether smaller or larger is better follows from a metric's name: smaller for
`loss`, `error`, `mae`, `perplexity` and similar names, larger for `accuracy`,
`auc`, `precision`, `recall`, `f1` and similar names; for these the best run
comes first. Other metrics have no best. Whether a run is still training is a
guess from the age of its last row.

If standard output is not a terminal, there are no colors and no wrapping: each
line is whole, names its run and metric, and has two or more spaces between
columns.
"""

import argparse
import csv
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NoReturn

import rich.console

from distloop.atomic_files import replacing
from distloop.installed import import_part
from distloop.log import printable
from distloop.monitoring.curves import Picture
from distloop.reports import expected_rows, report_tables, run_card, seeds
from distloop.reports.row_scan import Curve, read_blocks
from distloop.reports.runs import Run, by_metric, different_settings, is_workdir, load_all
from distloop.urls import absolute, expand, is_url
from distloop.workdir import ledger, records
from distloop.workdir.directory import fetch_reports
from distloop.workdir.run_files import better

# What `--json` has of each run as it is.
_JSON_NAMES = "name status step until stop_reason training_secs elapsed_secs silent_secs steps_per_sec".split()
_JSON_NAMES += "examples_per_sec step_flops device_hours seen gpus starts time_spent incidents settings".split()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the report; returns its exit code: 2 if there is nothing to report."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        with tempfile.TemporaryDirectory(prefix="distloop_") as root:
            return _answer(options, root)
    except ValueError as error:
        _complain(str(error))
        return 2


def _answer(options: argparse.Namespace, root: str) -> int:
    """Prints what was asked for, and returns the exit code; files of runs at URLs are brought below `root`."""
    if options.diff and os.path.isfile(options.workdirs[1]):
        difference = expected_rows.first_difference(options.workdirs[0], options.workdirs[1], options.tolerance or 0.0)
        print(printable(difference or f"The run has the numbers of {options.workdirs[1]}."))
        return 1 if difference else 0
    if options.diff:
        difference = import_part("replay.diff", "--diff").compare(*options.workdirs)
        print(printable(str(difference)))
        return 0 if difference.are_equal else 1
    runs = _load(options.workdirs, root) if options.workdirs else []
    if options.rows is not None or options.steps_of is not None:
        examples_of_steps = import_part("replay.examples_of_steps", "--rows")  # imports TensorFlow
        examples_of_steps.print_examples(options.workdirs[0], options.rows, options.steps_of)
    elif options.card:
        print("\n\n".join(map(run_card.describe, runs)))
    elif options.environment:
        print(import_part("audit.bug_report", "--environment").describe(runs))
    else:
        _write_files(runs, options)
        for table in () if options.json else report_tables.make(runs):
            report_tables.show(table, rich.console.Console(highlight=False))
        if options.json:
            print(json.dumps(_as_json(runs), indent=2, allow_nan=False))
    return 0


def _as_json(runs: Sequence[Run]) -> Any:
    """Returns the content of the tables as JSON can hold it; nan becomes null."""

    def of_metric(series: Curve) -> dict[str, Any]:
        value, step = series.best or (None, None)
        numbers = {"last": series.last, "least": series.least, "largest": series.largest}
        return numbers | {"better": better(series.name), "best": value, "best_step": step}

    listed = [
        {name: getattr(run, name) for name in _JSON_NAMES}
        | {
            "workdir": absolute(run.path),
            "goodput": ledger.goodput(run.time_spent),
            "memory": None if run.memory is None else {"devices": run.memory},
            "metrics": {name: of_metric(series) for name, series in run.series.items()},
        }
        for run in runs
    ]
    content = {"runs": listed, "different_settings": list(different_settings(runs)), "seeds": seeds.summarize(runs)}
    return json.loads(json.dumps(content), parse_constant=lambda name: None)


def _load(paths: Sequence[str], root: str) -> list[Run]:
    """Returns the runs; of those at URLs, what is read is brought below `root`."""
    urls = {fetch_reports(path, root): path.rstrip("/") for path in paths}
    runs = load_all(list(urls), _complain)
    for i, run in enumerate(runs):
        for path in [path for path in urls if f"{run.path}/".startswith(f"{path}/")]:
            runs[i] = dataclasses.replace(run, path=urls[path] + run.path.removeprefix(path))
    return runs


class _ReportParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see --help.")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _ReportParser(prog="python -m distloop.report", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("workdirs", metavar="WORKDIR", nargs="*", help="of a run, or a directory of runs; URLs, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    parser.add_argument("--png", metavar="PATH", help="also write the curves as a picture; needs matplotlib")
    parser.add_argument("--csv", metavar="PATH", help="also write the rows as a table, a column a name")
    parser.add_argument("--diff", action="store_true", help="compare two runs, or a run and expected rows: code 1 or 0")
    parser.add_argument("--tolerance", metavar="X", type=float, help="of --diff RUN FILE, relative; default: 0")
    parser.add_argument("--rows", metavar="STEP", type=int, help="print the numbers of the examples in a step")
    parser.add_argument("--steps-of", metavar="ROW", type=int, help="print the steps that an example was in")
    parser.add_argument("--card", action="store_true", help="print how to repeat a run, in Markdown")
    parser.add_argument("--environment", action="store_true", help="print what a bug report needs: versions, devices")
    options = parser.parse_args(arguments)
    if not options.workdirs and not options.environment:
        parser.error("no workdir was given: give one, or several to compare")
    if options.diff and len(options.workdirs) != 2:
        parser.error(f"--diff was given with {len(options.workdirs)} workdirs: give two")
    options.workdirs = list(map(expand, options.workdirs))
    if absent := [p for p in options.workdirs if options.diff and not is_url(p) and not os.path.exists(p)]:
        parser.error(f"--diff {absent[0]!r} was given, and there is no such file or directory: correct the path")
    is_of_file = options.diff and os.path.isfile(options.workdirs[1])
    if options.tolerance is not None and not (is_of_file and 0 <= options.tolerance < 1):
        parser.error(f"--tolerance={options.tolerance} was given: give a number from 0 to 1 beside --diff RUN FILE")
    if (options.rows is not None or options.steps_of is not None) and len(options.workdirs) != 1:
        parser.error(f"--rows or --steps-of was given with {len(options.workdirs)} workdirs: give one")
    return options


def _complain(sentence: str) -> None:
    """Prints a sentence apart from the tables."""
    print(f"distloop.report: {printable(sentence)}", file=sys.stderr)


def _write_files(runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Writes the picture and the table of rows that were asked for."""
    for path in filter(None, (options.png, options.csv)):
        _require_replaceable(path)
    try:
        if path := options.png:
            Picture({name: {run.name: c.series for run, c in group} for name, group in by_metric(runs)}).save(path)
            _complain(f"the curves are in {path}")
        if path := options.csv:
            _write_csv(runs, path)
            _complain(f"the rows are in {path}")
    except OSError as error:
        raise ValueError(f"{path!r} cannot be written ({error.strerror}): give another path.") from error


def _require_replaceable(path: str) -> None:
    """Raises a ValueError if a path is within a run, whose files are not to be replaced, or holds what is no file."""
    for workdir in filter(is_workdir, map(str, pathlib.Path(os.path.realpath(path), "-").parents)):  # the path, too
        raise ValueError(f"{path!r} is in {workdir!r}, which holds a run: give a path outside of the run.")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path!r} is a directory or a device: give the path of a file.")


def _write_csv(runs: Sequence[Run], path: str) -> None:
    """Writes all rows of the runs: a column for each name in any of them, empty where a row has no such number."""
    names = dict.fromkeys(["run", "step", "time", *(name for run in runs for name in run.rows.names)])
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(names))
        writer.writeheader()
        for run in [run for run in runs if run.rows.last]:
            rows = (records.parse_row(line) for lines in read_blocks(run.file) for line in lines)
            writer.writerows({"run": run.name, **records.as_metrics(row)} for row in rows if row)
