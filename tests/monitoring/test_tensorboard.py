"""Event files as TensorBoard's reader sees them; test_tensorboard_server.py asks a real server."""

import glob
import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginEventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import api_pb2, summary, summary_v2
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import distloop
from distloop.checkpoints.store import Checkpoints
from distloop.monitoring import tensorboard
from distloop.monitoring.tensorboard import SummaryWriter
from distloop.workdir.records import GROUPS
from tests import problems
from tests.monitoring.event_files import read_scalars, steps_in_tensorboard, train_with_media


def fit(workdir, steps, actions=(), **settings):
    trainer = distloop.Trainer(problems.classifier(), problems.on(1, workdir=str(workdir), **settings))
    data = tf.data.Dataset.from_tensor_slices(problems.classification()).batch(16)
    trainer.fit(data.repeat(), steps=steps, actions=actions)
    return trainer


def test_a_tag_is_in_its_last_parts_group_and_has_a_description():
    groups = [*GROUPS, "confusion", "gradients", "weights"]
    assert min(groups) == "Metrics"  # TensorBoard sorts by the code of the characters
    for tag in ("Metrics/loss", "optimizer/discriminator/learning_rate", "system/stage_0/device_memory_gb"):
        assert tensorboard.group_tag(tag.partition("/")[2]) == tag
    assert tensorboard.describe("optimizer/discriminator/update_ratio") == "`update_norm` divided by `weight_norm`."
    assert "weighted means" in tensorboard.describe("Metrics/accuracy")
    assert "after clipping" in tensorboard.describe_media("gradients/dense/kernel")
    assert "distloop.Summary" in tensorboard.describe_media("samples")


