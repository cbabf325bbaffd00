"""The actions of each run: what it read, its goodput, its use of devices, and whether its replicas are equal."""

import contextlib
import json
import re
import sys
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop import report
from distloop.actions import built_in
from distloop.actions.built_in import DataSeen, Goodput, Utilization
from distloop.data.source import Source
from distloop.distributed import devices
from distloop.model import memory
from distloop.model.saved_state import ReplicaComparison, checksum
from distloop.training.action import Report
from distloop.workdir import ledger
from distloop.workers import environment
from tests.problems import classification, classifier, on, rows_of


def seen_after(data, num_batches):
    source = Source(data, tf.distribute.get_strategy())
    source.batches_taken = num_batches
    return DataSeen(source)(Report(num_batches, 100, {}, state=None))


def test_epochs_follow_from_the_place_and_endless_data_has_none():
    assert seen_after(distloop.make_dataset(np.arange(10.0), 4), 7) == {"epochs_seen": 7 / 3}
    assert seen_after(tf.data.Dataset.range(10).batch(5), 3) == {"epochs_seen": 1.5}
    assert seen_after(tf.data.Dataset.range(10).repeat().batch(5), 3) == {}


@pytest.mark.slow
def test_rows_tell_what_was_read_over_stops_and_going_on(tmp_path):
    rows, config = classification(40), on(1, workdir=str(tmp_path), log_every=2, eval_every=0)
    for steps in (3, 7):
        data = tf.data.Dataset.from_tensor_slices(rows).batch(16)  # of 16, 16 and 8 rows
        distloop.Trainer(classifier(), config).fit(data, steps=steps)
    written = rows_of(tmp_path)
    assert {row["step"]: row["examples_seen"] for row in written} == {2: 32, 3: 40, 4: 56, 6: 80, 7: 96}
    assert written[-1]["epochs_seen"] == 7 / 3


def test_a_worker_that_is_not_the_chief_reports_and_writes_nothing(tmp_path):
    def verify():
        raise AssertionError

    goodput = Goodput(str(tmp_path), lambda: {"step": 1.0}, False, verify)
    at = distloop.Report(1, 2, {}, None, time=0.0)
    assert goodput(at) == {}  # no start was noted
    ledger.record_start(str(tmp_path), step=0, devices=1, kind="CPU")
    assert 0 <= goodput(at)["goodput"] <= 1
    goodput.on_end(at)
    assert ledger.read_progress(str(tmp_path)) is None


def test_a_start_that_ends_before_its_first_log_notes_its_end(tmp_path):
    ledger.record_start(str(tmp_path), step=253, devices=1, kind="CPU")
    Goodput(str(tmp_path), lambda: {"step": 1.0}, True, lambda: None).on_end(distloop.Report(254, 600, {}, None))
    assert ledger.read_progress(str(tmp_path))["step"] == 254


def accounted(workdir):
    """Returns the starts of a run, and its seconds by what they were spent on, which are all that passed."""
    starts, progress = ledger.read_starts(str(workdir)), ledger.read_progress(str(workdir))
    seconds = ledger.account(starts[-1], progress)
    before = starts[0]["time"] - (starts[0]["process_secs"] or 0.0)
    assert sum(seconds.values()) == pytest.approx(progress["time"] - before, abs=0.05)
    return starts, seconds


