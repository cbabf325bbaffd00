"""Writes evidence.md: what `make wide` has tried, from the files that its two runs of pytest have written.

python docs/evidence.py runs/wide.xml runs/collectives.xml
"""

import ast
import collections
import datetime
import os
import pathlib
import platform
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Mapping, Sequence

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent
PAGE = DOCS / "evidence.md"
HEAD = """\
# Evidence

Written by `make wide`; do not edit. {date}, commit {commit}, Python {python}, {cores} CPU cores, no GPU: {total} tests
in {minutes:.0f} minutes, {failed} failed, {skipped} were skipped. It runs all cases that [laws.md](laws.md) states and
all campaigns, with TensorFlow's graph optimizers on, as in a user's run. Seconds are those of the tests, four at once.

| tests | what they try | cases | failed | skipped | seconds |
| --- | --- | --- | --- | --- | --- |
"""


def read(path: str) -> tuple[float, dict[str, list[tuple[str, str, float]]]]:
    """Returns the seconds of a run of pytest, and its tests by folder or file: name, outcome and seconds of each."""
    tests: dict[str, list[tuple[str, str, float]]] = collections.defaultdict(list)
    (suite,) = xml.parse(path).getroot().iter("testsuite")
    for case in suite.iter("testcase"):
        module = [part for part in case.get("classname", "").split(".") if part.islower()]
        outcomes = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcome = "skipped" if outcomes == {"skipped"} else "failed" if outcomes else "passed"
        name = f"{'/'.join(module)}.py::{case.get('name')}"
        place = "/".join(module[:2]) + ("" if len(module) > 2 else ".py")
        tests[place].append((name, outcome, float(case.get("time", 0))))
    return float(suite.get("time", 0)), tests


def describe(place: str) -> str:
    """Returns the first line of the docstring of a file of tests; of a folder, what stands in its `__init__.py`."""
    path = ROOT / place if place.endswith(".py") else ROOT / place / "__init__.py"
    text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "") if path.exists() else ""
    return text.partition("\n")[0] or f"the folder `distloop/{place.rpartition('/')[2]}`"


def render(secs: float, tests: Mapping[str, Sequence[tuple[str, str, float]]]) -> str:
    """Returns the page."""
    rows, fallen = "", []
    for place in sorted(tests, key=lambda place: (place.endswith(".py"), place)):
        outcomes = collections.Counter(outcome for _, outcome, _ in tests[place])
        fallen += [name for name, outcome, _ in tests[place] if outcome == "failed"]
        taken = sum(taken for _, _, taken in tests[place])
        counts = f"{len(tests[place]):,} | {outcomes['failed']} | {outcomes['skipped']} | {taken:,.0f}"
        rows += f"| `{place}` | {describe(place)} | {counts} |\n"
    every = [outcome for of in tests.values() for _, outcome, _ in of]
    commit = subprocess.check_output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], text=True).strip()
    head = HEAD.format(
        date=datetime.date.today(),
        commit=commit,
        python=platform.python_version(),
        cores=os.cpu_count(),
        total=f"{len(every):,}",
        minutes=secs / 60,
        failed=every.count("failed"),
        skipped=every.count("skipped"),
    )
    return head + rows + "".join(["\nFailed:\n\n", *(f"- `{name}`\n" for name in fallen)] if fallen else [])


def render_again(secs: float, tests: Mapping[str, Sequence[tuple[str, str, float]]]) -> str:
    """Returns what the page says of the second run."""
    every = [(name, outcome) for of in tests.values() for name, outcome, _ in of]
    counts = collections.Counter(outcome for _, outcome in every)
    fallen = [name for name, outcome in every if outcome == "failed"]
    return (
        f"\nOnce more on virtual CPUs that add as GPUs do, by TensorFlow's collectives: {len(every):,} tests of "
        f"{', '.join(f'`{place}`' for place in sorted(tests))}\nin {secs / 60:.0f} minutes, {counts['failed']} failed, "
        f"{counts['skipped']} were skipped.\n"
    ) + "".join(f"- failed: `{name}`\n" for name in fallen)


if __name__ == "__main__":
    wide, collectives = map(read, sys.argv[1:])
    PAGE.write_text(render(*wide) + render_again(*collectives), encoding="utf-8")
