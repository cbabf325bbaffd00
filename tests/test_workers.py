"""The laws on several workers: the scenarios of tests/worker_scenarios.py have the same results as in one process."""

import json
import os
import re
import textwrap

import numpy as np
import pytest

from distloop.launcher.machine import choose_ports
from distloop.workers import heartbeat
from tests import forked, many_rows, worker_scenarios
from tests.problems import assert_close, assert_equal, json_lines, mostly_wide
from tests.worker_scenarios import SCENARIOS

pytestmark = pytest.mark.slow

BY_NAME = {scenario.__name__: scenario for scenario in SCENARIOS}
OF_BITS = [worker_scenarios.bits, worker_scenarios.bits_of_float16]  # two workers go on with runs of one process
HALF_OF_POSITION = dict(ends_at=many_rows.PER_EPOCH - 3)
ON_THREE_WORKERS = ["replicas", "unequal_shares", "sharded", "evaluation", "evaluation_in_one_batch", "shards"]
ON_THREE_WORKERS += ["position"]
# `sharded` skips a step, too.
WIDE = ["synchronized_norm", "two_updates", "elastic", "mixed_rows", "rollback", "equal_shards", "bits_of_float16"]
WIDE += ["float16", "tables_in_microbatches", "evaluation_in_one_batch", "prediction_in_one_batch", "resume"]
# What they do does not depend on the devices of a worker, which has one for them, and two in `make wide`.
ON_ONE_DEVICE = ["exchange", "refusals", "position", "stops", "interrupts", "interrupts_between_loops", "failures"]
ON_ONE_DEVICE += ["by_time", "files"]
LOCAL = ["differences", "failures"]  # their results are looked at by tests of their own


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Returns a function from a scenario's name to its results in one process with one replica; each runs once."""
    results = {}

    def result(name):
        if name not in results:
            results[name] = worker_scenarios.run(BY_NAME[name], 1, tmp_path_factory.mktemp("alone"))
        return results[name]

    return result


def run_on_workers(workers, devices, out, *names):
    """Runs scenarios on local workers; returns name -> a dict of arrays by worker, and what the launcher printed."""
    program = ["-m", "tests.worker_scenarios", str(out), str(devices), *names]
    result = forked.launch([f"--workers={workers}", *program], env=os.environ)
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-4000:]
    loaded = lambda name: [dict(np.load(out / f"{name}.{index}.npz")) for index in range(workers)]  # noqa: E731
    return {name: loaded(name) for name in names}, result.stdout + result.stderr


@pytest.fixture(scope="module")
def on_workers(tmp_path_factory, pytestconfig):
    """Results of scenarios on two workers with two devices each, or with one; of all in `make wide`, with two."""
    out, is_wide = tmp_path_factory.mktemp("workers-2-2"), pytestconfig.getoption("wide")
    chosen = [name for name in BY_NAME if is_wide or name not in WIDE]
    if "elastic" in chosen:
        worker_scenarios.run(worker_scenarios.elastic, 1, out, steps=5)
    worker_scenarios.run(worker_scenarios.position, 1, out, **HALF_OF_POSITION)
    for scenario in [scenario for scenario in OF_BITS if scenario.__name__ in chosen]:
        worker_scenarios.run(scenario, 1, out, steps=4)
    on_two = [name for name in chosen if is_wide or name not in ON_ONE_DEVICE]
    results, printed = run_on_workers(2, 2, out, *on_two)
    if others := [name for name in chosen if name not in on_two]:
        further, printed_then = run_on_workers(2, 1, out, *others)
        results, printed = results | further, printed + printed_then
    return results, out, printed


