"""Memory: the peak use of the host and of its devices, and the memory that is available."""

import os
import resource
import subprocess
import sys

import tensorflow as tf

from distloop.distributed import devices

_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss


def peaks() -> dict[str, float]:
    """Returns the peak memory since the process began, in GB (10^9 bytes).

    Returns:
        `host_memory_gb`, the memory of this process on the host. With GPUs or TPUs also `device_memory_gb`, the memory
        that TensorFlow allocated on the device of this process where it allocated most.
    """
    peak = {"host_memory_gb": _host_peak_bytes() / 1e9}
    accelerators = [device.name for device in tf.config.list_logical_devices() if device.device_type != "CPU"]
    if accelerators:  # CPUs use the host's memory
        peak["device_memory_gb"] = max(device_peak_gb(devices.short_device(name)) for name in accelerators)
    return peak


def device_peak_gb(device: str) -> float:
    """Returns the peak memory of a GPU or TPU, such as `GPU:0`, since the process began, in GB (10^9 bytes)."""
    return float(tf.config.experimental.get_memory_info(device)["peak"]) / 1e9


def describe_use(device: str) -> str:
    """Returns the memory in use on a GPU or TPU for a sentence: ` (70.1 GB in use, 78.9 at most)`; empty for others."""
    if "CPU:" in device:  # they keep no account, or one of zeros
        return ""
    try:
        info = tf.config.experimental.get_memory_info(device)
    except (ValueError, tf.errors.OpError):
        return ""
    return f" ({info['current'] / 1e9:.1f} GB in use, {info['peak'] / 1e9:.1f} at most)"


def gpu_memory_gb() -> float | None:
    """Returns the memory of the smallest GPU of this machine, in GB (10^9 bytes), by NVIDIA's tool; None: unknown."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return min(int(line) for line in output.splitlines()) * 2**20 / 1e9  # it counts in MiB
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def available_gb() -> float:
    """Returns the host memory that a process can still allocate without swapping, in GB (10^9 bytes).

    On Linux this is the kernel's estimate, or the rest of a container's limit (cgroup 2) if that is smaller; on other
    systems half of the physical memory.
    """
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in file)}
        available = sizes["MemAvailable"]
    except (OSError, KeyError):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        limit, used = (_read_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
        available = min(available, limit - used)
    except (OSError, ValueError):  # no limit
        pass
    return max(0, available) / 1e9


def _host_peak_bytes() -> int:
    """Returns the peak memory of this program; `getrusage` may return that of the parent process, if it was higher."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):  # not on Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES


def _read_number(path: str) -> int:
    with open(path, encoding="ascii") as file:
        return int(file.read())