@pytest.mark.slow
def test_a_run_that_failed_counts_repeated_steps_and_each_second_once(tmp_path, capsys):
    def fall(report):
        raise SystemExit

    def pause(report):
        time.sleep(0.05)

    fall.every, pause.every = 14, 20
    for actions, ending in (([fall], pytest.raises(SystemExit)), ([pause], contextlib.nullcontext())):
        trainer = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path), checkpoint_every=10, log_every=2))
        with ending:
            trainer.fit(distloop.make_dataset(classification(33), 8), steps=20, actions=actions)
    row = distloop.read_metrics(tmp_path)[-1]
    assert row["step"] == 20 and 0 < row["goodput"] < 1
    assert ledger.read_progress(str(tmp_path))["secs"]["pause"] >= 0.05  # each action by its name
    starts, seconds = accounted(tmp_path)
    assert [start["step"] for start in starts] == [0, 10] and starts[1]["progress"]["step"] == 14
    assert seconds["steps"] > 0 and seconds["steps done twice"] > 0
    capsys.readouterr()
    report.main([str(tmp_path)])
    assert "goodput" in capsys.readouterr().out
    report.main([str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["runs"][0]["time_spent"]["pause"] >= 0.05


@pytest.mark.wide
@pytest.mark.slow
def test_a_run_that_goes_back_accounts_for_each_second_once(tmp_path):
    data = classification(48)
    data["x"][-3] = np.nan  # in the last batch of the first epoch
    config = on(1, workdir=str(tmp_path), checkpoint_every=2, log_every=1, on_divergence="rollback")
    distloop.Trainer(classifier(), config).fit(tf.data.Dataset.from_tensor_slices(data).batch(8), steps=7)
    starts, seconds = accounted(tmp_path)
    assert [start["step"] for start in starts] == [0, 4] and starts[1]["process_secs"] is None
    assert seconds["steps done twice"] > 0
    assert distloop.read_metrics(tmp_path)[-1]["goodput"] == pytest.approx(ledger.goodput(seconds), abs=0.05)


def test_the_memory_is_asked_for_once_a_second_and_at_the_end(monkeypatch):
    levels = iter(range(1, 10))
    monkeypatch.setattr(memory, "peaks", lambda: {"host_memory_gb": next(levels)})
    measure = Utilization()
    times = {10: 5.0, 20: 5.9, 30: 6.1, 40: 6.2}
    peaks = [measure(Report(step, 40, {}, None, time=when))["host_memory_gb"] for step, when in times.items()]
    assert peaks == [1, 1, 2, 3]


@pytest.fixture
def nvml(monkeypatch):
    """A fake of a driver with three GPUs, of which `CUDA_VISIBLE_DEVICES` shows two, the last one first.

    `joules` is what each GPU has taken.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-b")
    joules = {1: 7e6, 2: 50e6}
    fake = types.SimpleNamespace(
        NVMLError=RuntimeError,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetHandleByUUID={"GPU-b": 1}.__getitem__,
        nvmlDeviceGetUtilizationRates=lambda gpu: types.SimpleNamespace(gpu=90 + gpu),
        nvmlDeviceGetMemoryInfo=lambda gpu: types.SimpleNamespace(used=(10 + gpu) * 10**9),
        nvmlDeviceGetPowerUsage=lambda gpu: 300_000 + gpu,
        nvmlDeviceGetTemperature=lambda gpu, sensor: 60 + gpu,
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: int(1e3 * joules[gpu]),
        joules=joules,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    see_gpus(monkeypatch, 2)
    yield fake
    devices._nvml_gpus.cache_clear()


def see_gpus(monkeypatch, count):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a GPU"] * count)
    devices._nvml_gpus.cache_clear()


def fail(*_):
    raise RuntimeError("not supported")


OF_EACH_GPU = {
    "gpu_0/gpu_utilization": 0.92,
    "gpu_0/gpu_memory_gb": 12.0,
    "gpu_0/gpu_watts": 300.002,
    "gpu_0/gpu_temperature": 62.0,
    "gpu_1/gpu_utilization": 0.91,
    "gpu_1/gpu_memory_gb": 11.0,
    "gpu_1/gpu_watts": 300.001,
    "gpu_1/gpu_temperature": 61.0,
}


def test_each_gpu_is_seen_in_tensorflows_order(nvml):
    measure = Utilization()
    nvml.joules.update({1: 7e6 + 3.6e6, 2: 50e6 + 7.2e6})
    numbers = measure(Report(10, 100, {}, state=None, time=5.0))
    assert numbers.pop("host_memory_gb") > 0
    over_gpus = {"gpu_utilization": 0.915, "gpu_memory_gb": 12.0, "gpu_watts": 600.003, "gpu_temperature": 62.0}
    assert numbers == pytest.approx({**over_gpus, "energy_kwh": 3.0, **OF_EACH_GPU})


def test_what_a_driver_does_not_report_is_left_out(nvml):
    nvml.nvmlDeviceGetTotalEnergyConsumption = fail
    nvml.nvmlDeviceGetPowerUsage = lambda gpu: 300_000 if gpu == 1 else fail()  # a sum needs all of them
    numbers = Utilization()(Report(10, 100, {}, state=None, time=5.0))
    of_each = set(OF_EACH_GPU) - {"gpu_0/gpu_watts"}
    assert set(numbers) == {"host_memory_gb", "gpu_utilization", "gpu_memory_gb", "gpu_temperature"} | of_each
    nvml.nvmlDeviceGetUtilizationRates = fail
    numbers = Utilization()(Report(10, 100, {}, state=None, time=5.0))
    assert "gpu_utilization" not in numbers and {"cpu_utilization", "gpu_memory_gb"} < set(numbers)


def test_without_the_package_or_the_driver_the_cores_are_measured(nvml, monkeypatch):
    nvml.nvmlInit = fail
    for package in (nvml, None):
        monkeypatch.setitem(sys.modules, "pynvml", package)
        see_gpus(monkeypatch, 1)
        assert devices.gpu_use() == []
        assert set(Utilization()(Report(1, 100, {}, None, time=5.0))) == {"host_memory_gb", "cpu_utilization"}


@pytest.mark.slow
def test_the_energy_of_a_run_is_that_of_all_its_starts(tmp_path, monkeypatch, capsys):
    counter = [{"energy_kwh": 5.0}]  # of a GPU, as a fake of the driver reports it
    monkeypatch.setattr(built_in, "_MACHINE_SECS", -1.0)  # it is asked at each row
    monkeypatch.setattr(devices, "gpu_use", lambda: [dict(use) for use in counter])

    def use_energy(report):
        counter[0]["energy_kwh"] += 0.25

    def fall(report):
        raise SystemExit

    use_energy.every, fall.every = 2, 6
    endings = {6: pytest.raises(SystemExit), 8: contextlib.nullcontext()}
    for steps, ending in endings.items():
        trainer = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path), checkpoint_every=4, log_every=2))
        with ending:
            data = distloop.make_dataset(classification(33), 8)
            trainer.fit(data, steps=8, actions=[use_energy, *([fall] if steps == 6 else [])])
        assert ledger.read_progress(str(tmp_path))["energy_kwh"] == {6: 0.5, 8: 0.75}[steps]
    rows = {row["step"]: row["energy_kwh"] for row in distloop.read_metrics(tmp_path)}
    assert rows == {2: 0.0, 4: 0.25, 6: 0.5, 8: 0.75}  # 0.5 until the fall, which the second start begins with
    counter.clear()  # it goes on without GPUs
    trainer = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path), log_every=2))
    trainer.fit(distloop.make_dataset(classification(33), 8), steps=10)
    assert distloop.read_metrics(tmp_path)[-1]["energy_kwh"] == 0.75
    capsys.readouterr()
    assert report.main([str(tmp_path)]) == 0
    assert re.search(r"-  +-  +-  +0\.75 kWh$", capsys.readouterr().out, re.M)


def test_a_process_that_computes_uses_a_core_and_one_that_sleeps_none():
    measure = Utilization()
    began, end = time.monotonic(), time.process_time() + 0.2
    while time.process_time() < end:
        pass
    share = 0.2 / (time.monotonic() - began)  # of a core, which other processes may use too
    busy = measure(Report(1, 100, {}, None, time=5.0))["cpu_utilization"]
    time.sleep(0.2)
    idle = measure(Report(2, 100, {}, None, time=7.0))["cpu_utilization"]
    assert 0.5 * share / environment.count_cores() < busy <= 1.0 and idle < busy / 2


def test_operations_per_second_follow_from_the_examples_per_second():
    report = Report(10, 100, {"examples_per_sec": 50.0}, state=None)
    metrics = Utilization(flops_per_example=4e6, peak_flops=1e9)(report)
    assert metrics["model_flops_per_sec"] == 2e8 and metrics["model_flops_utilization"] == 0.2
    assert "model_flops_utilization" not in Utilization(4e6)(report)
    assert "model_flops_per_sec" not in Utilization()(report)


DATA = distloop.make_dataset(classification(16), 8)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int64", "bool"])
def test_a_checksum_changes_with_one_element(dtype):
    variable = tf.Variable(tf.cast([[0, 1], [1, 0]], dtype))
    before = int(checksum(variable))
    assert int(checksum(tf.Variable(variable))) == before
    variable.assign(tf.cast([[0, 1], [1, 1]], dtype))
    assert int(checksum(variable)) != before


@pytest.mark.slow
def test_a_variable_that_differs_between_replicas_ends_the_run_unsaved(tmp_path):
    def change(report):
        if report.step == 3:
            kernel = report.state.model.get_layer("logits").kernel.value
            report.state.strategy.experimental_local_results(kernel)[1].assign_add(tf.ones(kernel.shape))

    change.every = 3
    config = on(2, check_replicas_every=2, workdir=str(tmp_path), checkpoint_every=2, average_decay=0.9)
    trainer = distloop.Trainer(classifier(dropout=0.5, batch_norm="local"), config)
    message = "At step 4 model/net/logits/kernel and 1 more of replica 1 of worker 0 differs from that of the first"
    with pytest.raises(ValueError, match=message):  # the other one is its average
        trainer.fit(DATA, steps=8, actions=[change])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()) == ["2"]


def test_a_slot_that_differs_between_replicas_is_named():
    state = distloop.Trainer(classifier(), on(2)).state
    slot = state.optimizer.variables[-1].value
    slot.shards[1].assign(tf.ones(slot.shape))
    with pytest.raises(ValueError, match="At step 7 optimizer/momentum/.*/bias of replica 1 of worker 0 differs"):
        ReplicaComparison(state, without=state.seeds).require_equal(7, "why")


@pytest.mark.slow
def test_an_integer_that_the_forward_pass_writes_is_named_as_a_cause():
    def model_fn():
        weight, total = tf.Variable(1.0), tf.Variable(0, trainable=False)

        def loss_fn(batch, training):
            if training:
                total.assign_add(tf.reduce_sum(tf.cast(batch["label"], tf.int32)))
            return {"loss": weight * batch["x"][:, 0]}

        return distloop.ModelSpec([weight, total], keras.optimizers.SGD(0.1), loss_fn)

    trainer = distloop.Trainer(model_fn, on(2, check_replicas_every=1))
    with pytest.raises(ValueError, match="model/1 of replica 1 .* differs .*: the forward pass writes an integer"):
        trainer.fit(DATA, steps=1)
