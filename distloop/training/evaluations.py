"""Evaluations: an action for each dataset that `fit` evaluates on, with its own schedule, limit and values.

evals = {"test": test, "hard": Evaluation(hard, every=100)}
actions = make_evaluations(evals, config, passes, eval_loop, predictor)
"""

import functools
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distloop.actions.evaluate import Evaluate, Evaluation
from distloop.config import Config
from distloop.data.passes import Passes
from distloop.data.source import Data
from distloop.distributed.preemption import StopRequests
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
        if evaluation.rows_fn is not None:
            predict = functools.partial(predictor.with_function(evaluation.predict_fn).predict, source, limit=limit)
            evaluate = functools.partial(_with_rows, evaluate, predict, evaluation.rows_fn)
        every = config.eval_every if evaluation.every is None else evaluation.every
        names = functools.partial(loop.names, source) if evaluation.rows_fn is None else lambda: None
        is_step = evaluation.loss_fn is None
        evaluations.append(Evaluate(name, evaluate, every, evaluation.dataset, names, has_values_of_step=is_step))
    return evaluations


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
