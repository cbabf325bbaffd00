"""Writes settings.md from the help texts in `distloop/config.py`.

python docs/settings.py                                # or: make docs
"""

import pathlib

from distloop import flags

PAGE = pathlib.Path(__file__).with_suffix(".md")

HEAD = """\
# Settings

Written by `make docs` from the help texts in the code; do not edit.

Every setting is a field of `distloop.Config` and, after `distloop.define_flags()`, a flag of the same name. In order of
precedence: what `fit` is given, then the command line, then the file of `--config`, then the program's defaults in
`define_flags(...)`, then the defaults on this page.

`--config=run.yaml` reads flags by name from a YAML file (`pip install "distloop[yaml]"`) or a JSON file, the program's
own flags included:

    workdir: runs/digits
    steps: 2000
    checkpoint_every: 10 min
    learning_rate: 1e-3

`config.json` of a run is such a file. `--config=runs/digits/config.json --workdir=runs/other` repeats the
run elsewhere.
"""


def row(setting: flags.Setting) -> str:
    """Returns a setting's line of the table."""
    choices = ", ".join(f"`{choice}`" for choice in setting.choices)
    text = setting.help + (f" One of {choices}." if choices else "")
    default = f"`{setting.default}`" if setting.default != "" else "empty"
    return f"| `{setting.name}` | {default} | {text} |\n".replace("^", "\\^")


def render() -> str:
    """Returns the page."""
    tables = [
        f"\n## {heading}\n\n| setting | default | what it does |\n|---|---|---|\n" + "".join(map(row, settings))
        for heading, settings in flags.groups().items()
    ]
    return HEAD + "".join(tables)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
