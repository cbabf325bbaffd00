"""The phases of a run: several calls of `fit` in one workdir, each until its own end.

    phases = Phases(state)                          # of one Trainer
    phases.enter(run, saved, step, secs, tokens)    # by each `fit`, with the checkpoint that it goes on from
    phases.past                                     # this `fit`, if it has ended before the checkpoint
    phases.end(step, stop_reason, reported)

A killed program is started again from its beginning. Checkpoints note the phases that had ended before them, so a `fit`
with the length, learning rates and trained variables of one of them trains nothing, and the next one goes on.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from distloop.checkpoints.checkpoint import Saved
from distloop.model.state import TrainState
from distloop.settings.durations import Period, Units
from distloop.variables import portable_names

_SIGN = ("steps", "secs", "tokens", "rates", "trains")  # of a phase, by which a later start finds it again
_NOTED = (*_SIGN, "began", "is_apart")  # of the latest: the step at which its optimizer began; as of `set_apart`


class Phases:
    """Which phases of a run have ended, and which one a `fit` is.

    Attributes:
        past: the phase that this `fit` is, if it has ended before the checkpoint; else None.
        is_of_others: whether the checkpoint is of a phase that has ended and trains other variables, or of a later one.
        begins: whether this `fit` begins a phase with data, or an optimizer, of its own.
        stop_reason: why an action has ended the phase that this `fit` is; None: no action has.
    """

    def __init__(self, state: TrainState):
        """Starts before the first `fit` of a Trainer."""
        self._state = state
        self._ended: list[dict[str, Any]] = []  # of the run, before the phase of the newest checkpoint
        self._latest: dict[str, Any] = {}  # the phase of the newest checkpoint; with a "step", it has ended
        self._num_passed: int | None = 0  # the phases that this Trainer's fits have passed; None: as many as the run's
        self._is_latest = self._has_passed = False  # whether the present `fit` is that phase, and an earlier one was
        self.past: dict[str, Any] | None = None
        self.begins, self.is_of_others, self.stop_reason = False, False, None

    def jump(self) -> None:
        """Notes that the next `fit` goes on from a checkpoint that the user has chosen."""
        self._num_passed, self._has_passed = None, False

    def enter(self, run: Period, saved: Saved | None, step: int, secs: float, tokens: float) -> None:
        """Finds out which phase a `fit` is.

        Args:
            run: the length of the run that `fit` was given.
            saved: the checkpoint that it goes on from; None: it goes on from the state in memory.
            step: the number of steps done.
            secs: how long the run has trained, as far as this process knows.
            tokens: on how many, likewise.
        """
        secs = max(secs, saved.notes.get("secs", 0.0) if saved is not None else 0.0)
        tokens = tokens if saved is None else saved.notes.get("tokens", 0.0)
        phase = {**run._asdict(), "rates": dict(self._state.initial_learning_rates), "trains": self._trained()}
        self.past, self.begins, self.stop_reason = None, False, None
        if saved is not None:
            self._ended, self._latest, step = list(saved.notes.get("phases", [])), _phase_of(saved), saved.step
            first = len(self._ended) if self._num_passed is None else self._num_passed
            for number, ended in enumerate(self._ended[first:], first + 1):
                if _is_same(ended, phase):
                    self.past = {**ended, "reported": _numbers_of(ended)}
                    self._num_passed, self.stop_reason = number, ended["stop_reason"]
                    self.is_of_others = True
                    return
        latest = self._latest
        self.is_of_others = "step" in latest and latest.get("trains", phase["trains"]) != phase["trains"]
        is_over = run.is_over(step, secs, tokens)
        self._is_latest = not is_over or _is_same(latest, phase)
        if is_over:
            return
        began = latest.get("began", 0)
        if "step" in latest:
            if not self._has_passed and _is_same(latest, phase):
                self.stop_reason = latest["stop_reason"]
                return
            self.begins, began = self._has_passed or self.is_of_others, step if self.is_of_others else began
            self._ended.append({**latest, "reported": json.dumps(_numbers_of(latest))})  # a text is written fastest
        self._latest, self._num_passed = {**phase, "began": began}, len(self._ended)

    def end(self, step: int, stop_reason: str | None, reported: Mapping[str, float]) -> None:
        """Notes that the `fit` has come to its end."""
        if self.past is None and self._is_latest:
            self._latest = {"step": step, "stop_reason": stop_reason, "reported": dict(reported)} | self._latest
            self._num_passed, self._has_passed = len(self._ended) + 1, True

    def begin(self, *, has_other_data: bool) -> None:
        """Notes that all parts have their state; no step of a phase with other data is reached from before it."""
        if self.begins and has_other_data:
            self._latest["is_apart"] = True
        self.begins, self._has_passed = False, self._has_passed and "step" in self._latest

    def notes(self) -> dict[str, Any]:
        """Returns what a checkpoint notes of the phases."""
        latest = {name: value for name, value in self._latest.items() if name in _NOTED}
        return {"phase": latest, "phases": self._ended}

    def describe(self) -> str:
        """Returns a sentence about a `fit` whose phase has ended."""
        assert self.past is not None and self._num_passed is not None
        reason = f" ({self.past['stop_reason']})" if self.past["stop_reason"] else ""
        return (
            f"Phase {self._num_passed} of this run has ended at step {self.past['step']}{reason}; phase "
            f"{len(self._ended) + 1} has begun, for a later fit of the program."
        )

    def hint(self, saved: Saved) -> str:
        """Returns what to do about a checkpoint of an open phase that trains other variables; else empty."""
        latest = _phase_of(saved)
        is_open = "step" not in latest and latest.get("trains", self._trained()) != self._trained()
        return ", or let the fit that trains other variables end before this one" if is_open else ""

    def _trained(self) -> str:
        """Returns a digest of the names of the trained variables, by update."""
        names = {id(variable): name for name, variable in portable_names(self._state.model).items()}
        trained = {name: sorted(names[id(v)] for v in of) for name, of in self._state.variables_of_update.items()}
        return hashlib.sha256(json.dumps(trained, sort_keys=True).encode()).hexdigest()[:16]


def units_at(notes: Mapping[str, Any], units: Units) -> Units:
    """Returns units whose percents are of the steps that the optimizer takes, which may have begun in a later phase."""
    run, began = units.run, notes.get("phase", {}).get("began", 0)
    return units.of(run._replace(steps=run.steps - began)) if began and run.steps else units


def number_at(notes: Mapping[str, Any], step: float = math.inf) -> int:
    """Returns the number of the phases with data of their own that had begun before a step, by a checkpoint's notes."""
    phases = [*notes.get("phases", []), notes.get("phase", {})]
    pairs = zip(phases, phases[1:], strict=False)
    return sum(after.get("is_apart", False) and before["step"] < step for before, after in pairs)


