"""Small problems that the tests train on, and ways to compare what came of them."""

import contextlib
import functools
import itertools
import json
import math
import os
import pathlib
import re
import resource
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data import shards
from distloop.distributed import devices, strategies
from distloop.model.saved_state import relative_difference
from distloop.testing import tiny_classification as classification  # noqa: F401 - for the tests
from distloop.workdir.records import OF_THE_MACHINE


def on(replicas, **settings):
    """A config for so many virtual CPUs that prints little."""
    return distloop.Config(**{"device": "cpu", "num_devices": replicas, "log_every": 0, **settings})


def classifier(
    *,
    optimizer=None,
    dropout=0.0,
    batch_norm=None,
    l2=0.0,
    is_weighted=False,
    metrics=None,
    on_trace=lambda training: None,
):
    """A `model_fn` for `classification`; by default with momentum, which TensorFlow traces faster than Adam."""

    def model_fn():
        layers = [
            keras.Input((8,)),
            # Statistics of the batch nearly cancel a bias: float32 rounds 5e-7 of its gradient away, on one device too.
            keras.layers.Dense(16, "tanh", use_bias=batch_norm is None, kernel_regularizer=_l2(l2), name="hidden"),
        ]
        if batch_norm is not None:
            layers.append(keras.layers.BatchNormalization(synchronized=batch_norm == "synchronized", name="norm"))
        if dropout:
            layers.append(keras.layers.Dropout(dropout, name="dropout"))
        model = keras.Sequential([*layers, keras.layers.Dense(4, name="logits")], name="net")

        def loss_fn(batch, training):
            on_trace(training)
            logits = model(batch["x"], training=training)
            hit = keras.metrics.sparse_categorical_accuracy(batch["label"], logits)
            outputs = {"loss": cross_entropy(batch["label"], logits), "accuracy": hit}
            if is_weighted:
                outputs = {name: distloop.weighted(value, batch["weight"]) for name, value in outputs.items()}
            if metrics:
                probability = tf.nn.softmax(logits)[:, 0]
                outputs["auc"] = (tf.cast(batch["label"] == 0, tf.float32), probability)
                outputs["most"] = (batch["label"], probability)
            return outputs

        return distloop.ModelSpec(
            model,
            optimizer() if optimizer else keras.optimizers.SGD(0.1, momentum=0.9),
            loss_fn,
            predict_fn=lambda batch: model(batch["x"], training=False),
            metrics={"auc": keras.metrics.AUC(num_thresholds=50), "most": Largest()} if metrics else None,
        )

    return model_fn


@keras.saving.register_keras_serializable("tests")
class Largest(keras.metrics.Metric):
    """The largest value of all rows, a state that is no sum: a step gathers the rows of all replicas for it."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.largest = self.add_variable((), "zeros")

    def update_state(self, labels, values):
        self.largest.assign(tf.maximum(self.largest, tf.cast(tf.reduce_max(values), "float32")))

    def result(self):
        return self.largest


def batches(size=16, rows=67, **arguments):
    """Returns a dataset of batches of `classification`, of which the last one is odd by default."""
    return distloop.make_dataset(classification(rows), size, **arguments)


def train(model_fn, config, dataset, steps=12, **arguments):
    """Trains in one `fit`; returns the trainer."""
    trainer = distloop.Trainer(model_fn, config)
    trainer.fit(dataset, steps=steps, **arguments)
    return trainer


def cross_entropy(labels, logits):
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def loss_fn_of(model):
    """Returns a `loss_fn` of the cross entropy alone, for `classification`."""
    return lambda batch, training: {"loss": cross_entropy(batch["label"], model(batch["x"], training=training))}


def report(step=10, until=100, **metrics):
    """Returns what an action gets at a boundary, without a state."""
    return distloop.Report(step, until, metrics, state=None)


def every(steps, act):
    """Returns the function as an action of every so many steps."""
    act.every = steps
    return act


def looks(trainer, data, steps, at, look):
    """Trains in one `fit`, and returns what the function gave of the report of every so many steps."""
    seen = []
    trainer.fit(data, steps=steps, actions=[every(at, lambda report: seen.append(look(report)))])
    return seen


def seconds_of_one_loop():
    """Stands in for the module `time` of `training/loop.py`: each loop seems to take a second."""
    return types.SimpleNamespace(monotonic=itertools.count().__next__, time=time.time)


def _array(value):
    return np.copy(value.numpy() if hasattr(value, "numpy") else value)


class Lazy(keras.Model):
    """Knows no input shape until it is called."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(4, name="first")
        self.second = keras.layers.Dense(2, name="second")

    def call(self, x, training=False):
        return self.second(self.first(x))


