"""A run whose workdir is a bucket: the promises of a disk, with unreliable requests, on one machine after the other."""

import json
import os
import shutil
import time

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import distloop
from distloop.bucket import upload as uploading
from distloop.bucket.remote_directory import RemoteDirectory
from distloop.bucket.tree import complete_checkpoints, fetch_workdir
from distloop.checkpoints.checkpoint import load
from distloop.distributed.collectives import Workers
from tests import forked
from tests.bucket.unreliable import URL, Killed, Unreliable, bucket, empty, sealed_steps
from tests.problems import assert_equal, batches, classifier, everything, mostly_wide, on


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A machine whose cache is empty, and a bucket that is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    empty()
    MemoryFileSystem.store.clear()
    return tmp_path / "cache"


def train(workdir, steps=12, actions=(), **settings):
    settings = {"checkpoint_every": 3, "keep_checkpoints": 2, "log_every": 2, "console": "quiet", **settings}
    trainer = distloop.Trainer(classifier(dropout=0.5), on(1, workdir=str(workdir), **settings))
    trainer.fit(batches(shuffle=True), steps=steps, actions=actions)
    return trainer


def rows_of(directory):
    lines = (directory.read("metrics.jsonl") or b"").splitlines()
    return [(row["step"], row["loss"]) for row in map(json.loads, lines)]


def checkpoints_of(directory, place):
    """Returns the steps of the whole checkpoints, each of which is loaded, every byte verified."""
    shutil.rmtree(place, ignore_errors=True)
    fetch_workdir(directory, str(place))
    steps = sorted(checkpoint.step for checkpoint in complete_checkpoints(directory))
    assert [load(str(place / "checkpoints" / str(step))).step for step in steps] == steps
    return steps


def train_on_a_host_of_its_own():
    """Trains on a worker whose cache no other worker sees, and restores the best; a function of `forked`."""
    strategy = distloop.Trainer(classifier(), on(1)).strategy
    place, index = os.environ["PLACE"], Workers(strategy).index
    os.environ["XDG_CACHE_HOME"] = f"{place}/host{index}"
    trainer = train(f"file://{place}/bucket/run", 9, [distloop.SaveBest("loss", restore=True)])
    return trainer.step, distloop.digest(trainer.model), os.path.isdir(f"{place}/host{index}/distloop")


@pytest.mark.wide
@pytest.mark.slow
def test_workers_that_share_no_disk_go_on_from_a_bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACE", str(tmp_path))
    train(f"file://{tmp_path}/bucket/run", steps=3)
    one, other = forked.run_in_workers(train_on_a_host_of_its_own, 2)
    assert one == other and one[2]
    best = json.loads((tmp_path / "bucket" / "run" / "checkpoints" / "best.json").read_text())["loss"]
    assert one[0] == best[0] > 3


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """All values, and the rows, of a run on a disk that nothing disturbs."""
    place = tmp_path_factory.mktemp("disk")
    return everything(train(place)), rows_of(RemoteDirectory(f"file://{place}"))


def let_the_upload_come_along(report):
    """Waits for the checkpoint before, which training does not do."""
    manifest = f"/bucket/run/checkpoints/{report.step - 3}/manifest.json"
    while report.step > 3 and manifest not in Unreliable.store and not Unreliable.faults.is_dead:
        time.sleep(0.01)


let_the_upload_come_along.every = 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kill_at", mostly_wide([40, 110, 180, 250], 110))
def test_a_machine_that_is_lost_costs_no_bit_and_no_row(kill_at, cache, tmp_path, undisturbed):
    with bucket(seed=kill_at, kill_at=kill_at) as faults, pytest.raises((Killed, OSError)):
        train(URL, actions=[let_the_upload_come_along])
    assert faults.is_dead
    with bucket(share=0.0):
        directory = RemoteDirectory(URL)
        whole, rows = checkpoints_of(directory, tmp_path / "copy"), rows_of(directory)
        assert not whole or max(step for step, _ in rows) >= max(whole) - 1
    shutil.rmtree(cache)
    with bucket(seed=kill_at + 1):
        trainer = train(URL)
    assert_equal(everything(trainer), undisturbed[0])
    with bucket(share=0.0):
        assert rows_of(directory) == undisturbed[1]
        assert checkpoints_of(directory, tmp_path / "copy") == [9, 12]
        assert not [name for name in directory.list() if ".old" in name or "run.lock" in name]


@pytest.mark.slow
def test_a_run_that_is_interrupted_leaves_when_all_is_in_the_bucket(cache, tmp_path, capsys):
    with bucket(seed=5), pytest.raises(SystemExit) as left:
        train(URL, steps=10**6, max_secs=0.2, log_every=0, checkpoint_every=0, console="auto")
    assert left.value.code == 75
    *_, saved, uploaded = capsys.readouterr().out.splitlines()
    assert "checkpoint saved. Run the same command to resume." in saved and uploaded == f"distloop: all is in {URL}"
    with bucket(share=0.0):
        (step,) = checkpoints_of(RemoteDirectory(URL), tmp_path / "copy")
        assert f"at step {step}" in saved and "run.lock" not in RemoteDirectory(URL).list()


@pytest.mark.slow
def test_the_best_checkpoint_of_a_bucket_is_named_by_its_url(cache, capsys):
    with bucket(share=0.0):
        train(URL, actions=[distloop.SaveBest("loss")])
        trainer = distloop.Trainer(classifier(dropout=0.5), on(1, workdir=URL, console="lines"))
        capsys.readouterr()
        trainer.restore("best")
    assert f"restored from {URL}/checkpoints/{trainer.step}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_bucket_that_goes_away_is_an_error_and_the_rest_comes_later(monkeypatch):
    def go_away(report):
        faults._share, faults._random.choice = 1.1, lambda kinds: "fails"

    go_away.every = 3
    monkeypatch.setattr(uploading, "STALLED_SECS", 0.05)
    words = r"checkpoints/6, .* could not be uploaded to .*: run the same command on this"
    with bucket(share=0.0) as faults, pytest.raises(OSError, match=words):
        train(URL, steps=6, actions=[go_away])
    with bucket():
        assert train(URL, steps=6).step == 6
    with bucket(share=0.0):
        assert sealed_steps(RemoteDirectory(URL).list()) == [3, 6]


@pytest.mark.slow
def test_a_bucket_in_the_memory_of_a_process_is_empty_in_the_next_one(tmp_path):
    program = """
    import distloop
    from tests.problems import classification, classifier, on

    trainer = distloop.Trainer(classifier(), on(1, workdir="memory://runs/a", checkpoint_every=2, console="quiet"))
    for steps in (3, 4):  # the second call goes on
        trainer.fit(distloop.make_dataset(classification(67), 16), steps=steps)
        print(trainer.step, [row["step"] for row in distloop.read_metrics("memory://runs/a")])
    """
    for _ in range(2):
        ended = forked.run_program(tmp_path / "program", program)
        assert ended.returncode == 0 and ended.stdout.splitlines() == ["3 [2, 3]", "4 [2, 3, 4]"], ended.stderr
