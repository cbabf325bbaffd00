"""One checkpoint: whatever differs from what was written is damage, and what cannot be read is not."""

import builtins
import errno
import json
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf

from distloop.checkpoints import checkpoint
from distloop.checkpoints.checkpoint import DamagedError, load, write_files


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(checkpoint, "_PAUSES_SECS", (0, 0))


def write(path, step=5, value=None):
    path.parent.mkdir(exist_ok=True)
    values = {
        "model/kernel": tf.fill([3, 4], float(step if value is None else value)),
        "model/name": tf.constant("a kernel"),
        "step": tf.constant(step, tf.int64),
    }
    write_files(str(path), step, values, {"replicas": 2})
    return values


def test_what_was_written_is_loaded(tmp_path):
    values = write(tmp_path / "5")
    saved = load(str(tmp_path / "5"))
    assert saved.step == 5 and saved.notes == {"replicas": 2} and saved.path == str(tmp_path / "5")
    assert saved.values.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(saved.values[name].numpy(), value.numpy())


def test_weights_that_older_versions_numbered_across_the_process_load_by_their_place_in_the_layer(tmp_path):
    parts = ("model", "optimizer/momentum", "average")
    names = ["model/a/variable_72", *(f"{part}/a/variable_103" for part in parts)]
    write_files(str(tmp_path / "5"), 5, {name: tf.constant(i) for i, name in enumerate(names)}, {})
    values = load(str(tmp_path / "5")).values
    assert list(values) == ["model/a/variable", *(f"{part}/a/variable_1" for part in parts)]
    assert [int(value) for value in values.values()] == [0, 1, 2, 3]


def test_tensorflow_reads_a_checkpoint_by_name(tmp_path):
    write(tmp_path / "7", 7)
    reader = tf.train.load_checkpoint(str(tmp_path / "7" / "variables"))
    np.testing.assert_array_equal(reader.get_tensor("model/kernel"), np.full([3, 4], 7.0))


def test_the_manifest_holds_shapes_and_dtypes(tmp_path):
    write(tmp_path / "7")
    manifest = json.loads((tmp_path / "7" / "manifest.json").read_text())
    assert manifest["entries"]["model/kernel"] == {"shape": [3, 4], "dtype": "float32"}
    assert set(manifest["files"]) == {"variables.index", "variables.data-00000-of-00001"}


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
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_differs_from_what_was_written_is_damage(damage, tmp_path):
    write(tmp_path / "5")
    file, do = DAMAGES[damage]
    do(str(tmp_path / "5" / file))
    with pytest.raises(DamagedError, match=f"The checkpoint '{tmp_path / '5'}' is damaged") as caught:
        load(str(tmp_path / "5"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("files", [[DATA], [INDEX], [DATA, INDEX]])
def test_values_of_another_step_are_refused_under_a_manifest(files, tmp_path):
    write(tmp_path / "100", 100)
    write(tmp_path / "200", 200)
    for file in files:
        shutil.copy(tmp_path / "100" / file, tmp_path / "200" / file)
    with pytest.raises(DamagedError):
        load(str(tmp_path / "200"))


def rewrite(path, **changes):
    """Changes the manifest of a checkpoint and its checksum."""
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["checksum"]
    manifest |= changes
    manifest = {name: value for name, value in manifest.items() if value is not None}
    (path / MANIFEST).write_text(json.dumps({**manifest, "checksum": checkpoint._checksum(manifest)}))


def test_a_checkpoint_of_the_first_format_is_loaded(tmp_path):
    values = write(tmp_path / "5")
    rewrite(tmp_path / "5", format=1, index=None)
    np.testing.assert_array_equal(load(str(tmp_path / "5")).values["model/kernel"], values["model/kernel"])


def test_a_checkpoint_of_a_newer_version_is_not_damaged(tmp_path):
    write(tmp_path / "5")
    rewrite(tmp_path / "5", format=3)
    with pytest.raises(ValueError, match="has format 3.* reads up to 2: install the version") as caught:
        load(str(tmp_path / "5"))
    assert not isinstance(caught.value, DamagedError)


def failing(monkeypatch, code, times, place):
    """Makes reading a part of a checkpoint fail a number of times with an error code of the operating system."""
    real_open, real_restore, left = builtins.open, tf.raw_ops.RestoreV2, [times]

    def fail():
        left[0] -= 1
        return left[0] >= 0

    def opened(path, *arguments, **settings):
        if place in str(path) and fail():
            raise OSError(code, os.strerror(code), str(path))
        return real_open(path, *arguments, **settings)

    def restored(**arguments):
        if place == "variables.data" and fail():
            raise tf.errors.ResourceExhaustedError(None, None, f"{arguments['prefix']}; {os.strerror(code)}")
        return real_restore(**arguments)

    monkeypatch.setattr(builtins, "open", opened)
    monkeypatch.setattr(tf.raw_ops, "RestoreV2", restored)


CODES = (errno.EMFILE, errno.ESTALE, errno.EACCES, errno.EIO)


@pytest.mark.parametrize("place", [MANIFEST, INDEX, "variables.data"])
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_an_error_of_the_disk_or_the_process_is_no_damage(code, place, tmp_path, monkeypatch):
    write(tmp_path / "5")
    with monkeypatch.context() as patch:
        failing(patch, code, 10**9, place)
        with pytest.raises(OSError, match=f"'{tmp_path / '5'}' cannot be read .*{os.strerror(code)}.* says nothing"):
            load(str(tmp_path / "5"))
    with monkeypatch.context() as patch:
        failing(patch, code, 2, place)
        assert load(str(tmp_path / "5")).step == 5


def test_what_tensorflow_takes_for_damage_is_none_if_the_files_cannot_be_read(tmp_path, monkeypatch):
    write(tmp_path / "5")

    def restore(**arguments):
        raise tf.errors.DataLossError(None, None, "Unable to open table file")

    monkeypatch.setattr(tf.raw_ops, "RestoreV2", restore)
    with pytest.raises(DamagedError):
        load(str(tmp_path / "5"))
    failing(monkeypatch, errno.EIO, 10**9, DATA)
    monkeypatch.setattr(tf.raw_ops, "RestoreV2", restore)
    with pytest.raises(OSError, match="cannot be read"):
        load(str(tmp_path / "5"))
