"""Takes a step of a run again, from the checkpoint before it, and returns what went in and what came out.

    result = replay(state, config, source, units, step=1234)     # a `Replay`: batch, values, gradients, weights
    print(result)                                                # the largest losses and gradients

The run's directory is only read, and no lock is taken, so the run may be training meanwhile. The steps up to the one
before are taken as they were, and each row of `metrics.jsonl` on the way is compared.
"""

import contextlib
import dataclasses
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.checkpoints.checkpoint import DamagedError
from distloop.checkpoints.resume import RunCheckpoints
from distloop.checkpoints.warm_start import warm_start
from distloop.data.feeds import Feed
from distloop.data.iterators import read_again
from distloop.data.shards import Batch
from distloop.data.source import Source
from distloop.graph_functions import graph_function
from distloop.log import shown, speaker
from distloop.model.saved_state import SavedState
from distloop.model.state import TrainState
from distloop.monitoring.console import make_console
from distloop.monitoring.profiler import Profile
from distloop.optimizers import learning_rates
from distloop.replay.inspection import Replay, StepInspector
from distloop.replay.recorded_run import RecordedRun, find_difference, read_run
from distloop.run import fit_call
from distloop.run.assembly import make_step
from distloop.run.overview import ForwardPass
from distloop.settings import durations
from distloop.settings.config import Config
from distloop.settings.durations import Units
from distloop.trainer import Trainer
from distloop.training.loop import Diverged, Host, TrainLoop
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
    with tempfile.TemporaryDirectory(prefix="distloop_") as root:  # for the files of a run at a URL
        directory = fetch_reports(config.workdir, root)
        run = read_run(directory)
        number = _step_of(run, config, step)
        run.require_same_replicas(config.workdir, state.replicas.virtual)
        # Nothing of this decides about a step: `on_divergence` needs a workdir, and the noise two microbatches.
        off: dict[str, Any] = {"histograms_every": 0, "gradient_noise_every": 0, "profile": ""}
        settings = dataclasses.replace(config, workdir="", on_divergence="none", **off)
        start = _start(run, config, RunCheckpoints(state, settings), state, number)
        rows = records.rows_between(os.path.join(directory, "metrics.jsonl"), start, number)
        run.rows = {int(row["step"]): records.as_metrics(row) for row in rows}
    if isinstance(source.feed, Feed):
        source.feed.require_first_run()
    if metadata := run.checkpoints.get(start, {}):
        source.restore_position(metadata["input"])
    source.skipped_batches = run.skipped_at(number)
    say(_announcement(run, start, number))
    last, differences = _LastStep(state, source, number), list[str]()

    def compare(at: int, numbers: Mapping[str, float]) -> None:
        if not differences and (difference := find_difference(run, at, numbers, state, config)):
            differences.append(difference)
            say(difference)

    console = make_console(number, start, may_draw=config.console == "auto")
    with contextlib.closing(console):
        progress = Host.show_progress if config.console == "quiet" else console.show_progress
        executor = ForwardPass(state, settings).choose_executor(source)  # as in the run: the last bits may depend on it
        host = Host(profile=last, executor=executor, say=say, show_progress=progress)
        read_again(source.fast_forward, state.strategy, None, say, host.show_progress)
        loop = _make_loop(state, settings, units, metadata)
        failure = _train(loop, source, sorted({*run.rows, number}), host, metadata.get("window"), compare)
    return last.again(settings, loop.last_batch(), failure, differences)


def _train(
    loop: TrainLoop, source: Source, stops: Sequence[int], host: Host, window: Any, compare: Callable[..., None]
) -> str:
    """Trains until some steps, and compares the numbers at each; returns a sentence if the last step failed."""
    for stop in stops:
        try:
            compare(stop, loop.train(source, stop, [], host, window=window))
        except Diverged as error:
            if error.step == stops[-1]:
                return str(error)
            raise ValueError(f"{error} No step after it can be replayed: replay step {error.step}.") from error
        window = None  # goes on from one to the next
    return ""


