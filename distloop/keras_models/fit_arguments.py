"""Arguments of other frameworks: reads Keras's `class_weight` and the like, and says what to write instead of others.

data = read_arguments(train, evals, {"validation_split": 0.1, "class_weight": {0: 1.0, 1: 5.0}})
data.train, data.evals, data.map_batch
explain_call("fit", (x, y, 32, 3), {})      # "... call fit(x, y, batch_size=32, epochs=3)."
"""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import tensorflow as tf

from distloop.data.arrays import are_arrays, are_same_arrays, as_arrays, as_dataset, with_labels
from distloop.data.opening import EACH_AN_ARRAY
from distloop.data.source import Data
from distloop.log import log, shown
from distloop.settings.config import OTHER_WORDS, Config, fields
from distloop.settings.durations import finite_number, whole_number

EVALUATION = "val"  # the name of the evaluation on Keras's validation data

_OF_FIT = ("steps", "epochs", "until", "evals", "actions", "writers")

_OWN_BATCHES = "has batches of its own: leave batch_size out."
_POSITIONS = ("x", "y", "batch_size", "epochs")  # of Keras's fit, as far as people give them
_OF_TRAINER = ("model_fn", "config", "strategy")
_DATA_FIRST = "give the data first, as in fit(x, y, epochs=2) or fit(dataset, epochs=2)"
_EVALS = "did you mean evals, as in evals={'val': dataset}?"
_BATCHES = "set Config(batch_size=...), by which arrays are read"
_IN_FIT = {
    "callbacks": "give actions=[distloop.from_callback(callback)]",
    "logger": "give writers=[distloop.WandbWriter(...)], and Config(workdir=...) for TensorBoard",
    "ckpt_path": "set Config(workdir=...), with which the same command resumes, or Config(init_from=...)",
    "shuffle": "fit shuffles arrays by Config(seed=...); for another order give distloop.make_dataset(arrays, size)",
    "initial_epoch": "with Config(workdir=...) a run resumes by itself",
    "validation_batch_size": "give evals={'val': distloop.make_dataset(arrays, batch_size)}",
    **dict.fromkeys(("workers", "use_multiprocessing", "max_queue_size"), "set it in the PyDataset"),
    **dict.fromkeys(("x", "data", "dataset", "train_data", "train_dataset", "datamodule"), _DATA_FIRST),
    **dict.fromkeys(("dataloader", "train_dataloader", "train_dataloaders"), _DATA_FIRST),
    **dict.fromkeys(("eval", "validation", "val", "val_data", "valid", "test", "test_data", "eval_data"), _EVALS),
    **dict.fromkeys(("val_dataloader", "val_dataloaders", "eval_dataset"), _EVALS),
}
_IN_A_PASS = {
    "x": "give the data first",
    "batch_size": _BATCHES,
    "verbose": "leave it out, as nothing is printed",
    "return_dict": "leave it out, as a dict is returned",
    "steps": "give dataset.take(steps)",
    "sample_weight": "give (x, y, sample_weight) as the data",
    "callbacks": "leave it out, as nothing calls them",
}


class KerasArguments(TypedDict, total=False):
    """Arguments of Keras's `fit` that `Trainer.fit` takes.

    Attributes:
        batch_size: examples of a global batch, of arrays; overrides `Config.batch_size`.
        steps_per_epoch: the batches of an epoch, for data without an end or an epoch of another length.
        class_weight: class -> weight of its examples, times their sample weight if they have one; others count 1. For
            batches `(x, y)` or `(x, y, sample_weight)` with labels `[B]`, `[B, 1]`, or one-hot `[B, C]`.
        validation_data: evaluated as `evals={"val": validation_data}`.
        validation_split: the fraction of the arrays, from their end, that is not trained on, but evaluated as "val".
        sample_weight: of arrays, as in `(x, y, sample_weight)`.
    """

    batch_size: int | None
    steps_per_epoch: int | None
    class_weight: Mapping[int, float] | None
    validation_data: Any
    validation_split: float
    sample_weight: Any


