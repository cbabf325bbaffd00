"""The launcher: flags, and the address, GPUs, cores and environment of each worker; see also test_processes.py."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from distloop.launcher import launch_command as launch
from distloop.launcher import machine
from distloop.workers import environment
from tests import forked

PROGRAM = __file__  # never run
ON_CPUS = "set CUDA_VISIBLE_DEVICES=-1 to run on CPUs"


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch):
    """Deletes variables that the launcher reads."""
    names = "TF_CONFIG CUDA_VISIBLE_DEVICES JOB_COMPLETION_INDEX SLURM_STEP_NUM_TASKS SLURMD_NODENAME DISTLOOP_SECRET"
    for name in [*names.split(), "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def port():
    """Returns the first of three free ports in a row."""
    return next(first for first in range(21_000, 32_000, 3) if all(map(machine.is_free, range(first, first + 3))))


def parse(*flags):
    return launch._parse([*flags, PROGRAM])


def environments(*flags):
    """Returns the environment of each worker on this machine."""
    options = parse(*flags)
    addresses, gpus = launch._choose_addresses(options), launch._choose_gpus(options)
    core_lists = launch._choose_cores(options, has_gpus=any(gpus))
    return [launch._environment(options, i, addresses, gpus[i], core_lists[i]) for i in range(options.workers)]


def allow_cores(count, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))
    monkeypatch.setattr(machine, "_TOPOLOGY", "/nowhere/{core}/{name}")


def test_each_worker_gets_its_own_tf_config():
    configs = [json.loads(variables["TF_CONFIG"]) for variables in environments("--workers=3")]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": i} for i in range(3)]
    clusters = [config["cluster"] for config in configs]
    assert clusters[0] == clusters[1] == clusters[2] and list(clusters[0]) == ["worker"]
    hosts, ports = zip(*(address.split(":") for address in clusters[0]["worker"]), strict=True)
    assert set(hosts) == {"127.0.0.1"} and len({int(port) for port in ports}) == 3


def test_workers_of_a_machine_share_a_secret_new_or_of_the_environment(port, monkeypatch):
    first, again = environments("--workers=2"), environments("--workers=2")
    assert first[0]["DISTLOOP_SECRET"] == first[1]["DISTLOOP_SECRET"] != again[0]["DISTLOOP_SECRET"]
    assert len(first[0]["DISTLOOP_SECRET"]) == 32
    hosts = ["--hosts=a,b", "--host_index=0", f"--port={port}"]
    assert "DISTLOOP_SECRET" not in environments(*hosts)[0]
    monkeypatch.setenv("DISTLOOP_SECRET", "0123456789abcdef")
    assert environments(*hosts)[0]["DISTLOOP_SECRET"] == environments()[0]["DISTLOOP_SECRET"] == "0123456789abcdef"
    monkeypatch.setenv("DISTLOOP_SECRET", "x")
    with pytest.raises(ValueError, match="DISTLOOP_SECRET has 1 characters"):
        parse(*hosts)


@pytest.mark.parametrize("hosts", ["fd00::1,fd00::2", "[fd00::1],[fd00::2]"])
def test_hosts_may_be_addresses_of_ipv6(hosts, port):
    options = parse(f"--hosts={hosts}", "--host_index=0", f"--port={port}")
    assert launch._choose_addresses(options) == [f"[fd00::1]:{port}", f"[fd00::2]:{port}"]


def test_flags_after_the_program_belong_to_the_program():
    arguments = ["--workers=3", "-m", "x", "--help", "--", "-", "", "a b"]
    options = launch._parse(["--workers", "1", PROGRAM, *arguments])
    assert options.workers == 1
    assert launch._command(options) == [sys.executable, PROGRAM, *arguments]


def test_devices_per_worker_are_passed_to_the_program():
    options = launch._parse(["--devices_per_worker=2", PROGRAM, "--steps=3"])
    assert launch._command(options)[2:] == ["--steps=3", "--num_devices=2"]
    options.program += ["--", "rest"]
    assert launch._command(options)[2:] == ["--steps=3", "--num_devices=2", "--", "rest"]


@pytest.mark.slow
def test_modules_run_like_scripts_each_on_its_own_cores(tmp_path):
    (tmp_path / "package").mkdir()
    program = "import os, sys\nprint(__name__, __package__, sys.argv[1:], len(os.sched_getaffinity(0)))"
    (tmp_path / "package" / "module.py").write_text(program)
    command = [sys.executable, "-m", "distloop.launch", "--workers=2", "-m", "package.module", "--workers=3"]
    environ = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    result = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=900)
    assert (result.returncode, result.stderr) == (0, "")
    count = environment.count_cores() // 2 or environment.count_cores()
    expected = [f"[worker {i}] __main__ package ['--workers=3'] {count}" for i in range(2)]
    assert sorted(result.stdout.splitlines()) == expected


@pytest.mark.parametrize(
    ("visible", "flags", "expected"),
    [
        ("4,5,6,7", [], ["4,5", "6,7"]),
        ("4,5,6,7", ["--devices_per_worker=1"], ["4", "5"]),
        ("GPU-ab, MIG-cd,-1,3", [], ["GPU-ab", "MIG-cd"]),
        ("-1", ["--devices_per_worker=2"], ["-1", "-1"]),
        ("", [], ["", ""]),
    ],
)
def test_each_worker_sees_its_own_gpus(visible, flags, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments("--workers=2", *flags)] == expected


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("devices", f"3 GPUs are too few for workers=2 with 2 each: ask for fewer, or {ON_CPUS}."),
        ("cores", "cores_per_worker=3 is too much for workers=2 on 4 cores: give 2 or less; 0 shares all cores."),
    ],
)
def test_more_gpus_or_cores_than_there_are_are_refused(what, sentence, capsys, monkeypatch):
    allow_cores(4, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    flag = {"devices": "--devices_per_worker=2", "cores": "--cores_per_worker=3"}[what]
    assert launch.main(["--workers=2", flag, PROGRAM]) == 2
    assert capsys.readouterr().err == f"distloop.launch: {sentence}\n"


@pytest.mark.parametrize(
    ("flags", "variables", "expected"),
    [
        (["--workers=1"], {}, (None, None)),
        (["--workers=2"], {}, ("6", "6")),
        (["--workers=13"], {}, ("1", "2")),
        (["--workers=3"], {"INTRAOP": "5"}, ("5", "4")),
        (["--workers=2"], {"INTRAOP": "0", "INTEROP": "4"}, ("0", "4")),
        (["--cores_per_worker=3"], {}, ("3", "3")),
        (["--workers=2", "--devices_per_worker=2"], {}, ("3", "6")),
    ],
)
def test_workers_share_the_cores_unless_the_user_set_threads(flags, variables, expected, monkeypatch):
    allow_cores(12 if flags != ["--workers=13"] else 13, monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(f"TF_NUM_{name}_THREADS", value)
    for worker in environments(*flags):
        assert tuple(worker.get(f"TF_NUM_{name}_THREADS") for name in ("INTRAOP", "INTEROP")) == expected


def test_workers_get_huge_pages_unless_the_user_set_what_glibc_does(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert [worker["GLIBC_TUNABLES"] for worker in environments("--workers=2")] == 2 * ["glibc.malloc.hugetlb=1"]
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert [worker["GLIBC_TUNABLES"] for worker in environments("--workers=2")] == 2 * ["glibc.malloc.check=1"]


@pytest.mark.parametrize(
    ("flags", "visible", "expected"),
    [
        (["--workers=2"], "-1", [[0, 1], [2, 3]]),
        (["--workers=2", "--cores_per_worker=1"], "-1", [[0], [1]]),
        (["--cores_per_worker=1"], "-1", [[0]]),
        (["--workers=2", "--cores_per_worker=0"], "-1", [[], []]),
        (["--workers=1"], "-1", [[]]),
        (["--workers=5"], "-1", [[]] * 5),
        (["--workers=2"], "0,1", [[], []]),
        (["--workers=2", "--cores_per_worker=2"], "0,1", [[0, 1], [2, 3]]),
    ],
)
def test_workers_without_gpus_have_cores_of_their_own(flags, visible, expected, monkeypatch):
    allow_cores(4, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    options = parse(*flags)
    assert launch._choose_cores(options, has_gpus=any(launch._choose_gpus(options))) == expected


@pytest.mark.slow
def test_tensorflow_reads_the_thread_variables(tmp_path):
    program = """
        import os
        import tensorflow as tf
        tf.function(lambda a: a @ a)(tf.ones([500, 500]))
        print(len(os.listdir("/proc/self/task")))
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))

    def threads(intra, inter):
        variables = {"TF_NUM_INTRAOP_THREADS": str(intra), "TF_NUM_INTEROP_THREADS": str(inter)}
        return int(forked.run([str(tmp_path / "program.py")], env={**os.environ, **variables}).stdout)

    few = threads(2, 2)
    assert threads(12, 2) >= few + 10 and threads(2, 12) >= few + 10


