"""Tools for users' own tests, such as `assert_replica_law`; the checks of `distloop.smoke`.

They need no test framework. In a test file:

    def test_my_model_keeps_the_replica_law():                       # with distloop.prepare(...) in conftest.py
        testing.assert_replica_law(model_fn, dataset, replicas=(1, 2, 4))

    def count_replicas():                                            # at the top of the module, for another process
        return distloop.Trainer(model_fn, distloop.Config(device="cpu")).strategy.num_replicas_in_sync

    def test_on_three_devices_and_in_two_workers():
        assert testing.run_on_devices(count_replicas, 3) == 3
        assert testing.run_in_workers(count_replicas, 2) == [2, 2]

`import distloop` does not import it: write `from distloop import testing`.
"""

import functools
import itertools
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from distloop.data.iterators import fresh_copy
from distloop.data.source import Data
from distloop.distributed import strategies
from distloop.model.saved_state import SavedState, relative_difference
from distloop.model.spec import GradientFn, ModelSpec
from distloop.settings.config import Config
from distloop.settings.durations import require_integer
from distloop.trainer import Trainer
from distloop.training.action import Action, Report
from distloop.variables import is_seed, portable_names, tensorflow_variable
from distloop.workdir.records import ABOUT_THE_RUN, OF_THE_MACHINE

T = TypeVar("T")

CALL, RESULT = "call.pickle", "result.{}.pickle"  # files by which the processes communicate


def run_on_devices(fn: Callable[..., T], devices: int, *arguments: Any, timeout_secs: float = 300.0) -> T:
    """Calls a function in a new process with the given number of virtual CPUs.

    Args:
        fn: defined at the top level of an importable module, or a `functools.partial` of such a function; its
            arguments and result can be pickled.
        devices: number of virtual CPUs.
        *arguments: of `fn`.
        timeout_secs: the longest time to wait.

    Returns:
        The result of `fn`.

    Raises:
        ValueError: if another process cannot import `fn`.
        RuntimeError: if `fn` failed; the message holds the end of its process's output.
        subprocess.TimeoutExpired: if it takes longer.
    """
    command = [sys.executable, "-m", "distloop.testing", f"--num_devices={devices}", f"--parent={os.getpid()}"]
    return _call(command, fn, arguments, 1, timeout_secs)[0]


def run_in_workers(
    fn: Callable[..., T], workers: int, *arguments: Any, devices_per_worker: int = 1, timeout_secs: float = 300.0
) -> list[T]:
    """Calls a function in each of several workers on this machine, which `distloop.launch` starts.

    Args:
        fn: as for `run_on_devices`; called when all workers are connected.
        workers: number of workers.
        *arguments: of `fn`.
        devices_per_worker: number of virtual CPUs of each worker.
        timeout_secs: the longest time to wait.

    Returns:
        The result of `fn` in each worker, the chief's first.

    Raises:
        ValueError: as for `run_on_devices`.
        RuntimeError: as for `run_on_devices`.
        subprocess.TimeoutExpired: as for `run_on_devices`.
    """
    require_integer("run_in_workers", 1, workers=workers, devices_per_worker=devices_per_worker)
    command = [sys.executable, "-m", "distloop.launch", f"--workers={workers}"]
    command += [f"--devices_per_worker={devices_per_worker}", f"--parent={os.getpid()}", "-m", "distloop.testing"]
    return _call(command, fn, arguments, workers, timeout_secs)


def assert_replica_law(
    model_fn: Callable[[], ModelSpec],
    dataset: Data,
    replicas: Sequence[int] = (1, 2, 4),
    *,
    steps: int = 5,
    tolerance: float = 1e-5,
    **settings: Any,
) -> None:
    """Checks that a model trains to the same weights, and reports the same values, on any number of replicas.

    Gradients that only rounding keeps from 0 count as 0, as `without_rounding_noise` says.

    It runs in this process, on virtual CPUs, which TensorFlow can create only before its first tensor: call
    `distloop.prepare(distloop.Config(device="cpu", num_devices=4))` in conftest.py, or call this by `run_on_devices`.

    Args:
        model_fn: as for `Trainer`; without dropout or other random numbers in training, which differ between replicas.
        dataset: as for `Trainer.fit`; each number of replicas reads it again.
        replicas: two numbers of replicas or more; each is compared with the first.
        steps: number of steps to train.
        tolerance: the largest norm of a difference, relative to the norm of the values; `without_rounding_noise` gets
            the same.
        **settings: of `Config`, such as `clip_norm=1.0`; not `workdir` and `num_devices`.

    Raises:
        AssertionError: if a weight or metric differs; the message names the one that differs most.
        ValueError: if TensorFlow has started with fewer devices.
    """
    strategies.prepare(_config(max(replicas, default=1), replicas, settings))
    expected: dict[str, np.ndarray] = {}
    for count in replicas:
        trainer = Trainer(without_rounding_noise(model_fn, tolerance), _config(count, replicas, settings))
        values = _reported(trainer.fit(fresh_copy(dataset), steps=steps), ABOUT_THE_RUN - {"gradient_norm"})
        for path, variable in portable_names(trainer.model).items():
            if not is_seed(variable):
                values[path] = tensorflow_variable(variable).numpy()
        expected = expected or values
        differences = {name: relative_difference(values[name], value) for name, value in expected.items()}
        name = max(differences, key=lambda name: differences[name])
        if not differences[name] <= tolerance:
            raise AssertionError(
                f"After {steps} steps {name} differs by {differences[name]:.1e} of its norm between {replicas[0]} and "
                f"{count} replicas, more than {tolerance:g}; trainer.audit(dataset) looks for the cause."
            )


