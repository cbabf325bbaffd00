"""The picture of GROWTH.md: a panel for each table, with each cost in times of its first figure, as SVG.

python -m experiments.benchmarks.curves    # draws the page as it is; so does `python -m experiments.benchmarks.growth`
"""

import html
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.benchmarks.pictures import STYLE, table_of, word

PAGE = pathlib.Path(__file__).with_name("GROWTH.md")
PICTURE = "growth.svg"
COLUMNS, WIDTH, HEIGHT = 3, 250, 190  # of a panel, in pixels, with its texts
LEFT, RIGHT, TOP, BOTTOM = 34, 84, 44, 30  # of the texts around what is drawn; RIGHT: the names of costs
COLORS = ("#0f7fd6", "#d55e00", "#009e73")
LOW, HIGH = 0.3, 120  # times the first figure, the same in all panels
LINES = "polyline { fill: none; stroke-width: 2 } .cost, .tick { font-size: 11px }"


class Panel(NamedTuple):
    """A table of the page: its sizes, and each cost at them, in times of the cost at the first."""

    title: str
    of: str
    sizes: Sequence[float]
    costs: Mapping[str, Sequence[float]]


def read_panels(text: str) -> list[Panel]:
    """Returns the tables of a page; costs of nothing at the first size are left out."""
    panels = []
    for section in text.split("\n## ")[1:]:
        header, _, *lines = [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in table_of(section)]
        columns = [[float(cell.replace(",", "")) for cell in column] for column in zip(*lines[:-1], strict=True)]
        costs = {name: [cost / c[0] for cost in c] for name, c in zip(header[1:], columns[1:], strict=True) if c[0] > 0}
        panels.append(Panel(section.partition("\n")[0], header[0], columns[0], costs))
    return panels


def draw(panels: Sequence[Panel]) -> str:
    """Returns the picture of panels as SVG."""
    rows = -(-len(panels) // COLUMNS)
    width, height = COLUMNS * WIDTH + 16, rows * HEIGHT + 48
    about = (
        "Each cost in times of its first figure, on logarithmic axes. Dashed: flat; dotted: in proportion to the size."
    )
    parts = [f'<rect class="panel" width="{width}" height="{height}" rx="8"/>', word(16, 26, about)]
    for i, panel in enumerate(panels):
        row, column = divmod(i, COLUMNS)
        at = f"translate({16 + column * WIDTH},{40 + row * HEIGHT})"
        parts += [f'<g transform="{at}">', *lines_of(panel), "</g>"]
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}\n{LINES}</style>\n'
    return head + "\n".join(parts) + "\n</svg>\n"


def lines_of(panel: Panel) -> list[str]:
    """Returns the elements of a panel whose upper left corner is at 0, 0."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    first, last = panel.sizes[0], panel.sizes[-1]

    def x_of(size: float) -> float:
        return LEFT + (right - LEFT) * math.log(size / first) / math.log(last / first)

    def y_of(times: float) -> float:
        return bottom - (bottom - TOP) * math.log(min(max(times, LOW), HIGH) / LOW) / math.log(HIGH / LOW)

    parts = [word(0, 16, panel.title, kind="title"), word(0, 32, panel.of, kind="cost")]
    for times in (1, 10, 100):
        kind = "one" if times == 1 else "grid"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{right}" y1="{y_of(times):.1f}" y2="{y_of(times):.1f}"/>')
        parts.append(word(LEFT - 5, y_of(times) + 4, f"{times}", "end", "tick"))
    end = min(last, first * HIGH)
    dots = f'x1="{x_of(first):.1f}" y1="{y_of(1):.1f}" x2="{x_of(end):.1f}" y2="{y_of(end / first):.1f}"'
    parts.append(f'<line class="one" style="stroke-dasharray: 1 4" {dots}/>')
    for size in panel.sizes:
        parts.append(word(x_of(size), bottom + 16, short(size), "middle", "tick"))
    floor = math.inf  # so that the names of costs do not lie on each other
    ordered = sorted(panel.costs.items(), key=lambda cost: cost[1][-1])
    for color, (name, costs) in zip(COLORS, ordered, strict=False):
        points = " ".join(f"{x_of(size):.1f},{y_of(c):.1f}" for size, c in zip(panel.sizes, costs, strict=True))
        floor = min(y_of(costs[-1]) + 4, floor - 13)
        title = f"<title>{html.escape(name)}: {costs[-1]:.2g} times</title>"
        parts.append(f'<polyline stroke="{color}" points="{points}">{title}</polyline>')
        parts.append(word(right + 6, floor, re.sub(r", (s|ms|us|MB)$", "", name), kind="cost", color=color))
    return parts


def short(size: float) -> str:
    """Returns a size in few letters, such as 10k."""
    return f"{size / 1e6:g}M" if size >= 1e6 else f"{size / 1e3:g}k" if size >= 1e3 else f"{size:g}"


def write(page: pathlib.Path) -> None:
    """Writes the picture of a page beside it."""
    page.with_name(PICTURE).write_text(draw(read_panels(page.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    write(PAGE)
