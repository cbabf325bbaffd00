"""Ray: runs workers in actors of a Ray cluster; `elastic` starts one membership after another.

    with Actors(most=8, cpus=1, gpus=1) as cluster:
        cluster.gather(least=1, signals=signals)
        code = elastic.run(settings, start, signals, cluster.there)     # start calls cluster.start for each worker

An actor is a slot: it reserves its resources for as long as the run lasts, and runs one worker after the other, each
in a process of its own. Ray knows when a node has gone or come; an actor that is lost is asked for again. The workers'
lines, messages and ends come with the answers to `report`, of which one is always under way.
"""

import collections
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from distloop.launcher import consoles, machine, processes
from distloop.launcher.inbox import Inbox
from distloop.workers.messages import Membership

_REPORT_SECS = 0.5  # that an actor waits for something to report
_IDLE_SECS = 0.1  # without a worker, so that one soon starts
_GATHER_SECS = 10.0  # for which nobody came, before a run starts with fewer than the most workers


class ActorReport(NamedTuple):
    """What is new in an actor.

    Attributes:
        address: where its next worker can listen.
        lines: of its worker, each with its descriptor.
        messages: of its worker.
        end: exit code of its worker, and how it ended in words; None: it runs, or there is none.
    """

    address: str
    lines: list[tuple[int, bytes]]
    messages: list[dict[str, Any]]
    end: tuple[int, str] | None


class Slot:
    """A Ray actor in which one worker after the other runs."""

    def __init__(self) -> None:
        """Starts no worker, but the process that kills it if this one ends."""
        self._guard = processes.Guard()
        self._guard.__enter__()
        self._worker: processes.Process | None = None
        self._inbox = Inbox()
        self._lines: collections.deque[tuple[int, bytes]] = collections.deque()
        self._address = ""
        self._failure: tuple[int, str] | None = None  # of a worker that could not start

    def start(
        self, arguments: Sequence[str], membership: Membership, variables: dict[str, str], directory: str
    ) -> None:
        """Starts a worker.

        Args:
            arguments: for Python.
            membership: of the worker, and its index.
            variables: of its environment, besides those of the actor.
            directory: where it starts, if this node has it.
        """
        self._inbox = Inbox()
        if os.path.isdir(directory):
            os.chdir(directory)
        try:
            self._worker = processes.Process(
                membership.worker,
                [sys.executable, *arguments],
                {**os.environ, **variables, **membership._replace(pipe=self._inbox.pipe).variables()},
                cores=[],
                guard=self._guard,
                descriptors=[self._inbox.write_end],
                write=lambda *line: self._lines.append(line),
            )
        except OSError as error:  # no memory, or too many files
            self._failure = 1, f"as it could not start ({error})"

    def report(self) -> ActorReport:
        """Returns what is new, once there is something, or after half a second."""
        import ray

        if not self._address:
            host = ray.util.get_node_ip_address()
            self._address = f"{f'[{host}]' if ':' in host else host}:{machine.choose_ports(1)[0]}"
        if self._worker is None:
            time.sleep(_IDLE_SECS)
            failure, self._failure = self._failure, None
            return ActorReport(self._address, [], [], failure)
        messages, end, ends_at = self._inbox.read(), None, time.monotonic() + _REPORT_SECS
        while not (self._lines or messages or end) and time.monotonic() < ends_at:
            processes.wait([self._inbox], _IDLE_SECS)
            if self._worker.has_ended():  # before the rest is read
                end = self._worker.code or 0, self._worker.how
            messages += self._inbox.read()
        lines = [self._lines.popleft() for _ in range(len(self._lines))]  # threads append to them
        report = ActorReport(self._address, lines, messages, end)
        if end:
            self._inbox.close()
            self._worker, self._address = None, ""
        return report

    def signal(self, number: int) -> None:
        """Sends the worker a signal, if it runs."""
        if self._worker is not None:
            self._worker.signal_once(number)


class _Worker(processes.Process):
    """A worker in an actor, as `processes.Group` knows it."""

    def __init__(self, index: int, cluster: "Actors", slot: int, inbox: Inbox):
        self.index, self._cluster, self.slot, self.inbox = index, cluster, slot, inbox
        self.code, self.how, self.was_signalled = None, "", False
        self.end: tuple[int, str] | None = None
        self.is_shown = True

    def signal_once(self, number: int) -> None:
        if not self.was_signalled:
            self._cluster.actors[self.slot].signal.remote(int(number))
        self.was_signalled = True

    def kill(self) -> None:
        self.was_signalled = True
        if self.end is None:
            self._cluster.kill(self.slot)

    def has_ended(self) -> bool:
        with self._cluster.lock:  # after which no message comes
            if self.end:
                self.code, self.how = self.end
        return self.code is not None


