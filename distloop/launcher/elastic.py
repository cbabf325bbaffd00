"""Elastic runs: decides how many workers start next, and starts one membership after another until the run ends.

    plan = MembershipPlan(least=1, most=3, max_restarts=3)
    code = run(plan, start, processes.Signals())    # start(membership, slots, inbox) returns running processes

A membership is a set of workers that start together, with one number, each from the newest checkpoint. A slot is where
one of them runs; the slot of a worker that failed is empty for a time. No module but this one knows when workers start;
how they start and end is in `processes`, what they send in `messages`.
"""

import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Collection, Sequence

from distloop.launcher import processes
from distloop.launcher.inbox import Inbox
from distloop.workers.messages import Membership
from distloop.workers.preemption import EXIT_CODE as SAVED_EXIT_CODE

_FIRST_PAUSE_SECS, _LAST_PAUSE_SECS = 1.0, 60.0  # what broke may need time; doubled at each failure in a slot
_LASTING_SECS = 600.0  # that a worker ran, after which the next pause of its slot is the first one again
_CHECK_SECS = 1.0  # after which the run asks again which slots are there

Start = Callable[[Membership, Sequence[int], Inbox], Sequence[processes.Process]]
There = Callable[[], Collection[int]]


@dataclasses.dataclass(frozen=True)
class MembershipPlan:
    """How a run is started again, its slots, and how often it was started again; immutable, without a clock.

    Attributes:
        least: workers without which the run waits.
        most: workers to start with, and to come back to: the number of slots, of which some may be empty for a time.
        max_restarts: how often the run starts again after crashes while no newer checkpoint appears.
        wait_secs: how long the run waits for `least` workers.
        grace_secs: time from SIGTERM to SIGKILL for workers that are stopped.
        sizes: numbers of workers that the run says it can have; empty: any.
        back_at: when each slot was or is there again, in seconds on a monotonic clock.
        pauses: how long each slot is empty after its next failure, in seconds.
        step: the latest from which a membership went on; -1: none has trained.
        restarts: crashes since the first one that went on from there.
        start_secs: how long workers took to start, the last time that they came to train.
    """

    least: int
    most: int
    max_restarts: int = 0
    wait_secs: float = 600.0
    grace_secs: float = 10.0
    sizes: tuple[int, ...] = ()
    back_at: tuple[float, ...] = ()
    pauses: tuple[float, ...] = ()
    step: int = -1
    restarts: int = 0
    start_secs: float = 0.0

    def __post_init__(self) -> None:
        if not self.back_at:
            object.__setattr__(self, "back_at", (-math.inf,) * self.most)
            object.__setattr__(self, "pauses", (_FIRST_PAUSE_SECS,) * self.most)

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change."""
        return self.least < self.most

    @property
    def allowed(self) -> list[int]:
        """The numbers of workers that the run can have, in ascending order."""
        return [n for n in range(self.least, self.most + 1) if not self.sizes or n in self.sizes]

    @property
    def soon_secs(self) -> float:
        """How long a slot may still be empty that counts as there: in an elastic run, as long as workers start.

        To take it in later would cost another start. After a second crash without a newer checkpoint it is 0, as what
        broke may stay broken.
        """
        return self.start_secs if self.is_elastic and self.restarts <= 1 else 0.0

    def there(self, now: float) -> list[int]:
        """Returns the slots that are there, or soon."""
        return [slot for slot, back_at in enumerate(self.back_at) if back_at - self.soon_secs <= now]

    def size(self, now: float) -> int:
        """Returns the number of workers to start; 0 if there are too few slots."""
        return max((n for n in self.allowed if n <= len(self.there(now))), default=0)

    def grows_at(self, size: int) -> float:
        """Returns when there are slots for more workers than `size`; inf: never."""
        more = next((n for n in self.allowed if n > size), None)
        return math.inf if more is None else sorted(self.back_at)[more - 1]

    def starts_at(self) -> float:
        """Returns when the next membership can start; inf: never."""
        return self.grows_at(0) - self.soon_secs

    def only(self, there: There | None) -> "MembershipPlan":
        """Returns the plan in which slots that are not there never come."""
        if there is None:
            return self
        present = there()
        back_at = tuple(at if slot in present else math.inf for slot, at in enumerate(self.back_at))
        return dataclasses.replace(self, back_at=back_at)

    def lose(self, slots: Sequence[int], now: float) -> "MembershipPlan":
        """Returns the plan after workers have failed, whose slots are empty for a time."""
        back_at, pauses = list(self.back_at), list(self.pauses)
        for slot in slots:
            if now - back_at[slot] > _LASTING_SECS:
                pauses[slot] = _FIRST_PAUSE_SECS
            back_at[slot] = now + pauses[slot]
            pauses[slot] = min(2 * pauses[slot], _LAST_PAUSE_SECS)
        return dataclasses.replace(self, back_at=tuple(back_at), pauses=tuple(pauses))

    def begin(self, step: int | None, start_secs: float = 0.0) -> "MembershipPlan":
        """Returns the plan once a membership went on from a step; None: it did not come so far."""
        if step is None:
            return self
        plan = dataclasses.replace(self, start_secs=start_secs or self.start_secs)
        return dataclasses.replace(plan, step=step, restarts=0) if step > self.step else plan

    def crash(self) -> "MembershipPlan":
        """Returns the plan after a crash."""
        return dataclasses.replace(self, restarts=self.restarts + 1)


def run(plan: MembershipPlan, start: Start, signals: processes.Signals, there: There | None = None) -> int:
    """Runs memberships until the run ends, and returns its exit code.

    Args:
        plan: how the run is started again.
        start: starts a worker of a membership in each of these slots; they send messages.
        signals: to the launcher.
        there: returns the slots that there are now, of `plan.most`; None: all.
    """
    membership = Membership(1, secrets.token_hex(4), plan.least, plan.most, cause="", worker=0, pipe=(0, 0))
    while True:
        code = _wait_for_slots(plan, signals, there)
        if code is not None:
            return code
        now, present = time.monotonic(), plan.only(there)
        slots = present.there(now)[: present.size(now)]
        if not slots:  # one has just gone
            continue
        number, is_first = membership.number, not membership.cause
        if plan.is_elastic and not is_first:
            sizes = f" (it can have {', '.join(map(str, plan.allowed))})" if plan.sizes else ""
            processes.log(f"membership {number} has {len(slots)} of {plan.most} workers{sizes}: {membership.cause}.")
        inbox = Inbox()
        workers = start(membership._replace(started_at=time.time(), pipe=inbox.pipe), slots, inbox)
        outcome = _run_membership(plan, workers, signals, inbox, there)
        inbox.close()
        plan = dataclasses.replace(plan, sizes=inbox.sizes or plan.sizes).begin(inbox.step, inbox.start_secs)
        plan, cause, code = conclude(plan, outcome)
        if code is not None:
            return code
        lost = sorted({*outcome.failed, *outcome.leaving}) or range(len(slots) if outcome.is_crash else 0)
        plan = plan.lose([slots[i] for i in lost], time.monotonic())
        if inbox.step is None and not is_first:  # the run has recorded no change before
            cause = f"{membership.cause}; then {cause}"
        membership = membership._replace(number=number + 1, cause=cause, lost_at=outcome.lost_at, ended_at=time.time())


def conclude(plan: MembershipPlan, outcome: processes.GroupEnd) -> tuple[MembershipPlan, str, int | None]:
    """Returns what follows from the end of a membership: the plan, the cause of the next one, an exit code or None.

    Args:
        plan: of the membership, which knows from which step it went on.
        outcome: how it ended.
    """
    if outcome.code == 0 or outcome.is_last:
        return plan, "", outcome.code
    if outcome.is_crash:
        plan = plan.crash()
        # An error before any step, such as a wrong flag, would come again; one in the number of workers will not.
        is_wrong = plan.is_elastic and plan.step < 0 and outcome.code < 128 and not plan.sizes
        if is_wrong or not plan.allowed or plan.restarts > plan.max_restarts:
            if plan.is_elastic:
                processes.log(_explain_end(plan))
            return plan, outcome.cause, outcome.code
        return plan, outcome.cause, None
    if outcome.has_left_for_more:
        return plan, "there are slots for more", None
    if plan.is_elastic and outcome.leaving:
        names, are_several = ", ".join(map(str, sorted(outcome.leaving))), len(outcome.leaving) > 1
        return plan, f"worker{'s' * are_several} {names} {'were' if are_several else 'was'} asked to leave", None
    return plan, "", outcome.code


def _run_membership(
    plan: MembershipPlan,
    workers: Sequence[processes.Process],
    signals: processes.Signals,
    inbox: Inbox,
    there: There | None,
) -> processes.GroupEnd:
    """Returns how the workers ended, once all have."""

    def leaves_at() -> float:
        """Returns when the workers make room for more: once they have trained for as long as a start takes."""
        if not plan.is_elastic or inbox.began_at is None:
            return math.inf
        grows_at = dataclasses.replace(plan, sizes=inbox.sizes).only(there).grows_at(len(workers))
        return max(grows_at, inbox.began_at + inbox.start_secs)

    return processes.Group(workers, signals, plan.grace_secs, inbox, leaves_at).wait()


def _wait_for_slots(plan: MembershipPlan, signals: processes.Signals, there: There | None) -> int | None:
    """Waits until there are slots for the least number of workers; returns an exit code if the run is to end."""
    now, said = time.monotonic(), ""
    ends_at = now + plan.wait_secs if plan.is_elastic else math.inf
    while (secs := (present := plan.only(there)).starts_at() - now) > 0:
        left_secs, count = ends_at - now, count_workers(len(present.there(now)))
        count = f"there were slots for {count}, and {plan.allowed[0]} are needed"
        if left_secs <= 0:
            processes.log(
                f"for {plan.wait_secs:g} s {count}: the run ends, and the same command goes on from its newest "
                "checkpoint."
            )
            return SAVED_EXIT_CODE
        size = count_workers(present.size(now + secs))
        coming = f"there are slots for {size}" if plan.is_elastic else "all workers start again"
        restart = f" (restart {plan.restarts} of {plan.max_restarts})" if plan.restarts else ""
        line = f"{count}: waiting for more" if secs == math.inf else f"{coming} in {round(secs, 2):.2g} s{restart}"
        if line != said if secs == math.inf else not said:
            processes.log(f"{line}.")
        said = line
        if number := signals.wait(min(secs, left_secs, math.inf if there is None else _CHECK_SECS)):
            processes.log(f"{number.name}, the workers do not start again.")
            return SAVED_EXIT_CODE
        now = time.monotonic()
    return None


def count_workers(count: int) -> str:
    """Returns `1 worker` or `2 workers`."""
    return f"{count} worker{'' if count == 1 else 's'}"


def _explain_end(plan: MembershipPlan) -> str:
    if plan.step < 0:
        return "the run ends, as it failed before it trained."
    return (
        f"the run ends, as {plan.restarts} crashes since step {plan.step} left no newer checkpoint: look at what the "
        "workers printed, or set a smaller checkpoint_every or a larger --max_restarts."
    )
