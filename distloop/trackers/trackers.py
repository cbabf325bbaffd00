"""Trackers: writers that send a run to Weights & Biases and MLflow, and go on with the same run there.

    trainer.fit(train, writers=[distloop.WandbWriter(project="digits"), distloop.MLflowWriter("digits")])

The packages are imported when a writer is made, so nobody else needs them. `deliveries` decides which rows come.
"""

import html
import importlib
import io
import json
import os
import pathlib
import re
import secrets
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from PIL import Image

from distloop import urls
from distloop.log import log
from distloop.monitoring.writers import MediaFile
from distloop.settings.flags import shown_arguments

_NOT_IN_NAMES = re.compile(r"[^\w\-./: ]")  # MLflow refuses other characters in the name of a metric
_NOT_IN_KEYS = re.compile(r"[^\w\-./ ]", re.ASCII)  # and these in the name of an image
_NOT_IN_ARTIFACTS = re.compile(r"[^\w\-.]+", re.ASCII)  # and W&B these in the name of an artifact
_begun = set[str]()  # the ids of the W&B runs that writers have begun and not ended


class WandbWriter:
    """Sends the rows, media and files of a run to Weights & Biases, with its settings and flags as the config.

    Exports and the best checkpoints become artifacts. W&B buffers rows; those that a kill takes come again from the
    workdir, and offline a few that it has already, with the same step.

    Where the program has a run open, as in a function that `wandb.agent` calls, rows go to that run, with their step as
    the number `step`. Its settings and its own rows stay as they are, and it stays open.

    Attributes:
        last_step: the step of the last row that W&B's server has; None: unknown.
    """

    def __init__(self, project: str | None = None, **settings: Any):
        """Imports wandb; `fit` begins the run, or with a workdir goes on with the run that was begun there.

        Args:
            project: where the run is shown; None: wandb's default.
            settings: more arguments of `wandb.init`, such as `name`, `entity`, `tags` or `mode="offline"`.

        Raises:
            ValueError: if wandb is not installed.
        """
        self._wandb = _import("wandb", "WandbWriter")
        self._settings = {"project": project, **settings}
        self._run: Any = None
        self._is_of_program = False  # whether the program has begun the run
        self._defined: set[str] = set()  # the names whose axis is `step`, in a run of the program
        self._exit_code = 0
        self.last_step: int | None = None

    def new_run_id(self) -> str:
        """Returns the id of a new run, or of the one that the program has open."""
        run = self._run_of_program()
        return secrets.token_hex(4) if run is None else str(run.id)

    def open(self, settings: Mapping[str, Any], run_id: str | None) -> str:
        """Begins a run, or goes on with one; returns its id.

        Raises:
            ValueError: if the program has another run open than that to go on with.
        """
        if (run := self._run_of_program()) is not None:
            return self._join(run, settings, run_id)
        directory = urls.local_directory(str(settings.get("workdir") or "")) or None
        arguments: dict[str, Any] = {"id": run_id, "resume": "allow", "dir": directory, "config": dict(settings)}
        arguments |= {"allow_val_change": True, **self._settings}
        if self._wandb.run is not None:  # of another `fit` of this process
            arguments["reinit"] = "create_new"
        argv = sys.argv
        sys.argv = [*argv[:1], *shown_arguments(argv[1:])]  # wandb records them: without secret values
        try:
            run = self._wandb.init(**arguments)
        finally:
            sys.argv = argv
        if arguments["id"] not in (None, run.id):  # of the program, and not `wandb.run`
            raise ValueError(f"the program has the W&B run {run.id!r} open: end it by its finish() before fit")
        _begun.add(str(run.id))
        self._run, self._is_of_program, self._exit_code = run, False, 0
        self.last_step = run.starting_step - 1 if not run.offline and run.resumed and run.starting_step else None
        return str(run.id)

    def _run_of_program(self) -> Any:
        """Returns the run that the program has open; None: there is none, or a writer has begun it."""
        run = self._wandb.run
        return None if run is None or str(run.id) in _begun else run

    def _join(self, run: Any, settings: Mapping[str, Any], run_id: str | None) -> str:
        """Adds the settings that a run of the program lacks; returns its id."""
        if run_id not in (None, run.id):
            raise ValueError(
                f"the program has the W&B run {run.id!r} open, and the workdir's rows are in {run_id!r}: begin the run "
                f"by wandb.init(id={run_id!r}, resume='allow'), or leave wandb.init to the writer"
            )
        self._run, self._is_of_program, self.last_step = run, True, None
        run.config.update({name: value for name, value in settings.items() if name not in run.config})
        given = {name: value for name, value in self._settings.items() if value is not None}
        of_run = {name: getattr(run, name, getattr(run.settings, name, None)) for name in given}
        if unused := [f"{name}={given[name]!r}" for name in given if given[name] != of_run[name]]:
            log.warning("The program's W&B run %s takes the rows, without %s.", run.id, ", ".join(unused))
        return str(run.id)

    def _log(self, entries: Mapping[str, Any], step: int, *, commit: bool) -> None:
        """Sends entries of a row; in a run of the program, whose rows W&B counts, with the step as a number."""
        if not self._is_of_program:
            return self._run.log(entries, step=step, commit=commit)
        for name in entries.keys() - self._defined:
            self._run.define_metric(name, step_metric="step")
        self._defined |= entries.keys()
        return self._run.log({**entries, "step": step}, commit=commit)

    def write_media(self, step: int, media: Mapping[str, MediaFile], time: float) -> None:
        """Adds media to the row that comes next, of the same step."""
        with tempfile.TemporaryDirectory() as directory:
            shown = {name: self._as_media(media[name], f"{directory}/{i}") for i, name in enumerate(media)}
            self._log(shown, step, commit=False)

    def write(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        """Sends a row, with the media of its step."""
        self._log({**numbers, "_timestamp": time}, step, commit=True)

    def write_file(self, name: str, path: str, step: int) -> None:
        """Sends a file or directory as a version of an artifact of this run; W&B keeps equal content once."""
        name = f"{_NOT_IN_ARTIFACTS.sub('-', name)}-{self._run.id}"
        artifact = self._wandb.Artifact(name, type="model", metadata={"step": step})
        if os.path.isdir(path):
            artifact.add_dir(path)
        else:
            artifact.add_file(path)
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    def on_error(self, error: BaseException) -> None:
        """Marks the run as failed."""
        code = getattr(error, "code", None)
        self._exit_code = code if isinstance(code, int) else 1

    def close(self) -> None:
        """Waits until everything is sent, and ends the run, unless the program has begun it."""
        if not self._is_of_program:
            self._run.finish(exit_code=self._exit_code)
            _begun.discard(str(self._run.id))

    def _as_media(self, file: MediaFile, path: str) -> Any:
        """Returns media as W&B have them; images and sounds are written to a path, which W&B copies."""
        if file.suffix == ".json":
            histogram = json.loads(file.data)
            return self._wandb.Histogram(np_histogram=(histogram["counts"], histogram["edges"]))
        kinds = {".png": self._wandb.Image, ".wav": self._wandb.Audio}
        if (make := kinds.get(file.suffix)) is not None:
            (copy := pathlib.Path(path + file.suffix)).write_bytes(file.data)
            return make(str(copy))
        return self._wandb.Html(f"<pre>{html.escape(file.data.decode())}</pre>")


class MLflowWriter:
    """Sends the rows, media and files of a run to MLflow, with its settings and flags as parameters.

    Images are in MLflow's view of images, sounds and texts among the artifacts, in `media`; exports and the best
    checkpoints are artifacts, too. MLflow keeps parameters as they were at the first start. After a kill it may have
    the last few rows twice, with the same step.
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ):
        """Imports MLflow; `fit` begins the run, or with a workdir goes on with the run that was begun there.

        Args:
            experiment: the name of the experiment; made if there is none.
            tracking_uri: of the server, or a file, `"sqlite:///mlflow.db"`; None: `MLFLOW_TRACKING_URI`, or that file.
            run_name: None: MLflow makes one.
            tags: of the run, by name.

        Raises:
            ValueError: if MLflow is not installed.
        """
        self._mlflow = _import("mlflow", "MLflowWriter")
        self._entities = importlib.import_module("mlflow.entities")
        self._experiment, self._tracking_uri = experiment, tracking_uri
        self._run_name, self._tags = run_name, dict(tags or {})
        self._client: Any = None
        self._run_id = ""
        self._status = "FINISHED"

    def open(self, settings: Mapping[str, Any], run_id: str | None) -> str:
        """Begins a run, or goes on with one; returns its id."""
        self._client = client = self._mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        self._status = "FINISHED"
        if run_id is None:
            experiment = client.get_experiment_by_name(self._experiment)
            experiment_id = experiment.experiment_id if experiment else client.create_experiment(self._experiment)
            run = client.create_run(experiment_id, run_name=self._run_name, tags=self._tags)
        else:
            run = client.get_run(run_id)
        self._run_id = str(run.info.run_id)
        client.update_run(self._run_id, status="RUNNING")
        new = {name: str(value)[:500] for name, value in settings.items() if name not in run.data.params}
        client.log_batch(self._run_id, params=[self._entities.Param(*param) for param in new.items()])
        return self._run_id

    def write_media(self, step: int, media: Mapping[str, MediaFile], time: float) -> None:
        """Sends images, sounds and texts; MLflow shows no histograms."""
        for name, file in media.items():
            key = _NOT_IN_KEYS.sub("_", name)
            if file.suffix == ".png":
                image = Image.open(io.BytesIO(file.data))
                self._client.log_image(self._run_id, image, key=key, step=step, timestamp=int(time * 1000))
            elif file.suffix in (".md", ".wav"):
                with tempfile.TemporaryDirectory() as directory:
                    (path := pathlib.Path(directory, f"{step}{file.suffix}")).write_bytes(file.data)
                    self._client.log_artifact(self._run_id, str(path), f"media/{key}")

    def write(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        """Sends a row."""
        metrics = [
            self._entities.Metric(_NOT_IN_NAMES.sub("_", name), value, int(time * 1000), step)
            for name, value in numbers.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def write_file(self, name: str, path: str, step: int) -> None:
        """Sends a file to the artifact directory of its name, and a directory to one of its step below."""
        if os.path.isdir(path):
            self._client.log_artifacts(self._run_id, path, f"{name}/{step}")
        else:
            self._client.log_artifact(self._run_id, path, name)

    def on_error(self, error: BaseException) -> None:
        """Marks the run as failed, or as killed if it was interrupted."""
        self._status = "FAILED" if isinstance(error, Exception) else "KILLED"

    def close(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._run_id, self._status)


def _import(package: str, writer: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(f"{writer} needs {package}, which is not installed: pip install {package}.") from None