@pytest.fixture(scope="module")
def on_three_workers(tmp_path_factory):
    """Results of some scenarios on three workers with one device each."""
    out = tmp_path_factory.mktemp("workers-3-1")
    worker_scenarios.run(worker_scenarios.position, 1, out, **HALF_OF_POSITION)
    return run_on_workers(3, 1, out, *ON_THREE_WORKERS)[0]


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.wide)])
def results(request):
    """Results of scenarios on two workers, or on three with one device each."""
    found = request.getfixturevalue("on_workers" if request.param == 2 else "on_three_workers")
    return found[0] if request.param == 2 else found


def assert_same_results(results, results_alone):
    expected = {key: value for key, value in results_alone.items() if not key.startswith("local/")}
    for result in results:
        assert "error" not in result, str(result["error"])
        shared = {key: value for key, value in result.items() if not key.startswith("local/")}
        assert_close(shared, expected)  # floats
        for key, value in expected.items():
            if not np.issubdtype(value.dtype, np.floating):
                np.testing.assert_array_equal(shared[key], value, err_msg=key)


@pytest.mark.parametrize("name", mostly_wide(BY_NAME, *(name for name in BY_NAME if name not in WIDE + LOCAL)))
def test_two_workers_of_two_devices_have_the_results_of_one_process(name, on_workers, alone):
    assert_same_results(on_workers[0][name], alone(name))


@pytest.mark.wide
@pytest.mark.parametrize("name", ON_THREE_WORKERS)
def test_three_workers_have_the_results_of_one_process(name, on_three_workers, alone):
    assert_same_results(on_three_workers[name], alone(name))


def test_all_workers_end_with_the_same_bits(on_workers):
    for name, results in on_workers[0].items():
        for key, value in results[0].items():
            for other in results[1:]:
                if not key.startswith("local/"):
                    assert other[key].tobytes() == value.tobytes(), (name, key)


def assert_same_bits(results, results_alone):
    for result in results:
        assert "error" not in result, str(result["error"])
        assert_equal(result, results_alone)


@pytest.mark.parametrize("scenario", mostly_wide(OF_BITS, worker_scenarios.bits))
def test_workers_have_the_bits_of_one_process_whose_run_they_go_on_with(scenario, on_workers, alone):
    assert_same_bits(on_workers[0][scenario.__name__], alone(scenario.__name__))


@pytest.mark.wide
def test_four_workers_have_the_bits_of_one_process(alone, tmp_path):
    results, _ = run_on_workers(4, 1, tmp_path, "bits")
    assert_same_bits(results["bits"], alone("bits"))


@pytest.mark.wide
def test_one_process_has_the_bits_of_the_workers_whose_run_it_goes_on_with(on_workers, alone, tmp_path):
    found, expected = (
        worker_scenarios.run(worker_scenarios.bits, devices, out, steps=16)
        for devices, out in ((2, on_workers[1]), (1, tmp_path))
    )
    assert_same_bits([found], expected)


def test_a_worker_that_fails_between_steps_is_saved_and_within_one_not(on_workers):
    for index, result in enumerate(on_workers[0]["failures"]):
        ends = ["KeyboardInterrupt ", "RuntimeError mine"] if index else [f"SystemExit {heartbeat.EXIT_CODE}"] * 2
        assert [str(result["local/Ctrl-C"]), str(result["local/rows_fn"])] == ends
        assert str(result["local/step"]).startswith("UnknownError ")
        assert [result[f"{kind}/saved"].tolist() for kind in ("Ctrl-C", "step", "rows_fn")] == [[6], [6], [6, 12]]
        assert np.ptp(result["local/values"]) == 0 and not result["local/different"].size


def test_each_worker_has_its_part_of_slots_and_averages(results):
    sizes = [result["local/bytes"] - (8 + 4) for result in results["sharded"]]  # the count of steps, the learning rate
    total = sum(size.sum() for size in sizes)
    assert total == 4 * 3 * (100 * 300 + 300 + 300 * 100 + 100 + 100 * 10 + 10)
    assert max(size.sum() for size in sizes) <= (1 / len(sizes) + 0.01) * total


