"""Records: reads the JSON files of a run, appends rows, one JSON object per line; describes and formats numbers.

It imports neither TensorFlow nor TensorBoard, and does not know who writes the files. Whatever a file holds, its reader
gets a value that it can use, a warning that names the file, or a ValueError.

    append_row("run/incidents.jsonl", {"step": 250, "reason": "..."})
    rows = read_metrics("run")      # [{"step": 100, "time": 1.8e9, "loss": 0.12, "test/accuracy": 0.98}, ...]
    settings = read_json("run/config.json", instead="the settings are unknown")     # a dict, or None
"""

import difflib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from distloop import urls
from distloop.atomic_files import open_at_once
from distloop.log import log, shown

METRICS = "Metrics"  # loss and metrics: the first group in TensorBoard, which sorts capital letters first
# The numbers that distloop reports itself: group -> name -> description.
GROUPS = {
    METRICS: {
        "loss": "The data term that training minimizes: a weighted mean over the examples since the last row. In an "
        "evaluation: over all its examples.",
        "regularization": "The sum of `model.losses`, such as L2 terms. It is not part of `loss`.",
    },
    "optimizer": {
        "learning_rate": "Of the next step.",
        "gradient_norm": "The global norm of the gradient before clipping.",
        "gradient_noise_scale": "The batch size above which larger batches help less and less, in weights of the loss: "
        "`gradient_trace` / `gradient_square`, each averaged over measurements.",
        "gradient_trace": "The trace of the covariance of an example's gradient, without bias.",
        "gradient_square": "The squared norm of the gradient without its noise, without bias.",
        "clipped_share": "The fraction of the steps since the last row whose gradient was clipped.",
        "loss_scale": "The factor of the loss in float16.",
        "skipped_steps": "Steps since step 0 that changed nothing, because a gradient was not finite.",
        "weight_norm": "The global norm of the weights that train, without tables that are updated by rows.",
        "update_norm": "How far the weights moved since the last histograms: the norm of the difference.",
        "update_ratio": "`update_norm` divided by `weight_norm`.",
    },
    "data": {
        "examples_seen": "Examples that the run has trained on since step 0; of a mixture, those of each source, too.",
        "epochs_seen": "Passes over the data that the run trains on, with the fraction of the one in progress.",
    },
    "per_layer": {
        "activation_mean": "The mean of a layer's outputs, over the examples of `distloop.ActivationHistograms`.",
        "activation_deviation": "The standard deviation of a layer's outputs over those examples.",
    },
    "speed": {
        "steps_per_sec": "Training steps a second, without evaluations, checkpoints and logging.",
        "examples_per_sec": "Training examples a second, of all replicas together.",
        "tokens_per_sec": "Trained tokens a second, of all replicas together: the sum of the loss's weights.",
        "input_wait": "The fraction of the loop's time that went to waiting for data.",
        "goodput": "The fraction of the time since the run's first process that went to steps that count.",
        "host_share": "The fraction of all time between two loops: evaluations, actions, checkpoints, logging.",
        "save_pause_secs": "How long the last save held training up, in seconds.",
        "save_secs": "How long the last save took until its checkpoint was complete, in seconds.",
        "step_secs_p50": "Half of the steps took no longer, in seconds.",
        "step_secs_p90": "90 % of the steps took no longer, in seconds.",
        "step_secs_p99": "99 % of the steps took no longer, in seconds.",
        "replica_imbalance": "Forward and backward time of the slowest replica, divided by the mean, minus 1.",
        "model_flops_per_sec": "Floating-point operations a second: those of the forward pass, times three.",
        "model_flops_utilization": "`model_flops_per_sec` divided by the peak of the devices.",
    },
    "system": {
        "host_memory_gb": "Peak memory of the first worker's process, in gigabytes.",
        "device_memory_gb": "Peak memory of the fullest GPU of the first worker, in gigabytes.",
        "cpu_utilization": "The fraction of the first worker's cores that its process has used; without GPUs.",
        "gpu_utilization": "The fraction of the last second in which a GPU computed, by NVIDIA's driver; the mean.",
        "gpu_memory_gb": "The memory in use on a GPU by all processes, in gigabytes; the largest.",
        "gpu_watts": "The power that the GPUs of all workers take, by NVIDIA's driver, in watts; the sum.",
        "gpu_temperature": "The temperature of the hottest GPU, by NVIDIA's driver, in degrees Celsius.",
        "energy_kwh": "The energy that the GPUs of all workers took over all starts of the run, in kilowatt-hours.",
        "device_busy_share": "The fraction of the profiled time in which a device of the pipeline computed.",
    },
}

IN_EACH_ROW = frozenset({"step", "time"})  # beside its numbers, which need other names
OF_GPUS = ("gpu_utilization", "gpu_memory_gb", "gpu_watts", "gpu_temperature", "energy_kwh")
# Measurements of time and memory: they differ between runs that compute the same.
OF_THE_MACHINE = frozenset({*GROUPS["speed"], *GROUPS["system"]})
# Numbers about the run rather than the model: written to files, not shown on the console and in reports.
ABOUT_THE_RUN = OF_THE_MACHINE | {*GROUPS["optimizer"], *GROUPS["data"], *GROUPS["per_layer"]} - {"skipped_steps"}

