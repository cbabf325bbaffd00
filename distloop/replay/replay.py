"""Takes a step of a run again, from the checkpoint before it, and returns what went in and what came out.

    result = replay(state, config, source, units, step=1234)     # a `Replay`: batch, values, gradients, weights
    print(result)                                                # the largest losses and gradients

The run's directory is only read, and no lock is taken, so the run may be training meanwhile. The steps up to the one
before are taken as they were, and each row of `metrics.jsonl` on the way is compared.
"""

import bisect
import contextlib
import dataclasses
import math
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distloop.assembly import make_step
from distloop.checkpoints.checkpoint import DamagedError
from distloop.checkpoints.resume import RunCheckpoints
from distloop.checkpoints.warm_start import warm_start
from distloop.data.iterators import read_again
from distloop.data.shards import Batch
from distloop.data.source import Source
from distloop.graph_functions import TRAINING_PASSES, count_flops, graph_function
from distloop.log import shown
from distloop.model.saved_state import SavedState
from distloop.model.state import TrainState
from distloop.monitoring import notebook, records
from distloop.monitoring.console import speaker
from distloop.monitoring.directory import fetch_reports
from distloop.optimizers import learning_rates
from distloop.replay.diff import manifests_of
from distloop.replay.look import Look, Replay
from distloop.settings import durations
from distloop.settings.config import Config
from distloop.settings.durations import Units
from distloop.trainer import Trainer
from distloop.training import run_length
from distloop.training.compiled_loop import CompiledLoop
from distloop.training.diagnosis import explain
from distloop.training.overview import ForwardPass
from distloop.training.window import Row, Window
from distloop.variables import named_variables

_TOLERANCE = 1e-6  # of a row, relative, where the bits need not be those of the run
# Settings about numbers.
_OF_NUMBERS = (
    *("batch_size", "seed", "precision", "microbatches", "clip_norm", "clip_variable_norm", "clip_value"),
    *("average_decay", "on_nonfinite", "virtual_replicas", "jit_compile", "limit_train_batches"),
)
_LOOP_SECS = 1.0  # after which a loop of steps ends, to show the progress


@dataclasses.dataclass
class _Recorded:
    """What the files of a run tell of it.

    Attributes:
        furthest: the last step of which its rows, or what it notes of its progress, tell.
        speed: steps a second, as of the last row; 0: unknown.
        incidents: the rows of `incidents.jsonl`.
        checkpoints: the notes of each checkpoint, by step, in ascending order.
        settings: of `config.json`.
        began: the step at which its first process began; 0, or that of a checkpoint which was given to `restore`.
        rows: of `metrics.jsonl`, by step in ascending order, after the step that the replay starts from.
    """

    furthest: int
    speed: float
    incidents: list[dict[str, Any]]
    checkpoints: dict[int, dict[str, Any]]
    settings: dict[str, Any]
    began: int
    rows: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def last_step(self) -> int:
        """The last step of which a file tells."""
        return max([self.furthest, *self.checkpoints, *(int(row["step"]) for row in self.incidents)])

    def skipped_at(self, step: int) -> set[int]:
        """Returns the batches that the run had left out when it took a step.

        A step at which the run diverged is the one that failed, on the batch that was left out after it.
        """
        has_failed = any(int(row["step"]) == step for row in self.incidents)
        later = next((notes for at, notes in self.checkpoints.items() if at >= step), None)
        if later is not None and not has_failed:
            return set(later["input"]["skipped"])
        return {
            row["left_out"] for row in self.incidents if "left_out" in row and (row["step"] < step or not has_failed)
        }


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
        run = _read(directory)
        _require_step(run, config, step)
        if (trained := run.settings.get("virtual_replicas", state.virtual_replicas)) != state.virtual_replicas:
            raise ValueError(
                f"The run in {config.workdir!r} was trained with virtual_replicas={trained}, and "
                f"{state.virtual_replicas} were given, with which a step has other numbers: give "
                f"virtual_replicas={trained}."
            )
        # Nothing of this decides about a step: `on_divergence` needs a workdir, and the noise two parts of a batch.
        off: dict[str, Any] = {"histograms_every": 0, "gradient_noise_every": 0, "profile": ""}
        settings = dataclasses.replace(config, workdir="", on_divergence="none", **off)
        start = _start(run, config, RunCheckpoints(state, settings), state, step)
        rows = records.rows_between(os.path.join(directory, "metrics.jsonl"), start, step)
        run.rows = {int(row["step"]): records.as_metrics(row) for row in rows}
    progress = _Steps(state, settings, source, units, run, start)
    source.skipped_batches = run.skipped_at(step)
    say(_announcement(run, start, step))
    progress.take(step - 1, say)
    return progress.look(step)


