"""The tree of a workdir: what is uploaded, and what counts when it is whole."""

import os

import pytest
import tensorflow as tf

from distloop.bucket import tree
from distloop.bucket.directory import RemoteDirectory
from distloop.checkpoints.store import Checkpoints


@pytest.fixture
def run(tmp_path):
    store = Checkpoints(str(tmp_path / "checkpoints"))
    for step in (10, 20):
        store.save(step, {"x": tf.constant(step)}, {}, {"score": [10]})
        store.wait()
    return tmp_path


def test_locks_temporary_names_and_abandoned_checkpoints_stay_where_they_are(run):
    for path in ("metrics.jsonl", "run.lock", "run.lock.ab", ".progress.json", "a.12-0123abcd.tmp", "train/events.1"):
        os.makedirs(run / os.path.dirname(path), exist_ok=True)
        (run / path).write_text("x")
    os.makedirs(run / "checkpoints" / "30")  # damaged
    (run / "checkpoints" / "30" / "variables.index").write_text("x")
    os.makedirs(run / "export" / "variables")
    for name in ("saved_model.pb", "variables/variables.index"):
        (run / "export" / name).write_text("x")
    os.rename(run / "checkpoints" / "20", run / "checkpoints" / "20.abandoned")
    files, units = tree.scan(str(run))
    assert set(files) == {"metrics.jsonl", "train/events.1", "checkpoints/best.json"}
    assert {unit.path: unit.names[-1] for unit in units} == {
        "checkpoints/10": "manifest.json",
        "export": "saved_model.pb",
    }
    assert sorted(unit.step for unit in units) == [-1, 10]


def whole(remote):
    return {step: path for step, path, _ in tree.whole_checkpoints(remote, remote.list())}


def test_a_checkpoint_counts_with_its_manifest_and_the_sizes_that_it_names_else_the_one_before(run):
    remote = RemoteDirectory(f"file://{run}")
    assert whole(remote) == {10: "checkpoints/10", 20: "checkpoints/20"}
    os.rename(run / "checkpoints" / "10", run / "checkpoints" / "10.old")
    os.truncate(run / "checkpoints" / "20" / "variables.data-00000-of-00001", 1)
    assert whole(remote) == {10: "checkpoints/10.old"}
    os.remove(run / "checkpoints" / "10.old" / "manifest.json")
    assert whole(remote) == {}


def test_what_is_no_list_of_best_steps_lists_none():
    assert tree.best_steps(b'{"a": [1, 2], "b": [3]}') == {1, 2, 3}
    assert tree.best_steps(None) == tree.best_steps(b'{"a') == tree.best_steps(b"[1]") == set()
