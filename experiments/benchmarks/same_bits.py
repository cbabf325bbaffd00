"""What `virtual_replicas` costs: distloop's step with it, over the step without it that does the same work.

    python -m experiments.benchmarks.same_bits

With V virtual replicas on D devices, that is the step with V / D microbatches, which has other bits on other devices.
The two are in processes of their own, as graphs are optimized in one alone, and take turns.
"""

import contextlib
import io
import multiprocessing
import statistics
import time

from absl import app, flags

from experiments.benchmarks import page

WORKLOADS = flags.DEFINE_list("workloads", ["tiny", "conv", "lm"], "Workloads to measure.")
ROUNDS = flags.DEFINE_integer("rounds", 20, "Turns of each process.", lower_bound=1)
TURN_SECS = flags.DEFINE_float("turn_secs", 0.4, "Approximate seconds of a turn.", lower_bound=0)
PLACES = [(4, 1), (4, 2), (2, 2), (4, 4)]  # virtual replicas, devices


def serve(connection, name: str, devices: int, settings: dict) -> None:
    """Trains for as many steps as it is sent, and sends back the seconds of a step, until it is sent 0."""
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


@contextlib.contextmanager
def process(*arguments):
    """Yields a function that trains for some steps in a process of its own and returns the seconds of one."""
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    worker = context.Process(target=serve, args=(other, *arguments), daemon=True)
    worker.start()

    def step_secs(steps: int) -> float:
        connection.send(steps)
        return connection.recv()

    yield step_secs
    connection.send(0)
    worker.join()


def compare(name: str, virtual: int, devices: int) -> tuple[float, float]:
    """Returns the seconds of a step with virtual replicas, and their ratio to those without: medians."""
    with (
        process(name, devices, {"virtual_replicas": virtual}) as exact,
        process(name, devices, {"microbatches": virtual // devices}) as plain,
    ):
        counts = {run: max(1, int(TURN_SECS.value / (run(3) and run(10)))) for run in (exact, plain)}
        times = [(exact(counts[exact]), plain(counts[plain])) for _ in range(ROUNDS.value)]
    return statistics.median(a for a, _ in times), statistics.median(a / b for a, b in times)


def main(_):
    rows = []
    for name in WORKLOADS.value:
        for virtual, devices in PLACES:
            secs, ratio = compare(name, virtual, devices)
            rows.append([name, str(virtual), str(devices), f"{secs * 1e3:.2f}", f"{ratio:.2f}"])
            print(*rows[-1], flush=True)
    print(page.table(["workload", "virtual replicas", "devices", "ms a step", "over the step without them"], rows))


if __name__ == "__main__":
    app.run(main)