@pytest.mark.parametrize("secs", [10.0, -3600.0], ids=["the clock goes on", "the clock is set back"])
def test_a_run_that_goes_on_shows_every_step_once_in_ordered_files(secs, tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr(tensorboard.time, "time", lambda: now)
    for start, end in ((0, 11), (5, 9), (6, 12)):  # cut off at 11, restored at 5; cut off at 9, restored at 6
        summaries = SummaryWriter(str(tmp_path), [], start)
        summaries.begin({}, {}, {})
        for step in range(start + 1, end + 1):
            summaries.write(step, {"loss": 1.0 / step})
        summaries.close(has_succeeded=end == 12)
        now += secs
    assert steps_in_tensorboard(tmp_path / "train", "Metrics/loss") == list(range(1, 13))
    names = sorted(os.listdir(tmp_path / "train"), key=lambda name: int(name.rpartition(".")[2]))
    assert len(names) == 3 and sorted(names) == names  # in the order in which they were made


def test_evaluations_have_their_own_directory_and_the_tags_of_training(tmp_path):
    numbers = {"loss": 0.5, "test/loss": 0.25, "test/digits/f1": 0.75, "learning_rate": 0.125}
    writer = SummaryWriter(str(tmp_path), evals=["test"])
    writer.write(3, numbers)
    writer.close()
    assert read_scalars(tmp_path / "train") == {("Metrics/loss", 3): 0.5, ("optimizer/learning_rate", 3): 0.125}
    assert read_scalars(tmp_path / "test") == {("Metrics/loss", 3): 0.25, ("Metrics/digits/f1", 3): 0.75}


@pytest.mark.parametrize("name", ["train", "checkpoints", "export", "..", "config.json", "discriminator"])
def test_a_prefix_that_is_no_evaluation_or_name_of_a_file_stays_in_the_tag(name, tmp_path):
    writer = SummaryWriter(str(tmp_path / "run"), evals=[] if name == "discriminator" else [name])
    writer.write(1, {"loss": 2.0, f"{name}/loss": 1.0, name: 3.0})
    writer.close()
    assert os.listdir(tmp_path) == ["run"] and os.listdir(tmp_path / "run") == ["train"]
    numbers = {("Metrics/loss", 1): 2.0, (f"Metrics/{name}/loss", 1): 1.0, (f"Metrics/{name}", 1): 3.0}
    assert read_scalars(tmp_path / "run" / "train") == numbers


def test_files_come_with_the_first_write_and_are_readable_before_the_close(tmp_path):
    writer = SummaryWriter(str(tmp_path / "run"), evals=["test"])
    writer.write(1, {})
    writer.close()
    assert os.listdir(tmp_path) == []
    writer.write(2, {"a": 0.5, "b": float("nan"), "c": float("inf")})
    writer.flush()
    scalars = read_scalars(tmp_path / "run" / "train")
    assert np.isnan(scalars.pop(("Metrics/b", 2)))
    assert scalars == {("Metrics/a", 2): 0.5, ("Metrics/c", 2): float("inf")}
    writer.close()


def test_evaluations_may_come_first_and_writes_after_a_close_are_kept(tmp_path):
    writer = SummaryWriter(str(tmp_path), evals=["test"])
    writer.write(1, {"test/loss": 4.0})
    writer.close()
    writer.close()
    writer.write(2, {"loss": 3.0, "test/loss": np.float32(2.0)})
    writer.close()
    assert read_scalars(tmp_path / "test") == {("Metrics/loss", 1): 4.0, ("Metrics/loss", 2): 2.0}
    assert read_scalars(tmp_path / "train") == {("Metrics/loss", 2): 3.0}


def steps_of_all(workdir):
    """Returns {run/tag: steps} of everything that TensorBoard shows."""
    found = {}
    for directory in {os.path.dirname(path) for path in glob.glob(f"{workdir}/**/events.*", recursive=True)}:
        events = PluginEventAccumulator(directory, size_guidance={"tensors": 0})
        events.Reload()
        for tag in events.Tags()["tensors"]:
            found[os.path.normpath(f"{os.path.relpath(directory, workdir)}/{tag}")] = [
                event.step for event in events.Tensors(tag)
            ]
    return found


def status_of(workdir):
    """Returns the status of a run on the HParams page; None: running."""
    events = EventAccumulator(str(workdir))
    events.Reload()
    if hparams.SESSION_END_INFO_TAG not in events.Tags()["tensors"]:
        return None
    content = events.SummaryMetadata(hparams.SESSION_END_INFO_TAG).plugin_data.content
    return hparams.parse_session_end_info_plugin_data(content).status


@pytest.mark.wide
@pytest.mark.slow
def test_after_a_crash_every_tag_has_each_step_once(tmp_path):
    train_with_media(tmp_path, 10, crash_at=3, histograms_every=2)  # which saves, as the next one does at step 7
    assert status_of(tmp_path) == api_pb2.STATUS_FAILURE
    train_with_media(tmp_path, 10, crash_at=7, histograms_every=2)
    train_with_media(tmp_path, 10, histograms_every=2)
    assert status_of(tmp_path) == api_pb2.STATUS_SUCCESS
    steps = steps_of_all(tmp_path)
    assert all(a < b for found in steps.values() for a, b in zip(found, found[1:], strict=False)), steps
    every = [2, 4, 6, 8, 10]
    assert steps["train/Metrics/loss"] == list(range(1, 11))  # the crashing action looks at each step
    for tag in ("test/Metrics/loss", "train/weights/net/hidden/kernel", "train/gradients/net/hidden/kernel"):
        assert steps[tag] == every, tag
    for tag in ("shown/pictures", "shown/tone", "shown/words", "shown/spread", "shown/curve", "Metrics/shown/half"):
        assert steps[f"train/{tag}"] == every, tag
    # A start between two histograms does not know the weights of the one before.
    assert steps["train/optimizer/update_ratio"] == [2, 6, 10] and steps["test/confusion"] == [10]
    assert steps["run/config"] == [1, 4, 8]  # of each start: from step 0, 3 and 7


@pytest.mark.slow
def test_an_interrupted_run_counts_as_running_and_an_early_crash_as_failed(tmp_path):
    with pytest.raises(SystemExit):
        fit(tmp_path / "interrupted", 100_000, max_secs=1e-9)
    assert status_of(tmp_path / "interrupted") is None
    writer = SummaryWriter(str(tmp_path / "crashed"), [], 0)
    writer.begin({}, {}, {})
    writer.close(False)
    assert status_of(tmp_path / "crashed") == api_pb2.STATUS_FAILURE


def test_hyperparameters_keep_their_types_and_charts_their_tags(tmp_path):
    writer = SummaryWriter(str(tmp_path), [], 0)
    writer.begin({"rate": 1e-3, "on": True, "name": "x", "sizes": [1]}, {}, {"a": {"b": "c$"}})
    writer.close(True)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    content = events.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
    info = hparams.parse_session_start_info_plugin_data(content)
    kinds = {name: value.WhichOneof("kind") for name, value in info.hparams.items()}
    assert kinds == {"rate": "number_value", "on": "bool_value", "name": "string_value", "sizes": "string_value"}
    (charts,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(tf.make_ndarray(charts.tensor_proto).item())
    assert layout.category[0].title == "a" and list(layout.category[0].chart[0].multiline.tag) == ["c$"]


def test_hyperparameters_are_written_as_tensorboard_does(tmp_path):
    values = {"rate": 1e-3, "steps": 7, "on": True, "name": "x"}
    writer = SummaryWriter(str(tmp_path), [], 0)
    writer.begin(values, {}, {})
    writer.close(False)
    (file,) = tmp_path.glob("*.hparams")
    _, start, end = list(tf.compat.v1.train.summary_iterator(str(file)))
    expected = summary_v2.hparams_pb(values, trial_id="", start_time_secs=start.wall_time)
    assert of_trial(start.summary) == of_trial(expected)
    assert of_trial(end.summary) == of_trial(summary.session_end_pb(api_pb2.STATUS_FAILURE, end.wall_time))


def of_trial(written):
    """Returns the tag, the data and the tensor of the first value of a summary for the HParams page."""
    value = written.value[0]
    plugin = value.metadata.plugin_data
    content = HParamsPluginData.FromString(plugin.content)
    return value.tag, plugin.plugin_name, content, value.tensor.SerializeToString()


WITHOUT_CLIENTS = """
import sys
from distloop.monitoring.tensorboard import SummaryWriter
writer = SummaryWriter(sys.argv[1], [], 0)
writer.begin({"rate": 1e-3}, {}, {})
writer.close(True)
assert not {"boto3", "fsspec", "tensorboard.compat.tensorflow_stub"} & {*sys.modules}
"""


@pytest.mark.slow
def test_event_files_need_no_clients_of_buckets(tmp_path):
    subprocess.run([sys.executable, "-c", WITHOUT_CLIENTS, str(tmp_path)], check=True)


def test_odd_tags_are_kept(tmp_path):
    name = 'a b/ü"<>&|#?%20 \n'
    writer = SummaryWriter(str(tmp_path), [], 0)
    writer.write(1, {name: 1.0})
    writer.show(1, {f"{name}text": distloop.Text("x")})
    writer.close()
    assert steps_in_tensorboard(tmp_path / "train", f"Metrics/{name}") == [1]
    assert steps_in_tensorboard(tmp_path / "train", f"{name}text") == [1]


@pytest.mark.slow
def test_all_rows_up_to_a_checkpoint_are_written_before_it(tmp_path, monkeypatch):
    """Otherwise a process killed right after a save leaves a gap: the resumed run writes only later rows."""
    saved = {}
    save = Checkpoints.save

    def look(checkpoints, step, *arguments):
        rows = [row["step"] for row in distloop.read_metrics(tmp_path)]
        copy = shutil.copytree(tmp_path / "train", tmp_path / str(step))  # without later flushes
        saved[step] = rows, steps_in_tensorboard(copy, "Metrics/loss"), steps_in_tensorboard(copy, "steps")
        save(checkpoints, step, *arguments)

    monkeypatch.setattr(Checkpoints, "save", look)
    show = distloop.Summary("steps", lambda state: distloop.Text(str(state.step)), every=2)
    fit(tmp_path, 8, [show], log_every=2, checkpoint_every=4)
    assert saved == {4: ([2, 4],) * 3, 8: ([2, 4, 6, 8],) * 3}


@pytest.mark.slow
def test_a_full_disk_stops_no_training_and_is_logged_once(tmp_path, monkeypatch, caplog):
    def see(report):
        seen.append(report.step)

    seen, see.every = [], 2
    os.symlink("/dev/full", tmp_path / "metrics.jsonl")
    monkeypatch.setattr("distloop.actions.write.os.path.isfile", lambda path: False)
    with caplog.at_level("ERROR", "distloop"):
        assert fit(tmp_path, 8, [see], log_every=2).step == 8
    assert seen == [2, 4, 6, 8]
    first, last = [record.getMessage() for record in caplog.records]
    assert "metrics.jsonl cannot be written (No space left on device): the run goes on" in first
    assert "metrics.jsonl lacks 4 rows" in last


def test_a_bad_directory_or_a_full_disk_is_an_os_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        SummaryWriter(str(tmp_path / "file"), evals=[]).write(1, {"loss": 1.0})
    made = tf.io.TFRecordWriter
    monkeypatch.setattr("distloop.monitoring.tensorboard.tf.io.TFRecordWriter", lambda path: made("/dev/full"))
    writer = SummaryWriter(str(tmp_path), [])
    writer.write(1, {"loss": 1.0})
    with pytest.raises(OSError, match="[Nn]o space left"):
        writer.flush()


def test_after_an_error_no_step_is_lost_or_shown_twice(tmp_path):
    writer = SummaryWriter(str(tmp_path), ["test"], start=0)
    for steps, act in (((1, 2, 3), writer.flush), ((2, 3, 4), writer.close)):
        for step in steps:
            writer.write(step, {"loss": float(step), "test/loss": float(step)})
        act()
        writer.discard(2)  # steps 2 and 3 may be in the files or not
    for run in ("train", "test"):
        assert steps_in_tensorboard(tmp_path / run, "Metrics/loss") == [1, 2, 3, 4]


class Seen:
    """A writer that keeps the settings."""

    def open(self, settings, run_id):
        self.settings = settings

    def write(self, step, numbers, when):
        pass

    def close(self):
        pass


def texts_of(workdir, tag):
    """Returns the texts of a tag in all event files."""
    events = [event for path in workdir.rglob("events.*") for event in tf.compat.v1.train.summary_iterator(str(path))]
    values = [value for event in events for value in event.summary.value if value.tag == tag]
    return [tf.make_ndarray(value.tensor).item().decode() for value in values]


OF_FIT = {  # the data, what else `fit` is given, the settings that it has
    "arrays": ("arrays", {"batch_size": 16, "epochs": 2}, {"batch_size": 16, "epochs": 2}),
    "batches": ("batches", {"steps": 3}, {"batch_size": 8, "steps": 3}),
    "until": ("arrays", {"until": "0.5 epochs"}, {"batch_size": 32, "until": "0.5 epochs"}),
    "config": ("arrays", {}, {"batch_size": 32, "steps": 5}),
    "replica_batch_size": ("arrays", {}, {"replica_batch_size": 16, "steps": 5}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", problems.mostly_wide(OF_FIT, "arrays", "batches"))
def test_what_fit_was_given_is_what_every_file_and_writer_says(case, tmp_path):
    kind, arguments, differs = OF_FIT[case]
    expected = {"steps": 0, "epochs": 0, "batch_size": 0, "replica_batch_size": 0, "until": "", **differs}
    sizes = {"replica_batch_size": 16} if case == "replica_batch_size" else {"batch_size": 32}
    seen, config, rows = Seen(), problems.on(2, workdir=str(tmp_path), steps=5, **sizes), problems.classification(64)
    trainer = distloop.Trainer(problems.classifier(), config)
    trainer.fit(rows if kind == "arrays" else distloop.make_dataset(rows, 8), writers=[seen], **arguments)
    manifest = json.loads((tmp_path / "checkpoints" / str(trainer.step) / "manifest.json").read_text())
    for settings in (json.loads((tmp_path / "config.json").read_text()), manifest["notes"]["config"], seen.settings):
        assert {name: settings[name] for name in expected} == expected
    lines, (table,) = (tmp_path / "flags.txt").read_text().splitlines(), texts_of(tmp_path, "run/config")
    assert {f"--{name}={value}" for name, value in expected.items()} < set(lines)
    assert all(f"| `{name}` | `{value}` |" in table for name, value in expected.items() if value)
    content = EventAccumulator(str(tmp_path)).Reload().SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data
    trial = hparams.parse_session_start_info_plugin_data(content.content).hparams
    found = {name: value.number_value or value.string_value for name, value in trial.items()}
    assert {name: found.get(name) for name in differs} == differs and trainer.config == config