def test_the_console_names_the_device_of_each_part_of_the_slots(on_workers):
    devices = [f"0.2 MB on CPU:{device} of worker {worker}" for worker in range(2) for device in range(2)]
    assert f"slots and averages {', '.join(devices)}" in on_workers[0]["sharded"][0]["local/lines"]


def test_each_worker_names_gradients_that_are_not_finite(results, alone):
    expected = str(alone("sharded")["local/error"])
    assert "the gradient of net/hidden/kernel, net/hidden/bias, net/logits/kernel and 1 more is not finite" in expected
    for result in results["sharded"]:
        assert str(result["local/error"]) == expected


def of_kind(kind, result):
    values = {name: value for name, value in result.items() if name.startswith(f"local/{kind}/")}
    assert values
    return values


def test_statistics_are_equal_on_all_workers(on_workers):
    chief, *others = [of_kind("statistics", result) for result in on_workers[0]["statistics_and_seeds"]]
    for other in others:
        for key, value in chief.items():
            assert other[key].tobytes() == value.tobytes()


def test_workers_draw_different_dropout_masks(on_workers):
    results = on_workers[0]["statistics_and_seeds"]
    keys = {tuple(np.ravel(value)) for result in results for value in of_kind("seeds", result).values()}
    assert len(keys) == 4


@pytest.mark.wide  # `failures` does, too
def test_a_run_of_several_workers_resumes_bit_for_bit(on_workers):
    for result in on_workers[0]["resume"]:
        assert not result["local/different"].size


@pytest.mark.wide
def test_one_process_continues_from_a_checkpoint_of_several_workers(on_workers, tmp_path):
    found, expected = (
        worker_scenarios.run(worker_scenarios.elastic, 1, out, steps=16) for out in (on_workers[1], tmp_path)
    )
    assert_close(found, expected)


def test_workers_go_on_in_data_by_number_and_read_their_rows_alone(results, alone):
    whole = alone("position")  # from 5 steps before
    number_of = {row: i for i, row in enumerate(whole["local/rows"].ravel().tolist())}
    num_workers = len(results["position"])
    for worker, result in enumerate(results["position"]):
        first, end = worker * 16 // num_workers, (worker + 1) * 16 // num_workers
        for name in ("local/rows", "local/x"):
            assert np.array_equal(result[name][:7, first:end], whole[name][5:12, first:end])
            assert not result[name][:, :first].any() and not result[name][:, end:].any()
        places = [number_of[row] for row in result["local/asked"].tolist() if row in number_of]
        assert len(places) >= 7 * (end - first)
        assert all(first <= place % 16 < end for place in places)


def test_one_process_goes_on_in_data_by_number_after_several(on_workers, tmp_path):
    stopped, whole = (
        worker_scenarios.run(worker_scenarios.position, 1, out, ends_at=many_rows.PER_EPOCH + 7)
        for out in (on_workers[1], tmp_path)
    )
    assert np.array_equal(stopped["local/x"][:3], whole["local/x"][12:15])
    assert_same_results([stopped], whole)


def test_unequal_shards_end_the_epoch_at_the_same_step(results):
    steps = [int(result["local/steps"]) for result in results["shards"]]
    assert steps == ([12, 12] if len(steps) == 2 else [6, 6, 6])