def assert_same_bits(
    model_fn: Callable[[], ModelSpec],
    dataset: Data,
    replicas: Sequence[int] = (1, 2, 4),
    *,
    virtual_replicas: int = 4,
    steps: int = 5,
    **settings: Any,
) -> None:
    """Checks that a model has the same bits on any number of devices: of training, an evaluation and predictions.

    It compares the bytes of what each step reports, of all that a checkpoint holds after the last one, of an evaluation
    on the same data, and of the predictions if there is a `predict_fn`. It runs in this process, on virtual CPUs: call
    `distloop.prepare(distloop.Config(device="cpu", num_devices=4, virtual_replicas=4))` in conftest.py, or call this by
    `run_on_devices`.

    Args:
        model_fn: as for `Trainer`.
        dataset: as for `Trainer.fit`; finite; each number of devices reads it again.
        replicas: two numbers of devices or more, which divide `virtual_replicas`; each is compared with the first.
        virtual_replicas: as `Config.virtual_replicas`.
        steps: number of steps to train.
        **settings: of `Config`, such as `microbatches=2`; not `workdir` and `num_devices`.

    Raises:
        AssertionError: if a byte differs; the message names the first value that does, and by how much.
        ValueError: if TensorFlow has started with fewer devices or other threads, or virtual replicas cannot run it.
    """
    settings = {**settings, "virtual_replicas": virtual_replicas}
    strategies.prepare(_config(max(replicas, default=1), replicas, settings))
    expected: dict[str, np.ndarray] = {}
    for count in replicas:
        trainer = Trainer(model_fn, _config(count, replicas, settings))
        # The model of `from_keras(model)` gets no trained weights, with which the next Trainer would begin.
        object.__setattr__(trainer.state.spec, "original", None)
        values = _all_values(trainer, dataset, steps)
        expected = expected or values
        for name, value in expected.items():
            if values[name].tobytes() != value.tobytes():
                raise AssertionError(
                    f"{name} has other bits on {replicas[0]} and {count} devices with {virtual_replicas=}: "
                    f"{_show_difference(values[name], value)}; trainer.audit(dataset) looks for the cause."
                )


class _Values(Action):
    """An action that keeps what each step reports, and all other numbers of a run, in the order in which they come."""

    every = 1

    def __init__(self) -> None:
        self.values: dict[str, np.ndarray] = {}

    def __call__(self, report: Report) -> None:
        self.add(f"After step {report.step}, ", _reported(report.metrics, OF_THE_MACHINE))

    def add(self, prefix: str, numbers: Mapping[str, Any]) -> None:
        for name, value in numbers.items():
            array = np.asarray(value)
            self.values[f"{prefix}{name}"] = array.astype(bytes) if array.dtype == object else array  # strings


def _all_values(trainer: Trainer, dataset: tf.data.Dataset, steps: int) -> dict[str, np.ndarray]:
    """Trains, evaluates and predicts; returns all numbers by name."""
    values = _Values()
    trainer.fit(fresh_copy(dataset), steps=steps, actions=[values])
    values.add(f"After step {steps}, ", SavedState(trainer.state).snapshot())
    values.add("In an evaluation, ", _reported(trainer.evaluate(fresh_copy(dataset)), OF_THE_MACHINE))
    if trainer.state.spec.predict_fn is not None:
        leaves = keras.tree.flatten_with_path(trainer.predict(fresh_copy(dataset)))
        values.add("In predictions, ", {"/".join(map(str, path)) or "the result": leaf for path, leaf in leaves})
    return values.values


def _show_difference(value: np.ndarray, reference: np.ndarray) -> str:
    if value.shape != reference.shape:
        return f"the shape is {list(value.shape)} and {list(reference.shape)}"
    if value.size == 1:
        return f"{reference.item()!r} and {value.item()!r}"
    count = sum(a.tobytes() != b.tobytes() for a, b in zip(value.ravel(), reference.ravel(), strict=True))
    return f"{count} of {value.size} numbers, by {relative_difference(value, reference):.1e} of the norm"


