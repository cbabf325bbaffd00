"""The tree of a workdir: what is uploaded, what counts when it is whole, what comes back, and what is refused."""

import os
import pathlib

import fsspec
import pytest
import tensorflow as tf
from fsspec.implementations.memory import MemoryFileSystem

from distloop import report
from distloop.bucket import tree
from distloop.bucket.directory import RemoteDirectory, RemoteError, is_path
from distloop.bucket.tree import fetch_reports, fetch_workdir
from distloop.checkpoints.checkpoint import load
from distloop.checkpoints.store import Checkpoints
from distloop.monitoring.directory import local_copy


@pytest.fixture
def url(tmp_path):
    store = Checkpoints(str(tmp_path / "run" / "checkpoints"))
    for step in (10, 20):
        store.save(step, {"x": tf.constant(step)}, {"until": 20, "stop_reason": None}, {"score": [10]})
        store.wait()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 20, "time": 1.0, "loss": 0.5}\n')
    (tmp_path / "run" / "run.lock").write_text("x")
    return f"file://{tmp_path}/run"


@pytest.fixture
def run(url, tmp_path):
    return tmp_path / "run"


def test_locks_temporary_names_and_damaged_checkpoints_stay_where_they_are(run):
    for path in ("metrics.jsonl", "run.lock", "run.lock.ab", ".progress.json", "a.12-0123abcd.tmp", "train/events.1"):
        os.makedirs(run / os.path.dirname(path), exist_ok=True)
        (run / path).write_text("x")
    os.makedirs(run / "checkpoints" / "30")  # damaged
    (run / "checkpoints" / "30" / "variables.index").write_text("x")
    os.makedirs(run / "export" / "variables")
    for name in ("saved_model.pb", "variables/variables.index"):
        (run / "export" / name).write_text("x")
    os.rename(run / "checkpoints" / "20", run / "checkpoints" / "20.abandoned")
    checkpoints, others = tree.checkpoints(str(run)), tree.units(str(run))
    assert {unit.path: [*unit.files][-1] for unit in others if not unit.is_file} == {
        "checkpoints/10": "checkpoints/10/manifest.json",
        "checkpoints/20.abandoned": "checkpoints/20.abandoned/manifest.json",
    }
    assert [unit.step for unit in checkpoints] == [10, -1]
    assert [unit.path for unit in others if unit.is_file] == [
        "checkpoints/best.json",
        "export/variables/variables.index",
        "metrics.jsonl",
        "train/events.1",
        "export/saved_model.pb",
    ]


def whole(remote):
    return {unit.step: unit.path for unit, _ in tree.whole_checkpoints(remote, remote.list())}


def test_a_checkpoint_counts_with_its_manifest_and_the_sizes_that_it_names_else_the_one_before(run):
    remote = RemoteDirectory(f"file://{run}")
    assert whole(remote) == {10: "checkpoints/10", 20: "checkpoints/20"}
    os.rename(run / "checkpoints" / "10", run / "checkpoints" / "10.old")
    os.truncate(run / "checkpoints" / "20" / "variables.data-00000-of-00001", 1)
    assert whole(remote) == {10: "checkpoints/10.old"}
    os.remove(run / "checkpoints" / "10.old" / "manifest.json")
    assert whole(remote) == {}


def test_a_damaged_checkpoint_is_named_and_the_others_come(url, tmp_path, caplog):
    os.truncate(tmp_path / "run" / "checkpoints" / "20" / "variables.index", 3)
    fetch_workdir(RemoteDirectory(url), str(tmp_path / "copy"))
    assert sorted(os.listdir(tmp_path / "copy")) == ["checkpoints", "metrics.jsonl"]
    assert Checkpoints(str(tmp_path / "copy" / "checkpoints")).steps == [10]
    assert f"The checkpoint {url}/checkpoints/20 is damaged. Trying the one before it." in caplog.text


@pytest.mark.parametrize("path, best, steps", [("", False, [20]), ("", True, [10])])
def test_of_a_workdir_the_newest_or_the_best_checkpoint_comes(path, best, steps, url):
    with local_copy(url, best=best) as local:
        assert Checkpoints(os.path.join(local, "checkpoints")).steps == steps
    assert not os.path.exists(local)