def test_each_host_starts_its_own_workers(port):
    addresses = [f"{name}:{port + j}" for name in ("127.0.0.1", "node-1.example") for j in range(2)]
    for host in range(2):
        flags = ["--hosts=127.0.0.1,node-1.example", "--workers=2", f"--port={port}", f"--host_index={host}"]
        configs = [json.loads(variables["TF_CONFIG"]) for variables in environments(*flags)]
        tasks = [{"type": "worker", "index": 2 * host + i} for i in range(2)]
        assert configs == [{"cluster": {"worker": addresses}, "task": task} for task in tasks]


def test_addresses_are_new_at_every_restart_but_with_hosts(port):
    local, hosts = parse("--workers=3"), parse("--hosts=a,b", "--host_index=0", f"--port={port}")
    assert launch._choose_addresses(local) != launch._choose_addresses(local)
    assert launch._choose_addresses(hosts) == launch._choose_addresses(hosts) == [f"a:{port}", f"b:{port}"]


@pytest.mark.parametrize(
    ("flags", "index", "expected"),
    [(["--hosts=a,b"], "1", 1), (["--hosts=a,b"], "0", 0), (["--hosts=a,b", "--host_index=0"], "1", 0), ([], "7", 0)],
)
def test_the_index_of_a_kubernetes_job_is_the_host_index(flags, index, expected, port, monkeypatch):
    monkeypatch.setenv("JOB_COMPLETION_INDEX", index)
    assert parse(*flags, *([f"--port={port}"] if flags else [])).first_index == expected


