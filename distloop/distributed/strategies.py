"""Strategies: makes the `tf.distribute` strategy of a Config, and chooses the executor of its graphs.

With the sharding of slots, the only module that names a strategy class. It does not know what runs on the devices.

    strategies.prepare(config)                  # before the first tensor
    strategy = strategies.make_strategy(config)
    strategies.describe(strategy)               # "2 replicas (CPU:0, CPU:1)"
"""

import logging
import operator
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import keras
import tensorflow as tf

from distloop.distributed import collectives, devices, tensorflow_internals
from distloop.distributed.devices import Replicas
from distloop.graph_functions import has_clock
from distloop.settings.config import Config
from distloop.settings.flags import facts
from distloop.threads import once
from distloop.workers import environment, messages
from distloop.workers.environment import Cluster
from distloop.workers.heartbeat import Heartbeat
from distloop.workers.liveness import JOINING

T = TypeVar("T")

MIRRORED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)  # a copy on each device

SERIAL_EXECUTOR, PARALLEL_EXECUTOR = "SINGLE_THREADED_EXECUTOR", ""  # names for tf.experimental.function_executor_type
_TENSORFLOW_SILENCE_SECS, _NO_LIMIT_SECS = 10.0, 86_400.0
_SERVER_SECS = 5.0  # that the other workers wait for the server of the chief before they join
_SMALL_STEP_FLOPS = 2e7  # below this, handing an operation to another thread takes longer than running it


def prepare(config: Config) -> None:
    """Sets up devices and memory growth, seeds Python, NumPy, Keras and TensorFlow, and joins the other workers.

    The Trainer calls it. A script that creates tensors, datasets or models before its Trainer calls it first. Calling
    it again only seeds again.

    Args:
        config: `strategy`, `device`, `num_devices`, `num_stages`, `virtual_replicas`, `intra_op_threads`, `seed`,
            `deterministic`, `full_tracebacks`, `start_timeout` and `hang_timeout` are read.

    Raises:
        ValueError: if Keras uses another backend or a `keras.distribution`, if the device does not exist, if virtual
            CPUs or other workers are needed and TensorFlow has already started, or if a worker does not come.
    """
    devices.prepare_process(config)
    if _strategy_name(config) == "multi_worker":
        make_strategy(config)  # TensorFlow can join other workers only before it starts


def make_strategy(config: Config) -> tf.distribute.Strategy:
    """Returns the strategy that `config` names, over the devices that it names.

    Strategies over several devices are kept for the life of the process: two `MirroredStrategy` objects over the same
    devices would use the same collective keys twice and clash.

    Args:
        config: as for `prepare`.

    Returns:
        TensorFlow's default strategy on one CPU, a `OneDeviceStrategy` on one GPU, a `MirroredStrategy` or a
        `MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: if more devices are asked for than there are, or as for `prepare`.
    """
    messages.mark("imported")
    name = _strategy_name(config)
    if name == "multi_worker":
        return _make_multi_worker(environment.find_cluster(), config)
    device_type = devices.choose_device_type(config)
    available = tf.config.list_logical_devices(device_type)
    if config.num_stages > 1 and config.num_devices <= config.num_stages:  # the stages take all devices
        return tf.distribute.get_strategy()
    num_devices = _count_devices(config, device_type, len(available))
    if name == "none" or (name == "auto" and num_devices == 1):
        # The loop's graph is built for the host, and the default strategy's `run` would leave a replica there.
        return tf.distribute.OneDeviceStrategy("/GPU:0") if device_type == "GPU" else tf.distribute.get_strategy()
    device_names = tuple(f"{device_type}:{i}" for i in range(0, num_devices, config.num_stages))
    return _make_mirrored(device_names, bool(config.virtual_replicas), config.num_stages > 1)


def _count_devices(config: Config, device_type: str, available: int) -> int:
    """Returns the number of this process's devices that a config asks for, given how many there are."""
    if not 0 < (config.num_devices or available) <= available:
        raise ValueError(
            f"num_devices={config.num_devices} of device={device_type.lower()} were asked for, but there are "
            f"{available}: ask for at most that many, or for virtual CPUs with device=cpu."
        )
    return config.num_devices or available


def check_strategy(strategy: tf.distribute.Strategy) -> tf.distribute.Strategy:
    """Returns a strategy object that the user created, after checking it.

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


def replicas_of(strategy: tf.distribute.Strategy, config: Config) -> Replicas:
    """Returns the replicas on which the step of a run is defined; whether they can be shared out is not checked."""
    ratios = tuple(map(int, filter(None, str(config.device_shares).split(","))))
    return Replicas(strategy.num_replicas_in_sync, config.virtual_replicas, ratios)


def describe(strategy: tf.distribute.Strategy) -> str:
    """Returns the number of replicas and their devices, as in `2 replicas (CPU:0, CPU:1)`."""
    count, num_workers = strategy.num_replicas_in_sync, collectives.num_workers(strategy)
    on_workers = f" on each of {num_workers} workers" if num_workers > 1 else ""
    return f"{count} {'replica' if count == 1 else 'replicas'} ({', '.join(_device_names(strategy))}{on_workers})"


def describe_reduction(strategy: tf.distribute.Strategy) -> str:
    """Returns the name of the reduction over replicas, as in `CollectiveAllReduce (NCCL)`."""
    implementation = tensorflow_internals.collective_implementation(strategy)
    name = type(tensorflow_internals.cross_device_ops(strategy)).__name__
    return name + (f" ({implementation})" if implementation is not None else "")


def has_gpus(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if replicas of this worker run on GPUs."""
    return any(name.startswith("GPU") for name in _device_names(strategy))


