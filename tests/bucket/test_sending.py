"""Sending an export to a URL: its seal is written last, and what it replaces is gone."""

import pytest

from distloop.bucket.directory import RemoteDirectory
from distloop.bucket.upload import send
from tests.bucket.unreliable import URL, Unreliable, bucket, empty


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
    moved = [path for kind, path in faults.requests[start:] if kind == "mv"]
    assert "variables/data" in moved[0] and "saved_model.pb" in moved[-1]


def test_a_bucket_that_refuses_is_named_in_a_sentence(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("403 Forbidden by policy")

    (tmp_path / "weights.npz").write_text("x")
    with bucket(share=0.0):
        monkeypatch.setattr(Unreliable, "put_file", refuse)
        with pytest.raises(ValueError, match=r"//a/w.npz' cannot be written \(w.npz: 403 Forbidden by policy\)"):
            send(str(tmp_path / "weights.npz"), "unreliable://a/w.npz")
