"""Two runs compared: what differs besides numbers, the first row, the first checkpoint and variable; equal runs are."""

import json
import shlex
import shutil
import subprocess
import sys
import time

import pytest

import distloop
from distloop import report
from distloop.replay.diff import compare
from tests.problems import classification, classifier, mostly_wide, on, with_odd_values, write_run


def train(workdir, *, steps=6, actions=(), **settings):
    config = on(1, workdir=str(workdir), log_every=1, checkpoint_every=2, keep_checkpoints=9, steps=steps, **settings)
    data = distloop.make_dataset(classification(61), 16, shuffle=True, seed=3)
    distloop.Trainer(classifier(dropout=0.3), config).fit(data, actions=actions)
    return str(workdir)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    def nudge(report):
        if report.step == 3:
            report.state.model.layers[0].kernel.assign_add([[2.0**-10] * 16] * 8)

    nudge.every = 1
    root = tmp_path_factory.mktemp("runs")
    train(root / "changed", steps=2)
    return {
        "whole": train(root / "whole"),
        "stopped": train(root / "stopped", steps=4),
        "other seed": train(root / "other", seed=1),
        "changed": train(root / "changed", actions=[nudge]),
    }


def test_a_run_that_was_stopped_is_equal_as_far_as_it_came(runs, capsys):
    assert report.main(["--diff", runs["whole"], runs["stopped"]]) == 0
    out = capsys.readouterr().out
    assert "The runs are equal, to the bit, in 4 rows and 2 checkpoints that both have." in out
    assert "steps: 6 and 4" in out


def test_other_settings_the_first_row_and_the_command_are_named(runs, capsys):
    assert report.main(["--diff", runs["whole"], runs["other seed"]]) == 1
    out = capsys.readouterr().out
    assert "seed: 0 and 1" in out and "the first row that differs is of step 1:" in out
    assert "the first checkpoint that differs is of step 2:\n    model/net/hidden/kernel, by" in out
    for line, run in zip(out.rstrip().splitlines()[-2:], (runs["whole"], runs["other seed"]), strict=True):
        assert line == f"  the command of the run, with --workdir={run} --replay=1"  # no command line was parsed


def test_the_first_row_and_the_first_variable_are_those_after_a_change(runs):
    found = compare(runs["whole"], runs["changed"])
    assert found.settings == {} and not found.are_equal
    assert found.step == 4 and "loss" in found.numbers and found.numbers["loss"][0] != found.numbers["loss"][1]
    assert found.checkpoint == 4 and found.variable[0] == "model/net/hidden/kernel" and 0 < found.variable[1] < 2.0**-8


def test_a_checkpoint_with_damaged_values_is_not_equal_to_its_copy(runs, tmp_path, capsys):
    other = shutil.copytree(runs["whole"], tmp_path / "other")
    data = other / "checkpoints" / "4" / "variables.data-00000-of-00001"
    data.write_bytes(bytes(byte ^ 1 for byte in data.read_bytes()))
    for pair in ([runs["whole"], str(other)], [str(other), runs["whole"]]):
        assert report.main(["--diff", *pair]) == 1
        out = capsys.readouterr().out
        assert "the first checkpoint that differs is of step 4:" in out
        assert f"    The checkpoint '{other}/checkpoints/4' is damaged" in out


def test_a_command_that_is_shown_is_quoted_and_runs_no_foreign_file(tmp_path):
    paths = [write_run(tmp_path / "my runs; touch x" / name, [{"step": 1, "loss": ord(name)}]) for name in "ab"]
    flags = [f"--workdir={paths[0]}", "--replay=1"]

    def shown(program):
        (paths[0] / "flags.txt").write_text(f"# {program}\n--steps=1\n")
        return compare(*map(str, paths)).commands[0]

    for program, words in (
        ("python 'my train.py'", ["python", "my train.py"]),
        ("python train.py; rm -r ~ $(x)", ["python", "train.py;", "rm", "-r", "~", "$(x)"]),
    ):
        assert shown(program) == shlex.join([*words, f"--flagfile={paths[0]}/flags.txt", *flags])
    words = ["python", "train.py", f"--flagfile={paths[0]}/flags.txt", *flags, "--", "--x"]
    assert shown("python train.py -- --x") == shlex.join(words)
    for program in ("python 'train.py", "the program's arguments hold a line break"):
        assert shown(program) == f"the command of the run, with {shlex.join(flags)}"


