"""Owns what happens between loops: evaluate, stop early, write, or whatever the user likes.

An action is any callable with an attribute `every` (steps). It gets a `Report` and returns new numbers or None; they
join the report of the next action, so the list is the data flow: `[Evaluate, StopEarly, Write]`. What is to be shown
and is no number (`distloop.Images`, ...) comes up the same way, beside the numbers. It does not know the loop.

    def say(report):
        print(report.step, report.metrics["loss"])
    say.every = 100
    trainer.fit(dataset, steps=1000, actions=[say])
"""

import contextlib
import functools
import math
import numbers
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol

from absl import logging

from distloop.actions import schedule
from distloop.distributed.pipeline import Stages
from distloop.distributed.preemption import Interrupted
from distloop.monitoring import device_usage, memory
from distloop.monitoring.media import Display, Ready
from distloop.monitoring.profiler import Profile
from distloop.monitoring.tensorboard import SummaryWriter
from distloop.monitoring.timing import Clock

_MEMORY_SECS = 1.0  # asking how much memory a process has held takes longer than a small step
_MOST_SECS = 1.0  # that a row waits for others before they are written to files


@dataclass(frozen=True)
class Report:
    """What an action gets to see.

    Attributes:
        step: steps done.
        until: the last step of the run.
        metrics: name -> number: training values are means since the last log, evaluations stand as `test/accuracy`.
        state: everything that training changes, a `TrainState`.
        stop_reason: why an action before this one ended the run here; None: it did not.
        time: when the last step ended; Unix, seconds.
        displays: name -> what actions returned to be shown that is no number.
        is_complete: whether a number that is not there will never be: all that reports any has done so.
    """

    step: int
    until: int
    metrics: Mapping[str, float]
    state: Any
    stop_reason: str | None = None
    time: float = 0.0
    displays: Mapping[str, Display] = field(default_factory=dict)
    is_complete: bool = False

    def require(self, metric: str, asker: str, *, was_seen: bool) -> None:
        """Refuses a metric that is not there and will not come; at the end of the run, where that would cost it, tells.

        Args:
            metric: its name.
            asker: who wants it.
            was_seen: whether it was there before.

        Raises:
            ValueError: if all that could have reported it did report, or something else of the same name before the
                slash came without it.
        """
        if metric in self.metrics or was_seen:
            return
        prefix, _, rest = metric.partition("/")
        has_siblings = bool(rest) and any(name.startswith(f"{prefix}/") for name in self.metrics)
        # A run that another action ends between two evaluations never measured it, and that is no mistake.
        is_over = self.step >= self.until and self.stop_reason is None
        if is_over or self.is_complete or has_siblings:
            wrong = f"{asker} was given the metric {metric!r}; there are {sorted(self.metrics)}: name one of them."
            if not is_over:
                raise ValueError(wrong)
            logging.error("%s", wrong)


class Action(Protocol):
    """Comes due each `every` steps and at the end of the run; 0: at the end only; None: whenever another one is due."""

    every: int | None

    def __call__(self, report: Report) -> Mapping[str, float | Display] | None:
        """Acts, and returns new numbers, or what else is to be shown, by name; or None."""


class StopTraining(Exception):  # noqa: N818 - a request, not an error
    """Raised by an action to end the run; the actions after it still see this boundary."""

    def __init__(self, reason: str):
        """Keeps the reason, which is told to the user."""
        super().__init__(reason)
        self.reason = reason


class Evaluate:
    """Evaluates on a dataset; reports `<name>/<metric>`."""

    phase = "evaluation"

    def __init__(self, name: str, evaluate: Callable[[], Mapping[str, float]], every: int):
        """Keeps what to call.

        Args:
            name: of the evaluation, such as "test".
            evaluate: gives the metrics.
            every: steps.
        """
        self.name = name
        self.every: int | None = every
        self._evaluate = evaluate

    def __call__(self, report: Report) -> Mapping[str, float]:
        """Evaluates."""
        return {f"{self.name}/{key}": value for key, value in self._evaluate().items()}


class Utilization:
    """Reports how much of the machine the run uses: peak memory, and floating-point operations where they are known."""

    every: int | None = None
    phase = "logging"
    only_writes = True

    def __init__(self, flops_per_example: float | None = None, peak_flops: float | None = None):
        """Keeps what is known.

        Args:
            flops_per_example: floating-point operations that training takes for one.
            peak_flops: what all devices together can do, in operations a second.
        """
        self._flops_per_example = flops_per_example
        self._peak_flops = peak_flops
        self._peaks: dict[str, float] = {}
        self._peaks_time = -math.inf

    def __call__(self, report: Report) -> dict[str, float]:
        """Works it out from the report's examples per second; looks at the memory once a second and at the end."""
        if report.time > self._peaks_time + _MEMORY_SECS or report.step >= report.until:
            self._peaks, self._peaks_time = memory.peaks(), report.time
        found = dict(self._peaks)
        if self._flops_per_example:
            found["model_flops_per_sec"] = self._flops_per_example * report.metrics["examples_per_sec"]
            if self._peak_flops:
                found["model_flops_utilization"] = found["model_flops_per_sec"] / self._peak_flops
        return found


