"""Where it runs: virtual CPUs, GPUs that are only claimed, seeds, strategies, and what schedulers tell of workers."""

import json
import os
import random
import subprocess
import sys
import textwrap
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from distloop.config import Config
from distloop.distributed import cluster, cores

GPUS = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(2)]


def config(**settings):
    return Config(**{"device": "cpu", **settings})


@pytest.fixture
def claimed_gpus(monkeypatch):
    """Lets TensorFlow claim two GPUs, and notes what is done to them."""
    list_physical_devices = tf.config.list_physical_devices
    done = types.SimpleNamespace(grown=[], visible=[])
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: GPUS if kind == "GPU" else list_physical_devices(kind)
    )
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, on: done.grown.append((gpu.name, on)))
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda devices, kind: done.visible.append((devices, kind)))
    return done


@pytest.fixture
def started():
    """Starts TensorFlow, so that no virtual CPU can be added."""
    return tf.config.list_logical_devices("CPU")


def draws():
    """Draws from every generator that a seed should reach."""
    return [
        random.random(),
        float(np.random.rand()),
        float(tf.random.uniform([])),
        float(keras.random.uniform([])),
    ]


def test_prepare_may_be_called_again(started):
    for _ in range(2):
        cluster.prepare(config(num_devices=4))
    assert len(tf.config.list_logical_devices("CPU")) == 4


def test_prepare_for_fewer_devices_leaves_those_that_are_there(started):
    cluster.prepare(config(num_devices=1))
    cluster.prepare(config(num_devices=0))
    assert len(tf.config.list_logical_devices("CPU")) == 4


