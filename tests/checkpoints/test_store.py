"""The store: a checkpoint is whole or absent, verified, and deleted only when its successor is whole."""

import errno
import os
import shutil
import threading

import numpy as np
import pytest
import tensorflow as tf

from distloop.checkpoints import checkpoint, store
from distloop.checkpoints.checkpoint import DamagedError, load
from distloop.checkpoints.store import Checkpoints

DATA, INDEX, MANIFEST = "variables.data-00000-of-00001", "variables.index", "manifest.json"


def values_of(step):
    return {
        "model/kernel": tf.fill([3, 4], float(step)),
        "model/name": tf.constant("a kernel"),
        "step": tf.constant(step, tf.int64),
    }


def save(directory, *steps, keep=10, kept=None, notes=None, best=None):
    kept = kept or Checkpoints(str(directory), keep)
    for step in steps:
        kept.save(step, values_of(step), notes or {}, best)
    kept.wait()
    return kept


def reads(monkeypatch):
    """Returns the list of the manifests that are read from now on."""
    read = []
    monkeypatch.setattr(store, "read_manifest", lambda path: read.append(path) or checkpoint.read_manifest(path))
    return read


def failing(real, error, fails=lambda *arguments: True):
    """Returns a function that fails for some arguments, and calls the real one for others."""

    def call(*arguments, **settings):
        if fails(*arguments):
            raise error
        return real(*arguments, **settings)

    return call


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_the_newest_are_kept_and_of_those_only_a_wanted_one_is_loaded(tmp_path):
    assert Checkpoints(str(tmp_path / "none")).load_newest() is None
    kept = save(tmp_path, 1, 2, 9, 10, keep=2)
    assert kept.steps == [9, 10] and kept.load_newest(lambda saved: False) is None
    assert sorted(os.listdir(tmp_path)) == ["10", "9"]


def test_what_stays_is_deleted_by_no_process(tmp_path):
    save(tmp_path, 1, 2, keep=1, notes={"stays": True})
    save(tmp_path, 3, 4, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "4"]
    save(tmp_path, 2, keep=1)  # a run that went back to it saves it again
    save(tmp_path, 5, 6, keep=1)
    assert sorted(name for name in os.listdir(tmp_path) if name.isdigit()) == ["1", "2", "6"]


def test_no_old_checkpoint_is_deleted_before_the_new_one_is_complete(tmp_path, monkeypatch):
    kept = save(tmp_path, 1, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(None, FULL))
        with pytest.raises(OSError, match="The last checkpoint could not be written .*No space left on device"):
            save(tmp_path, 2, kept=kept)
    assert os.listdir(tmp_path) == ["1"]
    save(tmp_path, 3, kept=kept)
    assert os.listdir(tmp_path) == ["3"]


def test_a_save_that_failed_is_forgotten_when_the_next_one_succeeds(tmp_path, monkeypatch, caplog):
    kept = Checkpoints(str(tmp_path / "file" / "x"))
    (tmp_path / "file").write_text("in the way")
    kept.save(1, values_of(1), {})
    kept.join()
    assert "The checkpoint of step 1 could not be written" in caplog.text and "training goes on" in caplog.text
    os.remove(tmp_path / "file")
    assert save(tmp_path, 2, kept=kept).load_newest().step == 2


def test_notes_that_change_while_they_are_written_are_saved_as_they_were(tmp_path, monkeypatch):
    started, changed = threading.Event(), threading.Event()
    write = store.write_files

    def write_late(*arguments):
        started.set()
        assert changed.wait(300)
        write(*arguments)

    monkeypatch.setattr(store, "write_files", write_late)
    notes = {"counts": {10: 1, 9: 2}}
    kept = Checkpoints(str(tmp_path))
    kept.save(5, values_of(1), notes)
    assert started.wait(300)
    notes["counts"][10] = 3
    changed.set()
    kept.wait()
    assert kept.load_newest().metadata == {"counts": {"10": 1, "9": 2}}
    with pytest.raises(TypeError, match="not JSON serializable"):
        kept.save(6, values_of(1), {"counts": {1, 2}})


