"""Elastic runs: starts one membership after another, each from the newest checkpoint, until the run ends.

    settings = Settings(least=1, most=3, max_restarts=3, grace_secs=10, wait_secs=600)
    code = run(settings, start, processes.Signals())    # start(change, places, notes) returns running processes

`membership` decides how many workers run next; this module waits, starts and prints. It does not know flags.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from distloop.distributed.notes import Notes
from distloop.distributed.preemption import EXIT_CODE as SAVED_EXIT_CODE
from distloop.launcher import processes
from distloop.launcher.membership import MembershipPlan


class Change(NamedTuple):
    """Why and when the membership before ended.

    Attributes:
        number: of the membership that follows, from 1.
        cause: why; "": there was none before.
        fell_at: when its first worker ended; Unix, seconds.
        ended_at: when its last one did.
        started_at: when there were places for the next.
    """

    number: int
    cause: str = ""
    fell_at: float = 0.0
    ended_at: float = 0.0
    started_at: float = 0.0


# The phases of `notes.phases`, by what the time was spent on.
_DOING = {
    "ended": "until all had ended",
    "waited": "waiting for places",
    "imported": "importing",
    "met": "meeting",
    "restored": "restoring",
    "traced": "tracing",
}

Start = Callable[[Change, Sequence[int], Notes], Sequence[processes.Process]]
There = Callable[[], Collection[int]]

_LOOK_SECS = 1.0  # after which is looked again which places are there


class Settings(NamedTuple):
    """How a run is started again.

    Attributes:
        least: workers without which the run waits.
        most: workers to start with, and to come back to.
        max_restarts: how often it starts again after crashes while no newer checkpoint appears.
        grace_secs: time from SIGTERM to SIGKILL for workers that are stopped.
        wait_secs: how long it waits for `least` workers.
    """

    least: int
    most: int
    max_restarts: int
    grace_secs: float
    wait_secs: float

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change."""
        return self.least < self.most


def run(settings: Settings, start: Start, signals: processes.Signals, there: There | None = None) -> int:
    """Runs memberships until the run ends, and returns its exit code.

    Args:
        settings: how the run is started again.
        start: starts a worker in each of these places after a change; they tell notes.
        signals: to the launcher.
        there: returns the places that there are now, of `settings.most`; None: all.
    """
    plan, change = MembershipPlan(settings.least, settings.most), Change(1)
    while True:
        code = _wait_for_places(plan, settings, signals, there)
        if code is not None:
            return code
        now, present = time.monotonic(), _without_missing(plan, there)
        places = present.there(now)[: present.size(now)]
        if not places:  # one has just gone
            continue
        if change.cause and settings.is_elastic:
            say_membership(plan, change.number, len(places), change.cause)
        notes = Notes(functools.partial(say_phases, change.number) if settings.is_elastic else None)
        workers = start(change._replace(started_at=time.time()), places, notes)
        outcome = _run_membership(plan, settings, workers, signals, notes, there)
        notes.close()
        plan = dataclasses.replace(plan, sizes=notes.sizes or plan.sizes).begin(notes.step, notes.start_secs)
        plan, cause, code = conclude(settings, plan, outcome, name_workers(outcome.leavers))
        if code is not None:
            return code
        lost = sorted({*outcome.fallen, *outcome.leavers}) or range(len(places) if outcome.is_crash else 0)
        plan = plan.lose([places[i] for i in lost], time.monotonic())
        if notes.step is None and change.cause:  # nobody has noted the change before
            cause = f"{change.cause}; then {cause}"
        change = Change(change.number + 1, cause, outcome.fell_at, time.time())


def conclude(
    settings: Settings, plan: MembershipPlan, outcome: processes.GroupEnd, leavers: str
) -> tuple[MembershipPlan, str, int | None]:
    """Returns what follows from the end of a membership: the plan, the cause of the next one, an exit code or None.

    Args:
        settings: how the run is started again.
        plan: of the membership, which knows from which step it went on.
        outcome: how it ended.
        leavers: who was asked to leave; empty: nobody.
    """
    if outcome.code == 0 or outcome.is_last:
        return plan, "", outcome.code
    if outcome.is_crash:
        plan = plan.crash()
        # An error before any step, such as a wrong flag, would come again; one in the number of workers will not.
        is_wrong = settings.is_elastic and plan.step < 0 and outcome.code < 128 and not plan.sizes
        if is_wrong or not plan.allowed or plan.restarts > settings.max_restarts:
            if settings.is_elastic:
                processes.log(_explain_end(plan))
            return plan, outcome.cause, outcome.code
        return plan, outcome.cause, None
    if outcome.has_left_for_more:
        return plan, "there are places for more", None
    if settings.is_elastic and leavers:
        return plan, f"{leavers} asked to leave", None
    return plan, "", outcome.code


