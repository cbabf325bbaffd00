"""Goals: the time of distloop's step over that of other systems in the same run. Lower is better."""

from typing import NamedTuple


class Goal(NamedTuple):
    """An acceptable figure, and a better one to aim for."""

    goal: float
    stretch: float


NOT_SLOWER = Goal(1.00, 1.00)

# (workload, place) -> system -> time of distloop's step over that system's
STEPS: dict[tuple[str, str], dict[str, Goal]] = {
    ("tiny", "1 replica"): {"bare": Goal(1.40, 1.20), "handloop": Goal(1.10, 0.95)},
    ("tiny", "2 replicas"): {"bare": Goal(0.85, 0.65), "handloop": Goal(0.55, 0.42)},
    ("tiny", "4 replicas"): {"bare": Goal(0.75, 0.60), "handloop": Goal(0.55, 0.42)},
    ("tiny", "2 workers"): {"bare": Goal(1.15, 1.05), "handloop": Goal(0.55, 0.45)},
    ("deep", "1 replica"): {"bare": Goal(1.15, 1.05), "handloop": Goal(1.05, 1.00)},
    ("deep", "2 replicas"): {"bare": Goal(1.05, 0.90), "handloop": Goal(0.92, 0.80)},
    ("deep", "4 replicas"): {"bare": Goal(1.05, 0.90), "handloop": Goal(0.90, 0.78)},
    ("deep", "2 workers"): {"bare": Goal(1.15, 1.05), "handloop": Goal(0.68, 0.60)},
    ("conv", "1 replica"): {"bare": Goal(1.05, 1.00), "handloop": NOT_SLOWER},
    ("conv", "2 replicas"): {"bare": Goal(1.05, 1.00), "handloop": NOT_SLOWER},
    ("conv", "4 replicas"): {"bare": Goal(1.05, 1.00), "handloop": NOT_SLOWER},
    ("lm", "1 replica"): {"bare": Goal(1.04, 1.02), "handloop": NOT_SLOWER},
    ("lm", "2 replicas"): {"bare": Goal(1.04, 1.02), "handloop": NOT_SLOWER},
    ("lm", "4 replicas"): {"handloop": NOT_SLOWER},
    ("mlp41m", "1 replica"): {"bare": Goal(1.03, 1.00), "handloop": NOT_SLOWER},
    ("mlp41m", "2 replicas"): {"bare": Goal(0.95, 0.82), "handloop": NOT_SLOWER},
    ("mlp41m", "4 replicas"): {"handloop": NOT_SLOWER},
}

# Monitoring level -> the level below it, and the ratio of their step times.
MONITORING = {"on": ("off", 1.03), "histograms": ("on", 1.05)}

# The data of `evaluate` and `predict`.
EXAMPLES, BATCH_SIZE = 2_000, 32

# (workload, place) -> examples per second of a whole call. Higher is better.
EVALUATE = {
    ("tiny", "1 replica"): 65_000,
    ("tiny", "2 replicas"): 40_000,
    ("conv", "1 replica"): 15_000,
    ("conv", "2 replicas"): 15_000,
}
PREDICT = {
    ("tiny", "1 replica"): 60_000,
    ("tiny", "2 replicas"): 25_000,
    ("conv", "1 replica"): 17_000,
    ("conv", "2 replicas"): 12_000,
}

# place -> seconds that a call of `fit` or `evaluate` takes in addition to its steps
BEYOND_SECS = {"1 replica": 0.030, "2 replicas": 0.100, "4 replicas": 0.100}

# The time until training continues after a save, over that of `CheckpointManager.save`.
SAVE = Goal(1.10, 1.00)

# Seconds to the first step, and peak memory, over those of the hand-written loop with a call per step.
START = Goal(1.10, 1.10)
MEMORY = Goal(1.05, 1.05)

# workload -> the speed of each of two workers over that of one alone. Higher is better.
TWO_WORKERS = {"conv": 0.93, "lm": 0.90}
