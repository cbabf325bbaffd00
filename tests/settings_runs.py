"""Runs with settings away from their defaults, on virtual CPUs of a fork, and what is wrong with how each ends."""

import functools
import os
import re
import tempfile

import keras
import numpy as np

import distloop
from tests.forked import run_on_devices

SETS_OF_A_PROCESS = 20
BASE = {"device": "cpu", "console": "quiet", "steps": 6, "batch_size": 10}
ONE_OF = [("steps", "epochs", "until"), ("batch_size", "replica_batch_size")]  # the base has the first of each
TOLERANCE = 2e-5  # relative; sums in another order, over 6 steps
TOLERANCES = {"precision": 3e-2}  # bfloat16 has 8 bits, and its sums are added in another order
WORKDIR, WEIGHTS = "<workdir>", "<weights>"  # stand for paths, which each run has of its own

SHAPES = {"hidden/kernel": (8, 6), "hidden/bias": (6,), "logits/kernel": (6, 4), "logits/bias": (4,)}

TRAINS, EXITS, IS_REFUSED = "trains", "exits", "is refused"


class Case:
    """A value of a setting away from its default.

    Attributes:
        value: the value.
        others: settings that the setting needs.
        changes: whether the setting changes numbers by intent.
        ends: how a run with the setting alone ends, on one device and on two.
        evaluates: whether the setting is about evaluations, too: of other runs, `make wide` alone evaluates.
    """

    def __init__(self, value, *, changes=False, ends=TRAINS, ends_on_two=None, evaluates=False, **others):
        self.value, self.others, self.changes, self.ends = value, others, changes, (ends, ends_on_two or ends)
        self.evaluates = evaluates


CASES = {
    "workdir": Case(WORKDIR),
    "steps": Case(5, changes=True),
    "epochs": Case(2, changes=True),
    "until": Case("50 examples", changes=True),
    "batch_size": Case(7, changes=True),
    "replica_batch_size": Case(12, changes=True),  # divided among the replicas
    "seed": Case(3, changes=True),
    "max_secs": Case(1000.0, workdir=WORKDIR),
    "strategy": Case("mirrored"),
    "device": Case("cpu"),
    "num_devices": Case(3),
    "device_shares": Case([2, 1], ends=IS_REFUSED, ends_on_two=TRAINS, evaluates=True),
    "virtual_replicas": Case(4, evaluates=True),
    "num_stages": Case(2, num_devices=0, evaluates=True),
    "intra_op_threads": Case(1),
    "microbatches": Case(3),
    "recompute": Case("hidden"),
    "clip_norm": Case(0.05, changes=True),
    "clip_variable_norm": Case(0.05, changes=True),
    "clip_value": Case(0.01, changes=True),
    "average_decay": Case(0.9, evaluates=True),
    "average_from": Case("50 %", evaluates=True),
    "shard_optimizer": Case(True),
    "precision": Case("mixed_bfloat16", changes=True, evaluates=True),
    "deterministic": Case(True),
    "jit_compile": Case(True, evaluates=True),
    "executor": Case("serial", ends_on_two=IS_REFUSED),
    "steps_per_loop": Case(2, evaluates=True),
    "eval_every": Case(2, evaluates=True),
    "eval_first": Case(True, evaluates=True),
    "checkpoint_every": Case(2, evaluates=True),
    "keep_checkpoints": Case(1),
    "keep_every": Case(3, workdir=WORKDIR),
    "resume": Case(False),
    "init_from": Case(WEIGHTS, changes=True),
    "init_rename": Case("(.*)=>\\1", changes=True, init_from=WEIGHTS),
    "console": Case("lines"),
    "log_every": Case(2),
    "gradient_noise_every": Case(2, microbatches=2),
    "histograms_every": Case(2, workdir=WORKDIR),
    "graph": Case("always", workdir=WORKDIR),
    "profile": Case("2:4", workdir=WORKDIR),
    "peak_flops": Case(1e12),
    "on_nonfinite": Case("skip"),
    "unread_entries": Case("refuse"),
    "empty_batches": Case("ignore"),
    "max_traces": Case(3),
    "locate_nonfinite": Case(True),
    "on_divergence": Case("rollback", workdir=WORKDIR),
    "loss_jump": Case(20.0, on_divergence="rollback", workdir=WORKDIR),
    "check_replicas_every": Case(2),
    "max_rollbacks": Case(1, on_divergence="rollback", workdir=WORKDIR),
    "start_timeout": Case(100.0),
    "hang_timeout": Case(300.0),
    "audit": Case(True, ends=EXITS),
    "memory": Case(True, ends=EXITS),
    "replay": Case(2, ends=IS_REFUSED, workdir=WORKDIR),  # there is no run to replay
    "evaluate": Case("newest", ends=IS_REFUSED, workdir=WORKDIR),  # there is no checkpoint
    "predict": Case("predictions", ends=IS_REFUSED, workdir=WORKDIR),
    "fast_dev_run": Case(True, changes=True),
    "eager": Case(True, evaluates=True),
    "full_tracebacks": Case(True),
    "overfit_batches": Case(2, changes=True),
    "limit_train_batches": Case(3, changes=True),
    "limit_eval_batches": Case(1, evaluates=True),
    "autotune_batch": Case(True, ends=EXITS),
}
SETTINGS = sorted(CASES)
LOOP = "jit_compile=loop"  # a second value of a setting, by which another loop trains
CASES[LOOP] = Case("loop", ends_on_two=IS_REFUSED, evaluates=True)


