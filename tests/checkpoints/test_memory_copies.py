"""Copies in memory: a run that is killed between two checkpoints goes on from the newest copy, bit for bit."""

import json
import os
import shutil

import pytest
import tensorflow as tf

import distloop
from distloop.checkpoints import memory_copies
from distloop.checkpoints.store import in_workdir
from distloop.model.saved_state import SavedState
from tests.problems import assert_equal, classification, classifier, on, refused


class Killed(BaseException):
    """Ends a run as `kill -9` does: nothing is saved."""


def kill_at(step):
    """An action that ends the run at a step."""

    def kill(report):
        if report.step == step:
            raise Killed

    kill.every = step
    return kill


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A directory that stands for /dev/shm."""
    path = tmp_path / "memory"
    path.mkdir()
    monkeypatch.setattr(memory_copies, "MEMORY", str(path))
    return path


def fit(workdir, kill=None, **settings):
    """Trains for 20 steps, or until it is killed; returns the values of the state and the trainer."""
    config = on(1, **{"workdir": str(workdir), "checkpoint_every": 0, "copy_every": 4, "log_every": 5, **settings})
    trainer = distloop.Trainer(classifier(), config)
    dataset = distloop.make_dataset(classification(50), 8, shuffle=True)
    if kill is None:
        trainer.fit(dataset, steps=20)
    else:
        with pytest.raises(Killed):
            trainer.fit(dataset, steps=20, actions=[kill_at(kill)])
        trainer._checkpoints._copies._copies.join()
    values = SavedState(trainer.state).snapshot().items()
    return {name: v.numpy() for name, v in values if v.dtype != tf.string}, trainer


def resume(workdir, capsys, kill=None):
    """Trains as `fit` does, and returns the values of the state and what was printed."""
    capsys.readouterr()
    values, _ = fit(workdir, kill, console="lines")
    return values, capsys.readouterr().out


def rows_of(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def test_a_copy_that_fails_is_called_one(tmp_path, memory, caplog):
    checkpoints = in_workdir(str(tmp_path / "run"))
    copies = memory_copies.MemoryCopies(checkpoints, tf.distribute.get_strategy(), verify=lambda: None)
    copies.open(is_wanted=True, is_resuming=False)
    copies.save(5, {"step": tf.constant(5)}, {})
    copies._copies.join()
    (in_the_way,) = (path / "6" for path in memory.iterdir())
    in_the_way.touch()
    copies._copies.directory = str(in_the_way)
    copies._copies.save(6, {"step": tf.constant(6)}, {})
    copies._copies.join()
    assert "The copy in memory of step 6 could not be written (" in caplog.text


def test_a_killed_run_goes_on_from_the_copy_with_the_same_bits_and_the_copies_are_gone_at_its_end(
    tmp_path, memory, capsys
):
    fit(tmp_path / "run", kill=15)
    assert not in_workdir(str(tmp_path / "run")).steps
    found, printed = resume(tmp_path / "run", capsys)
    assert "step 12 was kept in the memory of" in printed and "step 12 restored" in printed
    expected, _ = fit(tmp_path / "whole")
    assert_equal(found, expected)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    assert os.listdir(memory) == []


def test_a_torn_copy_is_named_and_the_checkpoint_before_it_is_used(tmp_path, memory, caplog, capsys):
    fit(tmp_path / "run", kill=15, checkpoint_every=10)
    (copy,) = memory.glob("*/12")
    with open(copy / "variables.data-00000-of-00001", "r+b") as file:
        file.write(b"torn")
    found, printed = resume(tmp_path / "run", capsys)
    assert "12' is damaged" in caplog.text and "step 10 restored" in printed
    expected, _ = fit(tmp_path / "whole", copy_every=0)
    assert_equal(found, expected)


def test_without_a_workdir_or_a_directory_in_memory_copies_are_refused(tmp_path, monkeypatch):
    refused(lambda: distloop.Config(copy_every="30 s"), "copy_every=30 s", "without a workdir", "give a workdir")
    monkeypatch.setattr(memory_copies, "MEMORY", str(tmp_path / "none"))
    refused(lambda: fit(tmp_path / "run"), "no", "none", "copy_every=0")


def test_a_copied_workdir_has_copies_of_its_own_and_a_moved_one_keeps_them(tmp_path, memory, capsys):
    fit(tmp_path / "run", kill=9)
    shutil.copytree(tmp_path / "run", tmp_path / "copied")
    fit(tmp_path / "copied", kill=15)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert "step 8 restored" in resume(tmp_path / "moved", capsys, kill=10)[1]
    assert "step 12 restored" in resume(tmp_path / "copied", capsys, kill=16)[1]
    assert len(os.listdir(memory)) == 2


def test_a_copy_of_a_workdir_in_its_old_place_has_copies_of_its_own(tmp_path, memory, capsys):
    fit(tmp_path / "run", kill=9)
    (tmp_path / "run").rename(tmp_path / "original")
    shutil.copytree(tmp_path / "original", tmp_path / "run")
    _, trainer = fit(tmp_path / "run", kill=3)
    assert trainer.step == 3  # from step 0
    assert "step 8 restored" in resume(tmp_path / "original", capsys, kill=10)[1]


def test_copies_that_another_user_may_write_to_are_not_believed(tmp_path, memory, caplog):
    fit(tmp_path / "run", kill=9)
    os.chmod(next(memory.iterdir()), 0o777)
    _, trainer = fit(tmp_path / "run", kill=3)
    assert trainer.step == 3  # from step 0
    assert "is not used" in caplog.text
    assert "No copies in memory are made on" not in caplog.text  # none was due before step 4


def test_copies_of_a_run_that_has_gone_back_or_was_deleted_do_not_come_back_nor_does_a_host_bring_them(
    tmp_path, memory, capsys
):
    workdir = tmp_path / "run"
    fit(workdir, kill=15, checkpoint_every=10)
    (copies,) = memory.iterdir()
    shutil.copytree(copies, tmp_path / "away")  # as the memory of a host that is away
    trainer = distloop.Trainer(classifier(), on(1, workdir=str(workdir), checkpoint_every=0, copy_every=4))
    trainer.restore(str(workdir / "checkpoints" / "10"))
    trainer.fit(distloop.make_dataset(classification(50), 8, shuffle=True), steps=11)
    assert os.listdir(memory) == []
    shutil.copytree(tmp_path / "away", copies)
    assert "step 11 restored" in resume(workdir, capsys, kill=13)[1]
    fit(tmp_path / "other", kill=15)
    (tmp_path / "other").rename(tmp_path / "elsewhere")
    _, trainer = fit(tmp_path / "other", kill=3)
    assert trainer.step == 3  # from step 0


def test_copies_of_workdirs_that_are_gone_are_deleted_by_the_next_run_and_those_of_moved_ones_stay(
    tmp_path, memory, monkeypatch
):
    for name in ("gone", "stays"):
        _, trainer = fit(tmp_path / name, kill=9)
        assert memory_copies.left_in_memory() == []  # its process is alive
        os.close(trainer._checkpoints._copies._lock)  # as the end of the process does
    shutil.rmtree(tmp_path / "gone")
    (tmp_path / "stays").rename(tmp_path / "moved")
    (left,) = memory_copies.left_in_memory()
    with monkeypatch.context() as elsewhere:  # in another container, which sees the workdir in another place
        elsewhere.setattr(memory_copies, "_mounts", lambda: "of another container")
        assert memory_copies.left_in_memory() == []
    fit(tmp_path / "last")
    assert len(os.listdir(memory)) == 1 and not os.path.exists(left)


def test_a_copy_that_cannot_be_begun_is_said_once_and_training_goes_on(tmp_path, memory, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory_copies.MemoryCopies, "_claim", full)
    _, trainer = fit(tmp_path / "run")
    assert trainer.step == 20
    assert caplog.text.count("No copies in memory are made on") == 1
