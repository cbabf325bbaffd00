"""Pictures of RESULTS.md: a dot for each figure of a table, on a logarithmic axis, as SVG.

python -m experiments.benchmarks.pictures      # draws the page as it is; `python -m experiments.benchmarks` does, too
"""

import html
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.benchmarks.page import TITLES

PAGE = pathlib.Path(__file__).with_name("RESULTS.md")
WIDTH, LEFT, RIGHT, TOP, LINE = 560, 136, 20, 84, 24  # in pixels; LINE: the height of a row
COLORS = {"handloop": "#8c8c8c", "hand": "#d55e00", "orbit": "#e69f00", "keras": "#cc79a7", "keras50": "#009e73"}
COLORS["distloop"] = "#0f7fd6"
SHAPES = {  # around 0, 0
    "handloop": "M-4,-4H4V4H-4Z",
    "hand": "M0,-5L5,4H-5Z",
    "orbit": "M0,-5.5L5.5,0L0,5.5L-5.5,0Z",
    "keras": "M-4,-4H4V4H-4Z",
    "keras50": "M0,5L5,-4H-5Z",
    "distloop": "M-6,0A6,6 0 1 0 6,0A6,6 0 1 0 -6,0Z",
}
STYLE = """\
text { font: 13px sans-serif; fill: #1f2328 } .panel { fill: #ffffff } .grid { stroke: #d8dee4 }
.one { stroke: #59636e; stroke-dasharray: 4 3 } path { stroke: #ffffff; stroke-width: 0.5 } .title { font-weight: bold }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .panel { fill: #16191d } .grid { stroke: #3d444d } .one { stroke: #9198a1 }
  path { stroke: #16191d }
}"""

Row = tuple[str, Mapping[str, float]]  # a workload and its place; system -> figure


class Picture(NamedTuple):
    """What a picture shows: the table below a heading, and the number of those in a cell that are told apart by `/`."""

    heading: str
    title: str
    axis: str
    place_in_cell: int = 0
    is_relative: bool = False  # to a handloop


PICTURES = {
    "training_step.svg": Picture(
        "Training step",
        "Time of a training step",
        "in steps of handloop, which is written by hand (dashed line); left is faster",
        1,
        True,
    ),
    "evaluate.svg": Picture("`evaluate`", "Speed of evaluate", "examples per second; right is faster"),
    "predict.svg": Picture("`predict`", "Speed of predict", "examples per second; right is faster"),
}


def read_rows(page: str, picture: Picture) -> list[Row]:
    """Returns the figures of a picture from its table on the page."""
    section = page.partition(f"\n## {picture.heading}\n")[2].partition("\n## ")[0]
    header, _, *lines = [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in table_of(section)]
    rows = []
    for line in lines:
        cells = dict(zip(header, line, strict=True))
        figures = {}
        for system in COLORS:
            parts = cells.get(TITLES[system], "-").split(" / ")
            if parts != ["-"] and not (picture.is_relative and system == "handloop"):
                figures[system] = float(parts[picture.place_in_cell].replace(",", ""))
        rows.append((f"{cells['workload']}, {cells['place']}", figures))
    return rows


def table_of(section: str) -> list[str]:
    """Returns the lines of the first table in a section."""
    return re.findall(r"^\|.*$", section, re.M)


def ticks(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 times powers of ten that lie in a range, or the powers alone if there are many."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 200 else (1,)
    return [step * 10.0**e for e in exponents for step in steps if low <= step * 10.0**e <= high]


def draw(picture: Picture, rows: Sequence[Row]) -> str:
    """Returns the picture of rows as SVG."""
    figures = [figure for _, row in rows for figure in row.values()] + ([1.0] if picture.is_relative else [])
    low, high = min(figures) / 1.15, max(figures) * 1.15
    height, bottom = TOP + LINE * len(rows) + 48, TOP + LINE * len(rows)

    def x_of(figure: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(figure / low) / math.log(high / low)

    parts = [
        f'<rect class="panel" width="{WIDTH}" height="{height}" rx="8"/>',
        word(16, 26, picture.title, kind="title"),
    ]
    systems = [system for system in COLORS if any(system in row for _, row in rows)]
    at = 16.0
    for system in reversed(systems):
        name = TITLES[system].strip("*")
        parts += [mark(system, at + 6, 50), word(at + 16, 54, name)]
        at += 6.2 * len(name) + 32
    for tick in ticks(low, high):
        x = x_of(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{bottom}"/>')
        parts.append(word(x, bottom + 18, f"{tick:,g}" if tick >= 1 else f"{tick:g}", "middle"))
    if picture.is_relative:
        parts.append(f'<line class="one" x1="{x_of(1):.1f}" x2="{x_of(1):.1f}" y1="{TOP - 8}" y2="{bottom}"/>')
    for i, (label, row) in enumerate(rows):
        y = TOP + LINE * i + LINE // 2
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(word(16, y + 4, label))
        parts += [mark(system, x_of(row[system]), y, row[system]) for system in COLORS if system in row]
    parts.append(word((LEFT + WIDTH - RIGHT) / 2, bottom + 38, picture.axis, "middle"))
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def word(x: float, y: float, text: str, anchor: str = "start", kind: str = "", color: str = "") -> str:
    """Returns a text of a kind, which `STYLE` describes; a color is in place of that of all texts."""
    style = f' style="fill: {color}"' if color else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:g}" text-anchor="{anchor}"{style}>{html.escape(text)}</text>'


def mark(system: str, x: float, y: float, figure: float | None = None) -> str:
    """Returns the mark of a system at a place, which names its figure where a pointer rests on it."""
    title = "" if figure is None else f"<title>{html.escape(TITLES[system].strip('*'))}: {figure:,g}</title>"
    return f'<path d="{SHAPES[system]}" fill="{COLORS[system]}" transform="translate({x:.1f},{y})">{title}</path>'


def draw_all(page: str) -> dict[str, str]:
    """Returns the pictures of a page whose tables are on it, by the name of their file."""
    shown = {name: picture for name, picture in PICTURES.items() if f"\n## {picture.heading}\n" in page}
    return {name: draw(picture, read_rows(page, picture)) for name, picture in shown.items()}


def write(page: pathlib.Path) -> None:
    """Writes the pictures of a page beside it."""
    for name, svg in draw_all(page.read_text(encoding="utf-8")).items():
        page.with_name(name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    write(PAGE)