def _make_loop(state: TrainState, config: Config, units: Units, metadata: Mapping[str, Any]) -> TrainLoop:
    """Returns the loop of a run, as it was at a checkpoint with these metadata; empty: at step 0."""
    loop = TrainLoop(state, make_step(state, config), keeps_batch=True)
    loop.tokens = metadata.get("tokens", math.nan) if metadata else 0.0
    learning_rates.resolve(state.plain_optimizers.values(), units, loop.trace_again, state.count_tokens)
    if state.average is not None:
        state.average.set_state(metadata.get("average"))
        state.average.begin_at(fit_call.first_averaged(config, units), int(state.step))
    return loop


class _LastStep(Profile):
    """Looks at one step of a loop, in place of the profiler: at what goes in, and what comes out."""

    def __init__(self, state: TrainState, source: Source, number: int):
        """Stores the number of the step, which becomes a loop of its own."""
        super().__init__(f"{number - 1}:{number}", "", writes=False)
        self._state, self._source, self._number = state, source, number
        self._saved_state = SavedState(state)

    def is_single(self, step: int) -> bool:
        """Returns False: the step runs in a TensorFlow loop, as those before it."""
        return False

    @contextlib.contextmanager
    def loop(self, step: int) -> Iterator[None]:
        """Stores what is there before the step."""
        if step == self._number - 1:
            state = self._state
            self._examples = self._source.examples_of(self._source.batches_taken)
            self._before, self._weights_before = self._saved_state.snapshot(), _weights(state)
            self._num_skipped = int(state.skipped_steps)
            self._rates = {name: float(o.learning_rate.numpy()) for name, o in state.plain_optimizers.items()}
        yield

    def again(self, config: Config, batch: Batch, failure: str, differences: list[str]) -> Replay:
        """Takes the step once more, inspected; returns what it was given and computed.

        What the host is handed keeps TensorFlow from joining some operations, which changes last bits. So the weights
        are those that the loop has left.
        """
        state, layout = self._state, self._source.layout
        after, weights_after = self._saved_state.snapshot(), _weights(state)
        self._saved_state.restore(self._before)
        inspector = StepInspector(state)
        # XLA and the host do not go together, so this step is compiled without.
        settings = dataclasses.replace(config, jit_compile=False)
        step = inspector.watch(lambda: make_step(state, settings, inspect=inspector.gradients))

        def inspected(batch: Batch) -> None:
            for update in step.updates[:-1]:
                step.advance(update, batch, layout)
            step.gradients(step.updates[-1], batch, layout)

        (inspected if config.eager else graph_function(inspected))(batch)
        self._saved_state.restore(after)
        size = None if batch.size is None else int(batch.size)
        return Replay(
            step=self._number,
            batch=tf.nest.map_structure(lambda rows: _array(rows)[:size], batch.rows),
            rows=self._examples,
            values=inspector.values(batch),
            gradients=inspector.gradients_by_path,
            weights_before=self._weights_before,
            weights_after=weights_after,
            learning_rate=self._rates.get("", self._rates),
            is_finite=not failure and int(state.skipped_steps) == self._num_skipped,
            differences=differences,
            failure=failure,
        )


def _step_of(run: RecordedRun, config: Config, step: Any) -> int:
    """Returns the number of a step of the run as an int, which may be given as a float or NumPy's."""
    if not run.last_step:
        raise ValueError(f"workdir={config.workdir!r} holds no run that has come to a step: give the workdir of one.")
    number = durations.whole_number(step)
    if number is None or not 1 <= number <= run.last_step:
        raise ValueError(
            f"The replay of step {shown(step)} was asked for, and the run in {config.workdir!r} has reached "
            f"step {run.last_step}: give a step from 1 to {run.last_step}."
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
        try:
            checkpoints.restore(f"{config.workdir.rstrip('/')}/checkpoints/{at}")
            return at
        except DamagedError:
            continue
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
        warm_start(state, config.init_from, config.init_rename)
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