@pytest.mark.parametrize("renames", range(4))
def test_nothing_is_renamed_once_another_process_has_taken_over(renames, tmp_path, caplog):
    """Takes a save that has to rename a later checkpoint, write `best.json` and delete an old one."""
    calls, seen = [], []

    def verify():
        files = sorted(path.name for path in tmp_path.iterdir() if ".tmp" not in path.name)
        calls.append(files)
        if len(calls) > 1 + renames:
            seen.append(files)
            raise RuntimeError("another process writes here")

    save(tmp_path, 1, 2, 4)
    kept = Checkpoints(str(tmp_path), 1, verify=verify)
    kept.save(3, values_of(3), {}, {"loss": [2]})
    kept.join()
    after = sorted(path.name for path in tmp_path.iterdir())
    assert seen and after == seen[0] and "another process writes here" in caplog.text
    expected = ["1 2 4", "1 2 4.abandoned", "1 2 3 4.abandoned", "1 2 3 4.abandoned best.json"]
    assert after == expected[renames].split()


def test_a_checkpoint_of_the_same_step_is_replaced_also_after_a_kill(tmp_path):
    kept = save(tmp_path, 5)
    kept.save(5, {"step": tf.constant(6)}, {})
    kept.wait()
    assert list(kept.load_newest().values) == ["step"] and os.listdir(tmp_path) == ["5"]
    save(tmp_path, 4, 5)
    os.rename(tmp_path / "5", tmp_path / "5.123.old")
    assert kept.load_newest().step == 5


@pytest.mark.parametrize("file", [DATA, INDEX, MANIFEST])
def test_a_damaged_checkpoint_is_logged_and_the_previous_one_loaded(file, tmp_path, caplog):
    kept = save(tmp_path, 4, 5)
    os.remove(tmp_path / "5" / file)
    saved = kept.load_newest()
    assert saved.step == 4
    np.testing.assert_array_equal(saved.values["model/kernel"].numpy(), values_of(4)["model/kernel"].numpy())
    assert f"The checkpoint '{tmp_path / '5'}' is damaged" in caplog.text
    assert kept.steps == [4, 5]  # nothing is deleted


def test_if_all_are_damaged_it_is_an_error(tmp_path):
    kept = save(tmp_path, 4, 5)
    for step in "45":
        os.remove(tmp_path / step / DATA)
    with pytest.raises(DamagedError, match="None of the 2 checkpoints .* is complete; nothing was restored"):
        kept.load_newest()
    shutil.rmtree(tmp_path / "4")
    with pytest.raises(DamagedError, match="The only checkpoint in .* is damaged; nothing was restored"):
        kept.load_newest()


# Errors of the disk -------------------------------------------------------------------------------------------------


DISK_ERROR, TOO_MANY = OSError(errno.EIO, "Input/output error"), OSError(errno.EMFILE, "Too many")


def test_a_directory_that_cannot_be_read_is_not_an_empty_one(tmp_path, monkeypatch):
    kept = save(tmp_path, 4)
    monkeypatch.setattr(checkpoint, "_PAUSES_SECS", (0,))
    times = iter([True, False])
    monkeypatch.setattr(os, "scandir", failing(os.scandir, DISK_ERROR, lambda path: next(times)))
    assert kept.steps == [4]
    monkeypatch.setattr(os, "scandir", failing(None, DISK_ERROR))
    with pytest.raises(OSError, match="cannot be read .*Input/output error"):
        kept.load_newest()


def test_a_checkpoint_that_cannot_be_read_is_neither_passed_nor_deleted(tmp_path, monkeypatch, caplog):
    kept = save(tmp_path, 4, 5, keep=1)
    monkeypatch.setattr(checkpoint, "_PAUSES_SECS", ())
    monkeypatch.setattr(tf.raw_ops, "RestoreV2", failing(None, TOO_MANY))
    with pytest.raises(OSError, match="cannot be read"):
        kept.load_newest()
    monkeypatch.undo()
    assert kept.load_newest().step == 5

    monkeypatch.setattr(checkpoint, "_PAUSES_SECS", ())
    monkeypatch.setattr(os.path, "getsize", failing(None, OSError(errno.ESTALE, "Stale handle")))
    another = Checkpoints(str(tmp_path), keep=1)  # `kept` has written the checkpoint, and would not read it again
    with pytest.raises(OSError, match="cannot be read"):
        another._prune()
    assert kept.steps == [5]


