"""The report: on a terminal, in a pipe, as JSON."""

import contextlib
import csv
import io
import json
import os
import pathlib
import pty
import re
import subprocess
import sys

import pytest

from distloop import report
from distloop.reports import row_scan
from distloop.workdir import ledger
from distloop.workdir.records import append_row, read_metrics
from tests.problems import with_odd_values, write_run

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def sweep(tmp_path):
    """Two runs: one complete, one interrupted after a rollback."""
    speed = {"steps_per_sec": 50.0, "examples_per_sec": 3200.0, "learning_rate": 0.1}
    rows = [{"step": 100 * i, "loss": 2.0 / i, "test/accuracy": 0.25 * i, "size": float(i), **speed} for i in (1, 2, 3)]
    write_run(tmp_path / "a", rows, {"steps": 300, "seed": 0, "hidden": 16})
    incident = {"step": 150, "batch": 149, "reason": "The loss jumped.", "action": "rollback", "checkpoint": 100}
    rows = [{**row, "loss": None if row["step"] == 200 else row["loss"] / 4} for row in rows[:2]]
    rows[1]["gpu_utilization"] = 0.75
    write_run(tmp_path / "b", rows, {"steps": 300, "seed": 0, "hidden": 64}, incidents=[incident])
    return tmp_path


