"""Plan: how often to save, and what share of the time goes to steps that count, for 4 to 10,000 workers.

    python -m distloop.plan --workdir=runs/digits --failures_per_worker_hour=0.001
    python -m distloop.plan --step_secs=1 --save_secs=60 --save_pause_secs=5 --workers=8,512
    python -m distloop.plan --json                  # for programs

It simulates runs in which workers fail independently of each other; whenever one fails, all start again and restore
the newest state. Goodput is the time of the steps that count, divided by all time. The intervals are the time of the
steps from one save to the next: Young's (1974) and Daly's (2006) formulas, and the best of those that were simulated.
Beside checkpoints on a disk, the state may be copied into the memory of all hosts, more often (`copy_every`).

Costs come from flags, else from what `--workdir` recorded, else they are assumed; the first table says which. They are
taken to be the same for any number of workers. The assumed failures are those of Llama 3's training: 419 in 54 days
on 2,048 hosts of 8 GPUs ("The Llama 3 Herd of Models", 2024, section 3.3.4). It starts without TensorFlow.
"""

import argparse
import json
import math
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from distloop.diagnostics import goodput_model
from distloop.diagnostics.goodput_model import Costs, Failures, Plan
from distloop.distributed import heartbeat
from distloop.monitoring import run_costs, run_files, text_tables
from distloop.monitoring.records import show_number
from distloop.monitoring.text_tables import Table

_WORKERS = "4,16,64,256,1000,4000,10000"
_MIN_GAIN = 0.01  # of the time, from which copies in memory are said to pay

# name -> default, help; None: it follows from another one
_COSTS: dict[str, tuple[float | None, str]] = {
    "step_secs": (1.0, "seconds of a step (default: 1)"),
    "save_pause_secs": (5.0, "seconds that a save holds training up (default: 5)"),
    "save_secs": (60.0, "seconds from the begin of a save until its checkpoint is whole (default: 60)"),
    "restore_secs": (30.0, "seconds to restore a checkpoint (default: 30)"),
    "start_secs": (120.0, "seconds from a new process to its first step, without restoring (default: 120)"),
    "notice_secs": (4.0, "seconds from a failure until new processes are started (default: 4)"),
    "copy_secs": (None, "seconds that a copy in memory holds training up (default: save_pause_secs)"),
    "copy_restore_secs": (None, "seconds to restore a copy in memory (default: restore_secs)"),
    "copies_lost": (0.01, "fraction of failures that take all copies in memory along (default: 0.01)"),
    "failures_per_worker_hour": (1.6e-4, "failures of one worker in an hour (default: 0.00016)"),
}


class _Value(NamedTuple):
    """A cost, and where it comes from."""

    value: float
    source: str


class _Row(NamedTuple):
    """The plans for a number of workers; a single one has no other host whose copy would be left."""

    workers: int
    mean_secs: float
    young_secs: float
    daly_secs: float
    saves: Plan
    copies: Plan | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the plan; returns the exit code: 2 if there is none."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        values = _find_costs(options)
    except ValueError as error:
        print(f"distloop.plan: {error}", file=sys.stderr)
        return 2
    costs = Costs(**{name: value for name, (value, _) in values.items() if name != "failures_per_worker_hour"})
    failures = goodput_model.draw_failures(options.seed)
    rate = values["failures_per_worker_hour"].value
    rows = [_plan(costs, workers, rate, failures) for workers in options.workers]
    if options.json:
        print(json.dumps(_as_json(values, rows), indent=2, allow_nan=False))
        return 0
    console = text_tables.make_console()
    for table in (_costs_table(values), _plans_table(rows)):
        text_tables.show(table, console)
    print(_verdict(rows))
    return 0


def _plan(costs: Costs, workers: int, failures_per_worker_hour: float, failures: Failures) -> _Row:
    mean_secs = goodput_model.mean_secs(workers, failures_per_worker_hour)
    saves = goodput_model.plan_saves(costs, mean_secs, failures)
    copies = goodput_model.plan_copies(costs, mean_secs, failures) if workers > 1 else None
    young_secs = goodput_model.young_secs(costs.save_pause_secs, mean_secs)
    daly_secs = goodput_model.daly_secs(costs.save_pause_secs, mean_secs)
    return _Row(workers, mean_secs, young_secs, daly_secs, saves, copies)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see --help.")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m distloop.plan", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workdir", default="", help="of a run, whose costs are used")
    parser.add_argument("--workers", default=_WORKERS, help=f"numbers of workers; {_WORKERS}")
    for name, (_, text) in _COSTS.items():
        parser.add_argument(f"--{name}", type=float, metavar="X", help=text)
    parser.add_argument("--seed", type=int, default=0, help="of the simulated failures; 0")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    options = parser.parse_args(arguments)
    given = options.workers
    for name in _COSTS:
        if (value := getattr(options, name)) is not None:
            _check(name, value)
    try:
        options.workers = sorted({int(text) for text in options.workers.split(",")})
        if options.workers[0] < 1:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--workers={given} was given: give whole numbers of 1 or more, as in --workers=8,512."
        ) from None
    return options


