"""Runs in W&B and MLflow, with the real packages: each row, image and file over kills; read back from them."""

import contextlib
import glob
import importlib
import json
import os
import pathlib
import struct
import sys

import pytest

import distloop
from distloop.monitoring.deliveries import Deliveries
from tests import forked

# A run of 12 steps with a checkpoint, an evaluation and an image at every fourth, which is killed where it is told to.
PROGRAM = """
import importlib, os, pathlib, signal, sys, time
import numpy as np
import distloop
from distloop.monitoring.deliveries import Deliveries
from distloop.actions.write import JsonWriter
from distloop.monitoring.media import Audio, EncodedMedia, Histogram, Images, Text
from distloop.monitoring.writers import RunFile

def run(workdir, tracker, killed_at, start_secs):

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    if tracker == "wandb":
        writer = distloop.WandbWriter("digits", mode="offline", name="mine")
    else:
        writer = distloop.MLflowWriter("digits", tracking_uri=tracker, run_name="mine", tags={"team": "a"})
        client = writer._mlflow.MlflowClient
        if killed_at.startswith("in "):  # half of a row is there
            def log_batch(self, run_id, metrics=(), of=client.log_batch, **more):
                for metric in metrics:
                    if metric.step == int(killed_at[3:]):
                        of(self, run_id, metrics=[metric])
                        kill()
                of(self, run_id, metrics=metrics, **more)
            client.log_batch = log_batch

    checkpoint = pathlib.Path(workdir, "checkpoint")
    start = int(checkpoint.read_text()) if checkpoint.exists() else 0
    files = [RunFile("models", f"{workdir}/models/{step}", step) for step in (8, 12)]
    files.append(RunFile("best/test/acc", f"{workdir}/best.npz", 8))
    json_writer = JsonWriter(workdir + "/metrics.jsonl", start)
    settings = {"workdir": workdir, "steps": 12, "rate": 0.1, "token": "***"}
    if killed_at == "end":
        writer.close = kill
    with Deliveries([writer], workdir, left_files=lambda: files).open(start, settings, is_over=start == 12) as opened:
        for step in range(start + 1, 13):
            numbers = {"loss": step / 7, "acc@1": float("nan"), **({"test/acc": step / 12} if step % 4 == 0 else {})}
            if step % 4 == 0:
                image = Images(np.full([1, 4, 4, 1], step / 12))
                media = {"test/picture": image, "note": Text("<b>"), "w": Histogram([1.0, 2.0])}
                media |= {"tone": Audio(np.zeros(80), 8000)}
                encoded = {name: EncodedMedia(value.encode()) for name, value in media.items()}
                opened.show(step, encoded, 0.0)
            for file in (json_writer, opened):
                file.write(step, numbers, start_secs + step)
            for file in (json_writer, opened):
                file.flush()
            if killed_at == str(step):
                time.sleep(0.02)  # somewhere in the writer
                kill()
            while opened._deliveries[0].step < step:
                time.sleep(0.002)
            if step % 4 == 0:
                checkpoint.write_text(str(step))

workdir, tracker, *kills = sys.argv[1:]
importlib.import_module("wandb" if tracker == "wandb" else "mlflow.store.tracking.sqlalchemy_store")  # once for all
for i, killed_at in enumerate([*kills, "never"]):
    if not (process := os.fork()):
        run(workdir, tracker, killed_at, 1e9 + i / 8)  # a row that is computed again has another time
        sys.exit()
    code = os.waitpid(process, 0)[1]
    if code != (0 if killed_at == "never" else signal.SIGKILL):
        sys.exit(f"killed at {killed_at}: {code}")
"""


