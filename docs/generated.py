"""Writes what the code says of itself into the pages: settings.md, signatures in reference/, the map in WORKSPACE.md.

python docs/generated.py                               # or: make docs

In reference/, each block of directives for Sphinx is followed by a block for readers of the files: signatures and
docstrings of the same names. The site leaves the second block out, as it shows the first.

The map keeps the order of its folders, and of the files beside them; a new one is appended and may be moved by hand.
"""

import ast
import importlib
import inspect
import pathlib
import re
from typing import Any

from distloop.settings import flags

DOCS = pathlib.Path(__file__).parent
PAGE = DOCS / "settings.md"
GUIDE = DOCS.parent / "WORKSPACE.md"
PACKAGE = DOCS.parent / "distloop"
REFERENCE = sorted((DOCS / "reference").glob("*.md"))

HEAD = """\
# Settings

<!-- Written by `make docs` from the help texts in the code; do not edit. -->

Every setting is a field of `distloop.Config` and, after `distloop.define_flags()`, a flag of the same name. In order of
precedence: what `fit` is given, then the command line, then the file of `--config`, then the program's defaults in
`define_flags(...)`, then the defaults on this page.

`--config=run.yaml` reads flags by name from a YAML file (`pip install ".[yaml]"`) or a JSON file, the program's
own flags included:

    workdir: runs/digits
    steps: 2000
    checkpoint_every: 10 min
    learning_rate: 1e-3

`config.json` of a run is such a file. `--config=runs/digits/config.json --workdir=runs/other` repeats the
run elsewhere.
"""

FENCE = "```text written by make docs\n"
DIRECTIVES = re.compile(rf"(^```{{eval-rst}}\n(.*?)^```\n)(?:\n{re.escape(FENCE)}.*?^```\n)?", re.M | re.S)


def row(setting: flags.Setting) -> str:
    """Returns a setting's line of the table."""
    choices = ", ".join(f"`{choice}`" for choice in setting.choices)
    text = setting.help + (f" One of {choices}." if choices else "")
    default = f"`{setting.default}`" if setting.default != "" else "empty"
    return f"| `{setting.name}` | {default} | {text} |\n".replace("^", "\\^")


def render() -> str:
    """Returns the page of the settings."""
    tables = [
        f"\n## {heading}\n\n| setting | default | what it does |\n|---|---|---|\n" + "".join(map(row, settings))
        for heading, settings in flags.groups().items()
    ]
    return HEAD + "".join(tables)


def render_reference(page: str) -> str:
    """Returns a page of the reference with signatures and docstrings below each block of directives."""
    return DIRECTIVES.sub(lambda found: f"{found[1]}\n{FENCE}{described(found[2])}```\n", page)


def described(directives: str) -> str:
    """Returns signatures and docstrings of the names in directives of autodoc."""
    texts = []
    for directive in re.split(r"^(?=\.\. )", directives, flags=re.M)[1:]:
        kind, name = re.search(r"^\.\. (?:py:)?(?:auto)?(\w+):: ([\w.]+)", directive, re.M).groups()
        members = re.findall(r"auto(?:property|method):: [\w.]+\.(\w+)", directive)
        for names in re.findall(r":members: (.+(?:\n {4,}.+)*)", directive):
            members += re.findall(r"\w+", names)
        is_called = f"{name}()" not in directive and kind == "class" and "class-doc-from: class" not in directive
        texts += [entry(name, with_arguments=is_called or kind in ("function", "exception"))]
        texts += [entry(f"{name}.{member}", with_arguments=True) for member in members]
    return "\n".join(texts)


def entry(name: str, *, with_arguments: bool) -> str:
    """Returns the signature of a public name, and its docstring below it, indented.

    Args:
        name: from `distloop` on.
        with_arguments: whether a class is one that users call; another has its name alone.
    """
    value = find(name)
    docs = [inspect.getdoc(value) or ""]
    if name == "distloop.Config":
        docs = [docs[0].partition("\n\nAttributes, with their defaults:")[0]]
    shown = name.removeprefix("distloop.distributed.collectives.")
    if inspect.isclass(value) and with_arguments:
        if "__init__" in vars(value):  # whose first line is for readers of the code
            docs.append((inspect.getdoc(value.__init__) or "").partition("\n\n")[2])
        shown += arguments(value)
    elif callable(value) and not inspect.isclass(value):
        shown += arguments(value)
    text = "\n\n".join(doc for doc in docs if doc).replace("```", "'''")
    return f"{shown}\n" + "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())


