"""The flags of the launcher, and the command and the environment of each worker that it starts; without TensorFlow.

    python -m distloop.launch --workers=2 -m experiments.digits --steps=500
    python -m distloop.launch --workers=1:4 -m experiments.digits --workdir=runs/digits     # goes on with those left
    python -m distloop.launch --workers=2 --devices_per_worker=2 path/to/script.py --flag=...
    python -m distloop.launch --hosts=a,b --host_index=0 -m experiments.digits      # on b: --host_index=1
    python -m distloop.launch --ray --workers=1:4 -m experiments.digits --workdir=/shared/digits    # where Ray has room

Everything from `-m` or the path on belongs to the program. Each worker gets its TF_CONFIG, and on one machine a random
DISTLOOP_SECRET that signs messages between workers; its lines are shown behind `[worker 0]`. A worker that crashes
stops the others, and within `--max_restarts` all start again from their last checkpoint, after a pause that grows from
a second to a minute. With MIN:MAX workers, those left go on at once from the newest checkpoint, and one that comes back
is taken in; a worker that gets SIGTERM leaves, and no step is lost.

The exit code is that of the worker that failed first (128 + n for signal n), else 75 if one saved and left, else 0. A
worker that ends with 76 was not the first: another one failed or fell silent, maybe on another host. The first Ctrl-C
or SIGTERM is passed on and the launcher waits, and ends with 75 where no worker had come to train; the second kills.

With --hosts each launcher restarts its own workers. Their restarts need not coincide: a crash breaks the workers of the
other hosts, too, and workers wait for each other when they start. With --ray, workers are actors on the nodes of a Ray
cluster, which go and come as workers do; the command runs once.
"""

import argparse
import functools
import glob
import importlib.util
import itertools
import json
import math
import os
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from distloop.launcher import elastic, machine, processes, ray_actors
from distloop.launcher.inbox import Inbox
from distloop.log import printable
from distloop.workers import environment, preemption
from distloop.workers.messages import Membership

FIRST_PORT = 12345  # of each host, with --hosts

# glibc asks Linux for pages of 2 MB: large tensors need fewer page faults, half of the time of a large model on CPUs.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

# name -> type, default, minimum, help
_NUMBERS: dict[str, tuple[Callable[[str], float], float | None, int, str]] = {
    "devices_per_worker": (int, None, 1, "devices of each worker, passed to the program as --num_devices"),
    "cores_per_worker": (int, None, 0, "cores reserved for each worker, 0: none (default: without GPUs an equal part)"),
    "max_restarts": (int, None, 0, "starts after crashes without a newer checkpoint (default: 0, or 3 with MIN:MAX)"),
    "grace_secs": (float, 10.0, 0, "seconds from SIGTERM to SIGKILL for workers that are stopped (default: 10)"),
    "wait_secs": (float, 600.0, 0, "with MIN:MAX, seconds to wait for MIN workers before the end (default: 600)"),
    "host_index": (int, None, 0, "of this machine in --hosts, from 0 (default: Kubernetes' JOB_COMPLETION_INDEX)"),
    "parent": (int, None, 1, "number of the process that calls the launcher, which then ends when that one does"),
    "port": (int, None, 1, f"of the first worker on each of --hosts, the next ones follow (default: {FIRST_PORT})"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher and returns its exit code; 2 if nothing could be started."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        if options.parent is not None:
            preemption.end_with(options.parent)
        plan = elastic.MembershipPlan(
            options.least, options.most, options.max_restarts, options.wait_secs, options.grace_secs
        )
        if options.ray:
            return _run_in_ray(options, plan)
        _choose_cores(options, has_gpus=any(_choose_gpus(options)))
        with processes.Guard() as guard:
            return elastic.run(plan, functools.partial(_start, options, guard), processes.Signals())
    except ValueError as error:
        print(printable(f"distloop.launch: {error}"), file=sys.stderr)
        return 2


def _run_in_ray(options: argparse.Namespace, plan: elastic.MembershipPlan) -> int:
    """Runs the workers in Ray, which counts the cores and GPUs."""
    with ray_actors.Actors(options.most, options.cores_per_worker or 1, options.devices_per_worker or 1) as cluster:
        signals = processes.Signals()  # in place of Ray's handlers
        if cluster.gather(options.least, signals):
            return preemption.EXIT_CODE
        return elastic.run(plan, functools.partial(_start_in_ray, options, cluster), signals, cluster.there)


def _start_in_ray(
    options: argparse.Namespace, cluster: ray_actors.Actors, membership: Membership, slots: Sequence[int], inbox: Inbox
) -> list[processes.Process]:
    """Starts the workers of a membership, each in an actor."""
    addresses, cores = [cluster.address(slot) for slot in slots], range(options.cores_per_worker or 0)
    threads = _thread_variables(len(slots), 1, cores) if cores else {}
    workers = []
    for i, slot in enumerate(slots):
        variables = {**_HUGE_PAGES, **threads, **_cluster_variables(options, i, addresses)}
        workers.append(cluster.start(slot, _command(options)[1:], membership._replace(worker=i), variables, inbox))
    return workers


def _start(
    options: argparse.Namespace, guard: processes.Guard, membership: Membership, slots: Sequence[int], inbox: Inbox
) -> list[processes.Process]:
    """Starts the workers of a membership, which share the machine."""
    options = argparse.Namespace(**{**vars(options), "workers": len(slots)})
    addresses, gpus = _choose_addresses(options), _choose_gpus(options)
    core_lists = _choose_cores(options, has_gpus=any(gpus))
    workers = []
    for i in range(len(slots)):
        membership = membership._replace(worker=options.first_index + i)
        variables = _environment(options, i, addresses, gpus[i], core_lists[i]) | membership.variables()
        process = processes.Process(
            *(membership.worker, _command(options), variables),
            cores=core_lists[i],
            guard=guard,
            descriptors=[inbox.write_end],
        )
        workers.append(process)
    return workers


def _command(options: argparse.Namespace) -> list[str]:
    count, program = options.devices_per_worker, options.program
    end = [*program, "--"].index("--")  # what is after it is no flag
    return [sys.executable, *program[:end], *([f"--num_devices={count}"] if count else []), *program[end:]]


def _environment(
    options: argparse.Namespace, i: int, addresses: Sequence[str], gpus: Sequence[str], core_list: Sequence[int]
) -> dict[str, str]:
    """Returns the environment variables of the `i`-th worker on this machine."""
    variables = {
        **_HUGE_PAGES,
        **_thread_variables(options.workers, 1 if gpus else options.devices_per_worker or 1, core_list),
        **os.environ,
        **_cluster_variables(options, i, addresses),
    }
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return variables


def _cluster_variables(options: argparse.Namespace, i: int, addresses: Sequence[str]) -> dict[str, str]:
    """Returns the variables by which the `i`-th worker that is started here knows the others."""
    task = {"type": "worker", "index": options.first_index + i}
    variables = {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task}), "PYTHONUNBUFFERED": "1"}
    return variables | ({"DISTLOOP_SECRET": options.secret} if options.secret else {})


