"""Liveness: which worker failed, decided from the last heartbeat of each and the time; no sockets, threads or clocks.

    table = table.receive(1, beat)
    judge(table, progress, Timeouts(hang_secs=600), now)     # None, or Verdict("worker 1 failed at step 7 ...")

Of many workers each hears its neighbors alone (`neighbors`): `beats` are theirs. A worker that ends because another one
failed tells the reason, so its neighbors end with the same reason, and theirs. That all have met is known by *levels*:
a worker that has met its neighbors is at level 1, and one level above the lowest of them after that; so at level L it
knows that all workers within L - 1 hops have met theirs.

It does not know how heartbeats travel or how a process ends (`heartbeat`), nor TensorFlow.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distloop.distributed.neighbors import max_hops, neighbors

# The phases in which a worker needs all the others, and should not stand still.
JOINING, TRAINING, GATHERING = "joining", "training", "waiting for all"

SILENT_SECS = 3.0  # six heartbeats lost: worth a mention if something is wrong
GONE_SECS = 1.0  # two lost, and the host answers that no process listens on the port
LEFT_SECS = 10.0  # the last operations of a worker that left may end this much later here


class Facts(NamedTuple):
    """Settings that must be the same on all workers; those of another one as far as they came."""

    digest: str  # of all of them
    digests: Mapping[str, str]  # of each, by name; "" for one that only the others have
    values: Mapping[str, str]  # as they may be shown, by name; those of another worker only where they differ

    def add(self, more: "Facts") -> "Facts":
        """Returns the settings with those of a later heartbeat."""
        return Facts(more.digest or self.digest, {**self.digests, **more.digests}, {**self.values, **more.values})

    def differing(self, other: "Facts") -> list[str]:
        """Returns the names of settings that another worker has and this one has otherwise."""
        return sorted(name for name, digest in other.digests.items() if digest != self.digests.get(name, ""))

    def find_difference(self, other: "Facts") -> str | None:
        """Returns the first setting that differs and whose value came; None if there is none."""
        return next((name for name in self.differing(other) if name in other.values), None)


class Beat(NamedTuple):
    """One heartbeat of a worker."""

    run: str  # a random name of its process, another one after a restart
    state: str  # "alive"; "failed"; "ended", because another worker failed; "left", at the end of its program
    phase: str
    step: int
    error: str
    has_met: bool
    heard: Mapping[str, str]  # the runs that it hears, by worker
    facts: Facts
    received_at: float  # seconds on this worker's monotonic clock
    level: int = 0  # how far away workers are known to have met, or at its end to have left
    missing: str = ""  # which workers keep it from meeting, in words
    is_hang: bool = True  # of one that ended: whether the reason is a hang


@dataclasses.dataclass(frozen=True)
class Table:
    """What this worker knows of its neighbors; immutable, so that every thread reads a consistent one."""

    addresses: tuple[str, ...]  # host:port of every worker, the chief first
    index: int  # of this worker
    run: str  # of this worker
    facts: Facts  # of this worker
    beats: Mapping[int, Beat] = dataclasses.field(default_factory=dict)  # the last one of each neighbor
    runs: Mapping[int, str] = dataclasses.field(default_factory=dict)  # that claim to be a worker, unproved
    refused: frozenset[int] = frozenset()  # workers on whose port no process listened since their last heartbeat
    restarted: frozenset[int] = frozenset()
    level: int = 0  # of this worker, as in `Beat`
    has_met: bool = False  # every worker hears all its neighbors
    duplicate_at: float = -1e9  # when another process last claimed this worker's index, unproved
    awake_since: float = -1e9  # before, this process was suspended and could not hear

    @property
    def neighbors(self) -> tuple[int, ...]:
        """The indices of the workers that this one hears; of few workers all others."""
        return neighbors(self.index, len(self.addresses))

    @property
    def top_level(self) -> int:
        """The level at which what is known of the neighbors is known of all workers."""
        return max_hops(len(self.addresses))

    def replace(self, **changes: Any) -> "Table":
        """Returns the table with some fields changed."""
        return dataclasses.replace(self, **changes)

    def have_all_met(self) -> bool:
        """Returns True if every neighbor reports that all have met."""
        everyone = [self.has_met, *(beat.has_met for beat in self.beats.values())]
        return all(everyone) and len(everyone) == len(self.neighbors) + 1

    def greet(self, i: int, run: str, now: float) -> "Table":
        """Returns the table after a datagram that claims to be of worker `i`, and does not prove to be new."""
        if i == self.index:
            return self.replace(duplicate_at=now) if run != self.run else self
        return self.replace(runs={**self.runs, i: run}) if i in self.neighbors else self

    def receive(self, i: int, beat: Beat) -> "Table":
        """Returns the table after a heartbeat of worker `i`."""
        if i not in self.neighbors:
            return self
        last = self.beats.get(i)
        if self.has_met and last is not None and last.run != beat.run:
            return self.replace(restarted=self.restarted | {i})
        if last is not None and last.run == beat.run:
            beat = beat._replace(facts=last.facts.add(beat.facts), heard={**last.heard, **beat.heard})
        return self.replace(beats={**self.beats, i: beat}, refused=self.refused - {i})

    def run_of(self, i: int, now: float) -> str:
        """Returns the run that messages to worker `i` name; "" if none is known."""
        return self.runs.get(i, "") if self.is_silent(i, now) else self.beats[i].run

    def has_news_since(self, before: "Table") -> bool:
        """Returns True if others wait to learn what this worker has heard, as they do until all have met."""
        if self.have_all_met():
            return False
        pairs = [(beat, before.beats.get(i)) for i, beat in self.beats.items()]
        return self.runs != before.runs or any(
            last is None
            or (beat.run, beat.heard, beat.facts, beat.level) != (last.run, last.heard, last.facts, last.level)
            for beat, last in pairs
        )

    def has_duplicate(self, now: float) -> bool:
        """Returns True if another process claims this worker's index."""
        return now - self.duplicate_at < SILENT_SECS

    def silent_secs(self, i: int, now: float) -> float:
        """Returns the seconds since the last heartbeat of worker `i`, during which this process was awake."""
        received_at = self.beats[i].received_at if i in self.beats else 0.0
        return now - max(received_at, self.awake_since)

    def is_silent(self, i: int, now: float) -> bool:
        """Returns True if heartbeats of worker `i` are missing."""
        return i not in self.beats or self.silent_secs(i, now) > SILENT_SECS

    def is_gone(self, i: int, now: float) -> bool:
        """Returns True if the process of worker `i` has ended: its host answers, but the process does not."""
        return i in self.refused and self.silent_secs(i, now) > GONE_SECS

    def describe(self, i: int, now: float) -> str:
        """Returns the last known place of worker `i`, as in `worker 1 (b:4000) is at step 7 (training)`."""
        beat, silent_secs = self.beats[i], self.silent_secs(i, now)
        verb = "is"
        if beat.state == "left":
            verb = "left"
        elif silent_secs > SILENT_SECS:
            verb = f"has been silent for {silent_secs:.0f} seconds, last heard"
        return f"worker {i} ({self.addresses[i]}) {verb} at step {beat.step} ({beat.phase})"

    def describe_others(self, now: float) -> str:
        """Returns the last known place of every neighbor."""
        return "; ".join(self.describe(i, now) for i in self.neighbors)

    def name(self, workers: Sequence[int]) -> str:
        """Returns workers with their addresses, as in `workers 1 (b:4000), 2 (c:4000)`."""
        names = ", ".join(f"{i} ({self.addresses[i]})" for i in workers)
        return f"worker{'s' if len(workers) > 1 else ''} {names}"


