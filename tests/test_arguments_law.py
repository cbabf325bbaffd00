"""Law `settings`, for the arguments of public functions: each does what it says on two devices as on one.

An argument away from its default leaves the weights of the plain run as they are, or changes them by intent: then the
run is another one, the same on one device and on two. What it returns beside weights is the same on both, too.
Arguments that do not hide each other share a run.
"""

import functools
import inspect
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.keras_models.fit_arguments import KerasArguments
from tests.problems import mostly_wide

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


def used(run):
    """Trains, evaluates, and predicts in several ways."""

    def of_spec(model):
        logits = of_x(model)
        classes = lambda batch: tf.argmax(logits(batch), -1)  # noqa: E731
        return {"loss_fn": loss_fn(model), "predict_fn": {"logits": logits, "classes": classes}}

    numbers, path = run.fit(dict(ROWS), of_spec=of_spec), os.path.join(run.directory, "outputs.npy")
    outputs = {
        "all": run.trainer.predict(ROWS),
        "signature": run.trainer.predict(ROWS, signature="classes"),
        "keep_dtypes": run.trainer.predict(ROWS, keep_dtypes=True),
        "batches": run.trainer.predict(distloop.make_dataset(ROWS, 4), batches=3),
    }
    run.trainer.predict(ROWS, path=path)
    outputs["path"] = np.load(os.path.join(path, os.listdir(path)[0]))
    assert [len(values) for values in outputs.values()] == [33, 33, 33, 12, 33]
    outputs |= {f"evaluate {name}": value for name, value in run.trainer.evaluate(ROWS).items()}
    return numbers | {name: np.asarray(value, "float64") for name, value in outputs.items()}


def watched(run):
    """Trains with an evaluation, an action and a writer."""
    lines = Lines()
    stops = distloop.StopEarly("test/loss", patience=5)
    numbers = run.fit(evals={"test": ROWS}, actions=[stops], writers=[lines])
    return numbers | {"lines": np.array(lines.steps)}


def of_compiled(run):
    """Trains and evaluates a compiled model of Keras on arrays."""
    numbers = run.fit(X, Y, is_compiled=True, validation_data=(X[:9], Y[:9]))
    return numbers | {f"evaluate {name}": value for name, value in run.trainer.evaluate(X[:21], Y[:21]).items()}


def evaluated(run):
    """Trains with an evaluation for each argument of `Evaluation`."""
    trainer = distloop.Trainer(run.spec(lambda model: {}), distloop.Config(**run.settings))
    arguments = {
        "dataset": {},
        "every": {"every": "1 epoch"},
        "batches": {"batches": 2},
        "loss_fn": {"loss_fn": ones},
        "metrics": auc(trainer.model),
        "rows_fn": {"rows_fn": mean_of, "predict_fn": of_x(trainer.model)},
    }
    evals = {name: distloop.Evaluation(ROWS, **of_evaluation) for name, of_evaluation in arguments.items()}
    history = trainer.fit(ROWS, evals=evals)
    reported = {name: value for name, value in history.items() if "/" in name}
    assert {name.partition("/")[0] for name in reported} == evals.keys()
    return weights(trainer.model) | reported


def with_actions(run, made, **settings):
    """Trains with actions, and returns what they did by the checkpoints and files that are there."""
    numbers = run.fit(evals={"test": ROWS}, actions=made, settings={"workdir": run.directory + "/run"} | settings)
    found = {f"file {name}": 1.0 for name in checkpoints(run.directory + "/run")}
    return numbers | found | {"step": float(run.trainer.step)}


def saved(run):
    """Trains with the action `SaveBest`, of two metrics."""
    actions = [distloop.SaveBest("test/loss", keep=2), distloop.SaveBest("loss", mode="max")]
    return with_actions(run, actions, keep_checkpoints=1)


def stopped(run, **arguments):
    """Trains with the action `StopEarly`."""
    return with_actions(run, [distloop.StopEarly("test/loss", patience=1, **arguments)])


def recorded(run):
    """Trains with the action `ExampleHistory`, and returns what it wrote, for each epoch."""
    numbers = with_actions(run, [distloop.ExampleHistory(values=["loss"], every="2 steps")])
    history = np.load(run.directory + "/run/examples.npy")
    means = {name: np.nanmean(history[name], 1) for name in history.dtype.names}
    return numbers | {f"{name} of epoch {i}": mean for name in means for i, mean in enumerate(means[name])}


def checkpoints(workdir):
    return sorted(name for name in os.listdir(os.path.join(workdir, "checkpoints")) if name.isdigit())


