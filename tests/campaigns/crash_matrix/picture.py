"""The crash matrix as a picture (SVG) and as a page with tables; functions of the cells alone."""

import collections
import itertools
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tests.campaigns.crash_matrix.scenarios import BEFORE, HAND, LOST, NEW, WRONG

FILLS = {NEW: "#3b8f5a", BEFORE: "#a9d6a5", LOST: "#e8b23a", HAND: "#d9713c", WRONG: "#b3202c"}
_SIZE, _GAP, _LEFT = 8, 1, 250
_STEP = _SIZE + _GAP
Row = Mapping[str, Any]  # of a Cell, with `who`, `what` and `keep`


def blocks(rows: Sequence[Row]) -> dict[tuple[str, str, int], list[Row]]:
    """Returns the cells by who saves, what happens, and how many are kept."""
    result = collections.defaultdict(list)
    for row in rows:
        result[row["who"], row["what"], row["keep"]].append(row)
    return dict(result)


def draw(rows: Sequence[Row]) -> str:
    """Returns the picture: a strip for each block, a column for each operation, a line for each kind of fault."""
    parts, y = [], 40
    for i, (colour, fill) in enumerate(FILLS.items()):
        parts.append(f'<rect x="{10 + 175 * i}" y="8" width="10" height="10" fill="{fill}"/>')
        parts.append(f'<text x="{25 + 175 * i}" y="17">{escape(colour)}</text>')
    who = None
    for (name, what, keep), block in blocks(rows).items():
        if name != who:
            who, y = name, y + 14
            parts.append(f'<text x="10" y="{y}" font-weight="bold">{escape(name)}</text>')
            y += 6
        parts.append(f'<text x="10" y="{y + 8}">{escape(_label(name, what, keep))}</text>')
        lines = list(dict.fromkeys((row["fault"], row["is_same"]) for row in block))
        for line in lines:
            text = line[0] + (", same" if line[1] else "")
            parts.append(f'<text x="{_LEFT - 5}" y="{y + 7}" text-anchor="end" font-size="7">{text}</text>')
            cells = [row for row in block if (row["fault"], row["is_same"]) == line]
            # The worst of the states after a loss of power.
            worst = {n: max(group, key=_badness) for n, group in itertools.groupby(cells, lambda row: row["number"])}
            for colour, group in itertools.groupby(worst.values(), key=lambda row: row["colour"]):
                for start, count in _runs([row["number"] for row in group]):
                    parts.append(
                        f'<rect class="cells" x="{_LEFT + start * _STEP}" y="{y}" width="{count * _STEP - _GAP}" '
                        f'height="{_SIZE}" fill="{FILLS[colour]}"/>'
                    )
            y += _STEP
        last = max(row["number"] for row in block)
        grid = "".join(f"M{_LEFT + i * _STEP - _GAP / 2} {y - _STEP * len(lines)}V{y}" for i in range(1, last + 1))
        parts.append(f'<path d="{grid}" stroke="white" stroke-width="{_GAP}"/>')
        y += 6
    width = _LEFT + 10 + _STEP * (1 + max(row["number"] for row in rows))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 900)}" height="{y + 10}" '
    style = 'font-family="sans-serif" font-size="10"><rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head + style, *parts, "</svg>\n"])


def tables(rows: Sequence[Row]) -> str:
    """Returns the page's tables: cells of each colour by block, and the operations of the cells that are not green."""
    lines = [f"| who | what | {' | '.join(FILLS)} |", "|---|---|" + "---|" * len(FILLS)]
    for (who, what, keep), block in blocks(rows).items():
        counts = collections.Counter(row["colour"] for row in block)
        numbers = " | ".join(str(counts[colour] or "") for colour in FILLS)
        lines.append(f"| {who} | {_label(who, what, keep)} | {numbers} |")
    bad = collections.defaultdict(dict)
    for row in rows:
        if row["colour"] not in (NEW, BEFORE):
            bad[row["who"], row["what"], row["fault"], row["colour"]][_plain(row["operation"])] = None
    if bad:
        lines += ["", "| who | what | fault | it | at |", "|---|---|---|---|---|"]
        for (who, what, fault, colour), operations in bad.items():
            lines.append(f"| {who} | {what} | {fault} | {colour} | {', '.join(operations)} |")
    return "\n".join(lines) + "\n"


def _label(who: str, what: str, keep: int) -> str:
    if "export" in what:
        return what
    if "Backup" in who:
        return f"{what}, double_checkpoint={keep > 1}"
    return f"{what}, keep {keep}"


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the start and the length of each run of successive numbers."""
    result: list[tuple[int, int]] = []
    for number in numbers:
        if result and sum(result[-1]) == number:
            result[-1] = result[-1][0], result[-1][1] + 1
        else:
            result.append((number, 1))
    return result


def _badness(row: Row) -> int:
    return list(FILLS).index(row["colour"])


def _plain(operation: str) -> str:
    """Returns an operation without the random parts of its names."""
    return re.sub(r"(\.\d+-[0-9a-f]{8})|tempstate\d+|(?<=_temp)[\w-]+", "", operation)
