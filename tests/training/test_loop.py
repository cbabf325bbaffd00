"""What the workers agree on between two loops; how a run is cut changes no bit: tests/test_laws.py."""

import functools
import json
import os

import pytest
import tensorflow as tf

import distloop
from distloop.training.compiled_loop import CompiledLoop
from distloop.workdir.records import append_row
from distloop.workers.preemption import StopRequests
from tests.problems import (
    assert_equal,
    classification,
    classifier,
    mostly_wide,
    on,
    rows_of,
    seconds_of_one_loop,
    weights,
)


@pytest.mark.wide
@pytest.mark.slow
def test_a_run_that_ends_by_time_goes_on_when_it_gets_more(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("distloop.training.loop.time", seconds_of_one_loop())
    reports = []

    def look(report):
        reports.append((report.step, report.until, sorted({"loss", "test/loss"} & report.metrics.keys())))

    look.every = None

    def fit(until):
        config = on(1, workdir=str(tmp_path), log_every="2 s", eval_every="1 epoch", steps_per_loop=1, until=until)
        trainer = distloop.Trainer(classifier(), config)
        data = distloop.make_dataset(classification(64), 16)
        numbers = trainer.fit(data, evals={"test": data}, actions=[look])
        return trainer.step, numbers["test/loss"]

    end, loss = fit("5 s")
    both, never = ["loss", "test/loss"], float("inf")
    assert reports == [(3, never, ["loss"]), (4, never, both), (5, never, ["loss"]), (6, 6, both)] and end == 6
    output = capsys.readouterr().out
    assert "step 3  loss" in output and "Finished 6 steps" in output
    assert fit("5 s") == (6, loss) and len(reports) == 4
    output = capsys.readouterr().out
    assert "Already at step 6, after 0:00:05 of 0:00:05: raise until or use another workdir." in output
    assert "already seen" not in output
    assert fit("8 s")[0] == 10 and [step for step, *_ in reports[4:]] == [8, 10]


@pytest.mark.slow
def test_a_stop_leaves_an_evaluation_which_the_next_start_makes_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("distloop.evaluation.evaluation._CHUNK_SECS", 0.0)  # each chunk has one batch
    monkeypatch.setattr("distloop.evaluation.prediction._MAX_JOINED_SECS", 0.0)
    asked = {"reason": None, "at": None, "batches": 0}
    monkeypatch.setattr(StopRequests, "reason", property(lambda _: asked["reason"]))
    rows = {name: values[:32] for name, values in classification(64).items()}

    def batches():
        for row in range(0, 32, 2):
            asked["batches"] += 1
            if asked["batches"] == asked["at"]:
                asked["reason"] = "by SIGTERM"
            yield {name: values[row : row + 2] for name, values in rows.items()}

    def fit(name, stop_at=None):
        asked.update(reason=None, at=stop_at, batches=0)
        spec = {name: tf.TensorSpec([2, *value.shape[1:]], value.dtype) for name, value in rows.items()}
        slow = tf.data.Dataset.from_generator(batches, output_signature=spec)
        trainer = distloop.Trainer(classifier(), on(1, workdir=f"{tmp_path}/{name}", log_every=2, steps=6))
        evals = {
            "first": distloop.make_dataset(rows, 8),
            "slow": distloop.Evaluation(slow, every=4, rows_fn=lambda logits: {"rows": len(logits)}),
        }
        stop_early = distloop.StopEarly("slow/loss", patience=5)
        trainer.fit(distloop.make_dataset(rows, 8), evals=evals, actions=[stop_early])
        return weights(trainer)

    undisturbed = fit("whole")
    # Of each evaluation, batches 1 to 16 are those of its means, 17 to 32 those of its rows.
    for stop_at, step in ((20, 4), (40, 6)):
        with pytest.raises(SystemExit) as left:
            fit("run", stop_at)
        assert left.value.code == 75 and asked["batches"] < stop_at + 8  # some are read ahead
        assert max(os.listdir(tmp_path / "run" / "checkpoints")) == str(step)
    append_row(f"{tmp_path}/run/metrics.jsonl", {"step": 6, "loss": 0.0})  # as if killed between this row and its save
    assert_equal(fit("run"), undisturbed)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


class FailsOnce:
    """Rows of `classification`, of which one cannot be read the first time."""

    def __init__(self, failing=None):
        self.rows, self.failing = classification(64), failing

    def __len__(self):
        return 64

    def __getitem__(self, row):
        if row == self.failing:
            self.failing = None
            raise OSError("the network is away")
        return {name: values[row] for name, values in self.rows.items()}


GOES_BACK = {"from the step before the error": False, "from a checkpoint before": True, "in the same process": None}


@functools.cache
def without_errors():
    """Returns the weights of a run whose data does not fail."""
    trainer = distloop.Trainer(classifier(), on(1, log_every=0, console="quiet"))
    trainer.fit(distloop.make_dataset(FailsOnce(), 4), steps=15)
    return weights(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("goes_back", GOES_BACK.values(), ids=GOES_BACK)
def test_place_and_step_agree_after_an_error_of_the_data(goes_back, tmp_path):
    config = on(1, workdir=str(tmp_path), log_every=0, checkpoint_every=5, console="quiet")
    run = distloop.Trainer(classifier(), config)
    data = distloop.make_dataset(FailsOnce(4 * 7), 4)
    with pytest.raises(ValueError, match="the network is away"):
        run.fit(data, steps=15)
    assert run.step == 7  # of the loop from 5 to 10
    if goes_back is not None:
        run.save()
        run._checkpoints.wait()
        run.restore(tmp_path / "checkpoints" / ("5" if goes_back else "7"))
    run.fit(data, steps=15)
    assert_equal(weights(run), without_errors())


class Fails(distloop.Action):
    """An action for every row of a loop that fails at step 10, once."""

    every, only_writes = None, True

    def __init__(self, error):
        self.error = error

    def __call__(self, report):
        if report.step == 10 and self.error is not None:
            error, self.error = self.error, None
            raise error


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", mostly_wide([RuntimeError("the service is down"), KeyboardInterrupt()]), ids=["error", "ctrl-c"]
)
def test_place_and_step_agree_after_an_error_at_one_of_the_rows_of_a_loop(error, tmp_path):
    def trainer(name):
        return distloop.Trainer(classifier(), on(1, workdir=str(tmp_path / name), log_every=1, console="quiet"))

    data = distloop.make_dataset(classification(64), 4, shuffle=True)
    whole, run, again = trainer("whole"), trainer("run"), trainer("run")
    whole.fit(data, steps=900)
    with pytest.raises(type(error)):
        run.fit(data, steps=600, actions=[Fails(error)])
    assert run.step > 10  # there were several rows
    run.save()
    (step,) = os.listdir(tmp_path / "run" / "checkpoints")
    notes = json.loads((tmp_path / "run" / "checkpoints" / step / "manifest.json").read_text())["notes"]
    assert int(step) == notes["input"]["batches"] == run.step
    assert notes["window"]["steps"] == run.step - 9  # of no row yet: that of step 9 was the last one
    again.fit(data, steps=900)
    assert_equal(weights(again), weights(whole))


@pytest.mark.wide
@pytest.mark.slow
def test_a_fit_after_ctrl_c_in_a_loop_misses_no_batch(monkeypatch):
    data, run, whole = (
        distloop.make_dataset(classification(64), 4, shuffle=True),
        *(distloop.Trainer(classifier(), on(1, log_every=0)) for _ in range(2)),
    )
    whole.fit(data, steps=3000)
    unpack = CompiledLoop._unpack
    monkeypatch.setattr(CompiledLoop, "_unpack", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run.fit(data, steps=2000)
    monkeypatch.setattr(CompiledLoop, "_unpack", unpack)
    assert run._train_source.batches_taken == run.step > 0
    run.fit(data, steps=3000)
    assert_equal(weights(run), weights(whole))
