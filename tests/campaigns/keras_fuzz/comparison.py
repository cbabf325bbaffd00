"""One program trained by Keras and by distloop from the same weights, and what differs.

What Keras and distloop define otherwise, as the documents say, is computed by distloop's definition on both sides:

- sample weights divide by their sum (Keras: by the number of values), as `ByWeights` does for Keras;
- a mean over an epoch weighs each batch by its weights (Keras: by its rows);
- sparse gradients of embeddings train a table as dense ones do (Keras's Ftrl, Muon and others treat them otherwise);
- `loss` is without regularization, which is reported by itself.
"""

import collections
import dataclasses
import re
import traceback
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.trainers import compile_utils

import distloop
from distloop.model.metrics import RESERVED_NAMES, flatten_results
from distloop.model.saved_state import relative_difference
from tests.campaigns.keras_fuzz.programs import RANDOM, Program
from tests.problems import on

# A difference of weights counts above this fraction of what training changed, plus a fraction of the weights.
OF_UPDATE, OF_VALUES, LEAST = 3e-5, 3e-6, 1e-7
# ... unless weights that differ in their last bits move Keras's own results by this fraction of the difference.
OF_NOISE = 30.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a comparison.

    `kind` is equal, refused (by distloop, in a sentence), invalid (Keras refuses), wrong or error; `signature` is the
    same for programs that differ for the same reason; `text` says what differs.
    """

    kind: str
    signature: str = ""
    text: str = ""

    @property
    def is_finding(self) -> bool:
        return self.kind in ("wrong", "error")


class ByWeights(keras.losses.Loss):
    """A Keras loss, divided by the sum of its weights and masks."""

    def __init__(self, loss: Any):
        super().__init__(name="by_weights")
        self.loss = loss

    def sides(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, Any]:
        """Returns both sides of the division, as Keras's own reduction sums values and ones."""
        loss = compile_utils.get_loss(self.loss, y_true, y_pred)
        total, ones = (object.__new__(type(loss)) for _ in range(2))  # copy.copy forgets the delta of Huber
        for duplicate in (total, ones):
            duplicate.__dict__.update(vars(loss), reduction="sum")
        call = total.call

        def call_with_ones(y_true: Any, y_pred: Any) -> Any:
            values = call(y_true, y_pred)
            result = tf.ones_like(values)
            if (mask := getattr(values, "_keras_mask", None)) is not None:
                result._keras_mask = mask
            return result

        ones.call = call_with_ones
        return total(y_true, y_pred, sample_weight), ones(y_true, y_pred, sample_weight)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return tf.math.divide_no_nan(*self.sides(y_true, y_pred, sample_weight))


