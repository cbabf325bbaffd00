"""The faults: what befalls a run, how each is done, and how the run may end.

    fault = KillWorker.draw(random, setting)
    fault.strike(life)                  # in a thread of its own; returns once it is over
    fault.outcome(setting)              # the exit codes that it allows, and what the output has to name

A deadly fault ends every process of the run; after any other the run goes on as if nothing had happened.
"""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from tests.campaigns.nemesis import kernel
from tests.campaigns.nemesis.network import Rule

SAVED, FOLLOWED, KILLED, TERMINATED = 75, 76, 137, 143
HANG_SECS = 8  # --hang_timeout where a worker is stopped for ever; else 120
START_SECS = 45  # --start_timeout: so long the other hosts wait for a worker that ended before it met them


class Outcome(NamedTuple):
    """How a life may end.

    Attributes:
        codes: by command, those that are allowed.
        text: a regular expression that the output has to match.
        within_secs: from the fault to the end of the last process.
        loses: whether steps may be lost; if not, the run goes on from the very step that it left at.
    """

    codes: Mapping[int, set[int]]
    text: str = ""
    within_secs: float = 40.0
    loses: bool = True


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault; its fields say where and how long. Each is a frozen dataclass."""

    is_deadly: ClassVar[bool] = False
    hangs: ClassVar[bool] = False  # a worker is stopped for ever
    placements: ClassVar[tuple[str, ...]] = ("alone", "launcher", "hosts", "elastic")

    def __init_subclass__(cls):
        dataclasses.dataclass(frozen=True)(cls)

    @property
    def name(self):
        return type(self).__name__

    @classmethod
    def fits(cls, setting):
        """Returns whether it can befall a run of this setting on this machine."""
        return setting.placement in cls.placements

    @classmethod
    def draw(cls, random, setting):
        return cls()

    def strike(self, life):
        raise NotImplementedError

    def outcome(self, setting):
        """Returns how a run may end that it befalls; only asked of deadly ones."""
        raise NotImplementedError


def _codes(setting, victim, code, others):
    """Returns the codes of all commands, given that of the victim's."""
    command = setting.command_of(victim)
    return {i: code if i == command else others for i in range(setting.commands)}


class KillWorker(Fault):
    """SIGKILL to a worker."""

    worker: int
    is_deadly: ClassVar[bool] = True

    @classmethod
    def draw(cls, random, setting):
        return cls(random.randrange(setting.workers))

    def strike(self, life):
        life.signal_worker(self.worker, signal.SIGKILL)

    def outcome(self, setting):
        text = {
            "alone": "",
            "launcher": rf"worker {self.worker} failed( first)?, by signal 9",
            "hosts": rf"worker {self.worker} \([^)]*\).*(gone without a word|silent)",
        }
        return Outcome(_codes(setting, self.worker, {KILLED}, {FOLLOWED}), text[setting.placement])


class KillChief(KillWorker):
    """SIGKILL to worker 0, which owns the files."""

    @classmethod
    def draw(cls, random, setting):
        return cls(0)


class KillLauncher(Fault):
    """SIGKILL to a launcher; its workers end with it."""

    host: int
    is_deadly: ClassVar[bool] = True
    placements: ClassVar[tuple[str, ...]] = ("launcher", "hosts", "elastic")

    @classmethod
    def draw(cls, random, setting):
        return cls(random.randrange(setting.commands))

    def strike(self, life):
        life.signal_command(self.host, signal.SIGKILL)

    def outcome(self, setting):
        text = rf"worker {self.host} \([^)]*\).*(gone without a word|silent)" if setting.placement == "hosts" else ""
        return Outcome(_codes(setting, self.host, {KILLED}, {FOLLOWED}), text)


class Terminate(Fault):
    """SIGTERM to a command, as schedulers send it, or to one worker."""

    worker: int
    is_to_command: bool
    is_deadly: ClassVar[bool] = True

    @classmethod
    def draw(cls, random, setting):
        return cls(random.randrange(setting.workers), random.random() < 0.7)

    def strike(self, life):
        if self.is_to_command:
            life.signal_command(life.setting.command_of(self.worker), signal.SIGTERM)
        else:
            life.signal_worker(self.worker, signal.SIGTERM)

    def outcome(self, setting):
        return Outcome(_codes(setting, self.worker, {SAVED}, {SAVED}), loses=False)


