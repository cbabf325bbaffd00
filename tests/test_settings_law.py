"""Law `settings`: each setting, alone and with three others, trains to the weights of the run without it.

Or it is refused in one sentence before the first step. A setting that changes numbers by intent is compared with
itself: with the run that has those settings alone, on one device. Every run is real, on virtual CPUs of a fork.
"""

import functools
import os
import random
import re
import tempfile

import keras
import numpy as np
import pytest

import distloop
from distloop.settings import config
from tests.forked import run_on_devices

NUM_DRAWS, NUM_WIDE_DRAWS, SETTINGS_OF_A_DRAW = 60, 600, 4
DRAWS_OF_A_PROCESS = 10
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
    """

    def __init__(self, value, *, changes=False, ends=TRAINS, ends_on_two=None, **others):
        self.value, self.others, self.changes, self.ends = value, others, changes, (ends, ends_on_two or ends)


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
    "virtual_replicas": Case(4),
    "num_stages": Case(2, num_devices=0),
    "intra_op_threads": Case(1),
    "microbatches": Case(3),
    "recompute": Case("hidden"),
    "clip_norm": Case(0.05, changes=True),
    "clip_variable_norm": Case(0.05, changes=True),
    "clip_value": Case(0.01, changes=True),
    "average_decay": Case(0.9),
    "average_from": Case("50 %"),
    "shard_optimizer": Case(True),
    "precision": Case("mixed_bfloat16", changes=True),
    "deterministic": Case(True),
    "jit_compile": Case(True),
    "executor": Case("serial", ends_on_two=IS_REFUSED),
    "steps_per_loop": Case(2),
    "eval_every": Case(2),
    "eval_first": Case(True),
    "checkpoint_every": Case(2),
    "keep_checkpoints": Case(1),
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
    "max_traces": Case(3),
    "locate_nonfinite": Case(True),
    "on_divergence": Case("rollback", workdir=WORKDIR),
    "loss_jump": Case(20.0),
    "check_replicas_every": Case(2),
    "max_rollbacks": Case(1),
    "start_timeout": Case(100.0),
    "hang_timeout": Case(300.0),
    "audit": Case(True, ends=EXITS),
    "memory": Case(True, ends=EXITS),
    "replay": Case(2, ends=IS_REFUSED, workdir=WORKDIR),  # there is no run to replay
    "fast_dev_run": Case(True, changes=True),
    "eager": Case(True),
    "full_tracebacks": Case(True),
    "overfit_batches": Case(2, changes=True),
    "limit_train_batches": Case(3, changes=True),
    "limit_eval_batches": Case(1),
    "autotune_batch": Case(True, ends=EXITS),
}


def draws(count):
    """Lists sets of settings, which a fixed seed draws; half of the runs have a workdir."""
    generator = random.Random(0)
    return [
        tuple(sorted({*generator.sample(sorted(CASES), SETTINGS_OF_A_DRAW), *["workdir"][: generator.randrange(2)]}))
        for _ in range(count)
    ]


def settings_of(names, devices, directory):
    """Returns the arguments of `Config` for settings by name."""
    settings = {**BASE, "num_devices": devices}
    for first, *others in ONE_OF:
        if not {first, *others}.isdisjoint(names):
            del settings[first]
    for name in names:
        settings |= CASES[name].others
    settings |= {name: CASES[name].value for name in names}
    if "replica_batch_size" in names:
        settings["replica_batch_size"] //= settings.get("virtual_replicas") or settings["num_devices"]
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


def outcome_of(names, devices):
    """Returns how a run ends, with its weights by path or the words of its end."""
    with tempfile.TemporaryDirectory() as directory:
        generator = np.random.default_rng(1)
        weights = {f"net/{name}": generator.normal(size=shape).astype("float32") for name, shape in SHAPES.items()}
        np.savez(os.path.join(directory, "weights.npz"), **weights)
        trainer, made = None, []
        try:
            settings = distloop.Config(**settings_of(names, devices, directory))
            trainer = distloop.Trainer(functools.partial(model_fn, made, settings.num_stages), settings)
            trainer.fit(rows(), evals={"test": rows(15)})
        except SystemExit as ended:
            return EXITS, f"{ended.code}"
        except ValueError as error:
            steps = 0 if trainer is None else trainer.step
            return (IS_REFUSED, str(error)) if steps == 0 else ("fails", f"at step {steps}: {error}")
        except Exception as error:  # a fault, which the test prints
            return "fails", f"{type(error).__name__}: {error}"
        named = {"/".join(v.path.split("/")[-2:]): np.array(v) for v in made[-1].trainable_variables}
        return TRAINS, named


def outcomes_of(runs):
    """Returns the outcome of each run, `(names, devices)`, in a process with four virtual CPUs."""
    return [outcome_of(*run) for run in runs]


@functools.cache
def in_a_process(runs):
    return run_on_devices(outcomes_of, 4, runs)


@functools.cache
def reference(names):
    """Returns the weights of the run with these settings alone, on one device."""
    ((end, weights),) = in_a_process(((names, 1),))
    assert end == TRAINS, weights
    return weights


def fault_of(names, outcome):
    """Returns what is wrong with an outcome; empty: nothing."""
    end, result = outcome
    if end == IS_REFUSED:
        return "" if re.fullmatch(r"[^\n]{20,400}\.", result) else f"no sentence: {result}"
    if end == EXITS:
        return "" if result in "01" and any(EXITS in CASES[name].ends for name in names) else f"exit code {result}"
    if end != TRAINS:
        return result
    by_intent = tuple(name for name in names if CASES[name].changes)
    tolerance = max([TOLERANCE, *(TOLERANCES.get(name, 0) for name in by_intent)])
    wanted = reference(by_intent)
    if wanted.keys() != result.keys():
        return f"variables {sorted(result)} in place of {sorted(wanted)}"
    apart = max(np.abs(result[name] - wanted[name]).max() / np.abs(wanted[name]).max() for name in wanted)
    return "" if apart <= tolerance else f"weights differ by {apart:.1e}"


def test_every_setting_has_a_case_away_from_its_default():
    fields = config.fields()
    assert CASES.keys() == fields.keys()
    assert not [name for name, case in CASES.items() if case.value == fields[name].metadata["default"]]


def chunks(sets):
    """Splits sets of settings into those of a process; deterministic operations take one of their own."""
    kinds = [[names for names in sets if ("deterministic" in names) == is_on] for is_on in (False, True)]
    parts = [kind[i : i + DRAWS_OF_A_PROCESS] for kind in kinds for i in range(0, len(kind), DRAWS_OF_A_PROCESS)]
    return [tuple(part) for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("sets", chunks([(name,) for name in CASES]), ids=lambda sets: "+".join(sets[0]))
def test_a_setting_alone_trains_to_the_same_weights(sets, devices):
    outcomes = in_a_process(tuple((names, devices) for names in sets))
    for (name,), outcome in zip(sets, outcomes, strict=True):
        assert not fault_of((name,), outcome), name
        assert outcome[0] == CASES[name].ends[devices - 1], (name, outcome)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("sets", chunks(draws(NUM_DRAWS)), ids=lambda sets: "+".join(sets[0]))
def test_four_settings_train_to_the_same_weights(sets, devices):
    outcomes = in_a_process(tuple((names, devices) for names in sets))
    faults = {names: fault_of(names, outcome) for names, outcome in zip(sets, outcomes, strict=True)}
    assert not {names: fault for names, fault in faults.items() if fault}


@pytest.mark.wide
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("sets", chunks(draws(NUM_WIDE_DRAWS)[NUM_DRAWS:]), ids=lambda sets: "+".join(sets[0]))
def test_four_further_settings_train_to_the_same_weights(sets, devices):
    test_four_settings_train_to_the_same_weights(sets, devices)
