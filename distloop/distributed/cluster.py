"""Owns *where*: devices, memory growth, virtual CPUs, seeds of the process, the strategy, and the other workers.

The only module that names a strategy class. It does not know what runs on the devices.

    cluster.prepare(config)                     # before the first tensor
    strategy = cluster.make_strategy(config)
    values = cluster.gather(strategy, 1.0)      # of every worker, on every worker
"""

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import json
import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python import pywrap_tfe
from tensorflow.python.distribute import collective_all_reduce_strategy
from tensorflow.python.eager import context
from tensorflow.python.framework import errors_impl

from distloop.config import Config, facts
from distloop.distributed import cores
from distloop.distributed.heartbeat import GATHERING, JOINING, Peers

SERIAL_EXECUTOR, PARALLEL_EXECUTOR = "SINGLE_THREADED_EXECUTOR", ""  # what runs a graph, as TensorFlow calls it
_SMALL_STEP_FLOPS = 2e7  # below, to hand an operation to another thread takes longer than to run it
HOST = "/CPU:0"  # where iterators, loop counters and the numbers for people live
_PEERS = "_distloop_peers"  # the attribute of a strategy that holds its Peers


@dataclasses.dataclass(frozen=True)
class Workers:
    """The processes that take part in a run."""

    addresses: tuple[str, ...]  # host:port, the chief's first
    index: int  # which of them this one is


def prepare(config: Config) -> None:
    """Makes virtual CPUs, sets memory growth on GPUs, seeds Python, NumPy, Keras and TensorFlow, and meets the workers.

    The Trainer calls it; a script that makes tensors, datasets or models before its Trainer calls it first. Calling it
    again does no harm beyond seeding again.

    Args:
        config: `strategy`, `device`, `num_devices`, `seed`, `deterministic`, `start_timeout` and `hang_timeout` are
            read.

    Raises:
        ValueError: if Keras runs on another backend or under a `keras.distribution`, if there is no such device, if
            virtual CPUs or other workers are needed and TensorFlow has already started, or if a worker does not come.
    """
    prepare_process(config)
    if _strategy_name(config) == "multi_worker":
        make_strategy(config)  # TensorFlow takes workers only before it starts


def prepare_process(config: Config) -> None:
    """Does the part of `prepare` that is about this process alone."""
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
    _set_threads(config)
    if _device_type(config) == "CPU":
        _hide_gpus(config)
        _make_virtual_cpus(config)
    else:
        _set_memory_growth()
    tf.get_logger().setLevel("WARNING")  # else it tells how it reduces at every trace
    keras.utils.set_random_seed(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """Puts the random streams of Python, NumPy and TensorFlow back where they were, at the end."""
    eager = context.context()
    python, of_numpy, seed, stream = random.getstate(), np.random.get_state(), eager._seed, eager._rng
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)
        eager._seed, eager._rng = seed, stream


def make_strategy(config: Config) -> tf.distribute.Strategy:
    """Makes the strategy that `config` names, over the devices that it names.

    Strategies over several devices are kept for the life of the process: two `MirroredStrategy` objects over the same
    devices would start the same collective keys again and clash.

    Args:
        config: as for `prepare`.

    Returns:
        TensorFlow's default strategy, a `MirroredStrategy` or a `MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: if more devices are asked for than there are, or as for `prepare`.
    """
    name = _strategy_name(config)
    if name == "multi_worker":
        return _make_multi_worker(_find_workers(), config)
    device_type = _device_type(config)
    devices = tf.config.list_logical_devices(device_type)
    num_devices = config.num_devices or len(devices)
    if config.num_stages > 1:  # the devices belong to the stages
        return tf.distribute.get_strategy()
    if num_devices > len(devices) or not devices:
        raise ValueError(
            f"num_devices={config.num_devices} of device={device_type.lower()} were asked for, but there are "
            f"{len(devices)}: ask for at most that many, or for virtual CPUs with device=cpu."
        )
    if name == "none" or (name == "auto" and num_devices == 1):
        return tf.distribute.get_strategy()
    return _make_mirrored(tuple(f"{device_type}:{i}" for i in range(num_devices)))


def check_strategy(strategy: tf.distribute.Strategy) -> tf.distribute.Strategy:
    """Checks a strategy object that the user made.

    Raises:
        ValueError: if it is no synchronous `tf.distribute.Strategy`.
    """
    if not isinstance(strategy, tf.distribute.Strategy):
        raise ValueError(
            f"strategy={strategy!r} is not a tf.distribute.Strategy object; name one in Config(strategy=...) "
            "or pass an object such as tf.distribute.MirroredStrategy()."
        )
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise ValueError(
            "ParameterServerStrategy updates without agreement between workers, so no law of distloop holds under it: "
            "use a synchronous strategy such as MirroredStrategy."
        )
    return strategy