class Actors:
    """The actors of a run, and what they report.

    Attributes:
        actors: by slot.
        lock: held while what an actor sent is taken.
    """

    def __init__(self, most: int, cpus: int, gpus: int):
        """Connects to Ray, and asks for actors.

        Args:
            most: number of actors; each has a slot once Ray has room for it.
            cpus: of each actor, as Ray counts them.
            gpus: of each actor, if the cluster has any.

        Raises:
            ValueError: if Ray is missing or cannot be reached.
        """
        try:
            import ray
        except ImportError:
            raise ValueError("--ray was given, but Ray is not installed: pip install ray.") from None
        try:
            ray.init()
        except ConnectionError as error:
            raise ValueError(
                f"Ray cannot be reached ({error}): start a cluster, or unset RAY_ADDRESS to start a local one."
            ) from error
        gpus = gpus if ray.cluster_resources().get("GPU") else 0
        self._ray, self.lock = ray, threading.Lock()
        self._remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD")(Slot)
        self.actors = [self._remote.remote() for _ in range(most)]
        self._reports = [actor.report.remote() for actor in self.actors]  # under way
        self._addresses = [""] * most  # empty: the actor has no slot
        self._workers: dict[int, _Worker] = {}  # that run, by slot
        self._is_over = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="distloop-ray", daemon=True)

    def __enter__(self) -> "Actors":
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._watching.join()
        for actor in self.actors:
            self._ray.kill(actor)
        self._ray.shutdown()

    def there(self) -> list[int]:
        """Returns the slots that Ray has given."""
        return [slot for slot, address in enumerate(self._addresses) if address]

    def gather(self, least: int, signals: processes.Signals) -> bool:
        """Waits until all slots are there, or enough and no more come; returns whether a signal came meanwhile."""
        count, changed_at = 0, time.monotonic()
        while count < len(self.actors):
            if signals.wait(_IDLE_SECS):
                return True
            if count != (count := len(self.there())):
                changed_at = time.monotonic()
                processes.log(f"Ray has {count} of {len(self.actors)} slots.")
            if count >= least and time.monotonic() > changed_at + _GATHER_SECS:
                return False
        return False

    def address(self, slot: int) -> str:
        """Returns where a worker in a slot can listen; of a slot that has just been lost, an address of nobody."""
        return self._addresses[slot] or "192.0.2.1:9"

    def start(
        self, slot: int, arguments: Sequence[str], membership: Membership, variables: dict[str, str], inbox: Inbox
    ) -> processes.Process:
        """Starts a worker in a slot, as `Slot.start`; its messages come to `inbox`."""
        worker = _Worker(membership.worker, self, slot, inbox)
        with self.lock:
            self._workers[slot] = worker
            self.actors[slot].start.remote(list(arguments), membership, variables, os.getcwd())
        return worker

    def kill(self, slot: int) -> None:
        """Ends an actor, whose guard kills its worker; another one takes its place."""
        self._ray.kill(self.actors[slot])

    def _watch(self) -> None:
        """Takes what the actors report."""
        while not self._is_over.is_set():
            self._ray.wait(self._reports, num_returns=1, timeout=_REPORT_SECS)
            done, _ = self._ray.wait(self._reports, num_returns=len(self._reports), timeout=0)
            for answer in done:
                self._take(self._reports.index(answer), answer)

    def _take(self, slot: int, answer: Any) -> None:
        """Takes one answer, and asks again; for another actor in place of one that is lost."""
        try:
            report = self._ray.get(answer)
        except self._ray.exceptions.RayError:
            self.kill(slot)  # if it is not gone
            report = ActorReport("", [], [], (128 + signal.SIGKILL, "as Ray has lost its actor"))
            self.actors[slot] = self._remote.remote()
        worker = self._workers.get(slot)
        for line in report.lines if worker is not None and worker.is_shown else ():
            consoles.write(*line)
        with self.lock:
            self._addresses[slot] = report.address
            if worker is not None:
                for message in (*report.messages, {}):  # the last one wakes the launcher
                    worker.inbox.send(**message)
                worker.end = report.end
                if report.end:
                    del self._workers[slot]
        self._reports[slot] = self.actors[slot].report.remote()
