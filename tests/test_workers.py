"""The laws on several workers: what tests/worker_scenarios.py finds there, and in one process, is the same."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tests import worker_scenarios
from tests.problems import assert_close
from tests.worker_scenarios import SCENARIOS

pytestmark = pytest.mark.slow

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BY_NAME = {scenario.__name__: scenario for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process with one replica finds, by scenario, each run once."""
    found = {}

    def find(name):
        if name not in found:
            found[name] = worker_scenarios.run(BY_NAME[name], 1, tmp_path_factory.mktemp("alone"))
        return found[name]

    return find


@pytest.fixture(scope="module", params=[(2, 1), (2, 2), (3, 1)], ids=lambda p: f"{p[0]}x{p[1]}")
def on_workers(request, tmp_path_factory):
    """What each worker finds: scenario -> a dict of arrays for each."""
    workers, devices = request.param
    out = tmp_path_factory.mktemp(f"workers-{workers}-{devices}")
    worker_scenarios.run(half_of_elastic, 1, out)
    command = [sys.executable, "-m", "distloop.launch", f"--workers={workers}", "-m", "tests.worker_scenarios"]
    result = subprocess.run(
        [*command, str(out), str(devices)], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-4000:]
    found = {name: [dict(np.load(out / f"{name}.{index}.npz")) for index in range(workers)] for name in BY_NAME}
    return found, workers, devices, out, result


def half_of_elastic(make, workdir):
    model_fn = worker_scenarios.classifier(batch_norm="synchronized", l2=0.1, metrics=True)
    there = make(model_fn, workdir=os.path.join(workdir, "elastic"), average_decay=0.9, log_every=100)
    there.fit(worker_scenarios.batches(rows=71, shuffle=True), steps=5)
    return {}


@pytest.mark.parametrize("name", BY_NAME)
def test_workers_find_what_one_process_finds(name, on_workers, alone):
    found, expected = on_workers[0][name], alone(name)
    for of_worker in found:
        assert "error" not in of_worker, str(of_worker["error"])
        shared = {key: value for key, value in of_worker.items() if not key.startswith("own/")}
        wanted = {key: value for key, value in expected.items() if not key.startswith("own/")}
        assert_close(shared, wanted)  # floats
        for key, value in wanted.items():
            if not np.issubdtype(value.dtype, np.floating):
                np.testing.assert_array_equal(shared[key], value, err_msg=key)


def test_all_workers_end_with_the_same_bits(on_workers):
    for name, found in on_workers[0].items():
        for key, value in found[0].items():
            for other in found[1:]:
                if not key.startswith("own/"):
                    assert other[key].tobytes() == value.tobytes(), (name, key)


def test_statistics_are_equal_on_all_workers(on_workers):
    chief, *others = on_workers[0]["statistics"]
    for other in others:
        for key, value in chief.items():
            assert other[key].tobytes() == value.tobytes()


def test_workers_draw_different_dropout_masks(on_workers):
    found, workers, devices, *_ = on_workers
    keys = {tuple(np.ravel(value)) for of_worker in found["masks"] for value in of_worker.values()}
    assert len(keys) == workers * devices


def test_a_run_of_several_workers_resumes_bit_for_bit(on_workers):
    for of_worker in on_workers[0]["resume"]:
        assert not of_worker["own/different"].size


def test_one_process_goes_on_from_a_checkpoint_of_several_workers(on_workers, alone):
    out = on_workers[3]

    def further(make, workdir):
        model_fn = worker_scenarios.classifier(batch_norm="synchronized", l2=0.1, metrics=True)
        there = make(model_fn, workdir=str(workdir), average_decay=0.9, log_every=100)
        there.fit(worker_scenarios.batches(rows=71, shuffle=True), steps=16)
        return worker_scenarios.weights(there)

    assert_close(
        worker_scenarios.run(further, 1, os.path.join(out, "elastic")),
        worker_scenarios.run(further, 1, os.path.join(out, "elastic alone")),
    )


def test_unequal_shares_end_the_epoch_at_the_same_step(on_workers):
    found, workers, *_ = on_workers
    longest = {2: 12, 3: 6}[workers]
    assert [int(of_worker["own/steps"]) for of_worker in found["shares"]] == [longest] * workers


def test_only_the_chief_owns_files(on_workers):
    found, _, _, out, _ = on_workers
    chief, *others = found["files"]
    assert chief["own/touched"].size
    for other in others:
        assert not other["own/touched"].size, other["own/touched"]
    rows = (out / "files" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 7  # 2, 3, 4, 6, 8, 9, 10
    assert not [name for name in os.listdir(out / "files") if name.startswith("export.")]


def test_the_last_workers_wish_to_stop_holds_for_all(on_workers):
    found, *_ = on_workers
    for of_worker in found["stops"]:
        assert int(of_worker["step"]) == 8
    for of_worker in found["interrupts"]:
        assert int(of_worker["code"]) == 75 and int(of_worker["step"]) == 8


def test_no_thread_is_left_behind_by_a_step(on_workers):
    for of_worker in on_workers[0]["threads"]:
        assert int(of_worker["own/more"]) < 100  # of 300 steps


def test_only_the_chief_prints_and_each_says_what_it_reads(on_workers):
    _, workers, _, _, result = on_workers
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("[worker 0] step ")]
    assert not [line for line in lines if line.startswith("[worker 1] step ")]
    for index in range(workers):
        assert [line for line in lines if line.startswith(f"[worker {index}] distloop: worker {index} of {workers}")]


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