def test_the_seed_reaches_python_numpy_tensorflow_and_keras():
    cluster.prepare(config(seed=7))
    first = draws()
    cluster.prepare(config(seed=7))
    assert draws() == first
    cluster.prepare(config(seed=8))
    assert all(one != other for one, other in zip(draws(), first, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_operations_are_asked_for_only_if_set(monkeypatch, deterministic):
    asked = []
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: asked.append(True))
    cluster.prepare(config(deterministic=deterministic))
    assert bool(asked) == deterministic


@pytest.mark.slow
def test_virtual_cpus_after_the_start_are_refused_in_one_sentence():
    program = """
import tensorflow as tf
import distloop
tf.constant(1.0)
try:
    distloop.prepare(distloop.Config(device="cpu", num_devices=3))
except ValueError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == (
        "num_devices=3 virtual CPUs were asked for, but TensorFlow has already started with fewer: call "
        "distloop.prepare(config) before the first tensor, dataset or model.\n"
    )


def test_prepare_names_the_devices_that_come_too_late(started):
    with pytest.raises(ValueError, match="num_devices=9 virtual CPUs .* already started .*: call distloop.prepare"):
        cluster.prepare(config(num_devices=9))


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="device=gpu was asked for, but TensorFlow sees none .*: use device=auto"):
        cluster.prepare(config(device="gpu"))


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match="the 'jax' backend; .*: set KERAS_BACKEND=tensorflow"):
        cluster.prepare(config())


def test_a_keras_distribution_is_refused(monkeypatch):
    monkeypatch.setattr(keras.distribution, "distribution", object)
    with pytest.raises(ValueError, match=r"keras.distribution is set, .*: call keras.*set_distribution\(None"):
        cluster.prepare(config())


def test_gpus_are_hidden_from_a_run_on_cpus(claimed_gpus):
    cluster.prepare(config(device="cpu"))
    assert claimed_gpus.visible == [([], "GPU")]
    assert not claimed_gpus.grown


@pytest.mark.parametrize("device", ["auto", "gpu"])
def test_gpus_take_memory_as_they_need_it(claimed_gpus, device):
    cluster.prepare(config(device=device))
    assert claimed_gpus.grown == [(gpu.name, True) for gpu in GPUS]
    assert not claimed_gpus.visible


def test_gpus_that_have_started_are_warned_about_when_they_cannot_be_hidden(claimed_gpus, monkeypatch, caplog):
    def refuse(devices, kind):
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config, "set_visible_devices", refuse)
    with caplog.at_level("WARNING", logger="absl"):
        cluster.prepare(config(device="cpu"))
    assert "device=cpu, but TensorFlow has already started with GPUs" in caplog.text


@pytest.mark.parametrize("is_growing", [False, True])
def test_gpus_that_have_started_are_warned_about_unless_their_memory_grows(
    claimed_gpus, monkeypatch, caplog, is_growing
):
    def refuse(gpu, on):
        raise RuntimeError("Physical devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", refuse)
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: is_growing)
    with caplog.at_level("WARNING", logger="absl"):
        cluster.prepare(config(device="gpu"))
    assert ("holds all its memory: call distloop.prepare first" in caplog.text) != is_growing


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_mirrored_has_one_replica_a_device(count):
    strategy = cluster.make_strategy(config(strategy="mirrored", num_devices=count))
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    assert strategy.num_replicas_in_sync == count


def test_no_number_means_all_devices():
    assert cluster.make_strategy(config(strategy="mirrored")).num_replicas_in_sync == 4


def test_auto_is_mirrored_over_several_devices_and_none_on_one():
    assert cluster.make_strategy(config(num_devices=2)).num_replicas_in_sync == 2
    assert cluster.make_strategy(config(num_devices=1)) is tf.distribute.get_strategy()


def test_none_is_tensorflows_default_strategy():
    assert cluster.make_strategy(config(strategy="none")) is tf.distribute.get_strategy()


def test_a_strategy_over_the_same_devices_is_made_once():
    first, second = (cluster.make_strategy(config(strategy="mirrored", num_devices=2)) for _ in range(2))
    assert first is second


def test_strategies_of_different_sizes_work_side_by_side():
    def total():
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([3]))

    for count in (2, 4, 3, 2):
        strategy = cluster.make_strategy(config(strategy="mirrored", num_devices=count))
        results = strategy.experimental_local_results(tf.function(lambda s=strategy: s.run(total))())
        np.testing.assert_array_equal(results[-1], [count] * 3)


@pytest.mark.parametrize(
    "replicas, setting, step_flops, expected",
    [
        (1, "auto", 1e6, cluster.SERIAL_EXECUTOR),
        (1, "auto", 1e9, cluster.PARALLEL_EXECUTOR),
        (1, "auto", None, cluster.PARALLEL_EXECUTOR),
        (1, "serial", 1e9, cluster.SERIAL_EXECUTOR),
        (1, "parallel", 1e6, cluster.PARALLEL_EXECUTOR),
        (2, "auto", 1e6, cluster.PARALLEL_EXECUTOR),
    ],
)
def test_small_steps_of_one_replica_run_one_operation_after_another(replicas, setting, step_flops, expected):
    strategy = cluster.make_strategy(config(num_devices=replicas))
    assert cluster.find_executor(strategy, setting, step_flops) == expected


def test_several_replicas_one_operation_after_another_are_refused():
    with pytest.raises(ValueError, match="executor=serial was given with 2 replicas.*: use executor=auto."):
        cluster.find_executor(cluster.make_strategy(config(num_devices=2)), "serial", 1e6)


def test_small_steps_on_a_gpu_run_as_they_can(claimed_gpus, monkeypatch):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    assert cluster.find_executor(tf.distribute.get_strategy(), "auto", 1e6) == cluster.PARALLEL_EXECUTOR


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match="num_devices=9 of device=cpu were asked for, but there are 4: ask for"):
        cluster.make_strategy(config(num_devices=9))


def test_a_strategy_object_is_taken_as_it_is():
    for strategy in (tf.distribute.OneDeviceStrategy("/cpu:1"), tf.distribute.get_strategy()):
        assert cluster.check_strategy(strategy) is strategy


@pytest.mark.parametrize("given", ["mirrored", tf.distribute.MirroredStrategy, 2])
def test_what_is_no_strategy_object_is_refused(given):
    with pytest.raises(ValueError, match=r"is not a tf.distribute.Strategy object; name one in Config\(strategy=...\)"):
        cluster.check_strategy(given)


def test_an_asynchronous_strategy_is_refused():
    strategy = object.__new__(tf.distribute.ParameterServerStrategy)  # a real one needs a cluster
    with pytest.raises(ValueError, match="ParameterServerStrategy .*: use a synchronous strategy"):
        cluster.check_strategy(strategy)


@pytest.mark.parametrize(
    ("settings", "description"),
    [
        ({"strategy": "none"}, "1 replica (CPU:0)"),
        ({"strategy": "mirrored", "num_devices": 1}, "1 replica (CPU:0)"),
        ({"strategy": "mirrored", "num_devices": 2}, "2 replicas (CPU:0, CPU:1)"),
    ],
)
def test_a_strategy_is_described_by_its_replicas_and_devices(settings, description):
    assert cluster.describe(cluster.make_strategy(config(**settings))) == description


def test_a_strategy_that_the_user_made_is_described_too():
    assert cluster.describe(tf.distribute.OneDeviceStrategy("/cpu:1")) == "1 replica (CPU:1)"


def outside(environment, monkeypatch):
    """Sets what a scheduler sets, and nothing of another one."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "TF_CONFIG", "CUDA", "JOB_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))


