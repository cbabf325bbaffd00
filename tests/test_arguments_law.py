"""Law `settings`, for the arguments of public functions: each does what it says on two devices as on one.

An argument away from its default leaves the weights of the plain run as they are, or changes them by intent: then the
run is another one, the same on one device and on two. What it returns beside weights is the same on both, too.
"""

import inspect
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.keras_models.fit_arguments import KerasArguments

X, Y = np.random.default_rng(0).normal(size=(33, 8)).astype("float32"), np.arange(33) % 4
ROWS = {"x": X, "label": Y}
EXAMPLES = [{"x": x, "label": label} for x, label in zip(X, Y, strict=True)]
LENGTHS = 1 + np.arange(33) % 5
RAGGED = [{**example, "tokens": np.ones(n)} for example, n in zip(EXAMPLES, LENGTHS, strict=True)]
TOLERANCE = 2e-5  # relative; sums in another order, over 6 steps


class Run:
    """A run on some devices, whose arguments differ from those of the plain one."""

    def __init__(self, devices, directory):
        self.directory = str(directory)
        settings = {"device": "cpu", "console": "quiet", "steps": 6, "batch_size": 10, "eval_every": 2}
        self.settings = {**settings, "num_devices": devices}
        self.trainer = self.model = None

    def spec(self, of_spec):
        """A `model_fn`; what is given is a function from the model to further arguments of `ModelSpec`."""

        def model_fn():
            layers = [keras.layers.Dense(6, "tanh", name="hidden"), keras.layers.Dense(4, name="logits")]
            self.model = model = keras.Sequential([keras.Input((8,)), *layers], name="net")
            arguments = {"model": model, "optimizer": sgd(), "loss_fn": loss_fn(model)} | of_spec(model)
            return distloop.ModelSpec(**arguments)

        return model_fn

    def fit(self, *data, of_spec=lambda model: {}, is_compiled=False, settings=None, **arguments):
        """Trains, and returns all trained variables and the last metrics that are no speeds."""
        config = distloop.Config(**self.settings | (settings or {}))
        model_fn = distloop.from_keras(compiled) if is_compiled else self.spec(of_spec)
        self.trainer = distloop.Trainer(model_fn, config)
        history = self.trainer.fit(*(data or [ROWS]), **arguments)
        reported = {name: value for name, value in history.items() if name == "loss" or "/" in name}
        return weights(self.model or self.trainer.model) | reported


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adamw():
    return keras.optimizers.AdamW(0.01, weight_decay=0.1)


