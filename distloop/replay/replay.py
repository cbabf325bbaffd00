"""Takes a step of a run again, from the checkpoint before it, and returns what went in and what came out.

    result = replay(state, config, source, units, step=1234)     # a `Replay`: batch, values, gradients, weights
    print(result)                                                # the largest losses and gradients

The run's directory is only read, and no lock is taken, so the run may be training meanwhile. The steps up to the one
before are taken as they were, and each row of `metrics.jsonl` on the way is compared.
"""

import contextlib
import dataclasses
import os
import tempfile
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.checkpoints.checkpoint import DamagedError
from distloop.checkpoints.resume import RunCheckpoints
from distloop.data.feeds import Feed
from distloop.data.iterators import read_again
from distloop.data.shards import Batch
from distloop.data.source import Source
from distloop.graph_functions import graph_function
from distloop.installed import import_part
from distloop.log import shown, speaker
from distloop.model.saved_state import SavedState
from distloop.model.state import TrainState
from distloop.monitoring.console import make_console
from distloop.replay.inspection import Replay, StepInspector, gradients_by_path
from distloop.replay.recorded_run import RecordedRun, find_difference, read_run
from distloop.run.assembly import begin_run, make_step
from distloop.run.overview import ForwardPass
from distloop.settings import contradictions, durations
from distloop.settings.config import Config, fields
from distloop.settings.durations import Period, Units
from distloop.trainer import Trainer
from distloop.training.loop import Diverged, Host, TrainLoop
from distloop.training.window import Progress
from distloop.variables import named_variables
from distloop.workdir import records
from distloop.workdir.directory import fetch_reports


def check(trainer: Trainer) -> None:
    """Checks whether a trainer can replay.

    Raises:
        ValueError: if it has no workdir, has trained, or is one of several workers.
    """
    if not trainer.config.workdir:
        raise ValueError("replay was asked for without a workdir, whose run it takes up: give Config(workdir=...).")
    if trainer.workers.count > 1:
        raise ValueError(
            f"replay was asked for on {trainer.workers.count} workers; one process replays a run of any number: start "
            "the program without the launcher, and without TF_CONFIG."
        )
    if trainer.step and not trainer.has_replayed:
        raise ValueError(
            f"replay was called on a Trainer at step {trainer.step}, whose weights it would set back: make another one."
        )


def replay(state: TrainState, config: Config, source: Source, units: Units, step: int) -> Replay:
    """Takes a step of the run in `config.workdir` again; changes the state, and no file.

    Args:
        state: of a built model.
        config: of the run, as far as it is about numbers.
        source: the data that the run trained on, at its beginning.
        units: of the run's durations.
        step: its number, from 1.

    Raises:
        ValueError: if the run has no such step, cannot be taken up before it, or is of another model or other data.
    """
    say = speaker(is_chief=True, console=config.console)
    # Nothing of this decides about a step: some settings need a workdir, and the noise two microbatches.
    names = [*(name.partition("=")[0] for name, *_ in contradictions.NEEDS), "workdir", "gradient_noise_every"]
    off: dict[str, Any] = {name: fields()[name].metadata["default"] for name in names}
    settings = dataclasses.replace(config, **off)
    checkpoints = RunCheckpoints(state, settings)
    with tempfile.TemporaryDirectory(prefix="distloop_") as root:  # for the files of a run at a URL
        directory = fetch_reports(config.workdir, root)
        run = read_run(directory)
        number = _step_of(run, config, step, units.run.last_step)
        run.require_same_replicas(config.workdir, state.replicas.virtual)
        start = _start(run, config, checkpoints, state, number)
        rows = records.rows_between(os.path.join(directory, "metrics.jsonl"), start, number)
        run.rows = {int(row["step"]): records.as_metrics(row) for row in rows}
    if isinstance(source.feed, Feed):
        source.feed.require_first_run()
    loop = TrainLoop(state, make_step(state, settings), keeps_batch=True)
    begin_run(state, settings, units, loop)
    checkpoints.attach(source, [], Period(), settings)
    source.leave_out(run.skipped_at(number))
    say(_announcement(run, start, number))
    console = make_console(number, start, may_draw=config.console == "auto")
    with source.gate, contextlib.closing(console):
        show = Host.show_progress if config.console == "quiet" else console.show_progress
        executor = ForwardPass(state, settings).choose_executor(source)  # as in the run: the last bits may depend on it
        host = Host(executor=executor, say=say, show_progress=show)
        read_again(source.fast_forward, state.strategy, None, say, show)
        rerun = _Rerun(state, source, loop, host, run, config)
        return rerun.last_step(rerun.train(number, checkpoints.begin(loop)), settings)


