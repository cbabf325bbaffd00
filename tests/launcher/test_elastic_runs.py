"""The law `elastic run`: workers that fail and come back change nothing; the campaign `nemesis` tries more."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from distloop.workers import messages
from distloop.workers.preemption import EXIT_CODE
from tests import forked
from tests.campaigns.nemesis import checker, faults, rounds
from tests.campaigns.nemesis.__main__ import read_outputs
from tests.campaigns.nemesis.log import Log
from tests.campaigns.nemesis.schedule import Life, Plan, Strike
from tests.campaigns.nemesis.setting import BATCH_SIZE, ELASTIC_REPLICAS, ROWS, STEPS, Setting
from tests.problems import json_lines, mostly_wide

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Returns the log of one process that nothing disturbs."""
    return rounds.run_undisturbed(Setting("elastic", 1), str(tmp_path_factory.mktemp("alone") / "run"))


@pytest.mark.parametrize(
    ("pause_secs", "second", "step_secs", "numbers"),
    # Numbers of workers: the slot counts as there; the one left goes on, and the other comes back before the end.
    mostly_wide([(0.5, 25, 0.15, [2, 2]), (8.0, 14, 0.25, [1, 1, 2])]),
)
def test_whichever_workers_fail_or_come_the_run_is_that_of_one_process(
    pause_secs, second, step_secs, numbers, alone, tmp_path
):
    generator = random.Random(0)
    setting = Setting("elastic", 2, checkpoint_every=4, pause_secs=pause_secs)
    falls = [((1,), signal.SIGKILL, 7), ((0,), signal.SIGTERM, second)]  # without a word; announced
    strikes = [
        Strike(faults.Fall(workers, number, "training", 0.0), after_steps=step + generator.randrange(5))
        for workers, number, step in falls
    ]
    plan = Plan(0, 0, setting, (Life(tuple(strikes)),))
    two = rounds.run_undisturbed(setting.reference, str(tmp_path / "two"))
    events = rounds.run_round(plan, str(tmp_path / "elastic"), step_secs=step_secs)
    outputs = read_outputs(str(tmp_path / "elastic"), 1)
    assert checker.check(plan, events, outputs, two) == []
    for run in (events, two):
        assert {e["step"]: e["digest"] for e in of_chief(run)} == {e["step"]: e["digest"] for e in of_chief(alone)}
    kill, leave = checker.losses(events)
    assert leave.steps == 0 and kill.steps <= 4  # a checkpoint every 4 steps; 4 if it falls while one is written
    changes = changes_of(str(tmp_path / "elastic" / "disk" / "run"))
    assert [change["membership"] for change in changes] == list(range(2, len(changes) + 2))
    assert [change["workers"] for change in changes] == numbers[: len(changes)] and len(changes) >= 2
    assert all(change["traced_secs"] > 0 for change in changes)
    reasons = [change["reason"] for change in changes]
    assert "worker 1 failed first, by signal 9 (Killed)" in reasons and "worker 0 was asked to leave" in reasons


@pytest.mark.wide
def test_a_suspended_process_of_an_older_membership_writes_nothing_later(tmp_path):
    old = start_alone(tmp_path, 1)
    wait_for_steps(tmp_path, 1, 8)
    old.send_signal(signal.SIGSTOP)
    stopped_at = len(read_events(tmp_path, 1, "step"))
    new = start_alone(tmp_path, 2)
    wait_for_steps(tmp_path, 2, 2)
    old.send_signal(signal.SIGCONT)
    assert old.wait(300) not in (0, EXIT_CODE) and new.wait(300) == 0
    assert "as this one is of membership 1; it writes no more there" in (tmp_path / "output1").read_text()
    first = read_events(tmp_path, 2, "going on")[0]["step"]
    assert 0 < first <= stopped_at
    (tmp_path / "alone").mkdir()
    alone = start_alone(tmp_path / "alone", 1)
    assert alone.wait(300) == 0
    for name in ("metrics.jsonl", "run.lock", "checkpoints"):  # as if the old one had never gone on
        assert sorted(read_steps(tmp_path / "run" / name)) == sorted(read_steps(tmp_path / "alone" / "run" / name))
    finished = [read_events(path, number, "finished") for path, number in ((tmp_path, 2), (tmp_path / "alone", 1))]
    assert finished[0][0]["digest"] == finished[1][0]["digest"]


