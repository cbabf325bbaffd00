"""Tests the documents: blocks of Python run, commands name modules and flags that exist, errors are quoted right."""

import ast
import importlib.util
import pathlib
import re

import pytest
from absl import flags

from distloop import config, launch

ROOT = pathlib.Path(__file__).resolve().parent.parent
GUIDES = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "WORKSPACE.md", *GUIDES]
LAUNCHER = {*launch._NUMBERS, "hosts"}
OTHERS = LAUNCHER | {"help", "json", "png", "workloads", "replicas", "logdir", "flagfile"}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page, language):
    """Lists the fenced blocks of a language that are to run."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def shortened(program):
    """Lets a program take few steps."""
    program = re.sub(r"\bsteps=[\d_]+", "steps=2", re.sub(r"\bepochs=\d+", "steps=2", program))
    return program.replace(".fit(train, steps=2, verbose=0)", ".fit(train, epochs=1, verbose=0)").replace(
        ".fit(pairs, steps=2, verbose=0)", ".fit(pairs, epochs=1, verbose=0)"
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = "\n".join(blocks(page, "python"))
    exec(compile(shortened(program), page.name, "exec"), {"__name__": page.stem})


@each_page
def test_blocks_that_do_not_run_say_why(page):
    for head in re.findall(r"^```(\S.*)$", page.read_text(encoding="utf-8"), re.M):
        assert head in ("python", "sh") or re.fullmatch(r"python no-run: \S.{10,}", head), head


@each_page
def test_commands_name_modules_and_flags_that_exist(page):
    text = page.read_text(encoding="utf-8")
    modules = set(re.findall(r"-m ((?:distloop|experiments)[.\w]*)", text))
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    assert not missing
    known = {field for field in config.Config.__dataclass_fields__} | OTHERS | set(flags.FLAGS)
    of_experiments = "\n".join(path.read_text() for path in (ROOT / "experiments").rglob("*.py"))
    known |= set(re.findall(r'DEFINE_\w+\(\s*"(\w+)"', of_experiments))
    for line in re.findall(r"^.*python\S* -m (?:distloop|experiments).*$", text, re.M):
        unknown = set(re.findall(r"--(\w+)", line)) - known
        assert not unknown, line


@each_page
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def messages():
    """Lists the texts in the source, with a mark for each part that is formatted."""
    found = []
    for path in sorted((ROOT / "distloop").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


QUOTED = re.findall(r"^> (.+)$", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("quoted", QUOTED)
def test_an_error_is_quoted_as_it_is(quoted):
    pattern = ".*".join(re.escape(part) for part in quoted.split("…"))
    assert any(re.search(pattern, text, re.S) for text in messages()), quoted


def test_the_guides_are_linked():
    for page in PAGES[:2]:
        text = page.read_text(encoding="utf-8")
        assert all(f"(docs/{guide.name})" in text for guide in GUIDES), page.name