def step_of(line, **more):
    """Gives what srun (22.05) gave a task, from `procid/tasks nodelist tasks_per_node nodeid/localid`."""
    own, nodes, counts, place = line.split()
    procid, tasks = own.split("/")
    node, local = place.split("/")
    variables = {"PROCID": procid, "STEP_NUM_TASKS": tasks, "STEP_NODELIST": nodes, "STEP_TASKS_PER_NODE": counts}
    variables |= {"NODEID": node, "LOCALID": local, "JOB_ID": 100, "STEP_ID": 0} | more
    return {f"SLURM_{name}": value for name, value in variables.items()}


@pytest.mark.parametrize(
    ("line", "distribution", "expected"),
    [
        ("4/5 n[8-10] 2(x2),1 2/0", None, "n8:0 n8:1 n9:0 n9:1 n10:0"),  # as Slurm counts, not as text is sorted
        ("5/7 n[8-11] 4,1(x3) 2/0", None, "n8:0 n8:1 n8:2 n8:3 n9:0 n10:0 n11:0"),
        ("1/2 n[9-10] 1(x2) 1/0", None, "n9:0 n10:0"),
        ("2/4 n[8-9] 3,1 0/1", "cyclic", "n8:0 n9:0 n8:1 n8:2"),
        ("3/4 n[8-9] 2(x2) 1/1", "block", "n8:0 n8:1 n9:0 n9:1"),
        ("1/2 n8 2 0/1", None, "n8:0 n8:1"),
        ("4/5 r[1-2]n[09-10]-ib,m1 1(x5) 4/0", None, "r1n09-ib:0 r1n10-ib:0 r2n09-ib:0 r2n10-ib:0 m1:0"),
    ],
)
def test_tasks_of_a_slurm_step_are_workers_in_its_order(line, distribution, expected, monkeypatch):
    outside(step_of(line, **({"DISTRIBUTION": distribution} if distribution else {})), monkeypatch)
    monkeypatch.setattr(subprocess, "Popen", None)  # neither nvidia-smi nor scontrol is asked
    workers = cluster._find_workers()
    hosts, ports = zip(*(address.split(":") for address in workers.addresses), strict=True)
    found = " ".join(f"{host}:{int(port) - min(map(int, ports))}" for host, port in zip(hosts, ports, strict=True))
    assert found == expected and workers.index == int(line.split("/")[0])


def test_steps_that_run_side_by_side_use_different_ports(monkeypatch):
    used = set()
    for job in range(30):
        for step in range(3):
            outside(step_of("0/9 n1 9 0/0", JOB_ID=123_456 + job, STEP_ID=step), monkeypatch)
            used |= {int(address.split(":")[1]) for address in cluster._find_workers().addresses}
    assert len(used) == 30 * 3 * 9 and min(used) >= 10_000 and max(used) < 32_768


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_JOB_ID": 6, "SLURM_NTASKS": 4, "SLURM_JOB_NODELIST": "n[8-9]", "SLURM_TASKS_PER_NODE": "3,1"},  # salloc
        {"SLURM_JOB_ID": 7, "SLURM_NTASKS": 2, "SLURM_PROCID": 0, "SLURM_LOCALID": 0},  # a batch script before srun
        step_of("0/1 n8 1 0/0"),
        {"JOB_COMPLETION_INDEX": 1, "HOSTNAME": "train-1"},  # of an indexed Job, without the launcher
        {"TF_CONFIG": "{}"},
    ],
)
def test_elsewhere_a_process_is_alone(environment, monkeypatch):
    outside(environment, monkeypatch)
    assert cluster._find_workers() is None
    assert cluster.make_strategy(config(num_devices=1)) is tf.distribute.get_strategy()
    with pytest.raises(ValueError, match="tells of no other workers: start .* by srun with several tasks"):
        cluster.make_strategy(config(strategy="multi_worker"))