class StageUsage:
    """Reports how much memory each stage of a network takes, and how busy its device is.

    Of GPUs, the most memory that was taken, each time; of CPUs, once `--profile` has shown some steps, the variables'
    and what a step adds to them. The share of the time with an operation at work on the device comes from the profile,
    too. On several workers, the chief's. GPUs: untested.
    """

    every: int | None = None
    phase = "logging"
    only_writes = True

    def __init__(self, networks: Sequence[Stages], profile: Profile):
        """Keeps where they are, and the profile to read when it is written."""
        self._devices = [device for network in networks for device in network.devices]
        self._profile = profile
        self._was_read = False

    def __call__(self, report: Report) -> dict[str, float]:
        """Works it out; stages that share a device tell the same."""
        used = {}
        if self._profile.is_written and not self._was_read:
            self._was_read = True
            used = device_usage.read_usage(self._profile.directory)
        taken = report.state.bytes_by_device() if used else {}
        found = {}
        for stage, device in enumerate(self._devices):
            if not device.startswith("CPU"):
                found[f"stage_{stage}/device_memory_gb"] = memory.device_peak_gb(device)
            elif device in used:
                found[f"stage_{stage}/device_memory_gb"] = (taken[device] + used[device].step_bytes) / 1e9
            if device in used:
                found[f"stage_{stage}/device_busy_share"] = used[device].busy_share
        return found


class Summary:
    """Shows what a function makes of the state: images, sounds, texts, histograms, curves, numbers.

        noise = tf.random.normal([16, LATENT])
        distloop.Summary("samples", lambda state: distloop.Images(state.model(noise)), every=500)

    A name that begins with that of an evaluation, as in `test/confusion`, stands beside its charts.
    """

    def __init__(self, name: str, fn: Callable[[Any], Any], every: int = 0):
        """Keeps what to call.

        Args:
            name: of what it shows.
            fn: gets the `TrainState`, and returns something to show, a number, or a dict of them by name. The weights
                are those that train; `with state.averaged():` puts the average in their place. Every worker calls it.
            every: steps; 0: at the end only.
        """
        self.name = name
        self.every: int | None = every
        self._fn = fn

    def __call__(self, report: Report) -> dict[str, float | Display]:
        """Calls the function.

        Raises:
            ValueError: if it returned something else.
        """
        found = self._fn(report.state)
        named = found.items() if isinstance(found, Mapping) else [("", found)]
        shown = {f"{self.name}/{key}" if key else self.name: value for key, value in named}
        for name, value in shown.items():
            if not isinstance(value, (Display, numbers.Real)) and not getattr(value, "shape", None) == ():
                raise ValueError(
                    f"The function of Summary({self.name!r}) returned a {type(value).__name__} as {name!r}; it returns "
                    "numbers, or what says how to show it: distloop.Images(array), Text, Audio, Histogram, PRCurve or "
                    "ConfusionMatrix."
                )
        return {name: value if isinstance(value, Display) else float(value) for name, value in shown.items()}


