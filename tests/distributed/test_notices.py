"""Notices of Google's cloud, from a metadata server on this machine."""

import http.server
import signal
import threading
import time

import pytest

from distloop.distributed import notices, preemption

PREEMPTED, MAINTENANCE = "instance/preempted", "instance/maintenance-event"
MACHINE_GOES = "TERMINATE_ON_HOST_MAINTENANCE"


class Server(http.server.BaseHTTPRequestHandler):
    values, asked = {}, []

    def do_GET(self):  # noqa: N802 - the name that http.server calls
        name = self.path.removeprefix("/computeMetadata/v1/")
        Server.asked.append((name, self.headers["Metadata-Flavor"]))
        self.send_response(200 if name in self.values else 404)
        self.end_headers()
        self.wfile.write(self.values.get(name, "").encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def values(monkeypatch):
    """Returns what the metadata server answers, by name."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
    monkeypatch.delenv("DISTLOOP_MEMBERSHIP", raising=False)
    monkeypatch.setattr(notices, "_POLL_SECS", 0.01)
    Server.values, Server.asked = {PREEMPTED: "FALSE", MAINTENANCE: "NONE"}, []
    yield Server.values
    server.shutdown()
    server.server_close()


@pytest.fixture
def signals(monkeypatch):
    """Returns the signals that this process was sent."""
    sent = []
    monkeypatch.setattr(notices.os, "kill", lambda process, number: sent.append(number))
    return sent


def wait_for(is_true):
    ends_at = time.monotonic() + 10
    while not is_true() and time.monotonic() < ends_at:
        time.sleep(0.005)
    return is_true()


@pytest.mark.parametrize(("name", "value"), [(PREEMPTED, "TRUE"), (MAINTENANCE, MACHINE_GOES)])
def test_a_machine_that_is_announced_to_go_is_a_sigterm_sent_once(name, value, values, signals):
    with notices.watched():
        assert wait_for(lambda: len(Server.asked) > 4) and signals == []
        values[name] = value
        assert wait_for(lambda: signals)
    assert signals == [signal.SIGTERM] and set(Server.asked) == {(PREEMPTED, "Google"), (MAINTENANCE, "Google")}


def test_a_run_that_catches_signals_is_asked_to_stop(values):
    values[PREEMPTED] = "TRUE"
    with preemption.StopRequests() as requests:
        assert wait_for(lambda: requests.reason == "by SIGTERM")
    count = len(Server.asked)
    time.sleep(0.05)
    assert len(Server.asked) == count  # nobody asks any more


def test_a_server_that_does_not_answer_announces_nothing(values, signals):
    values.clear()  # 404
    with notices.watched():
        assert wait_for(lambda: len(Server.asked) > 4)
    assert signals == []


def test_nothing_is_asked_outside_of_the_cloud_nor_by_a_worker_whose_launcher_asks(
    values, signals, monkeypatch, tmp_path
):
    values[PREEMPTED] = "TRUE"
    monkeypatch.setenv(
        "DISTLOOP_MEMBERSHIP",
        '{"number": 1, "launch": "", "least": 1, "most": 2, "cause": "", "worker": 0, "pipe": [0, 0]}',
    )
    with notices.watched():
        time.sleep(0.1)
    monkeypatch.delenv("DISTLOOP_MEMBERSHIP")
    monkeypatch.delenv("GCE_METADATA_IP")
    monkeypatch.setattr(notices, "_PRODUCT", str(tmp_path / "product"))
    assert notices._find_server() == ""
    (tmp_path / "product").write_text("Google Compute Engine\n")
    assert notices._find_server() == "metadata.google.internal"
    assert Server.asked == [] and signals == []
