"""A run is told to save, evaluate, stop or train at another rate; after a kill it acts at the same step again."""

import json
import os
import pathlib
import re
import shutil
import signal

import keras
import numpy as np
import pytest

import distloop
from distloop import report
from distloop.actions import tells
from tests import forked
from tests.problems import assert_equal, classification, classifier, everything, mostly_wide, on, refused, rows_of

pytestmark = pytest.mark.slow

PROGRAM = """
    import os, signal, sys
    import numpy as np
    import distloop
    from distloop.actions.tells import tell
    from tests import problems

    workdir, replicas, commands, when = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(), sys.argv[4]
    config = distloop.Config(
        workdir=workdir, device="cpu", num_devices=replicas, log_every=4, checkpoint_every=4, average_decay=0.9,
    )
    distloop.prepare(config)

    def act(report):
        for command in commands if report.step == 5 else ():
            tell(workdir, command)
        if str(report.step) == when:
            os.kill(os.getpid(), signal.SIGKILL)
    act.every = 1

    data = distloop.make_dataset(problems.classification(67), 16, shuffle=True)
    trainer = distloop.Trainer(problems.classifier(dropout=0.5, metrics=True), config)
    trainer.fit(data, steps=14, evals={"test": distloop.Evaluation(data.fresh(), every=0)}, actions=[act])
    np.savez(os.path.join(workdir, "end.npz"), **problems.everything(trainer))
"""


def run(workdir, commands, when=""):
    return forked.run_program(workdir, PROGRAM, 2, commands, when)


COMMANDS = "evaluate learning_rate=0.5 save"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The workdir of a run on two replicas that was told something and never stopped."""
    workdir = tmp_path_factory.mktemp("whole")
    result = run(workdir, COMMANDS)
    assert result.returncode == 0, result.stderr[-3000:]
    return workdir


@pytest.mark.parametrize("when", mostly_wide(["6 11", "6", "7", "11"]))  # each by a kill
def test_a_run_that_was_told_something_is_bit_for_bit_its_own_resume(when, whole, tmp_path):
    for commands, killed in zip([COMMANDS, ""], when.split(), strict=False):
        assert run(tmp_path, commands, killed).returncode == -signal.SIGKILL
    result = run(tmp_path, "")
    assert result.returncode == 0, result.stderr[-3000:]
    expected, actual = (np.load(workdir / "end.npz") for workdir in (whole, tmp_path))
    assert not [name for name in expected if actual[name].tobytes() != expected[name].tobytes()]
    assert rows_of(tmp_path) == rows_of(whole)
    for workdir in (whole, tmp_path):
        told = [json.loads(line) for line in (workdir / "told.jsonl").read_text().splitlines()]
        assert [(row["step"], row["command"]) for row in told] == [(6, command) for command in COMMANDS.split()]


def test_what_a_run_is_told_happens_at_the_end_of_the_next_step_and_is_in_its_row(whole):
    rows = {row["step"]: row for row in rows_of(whole)}
    assert [step for step, row in rows.items() if "told" in row] == [6] and rows[6]["told"] == 3
    assert [step for step, row in rows.items() if "test/loss" in row] == [6, 14]
    assert [rows[step]["learning_rate"] for step in (6, 7, 14)] == [np.float32(0.1), 0.5, 0.5]


def trainer_of(workdir, **settings):
    model_fn = settings.pop("model_fn", classifier(dropout=0.5))
    settings = {"workdir": str(workdir), "checkpoint_every": 4, "keep_checkpoints": 9, "log_every": 2} | settings
    return distloop.Trainer(model_fn, on(1, **settings))


def fail(workdir, evals=None, **settings):
    """Trains to step 3, where an action fails."""

    def failing(report):
        if report.step == 3:
            raise RuntimeError("the action failed")

    failing.every = 1
    with pytest.raises(RuntimeError):
        trainer_of(workdir, **settings).fit(data(), steps=12, evals=evals, actions=[failing])


def data():
    return distloop.make_dataset(classification(67), 16, shuffle=True)


def telling(workdir, command):
    def act(report):
        if report.step == 5:
            tells.tell(str(workdir), command)

    act.every = 5
    return act


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The trainer of a run that was told another rate at step 5."""
    workdir = tmp_path_factory.mktemp("told")
    trainer = trainer_of(workdir)
    trainer.fit(data(), steps=12, actions=[telling(workdir, "learning_rate=0.5")])
    return trainer


def test_a_resumed_run_acts_at_the_same_step_though_nothing_else_is_due_there(told, tmp_path):
    shutil.copytree(told.config.workdir, tmp_path, dirs_exist_ok=True)
    for step in ("8", "12"):
        shutil.rmtree(tmp_path / "checkpoints" / step)
    resumed = trainer_of(tmp_path, log_every=0, checkpoint_every=0)
    resumed.fit(data(), steps=12)
    assert_equal(everything(resumed), everything(told))


