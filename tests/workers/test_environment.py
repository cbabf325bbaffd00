"""The cluster that TF_CONFIG or a Slurm step describes."""

import concurrent.futures
import json
import os
import re
import subprocess
import textwrap

import pytest

from distloop.launcher import machine
from distloop.workers import environment
from distloop.workers.environment import Cluster
from tests import forked


@pytest.fixture
def set_scheduler(monkeypatch):
    """Returns a function that sets the variables of one scheduler and deletes those of others."""

    def set_scheduler(variables):
        for name in [name for name in os.environ if name.startswith(("SLURM", "TF_CONFIG", "CUDA", "JOB_"))]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_scheduler


def step_of(line, **more):
    """Returns what srun (22.05) sets for a task, from `procid/tasks nodelist tasks_per_node nodeid/localid`."""
    task, nodes, counts, place = line.split()
    procid, tasks = task.split("/")
    node, local = place.split("/")
    variables = {"PROCID": procid, "STEP_NUM_TASKS": tasks, "STEP_NODELIST": nodes, "STEP_TASKS_PER_NODE": counts}
    variables |= {"NODEID": node, "LOCALID": local, "JOB_ID": 100, "STEP_ID": 0} | more
    return {f"SLURM_{name}": value for name, value in variables.items()}


WORKERS, CHIEF = ["train-worker-0.team.svc:2222", "train-worker-1.team.svc:2222"], ["train-chief-0.team.svc:2222"]


def tf_config(jobs, kind="worker", index=0):
    """Returns TF_CONFIG as Kubeflow's Training Operator writes it."""
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": kind, "index": index}, "environment": "cloud"})}


@pytest.mark.parametrize(
    ("line", "distribution", "expected"),
    [
        ("4/5 n[8-10] 2(x2),1 2/0", None, "n8:0 n8:1 n9:0 n9:1 n10:0"),  # as Slurm counts, not as text is sorted
        ("5/7 n[8-11] 4,1(x3) 2/0", None, "n8:0 n8:1 n8:2 n8:3 n9:0 n10:0 n11:0"),
        ("1/2 n[9-10] 1(x2) 1/0", None, "n9:0 n10:0"),
        ("2/4 n[8-9] 3,1 0/1", "cyclic", "n8:0 n9:0 n8:1 n8:2"),
        ("3/4 n[8-9] 2(x2) 1/1", "block", "n8:0 n8:1 n9:0 n9:1"),
        ("1/2 n8 2 0/1", None, "n8:0 n8:1"),
        ("4/5 r[1-2]n[09-10]-ib,m1 1(x5) 4/0", None, "r1n09-ib:0 r1n10-ib:0 r2n09-ib:0 r2n10-ib:0 m1:0"),
    ],
)
def test_tasks_of_a_slurm_step_are_workers_in_its_order(line, distribution, expected, monkeypatch, set_scheduler):
    set_scheduler(step_of(line, **({"DISTRIBUTION": distribution} if distribution else {})))
    monkeypatch.setattr(subprocess, "Popen", None)  # neither nvidia-smi nor scontrol is called
    workers = environment.find_cluster()
    places = [environment.split_address(address) for address in workers.addresses]
    first = min(port for _, port in places)
    assert " ".join(f"{host}:{port - first}" for host, port in places) == expected
    assert workers.index == int(line.split("/")[0])


@pytest.fixture
def ports_of(set_scheduler):
    """Returns a function that returns the ports of a Slurm step with some tasks on one node."""

    def ports_of(tasks, **more):
        set_scheduler(step_of(f"0/{tasks} n1 {tasks} 0/0", **more))
        return {int(address.split(":")[1]) for address in environment.find_cluster().addresses}

    return ports_of


def test_steps_that_run_side_by_side_use_different_ports(ports_of):
    steps = [(job, step) for job in range(30) for step in range(3)]
    ports = set().union(*(ports_of(9, JOB_ID=123_456 + job, STEP_ID=step) for job, step in steps))
    assert len(ports) == 30 * 3 * 9 and min(ports) >= 10_000 and max(ports) < 32_768


@pytest.mark.parametrize(("tasks", "jobs", "steps"), [(2, 11_000, 1), (4, 5_000, 1), (2, 40, 100)])
def test_slurm_jobs_far_apart_and_their_later_steps_use_different_ports(tasks, jobs, steps, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    blocks = set()
    for job in range(123_456, 123_456 + jobs):
        for step in range(steps):
            os.environ.update(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step))
            blocks.add(machine._slurm_ports(tasks)[0])
    assert len(blocks) == jobs * steps and max(blocks) + tasks <= 32_768