def start_alone(directory, number):
    """Starts a single worker of a membership, whose launcher is gone."""
    (directory / f"log{number}").touch()
    membership = messages.Membership(number, "a", 1, 2, "worker 1 failed" if number > 1 else "", 0, (-1, 0))
    variables = {"NEMESIS_LOG": str(directory / f"log{number}"), "NEMESIS_STEP_SECS": "0.1" if number == 1 else "0.02"}
    output = str(directory / f"output{number}")
    environment = {**os.environ, **variables, **membership.variables()}
    program = ["-m", "tests.campaigns.nemesis.program", f"--workdir={directory / 'run'}", "--checkpoint_every=4"]
    return forked.Program(program, stdout=output, stderr=output, env=environment)


def read_events(directory, number, name):
    return [event for event in json_lines(directory / f"log{number}") if event["event"] == name]


def wait_for_steps(directory, number, count):
    ends_at = time.monotonic() + 300
    while len(read_events(directory, number, "step")) < count:
        assert time.monotonic() < ends_at
        time.sleep(0.05)


def read_steps(path):
    """Returns the steps of the rows of a file, or of the checkpoints in a directory; [] if there is none."""
    if path.is_dir():
        return [int(name) for name in os.listdir(path) if name.isdigit()]
    return [row["step"] for row in json_lines(path)] if path.exists() else []


def check_examples(alone, events, workdir):
    """Checks that the weights of each step are those of one process, and each example of an epoch counts once."""
    expected = {e["step"]: e["digest"] for e in of_chief(alone)}
    assert {(e["step"], e["digest"]) for e in of_chief(events)} == set(expected.items())
    rows = [row for row in json_lines(f"{workdir}/metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    for first in range(0, STEPS, ROWS // BATCH_SIZE):
        epoch = rows[first : first + ROWS // BATCH_SIZE]
        sums = [round(sum(row[f"ids{k}"] for row in epoch) * BATCH_SIZE) for k in range(8)]
        assert sums == [sum(8**i for i in range(8))] * 8  # the digit of every row is 1


def changes_of(workdir):
    return json_lines(f"{workdir}/incidents.jsonl")


@pytest.mark.wide
def test_a_node_of_ray_that_goes_and_one_that_comes_change_nothing(alone, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="needs ray")
    from ray.cluster_utils import Cluster

    log, workdir = Log(str(tmp_path / "log")), str(tmp_path / "run")
    variables = {
        "NEMESIS_LOG": log.path,
        "NEMESIS_STEP_SECS": "1",
        "PYTHONPATH": os.pathsep.join([rounds.ROOT, os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    for name, value in variables.items():  # for the nodes, from which the launchers have them
        monkeypatch.setenv(name, value)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    node = cluster.add_node(num_cpus=1)
    launcher = "-m distloop.launch --ray --workers=1:2 --grace_secs=5"
    program = f"-m tests.campaigns.nemesis.program --workdir={workdir} --checkpoint_every=4"
    program += f" --virtual_replicas={ELASTIC_REPLICAS}"
    command = [sys.executable, *launcher.split(), *program.split()]
    with open(tmp_path / "output", "w+") as output:
        driver = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

        def wait_for(processes, steps):
            seen = []
            while len(seen) < steps or len({e["process"] for e in seen}) < processes:
                assert driver.poll() is None, open(output.name).read()[-5000:]
                time.sleep(0.1)
                seen = [e for e in log.read() if e["event"] == "step"]

        try:
            wait_for(processes=2, steps=12)
            cluster.remove_node(node, allow_graceful=False)
            wait_for(processes=3, steps=13)
            cluster.add_node(num_cpus=1)
            wait_for(processes=5, steps=14)
            assert driver.wait(300) == 0, open(output.name).read()[-5000:]
        finally:
            driver.kill()
            cluster.shutdown()
        assert "[worker 0] distloop: Finished" in open(output.name).read()
    check_examples(alone, log.read(), workdir)
    assert [(change["membership"], change["workers"]) for change in changes_of(workdir)] == [(2, 1), (3, 2)]


def of_chief(events):
    return [e for e in events if e["event"] == "step" and e["worker"] == 0]