def find(name: str) -> Any:
    """Returns what a dotted name stands for; a property as itself."""
    module, value, parts = "distloop", importlib.import_module("distloop"), name.split(".")[1:]
    for part in parts:
        module = f"{module}.{part}"
        value = (
            value.__dict__.get(part)
            if inspect.isclass(value) and part in value.__dict__
            else (getattr(value, part, None) or importlib.import_module(module))
        )
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value


def arguments(value: Any) -> str:
    """Returns the arguments of a function or class, without types, over several lines where one is too long."""
    signature = inspect.signature(value)
    shown = [p.replace(annotation=p.empty) for name, p in signature.parameters.items() if name not in ("self", "cls")]
    text = str(signature.replace(parameters=shown, return_annotation=signature.empty))
    text = re.sub(r"<function (\w+) at 0x\w+>|<class '(?:\w+\.)*(\w+)'>", r"\1\2", text)
    if len(text) <= 90:
        return text
    return "(\n" + "".join(f"        {part},\n" for part in re.split(r", (?=[\w*])", text[1:-1])) + "    )"


MAP = re.compile(r"(?<=^    distloop/\n)(.*?)(?=^    experiments/)", re.M | re.S)
MAP_WIDTH, NAME_WIDTH = 120, 24


def render_map(guide: str) -> str:
    """Returns WORKSPACE.md with a line a folder, and a line a file where there are several, from their docstrings."""
    former = re.findall(r"^      (\w+)", MAP.search(guide)[0], re.M)
    paths = [*PACKAGE.glob("*.py"), *(path.parent for path in PACKAGE.glob("*/__init__.py"))]
    names = {path.stem: path for path in sorted(paths)}
    order = [name for name in dict.fromkeys(former) if name in names]
    lines = []
    for name in [*order, *(name for name in names if name not in order)]:
        path = names[name]
        if path.is_dir():
            files = [file for file in sorted(path.glob("*.py")) if not file.stem.startswith("__")]
            lines.append(map_line(path / "__init__.py", f"{name}/", 6))
            lines += [map_line(file, file.stem, 8) for file in (files if len(files) > 1 else ())]
        else:
            lines.append(map_line(path, name, 6))
    return MAP.sub(lambda _: "".join(lines), guide)


def map_line(path: pathlib.Path, name: str, indent: int) -> str:
    """Returns a file's line of the map: its name, what its docstring's first line says, which files to read first."""
    head, _, rest = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).partition("\n")
    text = re.sub(r"^[^:;,.]{1,40}: |; (without|no) TensorFlow\.", "", head).rstrip(".")
    text = text[0].upper() + text[1:]
    start = " " * indent + f"{name:{NAME_WIDTH - indent + 6}}"
    start = start if start.endswith(" ") else f"{start} "
    read_first = re.search(r"^Read first: (.+)\.$", rest, re.M)
    files = read_first[1].split(", ") if read_first else []
    least = re.split("[,:]", text)[0]  # of the text, which is cut for the files
    while len(files) > 1 and len(start + least + "; read first: " + ", ".join(files)) > MAP_WIDTH:
        files.pop()
    end = f"; read first: {', '.join(files)}" if files else ""
    width = MAP_WIDTH - len(start + end)
    while len(text) > width:
        shorter = max((text.rpartition(mark)[0] for mark in (". ", "; ", ", ", ": ", " (")), key=len)
        text = shorter if len(shorter) > 20 else text[:width].rpartition(" ")[0]
    return f"{start}{text}{end}\n"


if __name__ == "__main__":
    GUIDE.write_text(render_map(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
    PAGE.write_text(render(), encoding="utf-8")
    for path in REFERENCE:
        path.write_text(render_reference(path.read_text(encoding="utf-8")), encoding="utf-8")
