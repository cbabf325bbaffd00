"""Report: compares runs in tables, as JSON or as a picture; without TensorFlow.

    python -m distloop.report runs/a runs/b
    python -m distloop.report runs                  # all runs in a directory
    python -m distloop.report runs --json           # for programs
    python -m distloop.report runs --png=runs.png   # curves, with matplotlib
    python -m distloop.report runs --csv=runs.csv   # all rows, for a spreadsheet
    python -m distloop.report s3://bucket/runs      # runs in a bucket
    python -m distloop.report --diff runs/a runs/b  # where two runs differ
    python -m distloop.report runs/a --rows 1234    # the examples of a step
    python -m distloop.report --environment         # for a bug report

It shows for each run the status, steps, training time (without tracing,
evaluations, saves and pauses), speed, examples and epochs that it has trained
on, with the fractions of a mixture, and the hours that devices were held over all
starts (with tracing, evaluations and saves); for each metric the last value,
the best and its step, the least and largest; incidents; settings that differ.

"busy" is the fraction of the time in which the GPUs, or without GPUs the cores,
computed at the last log.

Goodput is the fraction of the time, from the first process of a run to its last
log, that went to steps that count: not to steps that a later start did again,
nor to saving, starting, restoring, tracing, or waiting for a start.

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
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import rich.console

from distloop.atomic_files import replacing
from distloop.installed import import_part
from distloop.log import printable
from distloop.monitoring import text_tables
from distloop.monitoring.curves import Picture
from distloop.monitoring.text_tables import Table
from distloop.monitoring.timing import largest_fractions, show_percent, show_secs
from distloop.urls import absolute, expand
from distloop.workdir import ledger, records, run_files
from distloop.workdir.directory import fetch_reports
from distloop.workdir.records import show_bytes, show_number
from distloop.workdir.run_files import Run, Series

_STYLES = {
    ("status", "complete"): "green",
    ("status", "running"): "cyan",
    ("status", "interrupted"): "yellow",
    ("status", "diverged"): "red",
    ("last", "nan"): "red",
}


# What `--json` has of each run as it is.
_JSON_NAMES = (
    *("name", "status", "step", "until", "stop_reason", "training_secs", "elapsed_secs", "silent_secs"),
    *("steps_per_sec", "examples_per_sec", "device_hours", "seen", "starts", "time_spent"),
    *("incidents", "settings"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the report; returns its exit code: 2 if there is nothing to report."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        if options.diff:
            difference = import_part("replay.diff", "--diff").compare(*options.workdirs)
            print(printable(str(difference)))
            return 0 if difference.are_equal else 1
        runs = _load(options) if options.workdirs else []
        if options.rows is not None or options.steps_of is not None:
            examples_of_steps = import_part("replay.examples_of_steps", "--rows")  # imports TensorFlow
            examples_of_steps.print_examples(options.workdirs[0], options.rows, options.steps_of)
            return 0
        if options.environment:
            print(import_part("audit.bug_report", "--environment").describe(runs))
            return 0
        _write_files(runs, options)
    except ValueError as error:
        _complain(str(error))
        return 2
    if options.json:
        print(json.dumps(_as_json(runs), indent=2, allow_nan=False))
        return 0
    console = rich.console.Console(highlight=False)
    for table in (_runs(runs), _metrics(runs), _incidents(runs), _time(runs), _memory(runs), _settings(runs)):
        if table.rows:
            text_tables.show(table, console)
    return 0


def _as_json(runs: Sequence[Run]) -> Any:
    """Returns the content of the tables as JSON can hold it; nan becomes null."""

    def of_metric(series: Series) -> dict[str, Any]:
        value, step = series.best or (None, None)
        numbers = {"last": series.last, "least": series.least, "largest": series.largest}
        return numbers | {"better": run_files.better(series.name), "best": value, "best_step": step}

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
    return records.without_nan({"runs": listed, "different_settings": list(run_files.different_settings(runs))})


def _load(options: argparse.Namespace) -> list[Run]:
    """Returns the runs; of those at URLs, what is read is brought here for as long as that takes."""
    with tempfile.TemporaryDirectory(prefix="distloop_") as root:
        urls = {fetch_reports(path, root): path.rstrip("/") for path in options.workdirs}
        runs = run_files.load_all(list(urls), _complain)
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
    parser.add_argument(
        "workdirs", metavar="WORKDIR", nargs="*", help="workdir of a run, or a directory of workdirs; URLs, too"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    parser.add_argument("--png", metavar="PATH", help="also write the curves as a picture; needs matplotlib")
    parser.add_argument(
        "--csv", metavar="PATH", help="also write the rows of metrics.jsonl as a table, a column a name"
    )
    parser.add_argument("--diff", action="store_true", help="compare two runs; code 1 if they differ, 0 if not")
    parser.add_argument("--rows", metavar="STEP", type=int, help="print the numbers of the examples in a step")
    parser.add_argument("--steps-of", metavar="ROW", type=int, help="print the steps that an example was in")
    parser.add_argument("--environment", action="store_true", help="print what a bug report needs: versions, devices")
    options = parser.parse_args(arguments)
    if not options.workdirs and not options.environment:
        parser.error("no workdir was given: give one, or several to compare")
    if options.diff and len(options.workdirs) != 2:
        parser.error(f"--diff was given with {len(options.workdirs)} workdirs: give two")
    if (options.rows is not None or options.steps_of is not None) and len(options.workdirs) != 1:
        parser.error(f"--rows or --steps-of was given with {len(options.workdirs)} workdirs: give one")
    try:
        options.workdirs = list(map(expand, options.workdirs))
    except ValueError as error:
        parser.error(str(error))
    return options


def _complain(sentence: str) -> None:
    """Prints a sentence apart from the tables."""
    print(f"distloop.report: {printable(sentence)}", file=sys.stderr)


def _write_files(runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Writes the picture and the table of rows that were asked for."""
    try:
        if path := options.png:
            charts = {name: {run.name: series for run, series in group} for name, group in run_files.by_metric(runs)}
            Picture(charts).save(path)
            _complain(f"the curves are in {path}")
        if path := options.csv:
            _write_csv(runs, path)
            _complain(f"the rows are in {path}")
    except OSError as error:
        raise ValueError(f"{path!r} cannot be written ({error.strerror}): give another path.") from error


