"""Outputs: the files and lines that one call of `fit` writes, and the rows that the user's writers get.

    outputs = Outputs(call, checkpoints)
    with outputs.delivering(step, is_over):             # the user's writers are open
        outputs.announce()
        with outputs.open(progress, forward) as write:  # an action: event files, `metrics.jsonl`, the console
            ...

The chief writes the files; each worker prints what it reads.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from distloop.actions.evaluate import earlier_rows
from distloop.actions.write import JsonWriter, Write
from distloop.checkpoints.loading import left_files
from distloop.checkpoints.resume import RunCheckpoints
from distloop.distributed import collectives
from distloop.distributed.strategies import has_gpus
from distloop.errors import cannot_be_written
from distloop.log import log, say
from distloop.monitoring.console import Console, make_console
from distloop.monitoring.curves import History
from distloop.monitoring.deliveries import Deliveries
from distloop.monitoring.tensorboard import SummaryWriter
from distloop.monitoring.writers import RunFile
from distloop.run import overview
from distloop.run.fit_call import FitCall, idle_settings
from distloop.settings import flags
from distloop.training.window import Progress
from distloop.workdir import ledger


class Outputs:
    """What one call of `fit` writes and prints.

    Attributes:
        history: all rows of this call.
        console: of the chief, once `open` was called; None: it is quiet.
    """

    def __init__(self, call: FitCall, checkpoints: RunCheckpoints):
        """Touches no disk."""
        self._call, self._checkpoints = call, checkpoints
        self.history = History()
        self.console: Console | None = None
        self._has_gone_back = False

    def delivering(self, step: int, is_over: Callable[[], bool]) -> contextlib.AbstractContextManager[Deliveries]:
        """Returns a context in which the user's writers are open.

        Args:
            step: of the last row that they may have.
            is_over: returns whether there is nothing left to train.
        """
        call, config = self._call, self._call.config
        writers = call.writers if call.is_chief and not config.fast_dev_run else ()

        def files() -> Sequence[RunFile]:  # none of a run that was interrupted
            return left_files(config.workdir, call.actions) if is_over() else ()

        self._began = call.step
        self._deliveries = Deliveries(writers, config.local_workdir, config.workdir, files)
        return self._deliveries.open(step, flags.run_settings(config), is_over=is_over())

    def announce(self) -> None:
        """Writes `config.json` and `flags.txt`, and prints devices, parameters, batch and workdir."""
        call = self._call
        if call.is_chief:
            flags.write(call.config, call.config.local_workdir)
        for line in [*overview.console_lines(call.state, call.config, call.source), *idle_settings(call)]:
            call.say(line)
        if collectives.num_workers(call.state.strategy) > 1 and call.config.console != "quiet":
            say(overview.describe_shard(call.source, call.state.strategy))  # each worker prints what it reads

    def go_back(self) -> None:
        """Drops the rows behind the present step, to which the run has gone back."""
        self._deliveries.discard(self._call.step + 1)
        self._has_gone_back = True

    def open(self, progress: Progress, forward: tf.Graph | None) -> Write:
        """Returns the action that hands rows to all writers of this worker; it closes them as a context.

        Args:
            progress: of the run.
            forward: the graph of the forward pass, for TensorBoard; None: there is none.
        """
        writers: list[Any] = [self.history]
        if self._call.is_chief:
            writers += self._open_files(progress, forward) if self._call.config.local_workdir else []
            writers += [self._deliveries] if self._call.writers else []  # after `metrics.jsonl`, from which they read
            self.console = self._make_console(progress.secs) if self._call.config.console != "quiet" else None
            writers += [self.console] if self.console is not None else []
        return Write(writers, self._checkpoints.directory.verify)

    def _make_console(self, secs: float) -> Console:
        call, run, workdir = self._call, self._call.units.run, self._call.config.local_workdir
        evals, options = [evaluation.name for evaluation in call.evaluations], {"secs_left": max(0.0, run.secs - secs)}
        may_draw = call.config.console == "auto"
        console = make_console(run.last_step, call.step, may_draw=may_draw, began=self._began, evals=evals, **options)
        if workdir and call.step and call.evaluations:
            console.remember(earlier_rows(workdir, call.evaluations))  # the best value may have been before
        return console

    def _open_files(self, progress: Progress, forward: tf.Graph | None) -> list[Any]:
        """Returns the writers of the event files and of `metrics.jsonl`."""
        call, workdir = self._call, self._call.config.local_workdir
        try:
            restore_secs = self._checkpoints.times.take("restore").get("restore")
            begin_in(workdir, call, restore_secs)
            summaries = SummaryWriter(workdir, [evaluation.name for evaluation in call.evaluations], call.step)
            overview.introduce(summaries, call.state, call.config, forward)
            again = progress.open_boundary is not None or (call.config.eval_first and call.step == 0)
            path, goes_on = f"{workdir}/metrics.jsonl", restore_secs is not None or self._has_gone_back
            rows = JsonWriter(path, call.step, is_written_again=again, goes_on=goes_on)
            if rows.renamed:
                call.say(f"No checkpoint to resume from: starting over at step 0. Earlier rows: {rows.renamed}.")
        except OSError as error:
            raise cannot_be_written(workdir, error) from error
        return [summaries, rows]


def begin_in(workdir: str, call: FitCall, restore_secs: float | None) -> None:
    """Creates the workdir and records the start, unless the disk is full, on which a run may train."""
    os.makedirs(os.path.join(workdir, "train"), exist_ok=True)
    kind = "GPU" if has_gpus(call.state.strategy) else "CPU"
    facts: dict[str, Any] = {"devices": overview.num_devices(call.state), "position": call.source.position()}
    try:
        ledger.record_start(workdir, step=call.step, kind=kind, **facts, restore_secs=restore_secs)
    except OSError as error:
        log.warning("The report will lack the device-hours of this start: %s.", error.strerror or error)