def _thread_variables(workers: int, devices: int, core_list: Sequence[int]) -> dict[str, str]:
    """Returns variables that limit a worker's TensorFlow threads to its part of the cores; {} for one that has all.

    Each virtual CPU of a worker has threads of its own, for its part of these cores. With one thread
    between operations, a `tf.py_function` that calls a `tf.function` waits for itself.
    """
    if workers == 1 and not core_list:
        return {}
    count = len(core_list) or environment.count_cores() // workers
    return {"TF_NUM_INTRAOP_THREADS": str(max(1, count // devices)), "TF_NUM_INTEROP_THREADS": str(max(2, count))}


class _LaunchParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help tells what each flag takes.")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the flags by name, and `program`: the arguments for Python."""
    usage = "%(prog)s [flags] (-m module | script.py) [the program's flags]"
    parser = _LaunchParser(prog="python -m distloop.launch", usage=usage, description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workers", metavar="N", default="1", help="workers on this machine, or MIN:MAX (default: 1)")
    for name, (kind, default, _, text) in _NUMBERS.items():
        parser.add_argument(f"--{name}", metavar="N", type=kind, default=default, help=text)
    hosts_help = "every machine; run the same command on each, with its own --host_index"
    parser.add_argument("--hosts", metavar="A,B", help=hosts_help)
    parser.add_argument("--ray", action="store_true", help="start each worker in a Ray actor, wherever Ray has room")
    count = 0
    while count < len(arguments) and arguments[count].startswith("-") and arguments[count] != "-m":
        count += 1 if "=" in arguments[count] or arguments[count] in ("-h", "--help", "--ray") else 2
    options, unknown = parser.parse_known_args(arguments[:count])
    if unknown:
        raise ValueError(
            f"{unknown[0]} is no flag of the launcher: give its own flags (--help lists them) before the program, and "
            "the program's after it."
        )
    for name, (_, _, minimum, _) in _NUMBERS.items():
        value = getattr(options, name)
        if value is not None and not minimum <= value < math.inf:
            raise ValueError(f"{name}={value} is not allowed: give {minimum} or more, or leave it out.")
    options.program = list(arguments[count:])
    _check_program(options.program)
    _complete_workers(options)
    _complete_hosts(options)
    return options


def _complete_workers(options: argparse.Namespace) -> None:
    """Sets `workers` to their number, and `least` to the number with which an elastic run goes on."""
    text = options.workers
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if least > most:
        raise ValueError(f"workers={text} is not allowed: give 1 or more, or MIN:MAX, as in 1:3.")
    if options.ray and options.hosts:
        raise ValueError(f"--ray was given with --hosts={options.hosts}, but Ray knows its nodes: leave one out.")
    if ":" in text and options.hosts:
        raise ValueError(
            f"workers={text} was given with --hosts, whose number of workers is fixed: give one number, and "
            "--max_restarts to start all again after a crash, or --ray, in a Ray cluster of hosts that go and come."
        )
    if least < most and not options.ray and machine.has_other_tasks():
        raise ValueError(
            f"workers={text} was given in one of several tasks of Slurm or pods of a Job, whose launchers do not know "
            "each other: give --ray, once in a Ray cluster on these machines, or one number of workers."
        )
    options.least, options.most, options.workers = least, most, most
    if options.max_restarts is None:
        options.max_restarts = 3 if least < most else 0


def _check_program(program: list[str]) -> None:
    if not program or program == ["-m"]:
        raise ValueError("no program was given: end the command with a script or -m and a module, then its flags.")
    if program[0] != "-m" and not os.path.exists(program[0]):
        raise ValueError(f"there is no file {program[0]!r}: give the path of a script, or -m and a module.")
    # Of a.b only a is looked up: looking up b would import a.
    if program[0] == "-m" and not importlib.util.find_spec(program[1].partition(".")[0] or "?"):
        raise ValueError(f"there is no module {program[1]!r} here: give one that `python -m` finds, or a script.")


def _complete_hosts(options: argparse.Namespace) -> None:
    """Checks the flags about hosts; sets `hosts` to a list and `first_index` to the index of the first worker here."""
    for name in () if options.hosts else ("host_index", "port"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} was given without --hosts, which it is about: give both or none.")
    hosts = [host.strip() for host in options.hosts.split(",")] if options.hosts else []
    hosts = [f"[{host.strip('[]')}]" if ":" in host else host for host in hosts]  # IPv6, before a port
    if len(set(hosts)) < len(hosts) or not all(_is_host(host) for host in hosts):
        raise ValueError(f"hosts={options.hosts} is not allowed: give names or IP addresses, each once, no ports.")
    options.secret = environment.find_secret() or ("" if hosts else secrets.token_hex(16))
    index = os.environ.get("JOB_COMPLETION_INDEX", "")  # of an indexed Job of Kubernetes
    if hosts and options.host_index is None and index.isdigit():
        options.host_index = int(index)
    if hosts and (options.host_index is None or options.host_index >= len(hosts)):
        raise ValueError(
            f"host_index={options.host_index} is not allowed with {len(hosts)} hosts: give each host its own, from 0 "
            f"to {len(hosts) - 1}."
        )
    options.port = options.port or FIRST_PORT
    options.hosts, options.first_index = hosts, (options.host_index or 0) * options.workers


def _is_host(host: str) -> bool:
    try:
        return bool(environment.split_address(f"{host}:1"))
    except ValueError:
        return False


def _choose_addresses(options: argparse.Namespace) -> list[str]:
    """Returns the address of every worker; without --hosts, new random ports at every call."""
    if options.hosts:
        return [f"{host}:{options.port + i}" for host in options.hosts for i in range(options.workers)]
    return [f"127.0.0.1:{port}" for port in machine.choose_ports(options.workers)]


def _choose_gpus(options: argparse.Namespace) -> list[list[str]]:
    """Returns the GPUs of each worker here, for CUDA_VISIBLE_DEVICES; empty lists without GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]
    else:  # CUDA ignores all entries from the first invalid one on, such as -1
        gpus = list(itertools.takewhile(re.compile(r"\w").match, map(str.strip, visible.split(","))))
    count = options.devices_per_worker or len(gpus) // options.workers
    if gpus and not 0 < count * options.workers <= len(gpus):
        raise ValueError(
            f"{len(gpus)} GPUs are too few for workers={options.workers} with {max(count, 1)} each: ask for fewer, or "
            "set CUDA_VISIBLE_DEVICES=-1 to run on CPUs."
        )
    return [gpus[i * count : (i + 1) * count] for i in range(options.workers)]


def _choose_cores(options: argparse.Namespace, *, has_gpus: bool) -> list[list[int]]:
    """Returns the cores that are reserved for each worker here; empty lists if it may run on any.

    Workers wake each other, and Linux then often puts both on one core: small steps of two workers took 1.5 times as
    long. With GPUs, the system knows better which cores are near.
    """
    workers, size = options.workers, options.cores_per_worker
    if size and size * workers > environment.count_cores():
        raise ValueError(
            f"cores_per_worker={size} is too much for workers={workers} on {environment.count_cores()} cores: give "
            f"{environment.count_cores() // workers} or less; 0 shares all cores."
        )
    if size == 0 or (size is None and (has_gpus or workers == 1)):
        return [[]] * workers
    return machine.split_cores(workers, size)
