"""Text tables: prints a table, within the width of a terminal or with one line per row in a pipe.

    console = rich.console.Console(highlight=False)
    show(Table("Runs", ["run", "step"], [["a", "100"]]), console)

It does not know what a table is about.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, TextIO

import rich.console
import rich.table
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from distloop.log import printable

# Columns of text, aligned to the left.
_LEFT = ("run", "status", "device", "metric", "what", "why", "cost", "from")
_GAP = 2  # spaces between columns
_MIN_NAME, _MIN_WORDS = 12, 24  # the least widths that names and other text are wrapped to


class Table(NamedTuple):
    """A table of text, whose first columns name a row."""

    title: str  # empty: none is printed
    header: list[str]
    rows: list[list[str]]
    num_names: int = 1
    styles: Mapping[tuple[str, str], str] = {}  # by column and text


def is_terminal(console: rich.console.Console) -> bool:
    """Returns whether a console is a terminal; with FORCE_COLOR rich takes any file for one."""
    return console.is_interactive and console.file.isatty()


def show(table: Table, console: rich.console.Console) -> None:
    """Prints a table: on a terminal within its width, else each row in one line."""
    if not is_terminal(console):
        print_lines(table)
        return
    table = _printable(table)
    longest = _widths(table)
    least = [min(n, _MIN_NAME if i < table.num_names else _MIN_WORDS) for i, n in enumerate(longest)]
    names = list(range(table.num_names))
    blocks: list[list[int]] = []  # columns that do not fit follow in a table below
    for i in range(table.num_names, len(table.header)):
        if not blocks or sum(least[j] + _GAP for j in [*blocks[-1], i]) - _GAP > console.width:
            blocks.append([*names])
        blocks[-1].append(i)
    for block in blocks:
        if table.title:
            console.print(Text(table.title, style="bold underline"))
        grid = rich.table.Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
        for i in block:
            name, is_unwrapped = table.header[i], longest[i] == least[i]
            justify: Literal["left", "right"] = "left" if name in _LEFT or i == 0 else "right"
            grid.add_column(Text(name), justify=justify, overflow="fold", no_wrap=is_unwrapped)
        for row in table.rows:
            grid.add_row(*(Text(row[i], style=table.styles.get((table.header[i], row[i]), "")) for i in block))
        console.print(grid)
        console.print()


def print_lines(table: Table, file: TextIO | None = None) -> None:
    """Prints a table as for a pipe or a file: each row in one line, and an empty line after the table."""
    table = _printable(table)
    widths = [width + _GAP for width in _widths(table)]
    for line in (table.header, *table.rows):
        print("".join(set_cell_size(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip(), file=file)
    print(file=file)


def _printable(table: Table) -> Table:
    """Returns a table in which names, reasons and values of a run's files cannot command a terminal."""
    header, *rows = [[printable(cell, keep="") for cell in line] for line in (table.header, *table.rows)]
    return table._replace(header=header, rows=rows)


def _widths(table: Table) -> list[int]:
    """Returns the width of the longest cell of each column."""
    return [max(map(cell_len, column)) for column in zip(table.header, *table.rows, strict=True)]
