"""The files in experiments/cluster, as Slurm, Kubernetes and the launcher read them."""

import os
import pathlib
import re
import subprocess

import pytest
import yaml

from distloop import config, launch
from distloop.distributed.heartbeat import EXIT_CODE as OTHER_FAILED
from distloop.distributed.preemption import EXIT_CODE

HERE = pathlib.Path(__file__).resolve().parent.parent / "experiments" / "cluster"
SBATCH, ELASTIC_SBATCH = HERE / "slurm.sbatch", HERE / "slurm_elastic.sbatch"

# From the manual pages sbatch(1) and srun(1) of Slurm 22.05.
SBATCH_OPTIONS = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "time", "signal", "requeue",
                  "open-mode", "output"}  # fmt: skip
SRUN_OPTIONS = {"kill-on-bad-exit", "cpus-per-task", "label"}


def directives(path=SBATCH):
    options = re.findall(r"^#+SBATCH --([\w-]+)(?:=(\S+))?$", path.read_text(), re.MULTILINE)
    assert len(options) == len(re.findall("^#+ *SBATCH", path.read_text(), re.MULTILINE))
    return dict(options)


def test_the_batch_script_uses_existing_options_of_slurm():
    assert set(directives()) == SBATCH_OPTIONS
    assert set(directives(ELASTIC_SBATCH)) == SBATCH_OPTIONS - {"ntasks-per-node"} | {"array", "ntasks"}
    (command,) = re.findall(r"^srun (.*?)\"\$\{PYTHON", SBATCH.read_text(), re.MULTILINE | re.DOTALL)
    assert {option.partition("=")[0] for option in re.findall(r"--(\S+)", command)} == SRUN_OPTIONS


@pytest.mark.parametrize("path", [SBATCH, ELASTIC_SBATCH], ids=lambda path: path.name)
def test_directives_come_before_commands(path):
    lines = path.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert lines[0] == "#!/bin/bash" and not [line for line in lines[first:] if "#SBATCH" in line]


def test_a_run_has_time_to_save():
    hours, minutes, secs = map(int, directives()["time"].split(":"))
    limit = 3600 * hours + 60 * minutes + secs
    name, _, lead = directives()["signal"].partition("@")
    assert name == "TERM"  # to the tasks; B: would be to the shell alone
    (max_secs,) = re.findall(r"--max_secs=(\d+)", SBATCH.read_text())
    assert int(max_secs) + int(lead) + 300 < limit and int(lead) >= 300


