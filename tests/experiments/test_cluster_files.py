"""The files in experiments/cluster, as Slurm, Kubernetes and the launcher read them."""

import copy
import os
import pathlib
import re
import subprocess

import pytest
import yaml

from distloop.launcher import launch_command as launch
from distloop.settings import config
from distloop.workers.heartbeat import EXIT_CODE as OTHER_FAILED
from distloop.workers.preemption import EXIT_CODE

HERE = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "cluster"
SBATCH, ELASTIC_SBATCH = HERE / "slurm.sbatch", HERE / "slurm_elastic.sbatch"

# From the manual pages sbatch(1) and srun(1) of Slurm 22.05.
SBATCH_OPTIONS = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "time", "signal", "requeue",
                  "open-mode", "output"}  # fmt: skip
SRUN_OPTIONS = {"kill-on-bad-exit", "cpus-per-task", "label"}


def directives(path=SBATCH):
    options = re.findall(r"^#+SBATCH --([\w-]+)(?:=(\S+))?$", path.read_text(), re.MULTILINE)
    assert len(options) == len(re.findall("^#+ *SBATCH", path.read_text(), re.MULTILINE))
    return dict(options)


def run_with(programs, path, directory, environment, arguments):
    """Runs a batch script with programs of the names given, which are texts; returns its exit code."""
    for name, text in programs.items():
        (directory / name).write_text(f"#!/bin/bash\n{text}\n")
        (directory / name).chmod(0o755)
    environment |= {"PATH": f"{directory}:{os.environ['PATH']}", "SLURM_JOB_ID": "42", "SLURM_CPUS_PER_TASK": "8"}
    command = ["bash", path, "-m", "experiments.digits", *arguments]
    return subprocess.run(command, env=environment, cwd=directory, timeout=900).returncode


def test_the_batch_script_uses_existing_options_of_slurm():
    assert set(directives()) == SBATCH_OPTIONS
    assert set(directives(ELASTIC_SBATCH)) == SBATCH_OPTIONS | {"no-kill"}
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
    ends = {"srun": f"exit {code}", "scontrol": "exit 0"}
    programs = {name: f'printf "%s|" {name} "$@" >> {tmp_path}/calls\n{end}' for name, end in ends.items()}
    assert run_with(programs, SBATCH, tmp_path, {}, ["--workdir=a b"]) == code
    calls = (tmp_path / "calls").read_text()
    begins = "srun|--kill-on-bad-exit=0|--cpus-per-task=8|--label|.venv/bin/python|-m|experiments.digits|"
    assert calls.startswith(begins)
    assert "|--workdir=a b|--max_secs=" in calls
    assert calls.endswith("|scontrol|requeue|42|") == is_requeued


ELASTIC_STUB = """
line=$(printf "%s|" "$0" "$@"); echo "$line" >> {directory}/calls  # at once: several processes write
case "$*" in
    *distloop.launch*) until [ "$(grep -c srun {directory}/calls)" -ge 2 ]; do sleep 0.1; done; {end} ;;
    *--head*) touch {directory}/head ;;
    *status*) [ -e {directory}/head ] ;;
esac
"""


