"""Atomic files, without TensorFlow: what a reader sees at every moment, after errors and after kill -9 too."""

import errno
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time

import pytest

from distloop import atomic_files
from distloop.atomic_files import delete, leftovers, make_directory, put_back, remove, remove_leftovers, replacing

DEAD = 999_999_999  # larger than the number of any process


def write(path, text):
    """Replaces a directory of one file and one folder."""
    with replacing(str(path)) as temporary:
        os.makedirs(os.path.join(temporary, "folder"))
        pathlib.Path(temporary, "folder", "file").write_text(text)


def read(path):
    return (path / "folder" / "file").read_text()


def assert_alone(directory, text):
    """Checks that a directory holds `model` with this text, and nothing else."""
    assert read(directory / "model") == text and os.listdir(directory) == ["model"]


def test_a_file_or_directory_is_replaced_when_the_new_one_is_complete(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(str(path)) as temporary:
        pathlib.Path(temporary).write_text("new")
        assert path.read_text() == "old" and os.path.dirname(temporary) == str(tmp_path)
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]
    (tmp_path / "a").mkdir()
    for text in ("old", "new"):
        write(tmp_path / "a" / "model", text)
    assert_alone(tmp_path / "a", "new")


def test_a_path_without_a_directory_is_in_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with replacing("file") as temporary:
        pathlib.Path(temporary).write_text("new")
    assert os.listdir(tmp_path) == ["file"]


def test_after_an_error_the_old_one_stays_alone(tmp_path):
    write(tmp_path / "model", "old")
    with pytest.raises(RuntimeError, match="half"), replacing(str(tmp_path / "model")) as temporary:
        os.makedirs(temporary)
        raise RuntimeError("half written")
    assert_alone(tmp_path, "old")


def test_a_directory_is_not_replaced_by_a_file(tmp_path):
    write(tmp_path / "model", "old")
    with pytest.raises(IsADirectoryError), replacing(str(tmp_path / "model")) as temporary:
        pathlib.Path(temporary).write_text("new")
    assert_alone(tmp_path, "old")


def test_a_suffix_ends_the_temporary_name(tmp_path):
    with replacing(str(tmp_path / "model.keras"), ".keras") as temporary:
        assert temporary.endswith(".tmp.keras")
        pathlib.Path(temporary).write_text("new")


def test_the_old_one_stays_if_the_new_one_cannot_be_renamed(tmp_path, monkeypatch):
    write(tmp_path / "model", "old")
    rename = os.rename

    def refuse(source, target):
        if source.endswith(".tmp"):
            raise PermissionError("not now")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError, match="not now"):
        write(tmp_path / "model", "new")
    assert_alone(tmp_path, "old")


def test_an_old_one_that_cannot_be_removed_is_no_error(tmp_path, monkeypatch):
    write(tmp_path / "model", "old")

    def rmtree(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError("Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", rmtree)
        write(tmp_path / "model", "new")
    assert read(tmp_path / "model") == "new"
    assert not leftovers(str(tmp_path))[0].is_old  # so nobody puts back a part of it


def test_leftovers_of_a_process_with_the_same_id_are_no_hindrance(tmp_path):
    write(tmp_path / "model", "old")
    for kind in ("tmp", "old"):
        write(tmp_path / f"model.{os.getpid()}-0123abcd.{kind}", "of a killed process")
    write(tmp_path / "model", "new")
    assert_alone(tmp_path, "new")


@pytest.mark.parametrize("is_directory", [False, True])
def test_everything_is_on_the_disk_before_it_takes_its_name(is_directory, tmp_path, monkeypatch):
    synced, fsync, moves = [], os.fsync, {"rename": os.rename, "replace": os.replace}

    def sync(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checked(move):
        def moved(source, target):
            inside = [os.path.join(folder, n) for folder, folders, files in os.walk(source) for n in folders + files]
            assert {os.stat(path).st_ino for path in [source, *inside]} <= set(synced)
            moves[move](source, target)
            synced.clear()

        return moved

    monkeypatch.setattr(os, "fsync", sync)
    for move in moves:
        monkeypatch.setattr(os, move, checked(move))
    if is_directory:
        write(tmp_path / "name", "new")
    else:
        with replacing(str(tmp_path / "name")) as temporary:
            pathlib.Path(temporary).write_text("new")
    assert synced == [os.stat(tmp_path).st_ino]  # the parent directory, after the rename


def answering(number, is_meant):
    """Stands in for os.fsync: answers with an error for files, or directories."""

    def fsync(descriptor):
        if is_meant(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    return fsync


@pytest.mark.parametrize(
    ("number", "is_meant"),
    [
        *((number, stat.S_ISDIR) for number in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)),
        *((number, lambda mode: True) for number in (errno.EINVAL, errno.ENOSYS)),
    ],
)
def test_what_knows_no_fsync_of_directories_or_of_files_is_written_to(number, is_meant, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", answering(number, is_meant))
    for text in ("old", "new"):
        make_directory(str(tmp_path / "a"))
        write(tmp_path / "a" / "model", text)
    assert_alone(tmp_path / "a", "new")


@pytest.mark.parametrize("is_meant", [stat.S_ISDIR, stat.S_ISREG])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_at_fsync_is_an_error(number, is_meant, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", answering(number, is_meant))
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        write(tmp_path / "model", "new")


def test_a_new_name_is_on_the_disk_before_the_old_one_is_deleted(tmp_path, monkeypatch):
    write(tmp_path / "model", "old")
    calls = []
    for name in ("rename", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (calls.append((name, *a)), real(*a)))
    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **k: (calls.append(("rmtree", path)), rmtree(path, **k)))
    write(tmp_path / "model", "new")
    names = [call[0] for call in calls]
    taken = next(i for i, call in enumerate(calls) if call[0] == "rename" and call[2] == str(tmp_path / "model"))
    assert names[taken:] == ["rename", "fsync", "rename", "rmtree"]  # of which the third makes it a part by its name


def test_a_directory_and_its_parents_are_on_the_disk_when_they_are_made(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_ino), fsync(descriptor)))
    make_directory(str(tmp_path / "a" / "b"))
    make_directory(str(tmp_path / "a" / "b"))
    assert synced == [os.stat(path).st_ino for path in (tmp_path, tmp_path / "a")]
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_directory(str(tmp_path / "file"))


def killed(directory, text, when):
    """Runs a process that replaces `model` and is killed before a rename whose source ends with `when`."""
    program = f"""
    import os, signal
    from distloop.atomic_files import replacing
    for move in ("rename", "replace"):
        def moved(source, target, move=getattr(os, move)):
            if source.endswith({when!r}):
                os.kill(os.getpid(), signal.SIGKILL)
            move(source, target)
        setattr(os, move, moved)
    with replacing("model") as temporary:
        os.mkdir(temporary)
        open(os.path.join(temporary, "file"), "w").write({text!r})
    """
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=directory, env=environment, timeout=900)
    assert done.returncode == -signal.SIGKILL


