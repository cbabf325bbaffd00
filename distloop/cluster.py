"""Owns *where*: devices, memory growth, virtual CPUs, seeds of the process, and the strategy.

The only module that names a strategy class. It does not know what runs on the devices.

    cluster.prepare(config)                     # before the first tensor
    strategy = cluster.make_strategy(config)
"""

import functools

import keras
import tensorflow as tf
from absl import logging

from distloop.config import Config

HOST = "/CPU:0"  # where iterators, loop counters and the numbers for people live


def prepare(config: Config) -> None:
    """Makes virtual CPUs, sets memory growth on GPUs, and seeds Python, NumPy, Keras and TensorFlow.

    The Trainer calls it; a script that makes tensors, datasets or models before its Trainer calls it first. Calling it
    again does no harm beyond seeding again.

    Args:
        config: `device`, `num_devices`, `seed` and `deterministic` are read.

    Raises:
        ValueError: if Keras runs on another backend or under a `keras.distribution`, if there is no such device, or if
            virtual CPUs are needed and TensorFlow has already started.
    """
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
    if _device_type(config) == "CPU":
        _hide_gpus(config)
        _make_virtual_cpus(config.num_devices)
    else:
        _set_memory_growth()
    tf.get_logger().setLevel("WARNING")  # else it tells how it reduces at every trace
    keras.utils.set_random_seed(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()


def make_strategy(config: Config) -> tf.distribute.Strategy:
    """Makes the strategy that `config` names, over the devices that it names.

    Strategies over several devices are kept for the life of the process: two `MirroredStrategy` objects over the same
    devices would start the same collective keys again and clash.

    Args:
        config: `strategy`, `device` and `num_devices` are read.

    Returns:
        TensorFlow's default strategy, or a `MirroredStrategy`.

    Raises:
        ValueError: if more devices are asked for than there are.
    """
    device_type = _device_type(config)
    devices = tf.config.list_logical_devices(device_type)
    num_devices = config.num_devices or len(devices)
    if num_devices > len(devices) or not devices:
        raise ValueError(
            f"num_devices={config.num_devices} of device={device_type.lower()} were asked for, but there are "
            f"{len(devices)}: ask for at most that many, or for virtual CPUs with device=cpu."
        )
    name = config.strategy
    if name == "auto":
        name = "mirrored" if num_devices > 1 else "none"
    if name == "none":
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


def describe(strategy: tf.distribute.Strategy) -> str:
    """Says how many replicas of what, as in `2 replicas (CPU:0, CPU:1)`."""
    count = strategy.num_replicas_in_sync
    if tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy():
        names = [":".join(device.split(":")[-2:]) for device in strategy.extended.worker_devices]
    else:  # TensorFlow's default strategy does not know its device
        names = ["GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"]
    return f"{count} {'replica' if count == 1 else 'replicas'} ({', '.join(names)})"


@functools.cache
def _make_mirrored(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    # One addition of packed vectors is cheaper than collectives between virtual CPUs (2.5 times on small models), and
    # it holds no keys that another strategy could clash with. GPUs keep TensorFlow's default, NCCL (untested here).
    on_cpu = devices[0].startswith("CPU")
    return tf.distribute.MirroredStrategy(
        list(devices), cross_device_ops=tf.distribute.ReductionToOneDevice() if on_cpu else None
    )


def _device_type(config: Config) -> str:
    if config.device != "auto":
        if not tf.config.list_physical_devices(config.device.upper()):
            raise ValueError(
                f"device={config.device} was asked for, but TensorFlow sees none here: use device=auto or cpu."
            )
        return config.device.upper()
    return "GPU" if tf.config.list_physical_devices("GPU") else "CPU"


def _make_virtual_cpus(count: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    if count <= len(tf.config.get_logical_device_configuration(cpu) or [None]):
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError:
        raise ValueError(
            f"num_devices={count} virtual CPUs were asked for, but TensorFlow has already started with fewer: call "
            "distloop.prepare(config) before the first tensor, dataset or model."
        ) from None


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
