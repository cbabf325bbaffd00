"""The upload of a run, and of an export: what goes up in which order, what is deleted, and what a bucket away costs."""

import os
import shutil
import threading
import time

import pytest
import tensorflow as tf

from distloop.bucket import remote_directory as requests
from distloop.bucket import tree
from distloop.bucket import upload as uploading
from distloop.bucket.remote_directory import RemoteDirectory
from distloop.bucket.tree import STATE
from distloop.bucket.upload import Upload, send
from distloop.checkpoints.store import Checkpoints
from distloop.workdir.run_lock import LockLost
from tests.bucket.unreliable import URL, Unreliable, bucket, empty, sealed_steps


@pytest.fixture
def root(tmp_path):
    """A workdir beside an empty bucket whose requests succeed."""
    empty()
    with bucket(share=0.0):
        yield tmp_path


def before_put(monkeypatch, call):
    """Has a function called with the path of each file before it is put."""

    def put_file(self, local, path, put=Unreliable.put_file, **options):
        call(path)
        put(self, local, path)

    monkeypatch.setattr(Unreliable, "put_file", put_file)


INVALID = OSError("400 InvalidArgument")


def refuse(monkeypatch, part, error=INVALID):
    """Makes a bucket that takes no file with a part in its name; returns the names that it refused."""

    def raise_if_named(path):
        if part in path:
            refused.append(path)
            raise error

    refused = []
    monkeypatch.setattr(uploading, "STALLED_SECS", 0.5)
    before_put(monkeypatch, raise_if_named)
    return refused


def save(root, *steps, keep=3, best=None):
    store = Checkpoints(str(root / "checkpoints"), keep)
    for step in steps:
        with open(root / "metrics.jsonl", "a") as file:
            file.write(f'{{"step": {step}}}\n')
        store.save(step, {"x": tf.constant(step)}, {}, best)
        store.wait()


def started(root, verify=lambda: None):
    upload = Upload(str(root), RemoteDirectory(URL), verify=verify)
    upload.start()
    return upload


def upload(root, verify=lambda: None):
    return started(root, verify).finish()


def files_there():
    return RemoteDirectory(URL).list()


def steps_there():
    return sealed_steps(files_there())


def moved(requests):
    """Returns the files that requests gave their names, in order."""
    return [path[: -len(".01234567.tmp")].removeprefix("/bucket/run/") for kind, path in requests if kind == "mv"]


def test_rows_come_first_then_the_checkpoint_and_its_manifest_last(root):
    save(root, 10, 20)
    assert upload(root) == []
    names = moved(Unreliable.faults.requests)
    assert names[0] == "metrics.jsonl" and names[3] == "checkpoints/20/manifest.json"
    assert names[6] == "checkpoints/10/manifest.json" and len(names) == 7
    Unreliable.faults.requests.clear()
    upload(root)  # of the next process
    assert {kind for kind, _ in Unreliable.faults.requests} == {"find"}


def test_old_checkpoints_go_after_their_successors_and_other_files_stay(root):
    save(root, 10, 20, keep=1, best={"score": [10]})
    (root / "old.txt").write_text("x")
    upload(root)
    RemoteDirectory(URL).write("checkpoints/notes/mine.txt", b"x")
    save(root, 30, keep=1)
    os.remove(root / "old.txt")
    upload(root)
    assert steps_there() == [10, 30]
    assert "checkpoints/notes/mine.txt" in files_there() and "old.txt" not in files_there()


def test_a_deleted_staging_directory_deletes_nothing_in_the_bucket(root):
    save(root, 10)
    upload(root)
    before = files_there()
    upload_again = Upload(str(root), RemoteDirectory(URL), verify=lambda: None)
    for path in (STATE, "metrics.jsonl"):
        os.remove(root / path)
    upload_again.start()
    upload_again.finish()
    assert files_there() == before


