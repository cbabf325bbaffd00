"""Writes settings.md from the help texts of `distloop.Config`.

python docs/settings.py                                # or: make docs
"""

import dataclasses
import pathlib

from distloop import config

PAGE = pathlib.Path(__file__).with_suffix(".md")

HEAD = """\
# Settings

Written by `make docs` from the help texts in the code; do not edit.

Every setting is a field of `distloop.Config` and, after `distloop.define_flags()`, a flag of the same name. In order of
precedence: what `fit` is given, then the command line, then the program's defaults in `define_flags(...)`, then the
defaults on this page. `config.json` in the workdir holds the values of a run.
"""

GROUPS = {
    "Devices": ["strategy", "device", "num_devices", "num_stages", "inter_op_threads", "intra_op_threads"],
    "Length and data": ["steps", "epochs", "batch_size", "microbatches"],
    "Optimization": ["clip_norm", "average_decay"],
    "Numbers": ["precision", "jit_compile", "executor", "seed", "deterministic"],
    "Errors": [
        "on_nonfinite",
        "locate_nonfinite",
        "on_divergence",
        "loss_jump",
        "max_rollbacks",
        "start_timeout",
        "hang_timeout",
        "max_secs",
    ],
    "Files and monitoring": [
        "workdir",
        "console",
        "log_every",
        "steps_per_loop",
        "eval_every",
        "eval_first",
        "histograms_every",
        "graph",
        "profile",
        "peak_flops",
    ],
    "Checkpoints": ["checkpoint_every", "keep_checkpoints", "resume", "init_from", "init_rename"],
    "Trying things out": [
        "audit",
        "fast_dev_run",
        "eager",
        "overfit_batches",
        "limit_train_batches",
        "limit_eval_batches",
        "autotune_batch",
    ],
}


def groups() -> dict[str, list[dataclasses.Field]]:
    """Returns the fields of `Config` by the heading that they stand under."""
    fields = {field.name: field for field in dataclasses.fields(config.Config)}
    named = {heading: [fields.pop(name) for name in names] for heading, names in GROUPS.items()}
    return {**named, "Others": list(fields.values())} if fields else named


def row(field: dataclasses.Field) -> str:
    """Returns a setting's line of the table."""
    choices = ", ".join(f"`{choice}`" for choice in field.metadata["choices"])
    text = field.metadata["help"] + (f" One of {choices}." if choices else "")
    default = f"`{field.default}`" if field.default != "" else "empty"
    return f"| `{field.name}` | {default} | {text} |\n".replace("^", "\\^")


def render() -> str:
    """Returns the page."""
    tables = [
        f"\n## {heading}\n\n| setting | default | what it does |\n|---|---|---|\n" + "".join(map(row, fields))
        for heading, fields in groups().items()
    ]
    return HEAD + "".join(tables)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