class TerminateTwice(Terminate):
    """SIGTERM, and again before the run is saved, or while it is."""

    def strike(self, life):
        super().strike(life)
        if not life.ended.wait(1.05):
            super().strike(life)

    def outcome(self, setting):
        ends = {SAVED, TERMINATED, KILLED}
        return Outcome(_codes(setting, self.worker, ends, ends | {FOLLOWED}))


class StopForEver(KillWorker):
    """SIGSTOP to a worker that is not woken before the others have given up."""

    hangs: ClassVar[bool] = True

    @classmethod
    def fits(cls, setting):
        return setting.workers > 1

    def strike(self, life):
        life.signal_worker(self.worker, signal.SIGSTOP)
        if life.setting.placement == "hosts" and not life.ended.wait(HANG_SECS + 12):  # its launcher sees nothing
            life.signal_worker(self.worker, signal.SIGCONT)

    def outcome(self, setting):
        codes = _codes(setting, self.worker, {FOLLOWED, KILLED}, {FOLLOWED})
        return Outcome(codes, rf"worker {self.worker} \([^)]*\).*silent|no step has ended", HANG_SECS + 50.0)


class Suspend(Fault):
    """SIGSTOP for a time, to a worker or a launcher."""

    worker: int
    is_command: bool
    secs: float

    @classmethod
    def draw(cls, random, setting):
        return cls(random.randrange(setting.workers), random.random() < 0.3, random.choice([1, 2, 4, 20]))

    def strike(self, life):
        for number in (signal.SIGSTOP, signal.SIGCONT):
            if self.is_command:
                life.signal_command(life.setting.command_of(self.worker), number)
            else:
                life.signal_worker(self.worker, number)
            life.ended.wait(self.secs if number == signal.SIGSTOP else 0)


class TerminateChild(Fault):
    """SIGTERM to a child that a worker started: it ends, and nothing else does."""

    @classmethod
    def fits(cls, setting):
        return setting.child_of >= 0

    def strike(self, life):
        child = life.wait_for("child")
        if child is None:
            return
        pid = life.find(life.setting.child_of, child["child"])
        life.signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and pid is not None and kernel.state_of(pid) not in "XZ":
            time.sleep(0.02)
        life.write("child ended", is_gone=pid is None or kernel.state_of(pid) in "XZ")


class ReadNothing(Fault):
    """Nobody reads what the commands print, as with a pager that waits; until the end, if a deadly fault comes.

    Where there is no launcher, which reads on, the first SIGTERM is heard once someone reads.
    """

    secs: float

    @classmethod
    def fits(cls, setting):
        return setting.noise > 0

    @classmethod
    def draw(cls, random, setting):
        return cls(random.choice([3, 8]))

    def strike(self, life):
        life.pause_outputs(True)
        until_end = life.has_deadly_fault and life.setting.placement != "alone"
        life.ended.wait(None if until_end else self.secs)
        life.pause_outputs(False)