class StopEarly:
    """Ends the run when a metric has not become better for a while."""

    every: int | None = None

    def __init__(self, metric: str, patience: int = 3, *, mode: str = "min", min_delta: float = 0.0):
        """Keeps the rule.

        Args:
            metric: a name in the report, such as "test/loss"; looked at whenever it was measured.
            patience: how many measurements in a row may be no better than the best.
            mode: "min" or "max": what is better.
            min_delta: by how much, at least.

        Raises:
            ValueError: for another mode, or a patience below 1.
        """
        if mode not in ("min", "max"):
            raise ValueError(
                f"mode={mode!r} was given to StopEarly; say 'min' if smaller is better, 'max' if larger is."
            )
        if patience < 1:
            raise ValueError(f"patience={patience} was given to StopEarly; it waits for 1 measurement at least.")
        self.metric = metric
        self.patience = patience
        self.mode = mode
        self.min_delta = min_delta
        self.best = math.inf
        self.waited = 0

    def get_state(self) -> dict[str, Any]:
        """Gives what a checkpoint is to hold of it."""
        return {"best": self.best, "waited": self.waited}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `get_state` gave."""
        self.best, self.waited = state["best"], state["waited"]

    def __call__(self, report: Report) -> None:
        """Looks at the metric.

        Raises:
            StopTraining: when patience is over.
            ValueError: if nothing of that name is ever measured.
        """
        report.require(self.metric, "StopEarly", was_seen=self.best != math.inf or self.waited > 0)
        if self.metric not in report.metrics:
            return
        value = report.metrics[self.metric]
        cost = value if self.mode == "min" else -value
        if cost < self.best - self.min_delta:
            self.best, self.waited = cost, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = self.best if self.mode == "min" else -self.best
            times = "measurement" if self.waited == 1 else "measurements"
            raise StopTraining(f"{self.metric} was no better than {best:.6g} for {self.waited} {times}")


class SaveBest:
    """Keeps the checkpoints of the steps where a metric was best, beside the newest; `checkpoints/best.json` says so.

    It is asked at every boundary where the metric was measured; the checkpoint is written then, whatever
    `checkpoint_every` is.
    """

    every: int | None = None

    def __init__(self, metric: str, mode: str = "min", keep: int = 1):
        """Keeps the rule.

        Args:
            metric: a name in the report, such as "test/accuracy".
            mode: "min" or "max": what is better.
            keep: how many of the best.

        Raises:
            ValueError: for another mode, or fewer than 1.
        """
        if mode not in ("min", "max"):
            raise ValueError(
                f"mode={mode!r} was given to SaveBest; say 'min' if smaller is better, 'max' if larger is."
            )
        if keep < 1:
            raise ValueError(f"keep={keep} was given to SaveBest; it keeps 1 at least.")
        self.metric = metric
        self.mode = mode
        self.keep = keep
        self.best: list[tuple[float, int]] = []  # value and step, the best first
        self.wants_save = False

    def __call__(self, report: Report) -> None:
        """Looks at the metric; the Save that stands after it writes.

        Raises:
            ValueError: if nothing of that name is ever measured.
        """
        report.require(self.metric, "SaveBest", was_seen=bool(self.best))
        value = report.metrics.get(self.metric)
        self.wants_save = False
        if value is None or math.isnan(value) or any(step == report.step for _, step in self.best):
            return
        ranked = sorted([*self.best, (value, report.step)], key=lambda pair: pair[0], reverse=self.mode == "max")
        self.wants_save = (value, report.step) in ranked[: self.keep]
        self.best = ranked[: self.keep]

    def get_state(self) -> dict[str, Any]:
        """Gives what a checkpoint is to hold of it."""
        return {"best": self.best}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `get_state` gave."""
        self.best = [(value, step) for value, step in state["best"]]


class Save:
    """Saves a checkpoint each `every` steps; with None, whenever a `SaveBest` before it wants one."""

    phase = "saving"

    def __init__(
        self,
        save: Callable[[Report, dict[str, list[int]]], None],
        every: int | None,
        bests: Sequence[SaveBest] = (),
    ):
        """Keeps what to call.

        Args:
            save: writes a checkpoint of the run; gets the report, and the steps to keep by metric.
            every: steps; 0: only at the end; None: see above.
            bests: who may want one.
        """
        self.every = every
        self._save = save
        self._bests = bests

    def __call__(self, report: Report) -> None:
        """Saves."""
        if self.every is not None or any(best.wants_save for best in self._bests):
            self._save(report, {best.metric: [step for _, step in best.best] for best in self._bests})
            for best in self._bests:
                best.wants_save = False


class Agree:
    """Ends the run on every worker when an action ended it on one; stands behind the user's actions."""

    every: int | None = None
    only_writes = True  # where no action is due it does nothing, so that a loop need not end for it

    def __init__(self, gather: Callable[[float], Any], actions: Sequence[Action]):
        """Keeps what to call.

        Args:
            gather: collects a number of every worker, on every worker.
            actions: of the user's, which may end the run.
        """
        self._gather = gather
        self._actions = actions

    def __call__(self, report: Report) -> None:
        """Asks all.

        Raises:
            StopTraining: where another worker stops.
        """
        if not any(a.every is None or schedule.is_due(report.step, a.every, report.until) for a in self._actions):
            return
        stops = self._gather(report.stop_reason is not None)
        if report.stop_reason is None and any(stops):
            raise StopTraining(f"an action on worker {list(stops).index(1)} ended the run")