def _phase_of(saved: Saved) -> dict[str, Any]:
    """Returns the phase of a checkpoint; with its end, if that is the last one. Old ones note the length alone."""
    notes = saved.notes
    length = {"steps": 0 if notes.get("until_secs") else notes.get("until") or 0, "secs": notes.get("until_secs", 0.0)}
    phase: dict[str, Any] = dict(notes.get("phase", length))
    done, reason = (notes.get("secs", 0.0), notes.get("tokens", 0.0)), notes.get("stop_reason")
    period = Period(phase["steps"], phase["secs"], phase.get("tokens", 0.0))
    is_over = period.is_over(saved.step, *done) and notes.get("open_boundary") is None
    if is_over or reason:
        phase |= {"step": saved.step, "stop_reason": reason, "reported": notes.get("reported", {})}
    return phase


def _numbers_of(ended: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers that an ended phase has returned; older versions do not note them as a text."""
    reported = ended.get("reported", {})
    return json.loads(reported) if isinstance(reported, str) else reported


def _is_same(noted: Mapping[str, Any], phase: Mapping[str, Any]) -> bool:
    """Returns whether a noted phase is one that a `fit` asks for; older notes lack some names."""
    return bool(noted) and all(noted.get(name, phase[name]) == phase[name] for name in _SIGN)
