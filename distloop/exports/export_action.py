"""`Export`: the action that exports the model while it trains, into directories that are numbered by step.

    trainer.fit(train, evals={"test": test}, actions=[
        distloop.Export(trainer.export, "models/digits", metric="test/accuracy", keep=3),
    ])                                                            # models/digits/1500, models/digits/2000, ...

TensorFlow Serving reads this layout, and serves the highest number. It does not know how a model is exported.
"""

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from distloop import atomic_files
from distloop.actions.save import BestSoFar
from distloop.distributed import collectives
from distloop.errors import first_line
from distloop.exports.export import check_suffix
from distloop.log import log
from distloop.settings.durations import require_integer
from distloop.training.action import Action, Report
from distloop.urls import absolute, expand, require_disk
from distloop.variables import WEIGHT_FILES


class Export(Action):
    """Exports to `<directory>/<step>`, periodically or where a metric is better than before; keeps the last exports.

    An older export of the run is removed once its successor is complete. Nothing else in the directory is touched: not
    the versions of another run, which may be served from there.
    """

    phase = "exporting"
    has_fixed_metrics = True

    def __init__(
        self,
        export: Callable[[str], None],
        directory: str,
        *,
        every: int | str = 0,
        metric: str = "",
        mode: str = "auto",
        keep: int = 3,
        suffix: str = "",
    ):
        """Stores the rule.

        Args:
            export: writes an export to a path atomically: `trainer.export`.
            directory: of the exports; made if it is missing.
            every: a duration; 0: at the end only.
            metric: instead of `every`: a name in the report, such as "test/accuracy".
            mode: "min" if smaller is better, "max" if larger is; "auto": as the metric's name says.
            keep: number of the last exports to keep.
            suffix: of the paths, such as ".keras"; empty: SavedModels.

        Raises:
            ValueError: for another mode, a name that does not say what is better, if `keep` is below 1, both `every`
                and `metric` are given, the suffix is of no export, or the directory is a URL.
        """
        require_integer("Export", 1, keep=keep)
        if every and metric:
            raise ValueError(
                f"Export was given every={every!r} and metric={metric!r}: give one; with a metric it exports whenever "
                "that is better than before."
            )
        if not callable(export):
            raise ValueError(f"Export was given {export!r}; its first argument writes an export: give trainer.export.")
        check_suffix(suffix)
        require_disk(
            directory,
            "Export was given {}, and keeps its exports in a directory on a disk: give one, such as "
            "os.path.join(config.local_workdir, 'exports'), which is uploaded with a workdir in a bucket.",
        )
        self.name = f"Export({os.fspath(directory)})"
        self.every = None if metric else every
        self.directory = absolute(expand(directory))
        self.metric = self.required_metric = metric
        self.keep = keep
        self._best = BestSoFar("Export", metric, mode if metric or mode != "auto" else "min")  # of those exported
        self.written: list[int] = []  # the steps of this run's exports that are kept, in order
        self.num_failed = 0
        self._failure: Exception | None = None  # of the last export
        self._export = export
        self._suffix = suffix

    def on_start(self, report: Report) -> None:
        """Logs exports of later steps than the run's, which a server would prefer.

        Raises:
            ValueError: if the model has no `predict_fn` to export.
        """
        if self._suffix not in (".keras", ".onnx", *WEIGHT_FILES) and report.state.spec.predict_fn is None:
            raise ValueError(f"{self.name} exports predict_fn, and ModelSpec has none: give ModelSpec(predict_fn=...).")
        later = [step for step in self._steps() if step > report.step]
        if later and collectives.is_chief(report.state.strategy):
            log.warning(
                "%r holds exports of later steps, up to %d, than this run's, %d: they stay, but for one of a step that "
                "this run exports, too. Remove them, or give another directory.",
                self.directory,
                later[-1],
                report.step,
            )

    def __call__(self, report: Report) -> None:
        """Exports, unless the metric is no better, and removes the oldest exports; a failure is logged.

        Raises:
            ValueError: if no metric of that name is ever measured.
        """
        if self.metric and not self._best.is_beaten(report):
            return
        path, self._failure = self._path(report.step), None
        try:
            self._export(path)
        except Exception as error:  # as of a checkpoint: a full disk raises many kinds of errors
            self._failure = error
            self.num_failed += 1
            log.error(
                "The export of step %d could not be written (%s), number %d of this run that failed; training goes on.",
                report.step,
                first_line(error),
                self.num_failed,
            )
        if any(collectives.gather(report.state.strategy, self._failure is not None)):  # the chief alone writes
            return
        if self.metric:
            self._best.value = float(report.metrics[self.metric])
        if collectives.is_chief(report.state.strategy) and os.path.exists(path):  # a dry run exports elsewhere
            self.written = [*(step for step in self.written if step < report.step), report.step]
            while len(self.written) > self.keep:
                path = self._path(self.written.pop(0))
                try:
                    atomic_files.delete(path)  # in one step, as seen by a server
                except FileNotFoundError:
                    pass
                except OSError as error:
                    log.warning("The old export %s could not be removed: %s.", path, error.strerror or error)

    def on_end(self, report: Report) -> None:
        """Raises the error of the last export, if that failed, when the run has been saved.

        Raises:
            OSError: if it could not be written.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise OSError(
                f"The last export to {self.directory!r} could not be written ({first_line(failure)}): make room, or "
                "correct the model, and call trainer.export."
            ) from failure

    def run_files(self) -> list[tuple[str, str, int]]:
        """Returns the exports that are kept, for writers."""
        name = os.path.basename(os.path.normpath(self.directory)) + self._suffix
        return [(name, self._path(step), step) for step in self.written]

    def _path(self, step: int) -> str:
        return os.path.join(self.directory, f"{step}{self._suffix}")

    def _steps(self) -> list[int]:
        """Returns the steps of the exports in the directory, in order."""
        names = os.listdir(self.directory) if os.path.isdir(self.directory) else []
        matches = [re.fullmatch(rf"(0|[1-9]\d*){re.escape(self._suffix)}", name) for name in names]
        steps = sorted(int(match[1]) for match in matches if match)
        file = "" if self._suffix else "/saved_model.pb"
        return [step for step in steps if os.path.isfile(self._path(step) + file)]

    def get_state(self) -> dict[str, Any]:
        """Returns the best value, and the steps of the exports that are kept."""
        return {"best": self._best.value, "written": self.written}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `get_state` returned."""
        self._best.value, self.written = state["best"], list(state.get("written", []))  # older versions kept none
