"""`Evaluation`, a dataset to evaluate on with its own schedule, and `Evaluate`, the action for it."""

import dataclasses
import numbers
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from distloop.data.feeds import Feed
from distloop.data.source import Data, Source
from distloop.errors import first_line, require_call
from distloop.log import shown
from distloop.settings import durations
from distloop.settings.durations import Plan
from distloop.training.action import Action, Report
from distloop.workdir.records import read_metrics
from distloop.workdir.run_files import Series
from distloop.workers.preemption import StopRequests

_SHORT_BYTES = 1_000_000  # of metrics.jsonl, which are read in some ten milliseconds


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A dataset to evaluate on, where it differs from the others.

        evals={"test": test, "hard": distloop.Evaluation(hard, every="1 epoch", batches=100)}

    Attributes:
        dataset: as for `fit`; finite, unless `batches` is given.
        every: how often to evaluate, a duration; 0: at the end only; None: as `Config.eval_every` says.
        batches: the number of batches to evaluate on; 0: as `Config.limit_eval_batches` says.
        loss_fn: `(batch, training) -> dict` of values per example, `[B, ...]`, in place of the values of ModelSpec's.
            Its `batch_fn` is called before.
        metrics: name -> `keras.metrics.Metric`, whose arguments this `loss_fn` returns, as for `ModelSpec`.
        rows_fn: a function of all rows on the host, as BLEU and mAP need: outputs of `predict_fn`, NumPy arrays
            `[N, ...]` in the order of the data -> dict of numbers, reported beside the others.
        predict_fn: `batch -> outputs`, `[B, ...]`, what `rows_fn` gets; None: that of ModelSpec, the first of several.

    Raises:
        ValueError: if an argument is none of these.
    """

    dataset: Data
    every: int | str | None = dataclasses.field(default=None, kw_only=True)
    batches: int = dataclasses.field(default=0, kw_only=True)
    loss_fn: Callable[[Any, bool], Mapping[str, Any]] | None = dataclasses.field(default=None, kw_only=True)
    metrics: Mapping[str, keras.metrics.Metric] | None = dataclasses.field(default=None, kw_only=True)
    rows_fn: Callable[[Any], Mapping[str, float]] | None = dataclasses.field(default=None, kw_only=True)
    predict_fn: Callable[[Any], Any] | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.every is not None and durations.normalize(self.every) is None:
            raise ValueError(f"Evaluation was given every={shown(self.every)}: give {durations.ALLOWED}, or None.")
        durations.require_integer("Evaluation", 0, batches=self.batches)
        functions = {"loss_fn": "batch, training", "rows_fn": "rows", "predict_fn": "batch"}
        for name in (name for name in functions if getattr(self, name) is not None):
            if not callable(fn := getattr(self, name)):
                raise ValueError(f"Evaluation was given {name}={fn!r}; give a function of ({functions[name]}).")
            require_call(fn, f"{name} of an Evaluation", *functions[name].split(", "))
        if self.predict_fn is not None and self.rows_fn is None:
            raise ValueError("Evaluation was given predict_fn without the rows_fn that takes its outputs: give both.")
        if self.metrics and self.loss_fn is None:
            raise ValueError("Evaluation was given metrics without a loss_fn that returns their arguments: give both.")


class Evaluate(Action):
    """Evaluates on a dataset; reports `<name>/<metric>`.

    Attributes:
        stop_requests: of the run, which leave an evaluation before its end; None: nothing does.
    """

    phase = "evaluation"
    has_fixed_metrics = True

    def __init__(
        self,
        name: str,
        evaluate: Callable[[StopRequests | None], Mapping[str, float]],
        every: int | str,
        data: Any = None,
        names: Callable[[], Collection[str] | None] = lambda: None,
        *,
        has_values_of_step: bool = True,
        check: Callable[[bool], None] = lambda is_repeated: None,
    ):
        """Stores the function.

        Args:
            name: name of the evaluation, such as "test".
            evaluate: returns the metrics by name, unless it is asked to stop.
            every: how often, a duration.
            data: the dataset.
            names: returns the names of the metrics before there are any; None: they are not known.
            has_values_of_step: whether the values are those of a training step, by name.
            check: raises a ValueError if a mistake can be seen before the first step; gets whether the evaluation is to
                run more than once.
        """
        self.name = name
        self.every = every
        self.data = data
        self.names = names
        self.has_values_of_step = has_values_of_step
        self._check = check
        self.stop_requests: StopRequests | None = None
        self._evaluate = evaluate
        self.rows: list[dict[str, float]] = []  # `step`, and one metric: the best and the last value of each

    def check(self, plan: Plan, report: Report, runs_first: bool = False) -> None:
        """Raises a ValueError if a mistake can be seen before the first step.

        Args:
            plan: of the run.
            report: of its beginning.
            runs_first: whether it also runs before the first step.
        """
        steps, *others = plan.period(self.every)
        # What is due by time or tokens may come before the end.
        self._check(runs_first or any(others) or bool(steps and (report.step // steps + 1) * steps < report.until))

    def __call__(self, report: Report) -> Mapping[str, float]:
        """Returns the metrics, with the evaluation's name before each.

        Raises:
            Interrupted: on every worker, if one is asked to stop before the end.
        """
        numbers = self._evaluate(self.stop_requests)
        metrics = {f"{self.name}/{key}": value for key, value in numbers.items()}
        rows = [*self.rows, *({"step": report.step, name: float(value)} for name, value in metrics.items())]
        self.rows = [row for name in metrics for row in _best_and_last([row for row in rows if name in row], name)]
        return metrics

    def get_state(self) -> list[dict[str, float]]:
        """Returns the best and the last values, for a run that goes on."""
        return self.rows

    def set_state(self, state: list[dict[str, float]]) -> None:
        """Restores a state that `get_state` returned."""
        self.rows = state


def trace_first(
    name: str, source: Source, tracers: Sequence[Callable[[Source], None]], reads_twice: bool, is_repeated: bool
) -> None:
    """Traces what an evaluation computes, so that a mistake in its data or functions is said before the first step.

    Raises:
        ValueError: if there is one, the data is empty, or it can be read only once and is read again.
    """
    try:
        if (reads_twice or is_repeated) and isinstance(source.feed, Feed):
            source.feed.require_restart()
        for trace in tracers:
            trace(source)
    except Exception as error:
        text = str(error)
        if not isinstance(error, ValueError) or "\n" in text:  # Keras prints what a layer says in bold
            said = re.search(r"\x1b\[1m(.*?)\x1b\[0m", text, re.DOTALL)
            text = f"{type(error).__name__}: {' '.join(said[1].split()) if said else first_line(error)}."
        explained = ValueError(f"The evaluation {name!r} cannot run: {text}")
        raise explained.with_traceback(error.__traceback__) from error.__cause__


def with_rows(
    evaluate: Callable[..., Mapping[str, float]],
    predict: Callable[..., Any],
    rows_fn: Callable[[Any], Any],
    stop_requests: StopRequests | None,
) -> dict[str, float]:
    """Returns the numbers of an evaluation, and those that `rows_fn` computes from all rows."""
    means = evaluate(stop_requests)
    values = rows_fn(predict(stop_requests=stop_requests))
    if not isinstance(values, Mapping) or not all(_is_number(value) for value in values.values()):
        raise ValueError(f"rows_fn returned {shown(values)}; give a dict of numbers by name, of all rows.")
    if both := sorted(set(means) & set(values)):
        raise ValueError(f"rows_fn returned {both[0]!r}, which loss_fn or a metric reports, too: give another name.")
    return {**means, **{name: float(value) for name, value in values.items()}}


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or np.ndim(value) == 0 and hasattr(value, "__float__")


def earlier_rows(workdir: str, evaluations: Sequence[Evaluate]) -> list[Mapping[str, float]]:
    """Returns the rows of a run that goes on; of a long one only the best and the last values of its evaluations."""
    if os.path.getsize(os.path.join(workdir, "metrics.jsonl")) < _SHORT_BYTES:
        return list(read_metrics(workdir))
    return sorted((row for evaluation in evaluations for row in evaluation.rows), key=lambda row: row["step"])


def _best_and_last(rows: Sequence[dict[str, float]], name: str) -> list[dict[str, float]]:
    series = Series(name, [int(row["step"]) for row in rows], [row[name] for row in rows])
    best = [{"step": series.best[1], name: series.best[0]}] if series.best else []
    return [*best, rows[-1]] if best != [rows[-1]] else best