@keras.saving.register_keras_serializable("tests")
class Counting(keras.layers.Layer):
    """Counts its calls, and moves the statistics of its BatchNormalization in evaluations, too."""

    def build(self, shape):
        self.norm = keras.layers.BatchNormalization(name="norm")
        self.norm.build(shape)
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return self.norm(inputs, training=True) / self.calls


def counting_model():
    """A `model_fn` whose forward pass writes variables that nothing trains, in evaluations, too."""
    net = keras.Sequential(
        [keras.Input((8,)), Counting(name="counting"), keras.layers.Dense(4, name="logits")], name="net"
    )
    loss_fn = loss_fn_of(net)
    return distloop.ModelSpec(
        net, keras.optimizers.SGD(0.1), loss_fn, predict_fn=lambda batch: net(batch["x"], training=False)
    )


def _l2(strength):
    return keras.regularizers.L2(strength) if strength else None


def weights(trainer):
    """Copies of all the model's variables, as NumPy arrays by path."""
    return {path: _array(v) for path, v in _named(trainer)}


def everything(trainer):
    """Copies of all that training changes, on every replica; under float16 also `loss_scale/...` and `streak/...`."""
    state = trainer.state
    found = dict(_named(trainer))
    for name, optimizer in state.optimizers.items():
        if isinstance(optimizer, distloop.LossScaleOptimizer):
            found |= {f"loss_scale/{name}": optimizer.loss_scale, f"streak/{name}": optimizer.streak}
            optimizer = optimizer.inner_optimizer
        found |= {f"optimizer/{name}/{i}": v for i, v in enumerate(optimizer.variables)}
    if state.average is not None:
        found |= {f"average/{i}": v for i, v in enumerate(state.average.variables)}
    found |= {"step": state.step, "skipped_steps": state.skipped_steps}
    local = {path: local_values(trainer, v) for path, v in found.items()}
    return {f"{path}@{replica}": _array(v) for path, values in local.items() for replica, v in enumerate(values)}


def local_values(trainer, variable):
    """What each replica holds of a variable."""
    variable = variable.value if isinstance(variable, keras.Variable) else variable
    return [tf.convert_to_tensor(v).numpy() for v in trainer.strategy.experimental_local_results(variable)]


def _named(trainer):
    from distloop.variables import named_variables

    return named_variables(trainer.model).items()


def assert_close(found, expected, tolerance=1e-6):
    """Compares arrays, each by the norm of its difference relative to its own."""
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        if np.issubdtype(value.dtype, np.floating):
            difference = relative_difference(found[path], value)
            assert difference <= tolerance, f"{path}: {difference:.2e}"


def assert_equal(found, expected):
    """Compares arrays bit for bit."""
    assert found.keys() == expected.keys()
    different = [path for path in expected if found[path].tobytes() != expected[path].tobytes()]
    assert not different, different


# What a run with the evaluation "test" leaves in its workdir, beside event files.
FILES_OF_A_RUN = ["checkpoints", "config.json", "flags.txt", "memory.json", "metrics.jsonl", "progress.json"]
FILES_OF_A_RUN += ["starts.jsonl", "test", "train"]


def json_lines(path):
    """Returns what each line of a file holds."""
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def rows_of(workdir):
    """Returns the rows of a run's metrics.jsonl without what depends on the machine."""
    rows = json_lines(pathlib.Path(workdir) / "metrics.jsonl")
    return [{name: row[name] for name in sorted(row.keys() - OF_THE_MACHINE - {"time"})} for row in rows]


def files_of(workdir):
    return sorted(name for name in os.listdir(workdir) if not name.startswith("events."))


