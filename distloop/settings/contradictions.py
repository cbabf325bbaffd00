"""Contradictions: settings that do not go together, each with a sentence for the user; without TensorFlow.

    check(config)       # ValueError: steps=5 and epochs=2 were both given; ...

What one setting allows by itself stands at its field in `config`.
"""

import re
from collections.abc import Callable
from typing import Any

from distloop.settings import durations


def check(config: Any) -> None:
    """Checks the settings of a `Config` against each other.

    Raises:
        ValueError: if two of them contradict each other.
    """
    for is_wrong, message in _CONTRADICTIONS:
        if is_wrong(config):
            raise ValueError(message.format(config=config))


def _is_no_pattern(text: str) -> bool:
    """Returns whether a text is no regular expression."""
    try:
        re.compile(text)
    except re.error:
        return True
    return False


# Each row: a condition that is an error, and its message.
_CONTRADICTIONS: list[tuple[Callable[[Any], Any], str]] = [
    (
        lambda config: config.workdir != config.local_workdir and config.copy_every,
        "copy_every={config.copy_every} was given with workdir={config.workdir!r}, and copies in memory need one on a "
        "disk that all hosts share: give such a workdir, or copy_every=0.",
    ),
    (
        lambda config: config.workdir != config.local_workdir and "{time}" in config.workdir,
        "workdir={config.workdir!r} has {{time}} in it, which needs a directory on a disk to look for unfinished runs: "
        "write a name into the URL.",
    ),
    (
        lambda config: _is_no_pattern(config.recompute),
        "recompute={config.recompute!r} is no regular expression: give one that is found in the paths of layers, such "
        "as block.",
    ),
    (
        lambda config: config.replica_batch_size and config.batch_size,
        "batch_size={config.batch_size} and replica_batch_size={config.replica_batch_size} were both given; one "
        "follows from the other and the number of replicas: leave either out, or set it to 0.",
    ),
    (
        lambda config: not config.replica_batch_size and config.batch_size == 0,
        "batch_size=0 was given; a batch has 1 example or more: give batch_size or replica_batch_size.",
    ),
    (
        lambda config: config.steps and config.epochs,
        "steps={config.steps} and epochs={config.epochs} were both given; a run has one length: set either to 0.",
    ),
    (
        lambda config: sum(map(bool, (config.clip_norm, config.clip_variable_norm, config.clip_value))) > 1,
        "clip_norm={config.clip_norm:g}, clip_variable_norm={config.clip_variable_norm:g} and clip_value="
        "{config.clip_value:g} were given; gradients are clipped in one way: set the others to 0.",
    ),
    (
        lambda config: config.average_from and config.average_decay,
        "average_from={config.average_from} and average_decay={config.average_decay:g} were both given; there is one "
        "average of the weights: leave either out.",
    ),
    (
        lambda config: config.average_from and durations.parse(config.average_from).unit == "secs",
        "average_from={config.average_from!r} was given, a time, and weights depend on steps alone: give steps, "
        "epochs, examples or percents.",
    ),
    (
        lambda config: config.copy_every and not config.workdir,
        "copy_every={config.copy_every} was given without workdir, where a run goes on from its copies in memory: give "
        "workdir, or copy_every=0.",
    ),
    (
        lambda config: config.until and (config.steps or config.epochs),
        "until={config.until!r} was given beside steps={config.steps} and epochs={config.epochs}; a run has one "
        "length: give one of them.",
    ),
    (
        lambda config: str(config.until).endswith("%"),
        "until={config.until!r} was given, a share of the length that it sets: give steps, epochs, examples or a time.",
    ),
    (
        lambda config: config.locate_nonfinite and config.on_nonfinite == "skip",
        "locate_nonfinite=True and on_nonfinite=skip contradict each other; a skipped step is not diagnosed: give "
        "on_nonfinite=raise to locate, or locate_nonfinite=False to skip.",
    ),
    (
        lambda config: config.overfit_batches and config.limit_train_batches,
        "overfit_batches={config.overfit_batches} and limit_train_batches={config.limit_train_batches} were both "
        "given; each selects the batches to train on: set either to 0.",
    ),
    (
        lambda config: config.eager and config.jit_compile,
        "eager=True and jit_compile=True contradict each other; eager runs the step without the graph that jit_compile "
        "needs: set either to False.",
    ),
    (
        lambda config: config.eager and config.locate_nonfinite,
        "eager=True and locate_nonfinite=True contradict each other; eager runs the step without the graph that "
        "locate_nonfinite needs: set either to False.",
    ),
    (
        lambda config: config.on_divergence == "rollback" and not config.workdir,
        "on_divergence=rollback was given without a workdir, so there is no checkpoint to go back to: give a workdir "
        "too.",
    ),
    (
        lambda config: config.init_rename and not config.init_from,
        "init_rename={config.init_rename!r} was given without init_from, whose names it is for: add it.",
    ),
    (
        lambda config: config.max_secs and not config.workdir,
        "max_secs={config.max_secs:g} was given without a workdir, so the run would be lost: give a workdir too.",
    ),
    (
        lambda config: config.profile and not config.workdir,
        "profile={config.profile!r} was given without a workdir, so the profile would be lost: give a workdir too.",
    ),
    (
        lambda config: config.strategy == "mirrored" and config.num_stages > 1,
        "strategy=mirrored and num_stages={config.num_stages} contradict each other; mirroring copies the whole "
        "network to each device: give strategy=none for stages on the devices of this machine.",
    ),
    (
        lambda config: config.num_devices and 1 < config.num_stages != config.num_devices,
        "num_stages={config.num_stages} and num_devices={config.num_devices} were given; each stage takes one device: "
        "leave num_devices out, or give num_devices={config.num_stages}.",
    ),
    (
        lambda config: config.num_stages > 1 and config.executor == "serial",
        "executor=serial and num_stages={config.num_stages} contradict each other; stages would wait for each other: "
        "give executor=auto.",
    ),
    (
        lambda config: config.num_stages > 1 and config.jit_compile,
        "jit_compile=True and num_stages={config.num_stages} were given, but XLA compiles for one device: leave either "
        "out.",
    ),
    (
        lambda config: config.num_stages > 1 and config.shard_optimizer,
        "shard_optimizer=True and num_stages={config.num_stages} were given; the slots of a stage are on its device "
        "alone already: leave shard_optimizer out.",
    ),
    (
        lambda config: config.virtual_replicas.bit_count() > 1,
        "virtual_replicas={config.virtual_replicas} was given; its sums are added in pairs, so it is a power of two: "
        "give 2, 4, 8 and so on.",
    ),
    (
        lambda config: config.virtual_replicas and config.num_devices and config.virtual_replicas % config.num_devices,
        "virtual_replicas={config.virtual_replicas} and num_devices={config.num_devices} were given; each device runs "
        "as many virtual replicas as the others: give a number of devices that divides {config.virtual_replicas}.",
    ),
    (
        lambda config: config.virtual_replicas and config.intra_op_threads > 1,
        "virtual_replicas={config.virtual_replicas} and intra_op_threads={config.intra_op_threads} were given, but the "
        "bits of a gradient depend on the threads within an operation, of which there is 1 then: leave either out.",
    ),
    (
        lambda config: config.virtual_replicas and config.jit_compile,
        "virtual_replicas={config.virtual_replicas} and jit_compile=True were given, but XLA promises no bits: leave "
        "either out.",
    ),
    (
        lambda config: config.virtual_replicas and config.microbatches == "auto",
        "virtual_replicas={config.virtual_replicas} and microbatches=auto were given, but the bits would depend on a "
        "device's memory: give a number of microbatches.",
    ),
    (
        lambda config: config.strategy == "none" and config.num_devices > 1 and config.num_stages == 1,
        "strategy=none and num_devices={config.num_devices} contradict each other; without a strategy there is one "
        "device: give strategy=mirrored or num_devices=1.",
    ),
]