def test_only_the_chief_writes_files(on_workers):
    results, out, _ = on_workers
    chief, *others = results["files"]
    assert chief["local/touched"].size
    for other in others:
        assert not other["local/touched"].size, other["local/touched"]
    rows = (out / "files" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 7  # 2, 3, 4, 6, 8, 9, 10
    assert not [name for name in os.listdir(out / "files") if name.startswith("export.")]
    assert os.listdir(out / "files" / "exports") == ["10"]
    for result in results["files"]:  # the first one failed on the last worker, and counts on none
        assert np.isnan(result["bests before each export"]).tolist()[:3] == [True, True, False]


def test_a_stop_on_the_last_worker_stops_all(on_workers):
    results, *_ = on_workers
    for result in results["stops"]:
        assert int(result["step"]) == 8 and int(result["local/workers"]) == 2
    assert [result["local/rows"].tolist() for result in results["stops"]] == [[4, 8, -1], []]  # the chief's writer


def test_all_workers_run_as_many_steps_as_the_chiefs_clock_has_time_for(on_workers):
    chief, *others = on_workers[0]["by_time"]
    assert max(chief["local/loops"]) > 1  # 1: what the others had time for
    for other in others:
        for name in ("local/loops", "local/asked at"):
            assert other[name].tolist() == chief[name].tolist()


def test_sigterm_to_the_last_worker_in_an_evaluation_saves_and_stops_all(on_workers):
    results, out, printed = on_workers
    for result in results["interrupts"]:
        assert int(result["code"]) == 75 and int(result["step"]) == 8 and result["local/is_left"]
    assert os.listdir(out / "interrupts" / "checkpoints") == ["8"]
    lines = printed.splitlines()
    assert "[worker 1] distloop: Stopping: saving after this step. Send SIGTERM again to quit now." in lines
    interrupted = "distloop: Interrupted by worker 1 at step 8, checkpoint saved. Run the same command to resume."
    assert f"[worker 0] {interrupted}" in lines


def test_sigterm_to_the_last_worker_stops_all_between_loops(on_workers):
    results, out, _ = on_workers
    for result, why in zip(results["interrupts_between_loops"], ("by worker 1", "by SIGTERM"), strict=True):
        assert int(result["code/between two loops"]) == int(result["code/skipping"]) == 75
        assert str(result["local/between two loops"]) == f"Interrupted {why} at step 8"
        assert re.fullmatch(f"Interrupted {why} with [1-7] of 8 batches left to skip", str(result["local/skipping"]))
        assert int(result["step/skipping"]) == 8
    assert os.listdir(out / "interrupts between loops" / "checkpoints") == ["8"]


def test_values_are_exchanged_and_an_error_on_one_worker_is_raised_on_all(on_workers):
    for result in on_workers[0]["exchange"]:
        for name, expected in (("indices", [0, 1]), ("shapes", [0, 1]), ("lengths", [0, 1000])):
            assert result[f"local/{name}"].tolist() == expected
        assert "Worker 1: <object object" in str(result["local/error"])


@pytest.mark.parametrize(
    "name, sentence",
    {
        "values of training": "differ in the values of loss_fn before they train: ['loss', 'accuracy', 'gradient_n",
        "values of evaluation": "differ in the values of loss_fn before they evaluate: ['loss', 'accuracy'] on work",
        "steps": "differ in the last step before they train: 2 on worker 0, 3 on worker 1; let every worker run",
        "actions": "differ in actions before they train: [('act', 2)] on worker 0, [] on worker 1;",
        "evals": "differ in evals before they train: [('a', ",
        "batches": "differ in the batches of a pass before they read a dataset: 2 on worker 0, 3 on worker 1;",
        "outputs": "differ in the rows of outputs before they predict: float32 [4] on worker 0, float32 [3] on",
        "batches of unknown number": "differ in whether a batch follows before they predict: False on worker 0, True",
        "what to do": "differ in what to do before they evaluate: evaluate on worker 0, predict on worker 1;",
        "a long text": f"differ in model before they count: {'x' * 200}... on worker 0, {'x' * 200}... on worker 1;",
        "a fact that others lack": "differ in more before they count: missing on worker 0, 1 on worker 1;",
        "layers": "differ in the variable 'net/hidden/kernel' before they train: (8, 16) float32, trained on worker 0,",
        "weights": "differ in the weights (as by draws without a seed, a compiled model for from_keras, or another",
        "weights of a compiled model": "a compiled model for from_keras, or another file) before they train: ",
        "weights of a file": "or another file) before they train: ",
        "a checkpoint": "differ in the checkpoint on their disks before they restore: 1 on worker 0, none on worker 1;",
        "variables": "At step 2 model/net/logits/bias of replica 1 of worker 1 differs from that of the first replica:",
    }.items(),
)
def test_a_difference_between_workers_is_an_error_on_all_and_no_hang(name, sentence, on_workers):
    for result in on_workers[0]["differences"]:
        assert sentence in str(result[f"local/{name}"])


@pytest.mark.parametrize(
    "name, sentence",
    {
        "audit": "audit was called on several workers: call it in one process, without TF_CONFIG.",
        "autotune_batch": "called on several workers, where one may run out of memory .*: call it on one of them,",
        "evaluate_checkpoints": "called on several workers, .*: call it in one process beside them, without TF_CONFIG.",
        "replay": "replay was asked for on 2 workers; .*: start the program without the launcher, and without TF_CON",
        "eager": "eager=True was given on several workers, which would wait .*: look at it on one worker",
    }.items(),
)
def test_what_one_process_alone_can_do_is_refused_on_every_worker(name, sentence, on_workers):
    for result in on_workers[0]["refusals"]:
        assert re.search(sentence, str(result[f"local/{name}"]))


def test_a_lock_that_the_chief_does_not_get_is_refused_on_every_worker(on_workers):
    chief, *others = (str(result["local/lock"]) for result in on_workers[0]["refusals"])
    assert "is being written to by another fit of this process" in chief
    for other in others:
        assert "cannot be used; another worker says why" in other


def test_a_row_holds_the_use_of_the_gpus_of_all_workers(on_workers):
    for result in on_workers[0]["exchange"]:
        numbers = json.loads(str(result["local/gpus"]))
        assert numbers.pop("gpu_utilization") == pytest.approx((0.5 + 0.5 + 0.6) / 3)
        assert numbers.pop("energy_kwh") == pytest.approx(3 * 0.5)
        memory = {name: gb for name, gb in numbers.items() if name.endswith("/gpu_memory_gb")}
        gpus = {"worker_0/gpu_0": 10.0, "worker_1/gpu_0": 10.0, "worker_1/gpu_1": 11.0}
        assert memory == {f"{gpu}/gpu_memory_gb": gb for gpu, gb in gpus.items()} and numbers["gpu_memory_gb"] == 11.0


def test_steps_leak_no_threads(on_workers):
    for result in on_workers[0]["exchange"]:
        assert int(result["local/new threads"]) < 30  # in 100 steps


def test_only_the_chief_prints_steps_and_each_worker_prints_its_shard(on_workers):
    lines = on_workers[2].splitlines()
    assert [line for line in lines if line.startswith("[worker 0] step ")]
    assert not [line for line in lines if line.startswith("[worker 1] step ")]
    for index in range(2):
        assert [line for line in lines if line.startswith(f"[worker {index}] distloop: worker {index} of 2")]


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


def test_an_overflow_on_one_worker_is_skipped_on_both(tmp_path):
    ports = choose_ports(2)
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER))
    workers = []
    for index in range(2):
        cluster = {"worker": [f"localhost:{port}" for port in ports]}
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        env = {**os.environ, "TF_CONFIG": config, "CUDA_VISIBLE_DEVICES": "-1"}
        logs = {"stdout": tmp_path / f"out{index}.txt", "stderr": tmp_path / f"errors{index}.txt"}
        workers.append(forked.Program([tmp_path / "worker.py"], **logs, env=env))
    try:
        codes = [worker.wait(120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert codes == [0, 0], [(tmp_path / f"errors{index}.txt").read_text()[-2000:] for index in range(2)]
    first, second = (json_lines(tmp_path / f"out{index}.txt") for index in range(2))
    assert first == second and len(first) == 5
    assert [row[0] for row in first] == [8.0, 4.0, 2.0, 1.0, 1.0]  # the scale, down to its floor
    assert all(row[1:] == first[0][1:] for row in first)  # iterations, slots and weights: bit for bit