def exported(run):
    """Trains with the action `Export` in several ways, and returns the names of the exports."""
    config = distloop.Config(**run.settings, workdir=run.directory + "/run")
    trainer = distloop.Trainer(run.spec(lambda model: {"predict_fn": of_x(model)}), config)
    arguments = {
        "every": {"suffix": ".npz", "every": 2, "keep": 1},
        "metric": {"suffix": ".npz", "metric": "test/loss"},
        "mode": {"suffix": ".npz", "metric": "test/loss", "mode": "max"},
        "suffix": {"suffix": ".keras"},
    }
    directories = {name: os.path.join(run.directory, name) for name in arguments}
    actions = [distloop.Export(trainer.export, directories[name], **arguments[name]) for name in arguments]
    trainer.fit(ROWS, evals={"test": ROWS}, actions=actions)
    files = {f"file {name}/{file}": 1.0 for name, path in directories.items() for file in os.listdir(path)}
    assert len({name.partition("/")[0] for name in files}) == len(arguments)
    return weights(trainer.model) | files


def batches(run, source=None, **arguments):
    """Trains on a dataset of `make_dataset`."""
    arguments = {"batch_size": 10, "shuffle": True} | arguments
    return run.fit(distloop.make_dataset(ROWS if source is None else source, **arguments))


def in_epochs(run):
    return run.fit(epochs=2, steps_per_epoch=2)


def in_dict_with_metrics(run):
    return run.fit(of_spec=lambda model: auc(model) | {"model": {"net": model}}, evals={"test": ROWS})


def decayed(run):
    return run.fit(of_spec=lambda model: {"optimizer": adamw(), "no_decay": "bias"})


def in_two_updates(run):
    return run.fit(of_spec=updates(sgd, variables="^net/hidden/"))


def with_decay_in_the_first(run):
    return run.fit(of_spec=updates(adamw, no_decay="bias"))


def by_processes(run):
    return batches(run, EXAMPLES, processes=2)


def unshuffled(run):
    return batches(run, tf.data.Dataset.from_tensor_slices(ROWS), shuffle=False, cache=True)


def padded(run):
    return batches(run, RAGGED, lengths=LENGTHS, pad_to=[2, 5])


def stopped_and_restored(run):
    return stopped(run, mode="max", restore_best=True)


SAME, OTHER = "the plain run's weights", "other weights"

CASES = {
    "fit": {
        "train": (SAME, used),
        "y": (SAME, of_compiled),
        "steps": (OTHER, lambda run: run.fit(steps=4)),
        "epochs": (OTHER, in_epochs),
        "until": (OTHER, lambda run: run.fit(until="50 examples")),
        "evals": (SAME, watched),
        "actions": (SAME, watched),
        "writers": (SAME, watched),
        "batch_size": (OTHER, lambda run: run.fit(batch_size=7)),
        "steps_per_epoch": (OTHER, in_epochs),
        "class_weight": (OTHER, lambda run: run.fit(X, Y, is_compiled=True, class_weight={0: 2.0, 1: 0.5})),
        "validation_data": (SAME, of_compiled),
        "validation_split": (OTHER, lambda run: run.fit(X, Y, is_compiled=True, validation_split=0.2)),
        "sample_weight": (OTHER, lambda run: run.fit(X, Y, is_compiled=True, sample_weight=1.0 + np.arange(33) % 3)),
    },
    "evaluate": {"dataset": (SAME, used), "y": (SAME, of_compiled)},
    "predict": dict.fromkeys(["dataset", "signature", "keep_dtypes", "batches", "path"], (SAME, used)),
    "ModelSpec": {
        "model": (SAME, in_dict_with_metrics),
        "optimizer": (OTHER, decayed),
        "loss_fn": (SAME, used),
        "predict_fn": (SAME, used),
        "metrics": (SAME, in_dict_with_metrics),
        "trainable": (OTHER, lambda run: run.fit(of_spec=lambda model: {"trainable": "logits"})),
        "batch_fn": (
            OTHER,
            lambda run: run.fit(of_spec=lambda model: {"batch_fn": lambda batch, training: double(batch, None)}),
        ),
        "gradient_fn": (OTHER, lambda run: run.fit(of_spec=lambda model: {"gradient_fn": halved})),
        "step_fn": (OTHER, lambda run: run.fit(of_spec=lambda model: {"step_fn": lambda s: halved(s.gradients())})),
        "learning_rates": (OTHER, lambda run: run.fit(of_spec=lambda model: {"learning_rates": {"hidden": 0.1}})),
        "no_decay": (OTHER, decayed),
        "updates": (OTHER, in_two_updates),
    },
    "Update": {
        "name": (OTHER, in_two_updates),
        "loss_fn": (OTHER, in_two_updates),
        "optimizer": (OTHER, with_decay_in_the_first),
        "variables": (OTHER, in_two_updates),
        "gradient_fn": (OTHER, lambda run: run.fit(of_spec=updates(sgd, gradient_fn=halved))),
        "step_fn": (OTHER, lambda run: run.fit(of_spec=updates(sgd, step_fn=lambda s: halved(s.gradients())))),
        "learning_rates": (OTHER, lambda run: run.fit(of_spec=updates(sgd, learning_rates={"kernel": 0.1}))),
        "no_decay": (OTHER, with_decay_in_the_first),
    },
    "Evaluation": dict.fromkeys(
        ["dataset", "every", "batches", "loss_fn", "metrics", "rows_fn", "predict_fn"], (SAME, evaluated)
    ),
    "make_dataset": {
        "source": (SAME, by_processes),
        "batch_size": (OTHER, lambda run: batches(run, batch_size={0: 10, 3: 5})),
        "shuffle": (OTHER, unshuffled),
        "seed": (OTHER, lambda run: batches(run, seed=3)),
        "map_fn": (OTHER, lambda run: batches(run, map_fn=double)),
        "cache": (OTHER, unshuffled),
        "drop_remainder": (OTHER, lambda run: batches(run, drop_remainder=True)),
        "lengths": (OTHER, padded),
        "pad_to": (OTHER, padded),
        "processes": (SAME, by_processes),
    },
    "SaveBest": {
        "metric": (SAME, saved),
        "mode": (SAME, saved),
        "keep": (SAME, saved),
        "restore": (OTHER, lambda run: with_actions(run, [distloop.SaveBest("test/loss", mode="max", restore=True)])),
    },
    "StopEarly": {
        "metric": (SAME, watched),
        "mode": (OTHER, stopped_and_restored),
        "patience": (SAME, watched),
        "min_delta": (OTHER, lambda run: stopped(run, min_delta=9.0)),
        "restore_best": (OTHER, stopped_and_restored),
    },
    "ExampleHistory": {"values": (SAME, recorded), "every": (SAME, recorded)},
    "RerunFaults": {"every": (SAME, lambda run: with_actions(run, [distloop.RerunFaults(every="2 steps")]))},
    "Export": dict.fromkeys(["export", "directory", "every", "metric", "mode", "keep", "suffix"], (SAME, exported)),
}
CASES_BY_NAME = [(function, argument) for function in CASES for argument in CASES[function]]
WIDE = [("Update", "step_fn"), ("Update", "learning_rates"), ("make_dataset", "seed")]  # others do the like

