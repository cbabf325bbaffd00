"""Tries every case of every law and the campaigns, in parts, and writes docs/evidence.md: what was tried and what fell.

    make wide                                     # the parts that have not come to their end at this commit
    make wide FLAGS='--only="folders a-d"'        # a part, once more

Each part is a run of pytest of its own: a process of tests that dies, as TensorFlow may let it, ends one part alone.
"""

import ast
import collections
import dataclasses
import datetime
import os
import pathlib
import platform
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as xml
from collections.abc import Sequence

from absl import app, flags

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence.md"
COLLECTIVES = "collectives"  # what is added over replicas
ADDED = ["test_laws.py", "test_testing.py", "data/", "distributed/", "evaluation/", "keras_models/", "model/"]
ADDED += ["optimizers/", "pipeline/", "sharding/", "tables/", "training/"]
# The option of each part, and the patterns of its files and folders.
PARTS = {
    "files": ("--wide", ["test_*.py"]),
    "campaigns": ("--wide", ["campaigns/"]),
    "folders a-d": ("--wide", ["[abd]*/", "checkpoints/"]),
    "folders e-m": ("--wide", ["[e-m]*/"]),
    "folders n-z": ("--wide", ["[n-z]*/"]),
    COLLECTIVES: ("--collectives", ADDED),
}
HEAD = """\
# Evidence

Written by `make wide`; do not edit. {date}, commit {commit}, Python {python}, {cores} CPU cores, no GPU: {total:,}
tests in {minutes:.0f} minutes, {failed} failed, {skipped} were skipped. It runs all cases that [laws.md](laws.md)
states and all campaigns, with TensorFlow's graph optimizers on, as in a user's run. Seconds are those of the tests,
several at once.

| tests | what they try | cases | failed | skipped | seconds |
| --- | --- | --- | --- | --- | --- |
"""
AGAIN = """\
Once more on virtual CPUs that add as GPUs do, by TensorFlow's collectives: {total:,} tests of {folders} in \
{minutes:.0f} minutes, {failed} failed, {skipped} were skipped.
"""

_ONLY = flags.DEFINE_list("only", [], f"Parts to run, also again: {', '.join(PARTS)}. Empty: what this commit lacks.")


@dataclasses.dataclass(frozen=True)
class Test:
    """A test that ran: its name, the file or folder that it is counted for, its outcome and its seconds."""

    name: str
    place: str
    outcome: str
    secs: float


@dataclasses.dataclass(frozen=True)
class Ran:
    """Tests that ran, and the seconds that they took together."""

    tests: Sequence[Test] = ()
    secs: float = 0.0

    def __add__(self, other: "Ran") -> "Ran":
        return Ran([*self.tests, *other.tests], self.secs + other.secs)

    def counts(self) -> dict[str, int]:
        """Returns the number of tests, and of those that failed and were skipped."""
        outcomes = collections.Counter(test.outcome for test in self.tests)
        return {"total": len(self.tests), "failed": outcomes["failed"], "skipped": outcomes["skipped"]}


def run(part: str, results: pathlib.Path, options: Sequence[str]) -> None:
    """Runs a part with `options` of pytest, which writes `<part>.xml`, or `<part>.cut.xml` if not all tests ran."""
    option, patterns = PARTS[part]
    found = [path for pattern in patterns for path in (ROOT / "tests").glob(pattern) if path.name != "__pycache__"]
    paths = sorted(str(path) for path in found if path.is_dir() or path.name.startswith("test_"))
    cut, whole = results / f"{part}.cut.xml", results / f"{part}.xml"
    whole.unlink(missing_ok=True)
    code = subprocess.call([sys.executable, "-m", "pytest", *options, option, f"--junitxml={cut}", *paths], cwd=ROOT)
    if code in (0, 1):  # all passed, some failed
        cut.rename(whole)