def run_killed(workdir, tracker, *kills):
    """Runs the program once for each kill, then to its end; the run leaves two models and its best checkpoint."""
    for step in (8, 12):
        (workdir / "models" / str(step)).mkdir(parents=True)
        (workdir / "models" / str(step) / "saved_model.pb").write_text(f"weights of {step}")
    (workdir / "best.npz").write_text("best")
    (path := workdir / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "WANDB_DATA_DIR": str(workdir), "WANDB_SILENT": "true"}
    result = forked.run([path, workdir, tracker, *kills], env=environment)
    assert result.returncode == 0, result.stderr


def records(workdir, kind):
    """All records of a kind in the offline files of a run, which are in LevelDB's log format."""
    found, record = [], importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    for path in sorted(glob.glob(f"{workdir}/wandb/offline-run-*/*.wandb")):
        content, start, parts = pathlib.Path(path).read_bytes(), 7, b""  # the first bytes name the format
        while start + 7 <= len(content):
            if (left := 32_768 - start % 32_768) < 7:
                start += left  # too few for another part
                continue
            _, length, part = struct.unpack_from("<IHB", content, start)
            if not part or start + 7 + length > len(content):  # the end of what was written, or half a part
                break
            parts += content[start + 7 : start + 7 + length]
            start += 7 + length
            if part in (1, 4):  # the end of a record
                found.append(record.FromString(parts))
                parts = b""
    return [getattr(each, kind) for each in found if each.WhichOneof("record_type") == kind]


