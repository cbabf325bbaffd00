"""The store: a checkpoint is whole or absent, verified, and deleted only when its successor is whole."""

import json
import os
import shutil
import threading

import numpy as np
import pytest
import tensorflow as tf

from distloop.checkpoints import store
from distloop.checkpoints.store import Checkpoints, DamagedError, load


def values_of(step):
    return {
        "model/kernel": tf.fill([3, 4], float(step)),
        "model/name": tf.constant("a kernel"),
        "step": tf.constant(step, tf.int64),
    }


def save(directory, *steps, keep=10):
    kept = Checkpoints(str(directory), keep)
    for step in steps:
        kept.save(step, values_of(step), {"replicas": 2})
    kept.wait()
    return kept


def test_a_saved_checkpoint_is_loaded(tmp_path):
    saved = save(tmp_path, 500).load_newest()
    assert saved.step == 500 and saved.notes == {"replicas": 2} and saved.path == str(tmp_path / "500")
    assert saved.values.keys() == values_of(500).keys()
    for name, value in values_of(500).items():
        np.testing.assert_array_equal(saved.values[name].numpy(), value.numpy())


def test_tensorflow_reads_a_checkpoint_by_name(tmp_path):
    save(tmp_path, 7)
    reader = tf.train.load_checkpoint(str(tmp_path / "7" / "variables"))
    np.testing.assert_array_equal(reader.get_tensor("model/kernel"), np.full([3, 4], 7.0))


def test_the_manifest_holds_shapes_and_dtypes(tmp_path):
    save(tmp_path, 7)
    manifest = json.loads((tmp_path / "7" / "manifest.json").read_text())
    assert manifest["entries"]["model/kernel"] == {"shape": [3, 4], "dtype": "float32"}
    assert set(manifest["files"]) == {"variables.index", "variables.data-00000-of-00001"}


def test_an_empty_store_loads_nothing(tmp_path):
    assert Checkpoints(str(tmp_path / "none")).load_newest() is None


def test_the_newest_are_kept(tmp_path):
    assert save(tmp_path, 1, 2, 10, 9, keep=2).steps == [9, 10]
    assert sorted(os.listdir(tmp_path)) == ["10", "9"]


def test_no_old_checkpoint_is_deleted_before_the_new_one_is_whole(tmp_path, monkeypatch):
    kept = save(tmp_path, 1, keep=1)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    kept.save(2, values_of(2), {})
    with pytest.raises(OSError, match="The last checkpoint could not be written .*No space left on device"):
        kept.wait()
    assert os.listdir(tmp_path) == ["1"]
    monkeypatch.undo()
    kept.save(3, values_of(3), {})
    kept.wait()
    assert os.listdir(tmp_path) == ["3"]


def test_a_save_that_failed_is_forgotten_when_the_next_one_succeeds(tmp_path, monkeypatch, caplog):
    kept = Checkpoints(str(tmp_path / "file" / "x"))
    (tmp_path / "file").write_text("in the way")
    kept.save(1, values_of(1), {})
    kept._join()
    assert "The checkpoint of step 1 could not be written" in caplog.text and "training goes on" in caplog.text
    os.remove(tmp_path / "file")
    kept.save(2, values_of(2), {})
    kept.wait()
    assert kept.load_newest().step == 2


def test_notes_that_change_while_they_are_written_are_saved_as_they_were(tmp_path, monkeypatch):
    started, changed = threading.Event(), threading.Event()
    write = store._write

    def write_late(*arguments):
        started.set()
        assert changed.wait(10)
        write(*arguments)

    monkeypatch.setattr(store, "_write", write_late)
    notes = {"counts": {10: 1, 9: 2}}
    kept = Checkpoints(str(tmp_path))
    kept.save(5, values_of(1), notes)
    assert started.wait(10)
    notes["counts"][10] = 3
    changed.set()
    kept.wait()
    assert kept.load_newest().notes == {"counts": {"10": 1, "9": 2}}


