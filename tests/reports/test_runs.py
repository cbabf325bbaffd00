"""Status, speed, metrics and settings of runs, read from their files."""

import json
import math
import os

import pytest

import distloop
from distloop.reports.runs import by_metric, load_all
from distloop.workdir.run_files import better
from tests.problems import classification, classifier, on, write_run


def load(path):
    (run,) = load_all([str(path)])
    return run


def steps(*numbers, **metrics):
    return [{"step": number, **metrics} for number in numbers]


@pytest.mark.parametrize(
    ("last_row", "settings", "saved", "end"),
    [
        ((100, 3600), {"steps": 100}, None, ("complete", 100)),
        ((100, 0), {"steps": 100}, None, ("complete", 100)),
        ((60, 3600), {"steps": 100}, None, ("interrupted", 100)),
        ((60, 5), {"steps": 100}, None, ("running", 100)),
        ((60, 3600), {"steps": 100}, {"step": 60, "until": 100}, ("interrupted", 100)),
        ((60, 3600), {"steps": 100}, {"step": 60, "until": 100, "stop_reason": "no better"}, ("stopped", 100)),
        ((60, 3600), {"steps": 0, "epochs": 2}, {"step": 60, "until": 60}, ("complete", 60)),  # 2 epochs of 30
        ((60, 5), {"steps": 0, "epochs": 2}, {"step": 30, "until": 90}, ("running", 90)),
        ((60, 3600), {"steps": 500}, {"step": 60, "until": 60}, ("complete", 60)),  # fit(steps=60)
        ((60, 5), {"steps": 100}, {"step": 30, "until": 30}, ("running", 100)),  # goes on with other steps
        ((60, 5), {"steps": 100}, {"step": 30, "until": 90, "stop_reason": "no better"}, ("running", 100)),
        ((60, 3600), {"steps": 50}, {"step": 30, "until": 100}, ("interrupted", 100)),  # fit(steps=100)
        ((60, 3600), {"steps": 0}, None, ("ended", None)),
        ((60, 5), None, None, ("running", None)),
    ],
)
def test_the_status_of_a_run(tmp_path, last_row, settings, saved, end):
    last_step, age_secs = last_row
    run = load(write_run(tmp_path / "a", steps(30, last_step), settings, saved=saved, age_secs=age_secs))
    assert (run.status, run.until, run.step) == (*end, last_step)