class Timeouts(NamedTuple):
    """How long a run may stand still, in seconds; 0: without limit."""

    hang_secs: float = 0.0  # Config.hang_timeout
    join_secs: float = 0.0  # Config.start_timeout


class Progress(NamedTuple):
    """Where this worker is, and since when it has made no progress."""

    step: int
    phase: str
    since: float

    def advance(self, step: int, phase: str, now: float) -> "Progress":
        """Returns the progress at `now`; phases in which a worker needs no other one count as progress."""
        stands_still = (step, phase) == (self.step, self.phase) and phase in (JOINING, TRAINING, GATHERING)
        return self if stands_still else Progress(step, phase, now)


class Verdict(NamedTuple):
    """Why this worker has to end."""

    reason: str
    is_hang: bool = False  # if so, the stacks of its threads are of interest


def judge(table: Table, progress: Progress, timeouts: Timeouts, now: float) -> Verdict | None:
    """Returns why this worker has to end; None if the run goes on.

    Args:
        table: the last heartbeat of each worker.
        progress: of this worker.
        timeouts: limits for silence and for standing still.
        now: the time on the clock of `Beat.received_at`.
    """
    if reason := find_failure(table, now):
        return Verdict(reason)
    if ended := find_ended(table):
        return Verdict(ended.error, ended.is_hang)
    if reason := find_silence(table, timeouts.hang_secs, now):
        return Verdict(reason, is_hang=True)
    still_secs = now - progress.since
    left = [i for i, beat in sorted(table.beats.items()) if beat.state == "left"]
    if left and still_secs > LEFT_SECS:
        return Verdict(f"{table.describe(left[0], now)}, before the run was over")
    if progress.phase == JOINING and 0 < timeouts.join_secs < still_secs:
        return Verdict(
            f"TensorFlow has not joined the workers for start_timeout={timeouts.join_secs:g} seconds, though they hear "
            f"each other ({table.describe_others(now)}): are their TCP ports open, too?",
            is_hang=True,
        )
    if progress.phase != JOINING and 0 < timeouts.hang_secs < still_secs:
        return Verdict(
            f"no step has ended for hang_timeout={timeouts.hang_secs:g} seconds; worker {table.index} is at step "
            f"{progress.step} ({progress.phase}), {table.describe_others(now)}",
            is_hang=True,
        )
    return None


