"""Run card: a page in Markdown from which a stranger repeats a run: data, settings, environment, results, commands.

print(describe(run))
"""

import os
import pathlib
from typing import Any

from distloop.log import printable
from distloop.reports.runs import Run
from distloop.settings.config import fields
from distloop.workdir.records import show_number
from distloop.workdir.run_files import manifests_of, program_of

_POSITION = ("batches", "examples", "skipped", "state")  # in the data; the other facts say which data it is
_NAMES = {"order": "order (0: the source's; else shuffled, by this version)"}


def describe(run: Run) -> str:
    """Returns the card of a run, in Markdown; facts that no file records are left out."""
    directory = os.path.dirname(run.file)
    saved, start = manifests_of(directory), run.starts[-1] if run.starts else {}
    metadata: dict[str, Any] = saved[max(saved)]["notes"] if saved else {}
    defaults = {name: field.metadata["default"] for name, field in fields().items()}
    hours = None if run.device_hours is None else show_number(run.device_hours)
    machine = {"devices": f"{start.get('devices', '-')} {start.get('kind', '')}", "device-hours": hours}
    bests = {name: f", best {c.best[0]:.6g} at step {c.best[1]}" for name, c in run.series.items() if c.best}
    sections: dict[str, dict[str, Any]] = {
        "Results": {name: f"last {curve.last:.6g}{bests.get(name, '')}" for name, curve in run.series.items()},
        "Data": {_NAMES.get(n, n): value for n, value in metadata.get("input", {}).items() if n not in _POSITION},
        "Settings": {n: value for n, value in run.settings.items() if n not in defaults or value != defaults[n]},
        "Environment": metadata.get("versions", {}) | machine,
    }
    lines = [f"# {printable(run.name, keep='')}", "", f"{run.status}, step {run.step}"]
    for title, facts in sections.items():
        pairs = ([printable(str(text), keep="").replace("|", r"\|") for text in fact] for fact in facts.items())
        rows = ["| {} | {} |".format(*pair) for pair in pairs]
        lines += ["", f"## {title}", "", "| | |", "|---|---|", *rows]
    return printable("\n".join([*lines, "", "## Commands", "", *_commands(directory, run.step)]))


def _commands(directory: str, step: int) -> list[str]:
    """Returns the lines that train, replay and load a run again, in a directory with its program."""
    if not (program := program_of(directory)):
        return ["None: the run was not started with distloop's flags."]
    lines = pathlib.Path(directory, "flags.txt").read_text(encoding="utf-8").splitlines()[1:]
    flags = [line for line in lines if not line.startswith(("--workdir=", "--replay="))]
    program, mark, rest = program.partition(" -- ")
    command, end = f"{program} --flagfile=flags.txt --workdir=", mark + rest
    load = """python -c "import tensorflow as tf; print(tf.saved_model.load('repeated/export').signatures)\""""
    loads = [load] * os.path.isdir(os.path.join(directory, "export"))
    runs = ("repeated", f"repeated --replay={step}", "following --init_from=repeated")
    return ["```sh", "cat > flags.txt <<'END'", *flags, "END", *(command + run + end for run in runs), *loads, "```"]
