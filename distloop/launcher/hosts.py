"""Hosts: this launcher's part in a run over several hosts, which starts one membership after the other.

    launcher = Launcher(settings, places=1, address="10.0.0.7", start=start, signals=signals)
    code = launcher.run("runs/first/membership")        # start(record, indices, notes) returns running processes

Each host has a launcher, started by the same command; a scheduler places them and brings them back. They agree through
the files of a `meeting`. The first host that is left of a membership proposes the next one, once the workers of all
hosts have ended, and every launcher starts its own workers of it. Two that propose at once, because they do not see the
same hosts, harm nothing: one of them has the number. `membership` and `elastic` decide as on one host.
"""

import dataclasses
import functools
import math
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence

from distloop.distributed.heartbeat import EXIT_CODE as FOLLOWER_EXIT_CODE
from distloop.distributed.notes import Notes
from distloop.distributed.preemption import EXIT_CODE as SAVED_EXIT_CODE
from distloop.launcher import elastic, ports, processes
from distloop.launcher.meeting import LOOK_SECS, Host, Meeting, Member, Record, Report, View
from distloop.launcher.membership import Plan

SILENT_SECS = 4.0  # after which a host is not waited for, nor counted, between two memberships
GONE_SECS = 30.0  # after which a host is taken for gone whose workers may be training
RETURN_SECS = 2.0  # for which a host is waited for whose worker fell, and that is there
GATHER_SECS = 10.0  # for which nobody came, before a run starts with fewer than the most workers

Start = Callable[[Record, range, Notes], Sequence[processes.Process]]


