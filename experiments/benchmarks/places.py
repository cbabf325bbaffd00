"""Where the systems run: virtual CPUs of one process, or one CPU of each of several workers."""

import tensorflow as tf


def make_strategy(replicas: int) -> tf.distribute.Strategy:
    """Makes the strategy of all systems but distloop, which has its own, on that many virtual CPUs."""
    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    return tf.distribute.MirroredStrategy(devices) if replicas > 1 else tf.distribute.get_strategy()
