"""The page: a table of models and promises, made from the cells that are done."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.public_models import trials, zoo

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "public_models.md"
COLUMNS = {
    "rebuilt": "rebuilt",
    "keras": "next to Keras's fit",
    "replicas_2": "2 replicas",
    "replicas_4": "4 replicas",
    "microbatches": "2 microbatches",
    "mixed_float16": "float16",
    "mixed_bfloat16": "bfloat16",
    "resume": "resume",
    "export": "SavedModel",
    "keras_file": "Keras file",
    "split": "2 stages",
    "gpu_graph": "falls to the host",
}

INTRODUCTION = """\
# Public models

Architectures of `keras.applications` and backbones of KerasHub, with random weights, under distloop's promises. The
command knows every architecture, a small form of each family of them, and {backbones} backbones; the table says which
of them were run. Anyone can make it again, or a part of it:

```sh
pip install -e ".[public-models]"
python -m experiments.public_models --models="MobileNet|hub/Bert"  # a part; without --models all of it, for hours
python -m experiments.public_models --page
```

Each trial takes {steps} steps ({exact_steps} in float64) of SGD with momentum on one batch of {rows} rows: images
of 32 x 32 pixels, or the smallest that the architecture accepts; backbones of one or two layers of width 16.
Dropout is off, BatchNormalization is synchronized, and routers of experts have no balancing loss: it multiplies
means over the rows that it sees, so that on several replicas it is the mean of the replicas' losses. All trials of
a model start from the same weights. A number is the largest difference of a variable, relative to the distance that
it moved in those steps, which is far stricter than relative to the variable.

| column | what is compared | tolerance |
|---|---|---|
| rebuilt | predictions of the copy that `from_keras(model)` makes, with the model's | {float32:g} |
| next to Keras's fit | `Trainer(from_keras(make_model)).fit` and `model.fit` | {float32:g} |
| 2, 4 replicas | with 1 replica | {float32:g} |
| 2 microbatches | with 1; BatchNormalization, whose statistics are a microbatch's, is frozen in both | {float32:g} |
| float16, bfloat16 | the trained weights with those of float32 | {half:g} |
| resume | variables with other bits after a restart in another process from step {saved} | 0 |
| SavedModel, Keras file | predictions of the export, loaded again, with `trainer.predict` | {float32:g} |
| 2 stages | `distloop.split` over 2 devices with 1 replica | {float32:g} |
| falls to the host | operations of the forward and backward pass without a GPU kernel, by `trainer.audit` | 0 |

Members of a family have the same blocks in other numbers, and one model stands for them: its cells answer where a
cell says *family*; the row names it in parentheses. For keras.applications it is a small form: the first layers of an
architecture, until each kind of its layers has occurred, and a head. Other blocks of the same kinds add nothing but
rounding, so an architecture itself is only compared in float64, where that was done.

Both are trained with `eager=True`, as tracing the graph of an architecture takes most of a minute, and compared in
float64: BatchNormalization over the few values of small images is ill-conditioned in float32 (InceptionV3 0.4 next to
Keras, MobileNetV2 0.8 on 2 replicas; in float64 8e-11 and 2e-13). Their tolerance is {float64:g} wherever the trial
was done so; cells.jsonl calls it `exact`. Keras's own `fit` runs eagerly there, and the restart from step 1 is a new
trainer in the same process.

How to read a cell: a number within its tolerance holds. **A number in bold** is beyond it, and what follows says
why: *float64* is the same comparison of the trained weights in float64, where rounding is gone (tolerance
{float64:g}; for 4 replicas, that of 2). If that holds, float32 is ill-conditioned for this model at this size, and
nothing is wrong. In float16 and bfloat16, *Keras* is how far Keras's own `fit` in the same precision is from
float32 (1: it applied none of 40 steps, as no gradient was finite; or it ended in an error). A letter stands for a
sentence below the table: distloop *refused* with it, or it is an *error* of Keras, TensorFlow or the model.
*not run* means what it says.

{count}