class _Steps:
    """The steps from a checkpoint on, in loops as those of the run, without its actions."""

    def __init__(self, state: TrainState, config: Config, source: Source, units: Units, run: _Recorded, start: int):
        """Restores the position in the data, the window of the next row and the constants of a step."""
        self._state, self._config, self._source, self._run, self._at = state, config, source, run, start
        self._log_steps, self._row_steps = units.period(run_length.log_every(config, units)).steps, [*run.rows]
        self._step = make_step(state, dataclasses.replace(config, locate_nonfinite=False))
        self._loop, self._start = CompiledLoop(state, self._step, keeps_batch=True), start
        graph = ForwardPass(state, config).trace(source.info.element_spec, source.info.batch_size)
        flops = count_flops(graph) if source.info.batch_size else None  # the last bits may depend on the executor
        flops = flops and TRAINING_PASSES * flops
        self._executor = state.placement.choose_executor(state.strategy, config.executor, flops)
        self._window, self._differences = Window(), list[str]()
        self._notes = notes = run.checkpoints.get(start, {})
        learning_rates.resolve(state.plain_optimizers.values(), units, lambda: None, state.count_tokens)
        if state.average is not None:
            state.average.set_state(notes.get("average"))
            state.average.begin_at(run_length.first_averaged(config, units), start)
        if notes:
            source.restore_position(notes["input"])
            self._window = Window(notes["window"])
            if state.token_count is not None:
                state.token_count.assign(notes.get("tokens", 0.0))

    def take(self, until: int, say: Any) -> None:
        """Takes the steps up to one, and compares the rows on the way."""
        console = notebook.make_console(until, self._at, may_draw=self._config.console == "auto")
        with contextlib.closing(console):
            read_again(self._source.behind, self._state.strategy, None, say, console.show_progress)
            if self._at < until:
                console.show_progress(self._at, "tracing the train step ...")
                self._loop.trace(self._source, self._executor)
            while self._at < until:
                count = int(min(until - self._at, self._source.start_loop() or until, self._until_row()))
                options: dict[str, Any] = dict(executor=self._executor, is_single=False, secs=_LOOP_SECS)
                for row in self._loop.run(self._source, count, self._log_steps, **options):
                    self._add(row, say)
                    if row.diagnosis is not None:
                        raise ValueError(
                            f"{self._explain(row.diagnosis)} No step after it can be replayed: replay step {self._at}."
                        )
                console.show_progress(self._at)

    def _explain(self, diagnosis: np.ndarray, batch: Batch | None = None) -> str:
        """Returns a sentence about the last step, which failed, given its batch, if it is to run again."""
        return explain(self._step, self._at, diagnosis, self._source, self._source.batches_taken - 1, batch)

    def look(self, number: int) -> Replay:
        """Takes one step as the run took it, and once more with a look into it; returns what it was given and computed.

        What the host is handed keeps TensorFlow from joining some operations, which changes last bits. So the weights
        are those of the first.
        """
        state, source, saved_state = self._state, self._source, SavedState(self._state)
        source.start_loop()
        examples = source.examples_of(source.batches_taken)
        before, weights_before, skipped = saved_state.snapshot(), _weights(state), int(state.skipped_steps)
        rates = {name: float(optimizer.learning_rate.numpy()) for name, optimizer in state.plain_optimizers.items()}
        if self._at == self._start:
            self._loop.trace(source, self._executor)
        (row,) = self._loop.run(source, 1, self._log_steps, executor=self._executor, is_single=False)
        self._add(row, lambda text: None)
        batch, after, weights_after = self._loop.last_batch(), saved_state.snapshot(), _weights(state)
        is_finite = row.diagnosis is None and int(state.skipped_steps) == skipped
        saved_state.restore(before)
        look = Look(state)
        # XLA and the host do not go together, so this step is compiled without.
        settings = dataclasses.replace(self._config, jit_compile=False)
        step = look.watch(lambda: make_step(state, settings, look=look.gradients))

        def look_again(batch: Batch) -> None:
            for update in step.updates[:-1]:
                step.advance(update, batch, source.layout)
            step.forward(step.updates[-1], batch, source.layout, step.count_examples(batch, source.layout))

        (look_again if self._config.eager else graph_function(look_again))(batch)
        failure = ""
        if row.diagnosis is not None:
            saved_state.restore(before)
            failure = self._explain(row.diagnosis, batch if self._config.locate_nonfinite else None)
        saved_state.restore(after)
        size = None if batch.size is None else int(batch.size)
        return Replay(
            step=number,
            batch=tf.nest.map_structure(lambda rows: _array(rows)[:size], batch.rows),
            rows=examples,
            values=look.values(batch),
            gradients=look.gradients_by_path,
            weights_before=weights_before,
            weights_after=weights_after,
            learning_rate=rates.get("", rates),
            is_finite=is_finite,
            differences=self._differences,
            failure=failure,
        )

    def _until_row(self) -> float:
        """Returns the steps to the next row of the run at which the loop has to end; inf: there is none."""
        log_steps = 0 if self._state.keras_metrics else self._log_steps  # their results are read at the end of a loop
        later = self._row_steps[bisect.bisect(self._row_steps, self._at) :]
        return next((at - self._at for at in later if not log_steps or at % log_steps), math.inf)

    def _add(self, row: Row, say: Any) -> None:
        """Adds the steps of a loop's row to the position and the window, and compares the window with the run's row."""
        state = self._state
        self._source.batches_taken += row.steps
        self._window.add(row)
        self._at += row.steps
        if (recorded := self._run.rows.get(self._at)) is not None:
            found = self._compare(recorded, self._window.metrics(self._step.names))
            if found and not self._differences:
                self._differences.append(found)
                say(found)
            self._window = Window(examples_seen=self._window.examples_seen)
            state.keras_metrics.reset()

    def _compare(self, recorded: Mapping[str, float], found: Mapping[str, float]) -> str:
        """Returns a sentence about the first number that differs from that of the run's row; empty: none does."""
        for name, value in found.items():
            before = recorded.get(name)
            if before is None or name.rpartition("/")[2] in records.OF_THE_MACHINE:
                continue
            is_same = before == value or (np.isnan(before) and np.isnan(value))
            if not is_same and (self._state.virtual_replicas or not np.isclose(value, before, _TOLERANCE, 0.0)):
                reasons = self._reasons()
                why = f": {', '.join(reasons)}" if reasons else ""
                there = f"in the row of step {self._at}: {name} was {before!r} and is {value!r}"
                return f"The replay parts from the run {there}{why}."
        return ""

    def _reasons(self) -> list[str]:
        """Returns what is known to make a difference."""
        state, reasons = self._state, []
        notes = self._notes or next(iter(self._run.checkpoints.values()), {})
        replicas, now = notes.get("replicas"), state.strategy.num_replicas_in_sync
        if replicas not in (None, now) and state.seeds and not state.virtual_replicas:
            reasons.append(f"{now} replicas draw other random numbers than {replicas}, as in dropout")
        versions = {"tensorflow": tf.__version__, "keras": keras.__version__}
        for name, version in notes.get("versions", {}).items():
            if versions.get(name, version) != version:
                reasons.append(f"the run had {name} {version}, and this is {versions[name]}")
        for name in _OF_NUMBERS:
            before, setting = self._run.settings.get(name), getattr(self._config, name)
            if name in self._run.settings and before != setting:
                reasons.append(f"the run had {name}={before!r}, and this is {setting!r}")
        return reasons