def test_a_run_with_rare_logs_counts_as_running_for_longer(tmp_path):
    path = write_run(tmp_path / "a", steps(1, 2, 3), {"steps": 9}, age_secs=900) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [{**row, "time": row["time"] - 300 * (len(rows) - i)} for i, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load(tmp_path / "a").status == "running"


def test_a_run_without_rows_is_running(tmp_path):
    run = load(write_run(tmp_path / "a", [], {"steps": 10}))
    assert (run.status, run.step, run.series, run.steps_per_sec) == ("running", 0, {}, None)
    os.utime(tmp_path / "a" / "metrics.jsonl", (0, 0))
    assert load(tmp_path / "a").status == "interrupted"


@pytest.mark.parametrize(
    ("step", "incident", "status"),
    [
        pytest.param([30], {}, "diverged", id="at its end"),
        pytest.param([], {}, "diverged", id="before its first row"),
        pytest.param([90], {"time": 1}, "complete", id="and resumed"),
        pytest.param([90], {"action": "rollback"}, "complete", id="and went back"),
    ],
)
def test_a_run_that_raised_has_diverged_unless_it_resumed(tmp_path, step, incident, status):
    row = {"step": 40, "time": 4e9, "batch": 39, "reason": "The loss jumped.", "action": "raise", **incident}
    run = load(write_run(tmp_path / "a", steps(*step), {"steps": 90}, incidents=[row]))
    assert run.status == status and run.incidents == [row]


@pytest.mark.parametrize("name", ["config.json", "checkpoints/7/manifest.json", "incidents.jsonl"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"step": 7}'])
def test_damaged_files_count_as_missing(tmp_path, name, content):
    write_run(tmp_path / "a", steps(5, loss=1.0))
    path = tmp_path / "a" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    assert (load(tmp_path / "a").status, list(load(tmp_path / "a").series)) == ("ended", ["loss"])


def test_training_time_is_the_time_of_the_steps(tmp_path):
    rows = [
        {"step": 100, "steps_per_sec": 50.0, "examples_per_sec": 500.0},  # 2 s
        {"step": 150, "steps_per_sec": 50.0, "examples_per_sec": 500.0},  # 1 s
        {"step": 250, "steps_per_sec": 20.0, "examples_per_sec": 200.0},  # 5 s
    ]
    run = load(write_run(tmp_path / "a", rows))
    assert run.training_secs == 8.0
    assert run.steps_per_sec == 250 / 8 and run.examples_per_sec == 2500 / 8
    assert run.elapsed_secs == pytest.approx(4.0)  # 2 s between the rows, and the steps before the first


def test_the_steps_of_the_run_that_it_began_from_do_not_count(tmp_path):
    speed = {"steps_per_sec": 50.0, "examples_per_sec": 500.0}
    starts = [{"step": 5000}, {"step": 5100}]
    run = load(write_run(tmp_path / "a", steps(5100, 5200, **speed), starts=starts))
    assert (run.training_secs, run.steps_per_sec, run.elapsed_secs) == (4.0, 50.0, pytest.approx(3.0))


@pytest.mark.parametrize("start", [{}, {"step": None}, {"step": "x"}])
def test_a_start_of_an_unknown_step_is_the_first(tmp_path, start):
    assert load(write_run(tmp_path / "a", steps(100, steps_per_sec=50.0), starts=[start])).training_secs == 2.0


def test_the_speed_is_unknown_without_speeds_in_the_rows(tmp_path):
    run = load(write_run(tmp_path / "a", steps(1, 2, steps_per_sec=None)))
    assert (run.steps_per_sec, run.examples_per_sec, run.elapsed_secs) == (None, None, None)
    rows = [{"step": 0, "test/loss": 1.0}, {"step": 100, "steps_per_sec": 50.0}]
    run = load(write_run(tmp_path / "b", rows, starts=[{"step": 0}]))
    assert (run.training_secs, run.elapsed_secs) == (2.0, pytest.approx(1.0))  # between the rows


def test_what_is_better_is_known_by_the_name():
    smaller = ["loss", "test/loss", "generator/loss", "Loss", "loss_2", "mean_absolute_error", "rmse", "val/perplexity"]
    smaller += ["sparse_categorical_crossentropy", "accuracy_loss", "absolute_error"]
    larger = ["accuracy", "test/top_5_accuracy", "AUC", "auc_1", "precision", "recall/3", "f1", "f1_score", "test/f1/0"]
    unknown = ["reward", "regularization", "glossary", "entropy", "skipped_steps", "f16", "space"]
    for names, answer in ((smaller, "smaller"), ([*larger, "r2"], "larger"), (unknown, None)):
        assert {name: better(name) for name in names} == dict.fromkeys(names, answer)


def test_the_best_value_is_the_first_of_equal_ones_and_never_nan(tmp_path):
    rows = [
        {"step": 1, "loss": 3.0, "test/accuracy": 0.5, "reward": 1.0, "test/loss": None},
        {"step": 2, "loss": None, "test/accuracy": 0.75, "test/loss": None},
        {"step": 3, "loss": 1.0, "test/accuracy": 0.75, "reward": 3.0},
        {"step": 4, "loss": None, "reward": 2.0},
    ]
    series = load(write_run(tmp_path / "a", rows)).series
    assert series["loss"].best == (1.0, 3) and math.isnan(series["loss"].last)
    assert series["test/accuracy"].best == (0.75, 2) and series["test/accuracy"].series.steps == [1, 2, 3]
    reward, never = series["reward"], series["test/loss"]
    assert (reward.best, reward.last, reward.least, reward.largest) == (None, 2.0, 1.0, 3.0)
    assert never.best is None and math.isnan(never.least) and math.isnan(never.largest)


def test_numbers_about_the_run_are_not_metrics(tmp_path):
    about = dict.fromkeys(("learning_rate", "generator/learning_rate", "input_wait", "gradient_norm"), 0.5)
    assert list(load(write_run(tmp_path / "a", steps(1, skipped_steps=0.0, **about, loss=1.0))).series) == ["loss"]
    rows = [*steps(1, skipped_steps=0.0), *steps(2, skipped_steps=1.0)]
    assert list(load(write_run(tmp_path / "b", rows)).series) == ["skipped_steps"]


def test_each_metric_lists_its_best_run_first(tmp_path):
    write_run(tmp_path / "a", steps(1, loss=2.0, accuracy=0.5))
    write_run(tmp_path / "b", steps(1, loss=1.0, accuracy=0.75, reward=1.0))
    write_run(tmp_path / "c", steps(1, loss=None, reward=2.0))
    order = {name: [run.name for run, _ in group] for name, group in by_metric(load_all([str(tmp_path)]))}
    assert order == {"loss": ["b", "a", "c"], "accuracy": ["b", "a"], "reward": ["b", "c"]}


def test_a_directory_of_runs_is_sorted_by_the_numbers_in_their_names(tmp_path):
    for name in ("run10", "run2", "lr0.01", "lr0.003"):
        write_run(tmp_path / name, steps(1))
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    write_run(tmp_path / "deeper" / "still" / "a", steps(1))
    assert [run.name for run in load_all([str(tmp_path)])] == ["lr0.003", "lr0.01", "run2", "run10"]


def test_names_are_relative_and_a_run_given_twice_is_loaded_once(tmp_path, monkeypatch):
    for path in ("sweep/a", "sweep/b", "c"):
        write_run(tmp_path / path, steps(1))
    assert [run.name for run in load_all([f"{tmp_path}/sweep/", f"{tmp_path}/c"])] == ["sweep/a", "sweep/b", "c"]
    assert load(tmp_path / "sweep" / "a").name == "a"
    monkeypatch.chdir(tmp_path / "c")
    assert load_all(["."])[0].name == "c"
    (tmp_path / "link").symlink_to(tmp_path / "c")
    assert len(load_all([str(tmp_path / "c"), str(tmp_path), f"{tmp_path}/sweep/../c"])) == 1


def test_a_path_without_runs_is_refused(tmp_path):
    with pytest.raises(ValueError, match="There is no directory '.*nope': give workdirs of runs, or a directory"):
        load_all([str(tmp_path / "nope")])
    with pytest.raises(ValueError, match="Neither '.*' nor a directory in it holds a metrics.jsonl: give the workdirs"):
        load_all([str(tmp_path)])


@pytest.mark.slow
def test_real_runs_have_the_right_status(tmp_path):
    def stop(report):
        raise distloop.StopTraining("seen enough")

    stop.every = 3

    def train(name, actions=(), **length):
        config = on(1, workdir=str(tmp_path / name), log_every=2, **length)
        data = distloop.make_dataset(classification(40), 10)
        distloop.Trainer(classifier(), config).fit(data, evals={"test": data}, actions=actions)
        return load(tmp_path / name)

    run = train("a", epochs=2)  # of 4 batches
    assert (run.status, run.step, run.until, run.stop_reason) == ("complete", 8, 8, None)
    assert {"loss", "accuracy", "test/loss", "test/accuracy"} == set(run.series)
    assert run.series["loss"].series.steps == [2, 4, 6, 8] and run.series["test/loss"].series.steps == [4, 8]
    assert run.settings["epochs"] == 2 and run.steps_per_sec > 0
    run = train("b", [stop], steps=50)
    assert (run.status, run.step, run.until, run.stop_reason) == ("stopped", 3, 50, "seen enough")
