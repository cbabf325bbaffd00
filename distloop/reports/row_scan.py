"""Row scan: the numbers of a `metrics.jsonl` that tables and pictures show; without TensorFlow.

    scan = scan_rows("runs/digits/metrics.jsonl")
    scan.last["loss"], scan.curves["test/accuracy"].best    # 0.12, (0.98, 4200)

Of a million rows few are parsed. A line with the names of a line before and a number for each is cut by a regular
expression, and no number is made of a text that is neither least nor largest. Other lines are parsed as JSON.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

from distloop.atomic_files import open_at_once
from distloop.workdir import records
from distloop.workdir.run_files import Series, better

_HIDDEN = records.ABOUT_THE_RUN - {"gradient_noise_scale"}  # numbers of a row that are not compared
_SPEEDS = ("steps_per_sec", "examples_per_sec")
_BLOCK_BYTES = 2**20  # read at a time
_MOST_SHAPES = 16  # other lines are parsed as JSON
_MOST_POINTS = 2000  # of a curve in a picture; then every other one is dropped
_RECENT_ROWS = 1000  # whose times say how far apart rows are
_FEW = 8  # texts that are all made numbers


class Point(NamedTuple):
    """A value with the number of its row and its step."""

    row: int
    step: int
    value: float


class Curve:
    """What is shown of a metric.

    Attributes:
        name: of the metric.
        last: the last value; nan if it is not finite.
        least, largest: of the finite values; nan if there are none.
    """

    def __init__(self, name: str) -> None:
        """Starts without values."""
        self.name, self.least, self.largest = name, math.nan, math.nan
        self._last, self._best = Point(-1, 0, math.nan), Point(-1, 0, math.nan)
        self._better, self._count, self._every = better(name), 0, 1
        self._points: list[Point] = []

    @property
    def last(self) -> float:
        """The last value; nan if it is not finite."""
        return self._last.value

    @property
    def best(self) -> tuple[float, int] | None:
        """The best value and its first step; None if the name does not say what is better."""
        return (self._best.value, self._best.step) if self._best.row >= 0 else None

    @property
    def series(self) -> Series:
        """The values for a picture, every n-th of many."""
        points = sorted(self._points)
        return Series(self.name, [point.step for point in points], [point.value for point in points])

    def add(self, rows: Sequence[int], steps: Sequence[int], texts: Sequence[bytes]) -> None:
        """Adds values of rows in ascending order, as texts; rows between them may be added later.

        Raises:
            ValueError: if a text is no number.
        """
        if finite := list(filter(math.isfinite, _extremes(texts))):
            least, largest = min(finite), max(finite)
            self.least, self.largest = min(least, self.least), max(largest, self.largest)  # in this order for nan
            value, best = (least, self.least) if self._better == "smaller" else (largest, self.largest)
            if self._better and value == best and (value != self._best.value or rows[0] < self._best.row):
                at = list(map(float, texts)).index(value)
                found = Point(rows[at], steps[at], value)
                self._best = min(found, self._best) if value == self._best.value else found
        if rows[-1] > self._last.row:
            self._last = Point(rows[-1], steps[-1], float(texts[-1]))
        shown = slice(-self._count % self._every, None, self._every)
        self._points += map(Point, rows[shown], steps[shown], map(float, texts[shown]))
        self._count += len(texts)
        while len(self._points) > _MOST_POINTS:
            self._points = sorted(self._points)[::2]
            self._every *= 2


@dataclass
class RowScan:
    """What is shown of the rows of a run.

    Attributes:
        names: of all numbers, in order of appearance.
        curves: of the model's metrics, by name.
        first, last: the first and the last row, as `read_metrics` returns rows; empty: there is none.
        recent_times: of the last 1,000 rows.
        steps: of training whose speed is known.
        secs: the time of these steps, without tracing, evaluations, saves and pauses.
        examples: of these steps; nan if a speed in examples is unknown.
        first_secs: the time of the steps before the first row.
    """

    names: dict[str, None] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    recent_times: list[float] = field(default_factory=list)
    steps: int = 0
    secs: float = 0.0
    examples: float = 0.0
    first_secs: float = 0.0


class _Shape(NamedTuple):
    """Lines with the same names and a number for each, or null.

    Attributes:
        pattern: of a line, with a group for each number that is shown.
        names: of these groups.
        empty: names whose value is null.
    """

    pattern: re.Pattern[bytes]
    names: tuple[str, ...]
    empty: frozenset[str]


class _Group(NamedTuple):
    """Lines of a block: their numbers within it, and by name a text for each line."""

    lines: Sequence[int]
    texts: Mapping[str, Sequence[bytes]]


def scan_rows(path: str, first_step: int = 0) -> RowScan:
    """Returns what is shown of the rows of a file; lines that are not rows are left out.

    Args:
        path: of `metrics.jsonl`, which may be written to.
        first_step: from which the run has trained.

    Raises:
        OSError: if it cannot be read.
    """
    try:
        return _Scanner(_MOST_SHAPES).scan(path, first_step)
    except ValueError:  # digits and signs that are no number, as in a damaged file
        return _Scanner(0).scan(path, first_step)


def read_blocks(path: str) -> Iterator[list[bytes]]:
    """Yields the lines of a file, some at a time; the last may be incomplete."""
    with open_at_once(path) as file:
        rest = b""
        while block := file.read(_BLOCK_BYTES):
            lines, _, rest = (rest + block).rpartition(b"\n")
            yield lines.splitlines()
        yield rest.splitlines()


class _Scanner:
    """Reads a file in blocks.

    Args:
        most_shapes: of lines that are recognized without being parsed.
    """

    def __init__(self, most_shapes: int) -> None:
        self._most_shapes, self._shapes = most_shapes, Counter[_Shape]()
        self._scan, self._num_rows, self._first_row = RowScan(), 0, 0

    def scan(self, path: str, first_step: int) -> RowScan:
        step, scan = first_step, self._scan
        for lines in read_blocks(path):
            if rows := sorted(row for group in self._groups(lines) for row in self._add(group)):
                (start, *_), (end, *_) = rows[0], rows[-1]
                if not scan.first:
                    scan.first, self._first_row = _row(lines[start - self._num_rows]), start
                scan.last = _row(lines[end - self._num_rows])
                step = self._add_times(rows, step)
            self._num_rows += len(lines)
        recent = filter(None, map(records.parse_row, islice(records.lines_from_end(path), _RECENT_ROWS)))
        scan.recent_times = [records.as_metrics(row).get("time", math.nan) for row in recent][::-1]
        return scan

    def _groups(self, lines: Sequence[bytes]) -> Iterator[_Group]:
        """Yields the rows of a block, those of the same shape together."""
        left: Sequence[int] = range(len(lines))
        shapes = [shape for shape, _ in self._shapes.most_common()]
        while left:
            if not shapes:
                row = records.parse_row(lines[left[0]])
                for name in row or ():
                    self._scan.names[name] = None
                    if name not in records.IN_EACH_ROW and name.rpartition("/")[2] not in _HIDDEN:
                        self._scan.curves.setdefault(name, Curve(name))
                shape = _shape_of(row, lines[left[0]]) if row and len(self._shapes) < self._most_shapes else None
                if shape is None:
                    if row:
                        yield _Group(left[:1], {name: [_text(value)] for name, value in row.items()})
                    left = left[1:]
                    continue
                shapes = [shape]
            shape = shapes.pop(0)
            matches = list(map(shape.pattern.fullmatch, [lines[number] for number in left]))
            if hits := [number for number, match in zip(left, matches, strict=True) if match]:
                columns = zip(*[match.groups() for match in matches if match], strict=True)
                texts: dict[str, Sequence[bytes]] = dict(zip(shape.names, columns, strict=True))
                yield _Group(hits, texts | {name: [b"nan"] * len(hits) for name in shape.empty})
                self._shapes[shape] += len(hits)
                left = [number for number, match in zip(left, matches, strict=True) if not match]

    def _add(self, group: _Group) -> Iterator[tuple[int, int, float, float]]:
        """Adds rows to the curves; returns the number, step and speeds of each."""
        steps = list(map(int, group.texts["step"]))
        rows = [self._num_rows + number for number in group.lines]
        for name, texts in group.texts.items():
            if curve := self._scan.curves.get(name):
                curve.add(rows, steps, texts)
        unknown = [math.nan] * len(rows)
        speeds = (map(float, group.texts[name]) if name in group.texts else unknown for name in _SPEEDS)
        return zip(rows, steps, *speeds, strict=True)

    def _add_times(self, rows: Sequence[tuple[int, int, float, float]], previous: int) -> int:
        """Adds the time of the steps of some rows, by number, step and speeds; returns the last step."""
        scan = self._scan
        for row, step, steps_per_sec, examples_per_sec in rows:
            steps, previous = step - previous, step
            if 0 < steps_per_sec < math.inf and steps > 0:
                secs = steps / steps_per_sec
                scan.steps += steps
                scan.secs += secs
                scan.examples += secs * examples_per_sec
                scan.first_secs = scan.first_secs or (secs if row == self._first_row else 0.0)
        return previous


def _row(line: bytes) -> dict[str, float]:
    return records.as_metrics(records.parse_row(line) or {})


def _text(value: Any) -> bytes:
    return (str(value) if records.is_count(value) else repr(records.as_number(value))).encode()


def _shape_of(row: Mapping[str, Any], line: bytes) -> _Shape | None:
    """Returns the shape of a line whose row is given; None: it is not written as rows are."""
    shown = {"step", *_SPEEDS, *(name for name in row if name.rpartition("/")[2] not in _HIDDEN and name != "time")}
    pieces = []
    for name, value in row.items():
        number = b"null" if value is None else rb"0|[1-9][0-9]{0,17}" if name == "step" else rb"[-0-9][-+.0-9e]*"
        group = b"(%b)" if name in shown and value is not None else b"(?:%b)" if name == "step" else b"%b"
        pieces.append(re.escape(json.dumps(name).encode()) + b": " + group % number)
    names = tuple(name for name, value in row.items() if name in shown and value is not None)
    shape = _Shape(re.compile(rb"\{%b\}" % b", ".join(pieces)), names, frozenset(shown & row.keys() - {*names}))
    return shape if shape.pattern.fullmatch(line) else None


def _extremes(texts: Sequence[bytes]) -> list[float]:
    """Returns the numbers of some texts, the least and the largest among them; those between may be missing.

    Positive numbers with as many digits before the point and the same exponent have the order of their texts.
    """
    first, joined = texts[0], b"\n".join(texts) + b"\n"
    tail = first[first.find(b"e") :] if b"e" in first else b""
    if len(texts) > _FEW and joined.count(tail + b"\n") == len(texts) and joined.count(b"e") == len(texts) * bool(tail):
        end = -len(tail)
        heads = [text[:end] for text in texts] if tail else texts
        least, largest, point = min(heads), max(heads), first.find(b".")
        if least >= b"0" and set(map(itemgetter(slice(point, point + 1)), heads)) == {b"."}:
            return [float(least + tail), float(largest + tail)]
    return list(map(float, texts))