def compiled():
    keras.utils.set_random_seed(0)
    layers = [keras.Input((8,)), keras.layers.Dense(6, "tanh", name="hidden"), keras.layers.Dense(4, name="logits")]
    model = keras.Sequential(layers, name="net")
    model.compile(sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def cross_entropy(labels, logits):
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def loss_fn(model):
    return lambda batch, training: {"loss": cross_entropy(batch["label"], model(batch["x"], training=training))}


def weights(model):
    return {"/".join(v.path.split("/")[-2:]): np.array(v) for v in model.trainable_variables}


def halved(gradients):
    return {path: gradient / 2 for path, gradient in gradients.items()}


def double(example, seed):
    return {"x": 2.0 * example["x"], "label": example["label"]}


def auc(model):
    """Values and metrics for `ModelSpec` and `Evaluation`, whose metric has a state."""

    def values(batch, training):
        logits = model(batch["x"], training=training)
        return {
            "loss": cross_entropy(batch["label"], logits),
            "auc": (tf.cast(batch["label"] == 0, tf.float32), tf.nn.softmax(logits)[:, 0]),
        }

    return {"loss_fn": values, "metrics": {"auc": keras.metrics.AUC(num_thresholds=20)}}


def updates(first_optimizer, **arguments):
    """Two updates, one for each layer; the first has further arguments."""

    def of_spec(model):
        first = distloop.Update("first", loss_fn(model), first_optimizer(), **{"variables": "hidden"} | arguments)
        second = distloop.Update("second", loss_fn(model), sgd(), variables="logits")
        return {"optimizer": None, "loss_fn": None, "updates": [first, second]}

    return of_spec


class Lines:
    """A writer that keeps its lines."""

    def __init__(self):
        self.steps = []

    def write(self, step, numbers, time):
        self.steps.append(step)

    def close(self):
        self.steps.append(-1)


def with_actions(run, made, **settings):
    """Trains with actions, and returns what they did by the checkpoints and files that are there."""
    numbers = run.fit(evals={"test": ROWS}, actions=made, settings={"workdir": run.directory + "/run"} | settings)
    found = {f"file {name}": 1.0 for name in checkpoints(run.directory + "/run")}
    return numbers | found | {"step": float(run.trainer.step)}


def checkpoints(workdir):
    return sorted(name for name in os.listdir(os.path.join(workdir, "checkpoints")) if name.isdigit())


def exported(run, **arguments):
    """Trains with the action `Export`, and returns the names of the exports."""
    directory = os.path.join(run.directory, "exports")

    of_spec = lambda model: {"predict_fn": lambda batch: model(batch["x"], training=False)}  # noqa: E731
    config = distloop.Config(**run.settings, workdir=run.directory + "/run")
    run.trainer = distloop.Trainer(run.spec(of_spec), config)
    action = distloop.Export(run.trainer.export, directory, **arguments)
    run.trainer.fit(ROWS, evals={"test": ROWS}, actions=[action])
    return weights(run.trainer.model) | {f"file {name}": 1.0 for name in sorted(os.listdir(directory))}


def predicted(run, data=None, **arguments):
    """Trains, predicts, and returns the outputs."""
    of_spec = lambda model: {  # noqa: E731
        "predict_fn": {
            "logits": lambda batch: model(batch["x"], training=False),
            "classes": lambda batch: tf.argmax(model(batch["x"], training=False), -1),
        }
    }
    numbers = run.fit(of_spec=of_spec)
    outputs = run.trainer.predict(ROWS if data is None else data, **arguments)
    if arguments.get("path"):
        outputs = np.load(os.path.join(arguments["path"], os.listdir(arguments["path"])[0]))
    return numbers | {"outputs": np.asarray(outputs, "float64"), "rows": float(len(outputs))}


def batches(run, source=None, **arguments):
    """Trains on a dataset of `make_dataset`."""
    arguments = {"batch_size": 10, "shuffle": True} | arguments
    return run.fit(distloop.make_dataset(ROWS if source is None else source, **arguments))


SAME, OTHER = "the plain run's weights", "other weights"

CASES = {
    "fit": {
        "train": (SAME, lambda run: run.fit(dict(ROWS))),
        "y": (SAME, lambda run: run.fit(X, Y, is_compiled=True)),
        "steps": (OTHER, lambda run: run.fit(steps=4)),
        "epochs": (OTHER, lambda run: run.fit(epochs=2)),
        "until": (OTHER, lambda run: run.fit(until="50 examples")),
        "evals": (SAME, lambda run: run.fit(evals={"test": ROWS})),
        "actions": (SAME, lambda run: run.fit(evals={"test": ROWS}, actions=[distloop.StopEarly("test/loss")])),
        "writers": (SAME, lambda run: run.fit(writers=[Lines()])),
        "batch_size": (OTHER, lambda run: run.fit(batch_size=7)),
        "steps_per_epoch": (OTHER, lambda run: run.fit(epochs=2, steps_per_epoch=2)),
        "class_weight": (OTHER, lambda run: run.fit(X, Y, is_compiled=True, class_weight={0: 2.0, 1: 0.5})),
        "validation_data": (SAME, lambda run: run.fit(X, Y, is_compiled=True, validation_data=(X[:9], Y[:9]))),
        "validation_split": (OTHER, lambda run: run.fit(X, Y, is_compiled=True, validation_split=0.2)),
        "sample_weight": (OTHER, lambda run: run.fit(X, Y, is_compiled=True, sample_weight=1.0 + np.arange(33) % 3)),
    },
    "evaluate": {
        "dataset": (SAME, lambda run: run.fit() | run.trainer.evaluate(ROWS)),
        "y": (SAME, lambda run: run.fit(X, Y, is_compiled=True) | run.trainer.evaluate(X[:21], Y[:21])),
    },
    "predict": {
        "dataset": (SAME, predicted),
        "signature": (SAME, lambda run: predicted(run, signature="classes")),
        "keep_dtypes": (SAME, lambda run: predicted(run, keep_dtypes=True)),
        "batches": (SAME, lambda run: predicted(run, distloop.make_dataset(ROWS, 4), batches=3)),
        "path": (SAME, lambda run: predicted(run, path=os.path.join(run.directory, "outputs.npy"))),
    },
    "ModelSpec": {
        "model": (SAME, lambda run: run.fit(of_spec=lambda model: {"model": {"net": model}})),  # or in a dict
        "optimizer": (OTHER, lambda run: run.fit(of_spec=lambda model: {"optimizer": adamw()})),
        "loss_fn": (SAME, lambda run: run.fit(of_spec=lambda model: {"loss_fn": loss_fn(model)})),
        "predict_fn": (SAME, predicted),
        "metrics": (SAME, lambda run: run.fit(of_spec=auc, evals={"test": ROWS})),
        "trainable": (OTHER, lambda run: run.fit(of_spec=lambda model: {"trainable": "logits"})),
        "batch_fn": (
            OTHER,
            lambda run: run.fit(of_spec=lambda model: {"batch_fn": lambda batch, training: double(batch, None)}),
        ),
        "gradient_fn": (OTHER, lambda run: run.fit(of_spec=lambda model: {"gradient_fn": halved})),
        "step_fn": (OTHER, lambda run: run.fit(of_spec=lambda model: {"step_fn": lambda s: halved(s.gradients())})),
        "learning_rates": (OTHER, lambda run: run.fit(of_spec=lambda model: {"learning_rates": {"hidden": 0.1}})),
        "no_decay": (OTHER, lambda run: run.fit(of_spec=lambda model: {"optimizer": adamw(), "no_decay": "bias"})),
        "updates": (OTHER, lambda run: run.fit(of_spec=updates(sgd))),
    },
    "Update": {
        "name": (OTHER, lambda run: run.fit(of_spec=updates(sgd))),
        "loss_fn": (OTHER, lambda run: run.fit(of_spec=updates(sgd))),
        "optimizer": (OTHER, lambda run: run.fit(of_spec=updates(adamw))),
        "variables": (OTHER, lambda run: run.fit(of_spec=updates(sgd, variables="^net/hidden/"))),
        "gradient_fn": (OTHER, lambda run: run.fit(of_spec=updates(sgd, gradient_fn=halved))),
        "step_fn": (OTHER, lambda run: run.fit(of_spec=updates(sgd, step_fn=lambda s: halved(s.gradients())))),
        "learning_rates": (OTHER, lambda run: run.fit(of_spec=updates(sgd, learning_rates={"kernel": 0.1}))),
        "no_decay": (OTHER, lambda run: run.fit(of_spec=updates(adamw, no_decay="bias"))),
    },
    "Evaluation": {
        "dataset": (SAME, lambda run: run.fit(evals={"test": distloop.Evaluation(ROWS)})),
        "every": (SAME, lambda run: run.fit(evals={"test": distloop.Evaluation(ROWS, every="1 epoch")})),
        "batches": (SAME, lambda run: run.fit(evals={"test": distloop.Evaluation(ROWS, batches=2)})),
        "loss_fn": (SAME, lambda run: run.fit(evals={"test": distloop.Evaluation(ROWS, loss_fn=ones)})),
        "metrics": (SAME, lambda run: evaluated(run, auc)),
        "rows_fn": (SAME, lambda run: evaluated(run, lambda model: {"rows_fn": mean_of, "predict_fn": of_x(model)})),
        "predict_fn": (SAME, lambda run: evaluated(run, lambda m: {"rows_fn": mean_of, "predict_fn": of_x(m)})),
    },
    "make_dataset": {
        "source": (SAME, lambda run: batches(run, EXAMPLES)),
        "batch_size": (OTHER, lambda run: batches(run, batch_size={0: 10, 3: 5})),
        "shuffle": (OTHER, lambda run: batches(run, shuffle=False)),
        "seed": (OTHER, lambda run: batches(run, seed=3)),
        "map_fn": (OTHER, lambda run: batches(run, map_fn=double)),
        "cache": (
            OTHER,
            lambda run: batches(run, tf.data.Dataset.from_tensor_slices(ROWS), shuffle=False, cache=True),
        ),
        "drop_remainder": (OTHER, lambda run: batches(run, drop_remainder=True)),
        "lengths": (OTHER, lambda run: batches(run, RAGGED, lengths=LENGTHS)),
        "pad_to": (OTHER, lambda run: batches(run, RAGGED, lengths=LENGTHS, pad_to=[2, 5])),
    },
    "SaveBest": {
        "metric": (SAME, lambda run: with_actions(run, [distloop.SaveBest("test/loss")], keep_checkpoints=1)),
        "mode": (SAME, lambda run: with_actions(run, [distloop.SaveBest("test/loss", mode="max")], keep_checkpoints=1)),
        "keep": (SAME, lambda run: with_actions(run, [distloop.SaveBest("test/loss", keep=2)], keep_checkpoints=1)),
        "restore": (OTHER, lambda run: with_actions(run, [distloop.SaveBest("test/loss", mode="max", restore=True)])),
    },
    "StopEarly": {
        "metric": (SAME, lambda run: with_actions(run, [distloop.StopEarly("test/loss")])),
        "mode": (OTHER, lambda run: with_actions(run, [distloop.StopEarly("test/loss", mode="max", patience=1)])),
        "patience": (SAME, lambda run: with_actions(run, [distloop.StopEarly("test/loss", patience=5)])),
        "min_delta": (
            OTHER,
            lambda run: with_actions(run, [distloop.StopEarly("test/loss", min_delta=9.0, patience=1)]),
        ),
        "restore_best": (
            OTHER,
            lambda run: with_actions(run, [distloop.StopEarly("test/loss", mode="max", restore_best=True)]),
        ),
    },
    "Export": {
        "export": (SAME, lambda run: exported(run, suffix=".npz")),
        "directory": (SAME, lambda run: exported(run, suffix=".npz")),
        "every": (SAME, lambda run: exported(run, suffix=".npz", every=2)),
        "metric": (SAME, lambda run: exported(run, suffix=".npz", metric="test/loss")),
        "mode": (SAME, lambda run: exported(run, suffix=".npz", metric="test/loss", mode="max")),
        "keep": (SAME, lambda run: exported(run, suffix=".npz", every=2, keep=1)),
        "suffix": (SAME, lambda run: exported(run, suffix=".keras")),
    },
}

FUNCTIONS = {
    "fit": distloop.Trainer.fit,
    "evaluate": distloop.Trainer.evaluate,
    "predict": distloop.Trainer.predict,
    "make_dataset": distloop.make_dataset,
    **{cls.__name__: cls for cls in (distloop.ModelSpec, distloop.Update, distloop.Evaluation)},
    **{cls.__name__: cls for cls in (distloop.SaveBest, distloop.StopEarly, distloop.Export)},
}
LEFT_OUT = {"self", "keras_arguments", "others"}  # the names behind `**` are cases of their own; `*others` is refused


def ones(batch, training):
    return {"loss": tf.ones_like(batch["x"][:, 0]), "x": batch["x"][:, 0]}


def mean_of(outputs):
    return {"mean": float(np.mean(outputs)), "rows": len(outputs)}


def of_x(model):
    return lambda batch: model(batch["x"], training=False)


def evaluated(run, arguments_of):
    """Trains with an `Evaluation` whose arguments need the model."""
    trainer = distloop.Trainer(run.spec(lambda model: {}), distloop.Config(**run.settings))
    evaluation = distloop.Evaluation(ROWS, **arguments_of(trainer.model))
    history = trainer.fit(ROWS, evals={"test": evaluation})
    return weights(trainer.model) | {name: value for name, value in history.items() if name.startswith("test/")}


def test_every_argument_of_the_public_functions_has_a_case():
    for name, function in FUNCTIONS.items():
        names = set(inspect.signature(function).parameters) - LEFT_OUT
        if name == "fit":
            names |= set(KerasArguments.__annotations__)
        assert CASES[name].keys() == names, name


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The weights and the loss of the plain run on one device."""
    return Run(1, tmp_path_factory.mktemp("plain")).fit()


def difference(one, other):
    """The largest relative difference of numbers by name."""
    assert one.keys() == other.keys()
    return max(np.abs(one[name] - other[name]).max() / max(np.abs(one[name]).max(), 1e-3) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("function,argument", [(name, argument) for name in CASES for argument in CASES[name]])
def test_an_argument_does_the_same_on_two_devices_as_on_one(function, argument, plain, tmp_path):
    changes, train = CASES[function][argument]
    one, two = (train(Run(devices, tmp_path / str(devices))) for devices in (1, 2))
    assert difference(one, two) <= TOLERANCE
    trained = {name: one[name] for name in plain if name != "loss"}
    apart = difference(trained, {name: plain[name] for name in trained})
    assert apart <= TOLERANCE if changes == SAME else apart > 10 * TOLERANCE