def history(workdir):
    """The rows of a run in W&B's files."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item}
        for row in records(workdir, "history")
    ]


@pytest.mark.slow
def test_wandb_has_each_row_image_and_file_over_kills(tmp_path):
    pytest.importorskip("wandb", reason="needs wandb")
    run_killed(tmp_path, "wandb", "6", "12", "end")
    assert len({run.run_id for run in records(tmp_path, "run")}) == 1
    rows = history(tmp_path)
    assert list(dict.fromkeys(row["_step"] for row in rows)) == list(range(1, 13))  # after a kill, the last come again
    assert all(row["loss"] == row["_step"] / 7 and row["_timestamp"] // 1 == 1e9 + row["_step"] for row in rows)
    assert {row["test/acc"] for row in rows if "test/acc" in row} == {4 / 12, 8 / 12, 1.0}
    config = {}
    for run in records(tmp_path, "run"):
        config |= {update.key: json.loads(update.value_json) for update in run.config.update}
    assert {"steps": 12, "rate": 0.1, "token": "***"}.items() <= config.items()
    # The process that was killed before it closed the run may have written them, too: equal content, one version.
    artifacts = records(tmp_path, "artifact")
    assert {(artifact.name.rpartition("-")[0], *sorted(artifact.aliases)) for artifact in artifacts} == {
        ("best-test-acc", "latest", "step-8"),
        ("models", "latest", "step-12"),
        ("models", "latest", "step-8"),
    }
    assert len({artifact.digest for artifact in artifacts}) == 3


@pytest.mark.slow
def test_wandb_has_media_of_a_run_that_is_not_killed(tmp_path):
    pytest.importorskip("wandb", reason="needs wandb")
    run_killed(tmp_path, "wandb")
    rows = [row for row in history(tmp_path) if "test/picture/path" in row]
    assert [row["_step"] for row in rows] == [4, 8, 12]
    kinds = {tuple(row[f"{name}/_type"] for name in ("test/picture", "note", "w", "tone")) for row in rows}
    assert kinds == {("image-file", "html-file", "histogram", "audio-file")}
    assert len(glob.glob(f"{tmp_path}/wandb/offline-run-*/files/media/images/test/*.png")) == 3


def mlflow_client(uri):
    mlflow = pytest.importorskip("mlflow", reason="needs MLflow")
    return mlflow.MlflowClient(tracking_uri=uri)


@pytest.mark.slow
def test_wandb_keeps_a_buckets_files_in_staging_and_sees_no_secrets(tmp_path):
    pytest.importorskip("wandb", reason='needs wandb: pip install ".[wandb]"')
    (path := tmp_path / "train.py").write_text(
        "import sys, distloop\n"
        "from absl import flags\n"
        "distloop.secret_flag(flags.DEFINE_string('token', None, 'Of a host.'))\n"
        "writer = distloop.WandbWriter('digits', mode='offline')\n"
        "writer.open({'workdir': 's3://bucket/run'}, 'abc')\n"
        "writer.close()\n"
        "print(distloop.Config(workdir='s3://bucket/run').local_workdir, sys.argv[1])\n"
    )
    environment = {**os.environ, "WANDB_DATA_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = forked.run([path, "--token=hf_1", "--a"], env=environment)
    directory, argument = result.stdout.split()[-2:]
    assert directory.startswith(str(tmp_path / "cache")) and argument == "--token=hf_1", result.stderr
    (run,) = records(directory, "run")
    assert {update.key: json.loads(update.value_json) for update in run.config.update}["workdir"] == "s3://bucket/run"
    written = b"".join(file.read_bytes() for file in pathlib.Path(directory).rglob("*") if file.is_file())
    assert b"--token=***" in written and b"hf_1" not in written


@pytest.mark.wide
@pytest.mark.slow
def test_mlflow_has_each_number_image_and_file_over_kills(tmp_path):
    client = mlflow_client(uri := f"sqlite:///{tmp_path}/mlflow.db")
    client.create_experiment("digits", artifact_location=str(tmp_path / "artifacts"))
    run_killed(tmp_path, uri, "in 8", "in 12", "end")
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "mine" and run.data.tags["team"] == "a"
    assert {"steps": "12", "rate": "0.1", "token": "***"}.items() <= run.data.params.items()
    values = client.get_metric_history(run.info.run_id, "loss")
    assert all(metric.value == metric.step / 7 and metric.timestamp // 1000 == 10**9 + metric.step for metric in values)
    for name, steps in {"loss": range(1, 13), "test/acc": (4, 8, 12), "acc_1": range(1, 13)}.items():
        taken = [metric.step for metric in client.get_metric_history(run.info.run_id, name)]  # no name has an @ there
        assert list(dict.fromkeys(taken)) == list(steps)  # after a kill, the last come again
    images = [file.path for file in client.list_artifacts(run.info.run_id, "images") if file.path.endswith(".png")]
    assert {"4", "8"} & {path.split("+step+")[1].split("+")[0] for path in images}
    for step in (8, 12):
        path = client.download_artifacts(run.info.run_id, f"models/{step}/saved_model.pb")
        assert pathlib.Path(path).read_text() == f"weights of {step}"
    assert [file.path for file in client.list_artifacts(run.info.run_id, "best/test/acc")] == ["best/test/acc/best.npz"]


@pytest.mark.slow
def test_mlflow_tells_how_a_run_ended(tmp_path):
    client = mlflow_client(uri := f"sqlite:///{tmp_path}/mlflow.db")
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "time": 1e9, "loss": 0.5}\n{"step": 2, "time": 1e9, "loss": 0.5}\n'
    )
    for error, status in [(KeyError("x"), "FAILED"), (SystemExit(75), "KILLED"), (None, "FINISHED")]:
        deliveries = Deliveries([distloop.MLflowWriter(tracking_uri=uri)], str(tmp_path))
        with pytest.raises(type(error)) if error else contextlib.nullcontext():
            with deliveries.open(0, {"workdir": str(tmp_path), "steps": 4}) as opened:
                for step in (1, 2):
                    opened.write(step, {"loss": 0.5}, 1e9 + step)
                if error:
                    raise error
        (run,) = client.search_runs(["0"])
        assert run.info.status == status
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] == [1, 2]


@pytest.mark.parametrize("package, name", [("wandb", "WandbWriter"), ("mlflow", "MLflowWriter")])
def test_a_package_that_is_missing_is_named_with_what_installs_it(package, name, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"{name} needs {package}, .*: pip install {package}."):
        getattr(distloop, name)()


# A program with a run of its own, in which `fit` writes rows of 4 steps between rows of the program's.
PROGRAM_WITH_A_RUN = """
import importlib, json, pathlib, sys
import wandb
import distloop
from distloop.monitoring.deliveries import Deliveries
from distloop.actions.write import JsonWriter

