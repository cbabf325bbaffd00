"""The goodput of a run: what is noted while it trains is what its report accounts for after a fall."""

import json

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop import report
from distloop.actions.goodput import Goodput
from distloop.monitoring import ledger, run_starts
from tests.problems import classification, classifier, on


def fall(report):
    raise InterruptedError


fall.every = 14


def test_a_worker_that_is_not_the_chief_reports_and_writes_nothing(tmp_path):
    def verify():
        raise AssertionError

    goodput = Goodput(str(tmp_path), lambda: {"step": 1.0}, False, verify)
    at = distloop.Report(1, 2, {}, None, time=0.0)
    assert goodput(at) == {}  # no start was noted
    run_starts.note_start(str(tmp_path), step=0, devices=1, kind="CPU")
    assert 0 <= goodput(at)["goodput"] <= 1
    goodput.on_end(at)
    assert ledger.read_progress(str(tmp_path)) is None


def test_a_start_that_ends_before_its_first_log_notes_its_end(tmp_path):
    run_starts.note_start(str(tmp_path), step=253, devices=1, kind="CPU")
    goodput = Goodput(str(tmp_path), lambda: {"step": 1.0}, True, lambda: None)
    goodput.on_end(distloop.Report(254, 600, {}, None, time=0.0))
    noted = ledger.read_progress(str(tmp_path))
    assert noted["step"] == 254 and noted["is_end"]


@pytest.mark.slow
def test_a_run_that_fell_has_done_some_steps_twice_and_each_second_is_accounted_for(tmp_path, capsys):
    data = distloop.make_dataset(classification(33), 8)
    for actions in ([fall], []):
        config = on(1, workdir=str(tmp_path), checkpoint_every=10, log_every=2)
        trainer = distloop.Trainer(classifier(), config)
        if actions:
            with pytest.raises(InterruptedError):
                trainer.fit(data, steps=20, actions=actions)
        else:
            trainer.fit(data, steps=20)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 20 and 0 < rows[-1]["goodput"] < 1
    starts, progress = run_starts.read_starts(str(tmp_path)), ledger.read_progress(str(tmp_path))
    assert [start["step"] for start in starts] == [0, 10] and starts[1]["progress"]["step"] == 14
    seconds = ledger.account(starts, progress)
    before = starts[0]["time"] - (starts[0]["process_secs"] or 0.0)
    assert sum(seconds.values()) == pytest.approx(progress["time"] - before, abs=0.05)
    assert seconds["steps"] > 0 and seconds["steps done twice"] > 0
    capsys.readouterr()
    report.main([str(tmp_path)])
    assert "goodput" in capsys.readouterr().out


@pytest.mark.wide
@pytest.mark.slow
def test_a_run_that_goes_back_to_a_checkpoint_accounts_for_each_second_once(tmp_path):
    data = classification(48)
    data["x"][-3] = np.nan  # in the last batch of the first epoch
    config = on(1, workdir=str(tmp_path), checkpoint_every=2, log_every=1, on_divergence="rollback")
    distloop.Trainer(classifier(), config).fit(tf.data.Dataset.from_tensor_slices(data).batch(8), steps=7)
    starts, progress = run_starts.read_starts(str(tmp_path)), ledger.read_progress(str(tmp_path))
    assert [start["step"] for start in starts] == [0, 4] and starts[1]["process_secs"] is None
    seconds = ledger.account(starts, progress)
    before = starts[0]["time"] - (starts[0]["process_secs"] or 0.0)
    assert sum(seconds.values()) == pytest.approx(progress["time"] - before, abs=0.05)
    assert seconds["steps done twice"] > 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["goodput"] == pytest.approx(ledger.goodput(seconds), abs=0.05)
