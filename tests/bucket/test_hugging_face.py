"""`init_from` at `hf://`: the real client of the Hub, with a server of this process that answers as the Hub does."""

import http.server
import json
import sys
import threading
import urllib.parse

import fsspec
import numpy as np
import pytest

import distloop
from distloop.variables import portable_names
from tests.problems import batches, classifier, on, refused


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers for one repository, `someone/digits`, with the files of the server."""

    protocol_version = "HTTP/1.1"

    def answer(self, content, kind="application/json", code=200):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def entries(self):
        sizes = {path: len(data) for path, data in self.server.files.items()}
        return [{"type": "file", "path": path, "size": size, "oid": "0" * 40} for path, size in sizes.items()]

    def do_GET(self):
        path = urllib.parse.urlsplit(self.path).path
        repository, _, file = path.partition("/resolve/main/")
        if path.startswith("/api/models/someone/digits/tree/"):
            self.answer(self.entries())
        elif path in ("/api/models/someone/digits", "/api/models/someone/digits/revision/main"):
            self.answer({"id": "someone/digits", "sha": "0" * 40, "siblings": []})
        elif repository == "/someone/digits" and file in self.server.files:
            self.answer(self.server.files[file], "application/octet-stream")
        else:
            self.answer({"error": "Repository not found"}, code=404)

    do_HEAD = do_GET

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        wanted = json.loads(data)["paths"] if data[:1] == b"{" else urllib.parse.parse_qs(data.decode())["paths"]
        self.answer([entry for entry in self.entries() if entry["path"] in wanted])

    def log_message(self, *_):
        pass


@pytest.fixture
def files(monkeypatch, tmp_path):
    """The files of the repository, by path."""
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files = {}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": f"http://127.0.0.1:{server.server_port}"})
    yield server.files
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "weights/model.npz", "model.keras"])
def test_a_run_starts_from_a_file_on_the_hub(name, files, tmp_path, capsys):
    trained = distloop.Trainer(classifier(), on(1))
    trained.fit(batches(), steps=3)
    trained.export(str(tmp_path / name.rpartition("/")[2]))
    files[name] = (tmp_path / name.rpartition("/")[2]).read_bytes()
    other = distloop.Trainer(classifier(), on(1, init_from=f"hf://someone/digits/{name}", seed=3, log_every=0))
    before = {path: v.numpy() for path, v in portable_names(trained.model).items()}
    other.fit(batches(), steps=1, actions=[recorder := Weights()])
    assert f"variables start from hf://someone/digits/{name}" in capsys.readouterr().out
    for path, value in before.items():
        np.testing.assert_array_equal(recorder.first[path], value)


class Weights(distloop.Action):
    """Keeps the weights that a run begins with."""

    every = 0

    def on_start(self, report):
        self.first = {path: v.numpy() for path, v in portable_names(report.state.model).items()}

    def __call__(self, report):
        pass


@pytest.mark.slow
def test_a_file_that_the_hub_does_not_have_is_refused(files):
    trainer = distloop.Trainer(classifier(), on(1, init_from="hf://someone/digits/model.npz"))
    refused(lambda: trainer.fit(batches(), steps=1), "init_from='hf://someone/digits/model.npz' cannot be read (read m")


@pytest.mark.slow
def test_without_the_package_of_the_hub_a_sentence_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    registry = sys.modules["fsspec.registry"]
    monkeypatch.delitem(registry._registry, "hf", raising=False)
    known = {"class": "huggingface_hub.HfFileSystem", "err": "Install huggingface_hub to access HfFileSystem"}
    monkeypatch.setitem(registry.known_implementations, "hf", known)  # as where the package was never installed
    trainer = distloop.Trainer(classifier(), on(1, init_from="hf://someone/digits/model.npz"))
    refused(
        lambda: trainer.fit(batches(), steps=1), "init_from='hf://someone/digits/model.npz'", "Install huggingface_h"
    )