@pytest.mark.parametrize("step", mostly_wide([6, 7, 8, 10], 7))
def test_a_run_that_was_told_another_rate_is_replayed(step, told):
    replayed = trainer_of(told.config.workdir).replay(data(), step=step, steps=12)
    assert not replayed.differences and replayed.learning_rate == (np.float32(0.1) if step <= 6 else 0.5)


def test_a_run_that_is_told_to_stop_ends_at_the_next_step_and_not_again(tmp_path, capsys):
    trainer = trainer_of(tmp_path)
    trainer.fit(data(), steps=12, actions=[telling(tmp_path, "stop")])
    assert trainer.step == 6 and "Stopped at step 6: it was told to stop." in capsys.readouterr().out
    again = trainer_of(tmp_path)
    again.fit(data(), steps=12)
    assert again.step == 6 and "Stopped at step 6 before (it was told to stop): raise steps" in capsys.readouterr().out
    further = trainer_of(tmp_path)
    further.fit(data(), steps=14)
    assert further.step == 14 and sorted(map(int, os.listdir(tmp_path / "checkpoints"))) == [4, 6, 8, 12, 14]


def test_what_a_run_cannot_be_told_is_refused_in_a_sentence_at_once(tmp_path, capsys):
    workdir = str(tmp_path / "run")
    fail(workdir)

    def refuses(command, *parts, path=workdir):
        assert report.main(["--tell", path, command]) == 2
        found = capsys.readouterr().err
        assert found.count("\n") == 1 and all(part in found for part in parts), found

    refuses("pause", "--tell was given 'pause'", "give save, evaluate, stop or learning_rate=NUMBER")
    refuses("clip_norm=1", "others are changed by a new start")
    refuses("learning_rate=fast", "give a number, 0 or more, as in learning_rate=1e-4")
    refuses("learning_rate=nan", "give a number, 0 or more")
    refuses("critic/learning_rate=1", "no constant critic/learning_rate (it has learning_rate)")
    refuses("evaluate", "the run has no evals")
    refuses("save", "where no run of this version has begun", path=str(tmp_path))
    refuses("save", "memory://run", "trainer.config.local_workdir", path="memory://run")
    (tmp_path / "run" / "tell.jsonl").mkdir()
    refuses("save", "tell.jsonl' (Is a directory): only who may write it tells it")
    (tmp_path / "run" / "tell.jsonl").rmdir()
    trainer_of(workdir).fit(data(), steps=12)
    refuses("save", "whose run has ended: start it with more steps first")


def test_a_rate_that_is_a_schedule_is_refused_and_an_older_command_for_it_changes_nothing(tmp_path, caplog):
    rate = distloop.make_schedule(0.1, 12)
    settings = dict(model_fn=classifier(optimizer=lambda: keras.optimizers.SGD(rate)))
    fail(tmp_path, **settings)
    refused(lambda: tells.tell(str(tmp_path), "learning_rate=1"), "each of its rates is a schedule", "stop it")
    (tmp_path / "tell.jsonl").write_text('{"step": 3, "id": "a", "command": "learning_rate=1"}\nhalf a li')
    trainer_of(tmp_path, **settings).fit(data(), steps=12)
    assert "start it with another. The run does not act on it." in caplog.text
    assert not (tmp_path / "told.jsonl").exists()


def test_a_run_that_is_told_nothing_looks_once_at_a_boundary_and_trains_at_its_own_rate(told, tmp_path, monkeypatch):
    looks, stat = [], os.stat
    monkeypatch.setattr(tells.os, "stat", lambda path, *more, **named: looks.append(path) or stat(path, *more, **named))
    trainer_of(tmp_path, steps_per_loop=1).fit(data(), steps=12)
    assert [os.path.basename(path) for path in looks if "tell" in str(path)] == ["tell.jsonl"] * 11
    assert not (tmp_path / "told.jsonl").exists()
    never, rows = ({row["step"]: row["loss"] for row in rows_of(of)} for of in (tmp_path, told.config.workdir))
    assert never[6] == rows[6] and never[8] != rows[8]  # another rate from step 7 on


def test_a_run_that_does_not_train_acts_on_the_commands_of_the_cookbook_once_it_is_started_again(tmp_path, capsys):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "cookbook.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python -m distloop.report --tell runs/best (\S+)$", page, re.M)
    assert len(commands) == 4 and "learning_rate=1e-4" in commands
    fail(tmp_path, evals={"test": data()})
    for command in commands:
        assert report.main(["--tell", str(tmp_path), command]) == 0
        assert "the run acts on it after its next step, or once it is started again" in capsys.readouterr().out
    trainer = trainer_of(tmp_path)
    numbers = trainer.fit(data(), steps=12, evals={"test": data()})
    assert trainer.step < 12 and numbers["told"] == 4 and "test/loss" in numbers
    assert trainer.optimizer.learning_rate.numpy() == np.float32(1e-4)
