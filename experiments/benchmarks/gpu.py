"""One GPU: distloop's step next to other loops, Keras, JAX and PyTorch, in turns; prints a table.

    python -m experiments.benchmarks.gpu --workloads=tiny,lm70m --systems=bare,keras,torch,distloop

Each workload is a process of its own. JAX and PyTorch are measured where they are installed. All compute in float32,
with products in TF32, the default of TensorFlow and JAX. Rows in bfloat16 are of TensorFlow alone; in those with XLA,
it compiles distloop's step and Keras's. It was tried on a CPU in the GPU's place, and has not run on a GPU.
"""

import importlib.util
import json
import statistics
import time

from absl import app, flags

from experiments.benchmarks import page, peers, processes, turns

WORKLOADS = ["tiny", "conv", "lm", "lm70m", "resnet50"]
VARIANTS = {"in bfloat16": {"precision": "mixed_bfloat16"}, "with XLA": {"jit_compile": True}}
PLACES = WORKLOADS + [f"{name} {variant}" for name in ("lm70m", "resnet50") for variant in VARIANTS]
SYSTEMS = ["bare", "handloop", "hand", "keras", "jax", "scan", "keras_jax", "torch", "torch_compiled", "lightning"]

_WORKLOADS = flags.DEFINE_list("workloads", PLACES, "Workloads to measure.")
_SYSTEMS = flags.DEFINE_list("systems", SYSTEMS, "Systems to measure beside distloop.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns per system.", lower_bound=1)
_TURN_SECS = flags.DEFINE_float("turn_secs", 0.5, "Approximate seconds per turn.", lower_bound=0)


def can_measure(system: str, place: str) -> bool:
    """Returns whether a system is installed, and has the workload."""
    if system not in peers.SYSTEMS:
        return True
    is_large = system == "scan" and place == "resnet50"  # 50 batches at once, which are 2 GB
    return place in WORKLOADS and not is_large and importlib.util.find_spec(peers.SYSTEMS[system]) is not None


def main(_):
    rows = []
    for place in _WORKLOADS.value:
        begun = time.monotonic()
        names = [*(name for name in _SYSTEMS.value if can_measure(name, place)), "distloop"]
        workload, _, variant = place.partition(" ")
        settings = {"device": "gpu", **VARIANTS.get(variant, {})}
        spec = {"part": "training", "workload": workload, "replicas": 1, "settings": settings}
        cell = processes.run_cell({**spec, "systems": names, "rounds": _ROUNDS.value, "turn_secs": _TURN_SECS.value})
        print(f"{place}: {time.monotonic() - begun:.0f} s {json.dumps(cell)}", flush=True)
        times = cell.get("times", {})
        ratios = [turns.median_ratio(times, name, "distloop") for name in _SYSTEMS.value]
        step = f"{1e3 * statistics.median(times['distloop']):.3g} ms" if times else cell["failed"]
        rows.append([place, step, *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    print(page.table(["workload", "step of distloop", *_SYSTEMS.value], rows))


if __name__ == "__main__":
    app.run(main)