def num_workers(strategy: tf.distribute.Strategy) -> int:
    """Counts the processes that take part."""
    return int(getattr(strategy.extended, "_num_workers", 1))


def worker_index(strategy: tf.distribute.Strategy) -> int:
    """Says which worker this process is, from 0; worker 0 is the chief."""
    return int(getattr(strategy.extended, "_id_in_cluster", 0)) if num_workers(strategy) > 1 else 0


def num_local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Counts the replicas of this worker."""
    return strategy.num_replicas_in_sync // num_workers(strategy)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Says whether this process owns the files of the run."""
    return worker_index(strategy) == 0


def peers(strategy: tf.distribute.Strategy) -> Peers | None:
    """Gives the other workers' reports; None where there are none, or the user made the strategy."""
    found: Peers | None = getattr(strategy, _PEERS, None)
    return found


def report(strategy: tf.distribute.Strategy, phase: str) -> None:
    """Tells the other workers what this one is doing."""
    if (others := peers(strategy)) is not None:
        others.phase = phase


def gather(strategy: tf.distribute.Strategy, value: float) -> np.ndarray:
    """Collects a number of every worker, on every worker: `[W]`, float64. All must call it."""
    if num_workers(strategy) == 1:
        return np.array([value], np.float64)
    others = peers(strategy)
    phase = others.phase if others is not None else ""
    report(strategy, GATHERING)
    found: np.ndarray = _gatherer(strategy)(tf.constant(value, tf.float64)).numpy()
    report(strategy, phase)
    return found


@functools.cache
def _gatherer(strategy: tf.distribute.Strategy) -> Any:
    place = np.eye(num_workers(strategy))[worker_index(strategy)]
    return tf.function(lambda value: sum_over_workers(strategy, place * value), autograph=False)


def sum_over_workers(strategy: tf.distribute.Strategy, value: tf.Tensor) -> tf.Tensor:
    """Adds up a tensor of every worker; in a `tf.function`, outside `strategy.run`. All must come to it."""
    local = num_local_replicas(strategy)

    def of_replica(value: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        is_first = tf.equal(context.replica_id_in_sync_group % local, 0)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.where(is_first, value, tf.zeros_like(value)))

    return strategy.experimental_local_results(strategy.run(of_replica, args=(value,)))[0]


def describe(strategy: tf.distribute.Strategy) -> str:
    """Says how many replicas of what, as in `2 replicas (CPU:0, CPU:1)`."""
    count = strategy.num_replicas_in_sync
    names = _device_names(strategy)
    of_workers = f" on each of {num_workers(strategy)} workers" if num_workers(strategy) > 1 else ""
    return f"{count} {'replica' if count == 1 else 'replicas'} ({', '.join(names)}{of_workers})"


def has_gpus(strategy: tf.distribute.Strategy) -> bool:
    """Says whether replicas of this worker run on GPUs."""
    return any(name.startswith("GPU") for name in _device_names(strategy))


def uses_collectives(strategy: tf.distribute.Strategy) -> bool:
    """Says whether replicas talk through TensorFlow's collectives, which those of this module on CPUs do not."""
    reduces = getattr(strategy.extended, "_cross_device_ops", None)
    return strategy.num_replicas_in_sync > 1 and not isinstance(reduces, tf.distribute.ReductionToOneDevice)


def describe_reduction(strategy: tf.distribute.Strategy) -> str:
    """Says what adds up over the replicas, as in `CollectiveAllReduce (NCCL)`."""
    found = strategy.extended._cross_device_ops
    implementation = getattr(getattr(found, "_options", None), "implementation", None)
    return type(found).__name__ + (f" ({implementation.value})" if implementation is not None else "")


def short_device(device: str) -> str:
    """Spells a device without its job, as in `CPU:1`."""
    return ":".join(device.split(":")[-2:]).rpartition("/")[2].upper()


def _device_names(strategy: tf.distribute.Strategy) -> list[str]:
    """Names the devices of this worker, as in `CPU:0`."""
    if tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy():
        return [short_device(device) for device in strategy.extended.worker_devices]
    return ["GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"]  # the default strategy does not know it


