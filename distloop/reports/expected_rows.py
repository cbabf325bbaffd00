"""Expected rows: compares the numbers of a run with those in a file, such as the `metrics.jsonl` of a run before.

first_difference("runs/new", "expected.jsonl", 1e-5)    # "step 300: loss is 0.52 and was expected to be 0.5", or ""
"""

import math
from typing import Any

from distloop.atomic_files import open_at_once
from distloop.log import shown
from distloop.workdir import records

_LEFT_OUT = records.IN_EACH_ROW | records.OF_THE_MACHINE
_EXAMPLE = 'give lines such as {"step": 100, "loss": 0.5}.'


def first_difference(workdir: str, path: str, tolerance: float) -> str:
    """Returns where a run first differs from the rows of a file, as text; empty: it has all of their numbers.

    Not compared are `time`, and measurements of speed and memory.

    Args:
        workdir: of the run, or a URL.
        path: of a file of rows, each with a `step` and the numbers that are expected there; null is expected as nan. A
            step may be written as 20.0; empty lines are left out.
        tolerance: relative, of each number.

    Raises:
        ValueError: if a file or a line cannot be read, what is expected is no number, or there is none.
    """
    try:
        with open_at_once(path) as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise ValueError(f"{path!r} cannot be read ({error.strerror}): give a file of expected rows.") from error
    expected = [_row_of(line, f"line {i} of {path!r}") for i, line in enumerate(lines, 1) if line.strip()]
    numbers = [(row["step"], name, row[name]) for row in expected for name in row if name != "step"]
    if not numbers:
        raise ValueError(f"{path!r} holds no expected number: {_EXAMPLE}")
    rows = {row["step"]: row for row in records.read_metrics(workdir)}
    for step, name, number in numbers:
        value = rows.get(step, {}).get(name)
        is_nan = value is not None and math.isnan(value) and math.isnan(number)
        if not is_nan and (value is None or not math.isclose(value, number, rel_tol=tolerance)):
            return f"step {step}: {name} is {'missing' if value is None else value} and was expected to be {number}"
    return ""


def _row_of(line: bytes, where: str) -> dict[str, Any]:
    """Returns the step of a line and the numbers that are compared; raises a ValueError that says where there are none.

    A step such as 20.0 is written by pandas, where a column has gaps.
    """
    try:
        row = records.parse_json(line, records.as_object)
    except ValueError:
        raise ValueError(f"{where} is no JSON object: {_EXAMPLE}") from None
    step, values = row.get("step"), {n: value for n, value in row.items() if n.rpartition("/")[2] not in _LEFT_OUT}
    step = int(step) if isinstance(step, float) and step.is_integer() else step
    if not records.is_count(step):
        raise ValueError(f"{where} has the step {shown(step)}, which is no whole number from 0: {_EXAMPLE}")
    for name, value in values.items():
        is_given = value is not None and value == value  # else it is null or NaN
        if isinstance(value, bool) or (is_given and math.isnan(records.as_number(value))):
            raise ValueError(f"{where} has the value {shown(value)} of {name!r}, which is no number: {_EXAMPLE}")
    return {"step": step, **records.as_metrics(values)}
