"""Devices and the process: virtual CPUs, GPU memory growth, threads and random seeds; set before the first tensor.

    devices.prepare_process(config)
    with tf.device(devices.HOST):
        step = tf.Variable(0)

It does not know other workers.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from distloop.errors import show_full_tracebacks
from distloop.graph_functions import enable_determinism
from distloop.log import log, shown
from distloop.settings.config import Config
from distloop.workers import environment

_SEEDED = threading.RLock()
_STRATEGIES = os.path.join("tensorflow", "python", "distribute", "")
HOST = "/CPU:0"  # holds iterators, loop counters and the numbers that are logged
# TensorFlow's graph optimizers that compute the same by other operations. Those that are left remove operations and
# dependencies, which halves the time of a small step and changes no bit.
_REWRITE_ARITHMETIC = [
    "arithmetic_optimization",
    "constant_folding",
    "layout_optimizer",
    "loop_optimization",
    "remapping",
    "shape_optimization",
]

_NVML_NUMBERS: dict[str, Callable[[Any, Any], float]] = {  # of NVML's module and a GPU
    "gpu_utilization": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "gpu_memory_gb": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e9,
    "gpu_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
    "gpu_temperature": lambda nvml, gpu: float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
    "energy_kwh": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 3.6e9,  # from millijoules
}


def prepare_process(config: Config) -> None:
    """Sets up this process: checks Keras, creates virtual CPUs, sets memory growth on GPUs, seeds random generators.

    Raises:
        ValueError: if Keras uses another backend or a `keras.distribution`, if functions run eagerly, within the scope
            of a strategy, if the device does not exist, or if TensorFlow has already started with fewer virtual CPUs or
            another number of threads.
    """
    if not isinstance(config, Config):
        raise ValueError(f"config={shown(config)} was given; give a Config, as in distloop.Config(steps=1000).")
    require_no_other_scope()
    if config.full_tracebacks:
        show_full_tracebacks()
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"Keras runs on the {keras.backend.backend()!r} backend; distloop needs 'tensorflow': "
            "set KERAS_BACKEND=tensorflow before Keras is imported."
        )
    if keras.distribution.distribution() is not None:
        raise ValueError(
            "A keras.distribution is set, which TensorFlow does not follow; distloop distributes by tf.distribute: "
            "call keras.distribution.set_distribution(None)."
        )
    if tf.config.functions_run_eagerly():
        raise ValueError(
            "tf.config.run_functions_eagerly(True) was called, under which no function is compiled; distloop compiles "
            "its loops: call it with False, and set Config(eager=True) to run your own code eagerly."
        )
    _set_threads(config)
    if choose_device_type(config) == "CPU":
        _hide_gpus(config)
        _create_virtual_cpus(config)
    else:
        _set_memory_growth()
    tf.get_logger().addFilter(_is_no_detail_of_strategies)  # adds it once
    with seeded(config.seed):
        pass
    is_on_gpus = choose_device_type(config) == "GPU"
    if config.deterministic or (config.virtual_replicas and is_on_gpus):
        enable_determinism()
    if config.virtual_replicas:
        _keep_graphs_as_written()


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas on which a step is defined: the virtual ones if there are any, else one on each device.

    Attributes:
        devices: the replicas of the strategy, of all workers; each is on a device, or on those of a pipeline.
        virtual: as `Config.virtual_replicas`; 0: none.
        ratios: as `Config.device_shares`, of each replica in a batch; empty: equal ones.
    """

    devices: int
    virtual: int = 0
    ratios: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many there are."""
        return self.virtual or self.devices

    @property
    def per_device(self) -> int:
        """How many each device computes, one after the other."""
        return self.count // self.devices

    @property
    def same_bits(self) -> bool:
        """Whether a step has the same bits on any number of devices: sums are added in one fixed tree."""
        return self.virtual > 0

    @property
    def setting(self) -> str:
        """What a user gives for them, for sentences."""
        return f"device_shares={list(self.ratios)}" if self.ratios else f"virtual_replicas={self.virtual}"

    def fit_on(self, devices: int) -> bool:
        """Returns whether so many devices can compute them, each as many as the others, and each has its share."""
        return self.virtual % devices == 0 and len(self.ratios) in (0, devices)


def require_no_other_scope(strategy: tf.distribute.Strategy | None = None) -> None:
    """Refuses to work within the scope of another strategy, as TensorFlow does not mix the variables of two."""
    if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not strategy:
        raise another_scope("distloop was called within")


def another_scope(what: str) -> ValueError:
    """Returns the error about what was done in the scope of a strategy, as in "The model was made within"."""
    return ValueError(
        f"{what} a strategy.scope(), but distloop enters the scope of its own strategy: leave `with strategy.scope():` "
        "out; Config names the devices, or Trainer(strategy=strategy) takes the object."
    )


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds Python, NumPy, Keras and TensorFlow, and enters a scope that one thread is in at a time.

    The generators belong to the process: a model that another thread makes meanwhile would take draws of this one's.
    """
    with _SEEDED:
        keras.utils.set_random_seed(seed)
        yield