@dataclasses.dataclass(frozen=True)
class FitData:
    """What a call of `fit` trains and evaluates on.

    Attributes:
        train: the data to train on.
        evals: name -> data to evaluate on, or an `Evaluation`.
        batch_size: of arrays; None: the config's.
        steps_per_epoch: None: those of a pass over the data.
        map_batch: adds class weights to a batch; None: there are none.
        asked_for: the arguments that it was made from: equal ones ask for the same data to train on, and of arrays the
            same ones do, though other values may be in them now.
    """

    train: Data
    evals: dict[str, Any]
    batch_size: int | None
    steps_per_epoch: int | None
    map_batch: Callable[..., Any] | None
    asked_for: tuple[Any, ...]

    def source_settings(self, batch_size: int) -> dict[str, Any]:
        """Returns arguments of `Source` for the data to train on, with a batch size if none was given."""
        return {
            "batch_size": self.batch_size or batch_size,
            "steps_per_epoch": self.steps_per_epoch,
            "map_batch": self.map_batch,
            "asked_for": self.asked_for,
        }

    def is_asked_for(self, asked_for: tuple[Any, ...]) -> bool:
        """Returns whether these arguments ask for this data to train on; of arrays, whether they are the same ones."""
        if not asked_for or asked_for[1:] != self.asked_for[1:]:
            return False
        return asked_for[0] is self.asked_for[0] or are_same_arrays(asked_for[0], self.asked_for[0])


def read_arguments(
    train: Data, evals: Mapping[str, Any] | None, arguments: Mapping[str, Any], y: Any = None
) -> FitData:
    """Returns the data that `fit` was asked to train and evaluate on; `arguments` are `KerasArguments`.

    Raises:
        ValueError: if an argument is unknown or not possible with this data.
    """
    if not isinstance(evals or {}, Mapping):
        raise ValueError(f"evals={shown(evals)} was given; give a dict of datasets by name: evals={{'test': dataset}}.")
    _require_datasets(train, evals or {})
    if unnamed := [name for name in evals or () if not isinstance(name, str) or not name]:
        raise ValueError(f"evals has the name {unnamed[0]!r}; give each dataset a text: evals={{'test': dataset}}.")
    known = [*_OF_FIT, *KerasArguments.__annotations__]
    for name, value in arguments.items():
        if name not in known:
            raise ValueError(f"fit was given {name}=..., which is no argument of fit: {hint(name, value, known)}")
    given = {name: value for name, value in arguments.items() if value is not None}
    steps_per_epoch, batch_size = _number_of(given, "steps_per_epoch"), _number_of(given, "batch_size")
    train = with_labels(train, y, given.get("sample_weight"))
    arrays = as_arrays(train)
    if batch_size and arrays is None and not callable(train):
        is_structure = isinstance(train, (list, tuple, Mapping))
        raise ValueError(
            f"fit was given batch_size={batch_size} and a {type(train).__name__}, which "
            + (f"is not of arrays alone: give {EACH_AN_ARRAY}." if is_structure else _OWN_BATCHES)
        )
    class_weight, split = given.get("class_weight"), given.get("validation_split", 0.0)
    map_batch = None if class_weight is None else _class_weigher(class_weight, train if arrays is None else arrays)
    asked_for = (train, batch_size, steps_per_epoch, class_weight and dict(class_weight), split)
    validation = given.get("validation_data")
    train = train if arrays is None else arrays
    if split and validation is None:  # which takes precedence in Keras
        train, validation = _split(train, split)
    if validation is not None:
        if EVALUATION in (evals or {}):
            raise ValueError(
                f"fit was given validation data and evals with the name {EVALUATION!r}, which it is reported under: "
                "give either, or another name."
            )
        if batch_size:
            validation = as_dataset(validation, batch_size)
        evals = {**(evals or {}), EVALUATION: validation}
    return FitData(train, dict(evals or {}), batch_size, steps_per_epoch, map_batch, asked_for)