class FillDisk(Fault):
    """The disk of the workdir is full for a time."""

    secs: float

    @classmethod
    def fits(cls, setting):
        return kernel.can_mount()

    @classmethod
    def draw(cls, random, setting):
        return cls(random.choice([0.3, 1, 2]))

    def strike(self, life):
        path = os.path.join(os.path.dirname(life.workdir), "ballast")
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        try:
            for size in (65536, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        os.write(file, bytes(size))
            life.ended.wait(self.secs)
        finally:
            os.close(file)
            os.remove(path)
            life.write("disk has room")


class StartTwice(Fault):
    """The same command, started while it runs."""

    @classmethod
    def fits(cls, setting):
        return not setting.is_first_process

    def strike(self, life):
        life.start_second()


class LosePackets(Fault):
    """A part of the packets between two hosts is lost, in both directions or in one; with 1.0 all are."""

    source: int
    target: int
    is_one_way: bool
    rule: Rule
    secs: float
    placements: ClassVar[tuple[str, ...]] = ("hosts",)

    @classmethod
    def draw(cls, random, setting):
        source, target = random.sample(range(setting.workers), 2)
        return cls(source, target, *cls._draw_rule(random))

    @staticmethod
    def _draw_rule(random):
        return False, Rule(loss=random.choice([0.05, 0.2])), random.choice([3, 6])

    def strike(self, life):
        pairs = [(self.source, self.target), *([] if self.is_one_way else [(self.target, self.source)])]
        for pair in pairs:
            life.network.rules[pair] = self.rule
        life.ended.wait(self.secs)
        for pair in pairs:
            life.network.rules.pop(pair, None)


class DelayPackets(LosePackets):
    """Packets between two hosts come late."""

    @staticmethod
    def _draw_rule(random):
        return False, Rule(delay_secs=random.choice([0.05, 0.3])), 3


class CutOneWay(LosePackets):
    """No packet comes through in one direction."""

    @staticmethod
    def _draw_rule(random):
        return True, Rule(loss=1.0), random.choice([1, 4, 8])


class Part(LosePackets):
    """No packet comes through between two hosts, in either direction."""

    @staticmethod
    def _draw_rule(random):
        return False, Rule(loss=1.0), random.choice([1, 4, 8])


class StaleName(Fault):
    """At the start, a host's name has the address of a machine that is gone."""

    host: int
    secs: float
    placements: ClassVar[tuple[str, ...]] = ("hosts",)

    @classmethod
    def draw(cls, random, setting):
        return cls(random.randrange(setting.workers), random.choice([4, 10]))

    def strike(self, life):
        hosts = life.network.hosts
        addresses = {host.name: "10.77.0.99" if i == self.host else host.address for i, host in enumerate(hosts)}
        for i, host in enumerate(hosts):
            if i != self.host:
                host.resolve(addresses)
        life.ended.wait(self.secs)
        life.network.resolve_rightly()


class Fall(Fault):
    """A signal to some workers of an elastic run, which goes on with the others; `moment` says what they are doing."""

    workers: tuple[int, ...]
    number: int
    moment: str  # "training"; "saving"; "meeting" or "tracing" again, after the first of them fell
    secs: float  # after the moment began
    placements: ClassVar[tuple[str, ...]] = ("elastic",)

    @property
    def hangs(self):
        return self.number == signal.SIGSTOP

    @property
    def name(self):
        what = {signal.SIGKILL: "Kill", signal.SIGTERM: "Leave", signal.SIGSTOP: "Freeze"}[self.number]
        who = "Chief" if self.workers == (0,) else ["One", "Two", "AllButOne"][len(self.workers) - 1]
        return f"{what}{who}{'' if self.moment == 'training' else f', {self.moment}'}"

    @classmethod
    def draw(cls, random, setting):
        count = min(random.choice([1, 1, 1, 2, 3]), setting.workers - 1)
        workers = tuple(random.sample(range(setting.workers), count)) if random.random() < 0.7 else (0,)
        number = random.choice([signal.SIGKILL] * 6 + [signal.SIGTERM] * 3 + [signal.SIGSTOP])
        moment = random.choice(["training", "training", "saving", "meeting", "tracing"])
        return cls(workers, number, moment, random.uniform(0, 0.8))

    def strike(self, life):
        if self.moment == "saving":
            self._wait_until_saving(life)
        elif self.moment in ("meeting", "tracing"):
            name = "began" if self.moment == "meeting" else "going on"
            count = len(life.events(name, 0))
            dataclasses.replace(self, workers=self.workers[:1], number=signal.SIGKILL, moment="training").strike(life)
            while len(life.events(name, 0)) <= count:
                if life.ended.wait(0.02):
                    return
            life.ended.wait(self.secs)
        victims = [worker for worker in self.workers if life.find_newest(worker)]
        others = set(range(life.setting.workers)) - set(victims)
        if self.hangs and not any(map(life.find_newest, others)):
            victims = victims[1:]  # somebody has to notice
        for worker in victims:
            life.signal(life.find_newest(worker), self.number)
            life.write("fell", fault=self.name, victim=worker)

    @staticmethod
    def _wait_until_saving(life):
        directory = os.path.join(life.workdir, "checkpoints")
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and not life.ended.is_set():
            if os.path.isdir(directory) and any(".tmp" in name for name in os.listdir(directory)):
                return
            time.sleep(0.0005)


DEADLY = (KillWorker, KillChief, KillLauncher, Terminate, TerminateTwice, StopForEver)
HARMLESS = (
    Suspend, TerminateChild, ReadNothing, FillDisk, StartTwice,
    LosePackets, DelayPackets, CutOneWay, Part, StaleName,
)  # fmt: skip
AT_START = (StaleName,)  # strike before the commands start