@pytest.mark.parametrize("index", ["2", "-1", "one", ""])
def test_an_index_of_kubernetes_outside_the_hosts_is_refused(index, monkeypatch):
    monkeypatch.setenv("JOB_COMPLETION_INDEX", index)
    with pytest.raises(ValueError, match="is not allowed with 2 hosts: give each host its own, from 0 to 1"):
        parse("--hosts=a,b")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("", "no program was given: end the command with a script or -m and a module"),
        ("--workers=2", "no program was given"),
        ("--workers=2 -m", "no program was given"),
        ("--workers=0 PROGRAM", "workers=0 is not allowed: give 1 or more"),
        ("--workers=-1 PROGRAM", "workers=-1 is not allowed: give 1 or more"),
        ("--workers=two PROGRAM", "workers=two is not allowed: give 1 or more, or MIN:MAX, as in 1:3"),
        ("--workers=3:1 PROGRAM", "workers=3:1 is not allowed: give 1 or more, or MIN:MAX, as in 1:3"),
        ("--workers=0:3 PROGRAM", "workers=0:3 is not allowed"),
        ("--workers=1:x PROGRAM", "workers=1:x is not allowed"),
        ("--hosts=a,b --host_index=0 --workers=1:3 PROGRAM", "workers=1:3 was given with --hosts, whose number of"),
        ("--ray --hosts=a,b --host_index=0 PROGRAM", "--ray was given with --hosts=a,b, but Ray knows"),
        ("--wait_secs=-1 PROGRAM", "wait_secs=-1.0 is not allowed: give 0 or more"),
        ("--workers", "--workers: expected one argument"),
        ("--devices_per_worker=0 PROGRAM", "devices_per_worker=0 is not allowed: give 1 or more, or leave it out"),
        ("--max_restarts=-1 PROGRAM", "max_restarts=-1 is not allowed: give 0 or more"),
        ("--parent=99999999 PROGRAM", "parent=99999999 is no process of this machine: give the caller's number, or"),
        ("--grace_secs=nan PROGRAM", "grace_secs=nan is not allowed: give 0 or more"),
        ("--work=2 PROGRAM", "--work=2 is no flag of the launcher: give its own flags (--help lists them) before"),
        ("--steps 5 PROGRAM", "--steps is no flag of the launcher"),
        ("nowhere/program.py", "there is no file 'nowhere/program.py': give the path of a script, or -m and a module"),
        ("-m nowhere.program", "there is no module 'nowhere.program' here"),
        ("--host_index=0 PROGRAM", "--host_index was given without --hosts"),
        ("--port=5000 PROGRAM", "--port was given without --hosts"),
        ("--hosts=a,b PROGRAM", "host_index=None is not allowed with 2 hosts: give each host its own, from 0 to 1"),
        ("--hosts=a,b --host_index=2 PROGRAM", "host_index=2 is not allowed with 2 hosts"),
        ("--hosts=a,a --host_index=1 PROGRAM", "hosts=a,a is not allowed: give names or IP addresses, each once"),
        ("--hosts=a:1,b --host_index=1 PROGRAM", "hosts=a:1,b is not allowed"),
        ("--hosts=a, --host_index=0 PROGRAM", "hosts=a, is not allowed"),
    ],
)
def test_wrong_commands_are_refused_in_one_sentence(command, sentence, capsys):
    assert launch.main(command.replace("PROGRAM", PROGRAM).split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("distloop.launch: ") and error.count("\n") == 1 and sentence in error


@pytest.mark.parametrize(
    ("variables", "flags", "is_refused"),
    [
        ({}, "--workers=1:4", False),
        ({"SLURM_STEP_NUM_TASKS": "1"}, "--workers=1:4", False),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "--workers=1:4", True),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "--workers=1:4 --ray", False),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "--workers=4", False),
        ({"JOB_COMPLETION_INDEX": "0"}, "--workers=1:4", True),
        ({"JOB_COMPLETION_INDEX": "0"}, "--workers=4", False),
    ],
)
def test_launchers_that_do_not_know_each_other_are_not_elastic(variables, flags, is_refused, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sentence = "workers=1:4 was given in one of several tasks of Slurm .* give --ray, once"
    with pytest.raises(ValueError, match=sentence) if is_refused else contextlib.nullcontext():
        assert parse(*flags.split()).most == 4


@pytest.mark.slow
def test_the_launcher_starts_without_tensorflow():
    program = "import sys, distloop.launch; print(sorted({'tensorflow', 'keras', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900)
    assert result.stdout == "[]\n", result.stderr


def test_help_lists_the_flags(capsys):
    with pytest.raises(SystemExit) as end:
        launch.main(["--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and "--max_restarts N" in out and "python -m distloop.launch" in out