def find_executor(strategy: tf.distribute.Strategy, setting: str, step_flops: float | None) -> str:
    """Chooses what runs the graph of a step.

    Args:
        strategy: who takes part.
        setting: `Config.executor`.
        step_flops: the floating-point operations of a step; None: not known.

    Returns:
        A name for `tf.experimental.function_executor_type`.

    Raises:
        ValueError: if the operations of several replicas are to run one after another.
    """
    replicas = strategy.num_replicas_in_sync
    if setting == "serial" and replicas > 1:
        raise ValueError(
            f"executor=serial was given with {replicas} replicas, which would wait for each other: use executor=auto."
        )
    is_one_cpu = replicas == 1 and _device_names(strategy)[0].startswith("CPU")
    is_small = is_one_cpu and step_flops is not None and step_flops < _SMALL_STEP_FLOPS
    return SERIAL_EXECUTOR if setting == "serial" or (setting == "auto" and is_small) else PARALLEL_EXECUTOR


@functools.cache
def _make_mirrored(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    # One addition of packed vectors is cheaper than collectives between virtual CPUs (2.5 times on small models), and
    # it holds no keys that another strategy could clash with. GPUs keep TensorFlow's default, NCCL (untested here).
    on_cpu = devices[0].startswith("CPU")
    return tf.distribute.MirroredStrategy(
        list(devices), cross_device_ops=tf.distribute.ReductionToOneDevice() if on_cpu else None
    )


def _strategy_name(config: Config) -> str:
    if config.strategy == "auto" and _find_workers() is not None:
        return "multi_worker"
    return config.strategy


def _find_workers() -> Workers | None:
    """Reads from the environment who takes part: TF_CONFIG, or the variables of a Slurm step with several tasks.

    Raises:
        ValueError: if they tell of no cluster that this process can join.
    """
    if text := os.environ.get("TF_CONFIG"):
        try:
            return _read_tf_config(json.loads(text))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"TF_CONFIG={text[:200]!r} was given, which is no cluster that distloop can join ({error}): it looks "
                'like {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}; '
                "distloop.launch makes it."
            ) from None
    return _read_slurm_step() if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 else None


def _read_tf_config(found: Any) -> Workers | None:
    """Finds the workers in a TF_CONFIG; raises many kinds of errors."""
    if not isinstance(found, dict) or "sparseCluster" in found:  # the latter by a TFJob with enableDynamicWorker
        raise ValueError("it has to name every worker")
    cluster, task = found.get("cluster") or {}, found.get("task") or {}
    kind, index = task.get("type", "worker"), task.get("index")
    if others := sorted({*cluster, kind} - {"chief", "worker", "evaluator"}):
        raise ValueError(f"distloop knows the jobs chief and worker, not {' and '.join(others)}")
    if kind == "evaluator":
        raise ValueError("the workers evaluate: leave the evaluator out")
    chiefs, workers = cluster.get("chief", []), cluster.get("worker", [])
    for address in [*chiefs, *workers]:
        if not re.fullmatch(r".+:\d+", str(address)):
            raise ValueError(f"{address!r} is no host:port")
    if len(chiefs) + len(workers) < 2:
        return None
    if index is None or not 0 <= int(index) < len(cluster.get(kind, [])):
        raise ValueError(f"there is no {kind} {index}")
    return Workers((*chiefs, *workers), int(index) + (len(chiefs) if kind == "worker" else 0))


def _read_slurm_step() -> Workers:
    """Reads what srun tells each task; TensorFlow's own resolver puts n10 before n9, and needs GPUs."""
    hosts = _expand_hosts(os.environ.get("SLURM_STEP_NODELIST", ""))
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # 2(x3),1
    counts = [int(count) for count, times in runs for _ in range(int(times or 1))]
    places = [(node, i) for node, count in enumerate(counts) for i in range(count)]  # by task
    if os.environ.get("SLURM_DISTRIBUTION", "").startswith("cyclic"):
        places.sort(key=lambda place: place[::-1])
    names = ("STEP_NUM_TASKS", "PROCID", "NODEID", "LOCALID")
    count, index, node, local = (int(os.environ.get(f"SLURM_{name}", "-1")) for name in names)
    is_known = len(hosts) == len(counts) and 0 <= index < len(places) == count and places[index] == (node, local)
    if not is_known or os.environ.get("SLURMD_NODENAME", hosts[node]) != hosts[node]:
        told = {name: os.environ.get(f"SLURM_{name}") for name in (*names, "STEP_NODELIST", "STEP_TASKS_PER_NODE")}
        raise ValueError(
            f"{', '.join(f'SLURM_{name}={value}' for name, value in told.items())} do not tell which task runs where: "
            "start all tasks by one srun --distribution=block, or set TF_CONFIG."
        )
    # Sixteen ports for each step, below those that the system hands out: two runs on one node do not meet.
    step = 31 * int(os.environ.get("SLURM_JOB_ID", "0")) + int(os.environ.get("SLURM_STEP_ID", "0"))
    port = 10_000 + step % 1_400 * 16
    return Workers(tuple(f"{hosts[node]}:{port + i}" for node, i in places), index)


