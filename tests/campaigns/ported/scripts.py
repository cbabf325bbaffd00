"""Runs the scripts of docs/ported_scripts.md, the originals and the ports, and compares their losses step by step."""

import functools
import pathlib
import re

import keras
import numpy as np
import tensorflow as tf

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "ported_scripts.md"
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 10, size=192)
IMAGES = (RNG.uniform(size=(192, 8, 8, 1)) * np.linspace(0.1, 1, 10)[LABELS, None, None, None]).astype(np.float32)


@functools.cache
def section(heading):
    """Returns the Python blocks of a section; without a heading, those before the first section."""
    text = PAGE.read_text(encoding="utf-8")
    _, _, text = text.partition(f"\n## {heading}\n") if heading else ("", "", text)
    return re.findall(r"^```python.*?\n(.*?)^```$", text.partition("\n## ")[0], re.M | re.S)


def run(*blocks, replacements=(), **names):
    """Runs blocks as one program, from the same random seed and with the page's data.

    Args:
        *blocks: of a section.
        replacements: pairs of a text in the blocks and what replaces it.
        **names: that the blocks use.

    Returns:
        The names that the program knows in the end. `printed` lists the arguments of each `print`.
    """
    program = "\n".join([*section(""), *blocks])
    for old, new in replacements:
        assert old in program, old
        program = program.replace(old, new)
    known = {"__name__": "script", "images": IMAGES, "labels": LABELS, "printed": [], **names}
    known["print"] = lambda *arguments: known["printed"].append(arguments)
    keras.utils.set_random_seed(0)
    exec(compile(program, PAGE.name, "exec"), known)
    return known


def run_port(*blocks, replicas, steps, replacements=(), **names):
    """Runs a port for some steps on some replicas; returns the names it knows, and the numbers of each step."""
    rows = []

    def record(report):
        rows.append(dict(report.metrics))

    record.every = 1
    (length,) = set(re.findall(r", ((?:steps|epochs)=[^,)\n]+)(?:, evals|\))", blocks[-1].rpartition(".fit(")[2]))
    settings = f'distloop.Config(device="cpu", num_devices={replicas}, log_every=1, '
    changes = [("distloop.Config(", settings), (length, f"steps={steps}, actions=[record]"), *replacements]
    known = run(*blocks, replacements=changes, record=record, **names)
    assert len(rows) == steps
    return known, rows


def epochs_of_a_step(program, steps):
    """Returns the replacement by which Keras reports each step: it takes the mean over an epoch."""
    (epochs,) = re.findall(r"epochs=\d+", program)
    return epochs, f"epochs={steps}, steps_per_epoch=1, verbose=0"


def assert_equal_losses(losses, expected):
    """Compares the losses of each step, to 1e-6 relative."""
    losses, expected = np.asarray(losses, np.float64), np.asarray(expected, np.float64)
    assert losses.shape == expected.shape
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert len(np.unique(expected)) == expected.size  # the model trains, so no two losses are equal


def this_replica(rows):
    """Returns the rows of this replica, of rows that one replica would take all; outside `strategy.run`, all."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return rows
    size = len(rows) // context.num_replicas_in_sync
    return rows[context.replica_id_in_sync_group * size :][:size]


MIRRORED = {count: f"tf.distribute.MirroredStrategy([f'CPU:{{i}}' for i in range({count})])" for count in (1, 2)}