@pytest.mark.parametrize(
    "line",
    [
        "1/4 n[8-10] 2,1,1 2/0",
        "0/4 n[8-9] 1(x2) 0/0",
        "0/2 n[8-9] 2 0/0",
        "0/2 n[a-b] 1(x2) 0/0",
        "0/2 n[9,8] 1(x2) 0/0",
    ],
)
def test_slurm_steps_that_do_not_tell_where_their_tasks_are_get_a_sentence(line, monkeypatch):
    outside(step_of(line, DISTRIBUTION="arbitrary") | {"SLURMD_NODENAME": "n8"}, monkeypatch)
    with pytest.raises(ValueError, match=r"SLURM_PROCID=., .* do not tell which task runs where: start all tasks by"):
        cluster.prepare(config())


@pytest.mark.parametrize(("tasks", "visible", "is_allowed"), [(2, 1, True), (2, 2, False), (1, 2, True)])
def test_tasks_that_would_share_gpus_get_a_sentence(tasks, visible, is_allowed, claimed_gpus, monkeypatch):
    given = {"GTIDS": ",".join(map(str, range(tasks))), "GPUS_ON_NODE": 2}
    outside({"SLURM_STEP_NUM_TASKS": 4, **{f"SLURM_{name}": value for name, value in given.items()}}, monkeypatch)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: GPUS[:visible])
    if is_allowed:
        cluster._check_gpus_of_tasks()
    else:
        with pytest.raises(ValueError, match="2 tasks on this node see 2 GPUs each, but there are 2: start one task a"):
            cluster._check_gpus_of_tasks()


WORKERS = ["train-worker-0.team.svc:2222", "train-worker-1.team.svc:2222"]
CHIEF = ["train-chief-0.team.svc:2222"]


def tf_config(jobs, kind="worker", index=0):
    """Gives TF_CONFIG as Kubeflow's Training Operator writes it."""
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": kind, "index": index}, "environment": "cloud"})}


@pytest.mark.parametrize(
    ("jobs", "kind", "index", "addresses", "number"),
    [
        ({"worker": WORKERS}, "worker", 1, WORKERS, 1),
        ({"chief": CHIEF, "worker": WORKERS}, "chief", 0, CHIEF + WORKERS, 0),
        ({"chief": CHIEF, "worker": WORKERS}, "worker", 1, CHIEF + WORKERS, 2),
        ({"chief": CHIEF, "worker": WORKERS, "evaluator": ["e:1"]}, "worker", 0, CHIEF + WORKERS, 1),
        ({"chief": CHIEF, "worker": WORKERS[:1]}, "worker", "0", [*CHIEF, WORKERS[0]], 1),
    ],
)
def test_a_tfjobs_chief_is_worker_0(jobs, kind, index, addresses, number, monkeypatch):
    outside(tf_config(jobs, kind, index), monkeypatch)
    assert cluster._find_workers() == cluster.Workers(tuple(addresses), number)


def test_a_tfjob_with_one_worker_is_no_cluster(monkeypatch):
    outside(tf_config({"worker": WORKERS[:1]}), monkeypatch)
    assert cluster._find_workers() is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (tf_config({"worker": WORKERS}, "evaluator"), "the workers evaluate: leave the evaluator out"),
        (tf_config({"worker": WORKERS[:1]}, "evaluator"), "the workers evaluate: leave the evaluator out"),
        (tf_config({"worker": WORKERS, "ps": ["p:1"]}), "distloop knows the jobs chief and worker, not ps"),
        (tf_config({"worker": WORKERS}, "ps"), "distloop knows the jobs chief and worker, not ps"),
        (tf_config({"worker": WORKERS, "master": ["m:1"]}), "distloop knows the jobs chief and worker, not master"),
        (tf_config({"worker": WORKERS}, "worker", 2), "there is no worker 2"),
        (tf_config({"worker": WORKERS}, "chief"), "there is no chief 0"),
        (json.dumps({"cluster": {"worker": WORKERS}}), "there is no worker None"),
        (tf_config({"worker": ["a", "b"]}), "'a' is no host:port"),
        (tf_config({"worker": "a:1"}), "'a' is no host:port"),
        (json.dumps({"sparseCluster": {"worker": {"1": WORKERS[1]}, "ps": []}}), "it has to name every worker"),
        ("[1]", "it has to name every worker"),
        ("{'worker': []}", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ],
)
def test_a_tf_config_that_cannot_be_joined_gets_a_sentence(text, reason, monkeypatch):
    outside(text if isinstance(text, dict) else {"TF_CONFIG": text}, monkeypatch)
    with pytest.raises(ValueError) as error:
        cluster.prepare(config())
    assert f"which is no cluster that distloop can join ({reason}): it looks like" in str(error.value)


