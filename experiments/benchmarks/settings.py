"""Thread settings: the time of distloop's step with each, over that with the defaults.

    python -m experiments.benchmarks.settings

Every figure is the median of ratios between consecutive fresh processes.
"""

import statistics

from absl import app, flags

from experiments.benchmarks import page, processes

THREADS = [
    {"inter_op_threads": 1},
    {"inter_op_threads": 4},
    {"intra_op_threads": 1},
    {"intra_op_threads": 1, "inter_op_threads": 2},
]
PLACES = [("tiny", 1), ("tiny", 2), ("deep", 2), ("conv", 1), ("conv", 2)]  # workload, replicas
ROUNDS = flags.DEFINE_integer("rounds", 3, "Processes per setting.", lower_bound=1)


def step_secs(workload: str, replicas: int, settings: dict) -> float:
    """Returns the median seconds per step of a fresh process."""
    spec = {"part": "training", "workload": workload, "systems": ["distloop"], "rounds": 3, "turn_secs": 0.4}
    cell = processes.run_cell({**spec, "replicas": replicas, "settings": settings})
    return statistics.median(cell["times"]["distloop"])


def main(_):
    ratios: dict[tuple, list[float]] = {}
    for _ in range(ROUNDS.value):
        for place in PLACES:
            base = step_secs(*place, {})
            for i, settings in enumerate(THREADS):
                ratios.setdefault((i, place), []).append(step_secs(*place, settings) / base)
    rows = [
        [", ".join(f"{name}={value}" for name, value in settings.items())]
        + [f"{statistics.median(ratios[i, place]):.2f}" for place in PLACES]
        for i, settings in enumerate(THREADS)
    ]
    print(page.table(["replicas", *[f"{workload} x{count}" for workload, count in PLACES]], rows), flush=True)


if __name__ == "__main__":
    app.run(main)