def test_notes_that_json_cannot_hold_are_an_error_of_the_caller(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        Checkpoints(str(tmp_path)).save(5, values_of(1), {"counts": {1, 2}})


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    kept = save(tmp_path, 5)
    kept.save(5, {"step": tf.constant(6)}, {})
    kept.wait()
    assert list(kept.load_newest().values) == ["step"] and os.listdir(tmp_path) == ["5"]


def test_a_checkpoint_that_a_killed_process_was_replacing_is_loaded(tmp_path):
    kept = save(tmp_path, 4, 5)
    os.rename(tmp_path / "5", tmp_path / "5.123.old")
    assert kept.load_newest().step == 5


def test_leftovers_of_a_killed_process_are_removed_by_the_next_save(tmp_path):
    save(tmp_path, 5)
    shutil.copytree(tmp_path / "5", tmp_path / "6.123.tmp")
    assert save(tmp_path, 7).steps == [5, 7]
    assert sorted(os.listdir(tmp_path)) == ["5", "7"]


DATA, INDEX, MANIFEST = "variables.data-00000-of-00001", "variables.index", "manifest.json"


def truncate(part):
    def damage(path):
        size = os.path.getsize(path)
        with open(path, "r+b") as file:
            file.truncate(int(size * part))

    return damage


def flip(place):
    def damage(path):
        with open(path, "r+b") as file:
            file.seek(int((os.path.getsize(path) - 1) * place))
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0x10]))

    return damage


def append(path):
    with open(path, "ab") as file:
        file.write(b"more")


def fill(content):
    def damage(path):
        with open(path, "wb") as file:
            file.write(content)

    return damage


def edit(**changes):
    def damage(path):
        with open(path) as file:
            manifest = json.load(file)
        with open(path, "w") as file:
            json.dump({**manifest, **changes}, file)

    return damage


def make_directory(path):
    os.remove(path)
    os.mkdir(path)


def zero(path):
    with open(path, "r+b") as file:
        file.write(bytes(os.path.getsize(path)))


DAMAGES = {
    **{f"{file} missing": (file, os.remove) for file in (DATA, INDEX, MANIFEST)},
    **{f"{file} empty": (file, truncate(0)) for file in (DATA, INDEX, MANIFEST)},
    **{f"{file} half": (file, truncate(0.5)) for file in (DATA, INDEX, MANIFEST)},
    **{f"{file} but its end": (file, truncate(0.98)) for file in (DATA, INDEX, MANIFEST)},
    **{f"{file} with more": (file, append) for file in (DATA, INDEX, MANIFEST)},
    **{f"{file} a directory": (file, make_directory) for file in (DATA, INDEX, MANIFEST)},
    **{f"{file} zeroed": (file, zero) for file in (DATA, INDEX, MANIFEST)},
    **{f"{file} flipped at {place}": (file, flip(place)) for file in (DATA, MANIFEST) for place in (0, 0.3, 0.6, 1)},
    "index flipped at its start": (INDEX, flip(0)),
    "index flipped at its end": (INDEX, flip(1)),
    "manifest no JSON": (MANIFEST, fill(b"{")),
    "manifest no object": (MANIFEST, fill(b"[1, 2]")),
    "manifest no text": (MANIFEST, fill(bytes(range(256)))),
    "manifest without entries": (MANIFEST, edit(entries={})),
    "manifest of another step": (MANIFEST, edit(step=3)),
    "manifest of another format": (MANIFEST, edit(format=99)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_logged_and_the_previous_one_loaded(damage, tmp_path, caplog):
    kept = save(tmp_path, 4, 5)
    file, do = DAMAGES[damage]
    do(str(tmp_path / "5" / file))
    saved = kept.load_newest()
    assert saved.step == 4
    np.testing.assert_array_equal(saved.values["model/kernel"].numpy(), values_of(4)["model/kernel"].numpy())
    assert f"The checkpoint '{tmp_path / '5'}' is damaged" in caplog.text
    assert kept.steps == [4, 5]  # nothing is deleted
    with pytest.raises(DamagedError) as caught:
        load(str(tmp_path / "5"))
    assert "\n" not in str(caught.value)


def test_if_all_are_damaged_it_is_an_error(tmp_path):
    kept = save(tmp_path, 4, 5)
    for step in "45":
        os.remove(tmp_path / step / DATA)
    with pytest.raises(DamagedError, match="None of the 2 checkpoints .* is whole; nothing was restored"):
        kept.load_newest()
