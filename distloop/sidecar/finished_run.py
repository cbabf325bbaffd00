"""Finished run: `--evaluate` and `--predict`, with a checkpoint of the workdir in place of training.

    run_instead(trainer, read_arguments(train, evals, {}))              # ends the process

The trainer imports this module where one of these settings is given. The workdir is only read.
"""

import json
import math
import os
import tempfile

from distloop.data.source import Passes
from distloop.evaluation.evaluation import EvalLoop, make_evaluations
from distloop.evaluation.prediction import Predictor
from distloop.keras_models.fit_arguments import FitData
from distloop.run.assembly import reading
from distloop.trainer import Trainer
from distloop.training.action import Report
from distloop.urls import expand
from distloop.workdir.directory import fetch_reports
from distloop.workdir.run_files import manifests_of


def run_instead(trainer: Trainer, data: FitData) -> None:
    """Evaluates, or writes predictions, in place of a call of `fit`, and ends the process.

    It prints one JSON object: `step`, what `evaluate` asks for, by the names of `metrics.jsonl` and null where it has
    null, and the directories with predictions.

    Args:
        trainer: that was given the settings.
        data: of the call; what it would train on is not read.

    Raises:
        ValueError: if there is no such checkpoint, or nothing to evaluate on.
        SystemExit: with code 0.
    """
    config, state = trainer.config, trainer.state
    given = f"evaluate={config.evaluate}" if config.evaluate else f"predict={config.predict!r}"
    which = config.evaluate or "newest"
    _require_checkpoint(config.workdir, which, given)
    if not data.evals:
        raise ValueError(f"{given} was given, and fit has no evals: give fit(train, evals={{'test': test}}).")
    passes = Passes(trainer.strategy, reading(state, config))
    eval_loop = EvalLoop(state, eager=config.eager, max_traces=config.max_traces)
    evaluations = make_evaluations(data.evals, config, passes, eval_loop, Predictor(state, eager=config.eager))
    trainer.build(evaluations[0].data)
    eval_loop.build_metrics(passes.source(evaluations[0].data, 1))
    at = f"{config.workdir}/checkpoints/{int(which)}" if which.isdecimal() else None
    trainer.restore(at, which="newest" if at else which)
    shown: dict[str, float | str | None] = {"step": trainer.step}
    for evaluation in evaluations:
        if config.evaluate:
            numbers = evaluation(Report(trainer.step, trainer.step, {}, state))
            shown |= {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        if config.predict:
            path = shown[f"{evaluation.name}/predictions"] = os.path.join(expand(config.predict), evaluation.name)
            limits = getattr(data.evals[evaluation.name], "batches", 0), config.limit_eval_batches
            trainer.predict(evaluation.data, batches=min(filter(None, limits), default=0), path=path)
    if trainer.workers.is_chief:
        print(json.dumps(shown), flush=True)
    raise SystemExit(0)


def _require_checkpoint(workdir: str, which: str, given: str) -> None:
    """Raises a ValueError if a workdir has no checkpoint, or `which` is a step without one, or no word for one."""
    if which not in ("newest", "best") and not which.isdecimal():
        raise ValueError(f"{given} was given: give newest, best or the step of a checkpoint.")
    with tempfile.TemporaryDirectory(prefix="distloop_") as root:  # for the files of a run at a URL
        path = fetch_reports(workdir, root)
        if not os.path.isdir(path):
            raise ValueError(f"{given} was given, and there is no workdir {workdir!r}: give that of a run.")
        steps = sorted(manifests_of(path))
    if not steps:
        raise ValueError(f"{given} was given, and no checkpoint is in {workdir!r}: give the workdir of a run.")
    if which.isdecimal() and int(which) not in steps:
        known = f"{'..., ' * (len(steps) > 9)}{', '.join(map(str, steps[-9:]))}"
        raise ValueError(f"{given} was given, and {workdir!r} has checkpoints of the steps {known}: give one of these.")