def test_times_rows_of_other_steps_and_incomplete_rows_are_not_compared(tmp_path):
    rows = [{"step": 2, "time": 1.0, "loss": 0.5, "steps_per_sec": 3.0}, {"step": 4, "time": 2.0, "loss": 0.25}]
    other = [{"step": 1, "loss": 9.0}, {"step": 2, "loss": 0.5, "goodput": 1.0}, {"step": 4, "loss": 0.125}]
    first, second = write_run(tmp_path / "a", rows), write_run(tmp_path / "b", other)
    with open(second / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    found = compare(str(first), str(second))
    assert found.step == 4 and found.numbers == {"loss": (0.25, 0.125)} and found.num_rows == 2
    assert "loss: 0.25 and 0.125 (-0.125 apart)" in str(found)


def test_means_over_other_steps_are_not_compared_but_the_state_is(tmp_path):
    rows = [{"step": 2, "loss": 0.5, "weight_norm": 3.0}, {"step": 4, "loss": 0.25, "weight_norm": 2.0}]
    stopped = [rows[0], {"step": 3, "loss": 0.3}, {**rows[1], "loss": 0.2}]
    first, second = write_run(tmp_path / "a", rows), write_run(tmp_path / "b", stopped)
    assert compare(str(first), str(second)).are_equal
    third = write_run(tmp_path / "c", [*stopped[:2], {**stopped[2], "weight_norm": 2.5}])
    assert compare(str(first), str(third)).numbers == {"weight_norm": (2.0, 2.5)}


def test_a_million_rows_take_seconds_and_no_tensorflow(tmp_path):
    numbers = {name: 1.0 / (i + 3) for i, name in enumerate("loss accuracy gradient_norm learning_rate".split())}
    for name, slow in (("a", 1.0), ("b", 2.0)):
        rows = [{"step": step, **numbers, "steps_per_sec": slow, "test/x": 0.0} for step in range(1, 20_001)]
        rows[19_998]["test/x"] = float(name == "b")
        write_run(tmp_path / name, rows)
    program = "import sys, distloop.report as r; c = r.main(sys.argv[1:]); print(c, 'tensorflow' in sys.modules)"
    began = time.monotonic()
    command = [sys.executable, "-c", program, "--diff", str(tmp_path / "a"), str(tmp_path / "b")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "is of step 19999:" in out and "test/x: 0.0 and 1.0" in out and out.endswith("1 False\n")
    assert time.monotonic() - began < 120  # a fiftieth of a million


def test_what_cannot_be_compared_is_refused_in_a_sentence(runs, tmp_path, capsys):
    for others, words in (
        ([], "--diff was given with 1 workdirs: give two"),
        ([str(tmp_path)], "holds no metrics.jsonl"),
    ):
        assert report.main(["--diff", runs["whole"], *others]) == 2
        assert words in capsys.readouterr().err


FILES = ["metrics.jsonl", "config.json", "flags.txt", "checkpoints/4/manifest.json"]


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_wide(FILES, "metrics.jsonl", "checkpoints/4/manifest.json"))
def test_odd_files_are_left_out_or_named_in_a_sentence(name, runs, tmp_path):
    odd = tmp_path / "odd"
    shutil.copytree(runs["stopped"], odd)
    path = odd / name
    good = path.read_bytes()
    contents = [b"", b"\x00" * 9, b"\xff\xfe{", b"{", b"[" * 10_000, good[: len(good) // 2]]
    if name != "flags.txt":
        content = json.loads(good.splitlines()[-1] if name.endswith("l") else good)
        notes = {key: content["notes"][key] for key in ("versions", "input", "replicas")} if "notes" in content else {}
        content = dict([*content.items()][:5]) | {"notes": notes}
        content.pop("entries", None)
        contents += [json.dumps(value).encode() + b"\n" for value in with_odd_values(content)]
    for content in contents:
        path.write_bytes(content)
        for pair in ([runs["stopped"], str(odd)], [str(odd), runs["stopped"]]):
            assert report.main(["--diff", *pair]) in (0, 1, 2), content
