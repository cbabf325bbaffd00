"""One round: starts the command of a plan, strikes it, and starts it again until the run is finished.

events = run_round(plan, directory)         # the log, for `checker`
reference = run_undisturbed(plan.setting.reference, directory)
"""

import contextlib
import os
import pathlib
import random
import re
import shutil
import subprocess
import threading
import time

from tests.campaigns.nemesis import checker, faults
from tests.campaigns.nemesis.commands import Command, Output
from tests.campaigns.nemesis.log import Log
from tests.campaigns.nemesis.network import Network
from tests.campaigns.nemesis.schedule import Life, Plan

LIFE_SECS = 150.0  # after which a life that nothing is to end has failed
EXTRA_LIVES = 3  # that may follow the plan's
STEP_SECS = 0.06
ELASTIC_STEP_SECS = 0.25  # so long that workers come back before the run ends
DISK_BYTES = 16 * 2**20
ROOT = str(pathlib.Path(__file__).resolve().parents[3])


def run_undisturbed(setting, directory):
    """Returns the log of a run without faults."""
    return run_round(Plan(0, 0, setting, (Life(()),)), directory, step_secs=0.0)


def run_round(plan, directory, *, step_secs=None):
    """Runs a round in a directory of its own and returns its events.

    Args:
        plan: of the round.
        directory: to be made.
        step_secs: how long each step takes at least, in a life with faults.
    """
    if step_secs is None:
        step_secs = ELASTIC_STEP_SECS if plan.setting.placement == "elastic" else STEP_SECS
    os.makedirs(directory)
    log = Log(os.path.join(directory, "log"))
    with contextlib.ExitStack() as stack:
        stack.callback(log.close)
        disk = stack.enter_context(_disk(directory, plan))
        os.makedirs(os.path.join(disk, "tmp"))
        network = None
        if plan.setting.placement == "hosts":
            prefix = f"nm{os.getpid() % 10000}-{plan.number}"
            network = stack.enter_context(Network(prefix, plan.setting.workers, directory, plan.seed))
        lives = [*plan.lives, *[Life(())] * EXTRA_LIVES]
        for number, life in enumerate(lives):
            running = RunningLife(number, life, plan.setting, log, disk, network)
            running.run(step_secs if life.strikes else 0.0)
            if checker.is_finished(log.read()):
                break
            if life.flips_byte:
                _flip_byte(running.workdir, log, number, random.Random(f"{plan.seed}/{plan.number}/{number}"))
        log.write("remains", files=_remains(os.path.join(disk, "run"), os.path.join(disk, "tmp")))
        with contextlib.suppress(FileNotFoundError), open(os.path.join(disk, "run", "metrics.jsonl")) as file:
            log.write("rows", rows=[line.rstrip("\n") for line in file])
        return log.read()


@contextlib.contextmanager
def _disk(directory, plan):
    """Yields the directory of the workdir, which is a disk of its own if one of the faults fills it."""
    disk = os.path.join(directory, "disk")
    os.makedirs(disk)
    if not any(isinstance(strike.fault, faults.FillDisk) for life in plan.lives for strike in life.strikes):
        yield disk
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", disk], check=True)
    try:
        yield disk
        shutil.copytree(disk, f"{disk}-copy")
    finally:
        subprocess.run(["umount", disk], check=True)


