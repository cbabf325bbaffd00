"""What the files of a run hold for a replay, and the rows of a replay compared with those of the run.

run = read_run("runs/digits")
run.last_step, run.skipped_at(1234)
find_difference(run, 1200, {"loss": 0.25}, state, config)       # "The replay differs from the run ...", or empty
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distloop.checkpoints.loading import jit_compile_of
from distloop.model.state import TrainState
from distloop.settings.config import Config
from distloop.settings.precision import PRECISIONS
from distloop.workdir import records
from distloop.workdir.run_files import manifests_of

_TOLERANCE = 1e-6  # of a number, relative, where the bits need not be those of the run
_ROUNDOFFS = 4  # likewise of half precision on another number of replicas, as each rounds its term of a gradient
_OF_THE_STEP = frozenset({*records.GROUPS[records.METRICS], *records.GROUPS["optimizer"]})
# Settings about numbers.
_OF_NUMBERS = (
    *("batch_size", "seed", "precision", "microbatches", "clip_norm", "clip_variable_norm", "clip_value"),
    *("average_decay", "on_nonfinite", "virtual_replicas", "device_shares", "jit_compile", "limit_train_batches"),
)


@dataclasses.dataclass
class RecordedRun:
    """What the files of a run record of it.

    Attributes:
        furthest: the last step of which its rows, or its record of its progress, know.
        speed: steps a second, as of the last row; 0: unknown.
        incidents: the rows of `incidents.jsonl`.
        checkpoints: the metadata of each checkpoint, by step, in ascending order.
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
        """The last step that a file records."""
        return max([self.furthest, *self.checkpoints, *(int(row["step"]) for row in self.incidents)])

    def require_same_replicas(self, workdir: str, virtual: int) -> None:
        """Refuses to replay the run of a workdir on another number of virtual replicas."""
        if (trained := self.settings.get("virtual_replicas", virtual)) != virtual:
            raise ValueError(
                f"The run in {workdir!r} was trained with virtual_replicas={trained}, and {virtual} were given, with "
                f"which a step has other numbers: give virtual_replicas={trained}."
            )

    def metadata_after(self, step: int) -> dict[str, Any]:
        """Returns the metadata of the first checkpoint from a step on, else of the last one; empty: there is none."""
        later = (metadata for at, metadata in self.checkpoints.items() if at >= step)
        return next(later, self.checkpoints[max(self.checkpoints)] if self.checkpoints else {})

    def skipped_at(self, step: int) -> set[int]:
        """Returns the batches that the run had left out when it took a step.

        A step at which the run diverged is the one that failed, on the batch that was left out after it.
        """
        has_failed = any(int(row["step"]) == step for row in self.incidents)
        later = next((metadata for at, metadata in self.checkpoints.items() if at >= step), None)
        if later is not None and not has_failed:
            return set(later["input"]["skipped"])
        return {
            row["left_out"] for row in self.incidents if "left_out" in row and (row["step"] < step or not has_failed)
        }


def find_difference(
    run: RecordedRun, step: int, numbers: Mapping[str, float], state: TrainState, config: Config
) -> str:
    """Returns a sentence on the first number of a replay that differs from that of the run's row; empty: none does.

    In half precision on another number of replicas, each rounds its term of a gradient, and an example near a limit may
    be counted otherwise. Then only the loss and what concerns the step are compared, up to some roundoffs.

    Args:
        run: that is replayed.
        step: of the row; the run may have none there.
        numbers: of the replay, by name.
        state: of the replay.
        config: likewise.
    """
    saved = run.metadata_after(step)
    now, then, precision = state.strategy.num_replicas_in_sync, saved.get("replicas"), PRECISIONS[config.precision]
    is_cut_otherwise = then not in (None, now) and not state.replicas.same_bits
    has_other_ratios = saved.get("config", run.settings).get("device_shares", "") != config.device_shares
    is_rounded = (is_cut_otherwise or has_other_ratios) and precision.is_half
    tolerance = _ROUNDOFFS * precision.roundoff if is_rounded else _TOLERANCE
    recorded = run.rows.get(step, {})
    for name, value in numbers.items():
        before, last = recorded.get(name), name.rpartition("/")[2]
        if before is None or last in records.OF_THE_MACHINE or (is_rounded and last not in _OF_THE_STEP):
            continue
        is_same = before == value or (np.isnan(before) and np.isnan(value))
        if not is_same and (state.replicas.same_bits or not np.isclose(value, before, tolerance, 0.0)):
            reasons = [f"{now} replicas draw other random numbers than {then}, as in dropout"]
            reasons = reasons if is_cut_otherwise and state.seeds else []
            reasons += [f"{now} replicas round {precision.compute_dtype} otherwise than {then}"] if is_rounded else []
            reasons += _changes(saved.get("versions", {}), saved.get("config", run.settings), config)
            why = f": {', '.join(reasons)}" if reasons else ""
            there = f"in the row of step {step}: {name} was {before!r} and is {value!r}"
            return f"The replay differs from the run {there}{why}."
    return ""


def _changes(versions: Mapping[str, str], settings: Mapping[str, Any], config: Config) -> list[str]:
    """Returns phrases about the versions and settings of a run that are others now."""
    now = {"tensorflow": tf.__version__, "keras": keras.__version__}
    changes = [
        f"the run had {name} {version}, and this is {now[name]}"
        for name, version in versions.items()
        if now.get(name, version) != version
    ]
    for name in _OF_NUMBERS:
        before, setting = {**settings, "jit_compile": jit_compile_of(settings)}.get(name), getattr(config, name)
        if name in settings and before != setting:
            changes.append(f"the run had {name}={before!r}, and this is {setting!r}")
    return changes


def read_run(directory: str) -> RecordedRun:
    """Reads what the files of a run record of it."""
    metadata = {at: saved["notes"] for at, saved in sorted(manifests_of(directory).items()) if "notes" in saved}
    progress = records.read_json(os.path.join(directory, "progress.json"), instead="it is not read")
    last = records.last_row(os.path.join(directory, "metrics.jsonl")) or {}
    furthest = max(int((record or {}).get("step", 0)) for record in (last, progress))
    incidents = records.read_rows_if_any(os.path.join(directory, "incidents.jsonl"), instead="it counts as empty")
    starts = records.read_rows_if_any(os.path.join(directory, "starts.jsonl"), instead="it counts as empty")
    settings = records.read_json(os.path.join(directory, "config.json"), instead="it is not compared")
    began = int(starts[0]["step"]) if starts else 0
    speed = float(last.get("steps_per_sec") or 0.0)
    return RecordedRun(furthest, speed, incidents, metadata, settings or {}, began)
