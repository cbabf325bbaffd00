"""Smoke test: each check of `python -m distloop.smoke`, and a line with its result.

    python -m distloop.smoke                                     # on the GPUs, or else the CPU
    python -m distloop.smoke --device=cpu --num_devices=2        # on virtual CPUs
    python -m distloop.smoke --logical_gpus=4                    # on four parts of the first GPU

Each line holds the check, `passed`, `failed` or `skipped`, and a measurement. The exit code is 0 if nothing failed,
1 if a check failed, 2 if there are no such devices. It takes about a minute and leaves no files behind. It has not
been run on a GPU.
"""

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distloop.data.make_dataset import make_dataset
from distloop.distributed import devices, strategies
from distloop.graph_functions import graph_function
from distloop.model.saved_state import relative_difference
from distloop.model.spec import ModelSpec
from distloop.settings.config import Config
from distloop.settings.precision import FLOAT16
from distloop.trainer import Trainer
from distloop.variables import digest, named_variables, tensorflow_variable

_STEPS, _ROWS, _BATCH_SIZE = 8, 61, 16  # the last batch is odd
_LOGICAL_MEGABYTES = 2048
_TOLERANCE = 1e-5  # relative, of each variable: devices sum in another order, and XLA rounds differently


class _Skipped(Exception):  # noqa: N818 - no error
    """A check does not apply to these devices; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m distloop.smoke", description="Tries distloop on this machine.")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "gpu"], help="what to run on; auto")
    parser.add_argument("--num_devices", default=0, type=int, help="how many; 0: all")
    parser.add_argument("--logical_gpus", default=0, type=int, help="split the first GPU into so many of 2 GB")
    options = parser.parse_args(arguments)
    try:
        if options.logical_gpus:
            devices.split_first_gpu(options.logical_gpus, _LOGICAL_MEGABYTES)
        config = Config(
            device=options.device, num_devices=options.num_devices, strategy="mirrored", log_every=0, console="quiet"
        )
        strategies.prepare(replace(config, intra_op_threads=1))  # which virtual replicas need, before TensorFlow starts
        strategies.make_strategy(config)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    tf.config.experimental.enable_tensor_float_32_execution(False)  # its rounding exceeds the tolerance
    results = [_run(name, check, config) for name, check in _CHECKS.items()]
    counts = {word: results.count(word) for word in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return 1 if counts["failed"] else 0


def _run(name: str, check: Callable[[Config], str], config: Config) -> str:
    """Runs a check and prints its line; any exception is a failure of the check."""
    try:
        result, detail = "passed", check(config)
    except _Skipped as reason:
        result, detail = "skipped", str(reason)
    except Exception as error:
        result, detail = "failed", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    print(f"{name:<28} {result:<8} {detail}", flush=True)
    return result


def _devices(config: Config) -> str:
    gpus = []
    for gpu in tf.config.get_visible_devices("GPU") if config.device != "cpu" else []:
        details = tf.config.experimental.get_device_details(gpu)
        gpus.append(f"{details.get('device_name', gpu.name)} {details.get('compute_capability', '')}".strip())
    build = tf.sysconfig.get_build_info()
    versions = f"TensorFlow {tf.__version__}, Keras {keras.__version__}, CUDA {build.get('cuda_version', 'none')}"
    return f"{strategies.describe(strategies.make_strategy(config))}; {', '.join(gpus) or 'no GPU'}; {versions}"


def _reduction(config: Config) -> str:
    strategy = strategies.make_strategy(config)

    def add() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        number = tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, number * tf.ones([3]))

    sums = strategy.experimental_local_results(graph_function(lambda: strategy.run(add))())
    count = strategy.num_replicas_in_sync
    for total in sums:
        _require(total.numpy().tolist() == [count * (count + 1) / 2] * 3, f"the replicas' numbers add up to {total}")
    return f"right, by {strategies.describe_reduction(strategy)}"


def _replicas(config: Config) -> str:
    model_fn = functools.partial(_model_fn, is_normalized=True)
    several, one = (_train(replace(config, num_devices=count), model_fn) for count in (config.num_devices, 1))
    for path, values in _values(several).items():
        same = all(np.array_equal(value, values[0]) for value in values)
        _require(same, f"{path} differs between replicas")
    return f"after {_STEPS} steps {_compare(several, one)}"


def _same_bits(config: Config) -> str:
    count = strategies.make_strategy(config).num_replicas_in_sync
    if count == 1:
        raise _Skipped("there is one device")
    count = 1 << (count.bit_length() - 1)  # the largest power of two
    model_fn = functools.partial(_model_fn, is_normalized=True, is_random=True)
    settings = {"virtual_replicas": count, "intra_op_threads": 1}
    one, several = (_train(replace(config, num_devices=n, **settings), model_fn) for n in (1, count))
    for (path, values), expected in zip(_values(several).items(), _values(one).values(), strict=True):
        _require(values[0].tobytes() == expected[0].tobytes(), f"{path} has other bits on 1 and {count} devices")
    return f"the same weights on 1 and {count} devices, SHA-256 {digest(several.model)[:8]}..."


def _overflow(config: Config) -> str:
    trainer = _train(replace(config, precision=FLOAT16.name))
    before, scale = _values(trainer), float(trainer.state.loss_scale)
    rows = _rows()
    rows["x"][_BATCH_SIZE - 1] = np.inf  # on the last replica alone
    trainer.fit(make_dataset(rows, _BATCH_SIZE), steps=trainer.step + 1)
    after, later_scale = _values(trainer), float(trainer.state.loss_scale)
    _require(int(trainer.state.skipped_steps) == 1, "the step was not skipped")
    same = all(np.array_equal(a, b) for path in before for a, b in zip(before[path], after[path], strict=True))
    _require(same, "the step changed weights")
    _require(later_scale == scale / 2, f"the loss scale went from {scale:g} to {later_scale:g}")
    return f"skipped on every replica, the loss scale went from {scale:g} to {later_scale:g}"


def _restore(config: Config) -> str:
    with tempfile.TemporaryDirectory() as directory:
        for steps in (_STEPS // 2, _STEPS):
            resumed = _train(replace(config, workdir=directory), steps=steps)
    return f"saved at step {_STEPS // 2} and resumed: {_compare(resumed, _train(config))} from an uninterrupted run"


def _predict(config: Config) -> str:
    trainer = Trainer(_model_fn, config)
    numbers = trainer.predict(make_dataset(_rows(), _BATCH_SIZE))["number"]
    _require(numbers.tolist() == list(range(_ROWS)), "rows are lost, repeated or out of order")
    return f"{_ROWS} rows, each once and in order"


def _jit(config: Config) -> str:
    compiled = replace(config, jit_compile="pass")
    return f"{_compare(_train(compiled), _train(config))} from those without XLA"


def _input(config: Config) -> str:
    if "GPU" not in strategies.describe(strategies.make_strategy(config)):
        raise _Skipped("on a CPU, batches need no transfer")
    rows = {name: np.repeat(values, 1000, 0) for name, values in _rows().items()}
    waited = Trainer(_model_fn, config).fit(make_dataset(rows, 1000 * _BATCH_SIZE), steps=200)["input_wait"]
    _require(waited < 0.5, f"the steps waited {waited:.0%} of the time for data")
    return f"the steps waited {waited:.0%} of the time for data"


_CHECKS: dict[str, Callable[[Config], str]] = {
    "devices": _devices,
    "sums over replicas": _reduction,
    "one device or all": _replicas,
    "overflow in float16": _overflow,
    "save and restore": _restore,
    "order of predictions": _predict,
    "XLA (jit_compile)": _jit,
    "batches to the devices": _input,
    "same bits (virtual_replicas)": _same_bits,  # last: it keeps TensorFlow from optimizing graphs
}


def _rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(_ROWS, 8)).astype(np.float32),
        "label": rng.integers(0, 4, _ROWS).astype(np.int32),
        "number": np.arange(_ROWS, dtype=np.float32),
    }


def _model_fn(is_normalized: bool = False, is_random: bool = False) -> ModelSpec:
    layers = [keras.Input((8,)), keras.layers.Dense(16, activation="tanh")]
    if is_normalized:
        layers.append(keras.layers.BatchNormalization(synchronized=not is_random))
    if is_random:
        layers.append(keras.layers.Dropout(0.3))
    model = keras.Sequential([*layers, keras.layers.Dense(4, dtype="float32")])

    def loss_fn(batch: Any, training: bool) -> dict[str, tf.Tensor]:
        logits = model(batch["x"], training=training)  # [B, 4]
        return {"loss": keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)}

    return ModelSpec(
        model,
        keras.optimizers.SGD(0.1, momentum=0.9),
        loss_fn,
        predict_fn=lambda batch: {"number": batch["number"], "logits": model(batch["x"], training=False)},
    )


def _train(config: Config, model_fn: Callable[[], ModelSpec] = _model_fn, steps: int = _STEPS) -> Trainer:
    trainer = Trainer(model_fn, config)
    trainer.fit(make_dataset(_rows(), _BATCH_SIZE), steps=steps)
    return trainer


def _values(trainer: Trainer) -> dict[str, list[np.ndarray]]:
    """Returns each variable of the model, by path, as each replica holds it."""
    return {
        path: [np.asarray(v) for v in trainer.strategy.experimental_local_results(tensorflow_variable(variable))]
        for path, variable in named_variables(trainer.model).items()
    }


def _compare(trainer: Trainer, reference: Trainer) -> str:
    """Returns a sentence with the largest relative difference between the floating-point variables of two models."""
    pairs = zip(_values(trainer).values(), _values(reference).values(), strict=True)
    difference = max(relative_difference(a[0], b[0]) for a, b in pairs if np.issubdtype(a[0].dtype, np.floating))
    sentence = f"the weights differ by {difference:.1e}"
    _require(difference <= _TOLERANCE, sentence)
    return sentence


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
