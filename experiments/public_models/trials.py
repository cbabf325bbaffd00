"""Trials: what one process does with one model, and the cells of the table that come of it.

    cells = run("ResNet50", "replicas_2", "runs/public_models/ResNet50")

A cell is a dict with `model`, `cell` and either `difference` and `tolerance`, or `refused`: a sentence. Differences are
relative to how far the weights moved, and of the variable that differs most; see `difference`. The directory holds the
weights before and after the steps of the first trial, `one_replica`, which the others are compared with. What takes
time is tracing: a step of EfficientNetB0 for 20 seconds, and 40 on two replicas, where three steps with `eager=True`
take 6 and 19, to the same bits. So models of keras.applications are trained eagerly, and so is Keras, which would
compile them by XLA. Their BatchNormalization over the few values of small images is ill-conditioned in float32, so
that they are compared in float64, by the trial `exact`. Of a family, one model takes every trial: of those of
keras.applications a small form, where each trial takes seconds.
"""

import functools
import os
import re
import shutil
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import distloop
from experiments.public_models import zoo

STEPS, SAVED_STEP = 3, 2
EXACT_STEPS = 2
# Tolerances. Some layers compute in float32 whatever the precision, such as the normalization of Qwen in KerasHub.
FLOAT32, FLOAT64, HALF = 1e-4, 1e-6, 0.1
MAX_STEPS_IN_FLOAT16 = 40  # some of them skipped, until the loss scale fits

Weights = dict[str, np.ndarray]


def difference(values: Weights, reference: Weights, initial: Weights) -> tuple[float, str]:
    """Returns the largest difference of a variable, relative to its change in training, and the variable's name.

    Per variable it is ||v - r|| / max(||r - i||, 0.01 C), where C is the norm of the change of all variables: a bias
    whose gradient is 0 but for rounding has no change of its own to compare with.
    """
    changes = {name: np.linalg.norm(np.asarray(reference[name] - initial[name], np.float64)) for name in reference}
    floor = 0.01 * np.linalg.norm(list(changes.values())) or 1.0
    errors = {name: np.linalg.norm(np.asarray(values[name] - reference[name], np.float64)) for name in reference}
    ratios = {name: float(errors[name] / max(changes[name], floor)) for name in reference}
    worst = max(ratios, key=lambda name: np.inf if np.isnan(ratios[name]) else ratios[name])
    return ratios[worst], worst


def weights_of(model: keras.Model, *, trained_only: bool = False) -> Weights:
    """Returns a model's weights by their place and name, without the numbers by which Keras tells layers apart."""
    named = {f"{i}:{re.sub('_[0-9]+(?=/|$)', '', weight.path)}": weight for i, weight in enumerate(model.weights)}
    return {name: weight.numpy() for name, weight in named.items() if weight.trainable or not trained_only}


def trainer_of(make: Callable[[], keras.Model], **settings: Any) -> distloop.Trainer:
    """Returns a trainer of a compiled model, by default on one device."""
    settings = {"device": "cpu", "num_devices": 1, "console": "quiet", "log_every": 0, **settings}
    return distloop.Trainer(distloop.from_keras(make), distloop.Config(**settings))


def data_for(model: keras.Model) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(zoo.batch_for(model))


def trained(
    make: Callable[[], keras.Model], *, applied: int = STEPS, trained_only: bool = False, **settings: Any
) -> Weights:
    """Returns the weights after the steps of distloop, all of them on one batch."""
    trainer = trainer_of(make, **settings)
    data = data_for(trainer.model)
    steps = applied
    trainer.fit(data, steps=steps)
    while int(trainer.optimizer.iterations.numpy()) < applied and steps < MAX_STEPS_IN_FLOAT16:
        trainer.fit(data, steps=(steps := steps + 1))
    return weights_of(trainer.model, trained_only=trained_only)


def trained_by_keras(model: keras.Model, *, applied: int = STEPS, trained_only: bool = False) -> Weights:
    """Returns the weights after the same steps of Keras's own `fit`."""
    model.run_eagerly = True
    inputs, labels = zoo.batch_for(model)
    epochs = 0
    while int(model.optimizer.iterations.numpy()) < applied and epochs < MAX_STEPS_IN_FLOAT16:
        model.fit(inputs, labels, batch_size=zoo.ROWS, shuffle=False, verbose=0)
        epochs += 1
    return weights_of(model, trained_only=trained_only)


def started(name: str, directory: str) -> keras.Model:
    """Returns the model with the weights that the first trial started from."""
    model = zoo.make(name)
    model.set_weights(list(load(directory, "initial").values()))
    return model