def _expand_hosts(text: str) -> list[str]:
    """Lists the hosts of a Slurm node list: `n[08-10,12]-ib,m1` has five."""
    hosts: list[str] = []
    for part in re.findall(r"(?:\[[^]]*\]|[^,[])+", text):
        pieces = re.findall(r"\[[^]]*\]|[^[]+", part)
        hosts += map("".join, itertools.product(*(_expand_numbers(p) if p[0] == "[" else [p] for p in pieces)))
    return hosts


def _expand_numbers(text: str) -> list[str]:
    ends = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [str(n).zfill(len(first)) for first, last in ends for n in range(int(first), int(last or first) + 1)]


def _check_gpus_of_tasks() -> None:
    """Checks that the tasks of a Slurm step do not share GPUs, which NCCL cannot; no GPU was at hand to try it."""
    count, tasks = len(tf.config.list_physical_devices("GPU")), len(os.environ.get("SLURM_GTIDS", "").split(","))
    there = int(os.environ.get("SLURM_GPUS_ON_NODE", count * tasks))
    if count * tasks > there and "TF_CONFIG" not in os.environ:
        raise ValueError(
            f"{tasks} tasks on this node see {count} GPUs each, but there are {there}: start one task a node, which "
            "takes all of them, or give each task its own by srun --gpus-per-task=1."
        )


_multi_worker: dict[Workers, tf.distribute.Strategy] = {}  # a process can be part of one cluster


def _make_multi_worker(workers: Workers | None, config: Config) -> tf.distribute.Strategy:
    """Meets the other workers, joins them, and checks that numbers come through."""
    if workers is None:
        raise ValueError(
            "strategy=multi_worker was given, but the environment tells of no other workers: start the program with "
            "python -m distloop.launch --workers=2 -m ..., by srun with several tasks, or set TF_CONFIG."
        )
    if workers in _multi_worker:
        return _multi_worker[workers]
    if _device_type(config) == "GPU":
        _check_gpus_of_tasks()
    elif config.communication == "nccl":
        raise ValueError("communication=nccl was given, which is for GPUs, but the workers run on CPUs: use auto.")
    of_process = {"TensorFlow": tf.__version__, "Keras": keras.__version__, "workers": ", ".join(workers.addresses)}
    others = Peers(workers.addresses, workers.index, of_process | facts(config))
    try:
        others.meet(config.start_timeout)
        others.watch(config.hang_timeout, config.start_timeout)
        strategy = _join(workers, config, others)
    except ValueError as error:
        others.fail(str(error))
        raise
    _multi_worker[workers] = strategy
    return strategy


def _join(workers: Workers, config: Config, others: Peers) -> tf.distribute.Strategy:
    device_type = _device_type(config)
    # No timeout_seconds: TensorFlow starts a thread for each collective that sleeps for so long, 14,000 of them after
    # 25 seconds of a small model. The peers watch instead.
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=config.bytes_per_pack,
        implementation=tf.distribute.experimental.CommunicationImplementation(config.communication.upper()),
    )
    cluster = tf.train.ClusterSpec({"worker": workers.addresses})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="worker", task_id=workers.index, rpc_layer="grpc"
    )
    count = config.num_devices or (len(tf.config.list_physical_devices("GPU")) if device_type == "GPU" else 1)
    if config.num_stages > 1:  # a replica is all stages
        count = 1
    others.phase = JOINING
    try:
        with _local_devices(device_type, count), _threads_running():
            strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
    except RuntimeError as error:
        raise ValueError(
            f"Worker {workers.index} cannot join the others, because TensorFlow has already started ({error}): call "
            "distloop.prepare(config) before the first tensor, dataset or model."
        ) from None
    setattr(strategy, _PEERS, others)
    found = gather(strategy, workers.index + 1)
    if found.tolist() != list(range(1, len(workers.addresses) + 1)):
        raise ValueError(
            f"The workers' numbers came back as {found.tolist()}; the network or the collective library gives wrong "
            "sums: try other CommunicationOptions, or fewer devices."
        )
    others.phase = "starting"
    if threading.current_thread() is threading.main_thread():  # TensorFlow has begun to catch SIGTERM, and ignores it
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
    return strategy


