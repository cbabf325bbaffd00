"""Owns how much memory a process has taken: the highest level so far, of the host and of its devices."""

import resource
import sys

import tensorflow as tf

_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss


def peaks() -> dict[str, float]:
    """Tells the highest level since the process began, in GB (10^9 bytes).

    Returns:
        `host_memory_gb`, what this process has held of the host's memory; with GPUs or TPUs also `device_memory_gb`,
        what TensorFlow has held of that one of this process which held most.
    """
    found = {"host_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES / 1e9}
    accelerators = [device.name for device in tf.config.list_logical_devices() if device.device_type != "CPU"]
    if accelerators:  # what CPUs hold is the host's
        peak_bytes = [tf.config.experimental.get_memory_info(_short(name))["peak"] for name in accelerators]
        found["device_memory_gb"] = max(peak_bytes) / 1e9
    return found


def _short(device: str) -> str:
    """`/device:GPU:0` as `GPU:0`, which is what TensorFlow asks for here."""
    return device.rpartition("device:")[2]