def test_the_best_stay_if_their_list_cannot_be_read(tmp_path, monkeypatch):
    kept = save(tmp_path, 1, 2, keep=1, best={"score": [1]})
    assert kept.steps == [1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_PAUSES_SECS", ())
        patch.setattr("builtins.open", failing(open, TOO_MANY, lambda path, *_: "best.json" in str(path)))
        with pytest.raises(OSError, match="Too many"):
            save(tmp_path, 3, kept=kept)
    assert kept.steps == [1, 2, 3] and kept.best_steps == {"score": [1]}


def test_old_checkpoints_that_cannot_be_deleted_fail_no_save(tmp_path, monkeypatch, caplog):
    kept = save(tmp_path, 4, keep=1)
    monkeypatch.setattr(os, "rename", failing(os.rename, DISK_ERROR, lambda source, _: source.endswith("/4")))
    save(tmp_path, 5, kept=kept)
    assert kept.steps == [4, 5] and "Old checkpoints could not be deleted" in caplog.text
    monkeypatch.undo()
    assert save(tmp_path, 6, keep=1).steps == [6]


# Going back ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 3])
def test_a_run_that_went_back_goes_on_from_its_own_checkpoint(keep, tmp_path, caplog):
    save(tmp_path, 300, 400, 500, 600)
    kept = save(tmp_path, 350, keep=keep)
    assert kept.load_newest().step == 350 and kept.steps == ([300, 350] if keep == 3 else [350])
    assert "The checkpoints of steps 400, 500, 600 are renamed to <step>.abandoned" in caplog.text
    assert load(str(tmp_path / "600.abandoned")).step == 600  # nothing that a user has is lost
    assert save(tmp_path, 400, 500, keep=keep).load_newest().step == 500
    save(tmp_path, 390, keep=keep)
    assert {"400.abandoned", "500.abandoned", "500.abandoned-2"} <= set(os.listdir(tmp_path))


def test_a_save_that_fails_before_it_is_written_renames_nothing(tmp_path, monkeypatch):
    kept = save(tmp_path, 300, 400)
    monkeypatch.setattr(tf.raw_ops, "SaveV2", failing(None, FULL))
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 350, kept=kept)
    assert kept.steps == [300, 400]


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_ones_do_not_count_among_the_newest(keep, tmp_path):
    save(tmp_path, 300, 400, 500)
    for step in (400, 500):
        os.remove(tmp_path / str(step) / DATA)
    kept = save(tmp_path, 450, keep=keep)
    assert kept.load_newest().step == 450
    assert kept.steps == ([450] if keep == 1 else [300, 400, 450])


def test_what_is_not_named_as_a_step_is_no_checkpoint(tmp_path):
    for name in ("0900", "\u00b2", "\u0663", "-1", "1_0", " 5", "5.copy", "9" * 30):
        shutil.copytree(tmp_path / "4", tmp_path / name) if (tmp_path / "4").exists() else (tmp_path / name).mkdir()
    (tmp_path / "901").write_text("a file")
    names = set(os.listdir(tmp_path))
    kept = save(tmp_path, 0, 4, 5, keep=2)
    assert kept.steps == [4, 5] and kept.load_newest().step == 5
    assert set(os.listdir(tmp_path)) == names | {"4", "5"}


def test_what_this_process_wrote_is_read_again_only_where_files_changed(tmp_path, monkeypatch):
    kept, read = save(tmp_path, 1, 2, keep=2), reads(monkeypatch)
    save(tmp_path, 3, kept=kept)
    assert kept.steps == [2, 3] and not read and kept.seen.keys() == {2, 3}
    with open(tmp_path / "3" / "variables.index", "r+b") as file:
        file.truncate(9)
    save(tmp_path, 4, kept=kept)
    assert read == [str(tmp_path / "3")] and kept.steps == [2, 3, 4]


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path, caplog):
    kept = save(tmp_path, 4, 5)
    os.rename(tmp_path / "4", tmp_path / "6")
    assert kept.load_newest().step == 5 and "it holds step 4" in caplog.text