def lead_device(strategy: tf.distribute.Strategy) -> str:
    """Returns the device of this worker's first replica, where the numbers of a step stay until the host reads them."""
    first = replica_devices(strategy)[0]
    return devices.HOST if first.startswith("/CPU") else first


def replica_devices(strategy: tf.distribute.Strategy) -> list[str]:
    """Returns the device of each replica of this worker."""
    return [f"/{name}" for name in _device_names(strategy)]


def times_replicas(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether a step takes the time of each replica, which on GPUs would wait for each of them."""
    return strategy.num_replicas_in_sync > 1 and has_clock() and not has_gpus(strategy)


def uses_collectives(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if replicas communicate by TensorFlow's collectives; mirrored CPUs of one process do not."""
    reduction = tensorflow_internals.cross_device_ops(strategy)
    return strategy.num_replicas_in_sync > 1 and not isinstance(reduction, tf.distribute.ReductionToOneDevice)


def adds_in_tree(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if sums over replicas are added as `tree_sum` does, not in an order of TensorFlow's."""
    reduction = tensorflow_internals.cross_device_ops(strategy)
    return strategy.num_replicas_in_sync == 1 or getattr(reduction, "accumulation_fn", None) is tree_sum


def _device_names(strategy: tf.distribute.Strategy) -> list[str]:
    """Returns the devices of this worker, as in `CPU:0`."""
    if tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy():
        return [devices.short_device(device) for device in strategy.extended.worker_devices]
    return ["GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"]  # the default strategy does not know it


def choose_executor(strategy: tf.distribute.Strategy, setting: str, step_flops: float | None) -> str:
    """Returns the executor for the graph of a step: a serial one for small steps of one replica on a CPU.

    Args:
        strategy: the strategy of the run.
        setting: `Config.executor`.
        step_flops: floating-point operations of a step; None if unknown.

    Returns:
        A name for `tf.experimental.function_executor_type`.

    Raises:
        ValueError: if a serial executor is asked for with several replicas.
    """
    replicas = strategy.num_replicas_in_sync
    if setting == "serial" and replicas > 1:
        raise ValueError(
            f"executor=serial was given with {replicas} replicas, which would wait for each other: use executor=auto."
        )
    is_one_cpu = replicas == 1 and _device_names(strategy)[0].startswith("CPU")
    is_small = is_one_cpu and step_flops is not None and step_flops < _SMALL_STEP_FLOPS
    return SERIAL_EXECUTOR if setting == "serial" or (setting == "auto" and is_small) else PARALLEL_EXECUTOR


def _strategy_name(config: Config) -> str:
    if config.strategy == "auto" and environment.find_cluster() is not None:
        return "multi_worker"
    return config.strategy


@once
def _make_mirrored(device_names: tuple[str, ...], adds_in_tree: bool, has_stages: bool) -> tf.distribute.Strategy:
    kind = tf.distribute.MirroredStrategy
    reduction = _choose_reduction(device_names, adds_in_tree, has_stages)
    with tensorflow_internals.own_collective_keys(kind):  # this process may have used another number of devices
        return kind(list(device_names), cross_device_ops=reduction)


def _choose_reduction(device_names: tuple[str, ...], adds_in_tree: bool, has_stages: bool) -> Any:
    """Returns how mirrored replicas add; None: by TensorFlow's collectives, which are NCCL between GPUs."""
    # On virtual CPUs, one addition of packed vectors is cheaper than collectives: 2.5 times on small models. GPUs keep
    # TensorFlow's default, unless bits count, or gradients are on other devices than those of the strategy.
    if adds_in_tree:
        return tf.distribute.ReductionToOneDevice(accumulation_fn=tree_sum)
    is_on_cpus = device_names[0].startswith("CPU")
    return tf.distribute.ReductionToOneDevice() if is_on_cpus or has_stages else None


_multi_worker_strategies: dict[Cluster, tf.distribute.Strategy] = {}  # one entry: a process can join one cluster


def _make_multi_worker(cluster: Cluster | None, config: Config) -> tf.distribute.Strategy:
    """Returns a strategy over all workers, after joining them and checking that sums over them are right."""
    if cluster is None:
        raise ValueError(
            "strategy=multi_worker was given, but the environment names no other workers: start the program with "
            "python -m distloop.launch --workers=2 -m ..., by srun with several tasks, or set TF_CONFIG."
        )
    if cluster in _multi_worker_strategies:
        return _multi_worker_strategies[cluster]
    if devices.choose_device_type(config) == "GPU":
        environment.check_gpus_of_tasks(len(tf.config.list_physical_devices("GPU")))
    versions = {"TensorFlow": tf.__version__, "Keras": keras.__version__, "workers": ", ".join(cluster.addresses)}
    secret = environment.find_secret()
    heartbeat = Heartbeat(cluster.addresses, cluster.index, versions | facts(config), secret=secret)
    try:
        heartbeat.meet(config.start_timeout, config.hang_timeout)
        strategy = _join(cluster, config, heartbeat)
    except ValueError as error:
        heartbeat.fail(str(error))
        raise
    _multi_worker_strategies[cluster] = strategy
    return strategy


def _join(cluster: Cluster, config: Config, heartbeat: Heartbeat) -> tf.distribute.Strategy:
    device_type = devices.choose_device_type(config)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": cluster.addresses}), task_type="worker", task_id=cluster.index, rpc_layer="grpc"
    )
    available = config.num_devices or 1  # as virtual CPUs
    if device_type == "GPU":  # which may be split into logical ones
        configurations = map(tf.config.get_logical_device_configuration, tf.config.get_visible_devices("GPU"))
        available = sum(len(configuration or [None]) for configuration in configurations)
    count = _count_devices(config, device_type, available)
    if config.num_stages > 1:  # a replica runs all stages
        count = max(1, config.num_devices // config.num_stages)
    # The heartbeat ends the run before TensorFlow does, and knows whom to name.
    silence_secs = max(_TENSORFLOW_SILENCE_SECS, 2 * config.hang_timeout) if config.hang_timeout else _NO_LIMIT_SECS
    heartbeat.phase = JOINING
    cluster.bypass_proxies()
    try:
        with (
            tensorflow_internals.local_devices(device_type, count),
            tensorflow_internals.silence_allowed(silence_secs),
            tensorflow_internals.joining_without_gil(),
        ):
            # No CommunicationOptions(timeout_seconds=...): for each collective TensorFlow starts a thread that sleeps
            # for so long, 14,000 of them after 25 seconds of a small model. The heartbeat notices a hanging worker.
            _wait_for_chief(cluster)
            strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    except RuntimeError as error:
        raise ValueError(
            f"Worker {cluster.index} cannot join the others, because TensorFlow has already started ({error}): call "
            "distloop.prepare(config) before the first tensor, dataset or model."
        ) from None
    collectives.attach_heartbeat(strategy, heartbeat)
    messages.mark("met")
    numbers = collectives.gather(strategy, cluster.index + 1)
    if numbers != list(range(1, len(cluster.addresses) + 1)):
        raise ValueError(
            f"The workers' numbers came back as {numbers}; the network or the collective library gives wrong "
            "sums: try fewer devices."
        )
    heartbeat.phase = "starting"
    if threading.current_thread() is threading.main_thread():
        # TensorFlow now catches SIGTERM and ignores it: install Python's handler, or the default, again.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
    return strategy


def _wait_for_chief(cluster: Cluster) -> None:
    """Waits on the other workers until the chief's server listens; TensorFlow would try again only a second later."""
    host, port = environment.split_address(cluster.addresses[0])
    ends_at = time.monotonic() + (_SERVER_SECS if cluster.index else 0.0)
    while time.monotonic() < ends_at:
        try:
            socket.create_connection((host, port), timeout=_SERVER_SECS).close()
            return
        except OSError:
            time.sleep(0.01)


def prepare_eager(strategy: tf.distribute.Strategy, is_eager: bool) -> None:
    """Prepares for steps as plain Python, if asked for: TensorFlow then does not warn five times that they are slow.

    Raises:
        ValueError: if there are several workers.
    """
    if not is_eager:
        return
    tf.get_logger().addFilter(_is_not_about_eager)  # adds it once
    if collectives.num_workers(strategy) > 1:
        raise ValueError(
            "eager=True was given on several workers, which would wait for one that a breakpoint holds: look at it "
            "on one worker, with as many devices."
        )


def _is_not_about_eager(record: logging.LogRecord) -> bool:
    return "eagerly has significant overhead" not in record.getMessage()


class TreeSum(Generic[T]):
    """A sum of N values, a power of two, in a fixed binary tree, such as (a + b) + (c + d).

    Floating-point addition is not associative, so a sum over replicas has the same bits on any number of devices only
    if the same numbers are added in the same pairs. The values come one after the other; log2(N) + 1 are held at most.
    """

    def __init__(self, add: Callable[[T, T], T]):
        """Starts without a value."""
        self._add = add
        self._partial: list[tuple[int, T]] = []  # how many values a sum has, and the sum; ever fewer

    def append(self, value: T) -> T:
        """Adds the next value; returns the largest sum that it completes."""
        size = 1
        while self._partial and self._partial[-1][0] == size:
            value = self._add(self._partial.pop()[1], value)
            size *= 2
        self._partial.append((size, value))
        return value

    def total(self) -> T:
        """Returns the sum of all values."""
        ((_, value),) = self._partial
        return value


def tree_sum(values: Iterable[Any]) -> Any:
    """Returns the sum of N tensors, a power of two, in their order."""
    tree = TreeSum[Any](operator.add)
    for value in values:
        tree.append(value)
    return tree.total()
