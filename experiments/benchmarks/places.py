"""Strategies of the systems: on virtual CPUs of one process, or on several workers."""

import os

import tensorflow as tf


def make_strategy(replicas: int) -> tf.distribute.Strategy:
    """Returns the strategy of all systems but distloop, which makes its own: over workers, or over virtual CPUs."""
    if "TF_CONFIG" in os.environ:
        return tf.distribute.MultiWorkerMirroredStrategy()
    if replicas == 1:
        return tf.distribute.get_strategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    return tf.distribute.MirroredStrategy([device.name for device in tf.config.list_logical_devices("CPU")])