def test_a_run_that_diverged_renames_the_later_ones_until_the_next_save(tmp_path):
    kept = save(tmp_path, 10, 20, 30)
    (tmp_path / "30.diverged").mkdir()  # left by a process that was killed
    (tmp_path / "30.diverged" / "file").touch()
    kept.drop_later(10)
    assert sorted(os.listdir(tmp_path)) == ["10", "20.diverged", "30.diverged", "30.diverged-2"]
    assert save(tmp_path, 15).steps == [10, 15] and sorted(os.listdir(tmp_path)) == ["10", "15"]


def test_best_steps_that_were_left_behind_are_not_listed(tmp_path):
    kept = save(tmp_path, 300, best={"score": [300], "other": [300]})
    save(tmp_path, 400, kept=kept, best={"score": [400], "other": [300]})
    assert save(tmp_path, 350, kept=kept).best_steps == {"score": [], "other": [300]}


def test_a_best_one_that_could_not_be_written_leaves_the_one_before_it(tmp_path, monkeypatch):
    kept = Checkpoints(str(tmp_path), keep=1)
    for step, best in [(200, [200]), (300, [300, 200]), (500, [500, 300]), (600, [500, 300]), (700, [700, 500])]:
        with monkeypatch.context() as patch:
            if step == 500:
                patch.setattr(store, "write_files", failing(None, FULL))
            kept.save(step, values_of(step), {}, {"score": best})
            kept.join()
    assert kept.best_steps == {"score": [700, 300]} and kept.steps == [300, 700]


# Leftovers ----------------------------------------------------------------------------------------------------------


def test_a_half_deleted_checkpoint_never_comes_back(tmp_path, monkeypatch):
    kept = save(tmp_path, 4, 5)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", failing(None, KeyboardInterrupt()))  # which nothing catches
        patch.setattr("threading.excepthook", lambda _: None)
        kept.save(5, values_of(5), {})
        kept.join()
    for name in os.listdir(tmp_path):
        assert not name.endswith(".old")  # its deletion has begun
    shutil.rmtree(tmp_path / "5")
    assert kept.load_newest().step == 4


@pytest.mark.parametrize("leftover", ["6.123.tmp", "5.{}.tmp", "5.{}.old"])
def test_the_next_save_removes_what_a_killed_process_left_behind(leftover, tmp_path):
    leftover = leftover.format(os.getpid())
    shutil.copytree(save(tmp_path, 5).load_newest().path, tmp_path / leftover)
    assert save(tmp_path, 7, keep=1).steps == [7] and os.listdir(tmp_path) == ["7"]


def test_temporary_names_of_a_process_that_runs_stay(tmp_path):
    (tmp_path / f"5.{os.getppid()}.tmp").mkdir()
    save(tmp_path, 6)
    assert sorted(os.listdir(tmp_path)) == [f"5.{os.getppid()}.tmp", "6"]


def test_a_save_reads_few_manifests_however_many_checkpoints_are_kept(tmp_path, monkeypatch):
    save(tmp_path, *range(1, 21), keep=1_000)
    kept = save(tmp_path, 30, keep=15)
    read = reads(monkeypatch)
    save(tmp_path, 40, kept=kept)
    assert len(read) <= 5 and kept.steps == [*range(8, 21), 30, 40]


NAMES = ["lr=[0.1]", "[!a]-{b,c}", "a*b?", "back\\slash", "new\nline", "--workdir", "%s {x}", " a b ", "bad\udce4"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_directory_may_have_any_name_that_a_file_system_allows(name, tmp_path):
    kept = save(tmp_path / name / "checkpoints", 4, 5)
    assert kept.load_newest().step == 5 and kept.load(4).step == 4
    assert sorted(os.listdir(tmp_path / name / "checkpoints")) == ["4", "5"]


@pytest.mark.parametrize("name", ["best.json", "1/manifest.json", "1/variables.index"])
def test_a_fifo_in_place_of_a_file_is_damage_and_is_not_waited_for(name, tmp_path):
    checkpoints = save(tmp_path, 1, 2, best={"loss": [2]})
    os.remove(tmp_path / name)
    os.mkfifo(tmp_path / name)
    assert checkpoints.load_newest().step == 2 and set(checkpoints.best_steps) <= {"loss"}
    if name != "best.json":
        with pytest.raises(DamagedError):
            checkpoints.load(1)