def without_rounding_noise(model_fn: Callable[[], ModelSpec], tolerance: float = 1e-5) -> Callable[[], ModelSpec]:
    """Returns a `model_fn` whose optimizers get 0 for gradients that are tiny beside those of the same layer.

    The loss does not depend on a bias before BatchNormalization or on the bias of an attention's keys: the gradient is
    a sum of terms that cancel, and what remains is rounding, about 1e-7 of the terms. It is another number on another
    number of devices, and Adam, which divides a gradient by its size, makes a whole step of it. The terms have the size
    of the other gradients in the layer, so they tell which gradients are noise.

    Args:
        model_fn: as for `Trainer`.
        tolerance: the size below which an element counts as 0, relative to the largest gradient in the innermost scope
            of the variable's path that holds another trained variable too.
    """

    def changed_model_fn() -> ModelSpec:
        spec = model_fn()
        updates = [
            replace(update, gradient_fn=functools.partial(_zero_noise, tolerance, update.gradient_fn))
            for update in spec.updates
        ]
        if spec.optimizer is None:
            return replace(spec, updates=updates, batch_fn=None)  # their loss_fn calls it already
        return replace(spec, gradient_fn=updates[0].gradient_fn, updates=())

    return changed_model_fn


def _zero_noise(
    tolerance: float, gradient_fn: GradientFn | None, gradients: Mapping[str, tf.Tensor]
) -> Mapping[str, tf.Tensor]:
    """Zeroes elements that are small beside the other gradients of a layer, then calls the user's function, if any."""
    largest = {path: tf.reduce_max(tf.abs(gradient)) for path, gradient in gradients.items()}
    zeroed = {}
    for path, gradient in gradients.items():
        scopes = itertools.accumulate(path.split("/")[:-1], "{}/{}".format)
        neighbours = [[other for other in largest if other.startswith(f"{scope}/")] for scope in scopes]
        innermost = next((paths for paths in reversed(neighbours) if len(paths) > 1), list(largest))
        limit = tolerance * tf.reduce_max([tf.cast(largest[other], gradient.dtype) for other in innermost])
        zeroed[path] = tf.where(tf.abs(gradient) > limit, gradient, tf.zeros_like(gradient))
    return zeroed if gradient_fn is None else gradient_fn(zeroed)


def tiny_classification(rows: int = 67, features: int = 8, classes: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns a small learnable problem, as arrays for `distloop.make_dataset`.

    Args:
        rows: number of examples, N.
        features: F, at least `classes`.
        classes: number of labels, C.
        seed: of the random numbers.

    Returns:
        `x` `[N, F]` float32; `label` `[N]` int32, the index of the largest of the first C entries by absolute value;
        and `weight` `[N]` float32, some of them 0.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features)).astype(np.float32)
    return {
        "x": x,
        "label": np.abs(x[:, :classes]).argmax(1).astype(np.int32),
        "weight": rng.choice([0.0, 0.5, 1.0, 3.0], size=rows).astype(np.float32),
    }


def _config(count: int, replicas: Sequence[int], settings: Mapping[str, Any]) -> Config:
    if len({*replicas}) < 2:
        raise ValueError(f"{replicas=} was given, and each is compared with the first: give two numbers or more.")
    if given := sorted({"num_devices", "workdir"} & settings.keys()):
        raise ValueError(
            f"{given[0]} was given as a setting, and each number in replicas= trains anew, on so many devices: leave "
            f"{given[0]} out."
        )
    return Config(**{"device": "cpu", "num_devices": count, "console": "quiet", "log_every": 0, **settings})


def _reported(metrics: Mapping[str, float], left_out: Set[str]) -> dict[str, np.ndarray]:
    """Returns numbers without those whose names end in one of `left_out`."""
    return {name: np.asarray(value) for name, value in metrics.items() if name.rpartition("/")[2] not in left_out}


def _call(
    command: Sequence[str], fn: Callable[..., Any], arguments: Sequence[Any], num_results: int, timeout_secs: float
) -> list[Any]:
    """Runs a command whose processes call a function; returns the results of all processes."""
    module, name = (named := getattr(fn, "func", fn)).__module__, named.__qualname__  # of a partial its function's
    if module == "__main__" or "<" in name:
        raise ValueError(f"{module}.{name} was given; no other process can import it: put it at the top of a module.")
    with tempfile.TemporaryDirectory() as directory:
        pathlib.Path(directory, CALL).write_bytes(pickle.dumps((fn, arguments)))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        done = subprocess.run(
            [*command, directory], env=environment, capture_output=True, text=True, timeout=timeout_secs, check=False
        )
        if done.returncode:
            output = "\n".join((done.stdout + done.stderr).splitlines()[-60:])
            raise RuntimeError(f"{name} failed with exit code {done.returncode}:\n{output}")
        return [pickle.loads(pathlib.Path(directory, RESULT.format(i)).read_bytes()) for i in range(num_results)]
