"""One checkpoint: whatever differs from what was written is damage, and what cannot be read is not."""

import builtins
import errno
import json
import os
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf

from distloop.checkpoints import checkpoint
from distloop.checkpoints.checkpoint import DamagedError, load, write_files

DATA, INDEX, MANIFEST = "variables.data-00000-of-00001", "variables.index", "manifest.json"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(checkpoint, "_PAUSES_SECS", (0, 0))


def write(path, step=5):
    values = {
        "model/kernel": tf.fill([3, 4], float(step)),
        "model/name": tf.constant("a kernel"),
        "step": tf.constant(step, tf.int64),
    }
    write_files(str(path), step, values, {"replicas": 2})
    return values


def test_what_was_written_is_loaded_and_tensorflow_reads_it_by_name(tmp_path):
    values = write(tmp_path / "5")
    saved = load(str(tmp_path / "5"))
    assert saved.step == 5 and saved.metadata == {"replicas": 2} and saved.path == str(tmp_path / "5")
    assert saved.values.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(saved.values[name].numpy(), value.numpy())
    reader = tf.train.load_checkpoint(str(tmp_path / "5" / "variables"))
    np.testing.assert_array_equal(reader.get_tensor("model/kernel"), np.full([3, 4], 5.0))
    manifest = json.loads((tmp_path / "5" / MANIFEST).read_text())
    assert manifest["entries"]["model/kernel"] == {"shape": [3, 4], "dtype": "float32"}
    assert set(manifest["files"]) == {INDEX, DATA}


def test_weights_numbered_by_older_versions_load_by_order_in_a_layer(tmp_path):
    parts = ("model", "optimizer/momentum", "average")
    names = ["model/a/variable_72", *(f"{part}/a/variable_103" for part in parts)]
    write_files(str(tmp_path / "5"), 5, {name: tf.constant(i) for i, name in enumerate(names)}, {})
    values = load(str(tmp_path / "5")).values
    assert list(values) == ["model/a/variable", *(f"{part}/a/variable_1" for part in parts)]
    assert [int(value) for value in values.values()] == [0, 1, 2, 3]


def make_directory(path):
    path.unlink()
    path.mkdir()


def content(change):
    """Returns a damage that changes the content of a file."""
    return lambda path: path.write_bytes(change(path.read_bytes()))


def flip(place):
    """Returns a damage that flips a bit of a file's byte, from the first one at 0 to the last one at 1."""

    def flipped(data):
        at = int((len(data) - 1) * place)
        return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]

    return content(flipped)


def edit(**changes):
    return content(lambda data: json.dumps({**json.loads(data), **changes}).encode())


OF_ANY_FILE = {
    "missing": pathlib.Path.unlink,
    "empty": content(lambda data: b""),
    "half": content(lambda data: data[: len(data) // 2]),
    "but its end": content(lambda data: data[: int(len(data) * 0.98)]),
    "with more": content(lambda data: data + b"more"),
    "a directory": make_directory,
    "zeroed": content(lambda data: bytes(len(data))),
}
DAMAGES = {
    **{f"{file} {how}": (file, damage) for file in (DATA, INDEX, MANIFEST) for how, damage in OF_ANY_FILE.items()},
    **{f"{file} flipped at {place}": (file, flip(place)) for file in (DATA, MANIFEST) for place in (0, 0.3, 0.6, 1)},
    "index flipped at its start": (INDEX, flip(0)),
    "index flipped at its end": (INDEX, flip(1)),
    "manifest no JSON": (MANIFEST, content(lambda _: b"{")),
    "manifest no object": (MANIFEST, content(lambda _: b"[1, 2]")),
    "manifest no text": (MANIFEST, content(lambda _: bytes(range(256)))),
    "manifest without entries": (MANIFEST, edit(entries={})),
    "manifest of another step": (MANIFEST, edit(step=3)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_differs_from_what_was_written_is_damage(damage, tmp_path):
    write(tmp_path / "5")
    file, do = DAMAGES[damage]
    do(tmp_path / "5" / file)
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
    """Changes the manifest of a checkpoint, of which None removes an entry, and its checksum."""
    manifest = json.loads((path / MANIFEST).read_text()) | changes | {"checksum": None}
    manifest = {name: value for name, value in manifest.items() if value is not None}
    (path / MANIFEST).write_text(json.dumps({**manifest, "checksum": checkpoint._checksum(manifest)}))


def test_a_first_format_checkpoint_loads_and_a_newer_one_is_no_damage(tmp_path):
    values = write(tmp_path / "5")
    rewrite(tmp_path / "5", format=1, index=None)
    np.testing.assert_array_equal(load(str(tmp_path / "5")).values["model/kernel"], values["model/kernel"])
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


@pytest.mark.parametrize("place", [MANIFEST, INDEX, "variables.data"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ESTALE, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
def test_an_error_of_the_disk_or_the_process_is_no_damage(code, place, tmp_path, monkeypatch):
    write(tmp_path / "5")
    with monkeypatch.context() as patch:
        failing(patch, code, 10**9, place)
        with pytest.raises(OSError, match=f"'{tmp_path / '5'}' cannot be read .*{os.strerror(code)}.* says nothing"):
            load(str(tmp_path / "5"))
    with monkeypatch.context() as patch:
        failing(patch, code, 2, place)
        assert load(str(tmp_path / "5")).step == 5


def test_files_that_cannot_be_read_are_not_damaged_as_tensorflow_says(tmp_path, monkeypatch):
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
