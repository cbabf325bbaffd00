"""What a bug report needs: versions, devices, system, and the settings of a run that differ from the defaults.

    python -m distloop.report --environment [RUN]

Secrets, the user's name and the home directory are left out.
"""

import contextlib
import getpass
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

import distloop
from distloop.settings import config
from distloop.urls import without_credentials
from distloop.workdir.records import show_bytes
from distloop.workers import environment

_PACKAGES = ("tensorflow", "keras", "numpy", "protobuf", "ml-dtypes", "tensorboard", "ray", "grain", "nvidia-nccl-cu12")
_VARIABLES = re.compile(r"(TF|XLA|CUDA|NVIDIA|NCCL|KERAS|OMP|ONEDNN|DISTLOOP|SLURM_(NTASKS|NNODES)|LD_PRELOAD)(_|$)")
_SECRETS = re.compile(r"SECRET|TOKEN|PASSWORD|CREDENTIAL|KEY", re.IGNORECASE)


def describe(runs: Sequence[Any]) -> str:
    """Returns lines of what a bug report needs, a name and a value each; of runs, the settings that are no defaults."""
    facts = [*_versions(), *_machine(), *_devices(), *_variables(), *_code()]
    facts += [fact for run in runs for fact in _settings(run)]
    width = max(len(name) for name, _ in facts)
    return _without_names("\n".join(f"{name:<{width}}  {value}" for name, value in facts))


def _versions() -> Iterator[tuple[str, str]]:
    yield "distloop", distloop.__version__
    yield "Python", platform.python_version()
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def _machine() -> Iterator[tuple[str, str]]:
    """Yields the system, its cores and memory, and the limits of a container (cgroup 2)."""
    yield "system", platform.platform()
    yield "cores", f"{environment.count_cores()} of {os.cpu_count()}"
    yield "memory", show_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for name in ("cpu.max", "memory.max"):
        with contextlib.suppress(OSError):
            yield f"container's {name}", pathlib.Path("/sys/fs/cgroup", name).read_text(encoding="ascii").strip()


def _devices() -> Iterator[tuple[str, str]]:
    """Yields the devices that TensorFlow sees, and the versions of CUDA that it was built with and of the driver."""
    for device in tf.config.list_physical_devices():
        details = tf.config.experimental.get_device_details(device)
        yield device.name.removeprefix("/physical_device:"), details.get("device_name", device.device_type)
    built = tf.sysconfig.get_build_info()
    driver, *_ = [*query_gpus("driver_version"), "-"]
    yield "CUDA", f"{built.get('cuda_version', '-')}, cuDNN {built.get('cudnn_version', '-')}, driver {driver}"


def _variables() -> Iterator[tuple[str, str]]:
    """Yields the environment variables that change what TensorFlow or distloop do; of secrets the name alone."""
    for name in sorted(filter(_VARIABLES.match, os.environ)):
        yield name, "***" if _SECRETS.search(name) else without_credentials(os.environ[name])


def _code() -> Iterator[tuple[str, str]]:
    """Yields the commit of the directory that the command is run in, and how many files differ from it."""
    commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # there is no git, or no repository
        commit, changed = (
            subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
            for command in commands
        )
        yield "git commit", f"{commit.strip()}, files changed since: {len(changed.splitlines())}"


def _settings(run: Any) -> Iterator[tuple[str, str]]:
    """Yields the settings of a run that differ from the defaults; not the flags of its program."""
    yield "run", f"{run.status}, step {run.step}"
    defaults = {name: field.metadata["default"] for name, field in config.fields().items()}
    for name, value in run.settings.items():
        if name in defaults and value != defaults[name]:
            yield f"--{name}", str(value)


def _without_names(text: str) -> str:
    """Returns a text without the home directory and the name of its user."""
    names = {os.path.expanduser("~"): "~"}
    with contextlib.suppress(KeyError, OSError):  # there is no entry for the user, as in some containers
        names[getpass.getuser()] = "USER"
    for name, instead in names.items():
        if len(name) > 1:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text)
    return text


def query_gpus(what: str) -> list[str]:
    """Returns what NVIDIA's tool answers for each GPU, such as its `driver_version`; nothing without GPUs."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