Put together on {date}, from cells of 2026-11-23 and later: Python {python},
{versions}, {cores} CPU cores, no GPU.
The numbers, with the names of the variables that differ most: [cells.jsonl](../experiments/public_models/cells.jsonl).
"""


def write(cells: Sequence[Mapping[str, Any]], *, is_page: bool) -> None:
    """Prints the table, or writes the page and the cells beside it."""
    if not is_page:
        print(table(cells))
        return
    PAGE.write_text(f"{introduction(cells)}\n{table(cells)}")
    lines = "".join(json.dumps(cell) + "\n" for cell in cells)
    pathlib.Path(__file__).with_name("cells.jsonl").write_text(lines)


def introduction(cells: Sequence[Mapping[str, Any]]) -> str:
    packages = ("tensorflow", "keras", "keras-hub")
    return INTRODUCTION.format(
        backbones=len(zoo.BACKBONES), steps=trials.STEPS, exact_steps=trials.EXACT_STEPS,
        rows=zoo.ROWS, saved=trials.SAVED_STEP,
        float32=trials.FLOAT32, float64=trials.FLOAT64, half=trials.HALF, count=counted(cells),
        date=datetime.date.today(), python=platform.python_version(), cores=os.cpu_count(),
        versions=", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages),
    )  # fmt: skip


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table as Markdown, with the sentences of its letters below."""
    by_place = {(cell["model"], cell["cell"]): cell for cell in cells}
    sentences: dict[str, str] = {}
    rows = [["model", *COLUMNS.values()], ["---"] * (1 + len(COLUMNS))]
    for model in zoo.NAMES:
        texts = [text(by_place, model, column, sentences) for column in COLUMNS]
        if any(cell["model"] == model for cell in cells):
            rows.append([_title(model), *texts])
    missing = [model for model in zoo.NAMES if not any(cell["model"] == model for cell in cells)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    for kind, names in (("Left to the model of their family", "family"), ("Not run", "not run")):
        if models := [model for model in missing if kind_of(by_place, model, "keras") == names]:
            lines += ["", wrapped(f"{kind}: {', '.join(map(_title, models))}.")]
    lines += ["", *(wrapped(f"- {letter}: {sentence}", "  ") for sentence, letter in sentences.items())]
    return "\n".join(lines) + "\n"


def _title(model: str) -> str:
    """Returns a model's name, and after it the model that stands for its family."""
    representative = zoo.representative_of(model, "mixed_float16")
    names = [name.removesuffix("Backbone") for name in (model, representative)]
    return names[0] if representative == model else f"{names[0]} ({names[1]})"


def text(cells: Mapping[tuple[str, str], Any], model: str, column: str, sentences: dict[str, str]) -> str:
    """Returns the text of a cell; adds to the sentences, each with its letter."""
    cell = cells.get((model, column))
    if cell is None and (zoo.representative_of(model, column), column) in cells:
        return "family"
    if cell is None:  # its trial may have ended before it
        cell = cells.get((model, "one_replica"), cells.get((model, "exact")))
        if cell is None or column not in ("rebuilt", "keras", "export", "keras_file"):
            return "not run"
    for kind in ("refused", "error", "unfinished"):
        if kind in cell:
            sentence = f"{kind}: {shortened(cell[kind])}"
            letter = sentences.setdefault(sentence, letters(len(sentences)))
            return letter + _by_keras(cell)
    number = str(cell["difference"]) if column in ("resume", "gpu_graph") else f"{cell['difference']:.0e}"
    if cell["difference"] <= cell["tolerance"]:
        return number.replace("0e+00", "0")
    if column == "gpu_graph":
        return f"**{number}** {cell['worst']}"
    exact = cells.get((model, f"{column.replace('replicas_4', 'replicas_2')}/float64"))
    reason = f" float64 {exact['difference']:.0e}" if exact and "difference" in exact else ""
    return f"**{number}**{reason}{_by_keras(cell)}"


def _by_keras(cell: Mapping[str, Any]) -> str:
    """Returns what became of Keras's own `fit` in the same precision, where it was run."""
    if "keras" not in cell:
        return ""
    return " Keras " + ("error" if cell["keras"] is None else f"{cell['keras']:.0e}")


def counted(cells: Sequence[Mapping[str, Any]]) -> str:
    """Returns how many cells hold, are beyond their tolerance with a reason, or else."""
    by_place = {(cell["model"], cell["cell"]): cell for cell in cells}
    counts = dict.fromkeys(("hold", "explained", "unexplained", "refused", "failed", "not run", "family"), 0)
    for model in zoo.NAMES:
        for column in COLUMNS:
            counts[kind_of(by_place, model, column)] += 1
    return (
        f"Of {sum(counts.values()) - counts['family']} cells {counts['hold']} hold; {counts['explained']} are beyond "
        "their tolerance and "
        f"explained beside it;\n{counts['unexplained']} are beyond it and not explained; {counts['refused']} are "
        f"refused in a sentence; {counts['failed']} ended in an error\nor took too long; {counts['not run']} were "
        f"not run. {counts['family']} more are left to the model of a family."
    )


def kind_of(cells: Mapping[tuple[str, str], Any], model: str, column: str) -> str:
    cell = cells.get((model, column), {})
    if "difference" not in cell:
        if "refused" in cell:
            return "refused"
        if cell:
            by_keras = cell.get("keras", 0.0)
            return "explained" if by_keras is None or by_keras > trials.HALF else "failed"  # Keras's own fit fails, too
        return "family" if (zoo.representative_of(model, column), column) in cells else "not run"
    if cell["difference"] <= cell["tolerance"]:
        return "hold"
    exact = cells.get((model, f"{column.replace('replicas_4', 'replicas_2')}/float64"), {})
    if exact.get("difference", 1.0) <= trials.FLOAT64 or cell["difference"] <= 2 * (cell.get("keras") or 0.0):
        return "explained"
    return "unexplained"


def wrapped(text: str, indent: str = "") -> str:
    """Returns a paragraph in lines of 120 characters; words and links stay whole."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def letters(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else letters(index // 26 - 1) + letters(index % 26)


def shortened(sentence: str) -> str:
    """Returns a sentence in one line that Markdown leaves as it is."""
    sentence = re.sub(r"\x1b\[\d*m", "", sentence)  # Keras prints in bold
    sentence = " ".join(sentence.replace("|", "/").replace("`", "'").split())
    return sentence if len(sentence) < 400 else f"{sentence[:400]} ..."