def _write_csv(runs: Sequence[Run], path: str) -> None:
    """Writes all rows of the runs: a column for each name in any of them, empty where a row has no such number."""
    names = dict.fromkeys(["run", "step", "time", *(name for run in runs for row in run.rows for name in row)])
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(names))
        writer.writeheader()
        writer.writerows({"run": run.name, **row} for run in runs for row in run.rows)


def _runs(runs: Sequence[Run]) -> Table:
    speeds = ["training", "steps/s", "examples/s"]
    header = ["run", "status", "step", *speeds, "busy", "examples", "epochs", "device-hours", "silent"]
    rows = [
        [
            run.name,
            run.status,
            f"{run.step}/{run.until}" if run.until else str(run.step),
            show_secs(run.training_secs),
            _show_known(run.steps_per_sec),
            _show_known(run.examples_per_sec),
            _show_known(run.busy_fraction, show_percent),
            _show_examples(run.seen),
            _show_known(run.seen.get("epochs_seen")),
            _show_known(run.device_hours),
            "-" if run.status in ("complete", "stopped") else show_secs(run.silent_secs),
        ]
        for run in runs
    ]
    return Table("Runs", header, rows, styles=_STYLES)


def _metrics(runs: Sequence[Run]) -> Table:
    """Returns the table of metrics."""
    header = ["metric", "run", "last", "best", "at step", "least", "largest"]
    rows = []
    for name, group in run_files.by_metric(runs):
        for run, series in group:
            value, step = series.best or (None, None)
            numbers = [_show_known(number) for number in (series.last, value, series.least, series.largest)]
            rows.append([name, run.name, *numbers[:2], "-" if step is None else str(step), *numbers[2:]])
    return Table("Metrics", header, rows, num_names=2, styles=_STYLES)


def _incidents(runs: Sequence[Run]) -> Table:
    """Returns the table of rollbacks, failures, changes of workers and early stops."""
    rows = []
    for run in runs:
        for row in run.incidents:
            keys = ("step", "action", "batch", "checkpoint", "left_out", "reason")
            rows.append([run.name, *(_show_value(row.get(key)) for key in keys)])
        if run.stop_reason is not None:
            rows.append([run.name, str(run.step), "stop", "-", "-", "-", run.stop_reason])
    return Table("Incidents", ["run", "step", "what", "batch", "back to", "left out", "why"], rows)


def _time(runs: Sequence[Run]) -> Table:
    """Returns the table of where the time of all starts went, the largest fraction first, and the goodput."""
    fractions = {run.name: largest_fractions(run.time_spent) for run in runs if run.time_spent}
    largest = {name: max(of.get(name, 0.0) for of in fractions.values()) for of in fractions.values() for name in of}
    names = sorted(largest, key=lambda name: -largest[name])
    rows = []
    for run in (run for run in runs if run.name in fractions):
        percents = [show_percent(fractions[run.name].get(name, 0.0)) for name in names]
        times = [show_secs(sum(run.time_spent.values())), show_percent(ledger.goodput(run.time_spent))]
        rows.append([run.name, *times, *percents])
    return Table("Where the time went, over all starts", ["run", "time", "goodput", *names], rows)


def _memory(runs: Sequence[Run]) -> Table:
    """Returns the table of bytes by device: of variables, and of what `--memory` estimated."""
    memories = [(run.name, run.memory) for run in runs if run.memory is not None]
    found = {kind for _, memory in memories for held in memory.values() for kind in held}
    kinds = [*(kind for kind in ledger.KINDS if kind in found), *sorted(found.difference(ledger.KINDS))]
    rows = [
        [name, device, *(_show_known(held.get(kind), show_bytes) for kind in kinds), show_bytes(sum(held.values()))]
        for name, memory in memories
        for device, held in memory.items()
    ]
    return Table("Memory", ["run", "device", *kinds, "together"], rows, num_names=2)


def _settings(runs: Sequence[Run]) -> Table:
    """Returns the table of settings that differ."""
    different = run_files.different_settings(runs)
    rows = [[run.name, *map(_show_value, values)] for run, *values in zip(runs, *different.values(), strict=True)]
    return Table("Settings that differ", ["run", *different], rows if different else [])


def _show_known(value: float | None, show: Callable[[float], str] = show_number) -> str:
    return "-" if value is None else show(value)


def _show_examples(seen: Mapping[str, float]) -> str:
    """Returns the examples that a run has seen, with the fractions of a mixture's sources."""
    counts = {name.rpartition("/")[0]: seen[name] for name in seen if name.endswith("/examples_seen")}
    fractions = ", ".join(f"{name} {count / max(1.0, sum(counts.values())):.0%}" for name, count in counts.items())
    return _show_known(seen.get("examples_seen")) + (f" ({fractions})" if fractions else "")


def _show_value(value: Any) -> str:
    return "-" if value is None else str(value) or "''"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # names that the terminal cannot encode
    sys.exit(main())