_ENCODER = json.JSONEncoder(allow_nan=False)
_BLOCK_BYTES = 65_536  # read at a time, from the end of a file
_MOST_LEVELS = 100  # of values within values; Python's recursion ends at 1000
_T = TypeVar("_T")


def plain(name: str) -> str:
    """Returns a name in small letters, with underscores alone, so that `val_loss` and `val/loss` are one."""
    return name.lower().replace("/", "_").replace("-", "_")


def closest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the name that is most like another one; None: none is like it, but for a prefix that it lacks."""
    by_form = {plain(known): known for known in names if not plain(name).endswith(f"_{plain(known)}")}
    close = difflib.get_close_matches(plain(name), by_form, 1, cutoff)
    return by_form[close[0]] if close else None


def as_object(value: Any) -> dict[str, Any]:
    """Returns a value of JSON that is an object.

    Raises:
        ValueError: if it is another one.
    """
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value


def as_numbers(values: Any, owner: str, others: type | tuple[type, ...] = ()) -> dict[str, Any]:
    """Returns the numbers of a row as floats, by name.

    Args:
        values: name -> number: a scalar of Python, NumPy, TensorFlow or Keras.
        owner: who returned them, for the message.
        others: the types of values that stay as they are.

    Raises:
        ValueError: if they are something else, or a name is taken.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{owner} returned {shown(values)}; it returns a dict of numbers and media by name, or None.")
    numbers = {}
    for name, value in values.items():
        if not isinstance(name, str) or not name or name in IN_EACH_ROW:
            raise ValueError(
                f"{owner} returned a number under the name {shown(name)}; names are non-empty strings, and each row "
                "has a 'step' and a 'time' of its own: rename it."
            )
        try:
            is_text = isinstance(value, (str, bytes))  # which `float` might read
            numbers[name] = value if isinstance(value, others) else float("" if is_text else value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"{owner} returned {' '.join(shown(value).split())} under {name!r}, which is no number: return a "
                "scalar, or media such as distloop.Text and distloop.Histogram."
            ) from None
    return numbers


def as_best_steps(value: Any) -> dict[str, list[int]]:
    """Returns what `best.json` holds: the steps at which each metric was best."""
    return {metric: [int(step) for step in steps] for metric, steps in value.items()}


def parse_json(data: bytes, read: Callable[[Any], _T]) -> _T:
    """Returns what a function makes of a value of JSON.

    Args:
        data: the content of a file or a line.
        read: takes the value apart, such as `as_object`; it may fail as if there were only values that it wants.

    Raises:
        ValueError: if that is no JSON, is nested too deeply, or lacks what `read` wants.
    """
    try:
        value = json.loads(data)
        if data.count(b"[") + data.count(b"{") > _MOST_LEVELS and _levels(value) > _MOST_LEVELS:
            raise RecursionError
        return read(value)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    except (LookupError, TypeError, AttributeError, OverflowError, OSError) as error:  # OSError: a time of no clock
        raise ValueError(f"it lacks what it should hold, {type(error).__name__}: {error}") from error


def _levels(value: Any) -> int:
    inner: Iterable[Any] = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_levels, inner), default=0)


def read_json(
    path: str,
    read: Callable[[Any], _T] = as_object,  # type: ignore[assignment]
    *,
    instead: str,
    warn: Callable[[str], None] = log.warning,
) -> _T | None:
    """Returns what a function makes of the JSON in a file; None if there is none, or, with a warning, no use in it.

    Args:
        path: the file.
        read: as for `parse_json`.
        instead: what happens without it, for the warning.
        warn: takes the warning.
    """
    return _read_if_any(path, lambda data: parse_json(data, read), instead, warn)


def _read_if_any(path: str, parse: Callable[[bytes], _T], instead: str, warn: Callable[[str], None]) -> _T | None:
    try:
        with open_at_once(path) as file:
            return parse(file.read())
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        warn(f"{path!r} cannot be read ({getattr(error, 'strerror', None) or error}): {instead}.")
    return None


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, float]]:
    """Returns the metrics of a run; the run may still be training.

    Args:
        workdir: the run's workdir; `~` is expanded. Of a URL, the rows that are uploaded.

    Returns:
        One row per log, in order: `step` (an integer), `time` (Unix, seconds), and the metrics that were measured, by
        name. Values that were not finite are nan. An incomplete row, of a run that is writing or was killed, is left
        out; so are the rows of earlier runs (`metrics.jsonl.1`).

    Raises:
        ValueError: if the directory does not exist, or holds no metrics.
    """
    directory = urls.expand(workdir)
    try:
        if urls.is_url(directory):
            path = f"{directory.rstrip('/')}/metrics.jsonl"
            rows = _parse_rows(urls.file_system(path).cat_file(path))
        elif not os.path.isdir(directory):
            raise ValueError(f"There is no directory {directory!r}: give the workdir of a run.")
        else:
            rows = read_rows(os.path.join(directory, "metrics.jsonl"))
    except FileNotFoundError:
        raise ValueError(
            f"The directory {directory!r} holds no metrics.jsonl: give the workdir of one run that has begun to train."
        ) from None
    except OSError as error:
        raise ValueError(
            f"metrics.jsonl in {directory!r} cannot be read ({error.strerror or error}): give a workdir that you may "
            "read."
        ) from error
    for i, row in enumerate(rows):  # in place: a long run's rows are not held twice
        rows[i] = as_metrics(row)
    return rows