def settings_of(names, devices, directory):
    """Returns the arguments of `Config` for settings by name."""
    settings = {**BASE, "num_devices": devices}
    for first, *others in ONE_OF:
        if not {first, *others}.isdisjoint(names):
            del settings[first]
    for name in names:
        settings |= CASES[name].others
    settings |= {name.partition("=")[0]: CASES[name].value for name in names}
    if "replica_batch_size" in names:
        settings["replica_batch_size"] //= settings.get("virtual_replicas") or settings["num_devices"] or 1
    paths = {WORKDIR: os.path.join(directory, "run"), WEIGHTS: os.path.join(directory, "weights.npz")}
    return {name: paths.get(value, value) if isinstance(value, str) else value for name, value in settings.items()}


def rows(count=33):
    generator = np.random.default_rng(0)
    return {"x": generator.normal(size=(count, 8)).astype("float32"), "label": np.arange(count) % 4}


def model_fn(made, num_stages=1):
    """Appends the Keras model to a list; a pipeline of its stages has its variables."""
    layers = [keras.Input((8,)), keras.layers.Dense(6, "tanh", name="hidden"), keras.layers.Dense(4, name="logits")]
    model = keras.Sequential(layers, name="net")
    made.append(model)
    if num_stages > 1:
        model = distloop.split(model, num_stages)

    def loss_fn(batch, training):
        logits = model(batch["x"], training=training)
        loss = keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)
        return {"loss": loss}  # [B]

    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    return distloop.ModelSpec(model, optimizer, loss_fn, predict_fn=lambda batch: model(batch["x"], training=False))


def outcome_of(names, devices, is_evaluated=False):
    """Returns how a run ends, with its weights by path or the words of its end."""
    with tempfile.TemporaryDirectory() as directory:
        generator = np.random.default_rng(1)
        weights = {f"net/{name}": generator.normal(size=shape).astype("float32") for name, shape in SHAPES.items()}
        np.savez(os.path.join(directory, "weights.npz"), **weights)
        trainer, made = None, []
        try:
            settings = distloop.Config(**settings_of(names, devices, directory))
            trainer = distloop.Trainer(functools.partial(model_fn, made, settings.num_stages), settings)
            trainer.fit(rows(), evals={"test": rows(15)} if is_evaluated else None)
        except SystemExit as ended:
            return EXITS, f"{ended.code}"
        except ValueError as error:
            steps = 0 if trainer is None else trainer.step
            return (IS_REFUSED, str(error)) if steps == 0 else ("fails", f"at step {steps}: {error}")
        except Exception as error:  # a fault, which the test prints
            return "fails", f"{type(error).__name__}: {error}"
        named = {"/".join(v.path.split("/")[-2:]): np.array(v) for v in made[-1].trainable_variables}
        return TRAINS, named


def by_intent(names):
    """Returns the settings of a run that change numbers by intent."""
    return tuple(name for name in names if CASES[name].changes)


found = {}  # outcomes of this process by settings


def reference(names):
    """Returns the outcome of the run with these settings alone, on one device."""
    if names not in found:
        found[names] = outcome_of(names, 1)
    return found[names]


def references(all_names):
    return {names: reference(names) for names in all_names}


def fault_of(names, outcome):
    """Returns what is wrong with an outcome; empty: nothing."""
    end, result = outcome
    if end == IS_REFUSED:
        return "" if re.fullmatch(r"[^\n]{20,400}\.", result) else f"no sentence: {result}"
    if end == EXITS:
        return "" if result in "01" and any(EXITS in CASES[name].ends for name in names) else f"exit code {result}"
    if end != TRAINS:
        return result
    end, wanted = reference(by_intent(names))
    if end != TRAINS:
        return f"without the other settings: {wanted}"
    tolerance = max([TOLERANCE, *(TOLERANCES.get(name, 0) for name in by_intent(names))])
    if wanted.keys() != result.keys():
        return f"variables {sorted(result)} in place of {sorted(wanted)}"
    apart = max(np.abs(result[name] - wanted[name]).max() / np.abs(wanted[name]).max() for name in wanted)
    return "" if apart <= tolerance else f"weights differ by {apart:.1e}"


def run_all(sets, is_wide, first):
    """Runs each set of settings, in a process with four virtual CPUs.

    Args:
        sets: names of settings.
        is_wide: whether each run evaluates.
        first: outcomes of a process before.

    Returns:
        how each run ends, and what is wrong with it, on one device and on two.
    """
    found.update(first)
    ends = []
    for devices in (1, 2):
        outcomes = [outcome_of(names, devices, is_wide or any(CASES[n].evaluates for n in names)) for names in sets]
        ends.append([(outcome[0], fault_of(names, outcome)) for names, outcome in zip(sets, outcomes, strict=True)])
    return ends


@functools.cache
def in_a_process(sets, is_wide):
    """Returns what `run_all` does in a fork; deterministic runs are compared with those of another one."""
    needed = {by_intent(names) for names in sets if "deterministic" in names}
    first = run_on_devices(references, 4, sorted(needed)) if needed else {}
    return run_on_devices(run_all, 4, sets, is_wide, first)


def chunks(sets):
    """Splits sets of settings into those of a process; deterministic operations take one of their own."""
    kinds = [[names for names in sets if ("deterministic" in names) == is_on] for is_on in (False, True)]
    parts = [kind[i : i + SETS_OF_A_PROCESS] for kind in kinds for i in range(0, len(kind), SETS_OF_A_PROCESS)]
    return [tuple(part) for part in parts]