@pytest.mark.parametrize(
    ("end", "code", "is_requeued"),
    [
        ("exit 0", 0, False),
        ("exit 1", 1, False),
        (f"exit {EXIT_CODE}", EXIT_CODE, True),
        (f"trap 'exit {EXIT_CODE}' TERM; kill -TERM $PPID; while :; do sleep 0.1; done", EXIT_CODE, True),  # in time
    ],
)
def test_an_elastic_job_starts_ray_on_each_node_and_the_launcher_once(end, code, is_requeued, tmp_path):
    stub = ELASTIC_STUB.format(directory=tmp_path, end=end)
    programs = {**dict.fromkeys(("srun", "scontrol", "python"), stub), "hostname": "echo n1"}
    environment = {"PYTHON": "python", "SLURM_JOB_NUM_NODES": "3"}
    assert run_with(programs, ELASTIC_SBATCH, tmp_path, environment, [f"--workdir={tmp_path}/a b"]) == code
    lines = (tmp_path / "calls").read_text().splitlines()
    calls = [line.removeprefix(f"{tmp_path}/").split("|")[:-1] for line in lines]
    head, others = sorted((call for call in calls if call[0] == "srun"), key=lambda call: "--head" not in call)
    assert {"--nodes=1", "--nodelist=n1", "--port=20042", "--num-cpus=8"} < set(head)
    assert {"--nodes=2", "--exclude=n1", "--address=n1:20042", "--num-cpus=8", "--no-kill"} < set(others)
    assert (["scontrol", "requeue", "42"] in calls) == is_requeued
    (launched,) = [call for call in calls if "distloop.launch" in call]
    options = launch._parse(launched[3:])
    assert (options.least, options.most, options.ray, options.cores_per_worker) == (1, 3, True, 8)
    assert options.program == ["-m", "experiments.digits", f"--workdir={tmp_path}/a b"]
    assert directives(ELASTIC_SBATCH)["signal"] == "B:TERM@600"  # to the shell, which passes it on to the launcher


def documents(name):
    return {document["kind"]: document for document in yaml.safe_load_all((HERE / name).read_text())}


@pytest.fixture
def job():
    return documents("kubernetes.yaml")["Job"]


def container_of(template):
    (container,) = template["spec"]["containers"]
    return container


def test_the_launcher_gets_the_pods_of_the_job_as_hosts_and_its_ports(job, monkeypatch):
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
        names = job["metadata"]["name"], service["metadata"]["name"]
        assert options.hosts == [f"{names[0]}-{j}.{names[1]}" for j in range(spec["completions"])]
        assert options.first_index == i and options.program[:2] == ["-m", "experiments.digits"]
    ports = container["ports"]
    assert {(port["containerPort"], port.get("protocol", "TCP")) for port in ports} == {(launch.FIRST_PORT, "TCP")}


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