@pytest.mark.parametrize(("code", "is_requeued"), [(0, False), (1, False), (EXIT_CODE, True), (OTHER_FAILED, False)])
def test_a_job_that_saved_and_left_is_queued_again(code, is_requeued, tmp_path):
    subprocess.run(["bash", "-n", SBATCH], check=True)
    for name, ends in (("srun", f"exit {code}"), ("scontrol", "exit 0")):
        (tmp_path / name).write_text(f'#!/bin/bash\nprintf "%s|" {name} "$@" >> {tmp_path}/calls\n{ends}\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42", "SLURM_CPUS_PER_TASK": "8"}
    command = ["bash", SBATCH, "-m", "experiments.digits", "--workdir=a b"]
    assert subprocess.run(command, env=environment, cwd=tmp_path).returncode == code
    calls = (tmp_path / "calls").read_text()
    assert calls.startswith(
        "srun|--kill-on-bad-exit=0|--cpus-per-task=8|--label|.venv/bin/python|-m|experiments.digits|"
    )
    assert "|--workdir=a b|--max_secs=" in calls
    assert calls.endswith("|scontrol|requeue|42|") == is_requeued


@pytest.mark.parametrize(("code", "is_requeued"), [(0, False), (1, False), (EXIT_CODE, True)])
def test_each_job_of_an_elastic_run_starts_one_launcher_and_is_queued_again_when_its_node_left(
    code, is_requeued, tmp_path
):
    for name, ends in (("srun", f"exit {code}"), ("scontrol", "exit 0")):
        (tmp_path / name).write_text(f'#!/bin/bash\nprintf "%s\n" {name} "$@" >> {tmp_path}/calls\n{ends}\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42", "SLURM_CPUS_PER_TASK": "8"}
    command = ["bash", ELASTIC_SBATCH, "-m", "experiments.digits", f"--workdir={tmp_path}/a b"]
    assert subprocess.run(command, env=environment, cwd=tmp_path).returncode == code
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[:5] == ["srun", "--cpus-per-task=8", ".venv/bin/python", "-m", "distloop.launch"]
    assert calls.count("scontrol") == int(is_requeued)
    options = launch._parse(calls[5 : calls.index("scontrol") if is_requeued else None])
    assert options.meet == f"{tmp_path}/a b/membership" and options.workers == 1
    first, last = map(int, directives(ELASTIC_SBATCH)["array"].split("-"))
    assert (options.least, options.most) == (1, last - first + 1) and directives(ELASTIC_SBATCH)["nodes"] == "1"
    assert directives(ELASTIC_SBATCH)["signal"] == "TERM@600"  # to the launcher: B: would be to the shell alone


def documents(name):
    return {document["kind"]: document for document in yaml.safe_load_all((HERE / name).read_text())}


@pytest.fixture
def job():
    return documents("kubernetes.yaml")["Job"]


def container_of(template):
    (container,) = template["spec"]["containers"]
    return container


def test_the_launcher_gets_the_pods_of_the_job_as_hosts(job, monkeypatch):
    service, spec = documents("kubernetes.yaml")["Service"], job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    container = container_of(spec["template"])
    assert container["command"] == ["python", "-m", "distloop.launch"]
    for i in range(spec["completions"]):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(i))
        options = launch._parse(container["args"])
        assert options.hosts == [
            f"{job['metadata']['name']}-{j}.{service['metadata']['name']}" for j in range(spec["completions"])
        ]
        assert options.first_index == i and options.program[:2] == ["-m", "experiments.digits"]


def test_the_jobs_ports_are_the_launchers(job):
    ports = container_of(job["spec"]["template"])["ports"]
    assert {(port["containerPort"], port.get("protocol", "TCP")) for port in ports} == {
        (launch.FIRST_PORT, "TCP"),
        (launch.FIRST_PORT, "UDP"),
    }


@pytest.mark.parametrize(
    ("code", "action"), [(2, "FailJob"), (EXIT_CODE, "Ignore"), (OTHER_FAILED, "Ignore"), (1, None), (137, None)]
)
def test_the_job_restarts_pods_that_saved_or_followed_and_counts_crashes(code, action, job):
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"  # else there may be no podFailurePolicy
    assert job["spec"]["backoffLimit"] > 0
    rules = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    name = container_of(job["spec"]["template"])["name"]
    assert all(rule["onExitCodes"].items() >= {"containerName": name, "operator": "In"}.items() for rule in rules)
    actions = [rule["action"] for rule in rules if code in rule["onExitCodes"]["values"]]
    assert actions == ([action] if action else [])


def test_the_pods_of_an_elastic_run_are_hosts_that_meet_in_the_workdir(monkeypatch):
    job = documents("kubernetes_elastic.yaml")["Job"]["spec"]
    template = job["template"]["spec"]
    container = container_of(job["template"])
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    options = launch._parse(container["args"])
    assert container["command"] == ["python", "-m", "distloop.launch"]
    assert options.most == job["completions"] == job["parallelism"] and options.least == 1
    assert options.workers_per_host == 1 and options.meet == "/runs/digits/membership"
    assert "subdomain" not in template  # the addresses are the pods'
    assert job["completionMode"] == "Indexed" and job["backoffLimitPerIndex"] > 0 and "backoffLimit" not in job
    rules = [rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    actions = {code: rule["action"] for rule in rules for code in rule["onExitCodes"]["values"]}
    failed = dict.fromkeys([1, 2, 74, 134, 139], "FailJob")  # 74: a file system that hangs; then by SIGABRT, by SIGSEGV
    assert actions == failed | {EXIT_CODE: "Ignore", OTHER_FAILED: "Ignore"}
    assert job["successPolicy"] == {"rules": [{"succeededCount": 1}]}


def test_a_tfjobs_workers_start_again_at_every_code():
    spec = documents("tfjob.yaml")["TFJob"]["spec"]
    (worker,) = spec["tfReplicaSpecs"].values()
    assert list(spec["tfReplicaSpecs"]) == ["Worker"] and spec["successPolicy"] == "AllWorkers"
    assert worker["restartPolicy"] == "OnFailure" and spec["runPolicy"]["backoffLimit"] > 0
    container = container_of(worker["template"])
    assert container["name"] == "tensorflow" and "ports" not in container
    assert container["command"][:2] == ["python", "-m"] and container["command"][2] != "distloop.launch"


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("kubernetes.yaml", lambda resources: resources["Job"]["spec"]["template"]),
        ("kubernetes_elastic.yaml", lambda resources: resources["Job"]["spec"]["template"]),
        ("tfjob.yaml", lambda resources: resources["TFJob"]["spec"]["tfReplicaSpecs"]["Worker"]["template"]),
    ],
)
def test_pods_share_the_workdir_and_have_time_to_save(name, template):
    resources = documents(name)
    template, claim = template(resources), resources["PersistentVolumeClaim"]
    (volume,) = template["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    container = container_of(template)
    (mount,) = container["volumeMounts"]
    assert mount["name"] == volume["name"]
    values = dict(re.findall(r"--(\w+)=(\S+)", " ".join(container["args"])))
    assert values.pop("workdir").startswith(mount["mountPath"] + "/")
    if "hosts" in values or name == "tfjob.yaml":  # workers that are expected where they were
        assert set(values) - {"hosts"} == {"start_timeout"} and float(values["start_timeout"]) > 2 * 360
        assert config.Config(start_timeout=float(values["start_timeout"]))
    assert template["spec"]["terminationGracePeriodSeconds"] >= 300
    assert container["image"] == "distloop"