class Twin:
    """The program's model, trained by Keras, eagerly, with the numbers of every batch."""

    def __init__(self, program: Program, model: keras.Model, noise: np.random.Generator | None = None):
        self.model, self._noise = model, noise
        settings = model._compile_config.config
        losses = [ByWeights(loss) for loss in tf.nest.flatten(settings["loss"])]
        self._packed = tf.nest.pack_sequence_as(settings["loss"], losses)
        others = {name: settings[name] for name in ("loss_weights", "metrics", "weighted_metrics")}
        loss = self._packed if program.has_weights else settings["loss"]
        model.compile(model.optimizer, loss, **others, run_eagerly=True)
        # Slots start from the weights (ScheduleFreeAdamW): before the forward pass writes any, as in distloop. Keras's
        # compiled fit leaves those slots at 0.
        if model.built:
            model.optimizer.build(model.trainable_variables)
        self._apply = model.optimizer.apply
        model.optimizer.apply = self._apply_dense
        self._compute_loss = model.compute_loss
        model.compute_loss = self._record
        self.batches: list[tuple[float, float, list[float]]] = []  # loss, regularization, weight of each output

    def _apply_dense(self, gradients: Any, variables: Any = None) -> Any:
        gradients = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
        if self._noise is not None:
            # A gradient that is 0 but for rounding, as before a softmax over one number, is a whole step to Adafactor.
            largest = max((float(tf.reduce_max(abs(g))) for g in gradients if g is not None), default=0.0)
            moved = [None if g is None else self._noise.normal(size=g.shape) * 1e-8 * largest for g in gradients]
            gradients = [g if g is None else g + tf.cast(m, g.dtype) for g, m in zip(gradients, moved, strict=True)]
        return self._apply(gradients, variables)

    def _record(self, x=None, y=None, y_pred=None, sample_weight=None, training=True) -> Any:
        total = self._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        regularization = float(sum(map(float, self.model.losses), 0.0))
        outputs, targets = tf.nest.flatten(y_pred), tf.nest.flatten(y)
        weights = tf.nest.flatten(sample_weight) if sample_weight is not None else [None]
        weights = weights * len(outputs) if len(weights) < len(outputs) else weights
        losses = tf.nest.flatten(self._packed)
        sums = [loss.sides(*given)[1] for loss, *given in zip(losses, targets, outputs, weights, strict=True)]
        self.batches.append((float(total) - regularization, regularization, [float(s) for s in sums]))
        return total

    def fit(self, data: Any, epochs: int) -> dict[str, Any]:
        """Returns the numbers of all epochs, as distloop names them."""
        numbers: dict[str, Any] = {}
        for epoch in range(1, epochs + 1):
            self.batches = []
            history = self.model.fit(data, verbose=0).history
            numbers |= self._numbers(f"epoch {epoch}", {name: values[-1] for name, values in history.items()})
        return numbers

    def evaluate(self, data: Any) -> dict[str, Any]:
        self.batches = []
        results = self.model.evaluate(data, verbose=0, return_dict=True)
        numbers = self._numbers("evaluate", results)
        return {name: value for name, value in numbers.items() if "regularization" not in name}

    def _numbers(self, prefix: str, results: dict[str, Any]) -> dict[str, Any]:
        trackers = {m.name for m in getattr(self.model._compile_loss, "metrics", [])}
        kept = {name: value for name, value in results.items() if name != "loss" and name not in trackers}
        numbers = dict(flatten_results(kept))
        losses, regularizations, weights = (np.array(column) for column in zip(*self.batches, strict=True))
        shares = weights / weights.sum(0, keepdims=True)
        if np.allclose(shares, shares[:, :1]):  # else the mean of the sum of losses is not defined
            numbers["loss"] = float(losses @ shares[:, 0])
            if regularizations.any():
                numbers["regularization"] = float(regularizations @ shares[:, 0])
        return {f"{prefix}: {name}": value for name, value in numbers.items()}


def compare(program: Program) -> Outcome:
    """Trains a program by Keras and by distloop and returns what came of it."""
    try:
        with np.errstate(all="ignore"):
            reference = Reference(program)
    except Exception as error:
        return _invalid(error)
    outcomes = [_compare_on(program, replicas, reference) for replicas in program.replicas]
    worst = min(outcomes, key=lambda outcome: ("error", "wrong", "refused", "invalid", "equal").index(outcome.kind))
    if worst.kind == "error":
        try:  # the reference is eager, where a few layers of Keras do not fail, and trains nothing that draws numbers
            model = reference.new_model()
            model.fit(reference.names["DATA"], epochs=program.epochs, verbose=0)
            if worst.signature.startswith("Diverged"):
                _require_finite(model.get_weights())
        except Exception as error:
            return _invalid(error)
    return worst


def _invalid(error: Exception) -> Outcome:
    return Outcome("invalid", _signature(error), f"{type(error).__name__}: {error}")