def _run_membership(
    plan: MembershipPlan,
    settings: Settings,
    workers: Sequence[processes.Process],
    signals: processes.Signals,
    notes: Notes,
    there: There | None,
) -> processes.GroupEnd:
    """Returns how the workers ended, once all have."""

    def leaves_at() -> float:
        """Returns when the workers make room for more: once they have trained for as long as a start takes."""
        if not settings.is_elastic or notes.began_at is None:
            return math.inf
        grows_at = _without_missing(dataclasses.replace(plan, sizes=notes.sizes), there).grows_at(len(workers))
        return max(grows_at, notes.began_at + notes.start_secs)

    return processes.Group(workers, signals, settings.grace_secs, notes, leaves_at).wait()


def say_membership(plan: MembershipPlan, number: int, count: int, cause: str) -> None:
    """Prints with how many workers a run goes on, and why."""
    sizes = f" (it can have {', '.join(map(str, plan.allowed))})" if plan.sizes else ""
    processes.log(f"membership {number} has {count} of {plan.most} workers{sizes}: {cause}.")


def say_phases(number: int, step: int, phases: dict[str, float]) -> None:
    """Prints how long a run stood still for a change of workers, and where the time went."""
    parts = ", ".join(f"{secs:.1f} {_DOING.get(name, name)}" for name, secs in phases.items())
    processes.log(
        f"membership {number} trains from step {step}, {sum(phases.values()):.1f} s after the change: {parts}."
    )


def _without_missing(plan: MembershipPlan, there: There | None) -> MembershipPlan:
    """Returns the plan in which places that are not there never come."""
    if there is None:
        return plan
    present = there()
    back_at = tuple(at if place in present else math.inf for place, at in enumerate(plan.back_at))
    return dataclasses.replace(plan, back_at=back_at)


def _wait_for_places(
    plan: MembershipPlan, settings: Settings, signals: processes.Signals, there: There | None
) -> int | None:
    """Waits until there are places for the least number of workers; returns an exit code if the run is to end."""
    now, said = time.monotonic(), ""
    ends_at = now + settings.wait_secs if settings.is_elastic else math.inf
    while (secs := (present := _without_missing(plan, there)).starts_at() - now) > 0:
        left_secs, count = ends_at - now, _count_places(present, now)
        if left_secs <= 0:
            processes.log(
                f"for {settings.wait_secs:g} s {count}: the run ends, and the same command goes on from its newest "
                "checkpoint."
            )
            return SAVED_EXIT_CODE
        restart = f" (restart {plan.restarts} of {settings.max_restarts})" if plan.restarts else ""
        coming = f"{_count(present.size(now + secs), settings)} in {secs:.2g} s{restart}"
        line = f"{count}: waiting for more" if secs == math.inf else coming
        if line != said if secs == math.inf else not said:
            processes.log(f"{line}.")
        said = line
        if number := signals.wait(min(secs, left_secs, math.inf if there is None else _LOOK_SECS)):
            processes.log(f"{number.name}, the workers do not start again.")
            return 128 + number
        now = time.monotonic()
    return None


def _count_places(plan: MembershipPlan, now: float) -> str:
    return f"there were places for {count_workers(len(plan.there(now)))}, and {plan.allowed[0]} are needed"


def count_workers(count: int) -> str:
    """Returns `1 worker` or `2 workers`."""
    return f"{count} worker{'' if count == 1 else 's'}"


def _count(workers: int, settings: Settings) -> str:
    return f"there are places for {count_workers(workers)}" if settings.is_elastic else "all workers start again"


def _explain_end(plan: MembershipPlan) -> str:
    if plan.step < 0:
        return "the run ends, as it failed before it trained."
    return (
        f"the run ends, as {plan.restarts} crashes since step {plan.step} left no newer checkpoint: look at what the "
        "workers printed, or set a smaller checkpoint_every or a larger --max_restarts."
    )


def name_workers(workers: Collection[int]) -> str:
    """Returns `worker 1 was` or `workers 1, 2 were`; empty without any."""
    names = ", ".join(map(str, sorted(workers)))
    return f"worker{'s' * (len(workers) > 1)} {names} {'were' if len(workers) > 1 else 'was'}" if workers else ""
