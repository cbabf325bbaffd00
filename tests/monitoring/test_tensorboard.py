"""Tests TensorBoard's files: as TensorBoard's reader sees them, and as a real server shows them."""

import contextlib
import glob
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as PluginEventAccumulator,
)
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams import metadata as hparams

import distloop
from distloop.actions.action import Report
from distloop.actions.write import Write
from distloop.checkpoints.store import Checkpoints
from distloop.monitoring.json_writer import JsonWriter
from distloop.monitoring.media import Layout
from distloop.monitoring.tensorboard import SummaryWriter
from tests import problems


def read_scalars(directory):
    """Returns {(tag, step): value} of all event files in a directory."""
    scalars = {}
    for path in sorted(glob.glob(f"{directory}/events.*")):
        for event in tf.compat.v1.train.summary_iterator(path):
            for value in event.summary.value:
                number = value.simple_value if value.HasField("simple_value") else tf.make_ndarray(value.tensor)
                scalars[value.tag, event.step] = float(number)
    return scalars


def steps_in_tensorboard(directory, tag):
    """Returns the steps that TensorBoard shows of a tag."""
    events = EventAccumulator(str(directory), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    if tag in events.Tags()["scalars"]:
        return [event.step for event in events.Scalars(tag)]
    return [event.step for event in events.Tensors(tag)]


# Numbers.


def test_a_run_that_goes_on_shows_every_step_once(tmp_path):
    for start, end in ((0, 11), (5, 9), (6, 12)):  # cut off at 11, restored at 5; cut off at 9, restored at 6
        summaries = SummaryWriter(str(tmp_path), [], start)
        for step in range(start + 1, end + 1):
            summaries.write(step, {"loss": 1.0 / step})
        summaries.close()
    assert steps_in_tensorboard(tmp_path / "train", "loss") == list(range(1, 13))


def test_evaluations_have_a_directory_of_their_own_and_the_tags_of_training(tmp_path):
    writer = SummaryWriter(str(tmp_path), evals=["test"])
    writer.write(3, {"loss": 0.5, "test/loss": 0.25, "test/digits/f1": 0.75, "learning_rate": 0.125})
    writer.close()
    assert read_scalars(tmp_path / "train") == {("loss", 3): 0.5, ("learning_rate", 3): 0.125}
    assert read_scalars(tmp_path / "test") == {("loss", 3): 0.25, ("digits/f1", 3): 0.75}


def test_a_prefix_that_is_no_evaluation_stays_in_the_tag(tmp_path):
    writer = SummaryWriter(str(tmp_path), evals=["test"])
    writer.write(1, {"discriminator/loss": 2.0, "test": 1.0})
    writer.close()
    assert read_scalars(tmp_path / "train") == {("discriminator/loss", 1): 2.0, ("test", 1): 1.0}
    assert os.listdir(tmp_path) == ["train"]


def test_an_evaluation_called_train_does_not_mix_with_training(tmp_path):
    writer = SummaryWriter(str(tmp_path), evals=["train"])
    writer.write(1, {"loss": 2.0, "train/loss": 1.0})
    writer.close()
    assert read_scalars(tmp_path / "train") == {("loss", 1): 2.0, ("train/loss", 1): 1.0}


def test_nothing_is_written_before_the_first_number(tmp_path):
    writer = SummaryWriter(str(tmp_path / "summaries"), evals=["test"])
    writer.write(1, {})
    writer.close()
    assert os.listdir(tmp_path) == []


def test_summaries_can_be_read_before_the_writer_is_closed(tmp_path):
    writer = SummaryWriter(str(tmp_path), evals=[])
    writer.write(1, {"loss": 0.5})
    writer.flush()
    assert read_scalars(tmp_path / "train") == {("loss", 1): 0.5}
    writer.close()


def test_evaluations_may_come_first_and_writes_after_a_close_are_kept(tmp_path):
    writer = SummaryWriter(str(tmp_path), evals=["test"])
    writer.write(1, {"test/loss": 4.0})
    writer.close()
    writer.close()
    writer.write(2, {"loss": 3.0, "test/loss": np.float32(2.0)})
    writer.close()
    assert read_scalars(tmp_path / "test") == {("loss", 1): 4.0, ("loss", 2): 2.0}
    assert read_scalars(tmp_path / "train") == {("loss", 2): 3.0}


def test_summaries_of_nan_and_inf_are_kept(tmp_path):
    writer = SummaryWriter(str(tmp_path), evals=[])
    writer.write(1, {"a": float("nan"), "b": float("inf")})
    writer.close()
    scalars = read_scalars(tmp_path / "train")
    assert np.isnan(scalars["a", 1])
    assert scalars["b", 1] == float("inf")


def test_no_default_writer_and_no_default_step_stay_behind(tmp_path):
    writer = SummaryWriter(str(tmp_path), evals=[])
    writer.write(1, {"loss": 0.5})
    assert tf.summary.experimental.get_step() is None
    assert not tf.summary.scalar("stray", 1.0, step=1)
    writer.close()
    assert read_scalars(tmp_path / "train") == {("loss", 1): 0.5}


def test_the_users_own_default_writer_gets_none_of_it(tmp_path):
    with tf.summary.create_file_writer(str(tmp_path / "own")).as_default(step=9):
        writer = SummaryWriter(str(tmp_path), evals=[])
        writer.write(1, {"loss": 0.5})
        writer.close()
        tf.summary.scalar("mine", 1.0)
    assert read_scalars(tmp_path / "own") == {("mine", 9): 1.0}


def test_a_bad_summary_directory_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        SummaryWriter(str(tmp_path / "file"), evals=[]).write(1, {"loss": 1.0})


# All that is no number.


def steps_of_all(workdir):
    """Returns {run/tag: steps} of everything that TensorBoard shows."""
    found = {}
    for directory in glob.glob(f"{workdir}/summaries/*"):
        events = PluginEventAccumulator(directory, size_guidance={"tensors": 0})
        events.Reload()
        for tag in events.Tags()["tensors"]:
            found[f"{os.path.basename(directory)}/{tag}"] = [event.step for event in events.Tensors(tag)]
    return found


def status_of(workdir):
    """Returns how the HParams page takes a run to have ended; None: it runs."""
    events = EventAccumulator(f"{workdir}/summaries/hparams")
    events.Reload()
    if hparams.SESSION_END_INFO_TAG not in events.Tags()["tensors"]:
        return None
    content = events.SummaryMetadata(hparams.SESSION_END_INFO_TAG).plugin_data.content
    return hparams.parse_session_end_info_plugin_data(content).status


def train(workdir, steps, *, crash_at=None, **settings):
    """Trains a small classifier and shows something of every kind; crashes at a step."""
    data = tf.data.Dataset.from_tensor_slices(problems.classification()).batch(16)
    rng = np.random.default_rng(0)

    def show(state):
        return {
            "pictures": distloop.Images(rng.random((2, 4, 5, 3))),
            "tone": distloop.Audio(np.sin(np.arange(200) / 9), 8000),
            "words": distloop.Text("some **words**"),
            "spread": distloop.Histogram(rng.normal(size=50)),
            "curve": distloop.PRCurve([0, 1, 1], [0.2, 0.7, 0.4]),
            "half": 0.5,
        }

    def crash(report):
        if report.step == crash_at:
            raise RuntimeError("on purpose")

    crash.every = 1
    matrix = distloop.Summary("test/confusion", lambda state: distloop.ConfusionMatrix([0, 1], [1, 1]))
    config = problems.on(2, workdir=str(workdir), log_every=2, eval_every=2, checkpoint_every=4, **settings)
    trainer = distloop.Trainer(problems.classifier(), config)
    actions = [distloop.Summary("shown", show, every=2), matrix, crash]
    with pytest.raises(RuntimeError, match="on purpose") if crash_at else contextlib.nullcontext():
        trainer.fit(data, steps=steps, evals={"test": data}, actions=actions)
    return trainer


@pytest.mark.slow
def test_after_a_crash_every_tag_has_each_step_once_and_the_run_its_last_status(tmp_path):
    train(tmp_path, 10, crash_at=3, histograms_every=2)  # before the first checkpoint
    assert status_of(tmp_path) == api_pb2.STATUS_FAILURE
    train(tmp_path, 10, crash_at=7, histograms_every=2)
    train(tmp_path, 10, histograms_every=2)
    assert status_of(tmp_path) == api_pb2.STATUS_SUCCESS
    steps = steps_of_all(tmp_path)
    assert all(a < b for found in steps.values() for a, b in zip(found, found[1:], strict=False)), steps
    every = [2, 4, 6, 8, 10]
    assert steps["train/loss"] == list(range(1, 11))  # the crashing action looks at each step
    for tag in ("test/loss", "train/weights/net/hidden/kernel", "train/gradients/net/hidden/kernel"):
        assert steps[tag] == every, tag
    for tag in ("pictures", "tone", "words", "spread", "curve", "half"):
        assert steps[f"train/shown/{tag}"] == every, tag
    assert steps["train/update_ratio"] == every and steps["test/confusion"] == [10]
    assert steps["train/run/config"] == [1, 5]  # of each start that is left: from step 0 and from 4
    assert steps["hparams/last/loss"][-1] == 10


def test_an_interrupted_run_counts_as_running(tmp_path):
    data = tf.data.Dataset.from_tensor_slices(problems.classification()).batch(16)
    trainer = distloop.Trainer(problems.classifier(), problems.on(1, workdir=str(tmp_path), max_secs=1e-9))
    with pytest.raises(SystemExit):
        trainer.fit(data.repeat(), steps=100_000)
    assert status_of(tmp_path) is None


def test_an_end_of_a_crash_before_the_first_number_is_told(tmp_path):
    writer = SummaryWriter(str(tmp_path / "summaries"), [], 0)
    writer.begin({}, {}, Layout({}))
    writer.close(False)
    assert status_of(tmp_path) == api_pb2.STATUS_FAILURE


def test_odd_tags_are_kept(tmp_path):
    name = 'a b/ü"<>&|#?%20 \n'
    writer = SummaryWriter(str(tmp_path), [], 0)
    writer.write(1, {name: 1.0})
    writer.show(1, {f"{name}text": distloop.Text("x")})
    writer.close()
    assert steps_in_tensorboard(tmp_path / "train", name) == [1]
    assert steps_in_tensorboard(tmp_path / "train", f"{name}text") == [1]


def test_all_rows_up_to_a_checkpoint_are_in_their_files_before_it_is_written(tmp_path, monkeypatch):
    """Else a process that is killed right after it leaves a hole, as whoever goes on writes what comes after."""
    saved = {}
    save = Checkpoints.save

    def look(checkpoints, step, *arguments):
        rows = [row["step"] for row in distloop.read_metrics(tmp_path)]
        copy = shutil.copytree(tmp_path / "summaries" / "train", tmp_path / str(step))  # which nobody flushes any more
        saved[step] = rows, steps_in_tensorboard(copy, "loss"), steps_in_tensorboard(copy, "steps")
        save(checkpoints, step, *arguments)

    monkeypatch.setattr(Checkpoints, "save", look)
    data = tf.data.Dataset.from_tensor_slices(problems.classification()).batch(16)
    show = distloop.Summary("steps", lambda state: distloop.Text(str(state.step)), every=2)
    settings = problems.on(1, workdir=str(tmp_path), log_every=2, checkpoint_every=4)
    distloop.Trainer(problems.classifier(), settings).fit(data.repeat(), steps=8, actions=[show])
    assert saved == {4: ([2, 4],) * 3, 8: ([2, 4, 6, 8],) * 3}


# A disk that is full.


def test_a_full_disk_stops_the_numbers_but_not_the_training_and_says_so_once(tmp_path, monkeypatch, caplog):
    os.symlink("/dev/full", tmp_path / "metrics.jsonl")
    data = tf.data.Dataset.from_tensor_slices(problems.classification()).batch(16)
    seen = []

    def see(report):
        seen.append(report.step)

    see.every = 2
    trainer = distloop.Trainer(problems.classifier(), problems.on(1, workdir=str(tmp_path), log_every=2))
    monkeypatch.setattr("distloop.monitoring.json_writer.os.path.isfile", lambda path: False)
    with caplog.at_level("ERROR", "absl"):
        trainer.fit(data, steps=8, actions=[see])
    assert seen == [2, 4, 6, 8] and trainer.step == 8
    (line,) = [record.getMessage() for record in caplog.records]
    assert "metrics.jsonl cannot be written (No space left on device): the run goes on" in line


def test_a_full_disk_under_tensorboards_files_is_an_os_error(tmp_path, monkeypatch, caplog):
    made = tf.io.TFRecordWriter
    monkeypatch.setattr("distloop.monitoring.tensorboard.tf.io.TFRecordWriter", lambda path: made("/dev/full"))
    writer = SummaryWriter(str(tmp_path), [])
    writer.write(1, {"loss": 1.0})
    with pytest.raises(OSError, match="[Nn]o space left"):
        writer.flush()
    rows = JsonWriter(str(tmp_path / "m.jsonl"))
    with caplog.at_level("ERROR", "absl"), Write([SummaryWriter(str(tmp_path), []), rows]) as write:
        for step in (1, 2, 3):
            write(Report(step, 3, {"loss": 1.0}, None, time=1.0))
    assert len(caplog.records) == 1 and not write.writers


def test_an_error_of_the_console_is_one():
    class Broken:
        def write(self, step, metrics, when):
            raise BrokenPipeError("gone")

        def close(self):
            pass

    with pytest.raises(BrokenPipeError), Write([Broken()]) as write:
        write(Report(1, 3, {}, None))


# A real server.


@contextlib.contextmanager
def served(directory, *, is_fast, runs=6):
    """Runs TensorBoard on a free port; gives a function that asks it."""
    fast = "true" if is_fast else "false"
    flags = [f"--logdir={directory}", "--port=0", f"--load_fast={fast}", "--reload_interval=1"]
    with open(f"{directory}/server.log", "w") as log:
        server = subprocess.Popen([sys.executable, "-m", "tensorboard.main", *flags], stdout=log, stderr=log)
    end = time.monotonic() + 120
    while not (found := re.search(r"at (http://\S+)", pathlib.Path(log.name).read_text())):
        assert server.poll() is None and time.monotonic() < end, pathlib.Path(log.name).read_text()
        time.sleep(0.2)
    url = found[1]

    def ask(path, body=None, **query):
        data = None if body is None else json.dumps(body).encode()
        address = f"{url}data/{path}?{urllib.parse.urlencode(query)}"
        request = urllib.request.Request(address, data, {"Content-Type": "application/json"} if data else {})
        with urllib.request.urlopen(request, timeout=30) as answer:
            content = answer.read()
        try:
            return json.loads(content)
        except ValueError:
            return content

    ask.url = url
    try:
        while len(ask("runs")) < runs or len(ask("plugin/hparams/experiment", {}).get("metricInfos", [])) < 3:
            assert time.monotonic() < end, ask("runs")
            time.sleep(0.5)
        yield ask
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A directory with two finished runs."""
    directory = tmp_path_factory.mktemp("runs")
    for name, clip_norm in (("a", 1.0), ("b", 2.0)):
        train(directory / name, 4, histograms_every=2, clip_norm=clip_norm)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("is_fast", [False, True])
def test_tensorboard_shows_every_kind(sweep, is_fast):
    if is_fast:
        pytest.importorskip("tensorboard_data_server")
    with served(sweep, is_fast=is_fast) as ask:
        run, test = "a/summaries/train", "a/summaries/test"
        loss = ask("plugin/scalars/scalars", run=run, tag="loss")
        rows = distloop.read_metrics(sweep / "a")
        assert [(step, value) for _, step, value in loss] == [
            (row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in rows
        ]
        assert "accuracy" in ask("plugin/scalars/tags")[test]
        tag = "gradients/net/hidden/kernel"
        histogram = ask("plugin/histograms/histograms", run=run, tag=tag)
        assert [step for _, step, _ in histogram] == [2, 4]
        assert sum(count for *_, count in histogram[0][2]) == 8 * 16
        assert [step for _, step, _ in ask("plugin/distributions/distributions", run=run, tag=tag)] == [2, 4]
        assert "<strong>words</strong>" in ask("plugin/text/text", run=run, tag="shown/words")[0]["text"]
        texts = {name: ask("plugin/text/text", run=run, tag=f"run/{name}")[0]["text"] for name in ("config", "model")}
        assert "<td><code>clip_norm</code></td>\n<td><code>1.0</code></td>" in texts["config"]
        assert "net/hidden/kernel" in texts["model"] and "[8, 16]" in texts["model"]
        for where, tag in ((run, "shown/pictures"), (test, "confusion")):
            (*_, last) = ask("plugin/images/images", run=where, tag=tag, sample=0)
            assert ask(f"plugin/images/individualImage?{last['query']}&x=")[:4] == b"\x89PNG"
        sound = ask("plugin/audio/audio", run=run, tag="shown/tone", sample=0)[0]
        assert ask(f"plugin/audio/individualAudio?{sound['query']}&x=")[:4] == b"RIFF"
        assert ask("plugin/pr_curves/pr_curves", run=run, tag="shown/curve")[run][0]["true_positives"][0] == 2
        assert re.search(rb"net\w*/hidden\w*/MatMul", ask("plugin/graphs/graph", run=run))
        charts = {c["title"]: c for part in ask("plugin/custom_scalars/layout")["category"] for c in part["chart"]}
        for title, names in {"loss": {"loss"}, "metrics": {"accuracy", "shown/half"}}.items():
            (pattern,) = charts[title]["multiline"]["tag"]
            assert set(ask("plugin/custom_scalars/scalars", run=run, tag=pattern)["tag_to_events"]) == names


@pytest.mark.slow
@pytest.mark.parametrize("is_fast", [False, True])
def test_the_runs_of_a_sweep_stand_side_by_side(sweep, is_fast):
    if is_fast:
        pytest.importorskip("tensorboard_data_server")
    with served(sweep, is_fast=is_fast) as ask:
        infos = ask("plugin/hparams/experiment", {})["metricInfos"]
        assert {info["name"]["tag"] for info in infos} == {"last/loss", "last/test/loss", "last/test/accuracy"}
        columns = [{"metric": info["name"]} for info in infos]
        query = {"startIndex": 0, "sliceSize": 9, "allowedStatuses": ["STATUS_SUCCESS"], "colParams": columns}
        groups = ask("plugin/hparams/session_groups", query)["sessionGroups"]
        assert {g["name"]: g["hparams"]["clip_norm"] for g in groups} == {
            "a/summaries/hparams": 1.0,
            "b/summaries/hparams": 2.0,
        }
        assert all(len(group["metricValues"]) == 3 for group in groups)
        last = distloop.read_metrics(sweep / "a")[-1]
        (found,) = [v for v in groups[0]["metricValues"] if v["name"]["tag"] == "last/test/loss"]
        assert found["value"] == pytest.approx(last["test/loss"], rel=1e-6) and found["trainingStep"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("is_fast", [False, True])
def test_tensorboard_shows_each_step_once_after_a_crash(is_fast, tmp_path):
    if is_fast:
        pytest.importorskip("tensorboard_data_server")
    train(tmp_path / "run", 10, crash_at=7, histograms_every=2)
    train(tmp_path / "run", 10, histograms_every=2)
    with served(tmp_path, is_fast=is_fast, runs=3) as ask:
        run = "run/summaries/train"
        assert [step for _, step, _ in ask("plugin/scalars/scalars", run=run, tag="loss")] == list(range(1, 11))
        histogram = ask("plugin/histograms/histograms", run=run, tag="weights/net/hidden/kernel")
        assert [step for _, step, _ in histogram] == [2, 4, 6, 8, 10]
        pictures = ask("plugin/images/images", run=run, tag="shown/pictures", sample=1)
        assert [picture["step"] for picture in pictures] == [2, 4, 6, 8, 10]
        assert [text["step"] for text in ask("plugin/text/text", run=run, tag="run/flags")] == [1, 5]
        query = {"startIndex": 0, "sliceSize": 9, "allowedStatuses": ["STATUS_SUCCESS"], "colParams": []}
        assert ask("plugin/hparams/session_groups", query)["totalSize"] == 1


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def site(sweep):
    """A server that several pages are asked of."""
    with served(sweep, is_fast=False) as ask:
        yield ask


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on this machine")
@pytest.mark.parametrize("page", ["timeseries", "custom_scalars", "histograms", "images", "hparams", "text"])
def test_a_browser_draws_the_page(site, page, tmp_path):
    shot = tmp_path / "page.png"
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={tmp_path}"]
    size, wait = "--window-size=1400,900", "--virtual-time-budget=15000"
    command = [CHROMIUM, *flags, size, wait, f"--screenshot={shot}", f"{site.url}#{page}"]
    deadline = time.monotonic() + 120
    while True:  # a busy server may answer after the picture was taken
        subprocess.run(command, check=True, capture_output=True, timeout=180)
        colours = np.asarray(Image.open(shot).convert("HSV"))[80:, 340:1130]  # without the header and the sides
        dots = np.count_nonzero((colours[..., 1] > 100) & (colours[..., 2] > 60))
        # Lines, bars, pictures and links; TensorBoard's frame around nothing has not one such dot there.
        if dots > 400 or time.monotonic() > deadline:
            break
    assert dots > 400