def test_ports_that_slurm_reserved_are_used(ports_of):
    assert ports_of(3, STEP_RESV_PORTS="12010-12011,12020,12022") == {12010, 12011, 12020}
    assert min(ports_of(3, STEP_RESV_PORTS="12010")) != 12010  # too few


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_ID": 6, "SLURM_NTASKS": 4, "SLURM_JOB_NODELIST": "n[8-9]", "SLURM_TASKS_PER_NODE": "3,1"},  # salloc
        {"SLURM_JOB_ID": 7, "SLURM_NTASKS": 2, "SLURM_PROCID": 0, "SLURM_LOCALID": 0},  # a batch script before srun
        step_of("0/1 n8 1 0/0"),
        {"JOB_COMPLETION_INDEX": 1, "HOSTNAME": "train-1"},  # of an indexed Job, without the launcher
        {"TF_CONFIG": "{}"},
        tf_config({"worker": WORKERS[:1]}),
    ],
)
def test_other_processes_are_alone(variables, set_scheduler):
    set_scheduler(variables)
    assert environment.find_cluster() is None


UNKNOWN = ["1/4 n[8-10] 2,1,1 2/0", "0/4 n[8-9] 1(x2) 0/0", "0/2 n[8-9] 2 0/0"]
UNKNOWN += ["0/2 n[a-b] 1(x2) 0/0", "0/2 n[9,8] 1(x2) 0/0"]


@pytest.mark.parametrize("line", UNKNOWN)
def test_slurm_steps_with_unknown_task_placement_are_refused(line, set_scheduler):
    set_scheduler(step_of(line, DISTRIBUTION="arbitrary") | {"SLURMD_NODENAME": "n8"})
    with pytest.raises(ValueError, match=r"SLURM_PROCID=., .* do not say which task runs where: start all tasks by"):
        environment.find_cluster()


@pytest.mark.parametrize(("tasks", "visible", "is_allowed"), [(2, 1, True), (2, 2, False), (1, 2, True)])
def test_tasks_that_would_share_gpus_are_refused(tasks, visible, is_allowed, set_scheduler):
    gtids = ",".join(map(str, range(tasks)))
    set_scheduler({"SLURM_STEP_NUM_TASKS": 4, "SLURM_GTIDS": gtids, "SLURM_GPUS_ON_NODE": 2})
    if is_allowed:
        environment.check_gpus_of_tasks(visible)
    else:
        with pytest.raises(ValueError, match="2 tasks on this node see 2 GPUs each, but there are 2: start one task a"):
            environment.check_gpus_of_tasks(visible)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("n8:1", ("n8", 1)), ("my_host.b:65535", ("my_host.b", 65_535)), ("[fd00::1]:9", ("fd00::1", 9))],
)
def test_an_address_is_a_host_and_a_port(address, expected):
    assert environment.split_address(address) == expected


@pytest.mark.parametrize(
    "address",
    ["", "a", ":1", "a:", "a:0", "a:65536", "a..b:1", "x" * 64 + ":1", "a b:1", "a:1:2", "::1:4", "[a]:1", "[]:1"],
)
def test_what_is_no_address_is_refused(address, set_scheduler):
    with pytest.raises(ValueError, match="is no host:port"):
        environment.split_address(address)
    set_scheduler(tf_config({"worker": ["a:1", address]}))
    with pytest.raises(ValueError, match="which is no cluster that distloop can join .* is no host:port"):
        environment.find_cluster()


def test_a_secret_is_read_from_the_environment_and_not_too_short(monkeypatch):
    monkeypatch.delenv("DISTLOOP_SECRET", raising=False)
    assert environment.find_secret() == ""
    monkeypatch.setenv("DISTLOOP_SECRET", "0123456789abcdef")
    assert environment.find_secret() == "0123456789abcdef"
    monkeypatch.setenv("DISTLOOP_SECRET", "hunter2")
    with pytest.raises(ValueError, match="DISTLOOP_SECRET has 7 characters, which can be guessed: set it to 16 random"):
        environment.find_secret()