def _require_datasets(train: Data, evals: Mapping[str, Any]) -> None:
    """Checks that the names of `evals` are those of datasets, and not of the arrays of one.

    Raises:
        ValueError: if each is one array, and the data to train on has several in a batch.
    """
    one_array = [not isinstance(data, (Mapping, tuple, list)) and are_arrays(data) for data in evals.values()]
    element = getattr(train, "element_spec", train)
    if evals and all(one_array) and isinstance(element, (Mapping, tuple)):
        raise ValueError(
            f"evals has one array each under {', '.join(map(repr, evals))}, and the data to train on several: name "
            "the datasets, as in evals={'val': arrays}."
        )


def _number_of(arguments: Mapping[str, Any], name: str) -> int | None:
    """Returns an argument that is a whole number, 1 or more; None: it was not given."""
    number = whole_number(arguments.get(name, 1))
    if number is None or number < 1:
        raise ValueError(f"fit was given {name}={shown(arguments[name])}; it takes a whole number, 1 or more.")
    return number if name in arguments else None


def _split(train: Data, fraction: float) -> tuple[Any, Any]:
    """Returns arrays without their last part, and that part.

    Source: `train_validation_split` in keras/src/trainers/data_adapters/array_slicing.py.
    """
    if not are_arrays(train):
        raise ValueError(
            f"fit was given validation_split={fraction} and a {type(train).__name__}; only arrays can be split: give "
            "evals={'val': dataset}."
        )
    num_rows = len(tf.nest.flatten(train)[0])
    num_trained = math.floor(num_rows * (1 - fraction))
    if not 0 < num_trained < num_rows:
        raise ValueError(
            f"fit was given validation_split={fraction!r} and {num_rows} rows; it is a fraction between 0 and 1 that "
            "leaves rows for both: give another."
        )
    first = tf.nest.map_structure(lambda array: array[:num_trained], train)
    return first, tf.nest.map_structure(lambda array: array[num_trained:], train)


def _class_weigher(class_weight: Any, data: Any) -> Callable[..., Any]:
    """Returns a function that multiplies the sample weights of a batch `(x, y)` or `(x, y, sample_weight)`.

    A warning names classes that do not occur in labels that are an array.

    Source: `class_weight_to_sample_weights` in keras/src/trainers/data_adapters/data_adapter_utils.py.
    """
    if not isinstance(class_weight, Mapping) or not all(isinstance(n, numbers.Integral) for n in class_weight):
        raise ValueError(f"fit was given class_weight={class_weight!r}; it takes a dict, class -> weight: {{0: 1.0}}.")
    if odd := [value for value in class_weight.values() if (number := finite_number(value)) is None or number < 0]:
        raise ValueError(f"fit was given a class_weight of {shown(odd[0])}; give finite numbers, 0 or more.")
    classes = np.array(list(class_weight), np.int64)  # [K]
    values = np.array(list(class_weight.values()), np.float32)

    def weigh(*batch: Any) -> Any:
        entries = batch[0] if len(batch) == 1 else batch
        if not isinstance(entries, tuple) or not 2 <= len(entries) <= 3 or not tf.is_tensor(entries[1]):
            raise ValueError(
                "fit was given class_weight and batches that are no (x, y) or (x, y, sample_weight) with one tensor y: "
                "weigh the loss by the label in loss_fn, with distloop.weighted, or give sample weights."
            )
        x, labels, *sample_weight = entries
        if labels.shape.rank not in (1, 2):
            raise ValueError(
                f"fit was given class_weight and labels of shape {labels.shape}; they are [B], [B, 1], or one-hot "
                "[B, C]: give sample weights."
            )
        if labels.shape.rank == 2:
            _require_columns(classes, labels.shape[1])
            labels = labels[:, 0] if labels.shape[1] == 1 else tf.argmax(labels, -1)
        if labels.dtype.is_floating:
            labels = tf.round(labels)
        is_class = tf.cast(labels, tf.int64)[:, None] == classes  # [B, K]
        weights = tf.where(tf.reduce_any(is_class, 1), tf.linalg.matvec(tf.cast(is_class, tf.float32), values), 1.0)
        if sample_weight:
            rank = sample_weight[0].shape.rank or 1
            shape = tf.concat([tf.shape(weights), tf.ones([rank - 1], tf.int32)], 0)
            weights = tf.cast(sample_weight[0], tf.float32) * tf.reshape(weights, shape)
        return x, entries[1], weights

    given: Any = data[1] if isinstance(data, tuple) and len(data) > 1 else None
    are_labels = isinstance(given, np.ndarray) and given.ndim and given.size == len(given)
    if are_labels and given.dtype.kind in "biuf" and (absent := np.setdiff1d(classes, np.round(given)).tolist()):
        text = "class_weight has weights for the classes %s, which no label is: check how the classes are numbered."
        log.warning(text, ", ".join(map(str, absent)))
    return weigh


