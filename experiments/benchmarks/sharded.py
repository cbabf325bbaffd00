"""What `shard_optimizer` saves: distloop's step and memory with it, over those without it.

    python -m experiments.benchmarks.sharded

The two runs are in processes of their own, with the virtual CPUs of the place, and take turns. Slots are measured where
their variables are, memory as the most that the process ever held, which includes half a gigabyte of TensorFlow's own.
"""

import contextlib
import io
import multiprocessing
import statistics
import time

from absl import app, flags

from experiments.benchmarks import page

WORKLOADS = flags.DEFINE_list("workloads", ["mlp41m"], "Workloads to measure.")
ROUNDS = flags.DEFINE_integer("rounds", 12, "Turns of each process.", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 3, "Steps of a turn.", lower_bound=1)
DEVICES = flags.DEFINE_list("devices", ["2", "4"], "Numbers of virtual CPUs.")


def serve(connection, name: str, devices: int, settings: dict) -> None:
    """Trains for as many steps as it is sent, and sends back the seconds of a step, until it is sent 0; then memory."""
    from experiments.benchmarks import with_distloop, workloads

    workload = workloads.WORKLOADS[name]
    trainer = with_distloop.make_trainer(workload, devices, "", console="quiet", **settings)
    dataset = workload.dataset(workload.global_batch_size(devices))
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
            sizes[part.device] = sizes.get(part.device, 0) + part.numpy().nbytes
    connection.send((peak_bytes() / 1e9, sizes))


def peak_bytes() -> int:
    """Returns the most memory that this program ever held; `getrusage` may return that of its parent."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


class Run:
    """A process that trains; `step_secs` takes some steps, `end` returns the most memory and slot bytes by device."""

    def __init__(self, *arguments):
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, *arguments), daemon=True)
        self._process.start()

    def _ask(self, steps: int):
        self._connection.send(steps)
        return self._connection.recv()

    def step_secs(self, steps: int) -> float:
        return self._ask(steps)

    def end(self) -> tuple[float, dict[str, int]]:
        answer = self._ask(0)
        self._process.join()
        return answer


def compare(name: str, devices: int) -> list[str]:
    """Returns a row of the table: medians over the turns."""
    runs = [Run(name, devices, {"shard_optimizer": is_sharded}) for is_sharded in (True, False)]
    for run in runs:
        run.step_secs(2)
    times = [[run.step_secs(STEPS.value) for run in runs] for _ in range(ROUNDS.value)]
    (peak, slots), (whole_peak, whole_slots) = (run.end() for run in runs)
    sharded, whole = (statistics.median(secs) for secs in zip(*times, strict=True))
    return [
        name,
        str(devices),
        f"{whole * 1e3:.0f}",
        f"{sharded * 1e3:.0f}",
        f"{statistics.median(a / b for a, b in times):.2f}",
        f"{max(slots.values()) / max(whole_slots.values()):.4f}",
        f"{sum(whole_slots.values()) / 1e9 - sum(slots.values()) / 1e9:.2f}",
        f"{whole_peak - peak:.2f} of {whole_peak:.2f}",
    ]


HEADER = ["workload", "devices", "ms a step", "sharded", "ratio", "slots of a device", "GB of slots less", "GB less"]


def main(_):
    rows = []
    for name in WORKLOADS.value:
        for devices in DEVICES.value:
            rows.append(compare(name, int(devices)))
            print(*rows[-1], flush=True)
    print(page.table(HEADER, rows))


if __name__ == "__main__":
    app.run(main)
