"""Memory: the bytes that variables hold and the process took, and the error of a device that has no more.

    held_by_device(state)      # {"CPU:0": {"weights": 41_000_000, "optimizer slots": 82_000_000}, ...}
    peaks()                    # {"host_memory_gb": 1.2}
    except tf.errors.ResourceExhaustedError as error:
        raise explain_step(error, state, 12, microbatches=1) from error

What a step needs besides variables is estimated by the part `audit`.
"""

import re
import resource
import sys
from typing import Any

import keras
import tensorflow as tf

from distloop.distributed import devices
from distloop.model.state import TrainState
from distloop.settings.precision import BFLOAT16, HALF_DTYPES
from distloop.variables import layers_by_path, tensorflow_variable
from distloop.workdir import ledger

_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss
_TENSOR = re.compile(r"allocating tensor with shape\s*\[([\d,]*)\] and type (\w+)")
_DEVICE = re.compile(r"device:((?:GPU|TPU|CPU):\d+)")


def held_by_device(state: Any) -> dict[str, dict[str, int]]:
    """Returns the bytes of this worker's variables by device and by kind; kinds without bytes are left out.

    Args:
        state: a `TrainState`; its variables are counted where they are placed, whatever the settings say.
    """
    tables = {id(tensorflow_variable(v)) for v in embedding_tables(state.model).values()}
    held: dict[str, dict[str, int]] = {}

    def count(name: str, variables: Any) -> None:
        for component in (component for v in variables for component in state.replica_variables(v)):
            of_device = held.setdefault(devices.short_device(component.device), {})
            of_device[name] = of_device.get(name, 0) + variable_bytes(component)

    count("weights", [v for v in state.model_variables() if id(v) not in tables])
    count("weights", state.weight_copies())
    count(ledger.TABLES, [v for v in state.model_variables() if id(v) in tables])
    count("optimizer slots", state.slots)
    count("averages of weights", state.average.stored if state.average is not None else [])
    return dict(sorted(held.items()))


def embedding_tables(model: Any) -> dict[str, Any]:
    """Returns the tables of a model's embedding layers, by the paths of the layers.

    Args:
        model: as for `named_variables`.
    """
    layers = [(path, v) for path, v in layers_by_path(model).items() if isinstance(v, keras.layers.Embedding)]
    return {path: layer._embeddings for path, layer in layers if layer.built}  # one may be unused


def known_bytes(tensor: Any) -> int | None:
    """Returns the bytes of a tensor's numbers, or of a variable's; None: its shape is unknown while tracing."""
    count = tensor.shape.num_elements()
    return None if count is None else int(count) * int(tf.as_dtype(tensor.dtype).size)


def variable_bytes(variable: Any) -> int:
    """Returns the bytes of a variable's numbers, or of a tensor's; 0 if its shape is unknown."""
    return known_bytes(variable) or 0


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


def _host_peak_bytes() -> int:
    """Returns the peak memory of this program; `getrusage` may return that of the parent process, if it was higher."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):  # not on Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES


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


def explain_step(
    error: tf.errors.OpError, state: TrainState, step: int, microbatches: int
) -> tf.errors.ResourceExhaustedError:
    """Returns the error of a train step with one sentence: what was in memory, and the settings to try.

    `step` is the number of the step that failed, or of the one that its loop began with.
    """
    advice = f"microbatches={2 * microbatches} or more (it is {microbatches})"
    advice += f", {_half_precision(state)}a smaller batch, or optimizers with fewer slots"
    return _explain(error, state, f"in step {step} or soon after", "activations and gradients", advice)


def explain_pass(
    error: tf.errors.OpError, state: TrainState, doing: str, batch_size: int | None = None
) -> tf.errors.ResourceExhaustedError:
    """Returns the error of a pass that changes no weight with one sentence: what was in memory, and what to try.

    `doing` says what was done, as in "evaluating". The batch size of the data may be unknown.
    """
    advice = f"smaller batches, which change no result, or {_half_precision(state)}more devices"
    batches = f" batches of {batch_size} rows" if batch_size else ""
    return _explain(error, state, f"while {doing}{batches}", "activations and outputs", advice)


def _explain(
    error: tf.errors.OpError, state: TrainState, when: str, rest: str, advice: str
) -> tf.errors.ResourceExhaustedError:
    message = error.message or ""
    device = match[1] if (match := _DEVICE.search(message)) else "the device"
    tensor = f", for a tensor of shape [{match[1]}] and type {match[2]}" if (match := _TENSOR.search(message)) else ""
    most = max(held_by_device(state).values(), key=lambda sizes: sum(sizes.values()), default={})
    held = ", ".join(f"{name} take {size / 1e9:.2g} GB" for name, size in most.items())
    sentence = (
        f"{device} ran out of memory {when}{describe_use(device)}{tensor}; {held}, {rest} the rest: try {advice}."
    )
    return tf.errors.ResourceExhaustedError(None, None, sentence)


def _half_precision(state: TrainState) -> str:
    """Returns the advice to compute in half precision; empty if a layer does."""
    layers = (layer for layers in state.layers_of_update.values() for layer in layers)
    return "" if any(layer.compute_dtype in HALF_DTYPES for layer in layers) else f"precision={BFLOAT16.name}, "