class Launcher:
    """The launcher of one host."""

    def __init__(
        self,
        settings: elastic.Settings,
        *,
        places: int,
        address: str,
        start: Start,
        signals: processes.Signals,
    ):
        """Touches no disk.

        Args:
            settings: how the run is started again; numbers of workers are those over all hosts.
            places: for workers on this host.
            address: under which the other hosts reach this one.
            start: starts this host's workers of a membership; they tell notes.
            signals: to the launcher.
        """
        self._settings, self._places, self._signals = settings, places, signals
        self._start = start
        self._plan = Plan(1, places)  # of this host's places
        self._host = Host(f"{address}-{secrets.token_hex(2)}", time.time(), address, tuple(ports.choose(places)))
        self._gathered: tuple[frozenset[str], float] = (frozenset(), 0.0)  # hosts that are there, and since when
        self._ended = (0, 0.0, 0.0)  # a membership, when it was seen to have ended; on the monotonic clock and Unix
        self._proposed = 0  # the last number
        self._short_since: float | None = None  # too few places are there; on the monotonic clock
        self._lock = threading.Lock()  # held while the meeting's thread tells notes
        self._notes: Notes | None = None  # of the workers that run
        self._number = 0  # of their membership
        self._told: set[str] = set()  # why they were told to stop

    def run(self, directory: str) -> int:
        """Runs memberships until the run ends or this host leaves it; returns the exit code.

        Raises:
            ValueError: if the hosts cannot meet in the directory.
        """
        with Meeting(directory, self._host.name, self._describe, self._look_after_workers) as self._meeting:
            self._number = self._meeting.view.number
            processes.log(f"host {self._host.name} meets the others in {directory}, with {_count(self._places)}.")
            while True:
                record = self._wait_for_record()
                if record is None:
                    return SAVED_EXIT_CODE
                if record.code is not None:
                    return record.code
                outcome = self._run_membership(record)
                if outcome.is_last:  # also where the others fell, or its workers were not yet ready to save
                    has_left = outcome.code in (FOLLOWER_EXIT_CODE, 128 + signal.SIGTERM)
                    return SAVED_EXIT_CODE if has_left else outcome.code

    def _describe(self) -> Host:
        """Returns this host with the ports of the places that are there now."""
        return self._host._replace(ports=self._host.ports[: len(self._plan.there(time.monotonic()))])

    def _wait_for_record(self) -> Record | None:
        """Returns the next record that concerns this host; None if it is asked to leave before."""
        self._short_since = None
        while True:
            view = self._meeting.view
            record = view.record
            if record is not None and record.number > self._number:
                if record.code is not None or record.workers_of(self._host.name):
                    return record
            if leader(view) == self._host.name and has_ended(view) and view.number >= self._proposed:
                self._propose(view)
            if number := self._signals.wait(LOOK_SECS / 2):
                processes.log(f"{number.name}, this host leaves.")
                self._announce(self._host._replace(has_left=True))
                return None

    def _announce(self, host: Host) -> None:
        """Makes this host known as it is now."""
        self._host = host
        try:
            self._meeting.announce()
        except OSError:  # the meeting's thread tries again
            pass

    def _propose(self, view: View) -> None:
        """Writes the next record, if it is time for one."""
        record = self._next(view, time.monotonic())
        if record is None:
            return
        try:
            is_next = self._meeting.propose(record)
        except OSError:  # the meeting's thread tells
            return
        self._proposed = record.number
        for name in view.hosts if is_next else ():
            if view.hosts[name].has_left or view.silent_secs[name] > GONE_SECS:
                self._meeting.forget(name)

    def _next(self, view: View, now: float) -> Record | None:
        """Returns the record that follows; None as long as others are waited for."""
        settings, hosts = self._settings, available(view)
        if self._ended[0] != view.number:
            self._ended = view.number, now, time.time()
        if any_returns(view) and now < self._ended[1] + RETURN_SECS:
            return None
        plan, draft = follow(view, settings)
        if draft.code is not None:
            return draft
        places = sum(len(host.ports) for host in hosts)
        plan = _with_places(plan, places)
        if not (size := plan.size(now)):
            return self._wait_for_places(draft, plan, places, now)
        self._short_since = None
        if not draft.cause and places < settings.most and self._is_gathering(hosts, places, now):
            return None
        members: list[Member] = []
        for host in hosts:
            if own := host.ports[: size - sum(len(member.ports) for member in members)]:
                members.append(Member(host.name, host.address, own))
        draft = draft._replace(ended_at=self._ended[2], started_at=time.time())
        return draft._replace(members=tuple(members), secret=secrets.token_hex(16))

    def _is_gathering(self, hosts: Sequence[Host], places: int, now: float) -> bool:
        """Returns whether more hosts may come before a run begins."""
        if self._gathered[0] != (names := frozenset(host.name for host in hosts)):
            self._gathered = names, now
            processes.log(
                f"there are places for {places} of {self._settings.most} workers, which begin if no other host comes "
                f"for {GATHER_SECS:g} s."
            )
        return now < self._gathered[1] + GATHER_SECS

    def _wait_for_places(self, draft: Record, plan: Plan, places: int, now: float) -> Record | None:
        """Returns the end of the run once there were too few places for too long."""
        settings = self._settings
        if self._short_since is None:
            self._short_since = now
            processes.log(
                f"there are places for {elastic.count_workers(places)}, and {plan.allowed[0]} are needed: waiting "
                f"{settings.wait_secs:g} s for more."
            )
        if now < self._short_since + settings.wait_secs:
            return None
        elastic.say_too_few(settings, plan, places)
        return draft._replace(code=SAVED_EXIT_CODE)

    def _run_membership(self, record: Record) -> processes.Outcome:
        """Runs this host's workers of a membership, and reports how they ended."""
        settings, indices = self._settings, record.workers_of(self._host.name)
        places = self._plan.there(time.monotonic())
        if record.cause:
            plan = Plan(settings.least, settings.most, record.sizes)
            elastic.say_membership(plan, record.number, len(record.addresses), record.cause)
        notes = Notes(functools.partial(elastic.say_phases, record.number))
        workers = self._start(record, indices, notes)
        with self._lock:
            self._number, self._notes, self._told = record.number, notes, set()
        leaves_at = functools.partial(self._leaves_at, notes)
        outcome = processes.Group(workers, self._signals, settings.grace_secs, notes, leaves_at).wait()
        with self._lock:
            self._notes = None
        notes.close()
        lost = sorted({*outcome.fallen, *outcome.leavers})
        self._plan = self._plan.lose([places[i] for i in lost], time.monotonic())
        report = Report(
            record.number,
            outcome.code,
            outcome.is_crash,
            outcome.is_last,
            bool(outcome.fallen),
            outcome.cause,
            outcome.has_left_for_more,
            outcome.fell_at,
            notes.step,
            notes.sizes,
            tuple(indices[i] for i in outcome.leavers),
        )
        host = self._host._replace(ports=tuple(ports.choose(self._places)), report=report, has_left=outcome.is_last)
        self._announce(host)
        return outcome

    def _leaves_at(self, notes: Notes) -> float:
        """Returns when the workers here make room for more, which the first host decides, as `elastic` does."""
        view = self._meeting.view
        record = view.record
        is_first = record is not None and record.number == self._number and leader(view) == self._host.name
        if record is None or not is_first or not self._settings.is_elastic or notes.began_at is None:
            return math.inf
        plan = Plan(self._settings.least, self._settings.most, notes.sizes)
        plan = _with_places(plan, sum(len(host.ports) for host in available(view)))
        if plan.grows_at(len(record.addresses)) == math.inf:
            return math.inf
        return notes.began_at + notes.start_secs

    def _look_after_workers(self, view: View) -> None:
        """Wakes the group of workers, and tells it to stop where the others do; in the meeting's thread."""
        with self._lock:
            if self._notes is None:
                return
            for cause, secs in stops(view, self._number, self._host.name, self._settings.grace_secs).items():
                if cause not in self._told:
                    self._told.add(cause)
                    if not secs:
                        processes.log(f"{cause}: the workers here are stopped.")
                    self._notes.tell(stop_secs=secs)
            self._notes.tell()


