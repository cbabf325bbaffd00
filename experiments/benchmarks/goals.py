"""What distloop is to reach: the time of its step over that of other systems in the same run. Lower is better."""

from typing import NamedTuple


class Goal(NamedTuple):
    """A figure that is acceptable, and the one that is aimed at."""

    goal: float
    stretch: float


NOT_SLOWER = Goal(1.00, 1.00)

# (workload, place) -> system -> distloop's step over that system's
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