def write_run(path, rows, settings=None, *, saved=None, incidents=(), starts=(), age_secs=3600):
    """Writes what a run leaves behind, as far as the report reads it; a second a row, the last one `age_secs` ago.

    Args:
        path: the workdir, a `pathlib.Path`.
        rows: name -> number or None, each with its `step`.
        settings: of config.json; None: there is none.
        saved: `step`, `until` and `stop_reason` of the only checkpoint; None: there is none.
        incidents: rows of incidents.jsonl.
        starts: rows of starts.jsonl.
        age_secs: how old the last row is.
    """
    path.mkdir(parents=True)
    first = time.time() - age_secs - len(rows) + 1
    lines = [json.dumps({"step": row["step"], "time": first + i, **row}) + "\n" for i, row in enumerate(rows)]
    (path / "metrics.jsonl").write_text("".join(lines))
    if settings is not None:
        (path / "config.json").write_text(json.dumps({"workdir": str(path), **settings}))
    if saved:
        checkpoint = path / "checkpoints" / str(saved["step"])
        checkpoint.mkdir(parents=True)
        notes = {"until": saved["until"], "stop_reason": saved.get("stop_reason")}
        (checkpoint / "manifest.json").write_text(json.dumps({"step": saved["step"], "notes": notes}))
    for name, rows in (("incidents", incidents), ("starts", starts)):
        if rows:
            (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@contextlib.contextmanager
def full_disk(num_bytes=0):
    """Enters a scope in which no file grows beyond so many bytes: the operating system refuses the write that would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def with_odd_values(content):
    """Yields a value of JSON with something odd in place of each value in it, one at a time."""
    all_odd = (None, "x", [], {}, [[1]], math.inf, -1, 10**400, "\ud800")
    yield from (odd for odd in all_odd if type(odd) is not type(content) or type(odd) is int)
    for key in content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ():
        rest = dict(content) if isinstance(content, dict) else list(content)
        for odd in with_odd_values(content[key]):
            rest[key] = odd
            yield rest


def optimize_graphs():
    """Turns TensorFlow's graph optimizers on again, which virtual replicas turn off in a process."""
    tf.config.optimizer.set_experimental_options(dict.fromkeys(devices._REWRITE_ARITHMETIC, True))


@functools.cache
def mirrored(count):
    """Returns a mirrored strategy on `count` virtual CPUs."""
    return strategies.make_strategy(distloop.Config(device="cpu", strategy="mirrored", num_devices=count))


def numbers(count, batch_size):
    """Returns a dataset of batches {"x": [B]} of the numbers from 0."""
    return tf.data.Dataset.range(count).batch(batch_size).map(lambda x: {"x": x})


def of_unknown_length(dataset):
    """Returns the dataset without a known length."""
    return dataset.filter(lambda *_: True)


def sizes_1_to_9():
    """Returns a dataset of batches of 1 to 9 rows, which hold numbers from 100."""
    return tf.data.Dataset.range(1, 10).map(lambda n: 100 + tf.range(n))


def batch_taker(source, iterator):
    """Returns a function that takes a batch, compiled as in a loop."""
    return tf.function(lambda: shards.next_batch(iterator, source.layout), autograph=False)


def refused(action, *parts, kind=ValueError):
    """Checks that a call raises one sentence with every part, in this order; returns the sentence."""
    with pytest.raises(kind) as caught:
        action()
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message, message
    assert message.endswith("."), message
    assert not re.search(r"[.!?] +[A-Z]", message), f"more than one sentence: {message}"
    assert re.search(".*".join(map(re.escape, parts)), message), message
    return message


def mostly_wide(cases, *kept):
    """Returns parameters of which `make test` runs the kept ones, or else the first, and `make wide` all."""
    cases = list(cases)
    assert all(case in cases for case in kept)
    return [case if (case in kept if kept else i == 0) else _wide(case) for i, case in enumerate(cases)]


def _wide(case):
    marks = [pytest.mark.wide, *getattr(case, "marks", [])]
    values = getattr(case, "values", case) if isinstance(case, tuple | list) else [case]
    return pytest.param(*values, marks=marks, id=getattr(case, "id", None))