@pytest.mark.parametrize(
    ("jobs", "kind", "index", "addresses", "number"),
    [
        ({"worker": WORKERS}, "worker", 1, WORKERS, 1),
        ({"chief": CHIEF, "worker": WORKERS}, "chief", 0, CHIEF + WORKERS, 0),
        ({"chief": CHIEF, "worker": WORKERS}, "worker", 1, CHIEF + WORKERS, 2),
        ({"chief": CHIEF, "worker": WORKERS, "evaluator": ["e:1"]}, "worker", 0, CHIEF + WORKERS, 1),
        ({"chief": CHIEF, "worker": WORKERS[:1]}, "worker", "0", [*CHIEF, WORKERS[0]], 1),
    ],
)
def test_a_tfjobs_chief_is_worker_0(jobs, kind, index, addresses, number, set_scheduler):
    set_scheduler(tf_config(jobs, kind, index))
    assert environment.find_cluster() == Cluster(tuple(addresses), number)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (tf_config({"worker": WORKERS}, "evaluator"), "the workers evaluate: leave the evaluator out"),
        (tf_config({"worker": WORKERS[:1]}, "evaluator"), "the workers evaluate: leave the evaluator out"),
        (tf_config({"worker": WORKERS, "ps": ["p:1"]}), "distloop knows the jobs chief and worker, not ps"),
        (tf_config({"worker": WORKERS}, "ps"), "distloop knows the jobs chief and worker, not ps"),
        (tf_config({"worker": WORKERS, "master": ["m:1"]}), "distloop knows the jobs chief and worker, not master"),
        (tf_config({"worker": WORKERS}, "worker", 2), "there is no worker 2"),
        (tf_config({"worker": WORKERS}, "chief"), "there is no chief 0"),
        (json.dumps({"cluster": {"worker": WORKERS}}), "there is no worker None"),
        (tf_config({"worker": ["a", "b"]}), "'a' is no host:port"),
        (tf_config({"worker": "a:1"}), "'a' is no host:port"),
        (json.dumps({"sparseCluster": {"worker": {"1": WORKERS[1]}, "ps": []}}), "it has to name every worker"),
        ("[1]", "it has to name every worker"),
        ("{'worker': []}", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ],
)
def test_a_tf_config_that_describes_no_cluster_is_refused(text, reason, set_scheduler):
    set_scheduler(text if isinstance(text, dict) else {"TF_CONFIG": text})
    sentence = re.escape(f"which is no cluster that distloop can join ({reason}): it looks like")
    with pytest.raises(ValueError, match=sentence):
        environment.find_cluster()


TASK = """
    import os
    import signal
    import distloop
    from distloop.distributed import collectives, strategies

    config = distloop.Config(device="cpu", start_timeout=60, hang_timeout=600)
    distloop.prepare(config)
    strategy = strategies.make_strategy(config)
    (caught,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("SigCgt")]
    before = len(os.listdir("/proc/self/task"))
    for _ in range(100):
        numbers = collectives.gather(strategy, 10 + collectives.worker_index(strategy))
    is_stoppable = not int(caught, 16) >> (signal.SIGTERM - 1) & 1
    more = len(os.listdir("/proc/self/task")) - before
    print(collectives.worker_index(strategy), numbers, is_stoppable, more < 50)
"""


@pytest.mark.slow
def test_tasks_of_a_slurm_step_join_stop_on_sigterm_and_leak_no_threads(set_scheduler, tmp_path):
    set_scheduler({"TF_CPP_MIN_LOG_LEVEL": 3})
    (tmp_path / "task.py").write_text(textwrap.dedent(TASK))

    def run(i):
        step = {name: str(value) for name, value in step_of(f"{i}/2 localhost 2 0/{i}", JOB_ID=os.getpid()).items()}
        return forked.run([tmp_path / "task.py"], env={**os.environ, **step}, timeout=120)

    with concurrent.futures.ThreadPoolExecutor() as threads:
        tasks = list(threads.map(run, range(2)))
    assert [task.returncode for task in tasks] == [0, 0], [task.stderr for task in tasks]
    assert [task.stdout for task in tasks] == [f"{i} [10, 11] True True\n" for i in range(2)]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "a,b,fd00::1"),
        ({"no_proxy": "localhost,b"}, "localhost,b,a,fd00::1"),
        ({"no_proxy": "localhost", "no_grpc_proxy": "c"}, "c,a,b,fd00::1"),  # of two, gRPC reads the second alone
    ],
)
def test_workers_are_reached_without_the_proxy_of_the_environment(variables, expected, monkeypatch):
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.setenv(name, variables.get(name, ""))
    environment.Cluster(("a:1", "b:1", "b:2", "[fd00::1]:1"), 0).bypass_proxies()
    assert os.environ["no_grpc_proxy"] == expected
