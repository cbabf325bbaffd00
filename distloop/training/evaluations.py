"""Evaluations: an action for each dataset that `fit` evaluates on, with its own schedule, limit and values.

evals = {"test": test, "hard": Evaluation(hard, every=100)}
actions = make_evaluations(evals, config, passes, eval_loop, predictor)
"""

import functools
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distloop.actions.evaluate import Evaluate, Evaluation
from distloop.config import Config
from distloop.data.passes import Passes
from distloop.data.source import Data, Source
from distloop.distributed.preemption import StopRequests
from distloop.errors import first_line
from distloop.training.evaluation import EvalLoop
from distloop.training.predictor import Predictor


def make_evaluations(
    evals: Mapping[str, Data | Evaluation], config: Config, passes: Passes, eval_loop: EvalLoop, predictor: Predictor
) -> list[Evaluate]:
    """Returns an action for each dataset to evaluate on.

    Raises:
        ValueError: if a dataset breaks a rule.
    """
    evaluations = []
    for name, data in evals.items():
        evaluation = data if isinstance(data, Evaluation) else Evaluation(data)
        limits = [limit for limit in (evaluation.batches, config.limit_eval_batches) if limit]
        source, limit = passes.source(evaluation.dataset, may_be_endless=bool(limits)), min(limits, default=0)
        loop = eval_loop.with_values(evaluation.loss_fn, evaluation.metrics)
        evaluate = functools.partial(loop.evaluate, source, limit)
        tracers: list[Callable[[Source], None]] = [Source.require_batch, loop.trace]
        if evaluation.rows_fn is not None:
            rows_predictor = predictor.with_function(evaluation.predict_fn)
            predict = functools.partial(rows_predictor.predict, source, limit=limit)
            evaluate = functools.partial(_with_rows, evaluate, predict, evaluation.rows_fn)
            tracers.append(rows_predictor.trace)
        every = config.eval_every if evaluation.every is None else evaluation.every
        check = functools.partial(_check, name, source, tracers)
        names = functools.partial(loop.names, source) if evaluation.rows_fn is None else lambda: None
        options: dict[str, Any] = {"has_values_of_step": evaluation.loss_fn is None, "check": check}
        evaluations.append(Evaluate(name, evaluate, every, evaluation.dataset, names, **options))
    return evaluations


def _check(name: str, source: Source, tracers: Sequence[Callable[[Source], None]], is_repeated: bool) -> None:
    """Traces what an evaluation computes, so that a mistake in its data or functions is said before the first step.

    Raises:
        ValueError: if there is one, the data is empty, or it can be read only once and `is_repeated`.
    """
    try:
        if is_repeated and source.feed is not None:
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


def _with_rows(
    evaluate: Callable[..., Mapping[str, float]],
    predict: Callable[..., Any],
    rows_fn: Callable[[Any], Any],
    stop_requests: StopRequests | None,
) -> dict[str, float]:
    """Returns the numbers of an evaluation, and those that `rows_fn` computes from all rows."""
    means = evaluate(stop_requests)
    values = rows_fn(predict(stop_requests=stop_requests))
    if not isinstance(values, Mapping) or not all(_is_number(value) for value in values.values()):
        raise ValueError(f"rows_fn returned {values!r:.100}; it returns a dict of numbers by name, of all rows.")
    if both := sorted(set(means) & set(values)):
        raise ValueError(f"rows_fn returned {both[0]!r}, which loss_fn or a metric reports, too: give another name.")
    return {**means, **{name: float(value) for name, value in values.items()}}


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or np.ndim(value) == 0 and hasattr(value, "__float__")