class Reference:
    """What Keras makes of a program.

    A program that draws random numbers in training is only evaluated by Keras, with the weights that distloop trained.
    """

    def __init__(self, program: Program):
        self.program = program
        self.names = program.run()
        self.is_random = bool(RANDOM.search(program.source()))
        keras.utils.set_random_seed(program.number)
        twin = Twin(program, self._make_model())
        self.first_weights = twin.model.get_weights()
        self.results = self._results_of(twin, self.names["DATA"])
        self._noise: dict[str, float] | None = None
        _require_finite([value for name, value in self.results.items() if "weight" in name])

    def new_model(self) -> keras.Model:
        model = self._make_model()
        model.set_weights(self.first_weights)
        return model

    def evaluate(self, weights: list[np.ndarray]) -> None:
        """Makes the results those of an evaluation with the weights."""
        self.first_weights, self._noise = weights, None
        self.results = self._results_of(Twin(self.program, self.new_model()), self.names["DATA"])

    def noise(self) -> dict[str, float]:
        """Returns how far Keras's own results move if first weights, inputs and gradients differ in their last bits."""
        if self._noise is None:
            self._noise = {}
            weights, inputs = self.first_weights, self.names["X"]
            for seed in range(2):
                rng = np.random.default_rng(seed)
                self.first_weights = [_moved(w, rng) for w in weights]
                arrays = tf.nest.map_structure(lambda x, rng=rng: _moved(x, rng), inputs), self.names["Y"]
                arrays += (self.names["WEIGHTS"],) if self.program.has_weights else ()
                data = tf.data.Dataset.from_tensor_slices(arrays).batch(self.program.batch_size)
                moved = self._results_of(Twin(self.program, self.new_model(), rng), data)
                self.first_weights = weights
                for name, value in moved.items():
                    difference = _norm(np.asarray(value, np.float64) - np.asarray(self.results[name], np.float64))
                    self._noise[name] = max(self._noise.get(name, 0.0), difference)
        return self._noise

    def _make_model(self) -> keras.Model:
        # Else Keras would name the metrics auc_1, auc_2, ... from model to model.
        global_state.set_global_attribute("object_name_uids", collections.defaultdict(int))
        return self.names["make_model"]()

    def _results_of(self, twin: Twin, data: Any) -> dict[str, Any]:
        numbers: dict[str, Any] = {}
        if not self.is_random:
            numbers |= twin.fit(data, self.program.epochs)
            numbers |= {f"weight {i}": w for i, w in enumerate(twin.model.get_weights())}
        numbers |= twin.evaluate(data)
        predictions = tf.nest.flatten(twin.model.predict(data, verbose=0))
        return numbers | {f"predict: {i}": p for i, p in enumerate(predictions)}


def _require_finite(weights: list[np.ndarray]) -> None:
    # A gradient above 1e19, whose square float32 cannot hold, counts as infinite in distloop.
    if not all(np.all(np.abs(weight) < 1e15) for weight in weights):
        raise ArithmeticError("Keras trains it to NaN, infinity or 1e15.")


def _moved(values: Any, rng: np.random.Generator) -> Any:
    """Returns values that differ in their last bits."""
    if not np.issubdtype(np.asarray(values).dtype, np.floating):
        return values
    factors = 1 + rng.choice([-2e-7, 2e-7], size=values.shape)
    return (values * factors + rng.normal(size=values.shape) * 1e-9).astype(values.dtype)


def _compare_on(program: Program, replicas: int, reference: Reference) -> Outcome:
    label = f"{replicas} replicas, {program.microbatches} microbatches"
    try:
        results = _trained_by_distloop(program, replicas, reference)
    except Exception as error:
        return _failure(error, label)
    differences = {}
    for name, value in reference.results.items():
        if name not in results:
            differences[name] = f"{name}: missing; distloop has {_alike(name, results)}"
        elif difference := _difference(name, results[name], value, reference):
            differences[name] = difference
    if not differences:
        return Outcome("equal")
    names = sorted({re.sub(r"\d+", "N", name) for name in differences})
    signature = "wrong " + ", ".join(names)[:200]
    return Outcome("wrong", signature, "\n    ".join([f"{label}:", *list(differences.values())[:12]]))