def load(directory: str, name: str) -> Weights:
    with np.load(os.path.join(directory, f"{name}.npz")) as file:
        return dict(file)


def compared(values: Weights, directory: str, tolerance: float = FLOAT32) -> dict[str, Any]:
    """Returns the content of a cell: how far weights are from those of the first trial."""
    reference, initial = load(directory, "one_replica"), load(directory, "initial")
    number, worst = difference(values, {name: reference[name] for name in values}, initial)
    return {"difference": number, "tolerance": tolerance, "worst": worst}


def one_replica(name: str, directory: str) -> Iterator[dict[str, Any]]:
    """One replica next to Keras's own fit, and what is written after it."""
    model = zoo.make(name)
    np.savez(os.path.join(directory, "initial"), **weights_of(model))
    workdir = os.path.join(directory, "run")
    shutil.rmtree(workdir, ignore_errors=True)  # of an earlier trial, from other weights
    settings = {"workdir": workdir, "checkpoint_every": SAVED_STEP, "eager": zoo.is_eager(name)}
    trainer = trainer_of(lambda: started(name, directory), **settings)
    data = data_for(model)
    trainer.fit(data, steps=STEPS)
    np.savez(os.path.join(directory, "one_replica"), **weights_of(trainer.model))
    yield {"cell": "rebuilt", **attempt(lambda: _rebuilt(model))}
    if not zoo.is_eager(name):
        yield {"cell": "keras", **compared(trained_by_keras(model), directory)}
    for cell, predictions in (("export", saved_model), ("keras_file", keras_file)):
        yield {"cell": cell, **attempt(lambda predictions=predictions: predictions(trainer, directory))}


def _rebuilt(model: keras.Model) -> dict[str, Any]:
    """Returns how far the predictions of the copy that `from_keras(model)` makes are from the model's."""
    trainer = distloop.Trainer(distloop.from_keras(model), distloop.Config(device="cpu", num_devices=1))
    inputs = zoo.batch_for(model)[0]
    return _apart(*(np.asarray(one(inputs, training=False)) for one in (trainer.model, model)))


def saved_model(trainer: distloop.Trainer, directory: str) -> dict[str, Any]:
    """Returns how far the predictions of a SavedModel, loaded again, are from `trainer.predict`."""
    inputs = zoo.batch_for(trainer.model)[0]
    trainer.export(path := os.path.join(directory, "export"))
    signature = tf.saved_model.load(path).signatures["serving_default"]
    by_name = inputs if isinstance(inputs, dict) else {"": inputs}
    entries = {
        name: tf.constant(next(value for key, value in by_name.items() if name.endswith(key)))
        for name in signature.structured_input_signature[1]
    }
    return _apart(next(iter(signature(**entries).values())).numpy(), trainer.predict(data_for(trainer.model)))


def keras_file(trainer: distloop.Trainer, directory: str) -> dict[str, Any]:
    """Returns how far the predictions of a Keras file, loaded again, are from `trainer.predict`."""
    trainer.export(path := os.path.join(directory, "model.keras"))
    predictions = np.asarray(keras.models.load_model(path)(zoo.batch_for(trainer.model)[0], training=False))
    return _apart(predictions, trainer.predict(data_for(trainer.model)))