def find_failure(table: Table, now: float) -> str:
    """Returns a sentence about the first worker that failed, died or was restarted; "" if none did."""
    if reason := find_reported_failure(table):
        return reason
    for i, beat in sorted(table.beats.items()):
        if beat.state == "alive" and table.is_gone(i, now):
            return (
                f"the process of worker {i} ({table.addresses[i]}) is gone without a word, last heard at step "
                f"{beat.step} ({beat.phase}): was it killed, or out of memory? Its own output may tell"
            )
        if beat.state == "alive" and i in table.restarted and table.is_silent(i, now):
            return f"{table.describe(i, now)}, and was started again"
    return ""


def find_reported_failure(table: Table) -> str:
    """Returns a sentence about the first worker that says that it failed; "" if none did."""
    for i, beat in sorted(table.beats.items()):
        if beat.state == "failed":
            return f"worker {i} failed at step {beat.step} ({beat.phase}): {beat.error}"
    return ""


def find_ended(table: Table) -> Beat | None:
    """Returns the heartbeat of the first worker that ended because another one failed; None if none did."""
    return next((beat for _, beat in sorted(table.beats.items()) if beat.state == "ended"), None)


def find_silence(table: Table, limit_secs: float, now: float) -> str:
    """Returns the reason why another worker ended, or which worker is silent for too long; "" if none.

    Args:
        table: the last heartbeat of each worker.
        limit_secs: longest silence allowed; 0: any.
        now: the time on the clock of `Beat.received_at`.
    """
    if ended := find_ended(table):
        return ended.error
    for i, beat in sorted(table.beats.items()):
        if beat.state == "alive" and 0 < limit_secs < table.silent_secs(i, now):
            return table.describe(i, now)
    return ""


def find_running(table: Table, now: float) -> list[int]:
    """Returns the other workers that can be heard and have not reached the end of their program."""
    audible = [i for i in table.beats if not table.is_silent(i, now) and not table.is_gone(i, now)]
    return [i for i in audible if table.beats[i].state == "alive"]