@contextlib.contextmanager
def _threads_running() -> Iterator[None]:
    """Lets Python's threads run while TensorFlow joins the other workers, for an hour if one of them has died.

    Its own binding keeps Python's lock meanwhile, so that nothing could be heard or said, nor the process be ended.
    """
    original = pywrap_tfe.TFE_EnableCollectiveOps
    try:
        library = ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), "libtensorflow_cc.so.2"))  # loaded already
    except OSError:  # another build: as TensorFlow does it
        yield
        return
    library.TF_NewStatus.restype, library.TF_Message.restype = ctypes.c_void_p, ctypes.c_char_p
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

    def join(context: Any, server: bytes) -> None:
        status = ctypes.c_void_p(library.TF_NewStatus())
        size = ctypes.c_size_t(len(server))
        library.TFE_EnableCollectiveOps(ctypes.c_void_p(pointer_of(context, None)), server, size, status)
        if code := library.TF_GetCode(status):
            message = library.TF_Message(status).decode(errors="replace")
            raise errors_impl.exception_type_from_error_code(code)(None, None, message)
        library.TF_DeleteStatus(status)

    pywrap_tfe.TFE_EnableCollectiveOps = join
    try:
        yield
    finally:
        pywrap_tfe.TFE_EnableCollectiveOps = original


@contextlib.contextmanager
def _local_devices(device_type: str, count: int) -> Iterator[None]:
    """Gives the strategy that is made meanwhile so many devices: TensorFlow gives a worker one CPU, or every GPU."""
    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    original = extended._initialize_local_devices

    def chosen(self: Any, resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        return tuple(f"{worker_device}/device:{device_type}:{i}" for i in range(count)), device_type

    extended._initialize_local_devices = chosen
    try:
        yield
    finally:
        extended._initialize_local_devices = original


def _device_type(config: Config) -> str:
    if config.device != "auto":
        if not tf.config.list_physical_devices(config.device.upper()):
            raise ValueError(
                f"device={config.device} was asked for, but TensorFlow sees none here: use device=auto or cpu."
            )
        return config.device.upper()
    return "GPU" if tf.config.list_physical_devices("GPU") else "CPU"


def _set_threads(config: Config) -> None:
    try:
        if config.inter_op_threads:
            tf.config.threading.set_inter_op_parallelism_threads(config.inter_op_threads)
        if config.intra_op_threads:
            tf.config.threading.set_intra_op_parallelism_threads(config.intra_op_threads)
    except RuntimeError:
        raise ValueError(
            f"inter_op_threads={config.inter_op_threads} and intra_op_threads={config.intra_op_threads} were given, "
            "but TensorFlow has already started with other numbers: call distloop.prepare(config) before the first "
            "tensor, dataset or model."
        ) from None


def _make_virtual_cpus(config: Config) -> None:
    name = "num_stages" if config.num_stages > 1 else "num_devices"  # each stage takes one
    count: int = getattr(config, name)
    cpu = tf.config.list_physical_devices("CPU")[0]
    if count <= len(tf.config.get_logical_device_configuration(cpu) or [None]):
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError:
        raise ValueError(
            f"{name}={count} virtual CPUs were asked for, but TensorFlow has already started with fewer: call "
            "distloop.prepare(config) before the first tensor, dataset or model."
        ) from None
    # They share the cores, as they run at the same time: steps of conv and lm on 2 took 0.75 of the time.
    is_chosen = config.intra_op_threads or tf.config.threading.get_intra_op_parallelism_threads()
    if not is_chosen and "TF_NUM_INTRAOP_THREADS" not in os.environ:
        tf.config.threading.set_intra_op_parallelism_threads(max(1, cores.count() // count))


def _hide_gpus(config: Config) -> None:
    if tf.config.list_physical_devices("GPU"):
        try:
            tf.config.set_visible_devices([], "GPU")  # untested here: else TensorFlow would place operations there
        except RuntimeError:
            logging.warning("device=%s, but TensorFlow has already started with GPUs and may use them.", config.device)


def _set_memory_growth() -> None:
    for gpu in tf.config.list_physical_devices("GPU"):  # untested here: no GPU
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError:
            if not tf.config.experimental.get_memory_growth(gpu):
                logging.warning(
                    "%s has already started and holds all its memory: call distloop.prepare first.", gpu.name
                )