def _read(directory: str) -> _Recorded:
    """Reads what the files of a run tell of it."""
    notes = {at: manifest["notes"] for at, manifest in sorted(manifests_of(directory).items()) if "notes" in manifest}
    progress = records.read_json(os.path.join(directory, "progress.json"), instead="it is not read")
    last = records.last_row(os.path.join(directory, "metrics.jsonl")) or {}
    furthest = max(int((noted or {}).get("step", 0)) for noted in (last, progress))
    incidents = records.read_rows_if_any(os.path.join(directory, "incidents.jsonl"), instead="it counts as empty")
    starts = records.read_rows_if_any(os.path.join(directory, "starts.jsonl"), instead="it counts as empty")
    settings = records.read_json(os.path.join(directory, "config.json"), instead="it is not compared")
    began = int(starts[0]["step"]) if starts else 0
    speed = float(last.get("steps_per_sec") or 0.0)
    return _Recorded(furthest, speed, incidents, notes, settings or {}, began)


def _require_step(run: _Recorded, config: Config, step: Any) -> None:
    if not run.last_step:
        raise ValueError(f"workdir={config.workdir!r} holds no run that has come to a step: give the workdir of one.")
    number = durations.whole_number(step)
    if number is None or not 1 <= number <= run.last_step:
        raise ValueError(
            f"The replay of step {shown(step)} was asked for, and the run in {config.workdir!r} has reached "
            f"step {run.last_step}: give a step from 1 to {run.last_step}."
        )


def _start(run: _Recorded, config: Config, checkpoints: RunCheckpoints, state: TrainState, step: int) -> int:
    """Restores the newest whole checkpoint before a step, or leaves the state at step 0; returns where it is."""
    left_out = {row["left_out"]: row for row in run.incidents if int(row["step"]) == step and "left_out" in row}
    beginnings = {at: notes.get("data_from", 0) for at, notes in run.checkpoints.items()}
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


def _announcement(run: _Recorded, start: int, step: int) -> str:
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
