"""Patches of TensorFlow are in place only while they are needed, and only for the build they were written for."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context
from tensorflow.python.framework import ops
from tensorflow.python.ops import custom_gradient

import distloop
from distloop.distributed import tensorflow_internals
from tests import problems


def test_another_build_of_tensorflow_keeps_its_own_binding(monkeypatch):
    original = pywrap_tfe.TFE_EnableCollectiveOps
    with tensorflow_internals.joining_without_gil():
        assert pywrap_tfe.TFE_EnableCollectiveOps is not original
    assert pywrap_tfe.TFE_EnableCollectiveOps is original

    def missing(path):
        raise OSError(path)

    monkeypatch.setattr("ctypes.CDLL", missing)
    with tensorflow_internals.joining_without_gil():
        assert pywrap_tfe.TFE_EnableCollectiveOps is original


def registered():
    """Returns the gradient functions that TensorFlow keeps for ever, each with the graph that it is of."""
    return [name for name in ops.gradient_registry.list() if name.startswith("CustomGradient")]


@pytest.mark.slow
def test_a_fit_on_several_replicas_leaves_no_graph_behind():
    before = registered()
    trainer = distloop.Trainer(problems.classifier(), problems.on(2, clip_norm=1.0))
    trainer.fit(distloop.make_dataset(problems.classification(32), 16), steps=2)
    assert registered() == before


def test_sums_over_replicas_leave_no_function_that_keeps_their_graph():
    def sums():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tensorflow_internals.sum_over_replicas([tf.cast(replica + 1, tf.float32), tf.ones([3])])

    before, strategy = registered(), problems.mirrored(2)
    found = tf.function(lambda: strategy.run(sums))()
    for part in strategy.experimental_local_results(found):
        assert part[0].numpy() == 3 and part[1].numpy().tolist() == [2, 2, 2]
    assert registered() == before


def test_workers_may_be_silent_for_longer_than_tensorflow_allows(monkeypatch):
    eager = context.context()
    monkeypatch.setattr(eager, "_coordination_service_config", None)
    with tensorflow_internals.silence_allowed(1200.0):
        eager.configure_coordination_service(service_type="standalone", service_leader="/job:worker/task:0")
    assert eager.coordination_service.heartbeat_timeout_in_ms == 1_200_000
    eager.configure_coordination_service(service_type="standalone")
    assert eager.coordination_service.heartbeat_timeout_in_ms == 0


@pytest.mark.slow
def test_synchronized_batch_normalization_is_traced_without_graph_walks(monkeypatch):
    walks = []

    def counted(input_ops, output_ops, original=custom_gradient._get_dependent_variables):
        walks.append(output_ops)
        return original(input_ops, output_ops)

    def model_fn():
        layers = [keras.Input((3,)), keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(1)]
        return distloop.supervised(keras.Sequential(layers), "mse", keras.optimizers.SGD(0.1))

    monkeypatch.setattr(custom_gradient, "_get_dependent_variables", counted)
    trainer = distloop.Trainer(model_fn, distloop.Config(device="cpu", num_devices=2, batch_size=4, console="quiet"))
    trainer.fit((np.ones([4, 3], "float32"), np.ones([4, 1], "float32")), steps=1)
    assert not walks and custom_gradient._get_dependent_variables is counted