def _check(name: str, value: float) -> None:
    is_share, is_step = name == "copies_lost", name == "step_secs"
    if not (0 <= value < math.inf) or (is_share and value > 1) or (is_step and not value):
        allowed = "a fraction from 0 to 1" if is_share else "more than 0" if is_step else "0 or more"
        raise ValueError(f"--{name}={value:g} was given: give {allowed}.")


def _find_costs(options: argparse.Namespace) -> dict[str, _Value]:
    """Returns each cost: the flag's, else the measured one, else the assumed one.

    Raises:
        ValueError: if the workdir holds no run that was measured, or a pause is longer than its save.
    """
    values = {name: _Value(default, "assumed") for name, (default, _) in _COSTS.items() if default is not None}
    values |= _measure(options.workdir) if options.workdir else {}
    given = {name: getattr(options, name) for name in _COSTS}
    values |= {name: _Value(value, "given") for name, value in given.items() if value is not None}
    pause, save = values["save_pause_secs"], values["save_secs"]
    if pause.value > save.value:
        if "assumed" not in (pause.source, save.source):
            raise ValueError(
                f"save_pause_secs={pause.value:g} ({pause.source}) is a part of save_secs={save.value:g} "
                f"({save.source}), and longer: give both."
            )
        shorter = "save_pause_secs" if pause.source == "assumed" else "save_secs"
        values[shorter] = _Value(save.value if shorter == "save_pause_secs" else pause.value, "assumed: the whole save")
    values.setdefault("copy_secs", _Value(values["save_pause_secs"].value, "assumed: as for a save"))
    values.setdefault("copy_restore_secs", _Value(values["restore_secs"].value, "assumed: as for a checkpoint"))
    return {name: values[name] for name in _COSTS}


def _measure(workdir: str) -> dict[str, _Value]:
    run, *others = run_files.load_all([workdir])
    if others:
        raise ValueError(f"--workdir={workdir!r} holds {len(others) + 1} runs: give the workdir of one.")
    costs = run_costs.measure(run)
    if "step_secs" not in costs:
        raise ValueError(f"Nothing is measured yet in --workdir={workdir!r}: give that of a run that has logged steps.")
    return {name: _Value(secs, f"measured, n = {count:,}") for name, (secs, count) in costs.items()}


def _costs_table(values: Mapping[str, _Value]) -> Table:
    rows = [[name, show_number(value), source] for name, (value, source) in values.items()]
    return Table("Costs", ["cost", "value", "from"], rows)


def _plans_table(rows: Sequence[_Row]) -> Table:
    header = ["workers", "failure every", "Young", "Daly", "best", "goodput"]
    header += ["copy every", "with copies", "heartbeats/s"]
    return Table(
        "Time of the steps between two saves",
        header,
        [
            [
                str(row.workers),
                *map(_show_secs, (row.mean_secs, row.young_secs, row.daly_secs, row.saves.save_every_secs)),
                f"{row.saves.goodput:.2%}",
                _show_secs(row.copies.copy_every_secs) if row.copies else "-",
                f"{row.copies.goodput:.2%}" if row.copies else "-",
                show_number(heartbeat.datagrams_per_sec(row.workers)),
            ]
            for row in rows
        ],
    )


def _verdict(rows: Sequence[_Row]) -> str:
    """Returns a sentence about the number of workers from which copies in memory pay."""
    gains = [row.copies.goodput - row.saves.goodput if row.copies else 0.0 for row in rows]
    paying = [row.workers for row, gain in zip(rows, gains, strict=True) if gain >= _MIN_GAIN]
    if not paying:
        return f"Copies in memory gain less than {_MIN_GAIN:.0%} of the time for these numbers of workers."
    return f"Copies in memory gain {_MIN_GAIN:.0%} of the time or more from {min(paying)} workers on."


def _as_json(values: Mapping[str, _Value], rows: Sequence[_Row]) -> dict[str, Any]:
    """Returns the tables for programs; null stands for an interval without end."""
    plans = [
        {
            "workers": row.workers,
            "failure_every_secs": _finite(row.mean_secs),
            "young_secs": _finite(row.young_secs),
            "daly_secs": _finite(row.daly_secs),
            "save_every_secs": _finite(row.saves.save_every_secs),
            "goodput": row.saves.goodput,
            "copies": row.copies
            and {
                "copy_every_secs": _finite(row.copies.copy_every_secs),
                "save_every_secs": _finite(row.copies.save_every_secs),
                "goodput": row.copies.goodput,
            },
            "heartbeats_per_sec": heartbeat.datagrams_per_sec(row.workers),
        }
        for row in rows
    ]
    return {"costs": {name: value._asdict() for name, value in values.items()}, "plans": plans}


def _finite(secs: float) -> float | None:
    return secs if math.isfinite(secs) else None


def _show_secs(secs: float) -> str:
    """Returns a duration as `--checkpoint_every` takes it; "never" for one without end."""
    if secs == math.inf:
        return "never"
    size, unit = next((size, unit) for size, unit in ((3600, "h"), (60, "min"), (0, "s")) if secs >= 2 * size)
    return f"{show_number(float(f'{secs / (size or 1):.3g}'))} {unit}"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    sys.exit(main())
