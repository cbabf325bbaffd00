"""Trials: what one process does with one model, and the cells of the table that come of it.

    cells = run("ResNet50", "replicas_2", "runs/public_models/ResNet50")

A cell is a dict with `model`, `cell` and either `difference` and `tolerance`, or `refused`: a sentence. Differences are
relative to how far the weights moved, and of the variable that differs most; see `difference`. The directory holds the
weights before and after the steps of the first trial, `one_replica`, which the others are compared with.
"""

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


def trained(make: Callable[[], keras.Model], *, trained_only: bool = False, **settings: Any) -> Weights:
    """Returns the weights after the steps of distloop, all of them on one batch."""
    trainer = trainer_of(make, **settings)
    data = data_for(trainer.model)
    steps = STEPS
    trainer.fit(data, steps=steps)
    while int(trainer.optimizer.iterations.numpy()) < STEPS and steps < MAX_STEPS_IN_FLOAT16:
        trainer.fit(data, steps=(steps := steps + 1))
    return weights_of(trainer.model, trained_only=trained_only)


def trained_by_keras(model: keras.Model, *, trained_only: bool = False) -> Weights:
    """Returns the weights after the same steps of Keras's own `fit`."""
    inputs, labels = zoo.batch_for(model)
    epochs = 0
    while int(model.optimizer.iterations.numpy()) < STEPS and epochs < MAX_STEPS_IN_FLOAT16:
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
    settings = {"workdir": workdir, "checkpoint_every": SAVED_STEP}
    trainer = trainer_of(lambda: started(name, directory), **settings)
    data = data_for(model)
    trainer.fit(data, steps=STEPS)
    np.savez(os.path.join(directory, "one_replica"), **weights_of(trainer.model))
    yield {"cell": "rebuilt", **attempt(lambda: _rebuilt(model))}
    yield {"cell": "keras", **compared(trained_by_keras(model), directory)}
    yield from _exports(trainer, data, directory)


def _rebuilt(model: keras.Model) -> dict[str, Any]:
    """Returns how far the predictions of the copy that `from_keras(model)` makes are from the model's."""
    trainer = distloop.Trainer(distloop.from_keras(model), distloop.Config(device="cpu", num_devices=1))
    inputs = zoo.batch_for(model)[0]
    return _apart(*(np.asarray(one(inputs, training=False)) for one in (trainer.model, model)))


def _exports(trainer: distloop.Trainer, data: tf.data.Dataset, directory: str) -> Iterator[dict[str, Any]]:
    expected = trainer.predict(data)  # [B, C]
    inputs = zoo.batch_for(trainer.model)[0]

    def saved_model() -> np.ndarray:
        trainer.export(path := os.path.join(directory, "export"))
        signature = tf.saved_model.load(path).signatures["serving_default"]
        by_name = inputs if isinstance(inputs, dict) else {"": inputs}
        entries = {
            name: tf.constant(next(value for key, value in by_name.items() if name.endswith(key)))
            for name in signature.structured_input_signature[1]
        }
        return next(iter(signature(**entries).values())).numpy()

    def keras_file() -> np.ndarray:
        trainer.export(path := os.path.join(directory, "model.keras"))
        return np.asarray(keras.models.load_model(path)(inputs, training=False))

    for name, predict in (("export", saved_model), ("keras_file", keras_file)):
        yield {"cell": name, **attempt(lambda predict=predict: _apart(predict(), expected))}