def level_at_end(table: Table, now: float) -> int:
    """Returns the level of a worker that has left: above that of the neighbors that did, 0 until all have."""
    if find_running(table, now):
        return 0
    left = [i for i, beat in table.beats.items() if beat.state == "left" and not table.is_silent(i, now)]
    return 1 + min((table.beats[i].level for i in left), default=table.top_level)


def find_unmet(table: Table, now: float) -> list[int]:
    """Returns the neighbors that were not heard or do not hear all of theirs, else those that know of another one.

    A worker with other facts counts as met once one of them is known; then nobody else is waited for.
    """
    unmet = [i for i in table.neighbors if not _is_met(table, i, now)]
    if unmet or has_other_facts(table):
        return unmet
    return [i for i in table.neighbors if table.beats[i].level < table.top_level - 1]


def has_other_facts(table: Table) -> bool:
    """Returns True if a neighbor is known to have been started otherwise."""
    return any(table.facts.find_difference(beat.facts) is not None for beat in table.beats.values())


def rise(table: Table, now: float) -> Table:
    """Returns the table with the level of a worker that has met its neighbors, started as it was."""
    if has_other_facts(table) or not all(_is_met(table, i, now) for i in table.neighbors):
        return table
    return table.replace(level=1 + min((table.beats[i].level for i in table.neighbors), default=0))


def end_meeting(table: Table) -> Table:
    """Returns the table of a worker that waits no longer: all are there, or one was started otherwise."""
    return table.replace(has_met=True, level=table.level if has_other_facts(table) else table.top_level)


def name_missing(table: Table, now: float) -> str:
    """Returns the workers that are waited for: neighbors that are silent, else those that other neighbors name."""
    unmet = find_unmet(table, now)
    if not unmet:
        return ""
    if silent := [i for i in unmet if table.is_silent(i, now)]:
        return table.name(silent)
    told = [table.beats[i] for i in unmet if table.beats[i].missing] if table.top_level > 1 else []
    return min(told, key=lambda beat: beat.level).missing if told else table.name(unmet)


def _is_met(table: Table, i: int, now: float) -> bool:
    if table.is_silent(i, now):
        return False
    beat = table.beats[i]
    if beat.facts.digest != table.facts.digest:
        return table.facts.find_difference(beat.facts) is not None
    runs = {j: other.run for j, other in table.beats.items()} | {table.index: table.run}
    heard = {j: beat.heard.get(str(j)) for j in neighbors(i, len(table.addresses))}
    return all(run is not None and run == runs.get(j, run) for j, run in heard.items())


def explain_unmet(table: Table, timeout_secs: float, notes: Sequence[str], now: float) -> str:
    """Returns an error message that names the workers that did not come or do not hear all others.

    Args:
        table: the last heartbeat of each worker.
        timeout_secs: how long this worker waited.
        notes: what may be the cause.
        now: the time on the clock of `Beat.received_at`.
    """
    missing = name_missing(table, now)
    unmet = find_unmet(table, now)
    has_come = missing == table.name(unmet) and not any(table.is_silent(i, now) for i in unmet)
    problem = f"{missing} did not {'hear all others' if has_come else 'come'} within {timeout_secs:g} seconds"
    causes = f" ({'; '.join(notes)})" if notes else ""
    return (
        f"{problem}{causes}, and worker {table.index} waits no longer: look at their output, and whether each can "
        "reach the addresses of all by UDP and TCP, or set a longer start_timeout."
    )


def check_facts(table: Table, i: int) -> None:
    """Checks that worker `i` was started as this one.

    Raises:
        ValueError: if a fact is known to differ.
    """
    remote = table.beats[i].facts
    if (name := table.facts.find_difference(remote)) is not None:
        here, there = table.facts.values.get(name, str(None)), remote.values[name]
        raise ValueError(
            f"Workers were started differently: {name} is {here} on worker {table.index} and "
            f"{f'another {there}' if here == there else there} on worker {i}; start all with the same command."
        )
