"""Workdirs in buckets of Amazon's and Google's kinds, by emulators in this process."""

import contextlib
import http.server
import json
import logging
import os
import shutil
import time

import fsspec
import pytest

import distloop
from distloop import report
from distloop.bucket.remote_directory import RemoteDirectory
from distloop.workdir.run_lock import RunLock
from tests.bucket.test_bucket_workdir import cache, checkpoints_of, rows_of, train  # noqa: F401 - a fixture
from tests.bucket.unreliable import sealed_steps
from tests.problems import assert_equal, everything

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def amazon(monkeypatch):
    """Yields the URL of a bucket of moto's server."""
    pytest.importorskip("s3fs", reason="needs s3fs and moto")
    server = pytest.importorskip("moto.server", reason="needs moto")
    logging.getLogger("werkzeug").setLevel("ERROR")
    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    try:
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir(name := f"bucket-{port}")
        yield f"s3://{name}/run"
    finally:
        moto.stop()


@contextlib.contextmanager
def google(monkeypatch):
    """Yields the URL of a bucket of gcp-storage-emulator."""
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # read at the import; the emulator has no gRPC
    pytest.importorskip("gcsfs", reason="needs gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="needs gcp-storage-emulator")
    logging.getLogger("gcp_storage_emulator").setLevel("CRITICAL")
    monkeypatch.setattr(emulator.server, "HTTPServer", http.server.ThreadingHTTPServer)  # connections stay open
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    port = server._api._httpd.server_address[1]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    try:
        import gcsfs

        gcsfs.GCSFileSystem.clear_instance_cache()
        yield "gs://bucket/run"
    finally:
        server.stop()


@pytest.fixture(params=[amazon, pytest.param(google, marks=pytest.mark.wide)], ids=["s3", "gs"])
def url(request, monkeypatch):
    with request.param(monkeypatch) as url:
        yield url


def test_a_run_goes_on_from_a_bucket_on_another_machine(url, cache, tmp_path, capsys):  # noqa: F811
    undisturbed = train(tmp_path / "disk")
    train(url, steps=6)
    directory = RemoteDirectory(url)
    assert checkpoints_of(directory, tmp_path / "copy") == [3, 6]
    shutil.rmtree(cache)
    trainer = train(url, actions=[distloop.SaveBest("loss")])
    assert_equal(everything(trainer), everything(undisturbed))
    assert rows_of(directory) == rows_of(RemoteDirectory(f"file://{tmp_path}/disk"))
    assert "run.lock" not in directory.list()
    capsys.readouterr()
    assert report.main([url, "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert [(row["step"], row["loss"]) for row in distloop.read_metrics(url)] == rows_of(directory)
    assert (run["workdir"], run["step"], run["status"]) == (url, 12, "complete")
    shutil.rmtree(cache)
    trainer.restore("best")
    best = json.loads(directory.read("checkpoints/best.json"))["loss"]
    assert trainer.step in best


@pytest.mark.wide
def test_a_machine_that_is_lost_8_steps_after_a_checkpoint_goes_on_from_it(monkeypatch, cache):  # noqa: F811
    uploaded = []

    def work(report):  # 0.1 s a step, but for a slow machine of this test: at most 3 s more for the emulator
        time.sleep(0.1)
        if report.step in (18, 38):
            ends_at = time.monotonic() + 3
            while report.step - 8 not in (there := sealed_steps(RemoteDirectory(url).list())):
                if time.monotonic() > ends_at:
                    break
                time.sleep(0.05)
            uploaded.append(there)

    work.every = 1
    with amazon(monkeypatch) as url:
        train(url, steps=40, checkpoint_every=10, keep_checkpoints=4, log_every=1, actions=[work])
    assert uploaded == [[10], [10, 20, 30]]


def test_of_two_that_create_a_file_one_succeeds(url):
    one, other = RemoteDirectory(url), RemoteDirectory(url)
    assert one.create("lock", b"one") and not other.create("lock", b"other") and one.create("lock", b"one")
    assert other.read("lock") == b"one"
    if url.startswith("s3"):  # gcp-storage-emulator does not know `ifGenerationMatch`
        with pytest.raises(FileExistsError):  # not only because it looked first
            other._system.pipe_file(other._path("lock"), b"other", mode="create")


@pytest.mark.wide
def test_a_second_run_is_refused_in_a_sentence_that_names_the_first(url):
    lock = RunLock(url, directory=RemoteDirectory(url)).__enter__()
    with pytest.raises(ValueError, match=f"workdir='{url}' is being written to by another fit of this process, since"):
        train(url, steps=3)
    lock.__exit__()
    train(url, steps=3)


@pytest.mark.wide
def test_an_export_goes_to_a_bucket_and_starts_another_run(url, tmp_path):
    trainer = train(url, steps=3)
    parent = os.path.dirname(url)
    for path in (f"{parent}/export", f"{parent}/weights.npz"):
        trainer.export(path)
    names = RemoteDirectory(f"{parent}/export").list()
    assert "saved_model.pb" in names and "variables/variables.index" in names
    for init_from in (url, f"{url}/checkpoints/3", f"{parent}/weights.npz"):
        other = train(tmp_path / "other", steps=1, init_from=init_from, resume=True, log_every=0)
        assert other.step == 1
        shutil.rmtree(tmp_path / "other")
    trainer.restore(f"{url}/checkpoints/3")
    with pytest.raises(ValueError, match="There is no checkpoint in 's?.*nothing'"):
        trainer.restore(f"{parent}/nothing")


def test_a_bucket_that_is_not_there_is_refused_before_the_first_step(url):
    with pytest.raises(ValueError, match="cannot be used .*: give a bucket that is there, and credentials"):
        train(url.replace("bucket", "another"), steps=3)