def _trained_by_distloop(program: Program, replicas: int, reference: Reference) -> dict[str, Any]:
    """Returns distloop's results."""
    data = reference.names["DATA"]
    steps = -(-len(tf.nest.flatten(reference.names["X"])[0]) // program.batch_size)
    config = on(replicas, microbatches=program.microbatches, log_every=steps, seed=program.number)
    original = None
    if program.route == "from_keras":
        model_fn = distloop.from_keras(original := reference.new_model())
    elif program.route == "function":
        model_fn = distloop.from_keras(reference.new_model)
    else:
        model_fn = lambda: _supervised(reference.new_model())  # noqa: E731
    trainer = distloop.Trainer(model_fn, config)
    rows: list[dict[str, float]] = []

    def keep_row(report: Any) -> None:
        rows.append(dict(report.metrics))

    keep_row.every = steps
    trainer.fit(data, epochs=program.epochs, actions=[keep_row])
    weights = trainer.model.get_weights()
    if original is not None and not all(map(np.array_equal, original.get_weights(), weights)):
        raise AssertionError("The model that from_keras was given has other weights than trainer.model.")
    results = {f"weight {i}": w for i, w in enumerate(weights)}
    for epoch, row in enumerate(rows, start=1):
        results |= {f"epoch {epoch}: {name}": value for name, value in row.items()}
    results |= {f"evaluate: {name}": value for name, value in trainer.evaluate(data).items()}
    results |= {f"predict: {i}": p for i, p in enumerate(tf.nest.flatten(trainer.predict(data)))}
    if reference.is_random:
        reference.evaluate(weights)
    return results


def _supervised(model: keras.Model) -> distloop.ModelSpec:
    settings = model._compile_config.config
    metrics, weighted = (settings[name] or () for name in ("metrics", "weighted_metrics"))
    more = {"weighted_metrics": weighted, "loss_weights": settings["loss_weights"]}
    return distloop.supervised(model, settings["loss"], model.optimizer, metrics, **more)


def _alike(name: str, results: dict[str, Any]) -> list[str]:
    """Returns the user's names of the same evaluation or epoch."""
    kind = name.partition(":")[0]
    return [n for n in results if n.startswith(kind) and n.partition(": ")[2] not in RESERVED_NAMES]


def _norm(values: Any) -> float:
    return float(np.linalg.norm(np.ravel(values)))


def _difference(name: str, value: Any, expected: Any, reference: Reference) -> str:
    """Returns what differs; nothing if rounding explains it."""
    if not np.issubdtype(np.asarray(expected).dtype, np.number):
        return "" if np.array_equal(value, expected) else f"{name}: {value}, Keras {expected}"
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    if value.shape != expected.shape:
        return f"{name}: shape {value.shape}, Keras {expected.shape}"
    if np.array_equal(np.isfinite(value), np.isfinite(expected)) and not np.isfinite(expected).all():
        value, expected = np.nan_to_num(value), np.nan_to_num(expected)
    difference = _norm(value - expected)
    tolerance = OF_VALUES * _norm(expected) + LEAST
    if name.startswith("weight "):
        tolerance += OF_UPDATE * _norm(expected - np.asarray(reference.first_weights[int(name[7:])], np.float64))
    else:
        tolerance += OF_UPDATE * max(1e-2, _norm(expected))
    if difference <= tolerance:
        return ""
    noise = reference.noise().get(name, 0.0)
    if difference <= OF_NOISE * noise:
        return ""
    relative = relative_difference(value, expected)
    return f"{name}: {_short(value)}, Keras {_short(expected)} (relative {relative:.1e}, noise {noise:.1e})"


def _short(value: np.ndarray) -> str:
    numbers = " ".join(f"{x:.6g}" for x in np.ravel(value)[:4])
    return numbers if value.size <= 4 else f"[{numbers} ...]"


def _failure(error: Exception, label: str) -> Outcome:
    frames = traceback.extract_tb(error.__traceback__)
    places = ("/distloop/", __file__)  # distloop leaves its own frames out below those of `_supervised`
    is_of_distloop = any(place in frames[-1].filename for place in places)
    is_refusal = type(error) is ValueError and is_of_distloop and re.search(r": .*\.$", str(error))
    text = f"{label}: {type(error).__name__}: {str(error)[:1500]}"
    if not is_refusal:
        last = [frame for frame in frames if "/distloop/" in frame.filename][-1:]
        text += "".join(f"\n    at {frame.filename}:{frame.lineno} {frame.name}" for frame in last)
    return Outcome("refused" if is_refusal else "error", _signature(error), text)


def _signature(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    first = re.sub(r"'[^']*'|\"[^\"]*\"|\[.*?\]|\(.*?\)|\d+", "_", first)
    return f"{type(error).__name__}: {first[:150]}"
