"""Several workers: what holds already before the Trainer runs on them."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest

WORKER = """
    import sys
    import keras
    import tensorflow as tf
    import distloop

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])
        optimizer = distloop.LossScaleOptimizer(keras.optimizers.Adam(0.1), 8.0)
        optimizer.build([weight])

    @tf.function
    def step(bad, on_worker):
        def replica_step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(tf.reduce_sum(weight.value * tf.cast(replica + 1, tf.float32)))
            gradient = tape.gradient(loss, weight.value)
            optimizer.apply([tf.where(tf.equal(replica, on_worker), gradient * bad, gradient)], [weight])

        strategy.run(replica_step)

    def report():
        variables = [optimizer.loss_scale, optimizer.iterations, *optimizer.inner_optimizer.variables[2:], weight]
        return [v.numpy().tolist() for v in variables]

    step(1.0, 0)
    print(report(), flush=True)
    for on_worker in (0, 1):
        for bad in (float("inf"), float("nan")):
            step(bad, on_worker)
            print(report(), flush=True)
"""


@pytest.mark.slow
def test_what_overflows_on_one_worker_is_skipped_on_both(tmp_path):
    ports = []
    sockets = [socket.socket() for _ in range(2)]
    for s in sockets:
        s.bind(("localhost", 0))
        ports.append(s.getsockname()[1])
    for s in sockets:
        s.close()
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER))
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    workers = []
    for index in range(2):
        cluster = {"worker": [f"localhost:{port}" for port in ports]}
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        env = {**os.environ, "TF_CONFIG": config, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": root}
        command = [sys.executable, str(tmp_path / "worker.py")]
        workers.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        outputs = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, errors[-2000:]
    first, second = ([json.loads(line) for line in out.splitlines()] for out, _ in outputs)
    assert first == second and len(first) == 5
    assert [row[0] for row in first] == [8.0, 4.0, 2.0, 1.0, 1.0]  # the scale, down to its floor
    assert all(row[1:] == first[0][1:] for row in first)  # iterations, slots and weights: bit for bit