workdir, begins = sys.argv[1:]
pathlib.Path(workdir).mkdir()
own = wandb.init(project="sweep", mode="offline", dir=workdir, config={"rate": 0.5}, reinit=begins)
for i in range(3):
    own.log({"before": i})

def write(start, writer):
    rows = JsonWriter(workdir + "/metrics.jsonl", start)
    settings = {"workdir": workdir, "rate": 0.1, "steps": 4}
    with Deliveries([writer], workdir).open(start, settings) as opened:
        for step in range(start + 1, start + 3):
            for file in (rows, opened):
                file.write(step, {"loss": step / 7}, 1e9 + step)
                file.flush()

write(0, distloop.WandbWriter("sweep", mode="offline"))
write(2, distloop.WandbWriter("sweep", mode="offline", name="mine"))
own.log({"score": 1.0})
print(wandb.run is own, own.config["rate"], own.config["steps"])
own.finish()
other = wandb.init(project="sweep", mode="offline", dir=workdir + "/other", id="of_the_program")
write(4, distloop.WandbWriter("sweep", mode="offline"))
other.finish()
"""


def run_program(tmp_path, *arguments):
    (path := tmp_path / "program.py").write_text(PROGRAM_WITH_A_RUN)
    environment = {**os.environ, "WANDB_DATA_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    return forked.run([path, tmp_path / "run", *arguments], env=environment)


@pytest.mark.slow
def test_rows_go_to_the_wandb_run_of_the_program_which_goes_on(tmp_path):
    pytest.importorskip("wandb", reason="needs wandb")
    result = run_program(tmp_path, "default")
    assert result.stdout.splitlines() == ["True 0.5 4"], result.stderr
    assert "takes the rows, without name='mine'." in result.stderr
    (run_id,) = {run.run_id for run in records(tmp_path / "run", "run")}
    other = f"run 'of_the_program' open, and the workdir's rows are in {run_id!r}: begin the run by wandb.init(id="
    assert other in result.stderr
    rows = history(tmp_path / "run")
    assert [row["before"] for row in rows if "before" in row] == [0, 1, 2]
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(step, step / 7) for step in range(1, 5)]
    assert [row["score"] for row in rows if "score" in row] == [1.0]
    names = {metric.name for metric in records(tmp_path / "run", "metric")}  # with an axis of their own
    assert "loss" in names and "before" not in names


@pytest.mark.slow
@pytest.mark.wide
def test_a_wandb_run_that_is_open_and_not_the_current_one_is_named(tmp_path):
    pytest.importorskip("wandb", reason="needs wandb")
    result = run_program(tmp_path, "create_new")
    assert "The writer WandbWriter cannot be opened (ValueError: the program has the W&B run " in result.stderr


@pytest.mark.slow
def test_the_active_run_of_mlflow_stays_as_it_is(tmp_path, monkeypatch):
    client = mlflow_client(uri := f"sqlite:///{tmp_path}/mlflow.db")
    mlflow = importlib.import_module("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with mlflow.start_run() as own:
        with Deliveries([distloop.MLflowWriter()], "").open(0, {"steps": 1}) as opened:
            opened.write(1, {"loss": 0.5}, 1e9)
        assert mlflow.active_run().info.run_id == own.info.run_id
        mlflow.log_metric("score", 1.0)
    runs = {run.info.run_id: run for run in client.search_runs(["0"])}
    assert runs.pop(own.info.run_id).data.metrics == {"score": 1.0}
    assert [run.data.metrics for run in runs.values()] == [{"loss": 0.5}]