def test_a_checkpoint_comes_by_its_url_and_a_local_path_stays_as_it_is(url, tmp_path):
    with local_copy(f"{url}/checkpoints/10") as local:
        assert load(local).step == 10
    with local_copy(str(tmp_path)) as local:
        assert local == str(tmp_path)


@pytest.mark.parametrize("below", ["", "/run"])
def test_a_report_reads_a_run_or_a_directory_of_them(below, url, capsys):
    assert report.main([os.path.dirname(url) + below]) == 0
    assert "complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["{url}/checkpoints"], "checkpoints' holds no metrics.jsonl: give URLs of runs that have begun"),
        (["{url}", "--prune"], "removes files of a disk: delete those of a URL by hand"),
        (["nothing://a"], "cannot be opened: Protocol not known"),
    ],
)
def test_what_a_report_cannot_read_is_refused_in_a_sentence(arguments, words, url, capsys):
    assert report.main([argument.format(url=url) for argument in arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_report_reads_rows_that_were_replaced_since_they_were_listed(url, tmp_path, monkeypatch, capsys):
    found = RemoteDirectory.list

    def list_then_replace(directory, below=""):
        files = found(directory, below)
        with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
            file.write('{"step": 21, "time": 2.0, "loss": 0.4}\n')
        return files

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


ODD_KEYS = [
    "../planted",
    "checkpoints/5/../../../../planted",
    "checkpoints/../metrics.jsonl",
    "/etc/planted",
    "train//planted",
    "./planted",
    "train/.",
    "a\0b",
    "n" * 256,
    "\ud800",
    "train",  # beside train/events
]


def test_a_key_that_no_file_of_a_directory_can_have_is_named_and_comes_nowhere(tmp_path, caplog):
    fsspec.register_implementation("keys", Keys, clobber=True)
    good = {"checkpoints/5/manifest.json": b'{"files": {}}', "metrics.jsonl": b'{"step": 1}\n', "train/events": b"x"}
    good["b" * 255] = b"x"
    Keys.store.clear()
    Keys.store.update({f"b/run/{key}": data for key, data in good.items()})
    Keys.store.update({f"b/run/{key}": b"planted" for key in (*ODD_KEYS, "a\\..\\b", "A", "a/../metrics.jsonl")})
    top = tmp_path / "top" / "folder"
    fetch_workdir(RemoteDirectory("keys://b/run"), str(top / "staging"))
    fetch_reports("keys://b/run", str(top / "reports"))
    with local_copy("keys://b/run") as local:
        assert sorted(os.listdir(local)) == ["checkpoints"]
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    staged = {f"top/folder/staging/{key}" for key in (*good, "a\\..\\b", "A")}
    assert {path for path in files if "/staging/" in path} == staged and b"planted" not in {
        data for path, data in files.items() if not path.endswith(("A", "b"))
    }
    brought = {path.rpartition("/run/")[2] for path in files.keys() - staged}
    assert brought == {"checkpoints/5/manifest.json", "metrics.jsonl"}
    assert "holds keys that no file of a directory can have, which are left alone: '../planted', " in caplog.text
    assert not any(map(is_path, ODD_KEYS[:-1]))


@pytest.mark.parametrize("url", ["keys://b/run/..", "keys://b/..", "memory://", "memory:///"])
def test_a_url_of_nothing_or_above_its_bucket_is_refused(url):
    fsspec.register_implementation("keys", Keys, clobber=True)
    with pytest.raises(RemoteError, match="it names no file or directory"), local_copy(url):
        pass


def test_a_report_of_two_buckets_with_one_name_keeps_them_apart(tmp_path, url):
    Keys.store.clear()
    fsspec.register_implementation("keys", Keys, clobber=True)
    path = url.partition("://")[2]
    Keys.store[f"{path}/metrics.jsonl"] = b'{"step": 3}\n'
    one, other = (fetch_reports(url, str(tmp_path / "reports")) for url in (url, f"keys://{path}"))
    assert one != other and pathlib.Path(other, "metrics.jsonl").read_bytes() == b'{"step": 3}\n'


def test_a_key_too_deep_for_a_disk_is_left_alone_and_the_others_come(tmp_path):
    for key in ("d/" * 1500 + "file", "/".join(["d" * 200] * 6), "notes.txt"):
        fsspec.filesystem("memory").pipe_file(f"/deep/{key}", b"text")
    assert [*fetch_workdir(RemoteDirectory("memory://deep"), str(tmp_path))[0]] == ["notes.txt"]
