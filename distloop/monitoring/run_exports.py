"""Run exports: runs as JSON can hold them, and their rows as a table, for other programs; without TensorFlow.

json.dumps(as_json(runs), allow_nan=False)
write_csv(runs, "runs.csv")
"""

import math
import os
from collections.abc import Sequence
from typing import Any

from distloop.atomic_files import replacing
from distloop.monitoring import ledger, run_files
from distloop.monitoring.csv_writer import write_table
from distloop.monitoring.run_files import Run, Series
from distloop.urls import is_url


def as_json(runs: Sequence[Run]) -> Any:
    """Returns the content of the tables as JSON can hold it; nan becomes null."""

    def known(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    def of_metric(series: Series) -> dict[str, Any]:
        value, step = series.best or (None, None)
        numbers = {"last": series.last, "least": series.least, "largest": series.largest}
        rest = {"better": run_files.better(series.name), "best": value, "best_step": step}
        return {name: known(number) for name, number in numbers.items()} | rest

    listed = [
        {
            "name": run.name,
            "workdir": run.path if is_url(run.path) else os.path.abspath(run.path),
            "status": run.status,
            "step": run.step,
            "until": run.until,
            "stop_reason": run.stop_reason,
            "training_secs": known(run.training_secs),
            "elapsed_secs": known(run.elapsed_secs),
            "silent_secs": run.silent_secs,
            "steps_per_sec": known(run.steps_per_sec),
            "examples_per_sec": known(run.examples_per_sec),
            "device_hours": known(run.device_hours),
            "seen": {name: known(value) for name, value in run.seen.items()},
            "starts": run.starts,
            "time_spent": run.time_spent,
            "goodput": known(ledger.goodput(run.time_spent)),
            "memory": None if run.memory is None else run.memory._asdict(),
            "metrics": {name: of_metric(series) for name, series in run.series.items()},
            "incidents": run.incidents,
            "settings": run.settings,
        }
        for run in runs
    ]
    return _without_nan({"runs": listed, "different_settings": list(run_files.different_settings(runs))})


def write_csv(runs: Sequence[Run], path: str) -> None:
    """Writes all rows of the runs: a column for each name in any of them, empty where a row has no such number.

    Raises:
        ValueError: if the file cannot be written.
    """
    names = dict.fromkeys(["run", "step", "time", *(name for run in runs for row in run.rows for name in row)])
    try:
        with replacing(path) as temporary:
            write_table(temporary, list(names), ({"run": run.name, **row} for run in runs for row in run.rows))
    except OSError as error:
        raise ValueError(
            f"{path!r} cannot be written ({error.strerror}): give a file in a directory that is there."
        ) from error


def _without_nan(value: Any) -> Any:
    """Returns a value of JSON with null in place of numbers that are not finite, as a file of a run may hold them."""
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