class RunningLife:
    """One start of the command, as faults see it.

    Attributes:
        setting: of the round.
        workdir: of the run.
        network: of the hosts; None if there is one host.
        ended: set when all processes have ended, or the harness gives up.
    """

    def __init__(self, number, life, setting, log, disk, network):
        self.number, self.life, self.setting, self.network = number, life, setting, network
        self.workdir = os.path.join(disk, "run")
        self.ended = threading.Event()
        self._disk, self._log = disk, log
        self._directory = os.path.dirname(log.path)
        self._commands, self._outputs, self._strikes = [], [], []
        self._deadly_at = None
        self._paused_at = None

    def run(self, step_secs):
        """Starts the commands, strikes, and waits until all processes have ended or should have."""
        self._step_secs = step_secs
        for strike in self.life.strikes:
            name = "deadly" if strike.fault.is_deadly else "harmless"
            thread = threading.Thread(target=self._strike, args=(strike,), name=name, daemon=True)
            self._strikes.append(thread)
            if isinstance(strike.fault, faults.AT_START):
                thread.start()
                time.sleep(0.1)
        for i in range(self.setting.commands):
            self._outputs.append(Output(os.path.join(self._directory, f"output-{self.number}-{i}")))
            self._commands.append(self._start(i, self._outputs[i], str(self.number)))
            self.write("start", command=i)
        for thread in self._strikes:
            if thread.ident is None:
                thread.start()
        self._wait_for_end()
        self.ended.set()
        for output in self._outputs:
            output.is_paused.clear()
        for thread in self._strikes:
            thread.join()
        for i, command in enumerate(self._commands):
            ended = command.wait(0)
            if ended is None:
                self.write("end", command=i, code=None, at=0, gone_at=time.monotonic(), leftovers=[])
                command.end()
            else:
                self.write("end", command=i, **ended._asdict())
        for output in self._outputs:
            output.close()

    def _wait_for_end(self):
        began = time.monotonic()
        while not all(command.wait(0) for command in self._commands):
            limit = began + LIFE_SECS
            if self._deadly_at is not None:
                secs = self.life.deadly.outcome(self.setting).within_secs + faults.START_SECS
                limit = min(limit, self._deadly_at + secs)
            if time.monotonic() > limit + 1:
                return
            time.sleep(0.02)

    def _start(self, i, output, name):
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("TF_CONFIG", "NEMESIS"))},
            "NEMESIS_LOG": self._log.path,
            "NEMESIS_LIFE": name,
            "NEMESIS_STEP_SECS": str(self._step_secs),
            "NEMESIS_NOISE": str(self.setting.noise),
            "NEMESIS_CHILD": str(self.setting.child_of),
            "NEMESIS_PAUSE_SECS": str(self.setting.pause_secs),
            "TMPDIR": os.path.join(self._disk, "tmp"),
            "PYTHONPATH": ROOT,
            "CUDA_VISIBLE_DEVICES": "-1",
        }
        host, is_first = self.network.hosts[i] if self.network else None, self.setting.is_first_process
        return Command(self._arguments(i), environment, output, host=host, is_first_process=is_first)

    def _arguments(self, i):
        setting = self.setting
        hangs = any(strike.fault.hangs for strike in self.life.strikes)
        program = [
            "-m", "tests.campaigns.nemesis.program",
            f"--workdir={self.workdir}",
            f"--checkpoint_every={setting.checkpoint_every}",
            f"--keep_checkpoints={setting.keep}",
            f"--hang_timeout={faults.HANG_SECS if hangs else 120}",
            f"--start_timeout={faults.START_SECS}",
            f"--virtual_replicas={setting.virtual_replicas}",
        ]  # fmt: skip
        if setting.placement == "alone":
            return program
        if setting.placement == "hosts":
            flags = [f"--hosts={','.join(host.name for host in self.network.hosts)}", f"--host_index={i}"]
        elif setting.placement == "elastic" and setting.least < setting.workers:
            flags = [f"--workers={setting.least}:{setting.workers}", "--max_restarts=20"]
        else:
            flags = [f"--workers={setting.workers}"]
        launcher = ["-m", "tests.campaigns.nemesis.forking_launch", "--cores_per_worker=0", "--grace_secs=5"]
        return [*launcher, *flags, *program]

    def _strike(self, strike):
        by_clock = strike.after_steps is None
        if not self.ended.wait(strike.after_secs) if by_clock else self._wait_for_steps(strike.after_steps):
            if not strike.fault.is_deadly:
                self.write("strike", fault=strike.fault.name, is_deadly=False)
            strike.fault.strike(self)

    def _wait_for_steps(self, count):
        """Waits until the chief has done so many steps in this life, or its output stands still; False: it ended."""
        while not self.ended.wait(0.02):
            if len(self.events("step", 0)) >= count or (self._paused_at and time.monotonic() > self._paused_at + 3):
                return True
        return False

    # What faults do.

    @property
    def has_deadly_fault(self):
        return self.life.deadly is not None

    def write(self, event, **values):
        self._log.write(event, life=str(self.number), **values)

    def signal(self, pid, number):
        """Sends a signal to a process of this life, if it is there; a deadly fault strikes with its first."""
        if pid is None or not any(command.has_process(pid) for command in self._commands):
            return
        is_deadly = threading.current_thread().name == "deadly"
        if is_deadly and self._deadly_at is None:
            self._deadly_at = time.monotonic()
            self.write("strike", fault=self.life.deadly.name, is_deadly=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def signal_command(self, i, number):
        self.signal(self._commands[i].main, number)

    def signal_worker(self, worker, number):
        """Signals a worker as soon as it runs."""
        while not (began := self.events("began", worker)):
            if self.ended.wait(0.02):
                return
        self.signal(self.find(worker, began[-1]["pid"]), number)  # the newest

    def find_newest(self, worker):
        """Returns the newest process of a worker; None if it has ended."""
        began = self.events("began", worker)
        return self.find(worker, began[-1]["pid"]) if began else None

    def find(self, worker, pid):
        """Returns the process that a worker, or its child, calls `pid`."""
        return self._commands[self.setting.command_of(worker)].find(pid)

    def events(self, event, worker):
        """Returns the events of a name of a worker in this life."""
        return [e for e in self._events(event) if e["worker"] == worker]

    def wait_for(self, event):
        """Returns the first event of a name in this life; None if it ends before."""
        while not (events := self._events(event)):
            if self.ended.wait(0.02):
                return None
        return events[0]

    def pause_outputs(self, is_paused):
        self._paused_at = time.monotonic() if is_paused else None
        for output in self._outputs:
            output.is_paused.set() if is_paused else output.is_paused.clear()

    def start_second(self):
        """Starts the first command again, beside it, and logs how that ends."""
        output = Output(os.path.join(self._directory, f"output-{self.number}-second"))
        command = self._start(0, output, f"{self.number}+")
        ended = command.wait(90)
        if ended is None:
            command.end()
        output.close()
        secs = (ended.gone_at if ended else time.monotonic()) - command.started_at
        self.write("second", code=ended and ended.code, secs=secs, output=output.text()[-2000:])

    def _events(self, event):
        return [e for e in self._log.read() if e["event"] == event and e.get("life") == str(self.number)]


def _flip_byte(workdir, log, number, generator):
    """Changes a bit of the newest checkpoint, unless it is the only one that is whole."""
    events = log.read()
    directory = os.path.join(workdir, "checkpoints")
    names = os.listdir(directory) if os.path.isdir(directory) else []
    damaged = checker.damaged_steps(events)
    whole = sorted({int(name) for name in names if name.isdigit()} - damaged)
    if len(whole) < 2:
        return
    path = os.path.join(directory, str(whole[-1]))
    files = [name for name in sorted(os.listdir(path)) if os.path.getsize(os.path.join(path, name))]
    file = generator.choice(files)
    with open(os.path.join(path, file), "r+b") as opened:
        place = generator.randrange(os.path.getsize(opened.name))
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 1 << generator.randrange(8)]))
    log.write("damaged", life=str(number), step=whole[-1], whole=whole[:-1], file=file, place=place)


def _remains(workdir, temporary):
    """Returns names that a finished run does not leave: of temporary files, and whatever is in TMPDIR."""
    names = []
    for folder, folders, files in os.walk(workdir):
        for name in [*folders, *files]:
            if re.search(r"\.(tmp|old|diverged)\b|^run\.lock", name):
                names.append(os.path.relpath(os.path.join(folder, name), workdir))
    return [*names, *(f"TMPDIR/{name}" for name in os.listdir(temporary))]
