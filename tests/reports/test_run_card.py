"""The card of a run: a stranger repeats the run from it."""

import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import distloop
from distloop import report
from tests.problems import write_run

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAM = """
    import keras
    import numpy as np
    from absl import app, flags

    import distloop

    distloop.define_flags(steps=7, batch_size=16, device="cpu", num_devices=2, console="quiet", log_every=2)
    RATE = flags.DEFINE_float("rate", 0.1, "Of SGD.")

    def model_fn():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        loss_fn = lambda batch, training: {"loss": (model(batch["x"], training=training)[:, 0] - batch["y"]) ** 2}
        return distloop.ModelSpec(model, keras.optimizers.SGD(RATE.value), loss_fn, predict_fn=lambda b: model(b["x"]))

    def main(_):
        config = distloop.Config.from_flags()
        trainer = distloop.Trainer(model_fn, config)
        rows = np.random.default_rng(0).normal(size=(50, 5)).astype("float32")
        train = distloop.make_dataset({"x": rows[:, :4], "y": rows[:, 4]}, config.batch_size)
        trainer.fit(train, evals={"test": train})
        if not config.replay:
            trainer.export(config.workdir + "/export")

    app.run(main)
"""


def card_of(path, capsys):
    assert report.main([str(path), "--card"]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_stranger_repeats_the_run_from_its_card(tmp_path, capsys):
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    for directory in (tmp_path, stranger):
        (directory / "train.py").write_text(textwrap.dedent(PROGRAM))
    options = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True, "timeout": 900}
    arguments = [f"--workdir={tmp_path / 'run'}", "--rate=0.05", "--seed=3", "--eval_every=3"]
    done = subprocess.run([sys.executable, "train.py", *arguments], cwd=tmp_path, **options)
    assert done.returncode == 0, done.stderr
    card = card_of(tmp_path / "run", capsys)
    for line in ("| num_rows | 50 |", "| rate | 0.05 |", "| seed | 3 |", "| devices | 2 CPU |", "| tensorflow | 2."):
        assert line in card
    assert re.search(r"^\| test/loss \| last [\d.e-]+, best [\d.e-]+ at step \d \|$", card, re.M)
    assert re.search(r"^\| device-hours \| [\d.e-]{1,9} \|$", card, re.M)
    (commands,) = re.findall(r"^```sh\n(.*?)^```$", card, re.M | re.S)
    assert str(tmp_path) not in commands
    options["env"]["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-ec", commands], cwd=stranger, **options)
    assert done.returncode == 0, done.stderr
    assert report.main(["--diff", str(stranger / "repeated"), str(tmp_path / "run" / "metrics.jsonl")]) == 0
    assert "loss" in done.stdout and "serving_default" in done.stdout  # of the replay, of the export
    assert distloop.read_metrics(stranger / "following")[-1]["step"] == 7


@pytest.mark.parametrize("manifest", ["", "[1]", '{"notes": {"input": 3}}', '{"notes": {"versions": {"a": "b|\\nc"}}}'])
def test_the_card_of_a_run_with_few_or_odd_files_has_what_is_known(tmp_path, capsys, manifest):
    path = write_run(tmp_path / "run", [{"step": 1, "loss": None, "a\n|b": 2.0}], {"steps": 1, "x": "\x1b[2J"})
    (path / "checkpoints" / "1").mkdir(parents=True)
    (path / "checkpoints" / "1" / "manifest.json").write_text(manifest)
    (path / "starts.jsonl").write_text(json.dumps({"step": 0, "devices": [2]}) + "\n")
    card = card_of(path, capsys)
    assert "| loss | last nan |" in card and "None: the run was not started with distloop's flags." in card
    assert card.replace("\n", "").isprintable() and "\\x1b[2J" in card


def test_names_and_values_with_bars_and_line_breaks_keep_the_tables_whole(tmp_path, capsys):
    odd = "a|b\nc\r\nd\u2028e"
    path = write_run(tmp_path / f"x{odd}", [{"step": 1, odd: 2.0}], {odd: odd})
    lines = card_of(path, capsys).splitlines()
    cell = r"a\|b\nc\r\nd\u2028e"
    assert lines[0] == rf"# x{cell}".replace(r"\|", "|")
    assert f"| {cell} | last 2 |" in lines and f"| {cell} | {cell} |" in lines
    tables = [line for line in lines if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in tables)