class Write:
    """Hands the numbers to writers: TensorBoard, metrics.jsonl, the console; at every boundary.

    Files get their rows together, a second later at most: written one by one they would take a small step's caches
    away each time. A disk that is full or gone stops all that is written to files, not the training; one log line
    tells. As a context, it closes the writers in the end, and tells TensorBoard how the run went.
    """

    every: int | None = None
    phase = "logging"
    only_writes = True  # reads nothing of the state, so the loop may call it late

    def __init__(self, writers: Sequence[Any]):
        """Keeps the writers.

        Args:
            writers: objects with `write(step, metrics, time)` and `close()`; those that write to files have a `path`,
                and `flush()`.
        """
        self.writers = list(writers)
        self._lock = threading.Lock()  # held by whoever writes to files
        self._rows: list[Report] = []  # for files
        self._timer: threading.Timer | None = None  # writes them, if nobody does so before
        self._error: Exception | None = None  # of the timer

    def __call__(self, report: Report) -> None:
        """Shows a row now, and writes it to files within a second."""
        for writer in self.writers:
            if not _is_of_files(writer):
                writer.write(report.step, report.metrics, report.time)
        if any(map(_is_of_files, self.writers)):
            displays = {name: Ready(display.encode()) for name, display in report.displays.items()}
            self._rows.append(replace(report, displays=displays) if displays else report)
        if self._error is not None:
            self.flush()
        elif self._rows and self._timer is None:
            self._timer = threading.Timer(_MOST_SECS, self._flush_late)
            self._timer.daemon = True
            self._timer.start()

    def flush(self) -> None:
        """Writes all rows to their files, where they stay even if this process is killed."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            error, self._error = self._error, None
            if error is not None:
                raise error
            if self._rows:
                while self._rows:
                    self._with_files(functools.partial(_write, self._rows.pop(0)))
                self._with_files(lambda writer: writer.flush())

    def __enter__(self) -> "Write":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the writers; a run that was interrupted counts as running, as the same command goes on with it."""
        try:
            self.flush()
        finally:
            with self._lock:
                self._with_files(functools.partial(_close, None if isinstance(error, Interrupted) else error is None))
            for writer in self.writers:
                if not _is_of_files(writer):
                    writer.close()

    def _flush_late(self) -> None:
        try:
            self.flush()
        except Exception as error:
            self._error = error  # to be raised where somebody sees it

    def _with_files(self, act: Callable[[Any], None]) -> None:
        """Does something with each writer of files; goes on without them where one fails."""
        writers = [writer for writer in self.writers if _is_of_files(writer)]
        for writer in writers:
            try:
                act(writer)
            except OSError as error:
                logging.error(
                    "%s cannot be written (%s): the run goes on and writes no more numbers to files.",
                    writer.path,
                    error.strerror or error,
                )
                self.writers = [writer for writer in self.writers if not _is_of_files(writer)]
                for left in writers:
                    with contextlib.suppress(OSError):
                        left.close()
                return


def _is_of_files(writer: Any) -> bool:
    return hasattr(writer, "path")


def _write(report: Report, writer: Any) -> None:
    writer.write(report.step, report.metrics, report.time)
    if report.displays and isinstance(writer, SummaryWriter):
        writer.show(report.step, report.displays, report.time)


def _close(has_succeeded: bool | None, writer: Any) -> None:
    if isinstance(writer, SummaryWriter):
        writer.close(has_succeeded)
    else:
        writer.close()


_ALWAYS_REPORTS = (Evaluate, Utilization, StopEarly, SaveBest)  # the same names each time that they are due


def run(actions: Sequence[Action], report: Report, clock: Clock | None = None) -> tuple[dict[str, float], str | None]:
    """Runs the actions that are due, each on what those before it found.

    Args:
        actions: in order.
        report: what the first of them gets.
        clock: counts the time of an action to its attribute `phase`; without one to `other`.

    Returns:
        All numbers, and the reason to stop, if any action gave one: those after it are called as at the end of the run.
    """
    metrics = dict(report.metrics)
    reason = None
    clock = clock or Clock()
    report = replace(report, is_complete=True)
    for action in actions:
        is_due = action.every is None or schedule.is_due(report.step, action.every, report.until)
        if not is_due or not isinstance(action, _ALWAYS_REPORTS):
            report = replace(report, is_complete=False)  # for those after it
        if not is_due:
            continue
        try:
            with clock.phase(getattr(action, "phase", "other")):
                found = action(replace(report, metrics=dict(metrics))) or {}
        except StopTraining as stop:
            reason = reason or stop.reason
            report = replace(report, until=report.step, stop_reason=reason)
            continue
        displays = {name: value for name, value in found.items() if isinstance(value, Display)}
        metrics.update({name: value for name, value in found.items() if not isinstance(value, Display)})
        if displays:
            report = replace(report, displays={**report.displays, **displays})
    return metrics, reason