def is_there(view: View, name: str, secs: float) -> bool:
    """Returns whether a host has not left, and was not silent for so long."""
    return name in view.hosts and not view.hosts[name].has_left and view.silent_secs[name] < secs


def reports_of(view: View) -> dict[str, Report]:
    """Returns what the hosts of the newest membership reported about its end, in their order."""
    record = view.record or Record(0)
    hosts = [view.hosts[member.name] for member in record.members if member.name in view.hosts]
    return {host.name: host.report for host in hosts if host.report and host.report.number == record.number}


def has_ended(view: View) -> bool:
    """Returns whether no worker of the newest membership runs any more, as far as can be known."""
    reports = reports_of(view)
    secs = SILENT_SECS if reports else GONE_SECS
    record = view.record or Record(0)
    return all(member.name in reports or not is_there(view, member.name, secs) for member in record.members)


def leader(view: View) -> str | None:
    """Returns the host that decides: the first one that is left of the membership, else the one that came first."""
    secs = SILENT_SECS if reports_of(view) else GONE_SECS
    members = [member.name for member in (view.record or Record(0)).members]
    others = sorted((host.since, name) for name, host in view.hosts.items() if name in view.alive)
    names = [name for name in members if is_there(view, name, secs)]
    names += [name for _, name in others if is_there(view, name, SILENT_SECS)]
    return names[0] if names else None


def available(view: View) -> list[Host]:
    """Returns the hosts with places, those of the newest membership first and in its order."""
    order = {member.name: i for i, member in enumerate((view.record or Record(0)).members)}
    hosts = [view.hosts[name] for name in view.alive if is_there(view, name, SILENT_SECS)]
    hosts = [host for host in hosts if host.ports]
    return sorted(hosts, key=lambda host: (order.get(host.name, math.inf), host.since, host.name))


def any_returns(view: View) -> bool:
    """Returns whether a host of the newest membership is there, and has no place for now."""
    members = (view.record or Record(0)).members
    return any(is_there(view, name, SILENT_SECS) and not view.hosts[name].ports for name, *_ in members)