class _Rerun:
    """The steps of a run, up to the one that is replayed."""

    def __init__(
        self, state: TrainState, source: Source, loop: TrainLoop, host: Host, run: RecordedRun, config: Config
    ):
        """Stores what trains, and the run whose steps it takes."""
        self._state, self._source, self._loop, self._host = state, source, loop, host
        self._run, self._config = run, config
        self._differences: list[str] = []

    def train(self, number: int, progress: Progress) -> Progress:
        """Takes the steps before a number, and compares the numbers at each row of the run.

        Raises:
            ValueError: if one of them fails.
        """
        try:
            for step in sorted(at for at in self._run.rows if at < number):
                progress = self._loop.train(self._source, step, [], self._host, progress)
                self._compare(progress)
            # The last steps are in the window of the row after them.
            host = dataclasses.replace(self._host, pause_at=number - 1)
            return self._loop.train(self._source, number, [], host, progress)
        except Diverged as error:
            raise ValueError(f"{error} No step after it can be replayed: replay step {error.step}.") from error

    def last_step(self, progress: Progress, settings: Config) -> Replay:
        """Takes the next step, and once more, inspected; returns what it was given and computed.

        What the host is handed keeps TensorFlow from joining some operations, which changes last bits. So the weights
        are those that the loop has left.
        """
        state, source, saved_state, failure = self._state, self._source, SavedState(self._state), ""
        source.start_loop()  # leaves batches out
        examples = source.examples_of(source.batches_taken)
        before, weights_before, num_skipped = saved_state.snapshot(), _weights(state), int(state.skipped_steps)
        rates = {name: float(o.learning_rate.numpy()) for name, o in state.plain_optimizers.items()}
        try:
            self._compare(self._loop.train(source, progress.step + 1, [], self._host, progress))
        except Diverged as error:
            failure = str(error)
        after, weights_after, batch = saved_state.snapshot(), _weights(state), self._loop.last_batch()
        saved_state.restore(before)
        inspector = StepInspector(state)
        gradients = self._gradients(inspector, batch, settings)
        saved_state.restore(after)
        size = None if batch.size is None else int(batch.size)
        return Replay(
            step=progress.step + 1,
            batch=tf.nest.map_structure(lambda rows: _array(rows)[:size], batch.rows),
            rows=examples,
            values=inspector.values(batch, source.layout),
            gradients=gradients,
            weights_before=weights_before,
            weights_after=weights_after,
            learning_rate=rates.get("", rates),
            is_finite=not failure and int(state.skipped_steps) == num_skipped,
            differences=self._differences,
            failure=failure,
        )

    def _compare(self, progress: Progress) -> None:
        if self._differences:  # the first one is shown
            return
        if difference := find_difference(self._run, progress.step, progress.reported, self._state, self._config):
            self._differences.append(difference)
            self._host.say(difference)

    def _gradients(self, inspector: StepInspector, batch: Batch, config: Config) -> dict[str, np.ndarray]:
        """Takes a step on a batch, inspected; returns its gradients by path."""
        layout = self._source.layout
        # XLA and the host do not go together, so this step is compiled without.
        settings = dataclasses.replace(config, jit_compile="none")
        step = inspector.watch(lambda: make_step(self._state, settings, needs_full_gradients=True))

        def inspected(batch: Batch) -> dict[str, tf.Tensor]:
            gradients: dict[str, tf.Tensor] = {}
            for update in step.updates:
                sums = step.sums(update, batch, layout)
                gradients |= gradients_by_path(step, update, sums)
                if update is not step.updates[-1]:
                    step.advance(update, sums)
            return gradients

        gradients = (inspected if config.eager else graph_function(inspected))(batch)
        return {path: gradient.numpy() for path, gradient in gradients.items()}


def _step_of(run: RecordedRun, config: Config, step: Any, end: float) -> int:
    """Returns the number of a step of the run as an int, which may be given as a float or NumPy's.

    Args:
        run: what the run has written.
        config: its settings.
        step: the number, as it was given.
        end: the last step of a call of `fit` with the data given.
    """
    if not run.last_step:
        raise ValueError(f"workdir={config.workdir!r} holds no run that has come to a step: give the workdir of one.")
    number = durations.whole_number(step)
    last = min(run.last_step, end)
    if number is None or not 1 <= number <= last:
        has = f"the run in {config.workdir!r} has reached" if last == run.last_step else "fit with this data ends at"
        raise ValueError(
            f"The replay of step {shown(step)} was asked for, and {has} step {last}: give a step from 1 to {last}."
        )
    return number


def _start(run: RecordedRun, config: Config, checkpoints: RunCheckpoints, state: TrainState, step: int) -> int:
    """Restores the newest complete checkpoint before a step, or leaves the state at step 0; returns where it is."""
    left_out = {row["left_out"]: row for row in run.incidents if int(row["step"]) == step and "left_out" in row}
    beginnings = {at: metadata.get("data_from", 0) for at, metadata in run.checkpoints.items()}
    data_from = max((beginning for beginning in beginnings.values() if beginning < step), default=0)
    for at in sorted((at for at in run.checkpoints if at < step and beginnings[at] == data_from), reverse=True):
        if left_out and not set(run.checkpoints[at]["input"]["skipped"]).isdisjoint(left_out):
            continue  # of after the failure, whose batch it leaves out
        with contextlib.suppress(DamagedError):
            checkpoints.restore(f"{config.workdir.rstrip('/')}/checkpoints/{at}")
            return at
    if data_from or run.began:
        how = f"other data at step {data_from}" if data_from else f"at step {run.began} of another run's checkpoint"
        raise ValueError(
            f"The replay of step {step} has nothing to start from: the run in {config.workdir!r} began {how}, and has "
            f"no checkpoint since, before step {step}: give a later step, or keep more with keep_checkpoints next time."
        )
    if int(state.step):
        raise ValueError(
            f"The replay of step {step} starts from step 0, and this Trainer's weights are those after another replay: "
            "make another Trainer."
        )
    if config.init_from:
        import_part("warm_start.warm_start", "init_from").warm_start(state, config.init_from, config.init_rename)
    return 0


def _announcement(run: RecordedRun, start: int, step: int) -> str:
    """Returns a sentence on where the replay begins, and how long it takes about."""
    count = step - start
    secs = f", about {count / run.speed:.1f} s at the run's speed" if run.speed > 0.0 else ""
    return f"replay: from {f'checkpoint {start}' if start else 'step 0'}, {count} step{'s' * (count != 1)}{secs}"


def _array(rows: Any) -> Any:
    return np.asarray((tf.sparse.to_dense(rows) if isinstance(rows, tf.SparseTensor) else rows).numpy())


def _weights(state: TrainState) -> dict[str, np.ndarray]:
    return {
        path: np.array(tf.convert_to_tensor(variable).numpy())
        for path, variable in named_variables(state.model).items()
    }
