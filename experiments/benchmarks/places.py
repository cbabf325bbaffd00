"""Where the systems run: virtual CPUs of one process. Workers are distloop's to make."""

import tensorflow as tf


def make_strategy(replicas: int) -> tf.distribute.Strategy:
    """Makes the strategy of all systems but distloop, which has its own, on that many virtual CPUs."""
    if replicas == 1:
        return tf.distribute.get_strategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    return tf.distribute.MirroredStrategy([device.name for device in tf.config.list_logical_devices("CPU")])
