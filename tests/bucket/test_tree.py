"""The tree of a workdir: what is uploaded, what counts when it is whole, what comes back, and what is refused."""

import os
import pathlib

import fsspec
import pytest
import tensorflow as tf
from fsspec.implementations.memory import MemoryFileSystem

from distloop import report
from distloop.bucket import tree
from distloop.bucket.remote_directory import RemoteDirectory, RemoteError, is_path
from distloop.bucket.tree import fetch_reports, fetch_workdir
from distloop.checkpoints.checkpoint import load
from distloop.checkpoints.store import Checkpoints
from distloop.workdir.directory import local_copy


@pytest.fixture
def run(tmp_path):
    store = Checkpoints(str(tmp_path / "run" / "checkpoints"))
    for step in (10, 20):
        store.save(step, {"x": tf.constant(step)}, {"until": 20, "stop_reason": None}, {"score": [10]})
        store.wait()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 20, "time": 1.0, "loss": 0.5}\n')
    (tmp_path / "run" / "run.lock").write_text("x")
    return tmp_path / "run"


@pytest.fixture
def url(run):
    return f"file://{run}"


def test_locks_temporary_names_and_damaged_checkpoints_stay_where_they_are(run):
    paths = ["metrics.jsonl", "run.lock", "run.lock.ab", ".progress.json", "a.12-0123abcd.tmp", "train/events.1"]
    paths += ["export/saved_model.pb", "export/variables/variables.index", "checkpoints/30/variables.index"]  # damaged
    for path in map(run.joinpath, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    os.rename(run / "checkpoints" / "20", run / "checkpoints" / "20.abandoned")
    assert [*tree.checkpoints(str(run))] == ["checkpoints/10", "checkpoints/20.abandoned"]
    units = [*tree.units(str(run))]
    assert units[:3] == ["checkpoints/10", "checkpoints/20.abandoned", "checkpoints/best.json"]
    assert units[3:] == ["export/variables/variables.index", "metrics.jsonl", "train/events.1", "export/saved_model.pb"]


def test_a_checkpoint_counts_with_its_manifest_and_the_sizes_it_names(run, url, caplog):
    def whole():
        return {found.step: found.path for found in tree.complete_checkpoints(RemoteDirectory(url))}

    assert whole() == {10: "checkpoints/10", 20: "checkpoints/20"}
    os.truncate(run / "checkpoints" / "20" / "variables.data-00000-of-00001", 1)
    fetch_workdir(RemoteDirectory(url), str(run.parent / "copy"))
    assert sorted(os.listdir(run.parent / "copy")) == ["checkpoints", "metrics.jsonl"]
    assert Checkpoints(str(run.parent / "copy" / "checkpoints")).steps == [10]
    assert f"The checkpoint {url}/checkpoints/20 is damaged. Trying the one before it." in caplog.text
    os.rename(run / "checkpoints" / "10", run / "checkpoints" / "10.old")
    assert whole() == {10: "checkpoints/10.old"}
    os.remove(run / "checkpoints" / "10.old" / "manifest.json")
    assert whole() == {}


def test_a_checkpoint_comes_by_its_rank_or_url_and_a_local_path_stays(url, tmp_path):
    for best, steps in ((False, [20]), (True, [10])):
        with local_copy(url, best=best) as local:
            assert Checkpoints(os.path.join(local, "checkpoints")).steps == steps
        assert not os.path.exists(local)
    with local_copy(f"{url}/checkpoints/10") as local:
        assert load(local).step == 10
    with local_copy(str(tmp_path)) as local:
        assert local == str(tmp_path)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["{url}/checkpoints"], "checkpoints' holds no metrics.jsonl: give URLs of runs that have begun"),
        (["nothing://a"], "cannot be opened: Protocol not known"),
    ],
)
def test_what_a_report_cannot_read_is_refused_in_a_sentence(arguments, words, url, capsys):
    assert report.main([argument.format(url=url) for argument in arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_report_reads_runs_and_rows_replaced_since_they_were_listed(url, run, monkeypatch, capsys):
    found = RemoteDirectory.list

    def list_then_replace(directory, below=""):
        files = found(directory, below)
        with open(run / "metrics.jsonl", "a") as file:
            file.write('{"step": 21, "time": 2.0, "loss": 0.4}\n')
        return files

    for there in (url, os.path.dirname(url)):
        assert report.main([there]) == 0
        assert "complete" in capsys.readouterr().out
    monkeypatch.setattr(RemoteDirectory, "list", list_then_replace)
    assert report.main([url]) == 0
    assert "0.4" in capsys.readouterr().out


class Keys(MemoryFileSystem):
    """A store whose keys are texts, as in S3: nothing makes paths of them."""

    protocol, store, cachable = "keys", {}, False

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("keys://").rstrip("/")

    def find(self, path, *_, **__):
        return {key: {"size": len(data)} for key, data in self.store.items() if key.startswith(f"{path}/")}

    def info(self, path, **_):
        return {"size": len(self.cat_file(path))}

    def cat_file(self, path, *_, **__):
        if path not in self.store:
            raise FileNotFoundError(path)
        return self.store[path]

    def get_file(self, path, target, **_):
        pathlib.Path(target).write_bytes(self.store[path])


ODD_KEYS = ["../planted", "checkpoints/5/../../../../planted", "checkpoints/../metrics.jsonl", "/etc/planted"]
ODD_KEYS += ["train//planted", "./planted", "train/.", "a\0b", "n" * 256, "\ud800"]


@pytest.fixture
def keys():
    """What such a store holds; nothing yet."""
    fsspec.register_implementation("keys", Keys, clobber=True)
    Keys.store.clear()
    return Keys.store


def test_a_key_that_no_file_of_a_directory_can_have_is_named_and_left_out(keys, tmp_path, caplog):
    good = {"checkpoints/5/manifest.json": b'{"files": {}}', "metrics.jsonl": b'{"step": 1}\n', "train/events": b"x"}
    good["b" * 255] = b"x"
    may_be, beside = ["a\\..\\b", "A"], ["train", "a/../metrics.jsonl"]  # beside train/events
    keys.update({f"b/run/{key}": data for key, data in good.items()})
    keys.update({f"b/run/{key}": b"planted" for key in (*ODD_KEYS, *may_be, *beside)})
    top = tmp_path / "top" / "folder"
    fetch_workdir(RemoteDirectory("keys://b/run"), str(top / "staging"))
    fetch_reports("keys://b/run", str(top / "reports"))
    with local_copy("keys://b/run") as local:
        assert os.listdir(local) == ["checkpoints"]
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    staged = {f"top/folder/staging/{key}" for key in (*good, *may_be)}
    assert {path for path in files if "/staging/" in path} == staged
    assert b"planted" not in {data for path, data in files.items() if not path.endswith(("A", "b"))}
    brought = {path.rpartition("/run/")[2] for path in files.keys() - staged}
    assert brought == {"checkpoints/5/manifest.json", "metrics.jsonl"}
    assert "holds keys that no file of a directory can have, which are left alone: '../planted', " in caplog.text
    assert not any(map(is_path, ODD_KEYS))


@pytest.mark.parametrize("url", ["keys://b/run/..", "keys://b/..", "memory://", "memory:///"])
def test_a_url_of_nothing_or_above_its_bucket_is_refused(url, keys):
    with pytest.raises(RemoteError, match="it names no file or directory"), local_copy(url):
        pass


def test_a_report_of_two_buckets_with_one_name_keeps_them_apart(keys, tmp_path, url):
    path = url.partition("://")[2]
    keys[f"{path}/metrics.jsonl"] = b'{"step": 3}\n'
    one, other = (fetch_reports(url, str(tmp_path / "reports")) for url in (url, f"keys://{path}"))
    assert one != other and pathlib.Path(other, "metrics.jsonl").read_bytes() == b'{"step": 3}\n'


def test_a_key_too_deep_for_a_disk_is_left_alone_and_the_others_come(tmp_path):
    for key in ("d/" * 1500 + "file", "/".join(["d" * 200] * 6), "notes.txt"):
        fsspec.filesystem("memory").pipe_file(f"/deep/{key}", b"text")
    assert [*fetch_workdir(RemoteDirectory("memory://deep"), str(tmp_path))[0]] == ["notes.txt"]
