"""Speed-up on more devices against the size of the model, with a batch of the same size on each device.

    python -m experiments.benchmarks --only=scaling --devices=1,2,4                # virtual CPUs share the cores
    python -m experiments.benchmarks --only=scaling --devices=1,2 --kind=gpu     # has not run on a GPU

It writes SCALING.md and scaling.svg. Each workload on each number of devices is a process of its own, in which distloop
takes turns with the reduction alone: TensorFlow's sum, over the devices, of as many numbers as a step's gradients have,
those of small variables in one vector as in distloop. A step may hide a part of its reduction behind other work.
"""

import datetime
import math
import pathlib
import statistics
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from experiments.benchmarks import kept, page, processes, turns

PAGE = pathlib.Path(__file__).with_name("SCALING.md")
PICTURE = "scaling.svg"
SMALL_BYTES = 256 * 1024  # of a gradient: smaller ones are reduced in one vector
COLORS = ("#8c8c8c", "#0f7fd6", "#d55e00", "#009e73")  # by number of devices

_DEVICES = flags.DEFINE_list("devices", ["1", "2", "4"], "Numbers of devices, for `--only=scaling`.")
_KIND = flags.DEFINE_enum("kind", "cpu", ["cpu", "gpu"], "Kind of device, for `--only=scaling`.")


class Rows(NamedTuple):
    """Rows of the batch on each device."""

    cpu: int | None  # scaled down; None: too large for a CPU
    gpu: int


# widths 8000-4000-2000-500-300-1 of mlp41m, at 2,048 rows a GPU, begin the documents that distloop grew from
WORKLOADS = {
    "conv": Rows(64, 1024),
    "lm": Rows(16, 256),
    "resnet50": Rows(2, 64),
    "mlp41m": Rows(64, 2048),
    "lm70m": Rows(None, 32),
}
ON_CPUS = """\
Virtual CPUs share the machine's cores: the table shows what more devices cost, and no speed-up. At 1.00 a step on two
devices takes twice as long as on one, for twice as many rows."""


def reduction(strategy: Any, shapes: Sequence[Sequence[int]]) -> turns.System:
    """Returns a system whose steps only sum tensors of these shapes, in float32, over a strategy's replicas."""
    import tensorflow as tf

    sizes = [math.prod(shape) for shape in shapes]
    large = [size for size in sizes if 4 * size >= SMALL_BYTES]
    lengths = [*large, *([sum(sizes) - sum(large)] if len(large) < len(sizes) else [])]

    def mean(values: list[tf.Tensor]) -> list[tf.Tensor]:
        context = tf.distribute.get_replica_context()
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, values)
        return [value / context.num_replicas_in_sync for value in sums]  # the next sum needs this one

    @tf.function
    def reduce(steps: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
        values = strategy.run(lambda: [tf.fill([length], start) for length in lengths])
        for _ in tf.range(steps):
            values = strategy.run(mean, [values])
        # TensorFlow leaves out sums that no result needs.
        return tf.add_n([strategy.experimental_local_results(value)[0][0] for value in values])

    return turns.System(lambda steps: reduce(tf.constant(steps), tf.constant(1.0)).numpy())


def main(rounds: int, turn_secs: float) -> None:
    """Measures every workload on each number of devices, prints the table, and writes the page and its picture."""
    counts, cells = sorted({1, *map(int, _DEVICES.value)}), []
    for workload, rows in WORKLOADS.items():
        for count in counts if getattr(rows, _KIND.value) else ():
            place = {"replicas": count, "rows": getattr(rows, _KIND.value), "settings": {"device": _KIND.value}}
            spec = {"part": "scaling", "workload": workload, **place, "rounds": rounds, "turn_secs": turn_secs}
            begun = time.monotonic()
            cells.append({**spec, **processes.run_cell(spec)})
            print(f"{workload} on {count}: {time.monotonic() - begun:.0f} s", flush=True)
    found = [cell for cell in cells if "failed" not in cell]
    lines = [
        f"Not measured: {cell['workload']} on {cell['replicas']} ({cell['failed']})."
        for cell in cells
        if "failed" in cell
    ]
    here = kept.origin()
    about = f"{datetime.date.today()}, commit {here['commit']}, {here['machine']}; {rounds} rounds."
    text = render(found, about, _KIND.value) + "".join(f"\n{line}\n" for line in lines)
    print(text)
    PAGE.write_text(text, encoding="utf-8")
    draw(speed_ups(found), PAGE.with_name(PICTURE))


def speed_ups(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns what the page shows of each cell: examples a second, times one device, and the reduction's share.

    Args:
        cells: workload, replicas, rows on each, number of weights, and seconds a step and a reduction in each round.
    """
    rates = {
        (cell["workload"], cell["replicas"]): cell["replicas"]
        * cell["rows"]
        / statistics.median(cell["times"]["distloop"])
        for cell in cells
    }
    return [
        {
            "model": cell["workload"],
            "weights": cell["weights"],
            "rows": cell["rows"],
            "devices": cell["replicas"],
            "rate": rates[cell["workload"], cell["replicas"]],
            "speed_up": rates[cell["workload"], cell["replicas"]] / rates[cell["workload"], 1],
            "share": turns.median_ratio(cell["times"], "reduction", "distloop"),
        }
        for cell in sorted(cells, key=lambda cell: (cell["weights"], cell["replicas"]))
        if (cell["workload"], 1) in rates
    ]


def render(cells: Sequence[Mapping[str, Any]], about: str, device: str) -> str:
    """Returns the page."""
    rows = [
        [row["model"], f"{row['weights']:,}", f"{row['rows']:,}", str(row["devices"]), f"{row['rate']:,.0f}"]
        + [page.ratio(row["speed_up"]), page.ratio(row["share"])]
        for row in speed_ups(cells)
    ]
    header = ["model", "weights", "rows a device", "devices", "examples/s", "speed-up", "reduction, share of a step"]
    parts = [
        "# More devices, larger models",
        textwrap.fill(f"Written by `python -m experiments.benchmarks --only=scaling`; do not edit. {about}", 120),
        *([ON_CPUS] if device == "cpu" else []),
        "Each device has as many rows. The reduction is measured alone, in turns with the steps.",
        f"![The speed-up of each number of devices against the number of weights]({PICTURE})",
        page.table(header, rows),
    ]
    return "\n\n".join(parts)


def draw(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Writes the picture: the speed-up of each number of devices against the number of weights."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for color, count in zip(COLORS, sorted({row["devices"] for row in rows}), strict=False):
        here = [row for row in rows if row["devices"] == count]
        label = f"{count} device{'s' * (count > 1)}"
        axes.plot([row["weights"] for row in here], [row["speed_up"] for row in here], "o-", color=color, label=label)
    for i, row in enumerate(row for row in rows if row["devices"] == 1):
        below = (0, -40 - 14 * (i % 2))  # neighbours side by side
        axes.annotate(row["model"], (row["weights"], 1), below, textcoords="offset points", ha="center")
    axes.set(xscale="log", xlabel="trainable weights", ylabel="examples a second, times one device", ylim=(0, None))
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
