"""TensorBoard's pages as a real server and a browser show them."""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request

import numpy as np
import pytest
from PIL import Image

import distloop
from tests import forked
from tests.monitoring.event_files import train_with_media
from tests.problems import mostly_wide


@contextlib.contextmanager
def served(directory, *, is_fast, runs=6):
    """Runs TensorBoard on a free port; yields a function that queries it."""
    flags = [f"--logdir={directory}", "--port=0", f"--load_fast={str(is_fast).lower()}", "--reload_interval=1"]
    log = pathlib.Path(directory, "server.log")
    server = forked.Program(["-m", "tensorboard.main", *flags], stdout=log, stderr=log, env=os.environ)
    end = time.monotonic() + 300
    while not (address := re.search(r"at (http://\S+)", log.read_text())):
        assert server.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.2)

    def ask(path, body=None, **query):
        data = None if body is None else json.dumps(body).encode()
        query_url = f"{ask.url}data/{path}?{urllib.parse.urlencode(query)}"
        request = urllib.request.Request(query_url, data, {"Content-Type": "application/json"} if data else {})
        with urllib.request.urlopen(request, timeout=30) as answer:
            content = answer.read()
        try:
            return json.loads(content)
        except ValueError:
            return content

    ask.url = address[1]
    try:
        while len(ask("runs")) < runs or len(ask("plugin/hparams/experiment", {}).get("metricInfos", [])) < 3:
            assert time.monotonic() < end, ask("runs")
            time.sleep(0.5)
        yield ask
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(300)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A directory with two finished runs."""
    directory = tmp_path_factory.mktemp("runs")
    for name, clip_norm in (("a", 1.0), ("b", 2.0)):
        train_with_media(directory / name, 4, histograms_every=2, clip_norm=clip_norm)
    return directory


@pytest.fixture(scope="module")
def site(sweep):
    """A server for several tests."""
    with served(sweep, is_fast=False) as ask:
        yield ask


@pytest.mark.slow
@pytest.mark.parametrize("is_fast", mostly_wide([False, True]))
def test_tensorboard_shows_every_kind(sweep, site, is_fast):
    if is_fast:
        pytest.importorskip("tensorboard_data_server")
    with served(sweep, is_fast=True) if is_fast else contextlib.nullcontext(site) as ask:
        run, test = "a/train", "a/test"
        loss = ask("plugin/scalars/scalars", run=run, tag="Metrics/loss")
        rows = distloop.read_metrics(sweep / "a")
        assert [step for _, step, _ in loss] == [row["step"] for row in rows]
        assert [value for *_, value in loss] == pytest.approx([row["loss"] for row in rows], rel=1e-6)
        tags = ask("plugin/scalars/tags")
        assert "Metrics/accuracy" in tags[test]
        assert all(tag["description"] for of_run in tags.values() for tag in of_run.values())
        assert "Of the next step" in tags[run]["optimizer/learning_rate"]["description"]
        tag = "gradients/net/hidden/kernel"
        histogram = ask("plugin/histograms/histograms", run=run, tag=tag)
        assert [step for _, step, _ in histogram] == [2, 4]
        assert sum(count for *_, count in histogram[0][2]) == 8 * 16
        assert [step for _, step, _ in ask("plugin/distributions/distributions", run=run, tag=tag)] == [2, 4]
        assert "<strong>words</strong>" in ask("plugin/text/text", run=run, tag="shown/words")[0]["text"]
        texts = {name: ask("plugin/text/text", run="a", tag=f"run/{name}")[0]["text"] for name in ("config", "model")}
        assert "<td><code>clip_norm</code></td>\n<td><code>1.0</code></td>" in texts["config"]
        assert "net/hidden/kernel" in texts["model"] and "[8, 16]" in texts["model"]
        assert all(f"<th>{name}</th>" in texts["model"] for name in ("size", "mean", "deviation"))
        for where, tag in ((run, "shown/pictures"), (test, "confusion")):
            (*_, last) = ask("plugin/images/images", run=where, tag=tag, sample=0)
            assert ask(f"plugin/images/individualImage?{last['query']}&x=")[:4] == b"\x89PNG"
        sound = ask("plugin/audio/audio", run=run, tag="shown/tone", sample=0)[0]
        assert ask(f"plugin/audio/individualAudio?{sound['query']}&x=")[:4] == b"RIFF"
        assert ask("plugin/pr_curves/pr_curves", run=run, tag="shown/curve")[run][0]["true_positives"][0] == 2
        assert re.search(rb"net\w*/hidden\w*/MatMul", ask("plugin/graphs/graph", run="a"))
        assert b"hidden" in ask("plugin/graphs/graph", run="a", tag="keras", conceptual="true")
        charts = {c["title"]: c for part in ask("plugin/custom_scalars/layout")["category"] for c in part["chart"]}
        for title, names in {"loss": {"Metrics/loss"}, "metrics": {"Metrics/accuracy", "Metrics/shown/half"}}.items():
            (pattern,) = charts[title]["multiline"]["tag"]
            assert set(ask("plugin/custom_scalars/scalars", run=run, tag=pattern)["tag_to_events"]) == names


@pytest.mark.slow
def test_the_hparams_page_lists_the_runs_of_a_sweep(sweep, site):
    infos = site("plugin/hparams/experiment", {})["metricInfos"]
    names = [(info["name"]["group"], info["name"]["tag"]) for info in infos]
    assert names[:2] == [("test", "Metrics/accuracy"), ("train", "Metrics/accuracy")]  # beside the trial
    assert ("test", "Metrics/loss") in names
    columns = [{"metric": info["name"]} for info in infos]
    query = {"startIndex": 0, "sliceSize": 9, "allowedStatuses": ["STATUS_SUCCESS"], "colParams": columns}
    groups = site("plugin/hparams/session_groups", query)["sessionGroups"]
    assert {g["name"]: g["hparams"]["clip_norm"] for g in groups} == {"a": 1.0, "b": 2.0}
    assert groups[0]["hparams"].keys() == {"batch_size", "seed", "steps", "clip_norm"}
    assert groups[0]["hparams"]["batch_size"] == 16  # of the dataset, and not of the Config
    last = distloop.read_metrics(sweep / "a")[-1]
    (value,) = [v for v in groups[0]["metricValues"] if v["name"] == {"group": "test", "tag": "Metrics/loss"}]
    assert value["value"] == pytest.approx(last["test/loss"], rel=1e-6) and value["trainingStep"] == 4


@pytest.mark.wide
@pytest.mark.slow
def test_tensorboard_shows_each_step_once_after_a_crash(tmp_path):
    is_fast = importlib.util.find_spec("tensorboard_data_server") is not None
    train_with_media(tmp_path / "run", 10, crash_at=7, histograms_every=2)
    train_with_media(tmp_path / "run", 10, histograms_every=2)
    with served(tmp_path, is_fast=is_fast, runs=3) as ask:
        run = "run/train"
        assert [step for _, step, _ in ask("plugin/scalars/scalars", run=run, tag="Metrics/loss")] == list(range(1, 11))
        histogram = ask("plugin/histograms/histograms", run=run, tag="weights/net/hidden/kernel")
        assert [step for _, step, _ in histogram] == [2, 4, 6, 8, 10]
        pictures = ask("plugin/images/images", run=run, tag="shown/pictures", sample=0)
        assert [picture["step"] for picture in pictures] == [2, 4, 6, 8, 10]
        assert [text["step"] for text in ask("plugin/text/text", run="run", tag="run/flags")] == [1, 8]
        query = {"startIndex": 0, "sliceSize": 9, "allowedStatuses": ["STATUS_SUCCESS"], "colParams": []}
        assert ask("plugin/hparams/session_groups", query)["totalSize"] == 1


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on this machine")
@pytest.mark.parametrize("page", ["timeseries", "custom_scalars", "histograms", "images", "hparams", "text"])
def test_a_browser_draws_the_page(site, page, tmp_path):
    shot = tmp_path / "page.png"
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={tmp_path}"]
    flags += ["--window-size=1400,900", "--virtual-time-budget=15000", f"--screenshot={shot}"]
    deadline = time.monotonic() + 300
    while True:  # a busy server may answer after the picture was taken
        subprocess.run([CHROMIUM, *flags, f"{site.url}#{page}"], check=True, capture_output=True, timeout=900)
        colours = np.asarray(Image.open(shot).convert("HSV"))[80:, 340:1130]  # without the header and the sides
        dots = np.count_nonzero((colours[..., 1] > 100) & (colours[..., 2] > 60))
        # Lines, bars, pictures and links; TensorBoard's frame around nothing has not one such dot there.
        if dots > 400:
            break
        assert time.monotonic() < deadline
