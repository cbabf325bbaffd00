"""Text tables: prints a table, a row in one line.

    print_lines(Table("Runs", ["run", "step"], [["a", "100"]]))

It does not know what a table is about.
"""

from collections.abc import Mapping
from typing import NamedTuple, TextIO

import rich.console
from rich.cells import cell_len, set_cell_size

from distloop.log import printable

GAP = 2  # spaces between columns


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


def print_lines(table: Table, file: TextIO | None = None) -> None:
    """Prints a table as for a pipe or a file: each row in one line, and an empty line after the table."""
    table = printable_cells(table)
    columns = [width + GAP for width in widths(table)]
    for line in (table.header, *table.rows):
        text = "".join(set_cell_size(cell, width) for cell, width in zip(line, columns, strict=True))
        print(text.rstrip(), file=file)
    print(file=file)


def printable_cells(table: Table) -> Table:
    """Returns a table in which names, reasons and values of a run's files cannot command a terminal."""
    header, *rows = [[printable(cell, keep="") for cell in line] for line in (table.header, *table.rows)]
    return table._replace(header=header, rows=rows)


def widths(table: Table) -> list[int]:
    """Returns the width of the longest cell of each column."""
    return [max(map(cell_len, column)) for column in zip(table.header, *table.rows, strict=True)]