def as_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns a row of `metrics.jsonl` with its values as numbers."""
    return {name: value if name == "step" else as_number(value) for name, value in row.items()}


def read_rows(path: str) -> list[dict[str, Any]]:
    """Returns the rows of a file; lines that are not rows are left out.

    Raises:
        OSError: if it cannot be read.
    """
    with open_at_once(path) as file:
        return _parse_rows(file.read())


def read_rows_if_any(path: str, *, instead: str, warn: Callable[[str], None] = log.warning) -> list[dict[str, Any]]:
    """Returns the rows of a file; none if there is none, or, with a warning as for `read_json`, if it is unreadable."""
    return _read_if_any(path, _parse_rows, instead, warn) or []


def _parse_rows(content: bytes) -> list[dict[str, Any]]:
    return [row for row in map(parse_row, content.splitlines()) if row is not None]


def rows_between(path: str, after: int, until: int) -> list[dict[str, Any]]:
    """Returns the rows of a file whose step is larger than `after`, and `until` at most; reads no more than its end."""
    later = [*itertools.takewhile(lambda row: row["step"] > after, _rows_from_end(path))]
    return [row for row in reversed(later) if row["step"] <= until]


def last_row(path: str) -> dict[str, Any] | None:
    """Returns the last row of a file; None if there is none."""
    return next(_rows_from_end(path), None)


def _rows_from_end(path: str) -> Iterator[dict[str, Any]]:
    return filter(None, map(parse_row, lines_from_end(path) if os.path.isfile(path) else ()))


def drop_rows(path: str, after: int) -> None:
    """Cuts off the rows after a step, and an incomplete one, at the end of a file; reads no more than its end."""
    size = end = os.path.getsize(path)
    for line in lines_from_end(path):
        row = parse_row(line)
        if row is not None and line.endswith(b"\n") and row["step"] <= after:
            break
        end -= len(line)
    if end < size:
        os.truncate(path, end)


def lines_from_end(path: str) -> Iterator[bytes]:
    """Yields the lines of a file, the last one first."""
    with open(path, "rb") as file:
        start, line_end = file.seek(0, os.SEEK_END), b""
        while start:
            end, start = start, max(0, start - _BLOCK_BYTES)
            file.seek(start)
            lines = (file.read(end - start) + line_end).splitlines(keepends=True)
            line_end = lines.pop(0) if start else b""  # the first may begin before the block
            yield from reversed(lines)


_unix_at_zero = -math.inf  # of the monotonic clock


def unix_time(at: float | None = None) -> float:
    """Returns the Unix time in seconds; within a process it goes on where the clock is set back.

    Args:
        at: seconds of the monotonic clock; None: now.
    """
    global _unix_at_zero
    now = time.monotonic()
    _unix_at_zero = max(_unix_at_zero, time.time() - now)
    return _unix_at_zero + (now if at is None else at)


def append_row(path: str, row: Mapping[str, Any]) -> None:
    """Appends a row to a file, with the current `time` (Unix, seconds), on a line of its own.

    A full disk or a killed process may have left half a row at the end; it stays, and readers leave it out.

    Args:
        path: the file; created if it is missing.
        row: values that JSON can hold.

    Raises:
        OSError: if it cannot be written.
    """
    with open_at_once(path, "ab") as file:
        is_half = not next(lines_from_end(path), b"\n").endswith(b"\n")
        file.write(b"\n" * is_half + format_row({"time": unix_time(), **row}))


def format_row(row: Mapping[str, Any]) -> bytes:
    """Returns a row as a line of JSON."""
    return _ENCODER.encode(row).encode() + b"\n"


def replace_json(path: str, value: Any) -> None:
    """Replaces a file by a value as JSON, without waiting for the disk: it survives this process, not a power cut.

    Raises:
        OSError: if it cannot be written.
    """
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(temporary, path)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Returns the row of a line; None if it is not an object with a `step`, such as half a row."""
    try:
        row = parse_json(line, as_object)
    except ValueError:
        return None
    return {sys.intern(name): value for name, value in row.items()} if is_count(row.get("step")) else None


def is_count(value: Any) -> bool:
    """Returns whether a value is an integer that may be a step."""
    return type(value) is int and 0 <= value < 2**63


def show_number(value: float) -> str:
    """Returns a number with four significant digits; from 10,000 as an integer rather than with an exponent."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def show_bytes(count: float) -> str:
    """Returns a number of bytes with its unit, such as `1.2 GB`."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def as_number(value: Any) -> float:
    """Returns a value of JSON as a number; nan if it is none."""
    try:
        return float(value) if isinstance(value, (int, float)) else float("nan")
    except OverflowError:  # an integer of more than 308 digits
        return float("nan")
