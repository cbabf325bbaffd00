"""Failures of workers, as users meet them: the run ends soon, prints why, and no saved step is lost.

Most runs share a workdir, so that each continues the one before it; in the end the weights are those of a run without
failures.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import textwrap
import time

import numpy as np
import pytest

import distloop
from distloop.checkpoints import store
from distloop.launcher.machine import choose_ports
from distloop.workers import heartbeat, preemption
from tests import problems
from tests.forked import Program

pytestmark = pytest.mark.slow

SECS = 240  # limit for waiting, on a busy machine
STEPS = 100

PROGRAM = """
    import ctypes, json, os, signal, sys, time
    if host := os.environ.get("HOST"):  # whose network this process is in
        with open(f"/proc/{host}/ns/net") as network:
            assert ctypes.CDLL(None).setns(network.fileno(), 0) == 0
    import keras, numpy as np, tensorflow as tf
    from absl import app, flags
    import distloop
    from tests import problems

    distloop.define_flags(
        steps={STEPS}, batch_size=16, device="cpu", log_every=20, checkpoint_every=5, average_decay=0.9
    )
    RATE = flags.DEFINE_float("rate", 0.1, "A setting of the experiment.")
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    # Kind of failure, index of the worker, and a file whose existence means that it has happened already.
    kind, worker, once = (os.environ.get("FAILURE", "") + ",,").split(",")[:3]
    failure = kind if worker == str(index) and not os.path.exists(once or "/nowhere") else ""
    first = None  # step of this run

    if failure == "killed while joining":
        Heartbeat = distloop.workers.heartbeat.Heartbeat
        meet = Heartbeat.meet
        Heartbeat.meet = lambda *arguments: (meet(*arguments), os.kill(os.getpid(), signal.SIGKILL))

    def model_fn():
        if failure == "model_fn":
            raise RuntimeError("boom in model_fn")
        return problems.classifier(dropout=0.5, optimizer=lambda: keras.optimizers.SGD(RATE.value, momentum=0.9))()

    def act(report):
        global first
        first = first or report.step
        if first + 8 == report.step:
            print("eight steps on", flush=True)
        if first + 8 <= report.step and kind == "slow":
            time.sleep(0.1)
        if first + 8 != report.step or not failure:
            return
        if once:
            open(once, "w").close()
        if failure == "action":
            raise RuntimeError("boom in an action")
        if failure == "exit":
            sys.exit(3)
        if failure == "sleep":
            time.sleep(600)
        if failure.startswith("SIG"):
            saved = os.path.join(flags.FLAGS.workdir, "checkpoints", str(report.step // 5 * 5))
            while not os.path.exists(saved):  # a thread writes it
                time.sleep(0.01)
            os.kill(os.getpid(), getattr(signal, failure))
            time.sleep(0.5)
    act.every = 1

    def check(x):
        if first is not None:  # in this run
            raise RuntimeError("boom in the pipeline")
        return x

    def checked(batch):
        x = tf.ensure_shape(tf.py_function(check, [batch["x"]], tf.float32), batch["x"].shape)
        return {**batch, "x": x}

    def main(_):
        config = distloop.Config.from_flags()
        distloop.prepare(config)
        data = distloop.make_dataset(problems.classification(67), config.batch_size, shuffle=True)
        trainer = distloop.Trainer(model_fn, config)
        trainer.fit(data.map(checked) if failure == "pipeline" else data, actions=[act])
        np.savez(os.path.join(config.workdir, f"end{index}.npz"), **problems.everything(trainer))

    if __name__ == "__main__":
        app.run(main)
"""

# Lines that TensorFlow prints at any TF_CPP_MIN_LOG_LEVEL, and those of distloop without a failure.
NOISE = re.compile(
    r"WARNING: All log|[IWE]\d{4} |To enable the foll|step \d|eight steps|"
    r"distloop: (warning|error|devices|precision|parameters|entries|(global )?batch|averaged weights|workdir|"
    r"\S+ -m tensorboard|tensorboard|loss|accuracy|time|busy|step|Finished|Skipping|worker . of 2 r|\d+ % of the time)"
)


class Worker:
    """A process and its output."""

    def __init__(self, arguments, path, environment):
        self.path = path
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "", **environment}
        self.process = Program(arguments, stdout=path, stderr=path, env=environment)

    @property
    def lines(self):
        """Its output without the noise."""
        return [line for line in self.path.read_text().splitlines() if not NOISE.match(line)]

    def wait_for(self, text):
        deadline = time.monotonic() + SECS
        while text not in self.path.read_text():
            assert time.monotonic() < deadline and self.process.poll() is None, self.path.read_text()
            time.sleep(0.02)

    def end(self, secs=SECS):
        """Returns the exit code of the process once it has ended."""
        return self.process.wait(secs)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(textwrap.dedent(PROGRAM).replace("{STEPS}", str(STEPS)))
    return str(path)


@pytest.fixture(scope="module")
def start(program, tmp_path_factory):
    """Returns a function that starts workers; kills all of them at the end."""
    started = []

    def start(workdir, failure="", *flags, addresses=None, worker_flags=((), ()), hosts=("", ""), late_secs=0):
        addresses = addresses or [f"127.0.0.1:{port}" for port in choose_ports(len(worker_flags))]
        logs = tmp_path_factory.mktemp("logs")
        workers = []
        for index, (extra, host) in enumerate(zip(worker_flags, [*hosts, ""], strict=False)):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            environment = {"TF_CONFIG": json.dumps(config), "FAILURE": failure, "HOST": host}
            arguments = [program, f"--workdir={workdir}", *flags, *extra]
            workers.append(Worker(arguments, logs / f"worker{index}.txt", environment))
            time.sleep(late_secs if index == 0 else 0)
        started.extend(workers)
        return workers

    yield start
    for worker in started:
        worker.process.kill()
        worker.process.wait()


@pytest.fixture(scope="module")
def straight(start, tmp_path_factory):
    """The final variables of a run without failures, by worker."""
    workdir = tmp_path_factory.mktemp("straight")
    workers = start(workdir)
    assert [worker.end() for worker in workers] == [0, 0], [worker.lines for worker in workers]
    assert [worker.lines for worker in workers] == [[], []]
    return ends(workdir)


@pytest.mark.wide
def test_workers_without_failures_end_like_one_process(straight):
    config = problems.on(2, batch_size=16, average_decay=0.9)
    data = distloop.make_dataset(problems.classification(67), 16, shuffle=True)
    trainer = distloop.Trainer(problems.classifier(dropout=0.5), config)
    trainer.fit(data, steps=STEPS)
    expected = problems.everything(trainer)
    for index, final in enumerate(straight):
        local = {path: expected.get(path.replace("@0", f"@{index}"), expected[path]) for path in final}
        problems.assert_close(final, local)


def ends(workdir):
    return [dict(np.load(workdir / f"end{index}.npz")) for index in range(2)]


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        assert not [path for path in other if one[path].tobytes() != other[path].tobytes()]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """The workdir that most runs share."""
    return tmp_path_factory.mktemp("shared")


def saved(workdir):
    """Returns the newest checkpoint, after checking that it is whole; None if there is none."""
    directory = workdir / "checkpoints"
    steps = store.Checkpoints(str(directory)).steps if directory.exists() else []
    return store.load(str(directory / str(steps[-1]))) if steps else None


def newest(workdir):
    checkpoint = saved(workdir)
    return checkpoint.step if checkpoint else 0


def eight_steps_on(workdir):
    """Returns the step to come of the next run; an action that failed at the newest checkpoint is called again."""
    checkpoint = saved(workdir)
    is_open = checkpoint is not None and checkpoint.metadata["open_boundary"] is not None
    return newest(workdir) + (8 if is_open else 9)


def follow_soon(workers, secs, since):
    """Returns whether workers end within some seconds as another one has ended."""
    return all(worker.end() == heartbeat.EXIT_CODE for worker in workers) and time.monotonic() - since < secs


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.wide), 1])
def test_a_killed_worker_is_noticed_and_no_save_is_lost(victim, start, workdir):
    before = newest(workdir)
    workers = start(workdir, f"SIGKILL,{victim}")
    assert workers[victim].end() == -signal.SIGKILL
    assert follow_soon([workers[1 - victim]], 8, time.monotonic())
    (line,) = workers[1 - victim].lines
    assert line.startswith(f"distloop: the process of worker {victim} (127.0.0.1:")
    assert ") is gone without a word, last heard at step " in line
    assert newest(workdir) >= before + 5


@pytest.mark.wide
def test_a_worker_killed_while_tensorflow_joins_is_noticed(start, workdir):
    workers = start(workdir, "killed while joining,1")
    assert workers[1].end() == -signal.SIGKILL
    assert follow_soon(workers[:1], 8, time.monotonic())
    (line,) = workers[0].lines
    assert line.startswith("distloop: the process of worker 1 (") and line.endswith("(step 0, joining) ends, too.")


def test_a_hanging_worker_ends_all_after_the_hang_timeout(start, workdir):
    before = newest(workdir)
    workers = start(workdir, "sleep,1", "--hang_timeout=6")
    workers[1].wait_for("eight steps on")
    assert follow_soon(workers, 25, time.monotonic())
    at, why = f"is at step {before + 9}", workers[0].lines[0].partition(" So worker 0")[0]
    assert re.match(
        rf"distloop: no step has ended for hang_timeout=6 seconds; worker 0 \(127.0.0.1:\d+\) {at} "
        rf"\(waiting for all\); worker 1 \(127.0.0.1:\d+\) {at} \(between two loops\)\.$",
        why,
    )
    assert "    time.sleep(600)" in workers[1].lines  # where it hangs
    assert workers[1].lines[0] == workers[1].lines[-1] and workers[1].lines[0].startswith(f"{why} So worker 1 (step ")
    newest(workdir)


@pytest.mark.wide
def test_a_suspended_worker_ends_the_others(start, workdir):
    before = newest(workdir)
    workers = start(workdir, "SIGSTOP,1", "--hang_timeout=6")
    workers[1].wait_for("eight steps on")
    assert follow_soon(workers[:1], 25, time.monotonic())
    line = workers[0].lines[0]
    silent = r"distloop: worker 1 \(127.0.0.1:\d+\) has been silent for \d+ seconds, last heard at step \d"
    assert re.match(silent, line)
    assert line == workers[0].lines[-1]  # below the stacks, again
    assert not [line for line in workers[0].lines if "Traceback" in line]
    assert newest(workdir) >= before + 5


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.wide)])
def test_an_action_that_fails_on_one_worker_is_saved_by_all(victim, start, workdir):
    asked = eight_steps_on(workdir)
    workers = start(workdir, f"action,{victim}")
    assert workers[victim].end() == 1 and workers[1 - victim].end() == heartbeat.EXIT_CODE
    failed_at = newest(workdir)
    assert failed_at == asked
    assert "RuntimeError: boom in an action" in workers[victim].lines
    resumable = f"RuntimeError at step {failed_at}, checkpoint saved: the same command goes on from there."
    assert f"distloop: {resumable}" in workers[victim].lines
    if victim == 1:
        failed = f"Worker 1 failed at step {failed_at} (RuntimeError: boom in an action), checkpoint saved."
        assert workers[0].lines == [f"distloop: {failed} Run the same command to resume."]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("failure", "step", "phase", "error"),
    [
        ("model_fn", "0", "starting", "RuntimeError: boom in model_fn"),
        ("pipeline", r"\d+", "training", ".*RuntimeError: boom in the pipeline"),
    ],
)
def test_an_error_on_one_worker_ends_the_others(failure, step, phase, error, start, workdir):
    workers = start(workdir, f"{failure},1")
    assert workers[1].end() == 1
    assert follow_soon(workers[:1], 5, time.monotonic())
    assert workers[1].lines[0] == "Traceback (most recent call last):"
    assert any(re.search(error, line) for line in workers[1].lines)
    (line,) = workers[0].lines
    assert re.match(rf"distloop: worker 1 failed at step {step} \({phase}\): {error}. So worker 0 \(step \d+, ", line)
    newest(workdir)


@pytest.mark.wide
def test_a_worker_that_exits_early_ends_the_others(start, workdir):
    workers = start(workdir, "exit,1")
    assert [worker.end() for worker in workers] == [heartbeat.EXIT_CODE, 3]
    (line,) = workers[0].lines
    left = r"distloop: worker 1 \(.*\) left at step \d+ \(between two loops\), before the run was over. So"
    assert re.match(left, line)
    newest(workdir)


@pytest.mark.wide
def test_sigterm_to_one_worker_saves_and_stops_all(start, workdir):
    asked = eight_steps_on(workdir)
    workers = start(workdir, "SIGTERM,1")
    assert [worker.end() for worker in workers] == [preemption.EXIT_CODE] * 2
    assert asked <= newest(workdir) <= asked + 2  # two loops
    assert workers[1].lines == ["distloop: Stopping: saving after this step. Send SIGTERM again to quit now."]
    interrupted = f"distloop: Interrupted by worker 1 at step {newest(workdir)}, checkpoint saved."
    assert workers[0].lines == [f"{interrupted} Run the same command to resume."]


@pytest.mark.wide
def test_a_port_that_is_taken_ends_all_workers(start, workdir):
    ports = choose_ports(2)
    with socket.socket() as taken:
        taken.bind(("", ports[1]))
        taken.listen()
        workers = start(workdir, "", "--start_timeout=6", addresses=[f"localhost:{port}" for port in ports])
        assert [worker.end() for worker in workers] == [1, 1]
    worker_1, why = f"worker 1 (localhost:{ports[1]})", "is another run there? Give other ports, or end it."
    refused = f"ValueError: Port {ports[1]} of {worker_1} cannot be used (Address already in use): {why}"
    waited = f"ValueError: {worker_1} did not come within 6 seconds, and worker 0 waits no longer"
    assert workers[1].lines[-1] == refused and workers[0].lines[-1].startswith(waited)


def test_workers_with_different_flags_are_refused(start, workdir):
    workers = start(workdir, worker_flags=[(), ("--batch_size=32",), ("--rate=0.5",)])
    assert [worker.end() for worker in workers] == [1, 1, 1]
    differently = "--batch_size is 16 on worker 0 and 32 on worker 1; start all with the same command."
    for worker in workers:
        assert worker.lines[-1] == f"ValueError: Workers were started differently: {differently}"


@pytest.mark.wide
def test_after_all_failures_a_late_start_ends_like_a_run_without_failures(start, workdir, straight):
    workers = start(workdir, late_secs=8)
    assert [worker.end() for worker in workers] == [0, 0], [worker.lines for worker in workers]
    assert_same(ends(workdir), straight)
    assert len(workers[0].lines) <= 1 and all("distloop: waiting for worker 1 (" in line for line in workers[0].lines)


@pytest.mark.wide
def test_the_launcher_restarts_crashed_workers(program, straight, tmp_path):
    once = tmp_path / "has crashed"
    command = ["-m", "tests.campaigns.nemesis.forking_launch", "--workers=2", "--max_restarts=1", program]
    launcher = Worker([*command, f"--workdir={tmp_path}"], tmp_path / "log.txt", {"FAILURE": f"action,1,{once}"})
    assert launcher.end() == 0
    assert once.exists()
    assert_same(ends(tmp_path), straight)
    messages = [line for line in launcher.lines if line.startswith("distloop.launch: ")]
    assert messages[-2].startswith("distloop.launch: worker 1 failed first, with exit code 1")
    assert messages[-1] == "distloop.launch: all workers start again in 1 s (restart 1 of 1)."
    assert "[worker 1] RuntimeError: boom in an action" in launcher.lines
    assert not [line for line in launcher.lines if "[worker 0] Traceback" in line]


def inside(host):
    """Returns the beginning of a command that runs in the network namespace of a process."""
    return ["nsenter", "-t", str(host.pid), "-n"]


@pytest.fixture
def hosts():
    """Two network namespaces with a cable between them; each lives as long as the process that holds it."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        pytest.skip("network namespaces need root, and the programs ip, unshare and nsenter")
    held = [subprocess.Popen(["unshare", "-n", "sleep", "600"]) for _ in range(2)]
    try:
        while any(os.readlink(f"/proc/{host.pid}/ns/net") == os.readlink("/proc/self/ns/net") for host in held):
            if any(host.poll() is not None for host in held):
                pytest.skip("no network namespaces here: unshare -n failed")
            time.sleep(0.01)
        pids = [str(host.pid) for host in held]
        cable = ["ip", "link", "add", "cable", "netns", pids[0], "type", "veth", "peer", "cable", "netns", pids[1]]
        commands = [cable]
        for i, host in enumerate(held):
            commands += [[*inside(host), "ip", "address", "add", f"10.77.0.{i + 1}/24", "dev", "cable"]]
            commands += [[*inside(host), "ip", "link", "set", name, "up"] for name in ("lo", "cable")]
        for command in commands:
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                pytest.skip(f"no network namespaces here: {' '.join(command)}: {result.stderr.strip()}")
        yield held
    finally:
        for host in held:
            host.kill()
            host.wait()


@pytest.mark.wide
def test_a_cut_cable_ends_all_workers_which_then_continue(hosts, start, straight, tmp_path):
    network = {"addresses": ["10.77.0.1:4000", "10.77.0.2:4000"], "hosts": [str(host.pid) for host in hosts]}
    workers = start(tmp_path, "slow", "--hang_timeout=6", **network)
    workers[0].wait_for("eight steps on")
    subprocess.run([*inside(hosts[0]), "ip", "link", "set", "cable", "down"], check=True)
    assert follow_soon(workers, 25, time.monotonic())
    for index, worker in enumerate(workers):
        other = rf"worker {1 - index} \(10.77.0.{2 - index}:4000\) has been silent for \d+ seconds"
        pattern = rf"distloop: {other}, last heard at step \d+ \(.*\). So worker {index}"
        assert re.match(pattern, worker.lines[0]) and worker.lines[0] == worker.lines[-1]
        assert not [line for line in worker.lines if "Traceback" in line]
    assert newest(tmp_path) >= 5
    subprocess.run([*inside(hosts[0]), "ip", "link", "set", "cable", "up"], check=True)
    workers = start(tmp_path, **network)
    assert [worker.end() for worker in workers] == [0, 0]
    assert_same(ends(tmp_path), straight)
