"""The plan: its tables, its JSON, and where its costs come from."""

import json
import re
import subprocess
import sys

import pytest

from distloop import plan
from tests.problems import write_run


def run(capsys, *arguments):
    """Returns the exit code, and what was printed to standard output and standard error."""
    code = plan.main(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_tables_hold_a_row_for_each_cost_and_each_number_of_workers(capsys):
    code, text, errors = run(capsys, "--workers=1000,1", "--copy_secs=0.2", "--copy_restore_secs=2")
    costs, plans, verdict = (part.splitlines() for part in text.strip().split("\n\n"))
    assert (code, errors) == (0, "") and len(costs) == 11 and max(map(len, plans)) < 120
    assert re.split(" {2,}", costs[1]) == ["step_secs", "1", "assumed"]
    assert re.split(" {2,}", costs[7]) == ["copy_secs", "0.2", "given"]
    header, one, thousand = (re.split(" {2,}", line) for line in plans)
    assert dict(zip(header, one, strict=True)) | {"goodput": ""} == {
        **{"workers": "1", "failure every": "6250 h", "Young": "4.17 h", "Daly": "4.17 h", "best": "4.17 h"},
        **{"goodput": "", "copy every": "-", "with copies": "-", "heartbeats/s": "0"},
    }
    row = dict(zip(header, thousand, strict=True))
    assert (row["workers"], row["failure every"], row["Young"]) == ("1000", "6.25 h", "7.91 min")
    assert 96 < float(row["goodput"][:-1]) < 98 < float(row["with copies"][:-1]) < 100
    assert verdict == ["Copies in memory gain 1% of the time or more from 1000 workers on."]


def test_json_holds_what_the_tables_show_and_null_for_never(capsys):
    _, text, _ = run(capsys, "--json", "--workers=1,8", "--failures_per_worker_hour=0", "--save_secs=2")
    told = json.loads(text)
    assert told["costs"]["save_secs"] == {"value": 2.0, "source": "given"}
    assert told["costs"]["save_pause_secs"] == {"value": 2.0, "source": "assumed: the whole save"}
    assert told["plans"][0]["copies"] is None and told["plans"][0]["save_every_secs"] is None
    assert told["plans"][1]["goodput"] == told["plans"][1]["copies"]["goodput"] == 1.0


def test_the_same_seed_prints_the_same(capsys):
    first, again, other = (run(capsys, "--workers=1000", f"--seed={seed}") for seed in (1, 1, 2))
    assert first == again != other


def test_costs_are_measured_in_a_workdir(tmp_path, capsys):
    rows = [{"step": 100, "steps_per_sec": 10.0}, {"step": 200, "steps_per_sec": 10.0, "save_pause_secs": 7.0}]
    write_run(tmp_path / "run", [rows[0], {**rows[1], "save_secs": 9.0}])
    _, text, _ = run(capsys, f"--workdir={tmp_path}", "--workers=4", "--restore_secs=50")
    sources = {name: (value, why) for name, value, why in (re.split(" {2,}", t) for t in text.splitlines()[1:11])}
    assert sources["step_secs"] == ("0.1", "measured, n = 200")
    assert sources["save_pause_secs"] == ("7", "measured, n = 1") and sources["save_secs"][0] == "9"
    assert sources["restore_secs"] == ("50", "given") and sources["start_secs"] == ("120", "assumed")
    assert sources["copy_secs"] == ("7", "assumed: as for a save")
    assert sources["copy_restore_secs"] == ("50", "assumed: as for a checkpoint")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--failures_per_worker_hour=-1"], "--failures_per_worker_hour=-1 was given: give 0 or more."),
        (["--save_secs=inf"], "--save_secs=inf was given: give 0 or more."),
        (["--step_secs=0"], "--step_secs=0 was given: give more than 0."),
        (["--copies_lost=2"], "--copies_lost=2 was given: give a fraction from 0 to 1."),
        (["--workers=4,0"], "--workers=4,0 was given: give whole numbers of 1 or more, as in --workers=8,512."),
        (["--workers="], "--workers= was given: give whole numbers of 1 or more, as in --workers=8,512."),
        (
            ["--save_secs=1", "--save_pause_secs=2"],
            "save_pause_secs=2 (given) is a part of save_secs=1 (given), and longer: give both.",
        ),
        (["--workdir=/nowhere"], "There is no directory '/nowhere': give workdirs of runs, or a directory of them."),
        (["--steps=1"], "unrecognized arguments: --steps=1; see --help."),
    ],
)
def test_bad_input_is_told_in_a_sentence(arguments, sentence, capsys):
    assert run(capsys, *arguments) == (2, "", f"distloop.plan: {sentence}\n")


def test_a_workdir_of_several_runs_or_without_steps_is_refused(tmp_path, capsys):
    write_run(tmp_path / "a", [{"step": 0}])
    code, _, error = run(capsys, f"--workdir={tmp_path}")
    assert code == 2 and error.startswith("distloop.plan: Nothing is measured yet in --workdir=")
    write_run(tmp_path / "b", [{"step": 0}])
    assert run(capsys, f"--workdir={tmp_path}")[2].endswith("holds 2 runs: give the workdir of one.\n")


def test_it_starts_without_tensorflow_and_numpy():
    program = "import sys, distloop.plan; print(sorted({'tensorflow', 'keras', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