def test_a_process_killed_before_the_renames_leaves_the_old_one(tmp_path):
    write(tmp_path / "model", "old")
    killed(tmp_path, "new", when="model")
    (leftover,) = leftovers(str(tmp_path))
    assert read(tmp_path / "model") == "old" and not leftover.is_old


def test_a_process_killed_between_two_renames_leaves_the_old_one(tmp_path):
    write(tmp_path / "model", "old")
    killed(tmp_path, "new", when=".tmp")
    new, old = sorted(leftovers(str(tmp_path)), key=lambda leftover: leftover.is_old)
    assert not (tmp_path / "model").exists()
    assert (old.is_old, new.is_old, old.process) == (True, False, new.process)
    assert old.target == new.target == str(tmp_path / "model")
    assert read(pathlib.Path(old.path)) == "old"
    assert put_back(str(tmp_path), "other") == []
    assert put_back(str(tmp_path)) == [str(tmp_path / "model")] and read(tmp_path / "model") == "old"
    assert remove_leftovers(str(tmp_path)) == [] and os.listdir(tmp_path) == ["model"]


def test_leftovers_of_what_was_replaced_go_with_the_next_replacement(tmp_path, monkeypatch):
    write(tmp_path / "model", "old")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: os.remove(os.path.join(path, "folder", "file")))
        write(tmp_path / "model", "new")
    assert len(os.listdir(tmp_path)) == 2
    write(tmp_path / "model", "newer")
    assert_alone(tmp_path, "newer")


def test_other_names_are_no_leftovers(tmp_path):
    for name in ("model.1", "model.backup.old", "model.tmp", "model.1.tmp.a.b", "1.tmp", f"model.{os.getppid()}.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "model.20240101.old").mkdir()  # a user's
    names = ["model.9999999.old", f"model.{DEAD}-0123abcd.tmp.keras"]  # the first as older versions wrote it
    for name in names:
        (tmp_path / name).mkdir()
    assert [os.path.basename(leftover.path) for leftover in leftovers(str(tmp_path))] == names
    assert leftovers(str(tmp_path / "missing")) == []


def test_a_backup_of_the_users_beside_a_path_stays(tmp_path):
    for name in ("model.20240101.old", "model.2024.old", "model.2024.tmp"):
        write(tmp_path / name, name)
    assert remove_leftovers(str(tmp_path), "model") == []
    write(tmp_path / "model", "new")
    assert sorted(os.listdir(tmp_path)) == ["model", "model.2024.old", "model.2024.tmp", "model.20240101.old"]


def test_a_process_that_began_after_the_leftover_is_not_its_writer(tmp_path, monkeypatch):
    write(tmp_path / f"model.{os.getppid()}.old", "old")
    assert put_back(str(tmp_path)) == []  # that process runs, and may be replacing it
    monkeypatch.setattr(atomic_files, "start_time", lambda process: time.time() + 60)
    assert put_back(str(tmp_path)) == [str(tmp_path / "model")]


@pytest.mark.skipif(not os.path.exists("/proc/uptime"), reason="needs Linux")
def test_the_start_of_a_process_is_known():
    assert time.time() - 86_400 < atomic_files.start_time(os.getpid()) <= time.time()


def test_a_directory_is_deleted_under_another_name(tmp_path, monkeypatch):
    write(tmp_path / "model", "old")

    def rmtree(path, ignore_errors=False):
        assert path.endswith(".tmp") and not (tmp_path / "model").exists()

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", rmtree)
        delete(str(tmp_path / "model"))
    assert not leftovers(str(tmp_path))[0].is_old  # so nobody restores a part of it


def test_removing_takes_files_directories_and_what_is_not_there(tmp_path):
    (tmp_path / "file").touch()
    write(tmp_path / "directory", "text")
    for name in ("file", "directory", "missing"):
        remove(str(tmp_path / name))
    assert os.listdir(tmp_path) == []


def test_what_was_replaced_at_a_path_with_a_line_break_is_put_back(tmp_path):
    write(tmp_path / f"a\nb.{DEAD}-0a1b2c3d.old", "old")
    assert put_back(str(tmp_path), "a\nb") == [str(tmp_path / "a\nb")]
    assert read(tmp_path / "a\nb") == "old"
