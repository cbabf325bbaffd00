"""What `intra_op_threads=1` gains: distloop's step with it, over the step with the default.

    python -m experiments.benchmarks.settings

Every ratio is the median over pairs of fresh processes that run one after the other.
"""

import statistics

from absl import app, flags

from experiments.benchmarks import page, processes

PLACES = [("tiny", 1), ("tiny", 2), ("deep", 2), ("conv", 1), ("conv", 2)]  # workload, replicas
ROUNDS = flags.DEFINE_integer("rounds", 3, "Pairs of processes.", lower_bound=1)


def step_secs(workload: str, replicas: int, settings: dict) -> float:
    """Returns the median time of a step in a fresh process."""
    spec = {"part": "training", "workload": workload, "systems": ["distloop"], "rounds": 3, "turn_secs": 0.4}
    cell = processes.run_cell({**spec, "replicas": replicas, "settings": settings})
    if "failed" in cell:
        raise SystemExit(f"{workload} on {replicas}: {cell['failed']}")
    return statistics.median(cell["times"]["distloop"])


def main(_):
    rows = []
    for workload, replicas in PLACES:
        ratios = []
        for _ in range(ROUNDS.value):
            default_secs = step_secs(workload, replicas, {})
            ratios.append(step_secs(workload, replicas, {"intra_op_threads": 1}) / default_secs)
        rows.append([f"{workload} x{replicas}", f"{statistics.median(ratios):.2f}"])
    print(page.table(["workload x replicas", "intra_op_threads=1"], rows))


if __name__ == "__main__":
    app.run(main)