def split_first_gpu(count: int, megabytes: int) -> None:
    """Makes so many logical GPUs of this memory out of the first GPU, before TensorFlow starts.

    A strategy takes each of them for a GPU, and TensorFlow adds over them without NCCL, which takes a GPU only once.

    Raises:
        ValueError: if there is no GPU.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise ValueError(f"{count} logical GPUs were asked for, but TensorFlow sees no GPU here to split.")
    tf.config.set_visible_devices(gpus[:1], "GPU")
    logical = [tf.config.LogicalDeviceConfiguration(memory_limit=megabytes)] * count
    tf.config.set_logical_device_configuration(gpus[0], logical)


def choose_device_type(config: Config) -> str:
    """Returns "GPU" or "CPU", the kind of device that replicas run on.

    Raises:
        ValueError: if `Config.device` names a kind that TensorFlow does not see.
    """
    if config.device != "auto":
        if not tf.config.list_physical_devices(config.device.upper()):
            raise ValueError(
                f"device={config.device} was asked for, but TensorFlow sees none here: use device=auto or cpu."
            )
        return config.device.upper()
    return "GPU" if tf.config.list_physical_devices("GPU") else "CPU"


def gpu_use() -> list[dict[str, float]]:
    """Returns what NVIDIA's driver says of each GPU of this process.

    Returns:
        For each GPU, by name, what its driver reports: `gpu_utilization`, the fraction of the last second or less in
        which it computed; `gpu_memory_gb`, the memory in use on it, of all processes, in GB (10^9 bytes); `gpu_watts`;
        `gpu_temperature`, in degrees Celsius; `energy_kwh`, since the driver was loaded. Empty without GPUs, or
        without the package `nvidia-ml-py`.
    """
    nvml, gpus = _nvml_gpus()
    uses: list[dict[str, float]] = [{} for _ in gpus]
    for gpu, use in zip(gpus, uses, strict=True):
        for name, ask in _NVML_NUMBERS.items():
            try:
                use[name] = ask(nvml, gpu)
            except nvml.NVMLError as error:
                log.debug("NVIDIA's driver does not report %s: %s", name, error)
    return uses


@functools.cache
def _nvml_gpus() -> tuple[Any, list[Any]]:
    """Returns NVML's module, and its handles of the GPUs that TensorFlow sees, in its order."""
    count = len(tf.config.get_visible_devices("GPU"))
    if not count:
        return None, []
    try:
        import pynvml

        pynvml.nvmlInit()
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        names = [name.strip() for name in chosen.split(",")][:count]
        by_number, by_name = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        return pynvml, [by_number(int(name)) if name.isdecimal() else by_name(name) for name in names]
    except ImportError:
        log.info("The use of the GPUs is not reported: install nvidia-ml-py.")
    except pynvml.NVMLError as error:
        log.info("The use of the GPUs is not reported, as NVIDIA's driver does not report it: %s.", error)
    return None, []


def short_device(device: str) -> str:
    """Returns a device's name without its job, as in `CPU:1`."""
    return ":".join(device.split(":")[-2:]).rpartition("/")[2].upper()


def _is_no_detail_of_strategies(record: logging.LogRecord) -> bool:
    """Returns False for what TensorFlow logs of its strategies at level INFO: how it reduces, at every trace."""
    return record.levelno > logging.INFO or _STRATEGIES not in record.pathname


def _set_threads(config: Config) -> None:
    given = "intra_op_threads" if config.intra_op_threads else "virtual_replicas"
    count = config.intra_op_threads or (1 if config.virtual_replicas else 0)  # the bits of a gradient depend on it
    if not count:
        return
    try:
        tf.config.threading.set_intra_op_parallelism_threads(count)
    except RuntimeError:
        raise ValueError(
            f"{given}={getattr(config, given)} was given, but TensorFlow has already started with another number of "
            f"threads within an operation than {count}: call distloop.prepare(config) before the first tensor, dataset "
            "or model."
        ) from None


def _keep_graphs_as_written() -> None:
    """Turns off what changes a graph by its surroundings, and with it the bits: fusions, and compilation by XLA.

    It stays off, as functions that are traced later in this process would have other bits.
    """
    if tf.config.optimizer.get_jit():
        raise ValueError(
            "virtual_replicas was given, and tf.config.optimizer.set_jit lets XLA compile parts of a graph, which "
            "promises no bits: leave either out."
        )
    tf.config.optimizer.set_experimental_options(dict.fromkeys(_REWRITE_ARITHMETIC, False))


def _create_virtual_cpus(config: Config) -> None:
    name = "num_stages" if config.num_stages > config.num_devices else "num_devices"  # each stage takes one
    count: int = getattr(config, name)
    cpu = tf.config.list_physical_devices("CPU")[0]
    if count <= len(tf.config.get_logical_device_configuration(cpu) or [None]):
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError:
        raise ValueError(
            f"{name}={count} virtual CPUs were asked for, but TensorFlow has already started with fewer: call "
            "distloop.prepare(config) before the first tensor, dataset or model, such as one for from_keras(model), "
            "which also takes the function that makes it, from_keras(make_model); in a notebook, restart the kernel "
            "first."
        ) from None
    # Virtual CPUs compute at the same time, so each gets its part of the cores: steps of conv and lm on 2 took 0.75 of
    # the time.
    is_chosen = config.intra_op_threads or tf.config.threading.get_intra_op_parallelism_threads()
    if not is_chosen and "TF_NUM_INTRAOP_THREADS" not in os.environ:
        tf.config.threading.set_intra_op_parallelism_threads(max(1, environment.count_cores() // count))


def _hide_gpus(config: Config) -> None:
    if tf.config.list_physical_devices("GPU"):
        try:
            tf.config.set_visible_devices([], "GPU")  # TensorFlow would place operations on visible GPUs
        except RuntimeError:
            log.warning("device=%s, but TensorFlow has already started with GPUs and may use them.", config.device)


def _set_memory_growth() -> None:
    for gpu in tf.config.list_physical_devices("GPU"):
        if tf.config.get_logical_device_configuration(gpu):  # each part of the GPU has its own limit, and no growth
            continue
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError:
            if not tf.config.experimental.get_memory_growth(gpu):
                log.warning("%s has already started and holds all its memory: call distloop.prepare first.", gpu.name)