def stops(view: View, number: int, own: str, grace_secs: float) -> dict[str, float]:
    """Returns why the workers of this host are to end, and after how many seconds they are stopped.

    Args:
        view: the last look.
        number: of their membership.
        own: name of this host.
        grace_secs: time from SIGTERM to SIGKILL for workers that are stopped.
    """
    record = view.record
    if record is None or record.number != number:
        is_newer = record is not None and record.number > number
        return {"the other hosts went on without this one": 0.0} if is_newer else {}
    causes, reports = {}, reports_of(view)
    for member in record.members:
        if member.name == own:
            continue
        if report := reports.get(member.name):
            secs = processes.FAIL_SECS if report.code not in (0, SAVED_EXIT_CODE) else processes.FOLLOW_SECS
            causes[f"the workers on {member.name} have ended"] = secs + grace_secs
        elif not is_there(view, member.name, GONE_SECS):
            causes[f"host {member.name} is gone"] = 0.0
    return causes


def merge(view: View) -> tuple[processes.Outcome, str]:
    """Returns how the newest membership ended on all its hosts, and who was asked to leave."""
    reports = reports_of(view)
    fell_at = min((report.fell_at for report in reports.values() if report.fell_at), default=time.time())
    outcome = processes.Outcome(max((r.code for r in reports.values()), default=0), is_crash=False, fell_at=fell_at)
    gone = [member.name for member in view.record.members if member.name not in reports] if view.record else []
    failed = [report for report in reports.values() if report.is_crash]
    fallen = [report for report in failed if report.has_fallen]
    left = [name for name, report in reports.items() if report.is_last]
    leavers = elastic.name_workers({worker for report in reports.values() for worker in report.leavers})
    leavers = f"host{'s' * (len(left) > 1)} {', '.join(left)} {'were' if len(left) > 1 else 'was'}" if left else leavers
    if reports and outcome.code == 0:
        return outcome, ""
    if fallen:
        return outcome._replace(is_crash=True, code=fallen[0].code, cause=fallen[0].cause), ""
    if gone:
        return outcome._replace(is_crash=True, code=137, cause=f"host {gone[0]} is gone"), ""
    if failed and not left:
        return outcome._replace(is_crash=True, code=failed[0].code, cause=failed[0].cause), ""
    return outcome._replace(has_left_for_more=any(r.has_left_for_more for r in reports.values()) and not left), leavers


def follow(view: View, settings: elastic.Settings) -> tuple[Plan, Record]:
    """Returns the plan after the newest membership, and the next record without its members; it may end the run.

    A membership of which no host was alive while this launcher looked, and one after which the run ended, is followed
    by a run that begins: nothing that happened before counts.
    """
    last = view.record
    launch = last.launch if last is not None else secrets.token_hex(4)
    draft = Record(view.number + 1, launch=launch)
    if last is None or last.code is not None or not any(member.name in view.alive for member in last.members):
        return Plan(settings.least, settings.most), draft
    reports, (outcome, leavers) = reports_of(view).values(), merge(view)
    sizes = next((report.sizes for report in reports if report.sizes), last.sizes)
    plan = Plan(settings.least, settings.most, sizes, step=last.step, restarts=last.restarts)
    step = max((report.step for report in reports if report.step is not None), default=None)
    plan, cause, code = elastic.conclude(settings, plan.begin(step), outcome, leavers)
    if step is None and last.cause:  # nobody has noted the change before
        cause = f"{last.cause}; then {cause}"
    return plan, draft._replace(
        cause=cause,
        code=code,
        fell_at=outcome.fell_at,
        step=plan.step,
        restarts=plan.restarts,
        sizes=plan.sizes,
    )


def _count(places: int) -> str:
    return f"{places} place{'s' * (places > 1)}"


def _with_places(plan: Plan, count: int) -> Plan:
    """Returns the plan with so many places that are there, and the others never."""
    count = min(count, plan.most)
    return dataclasses.replace(plan, back_at=(-math.inf,) * count + (math.inf,) * (plan.most - count))
