"""What the settings for threads and communication gain: distloop's step with each, over that with the defaults.

    python -m experiments.benchmarks.settings

Every figure is the median of ratios between fresh processes that follow each other.
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
COMMUNICATION = [{"communication": "ring"}, {"bytes_per_pack": 2**16}, {"bytes_per_pack": 2**20}]
# Workload, replicas or workers -> the settings that are tried there.
PLACES = {
    "replicas": ([("tiny", 1), ("tiny", 2), ("deep", 2), ("conv", 1), ("conv", 2)], THREADS),
    "workers": ([("tiny", 2), ("deep", 2), ("conv", 2), ("lm", 2)], COMMUNICATION),
}
ROUNDS = flags.DEFINE_integer("rounds", 3, "Processes for each setting.", lower_bound=1)


def step_secs(workload: str, kind: str, count: int, settings: dict) -> float:
    """Measures the median step of a fresh process, or of fresh workers."""
    spec = {"part": "training", "workload": workload, "systems": ["distloop"], "rounds": 3, "turn_secs": 0.4}
    spec |= {"replicas": count if kind == "replicas" else 1, "settings": settings}
    found = processes.run_cell(spec, count if kind == "workers" else 0)
    return statistics.median(found["times"]["distloop"])


def main(_):
    for kind, (places, tried) in PLACES.items():
        ratios: dict[tuple, list[float]] = {}
        for _ in range(ROUNDS.value):
            for workload, count in places:
                base = step_secs(workload, kind, count, {})
                for i, settings in enumerate(tried):
                    secs = step_secs(workload, kind, count, settings)
                    ratios.setdefault((i, workload, count), []).append(secs / base)
        rows = [
            [", ".join(f"{name}={value}" for name, value in settings.items())]
            + [f"{statistics.median(ratios[i, workload, count]):.2f}" for workload, count in places]
            for i, settings in enumerate(tried)
        ]
        print(page.table([kind, *[f"{workload} x{count}" for workload, count in places]], rows), flush=True)


if __name__ == "__main__":
    app.run(main)
