"""Owns how much memory there is: the highest level so far, of the host and of its devices, and what is left."""

import os
import resource
import sys

import tensorflow as tf

from distloop.distributed import devices

_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss


def peaks() -> dict[str, float]:
    """Tells the highest level since the process began, in GB (10^9 bytes).

    Returns:
        `host_memory_gb`, what this process has held of the host's memory; with GPUs or TPUs also `device_memory_gb`,
        what TensorFlow has held of that one of this process which held most.
    """
    found = {"host_memory_gb": _host_peak_bytes() / 1e9}
    accelerators = [device.name for device in tf.config.list_logical_devices() if device.device_type != "CPU"]
    if accelerators:  # what CPUs hold is the host's
        found["device_memory_gb"] = max(device_peak_gb(devices.short_device(name)) for name in accelerators)
    return found


def device_peak_gb(device: str) -> float:
    """Tells the highest level of a GPU or TPU since the process began, in GB (10^9 bytes); `device` as in `GPU:0`."""
    return float(tf.config.experimental.get_memory_info(device)["peak"]) / 1e9


def available_gb() -> float:
    """Tells how much of the host's memory a process may still take without swapping, in GB (10^9 bytes).

    On Linux that is what the kernel says, or less where a container's limit (cgroup 2) is nearer; elsewhere half of
    all.
    """
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in file)}
        available = found["MemAvailable"]
    except (OSError, KeyError):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        limit, used = (_read_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
        available = min(available, limit - used)
    except (OSError, ValueError):  # no such limit
        pass
    return max(0, available) / 1e9


def _host_peak_bytes() -> int:
    """Finds the highest level of this program; `getrusage` counts that of the process which started it, too."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):  # not on Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES


def _read_number(path: str) -> int:
    with open(path, encoding="ascii") as file:
        return int(file.read())