FUNCTIONS = {
    "fit": distloop.Trainer.fit,
    "evaluate": distloop.Trainer.evaluate,
    "predict": distloop.Trainer.predict,
    "make_dataset": distloop.make_dataset,
    **{cls.__name__: cls for cls in (distloop.ModelSpec, distloop.Update, distloop.Evaluation)},
    **{cls.__name__: cls for cls in (distloop.SaveBest, distloop.StopEarly, distloop.Export)},
    **{cls.__name__: cls for cls in (distloop.ExampleHistory, distloop.RerunFaults)},
}
LEFT_OUT = {"self", "keras_arguments", "others"}  # the names behind `**` are cases of their own; `*others` is refused


def ones(batch, training):
    return {"loss": tf.ones_like(batch["x"][:, 0]), "x": batch["x"][:, 0]}


def mean_of(outputs):
    return {"mean": float(np.mean(outputs)), "rows": len(outputs)}


def of_x(model):
    return lambda batch: model(batch["x"], training=False)


def test_every_argument_of_the_public_functions_has_a_case():
    for name, function in FUNCTIONS.items():
        names = set(inspect.signature(function).parameters) - LEFT_OUT
        if name == "fit":
            names |= set(KerasArguments.__annotations__)
        assert CASES[name].keys() == names, name


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Returns a function that gives what a function of a `Run` returns on so many devices, and calls it once."""
    return functools.cache(lambda train, devices: train(Run(devices, tmp_path_factory.mktemp("run"))))


def different(one, other):
    """Returns the relative differences beyond rounding of numbers by name."""
    assert one.keys() == other.keys()
    apart = {name: np.abs(one[name] - other[name]).max() / max(np.abs(one[name]).max(), 1e-3) for name in one}
    return {name: value for name, value in apart.items() if not value <= TOLERANCE}


@pytest.mark.slow
@pytest.mark.parametrize(
    "function,argument",
    mostly_wide(CASES_BY_NAME, *(case for case in CASES_BY_NAME if case not in WIDE)),
)
def test_an_argument_does_the_same_on_two_devices_as_on_one(function, argument, outcome):
    changes, train = CASES[function][argument]
    one, two = (outcome(train, devices) for devices in (1, 2))
    assert not different(one, two)
    plain = {name: value for name, value in outcome(Run.fit, 1).items() if name != "loss"}
    apart = different({name: one[name] for name in plain}, plain)
    assert not apart if changes == SAME else max(apart.values()) > 10 * TOLERANCE
