"""Trackers: writers that send the rows of a run to Weights & Biases and MLflow, and go on with the same run there.

    trainer.fit(train, writers=[distloop.WandbWriter(project="digits"), distloop.MLflowWriter("digits")])

The packages are imported when a writer is made, so nobody else needs them. `deliveries` decides which rows come.
"""

import importlib
import re
from collections.abc import Mapping
from typing import Any

_LAST_STEP = "distloop.last_step"  # a tag of a run in MLflow
_NOT_IN_NAMES = re.compile(r"[^\w\-./: ]")  # MLflow refuses other characters in the name of a metric


class WandbWriter:
    """Sends the rows of a run to Weights & Biases, with its settings as the config."""

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
        self._exit_code = 0

    def open(self, settings: Mapping[str, Any], run_id: str | None) -> str:
        """Begins a run, or goes on with one; returns its id."""
        place = {"id": run_id, "resume": "allow", "dir": settings.get("workdir") or None}
        config = {"config": dict(settings), "allow_val_change": True}
        self._run = self._wandb.init(**{**place, **config, **self._settings})
        self._exit_code = 0
        return str(self._run.id)

    def write(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        """Sends a row."""
        self._run.log({**numbers, "_timestamp": time}, step=step)

    def on_error(self, error: BaseException) -> None:
        """Marks the run as failed."""
        code = getattr(error, "code", None)
        self._exit_code = code if isinstance(code, int) else 1

    def close(self) -> None:
        """Waits until the rows are sent, and ends the run."""
        self._run.finish(exit_code=self._exit_code)


class MLflowWriter:
    """Sends the rows of a run to MLflow, with its settings as parameters.

    Attributes:
        last_step: the step of the last row that MLflow has.
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
            tracking_uri: of the server or the directory; None: MLflow's default, or `MLFLOW_TRACKING_URI`.
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
        self.last_step: int | None = None

    def open(self, settings: Mapping[str, Any], run_id: str | None) -> str:
        """Begins a run, or goes on with one; returns its id."""
        self._client = self._mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        self._status, self.last_step = "FINISHED", None
        if run_id is None:
            experiment = self._client.get_experiment_by_name(self._experiment)
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
            run = self._client.create_run(experiment_id, run_name=self._run_name, tags=self._tags)
            params = [self._entities.Param(name, str(value)[:500]) for name, value in settings.items()]
            self._client.log_batch(run.info.run_id, params=params)
        else:
            run = self._client.get_run(run_id)
            self._client.update_run(run_id, status="RUNNING")
            self.last_step = int(run.data.tags[_LAST_STEP]) if _LAST_STEP in run.data.tags else None
        self._run_id = str(run.info.run_id)
        return self._run_id

    def write(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        """Sends a row, and its step as a tag."""
        metric, milliseconds = self._entities.Metric, int(time * 1000)
        self._client.log_batch(
            self._run_id,
            metrics=[
                metric(_NOT_IN_NAMES.sub("_", name), value, milliseconds, step) for name, value in numbers.items()
            ],
            tags=[self._entities.RunTag(_LAST_STEP, str(step))],
        )

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
        raise ValueError(
            f'{writer} needs {package}, which is not installed: pip install "distloop[{package}]".'
        ) from None