def read(path: pathlib.Path) -> Ran:
    """Returns what stands in a file that pytest has written, or nothing if there is none."""
    if not path.exists():
        return Ran()
    (suite,) = xml.parse(path).getroot().iter("testsuite")
    return Ran([_read_test(case) for case in suite.iter("testcase")], float(suite.get("time", 0)))


def _read_test(case: xml.Element) -> Test:
    module = [part for part in case.get("classname", "").split(".") if part.islower()]
    outcomes = {child.tag for child in case} & {"failure", "error", "skipped"}
    outcome = "skipped" if outcomes == {"skipped"} else "failed" if outcomes else "passed"
    place = "/".join(module[: 3 if module[1:2] == ["campaigns"] else 2]) + ("" if len(module) > 2 else ".py")
    return Test(f"{'/'.join(module)}.py::{case.get('name')}", place, outcome, float(case.get("time", 0)))


def render(results: pathlib.Path) -> str:
    """Returns the page: a row for each file and folder of tests, and the names of what failed or is missing."""
    ran = {part: read(results / f"{part}.xml") + read(results / f"{part}.cut.xml") for part in PARTS}
    again = ran.pop(COLLECTIVES)
    first = sum(ran.values(), Ran())
    text = HEAD.format(
        date=datetime.date.today(),
        commit=results.name,
        python=platform.python_version(),
        cores=os.cpu_count(),
        minutes=first.secs / 60,
        **first.counts(),
    )
    places = {test.place for test in first.tests}
    for place in sorted(places, key=lambda place: (place.endswith(".py"), place)):
        of_place = Ran([test for test in first.tests if test.place == place])
        secs = sum(test.secs for test in of_place.tests)
        text += "| `{}` | {} | {total:,} | {failed} | {skipped} | {:,.0f} |\n".format(
            place, describe(place), secs, **of_place.counts()
        )
    folders = ", ".join(f"`{place}`" for place in sorted({test.place for test in again.tests}))
    said = AGAIN.format(folders=folders, minutes=again.secs / 60, **again.counts())
    text += f"\n{textwrap.fill(said, 120)}\n"
    failed = [f"- `{test.name}`" for test in [*first.tests, *again.tests] if test.outcome == "failed"]
    missing = [f"- {part}, not all tests of it" for part in PARTS if not (results / f"{part}.xml").exists()]
    for title, lines in [("Failed", failed), ("Not run", missing)]:
        text += f"\n{title}:\n\n" + "\n".join(lines) + "\n" if lines else ""
    return text


def describe(place: str) -> str:
    """Returns the first line of the docstring of a file of tests; of a folder, what stands in its `__init__.py`."""
    path = ROOT / place if place.endswith(".py") else ROOT / place / "__init__.py"
    text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "") if path.exists() else ""
    folder = "a campaign" if "/campaigns/" in place else f"the folder `distloop/{place.rpartition('/')[2]}`"
    return text.partition("\n")[0] or folder


def main(arguments: Sequence[str]) -> None:
    """Runs parts, with the arguments after `--` as options of pytest, and writes the page after each."""
    if unknown := set(_ONLY.value) - set(PARTS):
        raise app.UsageError(f"--only={','.join(sorted(unknown))}: the parts are {', '.join(PARTS)}.")
    code = ["distloop", "experiments", "tests", "pyproject.toml"]
    commit = subprocess.check_output(["git", "log", "-1", "--format=%h", "--", *code], cwd=ROOT, text=True).strip()
    results = ROOT / "runs" / "wide" / commit
    results.mkdir(parents=True, exist_ok=True)
    for part in _ONLY.value or [part for part in PARTS if not (results / f"{part}.xml").exists()]:
        run(part, results, arguments[1:])
        PAGE.write_text(render(results), encoding="utf-8")
    sys.exit("\n- " in PAGE.read_text(encoding="utf-8"))  # failed, or not run


if __name__ == "__main__":
    app.run(main)