def test_a_rayjob_has_a_node_for_each_worker_and_one_for_the_launcher():
    job = documents("kubernetes_elastic.yaml")["RayJob"]["spec"]
    assert job["entrypoint"].startswith("python -m distloop.launch --ray ")
    options = launch._parse(job["entrypoint"].split()[3:])
    (workers,) = job["rayClusterSpec"]["workerGroupSpecs"]
    assert options.ray and (options.least, options.most) == (workers["minReplicas"], workers["replicas"])
    cores = container_of(workers["template"])["resources"]["requests"]["cpu"]
    assert options.cores_per_worker == int(workers["rayStartParams"]["num-cpus"]) == cores
    assert job["rayClusterSpec"]["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}


def pods_of(value):
    """Returns all templates of pods in a manifest."""
    found = [value] if isinstance(value, dict) and "containers" in value.get("spec", {}) else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return found + [pod for one in inner for pod in pods_of(one)]


def lacks(pod):
    """Returns what a template of a pod lacks, for each container, of what keeps a broken one from its node."""
    spec, found = pod["spec"], []
    if spec.get("automountServiceAccountToken") is not False:
        found.append("a token that is not mounted")
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        own = container.get("securityContext", {})
        context, name = {**spec.get("securityContext", {}), **own}, container["name"]
        wanted = {
            "runAsNonRoot": context.get("runAsNonRoot") is True and context.get("runAsUser", 0) > 0,
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "capabilities": own.get("capabilities") == {"drop": ["ALL"]},
            "privileged": not own.get("privileged", False),
            "seccompProfile": context.get("seccompProfile") == {"type": "RuntimeDefault"},
            "DISTLOOP_SECRET": _has_a_required_secret(container),
        }
        found += [f"{name}: {key}" for key, is_there in wanted.items() if not is_there]
    return found


def _has_a_required_secret(container):
    sources = [one.get("valueFrom", {}) for one in container.get("env", []) if one["name"] == "DISTLOOP_SECRET"]
    return len(sources) == 1 and not sources[0].get("secretKeyRef", {"optional": True}).get("optional", False)


PODS = {"kubernetes.yaml": 1, "kubernetes_elastic.yaml": 2, "tfjob.yaml": 1}


@pytest.mark.parametrize("name", sorted(path.name for path in HERE.glob("*.yaml")))
def test_no_container_has_more_rights_than_training_needs(name):
    pods = pods_of(list(documents(name).values()))
    assert len(pods) == PODS[name] and [lacks(pod) for pod in pods] == [[]] * len(pods)


@pytest.mark.parametrize(
    ("change", "lacking"),
    [
        (lambda spec: spec["securityContext"].pop("runAsNonRoot"), ["train: runAsNonRoot", "second: runAsNonRoot"]),
        (lambda spec: spec["containers"][1].pop("securityContext"), ["second: allowPrivilegeEscalation",
                                                                     "second: capabilities"]),
        (lambda spec: spec["containers"][1].update(securityContext={"allowPrivilegeEscalation": False,
                                                                    "capabilities": {"drop": ["ALL"]},
                                                                    "runAsNonRoot": False}), ["second: runAsNonRoot"]),
        (lambda spec: spec.pop("automountServiceAccountToken"), ["a token that is not mounted"]),
        (lambda spec: spec["containers"][0]["env"][0]["valueFrom"]["secretKeyRef"].update(optional=True),
         ["train: DISTLOOP_SECRET"]),
    ],
)  # fmt: skip
def test_a_container_with_more_rights_is_found_among_two(change, lacking):
    (pod,) = pods_of(documents("kubernetes.yaml")["Job"])
    pod["spec"]["containers"].append({**copy.deepcopy(container_of(pod)), "name": "second"})
    change(pod["spec"])
    assert lacks(pod) == lacking


@pytest.mark.parametrize("name", PODS)
def test_only_the_pods_of_a_run_reach_each_other(name):
    resources = documents(name)
    policy = resources["NetworkPolicy"]["spec"]
    labels = policy["podSelector"]["matchLabels"]
    assert policy["policyTypes"] == ["Ingress"]
    assert {"podSelector": {"matchLabels": labels}} in policy["ingress"][0]["from"]
    assert all("ports" in rule for rule in policy["ingress"][1:])  # the operator of Ray, on one port
    (kind,) = {"Job", "RayJob", "TFJob"} & set(resources)
    of_the_operator = {"Job": "batch.kubernetes.io/job-name", "TFJob": "training.kubeflow.org/job-name"}
    if kind in of_the_operator:
        assert labels == {of_the_operator[kind]: resources[kind]["metadata"]["name"]}
    else:
        assert all(pod["metadata"]["labels"].items() >= labels.items() for pod in pods_of(resources[kind]))


def test_a_tfjobs_workers_start_again_at_every_code():
    spec = documents("tfjob.yaml")["TFJob"]["spec"]
    (worker,) = spec["tfReplicaSpecs"].values()
    assert list(spec["tfReplicaSpecs"]) == ["Worker"] and spec["successPolicy"] == "AllWorkers"
    assert worker["restartPolicy"] == "OnFailure" and spec["runPolicy"]["backoffLimit"] > 0
    container = container_of(worker["template"])
    assert container["name"] == "tensorflow" and "ports" not in container
    assert container["command"][:2] == ["python", "-m"] and container["command"][2] != "distloop.launch"


@pytest.mark.parametrize("name", PODS)
def test_pods_share_the_workdir_and_have_time_to_save(name):
    resources = documents(name)
    claim = resources["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods_of(list(resources.values())):
        (volume,) = pod["spec"]["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        container = container_of(pod)
        (mount,) = container["volumeMounts"]
        assert mount["name"] == volume["name"] and container["image"] == "distloop"
        arguments = container.get("args") or resources["RayJob"]["spec"]["entrypoint"].split()
        values = dict(re.findall(r"--(\w+)=(\S+)", " ".join(arguments)))
        assert values["workdir"].startswith(mount["mountPath"] + "/")
        if name != "kubernetes_elastic.yaml":  # workers that are expected where they were; Ray's nodes end at once
            assert set(values) - {"hosts", "workdir"} == {"start_timeout"} and float(values["start_timeout"]) > 2 * 360
            assert config.Config(start_timeout=float(values["start_timeout"]))
            assert pod["spec"]["terminationGracePeriodSeconds"] >= 300