def _require_columns(classes: np.ndarray, columns: int | None) -> None:
    """Checks that labels with several columns, which are one-hot, have one for each class."""
    if columns not in (None, 1) and (absent := [int(number) for number in classes if not 0 <= number < columns]):
        raise ValueError(
            f"fit was given class_weight with the class {absent[0]}, and labels that are one-hot of {columns} classes, "
            f"0 to {columns - 1}: number the classes from 0."
        )


def explain_call(method: str, args: Sequence[Any], named: Mapping[str, Any]) -> str:
    """Returns a sentence about a call of a method of Trainer that has other arguments; empty: it is any other call.

    Args:
        method: its name.
        args: arguments by position.
        named: arguments by name.
    """
    if method == "__init__":
        return _of_trainer(named)
    if method == "fit" and len(args) > 2:
        keras_arguments = dict(zip(_POSITIONS[2:], args[2:], strict=False))
        rest = "".join(f", {name}={shown(value)}" for name, value in keras_arguments.items() if value is not None)
        return f"fit was given {len(args)} arguments by position: call it as fit(x, y{rest})."
    if method == "fit":
        name = next((name for name in named if _IN_FIT.get(name) == _DATA_FIRST), "")
        return f"fit was given {name}=...: {_DATA_FIRST}." if name else f"fit was called without data: {_DATA_FIRST}."
    if method in ("evaluate", "predict", "stream_predictions"):
        if name := next(filter(_IN_A_PASS.get, named), ""):
            return f"{method} was given {name}=..., which is no argument of it: {_IN_A_PASS[name]}."
        data = "the data and its labels" if method == "evaluate" else "the data"
        is_by_position = len(args) > 1 + (method == "evaluate")
        sentence = f"{method} was given {len(args)} arguments by position, and takes {data}: {_BATCHES}."
        return sentence if is_by_position else ""
    return ""


def hint(name: str, value: Any, known: Collection[str]) -> str:
    """Returns what to give in place of an argument that `fit` does not have; it ends a sentence.

    Args:
        name: of the argument.
        value: of the argument.
        known: the names of the arguments that `fit` has.
    """
    if (text := _IN_FIT.get(name)) is not None:
        return text if text.endswith("?") else f"{text}."
    if (setting := setting_of(name)) is not None and setting not in known:
        return f"set Config({as_arguments({name: value})})."
    close = [setting] if setting else difflib.get_close_matches(name, known)
    return f"did you mean {' or '.join(close)}?" if close else f"it takes {', '.join(known)}."


def setting_of(word: str) -> str | None:
    """Returns the field of `Config` of that name, or that another framework calls so; None: there is none."""
    return word if word in fields() else OTHER_WORDS.get(word)


def as_arguments(words: Mapping[str, Any]) -> str:
    """Returns settings, also by another framework's words, as arguments of `Config`; odd values as `...`."""
    return ", ".join(f"{setting_of(word)}={_value(setting_of(word), value)}" for word, value in words.items())


def _value(setting: Any, value: Any) -> str:
    try:
        Config(**{setting: value})
    except ValueError:
        return "..."
    return shown(value)


def _of_trainer(named: Mapping[str, Any]) -> str:
    others = {name: value for name, value in named.items() if name not in _OF_TRAINER}
    words = {name: value for name, value in others.items() if setting_of(name) is not None}
    if words:
        given = ", ".join(f"{name}={shown(value)}" for name, value in words.items())
        return f"Trainer was given {given}: give Trainer(model_fn, distloop.Config({as_arguments(words)}))."
    if "callbacks" in others or "logger" in others:
        return "Trainer was given callbacks or a logger, which fit takes: give fit(data, actions=[...], writers=[...])."
    return ""