def _apart(values: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    return {"difference": float(np.linalg.norm(values - expected) / np.linalg.norm(expected)), "tolerance": FLOAT32}


def resume(name: str, directory: str) -> Iterator[dict[str, Any]]:
    """Another process goes on from a checkpoint; the number is that of the variables with other bits."""
    trainer = trainer_of(lambda: zoo.make(name))
    yield {"cell": "resume", **_resumed(trainer, directory, load(directory, "one_replica"), SAVED_STEP)}


def _resumed(trainer: distloop.Trainer, directory: str, reference: Weights, saved_step: int) -> dict[str, Any]:
    """Returns how many variables have other bits than the reference, one step after a checkpoint."""
    trainer.restore(os.path.join(directory, "run", "checkpoints", str(saved_step)))
    trainer.fit(data_for(trainer.model), steps=saved_step + 1)
    values = weights_of(trainer.model)
    different = [key for key in reference if values[key].tobytes() != reference[key].tobytes()]
    return {"difference": len(different), "tolerance": 0, "worst": (different or [""])[0]}


def replicas(count: int) -> Callable[[str, str], Iterator[dict[str, Any]]]:
    def trial(name: str, directory: str) -> Iterator[dict[str, Any]]:
        values = trained(lambda: started(name, directory), num_devices=count)
        yield {"cell": f"replicas_{count}", **compared(values, directory)}

    return trial


def microbatches(name: str, directory: str) -> Iterator[dict[str, Any]]:
    """Two microbatches next to one; BatchNormalization, whose statistics are a microbatch's, is frozen in both."""
    whole = load(directory, "one_replica")
    values, reference = _in_microbatches(lambda: started(name, directory), whole)
    number, worst = difference(values, reference, load(directory, "initial"))
    yield {"cell": "microbatches", "difference": number, "tolerance": FLOAT32, "worst": worst}


def _in_microbatches(make: Callable[[], keras.Model], whole: Weights, **settings: Any) -> tuple[Weights, Weights]:
    """Returns the weights of two microbatches, and of one: `whole`, unless layers had to be frozen."""
    counts: list[int] = []

    def frozen() -> keras.Model:
        counts.append(freeze(model := make()))
        return model

    values = trained(frozen, microbatches=2, **settings)
    return values, trained(frozen, **settings) if any(counts) else {name: whole[name] for name in values}


def freeze(model: keras.Model) -> int:
    """Freezes the BatchNormalization layers; returns their number."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    for layer in layers:
        layer.trainable = False
    return len(layers)


def half(precision: str) -> Callable[[str, str], Iterator[dict[str, Any]]]:
    def trial(name: str, directory: str) -> Iterator[dict[str, Any]]:
        """The trained weights next to those of float32; beyond the tolerance, Keras's own next to those, too."""
        keras.config.set_dtype_policy(precision)
        settings = {"precision": precision, "eager": zoo.is_eager(name), "trained_only": True}
        cell = attempt(lambda: compared(trained(lambda: started(name, directory), **settings), directory, HALF))
        if not cell.get("difference", np.nan) <= HALF:
            run_keras = functools.partial(trained_by_keras, started(name, directory), trained_only=True)
            by_keras = attempt(lambda: compared(run_keras(), directory))
            cell["keras"] = by_keras.get("difference")  # None: Keras's own fit ended in an error
        yield {"cell": precision, **cell}

    return trial


def split(name: str, directory: str) -> Iterator[dict[str, Any]]:
    """Two stages on two devices next to one replica; in float64, too, where float32 is beyond the tolerance."""
    cell = compared(_in_stages(lambda: started(name, directory)), directory)
    yield {"cell": "split", **cell}
    if cell["difference"] > FLOAT32:
        keras.config.set_floatx("float64")
        make = in_float64(lambda: started(name, directory))
        reference = trained(make, trained_only=True, eager=zoo.is_eager(name))
        staged = _in_stages(make)
        number, worst = difference({key: staged[key] for key in reference}, reference, load(directory, "initial"))
        yield {"cell": "split/float64", "difference": number, "tolerance": FLOAT64, "worst": worst}


def _in_stages(make: Callable[[], keras.Model]) -> Weights:
    """Returns the weights after the steps in two stages."""

    def model_fn() -> distloop.ModelSpec:
        staged = distloop.split(make(), 2)

        def loss_fn(batch: Any, training: bool) -> dict[str, Any]:
            logits = staged(batch[0], training=training)  # [B, C]
            return {"loss": keras.losses.sparse_categorical_crossentropy(batch[1], logits, from_logits=True)}

        return distloop.ModelSpec(staged, keras.optimizers.SGD(zoo.LEARNING_RATE, momentum=zoo.MOMENTUM), loss_fn)

    trainer = distloop.Trainer(model_fn, distloop.Config(device="cpu", num_stages=2, console="quiet", log_every=0))
    model = trainer.model.model
    trainer.fit(data_for(model), steps=STEPS)
    return weights_of(model)


def float64(name: str, directory: str) -> Iterator[dict[str, Any]]:
    """The trained weights again, in float64: rounding is gone, and an error would stay. Statistics sum in float32."""
    keras.config.set_floatx("float64")
    initial = load(directory, "initial")
    make = in_float64(lambda: started(name, directory))
    reference = trained(make, trained_only=True)
    runs = {
        "replicas_2": lambda: (trained(make, num_devices=2, trained_only=True), reference),
        "keras": lambda: (trained_by_keras(make(), trained_only=True), reference),
        "microbatches": lambda: _in_microbatches(make, reference, trained_only=True),
    }
    for cell, run_both in runs.items():
        number, worst = difference(*run_both(), initial)
        yield {"cell": f"{cell}/float64", "difference": number, "tolerance": FLOAT64, "worst": worst}


def in_float64(make: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
    """Returns a function that makes a model in float64, also after a Trainer has set `Config.precision`."""

    def made() -> keras.Model:
        keras.config.set_dtype_policy("float64")
        return make()

    return made


def exact(name: str, directory: str) -> Iterator[dict[str, Any]]:
    """Comparisons of two eager steps in float64, all in one process; a checkpoint and an export besides."""
    keras.config.set_floatx("float64")
    directory = os.path.join(directory, "exact")
    model = in_float64(lambda: zoo.make(name))()
    first, initial = model.get_weights(), weights_of(model)

    def copied() -> keras.Model:
        copy = zoo.make(name)
        copy.set_weights(first)
        return copy

    make = in_float64(copied)
    settings = {"eager": True, "trained_only": True, "applied": EXACT_STEPS}
    shutil.rmtree(directory, ignore_errors=True)  # of a trial that was stopped
    trainer = trainer_of(make, eager=True, workdir=os.path.join(directory, "run"), checkpoint_every=1)
    trainer.fit(data_for(model), steps=EXACT_STEPS)
    whole, reference = weights_of(trainer.model), weights_of(trainer.model, trained_only=True)
    runs = {
        "keras": lambda: (trained_by_keras(model, applied=EXACT_STEPS, trained_only=True), reference),
        "replicas_2": lambda: (trained(make, num_devices=2, **settings), reference),
        "microbatches": lambda: _in_microbatches(make, reference, **settings),
    }
    if name in zoo.LAST_LAYERS:
        runs["replicas_4"] = lambda: (trained(make, num_devices=4, **settings), reference)

    def compared_exactly(cell: str) -> dict[str, Any]:
        number, worst = difference(*runs[cell](), initial)
        return {"difference": number, "tolerance": FLOAT64, "worst": worst}

    for cell in runs:
        yield {"cell": cell, **attempt(lambda cell=cell: compared_exactly(cell))}
    yield {
        "cell": "resume",
        **attempt(lambda: _resumed(trainer_of(make, eager=True), directory, whole, EXACT_STEPS - 1)),
    }
    if name not in zoo.LAST_LAYERS:  # of those `one_replica` has it
        yield {"cell": "export", **attempt(lambda: saved_model(trainer, directory))}
    shutil.rmtree(directory)  # up to gigabytes


def gpu_graph(name: str, directory: str) -> Iterator[dict[str, Any]]:
    """The operations of a train step that would run on the host if the model were on a GPU, by name."""
    trainer = trainer_of(functools.partial(zoo.make, name))
    found = trainer.audit(data_for(trainer.model)).findings
    fallen = [finding.name for finding in found if finding.what == "runs on the host when this model is on a GPU"]
    operations = sorted({operation.partition("(")[0] for operation in fallen})
    yield {"cell": "gpu_graph", "difference": len(operations), "tolerance": 0, "worst": " ".join(operations)}


# Name -> virtual CPUs, and what it does.
TRIALS: dict[str, tuple[int, Callable[[str, str], Iterator[dict[str, Any]]]]] = {
    "one_replica": (1, one_replica),
    "replicas_2": (2, replicas(2)),
    "microbatches": (1, microbatches),
    "mixed_float16": (1, half("mixed_float16")),
    "mixed_bfloat16": (1, half("mixed_bfloat16")),
    "resume": (1, resume),
    "split": (2, split),
    "replicas_4": (4, replicas(4)),
    "float64": (2, float64),
    "exact": (4, exact),
    "gpu_graph": (1, gpu_graph),
}


def attempt(fn: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the content of a cell, or why there is none: distloop refused in a sentence, or an error."""
    try:
        return fn()
    except Exception as error:  # a model's code may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1].filename
        is_refusal = isinstance(error, ValueError) and os.path.dirname(distloop.__file__) in place
        kind = "refused" if is_refusal else "error"
        return {kind: f"{type(error).__name__}: {error}" if kind == "error" else " ".join(str(error).split())}


def run(name: str, trial: str, directory: str) -> Iterator[dict[str, Any]]:
    """Yields the cells of a trial, in a process that has not started TensorFlow."""
    os.makedirs(directory, exist_ok=True)
    devices, fn = TRIALS[trial]
    distloop.prepare(distloop.Config(device="cpu", num_devices=devices))
    cells = fn(name, directory)
    while (outcome := attempt(lambda: next(cells, {}))) and "cell" in outcome:
        for kind in {"refused", "error"} & outcome.keys():
            outcome[kind] = outcome[kind].replace(directory + os.sep, "")
        yield {"model": name, "trial": trial, **outcome}
    if outcome:
        yield {"model": name, "trial": trial, "cell": trial, **outcome}


def is_open(cell: dict[str, Any]) -> bool:
    """Returns whether a comparison in float32 is beyond its tolerance: by rounding, or by an error."""
    in_float32 = cell["cell"] in ("keras", "replicas_2", "replicas_4", "microbatches") and cell["trial"] != "exact"
    return in_float32 and not cell.get("difference", 0) <= cell.get("tolerance", 0)
