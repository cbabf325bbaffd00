"""Runs the tests that a change reaches, by the imports of the package and of the tests.

    python -m tests.reach                           # what differs from the last commit, or that commit itself
    python -m tests.reach --since=main -- -n2 -x    # what differs from a branch, with options of pytest

A changed module reaches its own tests (tests/<folder>/test_<module>*.py), the slow ones too, and the fast tests of what
names it: test files that import it, and the tests of the modules that import it. A module without tests of its own
reaches the fast tests of its folder. A changed test file reaches itself. The rules of the house and the fast cases of
the laws run after every change.
"""

import pathlib
import subprocess
import sys
from collections.abc import Iterable, Sequence

from absl import app, flags

import distloop
from tests.imports import MODULES, ROOT, imports_of, modules_imported, names_of

TESTS = ROOT / "tests"
ALWAYS = [TESTS / name for name in ("test_house.py", "test_sizes.py", "test_laws.py", "test_errors.py")]

_SINCE = flags.DEFINE_string("since", "", "A commit to compare with; empty: the last one, or the one before it.")


def changed_files(since: str) -> list[pathlib.Path]:
    """Returns the files that differ from a commit; without one from the last commit, or those of it if none does."""

    def run(*arguments: str) -> list[str]:
        return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).splitlines()

    new = run("ls-files", "--others", "--exclude-standard")
    names = run("diff", "--name-only", since or "HEAD") + new
    return [ROOT / name for name in names or run("diff", "--name-only", "HEAD~1")]


def reach(changed: Iterable[pathlib.Path]) -> tuple[set[pathlib.Path], set[pathlib.Path]]:
    """Returns the test files that a change reaches, and those of them whose slow tests run, too."""
    files = set(TESTS.rglob("test_*.py"))
    changed = set(changed)
    modules = {name for name, path in MODULES.items() if path in changed}
    users = {name for name in MODULES if modules & set(modules_imported(name))}
    whole = changed & files | {file for name in modules for file in _tests_of(name)}
    fast = {file for name in users for file in _tests_of(name)} | {file for file in files if modules & _named_by(file)}
    for name in (name for name in modules if not _tests_of(name)):
        fast.update(TESTS.joinpath(*name.split(".")[:-1]).rglob("test_*.py"))
    shared = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in changed - files if TESTS in path.parents
    }
    for file in files:
        imported = {part for name in imports_of(file) for part in (name, name.rpartition(".")[0])}
        if "tests.conftest" in shared or shared & imported:
            fast.add(file)
    if any(path.suffix == ".md" or ROOT / "docs" in path.parents for path in changed):
        fast.add(TESTS / "test_documents.py")
    if any(ROOT / "experiments" in path.parents for path in changed):
        whole.update((TESTS / "experiments").rglob("test_*.py"))
    return files & (whole | fast | set(ALWAYS)), files & whole


def _tests_of(module: str) -> list[pathlib.Path]:
    *folders, name = module.split(".")
    return list(TESTS.joinpath(*folders).glob(f"test_{name}*.py"))


def _named_by(path: pathlib.Path) -> set[str]:
    """Returns the modules of the package that a test file imports, or takes a public name of."""
    imported = {name.removeprefix("distloop.") for name in imports_of(path) if name.startswith("distloop.")}
    public = {module for name, module in distloop._MODULES.items() if name in names_of(path)}
    return imported | {name.rpartition(".")[0] for name in imported} | public - {"trainer", "settings.config"}


def main(arguments: Sequence[str]) -> None:
    """Runs pytest, with the arguments after `--`."""
    changed = changed_files(_SINCE.value)
    files, whole = reach(changed)
    shown = ", ".join(str(path.relative_to(ROOT)) for path in changed[:5]) + (" ..." if len(changed) > 5 else "")
    print(f"A change of {shown} reaches {len(files)} files of tests, {len(whole)} of them with slow tests.", flush=True)
    slow = ":".join(str(path) for path in sorted(whole))
    command = [sys.executable, "-m", "pytest", *arguments[1:], f"--slow_in={slow}", *map(str, sorted(files))]
    sys.exit(subprocess.call(command, cwd=ROOT))


if __name__ == "__main__":
    app.run(main)
