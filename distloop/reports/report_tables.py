"""Report tables: the tables of runs that `python -m distloop.report` prints.

for table in make(runs):
    show(table, console)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import rich.console
import rich.table
from rich.text import Text

from distloop.monitoring import text_tables
from distloop.monitoring.text_tables import Table
from distloop.monitoring.timing import largest_fractions, show_percent, show_secs
from distloop.reports.runs import Run, by_metric, different_settings
from distloop.reports.seeds import summarize
from distloop.workdir import ledger
from distloop.workdir.records import show_bytes, show_number

# Columns of text, aligned to the left.
_LEFT = ("run", "status", "device", "metric", "what", "why", "cost", "from")
_MIN_NAME, _MIN_WORDS = 12, 24  # the least widths that names and other text are wrapped to
_STYLES = {("status", "complete"): "green", ("status", "running"): "cyan", ("status", "interrupted"): "yellow"}
_STYLES |= {("status", "diverged"): "red", ("last", "nan"): "red"}


def make(runs: Sequence[Run]) -> list[Table]:
    """Returns the tables that have rows."""
    tables = (table(runs) for table in (_runs, _metrics, _seeds, _incidents, _time, _gpus, _memory, _settings))
    return [table for table in tables if table.rows]


def show(table: Table, console: rich.console.Console) -> None:
    """Prints a table: on a terminal within its width, else each row in one line."""
    if not text_tables.is_terminal(console):
        text_tables.print_lines(table)
        return
    table = text_tables.printable_cells(table)
    longest = text_tables.widths(table)
    least = [min(n, _MIN_NAME if i < table.num_names else _MIN_WORDS) for i, n in enumerate(longest)]
    names = list(range(table.num_names))
    blocks: list[list[int]] = []  # columns that do not fit follow in a table below
    for i in range(table.num_names, len(table.header)):
        if not blocks or sum(least[j] + text_tables.GAP for j in [*blocks[-1], i]) - text_tables.GAP > console.width:
            blocks.append([*names])
        blocks[-1].append(i)
    for block in blocks:
        if table.title:
            console.print(Text(table.title, style="bold underline"))
        grid = rich.table.Table(box=None, padding=(0, text_tables.GAP, 0, 0), pad_edge=False, header_style="dim")
        for i in block:
            name, is_unwrapped = table.header[i], longest[i] == least[i]
            justify: Literal["left", "right"] = "left" if name in _LEFT or i == 0 else "right"
            grid.add_column(Text(name), justify=justify, overflow="fold", no_wrap=is_unwrapped)
        for row in table.rows:
            grid.add_row(*(Text(row[i], style=table.styles.get((table.header[i], row[i]), "")) for i in block))
        console.print(grid)
        console.print()


def _runs(runs: Sequence[Run]) -> Table:
    speeds = ["training", "steps/s", "examples/s", "operations a step", "busy"]
    header = ["run", "status", "step", *speeds, "examples", "epochs", "device-hours", "silent"]
    rows = [
        [
            run.name,
            run.status,
            f"{run.step}/{run.until}" if run.until else str(run.step),
            show_secs(run.training_secs),
            *map(_show_known, (run.steps_per_sec, run.examples_per_sec, run.step_flops)),
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
    for name, group in by_metric(runs):
        for run, series in group:
            value, step = series.best or (None, None)
            numbers = [_show_known(number) for number in (series.last, value, series.least, series.largest)]
            rows.append([name, run.name, *numbers[:2], "-" if step is None else str(step), *numbers[2:]])
    return Table("Metrics", header, rows, num_names=2, styles=_STYLES)


def _seeds(runs: Sequence[Run]) -> Table:
    """Returns the table of runs that differ in their seeds alone."""
    header = ["metric", "settings", "value", "mean", "deviation", "runs"]
    lines = [line.values() for line in summarize(runs)]
    rows = [[str(value) if isinstance(value, str | int) else _show_known(value) for value in line] for line in lines]
    return Table("Over seeds", header, rows, num_names=2)


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


def _gpus(runs: Sequence[Run]) -> Table:
    """Returns the table of what NVIDIA's driver said of all GPUs of a run together."""
    units = {"gpu_memory_gb": "GB", "gpu_watts": "W", "gpu_temperature": "°C", "energy_kwh": "kWh"}
    rows = []
    for run in (run for run in runs if run.gpus):
        shown = {name: show_number(number) for name, number in run.gpus.items()}
        rows.append([run.name, *(f"{shown[name]} {unit}" if name in shown else "-" for name, unit in units.items())])
    return Table("GPUs at the last log", ["run", "memory", "power", "temperature", "energy"], rows)


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
    different = different_settings(runs)
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
