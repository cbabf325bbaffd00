"""Text tables: prints a table, within the width of a terminal or with one line per row in a pipe.

    console = rich.console.Console(highlight=False)
    show(Table("Runs", ["run", "step"], [["a", "100"]]), console)

It does not know what a table is about.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TextIO

import rich.console
import rich.table
from rich.cells import cell_len, set_cell_size
from rich.padding import Padding
from rich.text import Text

from distloop.log import printable

# Columns of text, aligned to the left.
_LEFT = ("run", "status", "device", "metric", "curve", "setting", "what", "why", "cost", "from")
GAP, INDENT = 2, 2  # spaces between columns, and before rows under a headline
_MIN_NAME, _MIN_WORDS = 12, 24  # the least widths that names and other text are wrapped to


class Table(NamedTuple):
    """A table of text; a grouped one shows its first column as headlines on a terminal."""

    title: str  # empty: none is printed
    header: list[str]
    rows: list[list[str]]
    is_grouped: bool = False
    styles: Mapping[tuple[str, str], str] = {}  # by column and text


def is_terminal(console: rich.console.Console) -> bool:
    """Returns whether a console is a terminal; with FORCE_COLOR rich takes any file for one."""
    return console.is_interactive and console.file.isatty()


def show(table: Table, console: rich.console.Console) -> None:
    """Prints a table: on a terminal within its width, else each row in one line."""
    if is_terminal(console):
        _show(_printable(table), console)
    else:
        print_lines(table)


def _printable(table: Table) -> Table:
    """Returns a table in which names, reasons and values of a run's files cannot command a terminal."""
    header, *rows = [[printable(cell, keep="") for cell in line] for line in (table.header, *table.rows)]
    return table._replace(header=header, rows=rows)


def _show(table: Table, console: rich.console.Console) -> None:
    """Prints a table on a terminal: long names are wrapped, and columns that do not fit follow in a table below."""
    num_names = 2 if table.is_grouped else 1  # in a grouped table the first one is the headline
    columns = list(zip(table.header, *table.rows, strict=True))
    longest = [max(map(cell_len, column)) for column in columns]
    longest[num_names - 1] += INDENT * table.is_grouped
    narrowest = [n if name == "curve" else min(n, _MIN_WORDS) for name, n in zip(table.header, longest, strict=True)]
    narrowest[num_names - 1] = min(longest[num_names - 1], _MIN_NAME)
    parts: list[list[int]] = []
    for i in range(num_names, len(columns)):
        if not parts or narrowest[i] + sum(narrowest[j] + GAP for j in parts[-1]) > console.width:
            parts.append([num_names - 1])
        parts[-1].append(i)
    for part in parts:
        if table.title:
            console.print(Text(table.title, style="bold underline"))
        spare = console.width - sum(narrowest[i] + GAP for i in part) + GAP
        widths = {}
        for i in part:  # spare width goes to names first
            widths[i] = min(longest[i], narrowest[i] + max(0, spare))
            spare -= widths[i] - narrowest[i]
        _show_columns(table, widths, console)


def _show_columns(table: Table, widths: Mapping[int, int], console: rich.console.Console) -> None:
    """Prints some columns of a table on a terminal; `widths` has each one's width by its index."""

    def show_rows(rows: Sequence[Sequence[str]], style: str = "") -> None:
        grid = rich.table.Table.grid(padding=(0, GAP, 0, 0))
        for i, width in widths.items():
            is_left = table.header[i] in _LEFT or i == 0
            grid.add_column(width=width, justify="left" if is_left else "right", overflow="fold")
        for row in rows:
            cells = [Text(row[i], style=style or table.styles.get((table.header[i], row[i]), "")) for i in widths]
            grid.add_row(Padding(cells[0], (0, 0, 0, INDENT * table.is_grouped)), *cells[1:])
        console.print(grid)

    show_rows([table.header], "dim")
    if not table.is_grouped:
        show_rows(table.rows)
    for headline, rows in itertools.groupby(table.rows, lambda row: row[0]) if table.is_grouped else ():
        console.print(Text(headline, style="bold"))
        show_rows(list(rows))
    console.print()


def print_lines(table: Table, file: TextIO | None = None) -> None:
    """Prints a table as for a pipe or a file: each row in one line, and an empty line after the table."""
    table = _printable(table)
    lines = [table.header, *table.rows]
    widths = [max(map(cell_len, column)) + GAP for column in zip(*lines, strict=True)]
    for line in lines:
        print("".join(set_cell_size(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip(), file=file)
    print(file=file)