@pytest.fixture
def terminal(monkeypatch):
    """Returns a function that returns the report on a terminal of a given width."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def show(*arguments, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        stream.isatty = lambda: True
        monkeypatch.setattr(sys, "stdout", stream)
        assert report.main([str(argument) for argument in arguments]) == 0
        stream.flush()
        return stream.buffer.getvalue().decode()

    return show


@pytest.fixture
def shown(capsys):
    """Returns a function that returns the report in a pipe."""

    def show(*arguments):
        assert report.main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    return show


@pytest.fixture
def refused(capsys):
    """Returns a function that returns what the report says where it cannot be made."""

    def refuse(*arguments):
        assert report.main([str(argument) for argument in arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    return refuse


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def table(text, first, second=""):
    """Returns the cells of a plain table by header, one dict per row; the first two of its header are given."""
    lines = [re.split(" {2,}", line) for line in text.splitlines()]
    start = next(i for i, cells in enumerate(lines) if cells[0] == first and second in ("", *cells[1:2]))
    header, *rows = lines[start : lines.index([""], start)]
    return [dict(zip(header, row, strict=True)) for row in rows]


def run(*arguments, **settings):
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
    settings["env"] = {**os.environ, "PYTHONPATH": str(ROOT), **settings.get("env", {})}
    return subprocess.run([sys.executable, "-m", "distloop.report", *map(str, arguments)], timeout=900, **settings)


# In a pipe.


def test_a_pipe_gets_one_line_per_run(sweep, shown):
    first, second = table(shown(sweep), "run")
    assert float(second.pop("silent").replace(":", "")) == pytest.approx(10000, abs=100)  # 1:00:00
    common = {"steps/s": "50", "examples/s": "3200", "examples": "-", "epochs": "-", "device-hours": "-"}
    common["operations a step"] = "-"
    a = {"run": "a", "status": "complete", "step": "300/300", "training": "0:00:06", "silent": "-", "busy": "-"}
    b = {"run": "b", "status": "interrupted", "step": "200/300", "training": "0:00:04", "busy": "75 %"}
    assert (first, second) == (a | common, b | common)


def test_the_operations_of_a_step_are_shown(tmp_path, shown):
    write_run(tmp_path / "a", [{"step": 100, "loss": 1.0, "steps_per_sec": 50.0, "model_flops_per_sec": 5e9}])
    (row,) = table(shown(tmp_path), "run")
    assert row["operations a step"] == "100000000"
    assert json.loads(shown(tmp_path, "--json"))["runs"][0]["step_flops"] == 1e8


def test_the_time_of_each_action_is_shown(tmp_path, shown):
    path = write_run(tmp_path / "a", [{"step": 100, "loss": 1.0}], starts=[{"step": 0, "time": 1.0, "devices": 1}])
    progress = {"time": 101.0, "step": 100, "secs": {"step": 60.0, "worst_examples": 30.0, "saving": 10.0}}
    (path / "progress.json").write_text(json.dumps(progress))
    (row,) = table(shown(tmp_path), "run", "time")
    assert (row["steps"], row["worst_examples"], row["saving"]) == ("60 %", "30 %", "10 %")


def test_device_hours_are_those_of_all_starts_with_lost_steps(tmp_path, shown):
    path = write_run(tmp_path / "a", [{"step": 100, "loss": 1.0}, {"step": 200, "loss": 1.0}], age_secs=0)
    (row,) = (row for row in read_metrics(path) if row["step"] == 100)
    starts = [(row["time"] - 7200, 4, None), (row["time"] - 5400, 4, row["time"] - 6300), (row["time"], 2, None)]
    for time, devices, last in starts:
        append_row(str(path / "starts.jsonl"), {"step": 0, "time": time, "devices": devices, "last_row_time": last})
    (only,) = json.loads(shown(tmp_path, "--json"))["runs"]
    assert only["device_hours"] == pytest.approx(4 * 900 / 3600 + 2 / 3600) and len(only["starts"]) == 3


def test_what_a_run_has_read_is_shown_with_the_shares_of_a_mixture(tmp_path, shown):
    seen = {"examples_seen": 4000.0, "epochs_seen": 0.5, "web/examples_seen": 3000.0, "code/examples_seen": 1000.0}
    write_run(tmp_path / "a", [{"step": 100, "loss": 1.0, **seen}])
    out = shown(tmp_path)
    (row,) = table(out, "run")
    assert row["examples"] == "4000 (web 75%, code 25%)" and row["epochs"] == "0.5"
    assert [row["metric"] for row in table(out, "metric")] == ["loss"]


def test_a_pipe_gets_one_line_per_metric_and_run_the_best_first(sweep, shown):
    rows = [list(row.values()) for row in table(shown(sweep), "metric")]
    assert [row[:2] for row in rows] == [
        [metric, run] for metric, runs in (("loss", "ba"), ("test/accuracy", "ab"), ("size", "ab")) for run in runs
    ]
    assert [rows[i][2:] for i in (0, 1, 2, 5)] == [
        ["nan", "0.5", "100", "0.5", "0.5"],  # last, best, at step, least, largest
        ["0.6667", "0.6667", "300", "0.6667", "2"],
        ["0.75", "0.75", "300", "0.25", "0.75"],
        ["2", "-", "-", "1", "2"],
    ]


def test_the_best_value_may_be_that_of_before_the_first_step(tmp_path, shown):
    rows = [{"step": step, "test/loss": 1.0 + step, "nan": None} for step in (0, 1, 2)]
    write_run(tmp_path / "a", rows, {"steps": 2})
    places = {row["metric"]: row["at step"] for row in table(shown(tmp_path / "a"), "metric")}
    assert places == {"test/loss": "0", "nan": "-"}


def test_incidents_are_listed(sweep, shown):
    write_run(sweep / "c", [{"step": 9}], saved={"step": 9, "until": 20, "stop_reason": "loss was no better"})
    lines = shown(sweep).splitlines()
    assert "b    150   rollback  149    100      -         The loss jumped." in lines
    assert "c    9     stop      -      -        -         loss was no better" in lines


def test_settings_that_differ_are_shown_side_by_side(sweep, shown):
    write_run(sweep / "c", [{"step": 9}], {"steps": 9, "seed": 0, "init_from": "", "hidden": 16})
    assert shown(sweep / "a", sweep / "b").endswith("\n\nrun  hidden\na    16\nb    64\n\n")
    assert table(shown(sweep), "run", "steps") == [
        {"run": "a", "steps": "300", "hidden": "16", "init_from": "-"},
        {"run": "b", "steps": "300", "hidden": "64", "init_from": "-"},
        {"run": "c", "steps": "9", "hidden": "16", "init_from": "''"},
    ]
    out = shown(sweep / "a")
    assert "hidden" not in out and "what" not in out


def test_a_run_without_metrics_is_shown(tmp_path, shown):
    line = shown(write_run(tmp_path / "a", [])).splitlines()[1]
    assert line.split()[:6] == ["a", "running", "0", "0:00:00", "-", "-"]


def test_a_pipe_gets_whole_lines_without_colors(sweep):
    name = "x" * 300
    write_run(sweep / "long", [{"step": 1, name: 1.0}])
    result = run(sweep, env={"COLUMNS": "40", "FORCE_COLOR": "1"})
    out = result.stdout.decode()
    assert result.returncode == 0 and not result.stderr and "\x1b" not in out
    assert re.search(rf"^{name}  long  1 ", out, re.MULTILINE)


def test_a_closed_pipe_is_no_error(sweep):
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = run(sweep, stdout=write_end)
    os.close(write_end)
    assert not result.stderr


def test_a_name_that_a_terminal_cannot_encode_is_no_error(sweep):
    (sweep / "a").rename(sweep / "ä")
    result = run(sweep, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert result.returncode == 0 and not result.stderr
    assert b"?    complete" in result.stdout


# On a terminal.


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_terminal_is_never_too_narrow(sweep, terminal, columns):
    (sweep / "a").rename(sweep / "a_run_with_a_very_long_name_as_sweeps_have_them_with_everything_in_it")
    lines = plain(terminal(sweep, columns=columns)).splitlines()
    assert max(map(len, lines)) <= columns
    for whole in ("0.6667", "interrupted", "200/300", "3200"):
        assert any(whole in line for line in lines)


def test_long_names_are_wrapped(sweep, terminal):
    name = "a_run_with_a_very_long_name_as_sweeps_have_them_with_everything_in_it"
    (sweep / "a").rename(sweep / name)
    lines = plain(terminal(sweep)).splitlines()
    parts = [line.split(" ")[0] for line in lines[2 : lines.index("")]]
    assert "".join(parts) == f"{name}b" and len(parts) > 2


def test_numbers_are_below_each_other(sweep, terminal):
    lines = [line.rstrip() for line in plain(terminal(sweep)).splitlines()]
    start = lines.index("Metrics")
    assert lines[start + 1 : start + 4] == [
        "metric         run    last    best  at step   least  largest",
        "loss           b       nan     0.5      100     0.5      0.5",
        "loss           a    0.6667  0.6667      300  0.6667        2",
    ]


def test_names_are_shown_unchanged(tmp_path, terminal):
    write_run(tmp_path / "[red]a", [{"step": 1, "[bold]loss": 1.0}])
    shown = plain(terminal(tmp_path))
    assert "[red]a" in shown and "[bold]loss" in shown


def test_colors_can_be_switched_off(sweep, terminal, monkeypatch):
    green = "\x1b[32m"
    assert green in terminal(sweep)
    monkeypatch.setenv("NO_COLOR", "1")
    assert green not in terminal(sweep) and "Metrics" in terminal(sweep)
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in terminal(sweep)


def test_a_real_terminal_gets_tables(sweep):
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "distloop.report", str(sweep)]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environment) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while chunk := os.read(ours, 4096):
                shown += chunk
        assert process.stderr.read() == b""
    os.close(ours)
    assert process.returncode == 0 and "Settings that differ" in plain(shown.decode())


# For programs.


def test_json_holds_what_the_tables_show(sweep, shown):
    found = json.loads(shown(sweep, "--json"), parse_constant=pytest.fail)  # NaN is no JSON
    assert found["different_settings"] == ["hidden"]
    first, second = found["runs"]
    assert (first["name"], first["workdir"], first["status"]) == ("a", str(sweep / "a"), "complete")
    assert (second["step"], second["until"], second["training_secs"]) == (200, 300, 4.0)
    best = {"better": "smaller", "best": 0.5, "best_step": 100}
    assert second["metrics"]["loss"] == {"last": None, "least": 0.5, "largest": 0.5, **best}
    assert first["metrics"]["size"]["better"] is None and first["metrics"]["size"]["best_step"] is None
    assert second["incidents"][0]["reason"] == "The loss jumped."
    assert second["settings"] == {"steps": 300, "seed": 0, "hidden": 64}


# What cannot be done.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no workdir was given: give one, or several to compare; see --help."),
        (["--jason", "."], "unrecognized arguments: --jason; see --help."),
        (["nope"], "There is no directory 'nope': give workdirs of runs, or a directory of them."),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(arguments, message, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(*arguments) == f"distloop.report: {message}\n"


def test_a_picture_without_matplotlib_fails_before_any_output(sweep, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in refused(sweep, f"--png={sweep}/runs.png")


def test_the_report_names_the_file_of_the_picture(sweep, capsys):
    pytest.importorskip("matplotlib")
    assert report.main([str(sweep), f"--png={sweep}/runs.png"]) == 0
    assert capsys.readouterr().err == f"distloop.report: the curves are in {sweep}/runs.png\n"
    assert (sweep / "runs.png").read_bytes().startswith(b"\x89PNG")
    assert report.main([str(sweep), f"--png={sweep}/none/runs.png"]) == 2
    assert "runs.png' cannot be written (No such file or directory): give another path." in capsys.readouterr().err


def test_the_help_explains_what_is_better(capsys):
    with pytest.raises(SystemExit) as left:
        report.main(["--help"])
    assert left.value.code == 0 and "better follows from a metric's name" in capsys.readouterr().out


ODD = {
    "metrics.jsonl": ["", "[1]\n2\n", '{"step": true}\n', '{"step": 1, "time": "x", "loss": [2]}\n', "[" * 100_000]
    + [f'{{"step": 1, "loss": 1{"0" * 400}}}\n', f'{{"step": 1{"0" * 400}}}\n', '{"step": 1, "time": -1e999}\n']
    + ['{"step": 1, "steps_per_sec": 1e999}\n', '{"step": 1, "steps_per_sec": 1e-320, "loss": NaN}\n'],
    "incidents.jsonl": ['{"step": 1, "action": "raise", "time": "x"}\n', '{"step": 1, "action": {}, "reason": NaN}\n'],
    "starts.jsonl": ['{"step": 1, "time": 1e999, "devices": [2]}\n', '{"step": 1}\n{"step": 2, "last_row_time": NaN}\n']
    + ['{"step": 1, "before": 3}\n{"step": 2, "before": {"steps": "x"}}\n'],
    "config.json": ['{"steps": "many", "a": NaN}', '{"steps": [1]}', "[" * 100_000, "\xff"],
    "checkpoints/9/manifest.json": ['{"step": "9", "notes": {"until": 9, "stop_reason": null}}', '{"notes": 3}']
    + ['{"step": 9, "notes": {"until": null, "stop_reason": {}}}', '{"step": 9, "notes": [1]}'],
    "checkpoints/²": [""],
    "checkpoints": ["a file"],
}


@pytest.fixture
def good_and_odd(tmp_path):
    for run in ("good", "odd"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "loss": 0.5}\n')
    return tmp_path


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in ODD.items() for text in texts])
def test_an_odd_workdir_is_reported_like_others(name, text, good_and_odd, shown):
    (good_and_odd / "odd" / name).parent.mkdir(parents=True, exist_ok=True)
    (good_and_odd / "odd" / name).write_text(text)
    for arguments in ([], ["--json"]):
        out = shown(good_and_odd, *arguments)
        assert "good" in out and "odd" in out


def test_a_run_that_cannot_be_read_is_one_line_and_the_others_are_reported(good_and_odd, capsys, monkeypatch):
    read = row_scan.open_at_once

    def refuse(path):
        if "odd" in path:
            raise PermissionError(13, "Permission denied", path)
        return read(path)

    monkeypatch.setattr(row_scan, "open_at_once", refuse)
    assert report.main([str(good_and_odd)]) == 0
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert "odd" in line and "Permission denied" in line and "good" in printed.out
    assert report.main([str(good_and_odd / "odd")]) == 2


def test_json_holds_what_a_run_has_read_and_no_nan(tmp_path, shown):
    row = {"step": 100, "time": 1.0, "loss": None, "examples_seen": 640.0, "epochs_seen": 2.5}
    (only,) = json.loads(shown(write_run(tmp_path / "a", [row]), "--json"), parse_constant=pytest.fail)["runs"]
    assert only["seen"] == {"examples_seen": 640.0, "epochs_seen": 2.5}
    assert only["metrics"]["loss"]["last"] is None and only["steps_per_sec"] is None


def test_csv_has_a_row_of_all_names_for_each_row_of_each_run(sweep, capsys):
    assert report.main([str(sweep), f"--csv={sweep}/rows.csv"]) == 0
    assert capsys.readouterr().err == f"distloop.report: the rows are in {sweep}/rows.csv\n"
    with open(sweep / "rows.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] + row["step"] for row in rows] == ["a100", "a200", "a300", "b100", "b200"]
    assert [float(row["loss"]) for row in rows[:4]] == [2.0, 1.0, 2 / 3, 0.5] and rows[4]["loss"] == "nan"
    assert list(rows[0])[:3] == ["run", "step", "time"] and rows[0]["test/accuracy"] == "0.25"
    assert report.main([str(sweep), f"--csv={sweep}/none/rows.csv"]) == 2
    assert "rows.csv' cannot be written (No such file or directory)" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--csv", "--png"])
def test_no_file_of_a_run_and_no_directory_is_replaced(option, sweep, refused):
    (sweep / "full").mkdir()
    (sweep / "full" / "notes.txt").write_text("kept")
    os.mkfifo(sweep / "fifo")
    (sweep / "link.png").symlink_to(sweep / "b" / "metrics.jsonl")
    before = {path: path.read_bytes() for path in sweep.rglob("*") if path.is_file()}
    for path in ("a/metrics.jsonl", "a", "a/new/rows.png", "b/x.png", "link.png", "full", "fifo"):
        shown = refused(sweep / "a", f"{option}={sweep / path}")
        assert shown.startswith(f"distloop.report: '{sweep / path}' ") and shown.count("\n") == 1
        is_in_a_run = path not in ("full", "fifo")
        assert ("give a path outside of the run" if is_in_a_run else "a device: give the path of a file") in shown
    assert {path: path.read_bytes() for path in sweep.rglob("*") if path.is_file()} == before


def test_both_paths_are_checked_before_a_file_is_written(sweep, refused):
    refused(sweep, f"--csv={sweep}/a/rows.csv", f"--png={sweep}/runs.png")
    assert not (sweep / "runs.png").exists()


def test_a_picture_of_another_format_is_refused_with_those_there_are(sweep, refused):
    pytest.importorskip("matplotlib")
    shown = refused(sweep, f"--png={sweep}/runs.xyz")
    assert "runs.xyz' " in shown and ".png, " in shown and ".svg" in shown and shown.count("\n") == 1
    assert not (sweep / "runs.xyz").exists()


def test_the_memory_of_each_device_has_a_row(sweep, shown):
    held = {"weights": 4 * 10**6, "activations": 138 * 10**6}
    ledger.write_memory(str(sweep / "a"), {"CPU:0": held, "CPU:1": {"weights": 2 * 10**6}})
    write_run(sweep / "c", [], {})
    ledger.write_memory(str(sweep / "c"), {"GPU:0": held})
    rows = table(shown(sweep), "run", "device")
    assert list(rows[0]) == ["run", "device", "weights", "activations", "together"]
    assert [list(row.values()) for row in rows] == [
        ["a", "CPU:0", "4 MB", "138 MB", "142 MB"],
        ["a", "CPU:1", "2 MB", "-", "2 MB"],
        ["c", "GPU:0", "4 MB", "138 MB", "142 MB"],
    ]


# Files of somebody else.


@pytest.fixture
def foreign(tmp_path):
    """Runs whose names, metrics, settings and reasons hold what a terminal would obey."""
    evil = "\x1b]0;title\x07\x1b[2J\r\x9b\u202e\nloss"
    for i in range(2):
        path, end = tmp_path / f"{evil}{i}", {"step": 1, "until": 9, "stop_reason": evil}
        incident = {"step": 1, "reason": evil, "action": evil, "batch": evil, "checkpoint": evil, "left_out": [evil]}
        write_run(path, [{"step": 1, evil: 0.5}], {evil: i, "x": f"{evil}{i}"}, saved=end, incidents=[incident])
        ledger.write_memory(str(path), {evil: {evil: 5}})
    return tmp_path


def test_what_a_terminal_would_obey_is_shown_as_text(foreign, terminal, capsys):
    for columns in (60, 300):
        shown = plain(terminal(foreign, columns=columns))
        assert shown.replace("\n", "").isprintable() and r"\x1b]0;title" in shown.replace("\n", "").replace(" ", "")


def test_a_pipe_gets_it_as_text_and_each_row_in_one_line(foreign, capfd):
    assert report.main([str(foreign)]) == 0
    (foreign / "\x1b[2J").mkdir()
    assert report.main([str(foreign / "\x1b[2J")]) == 2
    out, err = capfd.readouterr()
    assert out.replace("\n", "").isprintable() and err.replace("\n", "").isprintable()
    assert len(table(out, "metric")) == 2


@pytest.fixture
def rich_run(tmp_path):
    """A run with a value at every key that the report reads."""
    end = {"time": 1.8e9, "step": 3, "secs": {"step": 1.0}}
    start = {"step": 0, "time": 1.8e9, "devices": 2, "kind": "CPU", "restore_secs": 1.0, "process_secs": 3.0}
    again = {**start, "last_row_time": 1.8e9 + 9, "progress": end, "before": {"steps": 1.0}}
    row = {"step": 3, "loss": 0.5, "steps_per_sec": 5.0, "examples_per_sec": 50.0}
    row |= {"a/examples_seen": 3, "epochs_seen": 1}
    incident = {"step": 1, "reason": "r", "action": "raise", "batch": 1, "checkpoint": 1, "left_out": [1]}
    saved = {"step": 3, "until": 9, "stop_reason": None}
    of_run = dict(saved=saved, incidents=[incident], starts=[start, again])
    path = write_run(tmp_path / "run", [row, row], {"steps": 9}, **of_run)
    ledger.write_memory(str(path), {"CPU:0": {"weights": 5}})
    (path / "progress.json").write_text(json.dumps(end))
    return path


FILES = ["metrics.jsonl", "incidents.jsonl", "starts.jsonl", "config.json", "memory.json", "progress.json"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FILES, "checkpoints/3/manifest.json"])
def test_odd_values_in_a_file_of_a_run_are_gone_without(rich_run, name, capsys):
    path = rich_run / name
    *before, content = path.read_text().splitlines() if name.endswith("l") else [path.read_text()]
    for odd in with_odd_values(json.loads(content)):
        path.write_text("\n".join([*before, json.dumps(odd)]) + "\n")
        assert report.main([str(rich_run)]) == report.main([str(rich_run), "--json"]) == 0, odd
    for raw in (b"", b"\x00" * 9, b"\xff\xfe{", b"{", b"[" * 10_000, b'{"a":' * 200 + b"1" + b"}" * 200):
        path.write_bytes(raw)
        capsys.readouterr()
        assert report.main([str(rich_run)]) == 0
        if name.endswith("n"):
            assert f"{name}' cannot be read (" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["https://host/run?sig=pa55word", "sftp://me:pa55/word@host/run"])
def test_a_url_with_a_key_is_refused_and_shown_without_it(url, refused):
    shown = refused(url)
    assert shown.startswith("distloop.report: ") and "Traceback" not in shown and "pa55" not in shown