def _apart(values: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    return {"difference": float(np.linalg.norm(values - expected) / np.linalg.norm(expected)), "tolerance": FLOAT32}


def resume(name: str, directory: str) -> Iterator[dict[str, Any]]:
    """Another process goes on from a checkpoint; the number is that of the variables with other bits."""
    trainer = trainer_of(lambda: zoo.make(name))  # with weights of its own
    trainer.restore(os.path.join(directory, "run", "checkpoints", str(SAVED_STEP)))
    trainer.fit(data_for(trainer.model), steps=STEPS)
    values, reference = weights_of(trainer.model), load(directory, "one_replica")
    different = [key for key in reference if values[key].tobytes() != reference[key].tobytes()]
    yield {"cell": "resume", "difference": len(different), "tolerance": 0, "worst": (different or [""])[0]}


def replicas(count: int) -> Callable[[str, str], Iterator[dict[str, Any]]]:
    def trial(name: str, directory: str) -> Iterator[dict[str, Any]]:
        values = trained(lambda: started(name, directory), num_devices=count)
        yield {"cell": f"replicas_{count}", **compared(values, directory)}

    return trial


def microbatches(name: str, directory: str) -> Iterator[dict[str, Any]]:
    """Two microbatches next to one; BatchNormalization, whose statistics are a microbatch's, is frozen in both."""

    def frozen() -> keras.Model:
        freeze(model := started(name, directory))
        return model

    values = trained(frozen, microbatches=2)
    if not freeze(zoo.make(name)):
        yield {"cell": "microbatches", **compared(values, directory)}
        return
    number, worst = difference(values, trained(frozen), load(directory, "initial"))
    yield {"cell": "microbatches", "difference": number, "tolerance": FLOAT32, "worst": worst, "note": "frozen"}


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
        values = trained(lambda: started(name, directory), trained_only=True, precision=precision)
        cell = compared(values, directory, HALF)
        if not cell["difference"] <= HALF:
            by_keras = trained_by_keras(started(name, directory), trained_only=True)
            cell["keras"] = compared(by_keras, directory)["difference"]
        yield {"cell": precision, **cell}

    return trial


def split(name: str, directory: str) -> Iterator[dict[str, Any]]:
    """Two stages on two devices next to one replica."""

    def model_fn() -> distloop.ModelSpec:
        staged = distloop.split(started(name, directory), 2)

        def loss_fn(batch: Any, training: bool) -> dict[str, Any]:
            logits = staged(batch[0], training=training)  # [B, C]
            return {"loss": keras.losses.sparse_categorical_crossentropy(batch[1], logits, from_logits=True)}

        return distloop.ModelSpec(staged, keras.optimizers.SGD(zoo.LEARNING_RATE, momentum=zoo.MOMENTUM), loss_fn)

    trainer = distloop.Trainer(model_fn, distloop.Config(device="cpu", num_stages=2, console="quiet", log_every=0))
    model = trainer.model.whole
    trainer.fit(data_for(model), steps=STEPS)
    yield {"cell": "split", **compared(weights_of(model), directory)}


def float64(name: str, directory: str) -> Iterator[dict[str, Any]]:
    """The trained weights again, in float64: rounding is gone, and an error would stay. Statistics sum in float32."""
    keras.config.set_floatx("float64")
    initial = load(directory, "initial")

    def exact() -> keras.Model:
        keras.config.set_dtype_policy("float64")  # the Trainer has set Config.precision
        return started(name, directory)

    reference = trained(exact, trained_only=True)
    runs = {
        "replicas_2": lambda: trained(exact, trained_only=True, num_devices=2),
        "keras": lambda: trained_by_keras(exact(), trained_only=True),
    }
    for cell, values in runs.items():
        number, worst = difference(values(), reference, initial)
        yield {"cell": f"{cell}/float64", "difference": number, "tolerance": FLOAT64, "worst": worst}


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


def run(name: str, trial: str, directory: str) -> list[dict[str, Any]]:
    """Returns the cells of a trial, in a process that has not started TensorFlow."""
    os.makedirs(directory, exist_ok=True)
    devices, fn = TRIALS[trial]
    distloop.prepare(distloop.Config(device="cpu", num_devices=devices))
    cells: list[dict[str, Any]] = []
    outcome = attempt(lambda: cells.extend(fn(name, directory)) or {})
    if outcome:
        cells.append({"cell": trial, **outcome})
    return [{"model": name, "trial": trial, **cell} for cell in cells]


def is_open(cell: dict[str, Any]) -> bool:
    """Returns whether a comparison in float32 is beyond its tolerance: by rounding, or by an error."""
    return cell["cell"] in ("keras", "replicas_2", "replicas_4") and not cell.get("difference", 0) <= cell["tolerance"]