def test_a_run_that_went_back_keeps_its_later_checkpoints_elsewhere(root):
    save(root, 10, 20)
    upload(root)
    save(root, 15)
    upload(root)
    assert steps_there() == [10, 15] and "checkpoints/20.abandoned/manifest.json" in files_there()
    shutil.rmtree(root / "checkpoints" / "20.abandoned")
    upload(root)
    assert not [path for path in files_there() if "abandoned" in path]


def test_the_next_machine_keeps_checkpoints_that_it_does_not_bring(root, tmp_path_factory):
    save(root, 10, 20)
    upload(root)
    save(root, 15)
    upload(root)
    before = [path for path in files_there() if "abandoned" in path]
    machine = tmp_path_factory.mktemp("machine")
    tree.write_state(str(machine), tree.fetch_workdir(RemoteDirectory(URL), str(machine)))
    assert sorted(os.listdir(machine / "checkpoints")) == ["10", "15"]
    save(machine, 18)
    upload(machine)
    assert steps_there() == [10, 15, 18] and [path for path in files_there() if "abandoned" in path] == before


def test_a_checkpoint_being_replaced_on_the_disk_stays_in_the_bucket(root):
    save(root, 10, 20)
    upload(root)
    os.rename(root / "checkpoints" / "20", root / "checkpoints" / "20.7-0123abcd.old")  # as `replacing` does
    upload(root)
    assert steps_there() == [10, 20]
    shutil.rmtree(root / "checkpoints" / "20.7-0123abcd.old")
    os.mkdir(root / "checkpoints" / "40.7-0123abcd.tmp")  # of a save that has begun
    upload(root)
    assert steps_there() == [10]


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_uploaded_whole(root, monkeypatch):
    def wait(path):
        if "checkpoints/10/" in path:
            is_waiting.set()
            may_go_on.wait(300)

    save(root, 10)
    is_waiting, may_go_on = threading.Event(), threading.Event()
    before_put(monkeypatch, wait)
    upload = started(root)
    assert is_waiting.wait(300)
    save(root, 20, keep=1)
    assert os.listdir(root / "checkpoints") == ["20"]
    may_go_on.set()
    upload.wait_for(10)
    assert upload.finish() == [] and steps_there() == [20]


def test_a_bucket_that_is_away_is_named_once_and_awaited_in_silence(root, caplog, capsys, monkeypatch):
    save(root, 10)
    faults = Unreliable.faults
    faults._share, faults._random.choice = 1.1, lambda kinds: "fails"
    with monkeypatch.context() as patch:
        patch.setattr(uploading, "STALLED_SECS", 0.05)
        assert upload(root) == ["checkpoints/10", "metrics.jsonl"]  # at the end of a run
    caplog.clear()
    monkeypatch.setattr(requests, "_PAUSES_SECS", ())
    goes_on, num_requests = started(root), len(faults.requests)
    while len(faults.requests) < num_requests + 5:
        time.sleep(0.001)
    faults._share = 0.0
    assert goes_on.finish() == []
    assert len(caplog.records) == 1 and "does not take the upload (" in caplog.text
    assert "answers again: the upload goes on" in capsys.readouterr().out


def test_who_has_lost_the_lock_seals_and_deletes_nothing(root):
    def lost():
        raise LockLost("taken over")

    save(root, 10)
    assert "checkpoints/10" in upload(root, verify=lost) and steps_there() == []


@pytest.mark.parametrize(
    "name, error", [("a-sample", INVALID), ("metrics.jsonl", INVALID), ("a-sample", PermissionError("403 Forbidden"))]
)
def test_a_file_that_is_refused_is_named_once_and_keeps_nothing_else_back(name, error, root, caplog, monkeypatch):
    refused = refuse(monkeypatch, name, error)
    (root / name).write_text("x")
    upload = started(root)
    for step in (10, 20):
        save(root, step)
        upload.wait_for(step)
    (root / "notes.txt").write_text("x")
    num_refused = len(refused)
    assert upload.finish() == [name] and str(error) in upload.failure
    assert len(refused) > num_refused  # it was tried again at the end
    assert steps_there() == [10, 20] and "notes.txt" in files_there()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["unreliable"]
    assert f"{URL} does not take the upload ({name}: " in caplog.text


