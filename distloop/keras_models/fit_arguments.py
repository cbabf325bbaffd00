"""Keras's arguments of `fit`: reads `class_weight` and the like.

data = read_arguments(train, evals, {"validation_split": 0.1, "class_weight": {0: 1.0, 1: 5.0}})
data.train, data.evals, data.map_batch
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import numpy as np
import tensorflow as tf

from distloop.data.arrays import are_arrays, are_same_arrays, as_arrays, as_dataset, with_labels
from distloop.data.opening import EACH_AN_ARRAY
from distloop.data.source import Data
from distloop.keras_models.other_calls import hint
from distloop.log import log, shown
from distloop.settings.durations import finite_number, whole_number

EVALUATION = "val"  # the name of the evaluation on Keras's validation data

_OF_FIT = ("steps", "epochs", "until", "evals", "actions", "writers")

_OWN_BATCHES = "has batches of its own: leave batch_size out."


class KerasArguments(TypedDict, total=False):
    """Arguments of Keras's `fit` that `Trainer.fit` takes.

    Attributes:
        batch_size: examples of a global batch, of arrays; overrides `Config.batch_size`.
        steps_per_epoch: the batches of an epoch, for data without an end or an epoch of another length.
        class_weight: class -> weight of its examples, times their sample weight if they have one; others count 1. For
            batches `(x, y)` or `(x, y, sample_weight)` with labels `[B]`, `[B, 1]`, or one-hot `[B, C]`.
        validation_data: evaluated as `evals={"val": validation_data}`.
        validation_split: the part of the arrays, from their end, that is not trained on, but evaluated as "val".
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
        raise ValueError(
            f"evals={shown(evals)} was given; fit takes a dict of datasets by name: evals={{'test': dataset}}."
        )
    _require_datasets(train, evals or {})
    if unnamed := [name for name in evals or () if not isinstance(name, str) or not name]:
        raise ValueError(f"evals has the name {unnamed[0]!r}; give each dataset a text: evals={{'test': dataset}}.")
    known = [*_OF_FIT, *KerasArguments.__annotations__]
    for name, value in arguments.items():
        if name not in known:
            raise ValueError(f"fit was given {name}=..., which is no argument of fit: {hint(name, value, known)}")
    given = {name: value for name, value in arguments.items() if value is not None}
    steps_per_epoch, batch_size = _whole(given, "steps_per_epoch"), _whole(given, "batch_size")
    train = with_labels(train, y, given.get("sample_weight"))
    arrays = as_arrays(train)
    if batch_size and arrays is None and not callable(train):
        is_structure = isinstance(train, (list, tuple, Mapping))
        raise ValueError(
            f"fit was given batch_size={batch_size} and a {type(train).__name__}, which "
            + (f"is not of arrays alone: give {EACH_AN_ARRAY}." if is_structure else _OWN_BATCHES)
        )
    class_weight, split = given.get("class_weight"), given.get("validation_split", 0.0)
    map_batch = None if class_weight is None else _class_weigher(class_weight, arrays)
    asked_for = (train, batch_size, steps_per_epoch, class_weight, split)
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


def _whole(arguments: Mapping[str, Any], name: str) -> int | None:
    """Returns an argument that is a whole number, 1 or more; None: it was not given."""
    value = arguments.get(name)
    if value is None:
        return None
    if (number := whole_number(value)) is None or number < 1:
        raise ValueError(f"fit was given {name}={shown(value)}; it takes a whole number, 1 or more.")
    return number


def _split(train: Data, part: float) -> tuple[Any, Any]:
    """Returns arrays without their last part, and that part.

    Source: `train_validation_split` in keras/src/trainers/data_adapters/array_slicing.py.
    """
    if not are_arrays(train):
        raise ValueError(
            f"fit was given validation_split={part} and a {type(train).__name__}; only arrays can be split: give "
            "evals={'val': dataset}."
        )
    num_rows = len(tf.nest.flatten(train)[0])
    num_trained = math.floor(num_rows * (1 - part))
    if not 0 < num_trained < num_rows:
        raise ValueError(
            f"fit was given validation_split={part!r} and {num_rows} rows; it is a part between 0 and 1 that leaves "
            "rows for both: give another."
        )
    first = tf.nest.map_structure(lambda array: array[:num_trained], train)
    return first, tf.nest.map_structure(lambda array: array[num_trained:], train)


def _class_weigher(class_weight: Any, arrays: Any) -> Callable[..., Any]:
    """Returns a function that multiplies the sample weights of a batch `(x, y)` or `(x, y, sample_weight)`.

    Of arrays, which are None for other data, a warning tells of classes that do not occur.

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
        x, y, *sample_weight = entries
        labels = y
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
        return x, y, weights

    labels = arrays[1] if isinstance(arrays, tuple) and len(arrays) > 1 else None
    if isinstance(labels, np.ndarray) and labels.ndim and labels.size == len(labels) and labels.dtype.kind in "biuf":
        absent = np.setdiff1d(classes, np.round(labels)).tolist()
        if absent:
            log.warning(
                "class_weight has weights for the classes %s, which no label is: check how the classes are numbered.",
                ", ".join(map(str, absent)),
            )
    return weigh


def _require_columns(classes: np.ndarray, columns: int | None) -> None:
    """Checks that labels with several columns, which are one-hot, have one for each class."""
    if columns not in (None, 1) and (absent := [int(number) for number in classes if not 0 <= number < columns]):
        raise ValueError(
            f"fit was given class_weight with the class {absent[0]}, and labels that are one-hot of {columns} classes, "
            f"0 to {columns - 1}: number the classes from 0."
        )
