"""Contradictions: settings that do not go together, each with a sentence for the user; without TensorFlow.

    check(config)       # ValueError: steps=5 and epochs=2 were both given; ...

What one setting allows by itself stands at its field in `config`.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable
from typing import Any

from distloop.settings import durations

# A setting, another that it needs, and why. A name stands for each value but the default, `name=value` for one value.
NEEDS = [
    ("max_secs", "a workdir", "so the run would be lost"),
    ("on_divergence=rollback", "a workdir", "so there is no checkpoint to go back to"),
    ("profile", "a workdir", "so the profile would be lost"),
    ("keep_every", "a workdir", "so no checkpoint would be kept"),
    ("histograms_every", "a workdir", "so the histograms would be lost"),
    ("graph=always", "a workdir", "so the graph would be lost"),
    *((name, "a workdir", "so there is no checkpoint") for name in ("evaluate", "predict")),
    *((name, "on_divergence=rollback", "so a run never goes back") for name in ("max_rollbacks", "loss_jump")),
    ("init_rename", "init_from", "whose names it is for"),
]

# Settings by which `fit` does something else than to train.
_IN_PLACE = ("audit", "memory", "autotune_batch", "replay", "fast_dev_run", "evaluate", "predict")
_ONE_VERB = "each takes the place of training: leave either out"

_CLIPPING = ("clip_norm", "clip_variable_norm", "clip_value")
# Two settings that exclude each other, and why.
_PAIRS = [
    ("steps", "epochs", "a run has one length: set either to 0"),
    *(("until", other, "a run has one length: give one of them") for other in ("steps", "epochs")),
    *((*pair, _ONE_VERB) for pair in itertools.combinations(_IN_PLACE, 2) if pair != ("evaluate", "predict")),
    *((*pair, "gradients are clipped in one way: set either to 0") for pair in itertools.combinations(_CLIPPING, 2)),
    ("average_from", "average_decay", "there is one average of the weights: leave either out"),
    ("overfit_batches", "limit_train_batches", "each selects the batches to train on: set either to 0"),
    ("locate_nonfinite", "on_nonfinite=skip", "a skipped step is not diagnosed: leave either out"),
    ("eager", "jit_compile", "eager runs the step without the graph that jit_compile needs: leave either out"),
    ("eager", "locate_nonfinite", "eager runs the step without the graph that is searched: set either to False"),
    ("eager", "max_traces", "eager runs the step without a trace: leave either out"),
    ("eager", "executor", "eager runs the step without the graph that an executor runs: leave either out"),
    ("executor", "jit_compile=loop", "XLA runs the operations itself: leave executor out"),
    ("num_stages", "executor=serial", "stages would wait for each other: give executor=auto"),
    ("num_stages", "jit_compile", "XLA compiles for one device: leave either out"),
    ("num_stages", "shard_optimizer", "a stage's slots are on its device alone already: leave shard_optimizer out"),
    ("virtual_replicas", "jit_compile=pass", "XLA promises no bits: leave either out"),
    ("device_shares", "replica_batch_size", "shares cut the batch unequally: give batch_size in its place"),
    ("device_shares", "virtual_replicas", "each device runs as many virtual replicas as the others: leave either out"),
    ("locate_nonfinite", "jit_compile=loop", "XLA has no operations that could be searched: leave either out"),
]

# A condition that is an error, and its message.
_OTHERS: list[tuple[Callable[[Any], Any], str]] = [
    (
        lambda config: _is_no_pattern(config.recompute),
        "recompute={config.recompute!r} is no regular expression: give one that is found in the paths of layers, such "
        "as block.",
    ),
    (
        lambda config: config.replica_batch_size and config.batch_size,  # the default, too, where it was given
        "batch_size={config.batch_size} and replica_batch_size={config.replica_batch_size} were both given; one "
        "follows from the other and the number of replicas: leave either out, or set it to 0.",
    ),
    (
        lambda config: not config.replica_batch_size and config.batch_size == 0,
        "batch_size=0 was given; a batch has 1 example or more: give batch_size or replica_batch_size.",
    ),
    (
        lambda config: config.average_from and durations.parse(config.average_from).unit == "secs",
        "average_from={config.average_from!r} was given, a time, and weights depend on steps alone: give steps, "
        "epochs, examples or percents.",
    ),
    (
        lambda config: str(config.until).endswith("%"),
        "until={config.until!r} was given, a fraction of the length that it sets: give steps, epochs or a time.",
    ),
    (
        lambda config: config.num_devices % config.num_stages,
        "num_stages={config.num_stages} and num_devices={config.num_devices} were given; each stage of a replica takes "
        "one device: leave num_devices out, or give a multiple of {config.num_stages}.",
    ),
    (
        lambda config: config.strategy == "mirrored" and 1 < config.num_stages >= config.num_devices,
        "strategy=mirrored, num_stages={config.num_stages} and num_devices={config.num_devices} were given, which is "
        "one replica: give a larger multiple of {config.num_stages} as num_devices, or leave strategy out.",
    ),
    (
        lambda config: config.virtual_replicas.bit_count() > 1,
        "virtual_replicas={config.virtual_replicas} was given; its sums are added in pairs, so it is a power of two: "
        "give 2, 4, 8 and so on.",
    ),
    (
        lambda c: c.virtual_replicas and c.num_devices and c.virtual_replicas % (c.num_devices // c.num_stages),
        "virtual_replicas={config.virtual_replicas} and num_devices={config.num_devices} were given; each device runs "
        "as many virtual replicas as the others: give a number of devices that divides {config.virtual_replicas}.",
    ),
    (
        lambda config: config.virtual_replicas and config.intra_op_threads > 1,
        "virtual_replicas={config.virtual_replicas} and intra_op_threads={config.intra_op_threads} were given, but the "
        "bits of a gradient depend on the threads within an operation, of which there is 1 then: leave either out.",
    ),
    (
        lambda config: config.strategy == "none" and config.num_devices > config.num_stages,
        "strategy=none and num_devices={config.num_devices} contradict each other; without a strategy there is one "
        "replica: give strategy=mirrored or num_devices={config.num_stages}.",
    ),
]


def check(config: Any) -> None:
    """Checks the settings of a `Config` against each other.

    Raises:
        ValueError: if two of them contradict each other.
    """
    for is_wrong, message in _OTHERS:
        if is_wrong(config):
            raise ValueError(message.format(config=config))
    defaults = {field.name: field.metadata["default"] for field in dataclasses.fields(config)}

    def given(setting: str) -> str:
        """Returns `name=value` of a setting of the tables above, or nothing if it was not given."""
        name, _, wanted = setting.partition("=")
        value = getattr(config, name)
        is_given = str(value) == wanted if wanted else value != defaults[name]
        return f"{name}={f'{value:g}' if isinstance(value, float) else value}" if is_given else ""

    for one, other, reason in _PAIRS:
        if given(one) and given(other):
            raise ValueError(f"{given(one)} and {given(other)} were both given; {reason}.")
    for setting, needed, reason in NEEDS:
        if given(setting) and not given(needed.removeprefix("a ")):
            raise ValueError(f"{given(setting)} was given without {needed}, {reason}: give {needed}, too.")


def _is_no_pattern(text: str) -> bool:
    """Returns whether a text is no regular expression."""
    try:
        return not re.compile(text)
    except re.error:
        return True