def test_a_checkpoint_that_the_bucket_refuses_keeps_no_other_one_back(root, monkeypatch):
    save(root, 10, 20)
    refuse(monkeypatch, "checkpoints/20/")
    upload = started(root)
    with pytest.raises(OSError, match="checkpoints/20 could not be uploaded .*400 InvalidArgument"):
        upload.wait_for(20)
    save(root, 30, keep=1)
    assert upload.finish() == [] and steps_there() == [30]


def test_a_checkpoint_with_an_unreadable_file_keeps_no_other_one_back(root, monkeypatch):
    monkeypatch.setattr(uploading, "STALLED_SECS", 0.5)
    save(root, 10, 20)
    (root / "checkpoints/20/notes").symlink_to(root / "gone")
    upload = started(root)
    upload.wait_for(10)
    assert upload.finish() == ["checkpoints/20"] and "No such file" in upload.failure and steps_there() == [10]


def test_a_checkpoint_that_the_bucket_refuses_keeps_no_old_one_there(root, monkeypatch):
    save(root, 10, 20, best={"score": [20]})
    refuse(monkeypatch, "checkpoints/20/")
    upload = started(root)
    upload.wait_for(10)
    save(root, 30, 40, keep=1)
    assert upload.finish() == ["checkpoints/20", "checkpoints/best.json"] and steps_there() == [40]


def test_a_checkpoint_is_uploaded_before_the_files_that_wait(root, monkeypatch):
    def save_once(path):
        if not saved:
            saved.append(path)
            save(root, 10)

    for i in range(4):
        (root / f"events.{i}").write_text("x")
    saved = []
    before_put(monkeypatch, save_once)
    assert upload(root) == []
    names = moved(Unreliable.faults.requests)
    assert names[0].startswith("events") and names[1] == "metrics.jsonl" and names[4] == "checkpoints/10/manifest.json"


def test_a_checkpoint_goes_up_at_once_however_long_the_last_pass_took(root, monkeypatch):
    before_put(
        monkeypatch, lambda path: time.sleep(1.0 if "events" in path else 0.0)
    )  # the next pass is ten seconds away
    (root / "events").write_text("x")
    upload = started(root)
    while "events" in upload.missing():
        time.sleep(0.01)
    save(root, 10)
    saved_at = time.monotonic()
    while steps_there() != [10]:
        assert time.monotonic() < saved_at + 5
        time.sleep(0.01)
    assert upload.finish() == []


def test_the_upload_goes_on_when_the_clock_is_set_back(root, monkeypatch):
    now = iter(range(10**9, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    upload = started(root)
    for step in (10, 20):
        save(root, step)
        upload.wait_for(step)
    assert upload.finish() == [] and steps_there() == [10, 20]


def test_an_export_replaces_another_and_is_sealed_last(tmp_path):
    empty()
    (tmp_path / "variables").mkdir()
    for name in ("saved_model.pb", "variables/data"):
        (tmp_path / name).write_text(name)
    with bucket(seed=3) as faults:
        remote = RemoteDirectory(URL)
        for name in ("saved_model.pb", "assets/old"):
            remote.write(name, b"old")
        start = len(faults.requests)
        send(str(tmp_path), URL)
        assert remote.list() == {"saved_model.pb": 14, "variables/data": 14}
        assert remote.read("saved_model.pb") == b"saved_model.pb"
    names = moved(faults.requests[start:])
    assert names[0] == "variables/data" and names[-1] == "saved_model.pb"


def test_a_bucket_that_refuses_is_named_in_a_sentence(root, monkeypatch):
    (root / "weights.npz").write_text("x")
    refuse(monkeypatch, "", PermissionError("403 Forbidden by policy"))
    with pytest.raises(ValueError, match=r"//a/w.npz' cannot be written \(w.npz: 403 Forbidden by policy\)"):
        send(str(root / "weights.npz"), "unreliable://a/w.npz")