TASK = """
    import os
    import signal
    import distloop
    from distloop import cluster

    config = distloop.Config(device="cpu", start_timeout=60, hang_timeout=600)
    distloop.prepare(config)
    strategy = cluster.make_strategy(config)
    (caught,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("SigCgt")]
    before = len(os.listdir("/proc/self/task"))
    for _ in range(100):
        found = cluster.gather(strategy, 10 + cluster.worker_index(strategy))
    is_stoppable = not int(caught, 16) >> (signal.SIGTERM - 1) & 1
    more = len(os.listdir("/proc/self/task")) - before
    print(cluster.worker_index(strategy), found.tolist(), is_stoppable, more < 50)
"""


@pytest.mark.slow
def test_tasks_of_a_slurm_step_join_each_other_heed_sigterm_and_pile_up_no_threads(monkeypatch):
    outside({"TF_CPP_MIN_LOG_LEVEL": 3}, monkeypatch)
    tasks = []
    for i in range(2):
        step = {name: str(value) for name, value in step_of(f"{i}/2 localhost 2 0/{i}", JOB_ID=os.getpid()).items()}
        command = [sys.executable, "-c", textwrap.dedent(TASK)]
        tasks.append(subprocess.Popen(command, env={**os.environ, **step}, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [task.communicate(timeout=120)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert outputs == [f"{i} [10.0, 11.0] True True\n" for i in range(2)]


def test_a_worker_that_comes_back_under_another_address_is_found():
    program = """
        import socket, threading, time
        from distloop.peers import Peers

        class Network(socket.socket):
            def sendto(self, data, address):
                return super().sendto(data, address) if address[0] == "127.0.0.1" else 0

        began = time.monotonic()
        socket.socket = Network
        socket.gethostbyname = lambda host: "127.0.0.1" if host == "a" or time.monotonic() > began + 0.7 else "gone"
        with Network() as one, Network() as other:
            for probe in (one, other):
                probe.bind(("", 0))
            addresses = [f"a:{one.getsockname()[1]}", f"b:{other.getsockname()[1]}"]
        workers = [Peers(addresses, i, {}) for i in range(2)]
        threads = [threading.Thread(target=worker.meet, args=(20,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(time.monotonic() - began < 15)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "True\n", result.stderr


def test_another_build_of_tensorflow_joins_as_it_does(monkeypatch):
    from tensorflow.python import pywrap_tfe

    original = pywrap_tfe.TFE_EnableCollectiveOps
    with cluster._threads_running():
        assert pywrap_tfe.TFE_EnableCollectiveOps is not original
    assert pywrap_tfe.TFE_EnableCollectiveOps is original

    def missing(path):
        raise OSError(path)

    monkeypatch.setattr("ctypes.CDLL", missing)
    with cluster._threads_running():
        assert pywrap_tfe.TFE_EnableCollectiveOps is original


def test_nccl_between_cpus_is_refused():
    workers = cluster.Workers(("a:1", "b:1"), 0)
    with pytest.raises(ValueError, match="communication=nccl was given, which is for GPUs"):
        cluster._make_multi_worker(workers, config(communication="nccl"))


def test_threads_cannot_be_chosen_once_tensorflow_has_started():
    tf.constant(0)
    with pytest.raises(ValueError, match="intra_op_threads=97 were given, but TensorFlow has already started"):
        cluster.prepare_process(config(intra_op_threads=97))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("inter_op_threads=3, intra_op_threads=2", "3 2"),
        ("num_devices=2, intra_op_threads=2", "0 2"),
        ("num_devices=2", f"0 {max(1, cores.count() // 2)}"),  # virtual CPUs share the cores
        ("num_stages=64", "0 1"),
        ("num_devices=1", "0 0"),
    ],
)
def test_threads_are_as_many_as_asked_for(settings, expected):
    program = (
        "import tensorflow as tf, distloop\n"
        f"distloop.prepare(distloop.Config(device='cpu', {settings}))\n"
        "tf.constant(0)\n"
        "threading = tf.config.threading\n"
        "print(threading.get_inter_op_parallelism_threads(), threading.get_intra_op_parallelism_threads())"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == f"{expected}\n"
