"""What `shard_optimizer` saves: distloop's step and memory with it, over those without it.

    python -m experiments.benchmarks.sharded [--workers=2 --devices=1]

The two runs are in processes of their own, with the virtual CPUs of the place, and take turns. Slots are measured where
their variables are, memory as the most that the process ever held, which includes half a gigabyte of TensorFlow's own.
"""

import contextlib
import io
import json
import multiprocessing
import os
import statistics
import time
import unittest.mock

from absl import app, flags

from experiments.benchmarks import page, processes

WORKLOADS = flags.DEFINE_list("workloads", ["mlp41m"], "Workloads to measure.")
ROUNDS = flags.DEFINE_integer("rounds", 12, "Turns of each process.", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 3, "Steps of a turn.", lower_bound=1)
DEVICES = flags.DEFINE_list("devices", ["2", "4"], "Numbers of virtual CPUs of a worker.")
WORKERS = flags.DEFINE_integer(
    "workers", 1, "Workers, with a core and a thread each if there are several.", lower_bound=1
)


def serve(connection, worker: int, name: str, devices: int, replicas: int, settings: dict) -> None:
    """Trains for as many steps as it is sent, and sends back the seconds of a step, until it is sent 0; then memory."""
    if replicas > devices:
        os.sched_setaffinity(0, {worker % os.cpu_count()})
    from experiments.benchmarks import with_distloop, workloads

    workload = workloads.WORKLOADS[name]
    trainer = with_distloop.make_trainer(workload, devices, "", console="quiet", **settings)
    dataset = workload.dataset(workload.global_batch_size(replicas))
    while steps := connection.recv():
        ends: list[float] = []

        def note(report, ends=ends):
            ends.append(time.perf_counter())

        note.every = trainer.step + 1  # after the first step, which starts the data, and at the end
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(dataset, steps=trainer.step + steps + 1, actions=[note])
        connection.send((ends[-1] - ends[0]) / steps)
    sizes: dict[str, int] = {}
    for variable in trainer.optimizer.variables:
        for part in trainer.strategy.experimental_local_results(variable.value):
            device = f"{worker} {part.device}"
            sizes[device] = sizes.get(device, 0) + part.numpy().nbytes
    connection.send((peak_bytes() / 1e9, sizes))


def peak_bytes() -> int:
    """Returns the most memory that this program ever held; `getrusage` may return that of its parent."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


class Run:
    """Workers that train; `step_secs` takes some steps, `end` returns one's most memory, and slot bytes by device."""

    def __init__(self, port: int, workers: int, name: str, devices: int, settings: dict):
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(workers)]
        self._connections = [own for own, _ in pairs]
        addresses = [f"localhost:{port + i}" for i in range(workers)]
        for i, (_, other) in enumerate(pairs):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}}
            variables = {"TF_CONFIG": json.dumps(config), **processes.ONE_THREAD} if workers > 1 else {}
            with unittest.mock.patch.dict(os.environ, variables):
                arguments = (other, i, name, devices, workers * devices, settings)
                context.Process(target=serve, args=arguments, daemon=True).start()

    def _ask(self, steps: int) -> list:
        for connection in self._connections:
            connection.send(steps)
        return [connection.recv() for connection in self._connections]

    def step_secs(self, steps: int) -> float:
        return self._ask(steps)[0]

    def end(self) -> tuple[float, dict[str, int]]:
        peaks, sizes = zip(*self._ask(0), strict=True)
        return max(peaks), {device: size for of_worker in sizes for device, size in of_worker.items()}


def compare(name: str, workers: int, devices: int) -> list[str]:
    """Returns a row of the table: medians over the turns."""
    runs = [
        Run(20_200 + 100 * is_sharded, workers, name, devices, {"shard_optimizer": is_sharded})
        for is_sharded in (True, False)
    ]
    for run in runs:
        run.step_secs(2)
    times = [[run.step_secs(STEPS.value) for run in runs] for _ in range(ROUNDS.value)]
    (peak, slots), (whole_peak, whole_slots) = (run.end() for run in runs)
    sharded, whole = (statistics.median(secs) for secs in zip(*times, strict=True))
    return [
        name,
        f"{workers} x {devices}" if workers > 1 else str(devices),
        f"{whole * 1e3:.0f}",
        f"{sharded * 1e3:.0f}",
        f"{statistics.median(a / b for a, b in times):.2f}",
        f"{max(slots.values()) / max(whole_slots.values()):.4f}",
        f"{(sum(whole_slots.values()) - sum(slots.values())) / workers / 1e9:.2f}",
        f"{whole_peak - peak:.2f} of {whole_peak:.2f}",
    ]


HEADER = ["workload", "devices", "ms a step", "sharded", "ratio", "slots of a device", "GB of slots less", "GB"]


def main(_):
    rows = []
    for name in WORKLOADS.value:
        for devices in DEVICES.value:
            rows.append(compare(name, WORKERS.value, int(devices)))
            print(*rows[-1], flush=True)
    print(page.table(HEADER, rows))


if __name__ == "__main__":
    app.run(main)
