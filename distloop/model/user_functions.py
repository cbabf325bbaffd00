"""User functions: explains mistakes in `loss_fn` and others, and records which entries of a batch are read.

    loss_fn = guarded(loss_fn, explain_mistakes)     # such as a key that the batch lacks, or `if` on a tensor
    reads = Reads()
    with reads.recorded(rows) as returned:           # while the step is traced
        returned.append(outputs := loss_fn(rows, training))
    report_unread([reads], "warn", is_shown=True)    # before the first step

An entry that no `loss_fn` reads costs what the dataset does for it. One that only `predict_fn` or an evaluation reads
counts as unread.
"""

import contextlib
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.errors import entries_of, is_users, up_to_users_line, user_line
from distloop.log import log, say

_MAX_NAMES = 8  # in a message
_COMPILED = "a step is compiled, so no tensor has a value yet when the line runs"
_OPERATIONS = (
    f"{_COMPILED}: compute with operations of TensorFlow or keras.ops, return from loss_fn what you want to see, or "
    "look at values with Config(eager=True)"
)
_VALUE_OF_TENSOR = re.compile(
    r"(float|int|complex)\(\) argument must be.*Tensor|'SymbolicTensor' object cannot be interpreted as an integer|"
    r"must be real number, not SymbolicTensor|'SymbolicTensor' object has no attribute '(numpy|item|tolist)'|"
    r"Cannot convert a symbolic tf.Tensor"
)
_OPERANDS = re.compile(r"Dimensions must be equal.* = (\w+)\[.* input shapes: ([^.]*\])")
_SHAPES = re.compile(r"(?:target|labels)\.shape=\(([^)]*)\).*(?:output|logits)\.shape=\(([^)]*)\)")
_OF_INPUTS = re.compile(  # what Keras prints in bold, in a text of several lines
    r"\x1b\[1m((?:Input |Invalid input shape|The structure of `inputs`|Layer .* expected).*?)\.?\x1b\[0m", re.DOTALL
)


def as_tensor(value: Any, subject: str, entry: str = "") -> tf.Tensor:
    """Returns what a function of the user returned as a tensor.

    Args:
        value: a tensor, an array or a number.
        subject: how the message begins, as in "predict_fn returned".
        entry: which of several values it is, as in ' under "loss"'.

    Raises:
        ValueError: if it is something else.
    """
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"{subject} {kind}{entry}, which is no dense tensor: return one there.") from error


def preparing_batches(loss_fn: Callable[..., Any], batch_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `loss_fn` that gets its batches from a `batch_fn`; refuses a `batch_fn` that returns nothing."""

    def call(batch: Any, training: bool) -> Any:
        rows = batch_fn(batch, training)
        if rows is None:
            raise ValueError("batch_fn returned None; it returns the batch for loss_fn, of as many rows as it got.")
        return loss_fn(rows, training)

    return call


@contextlib.contextmanager
def explain_mistakes(arguments: Sequence[Any], returned: list[Any]) -> Iterator[None]:
    """Raises a ValueError of one sentence where a function, called with a batch, makes a mistake.

    Its traceback ends with the user's line. Errors that are no such mistake stay as they are.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, tf.errors.OpError) or (sentence := next(_sentences(error, arguments[0]), None)) is None:
            raise
        raise ValueError(sentence).with_traceback(up_to_users_line(error.__traceback__)) from None


def _sentences(error: Exception, batch: Any) -> Iterator[str]:
    """Yields what a mistake was, and what to do; nothing if it is another one."""
    entries = entries_of(error.__traceback__)
    line = user_line(traceback.extract_tb(error.__traceback__))
    where = f" ({line})" if line else ""
    text = str(error)
    yield from _of_entries(error, text, batch, where, is_users(entries[-1]))
    yield from _of_losses(text, entries[-1].tb_frame.f_code.co_name, where)
    if isinstance(error, ValueError) and (said := _OF_INPUTS.search(text)):
        said_by_keras = " ".join(re.sub(r"\.\s", ", ", said[1]).split())
        yield (
            f"A layer cannot take what it is called with{where}: {said_by_keras}; the batch has or is "
            f"{_describe(batch)}: give entries of the shape and the structure that the model is made for."
        )
    if isinstance(error, ValueError) and (said := _OPERANDS.search(text)):
        yield (
            f"The operation {said[1]} cannot take tensors of the shapes {said[2].replace('[?', '[B')}{where}: make the "
            "shapes fit; a loss takes labels of the shape of the outputs."
        )
    if isinstance(error, tf.errors.OperatorNotAllowedInGraphError) and "bool" in text:
        yield (
            f"A tensor decided an `if`, `while`, `and`, `or` or `not` of Python{where}; {_COMPILED}: use "
            "tf.where(condition, a, b), tf.cond, or tf.logical_and, or look at values with Config(eager=True)."
        )
    elif isinstance(error, tf.errors.OperatorNotAllowedInGraphError):
        yield f"A tensor was unpacked, or a Python loop went over it{where}; {_OPERATIONS}."
    elif isinstance(error, TypeError) and "len is not well defined" in text:
        yield (
            f"len() of a tensor was asked for{where}; {_COMPILED}: use tf.shape(x)[0], and no mean over the batch, "
            "which distloop takes."
        )
    elif _VALUE_OF_TENSOR.search(text):
        yield f"A tensor was asked for its value, as by float(), .numpy() or a function of NumPy{where}; {_OPERATIONS}."


def _of_entries(error: Exception, text: str, batch: Any, where: str, is_at_line: bool) -> Iterator[str]:
    """Yields a sentence about an entry that the batch does not have, or has in another way."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    shown, is_tuple = _describe(batch), isinstance(batch, (tuple, list))
    looked_up = re.search(r"got ['\"](.+?)['\"]$", text) if isinstance(error, TypeError) else None
    if isinstance(batch, Mapping) and isinstance(name, str) and name not in batch:
        yield (
            f"The key {name!r} was looked up by a function of the model{where}, and the batch has {shown}: use their "
            "names, or name them otherwise in the dataset."
        )
    elif is_tuple and isinstance(error, TypeError) and text.startswith(("tuple indices", "list indices")):
        yield (
            f"A name was looked up in a batch that is {shown}{where}: take them by their places, as in `features, "
            "labels = batch`, or let the dataset give a dict."
        )
    elif looked_up and text.startswith("Only integers, slices"):
        of = f"a batch that is {shown}," if tf.is_tensor(batch) else "a tensor"
        yield (
            f"The name {looked_up[1]!r} was looked up in {of} which has no names{where}: use the batch as it is, or "
            "give a dict of arrays, as in fit({'x': x, 'y': y})."
        )
    elif isinstance(batch, Mapping) and (match := re.search(r"has no attribute '(\w+)'$", text)) and match[1] in batch:
        yield f"The batch is a dict, and .{match[1]} was looked up in it{where}: write batch[{match[1]!r}]."
    elif is_tuple and re.search(r"(tuple|list) index out of range|values to unpack", text) and is_at_line:
        yield (
            f"{text[:1].upper()}{text[1:]}{where}; the batch is {shown}: take as many entries as it has, or give "
            "others, as in fit((x, y))."
        )
    elif tf.is_tensor(batch) and isinstance(error, tf.errors.OperatorNotAllowedInGraphError) and "Iterating" in text:
        yield (
            f"A batch that is {shown}, was unpacked, or a Python loop went over it{where}: give (x, y) to get both in "
            "a batch, and compute with whole tensors."
        )
    elif isinstance(batch, Mapping) and "(of type <class 'str'>)" in text:
        yield (
            f"A layer got a text in place of a tensor{where}, and the batch has {shown}: take entries by their names, "
            "as a dict that is unpacked, as in `x, y = batch`, gives its names."
        )


def _of_losses(text: str, function: str, where: str) -> Iterator[str]:
    """Yields a sentence about labels of another form than a cross entropy takes."""
    if not re.search("cross_?entropy", function) or not (shapes := _SHAPES.search(text)):
        return
    labels, outputs = (f"[{shape.rstrip(',').replace('None', 'B', 1)}]" for shape in shapes.groups())
    other = {
        "sparse_categorical_crossentropy": "takes the number of each class, [B]: give tf.argmax(labels, -1), or use "
        "categorical_crossentropy, which takes labels that are one-hot or probabilities",
        "categorical_crossentropy": "takes labels that are one-hot or probabilities, of the shape of the outputs: use "
        "sparse_categorical_crossentropy, which takes the number of each class, or give keras.ops.one_hot(labels, C)",
    }
    kind = "sparse_categorical_crossentropy" if function.startswith("sparse_softmax_cross_entropy") else function
    advice = other.get(kind, "takes labels of the shape of the outputs: give both the same shape")
    yield f"{function} got labels of shape {labels} for outputs of shape {outputs}{where}; it {advice}."


def _describe(batch: Any) -> str:
    """Returns what a batch is, such as `one array, float32 [B, 8]`."""
    if isinstance(batch, Mapping):
        names = [repr(entry) for entry in batch]
        return f"the entries {', '.join(names[:_MAX_NAMES])}{', ...' if len(names) > _MAX_NAMES else ''}"
    if isinstance(batch, (tuple, list)):
        return f"a tuple of {len(batch)} entries"
    if not tf.is_tensor(batch):
        return f"a {type(batch).__name__}"
    axes = ["B", *map(str, batch.shape[1:])] if batch.shape.rank else []
    return f"one array, {batch.dtype.name} [{', '.join(axes)}]"


class NoLoss:
    """Stands for the `loss_fn` of an update whose `step_fn` does the whole step."""

    def __call__(self, batch: Any, training: bool) -> Mapping[str, Any]:
        """Raises ValueError: there is nothing to call."""
        raise ValueError(
            "ModelSpec has a step_fn and no loss_fn, so there are no values per example: give ModelSpec(loss_fn=...), "
            "or to evaluate, distloop.Evaluation(dataset, loss_fn=...) among fit's evals."
        )


class Reads:
    """The entries of a batch that the traced calls of one `loss_fn` read.

    Attributes:
        entries: whether any call read an entry, by its path; empty if none was traced.
    """

    def __init__(self) -> None:
        self.entries: dict[str, bool] = {}

    @contextlib.contextmanager
    def recorded(self, rows: Any) -> Iterator[list[Any]]:
        """Records which entries of a batch the operations that the block adds to the graph read; not eagerly.

        Yields:
            A list for what `loss_fn` returned; an entry in it is read, too, such as the weights of `weighted`.
        """
        returned: list[Any] = []
        if tf.executing_eagerly():
            yield returned
            return
        before = _count_consumers(rows)
        yield returned
        outputs = {id(tensor) for tensor in tf.nest.flatten(returned, expand_composites=True)}
        for path, count in _count_consumers(rows, outputs).items():
            self.entries[path] = self.entries.get(path, False) or count > before[path]


def require_read(reads: Sequence[Reads], path: str, what: str) -> None:
    """Raises a ValueError unless a `loss_fn` of the step reads an entry; `what` says what the entry is."""
    if reads and not any(r.entries.get(path) for r in reads):
        raise ValueError(
            f"fit was given {what}, which no loss_fn reads: take it, as in `x, y, weight = batch`, and return "
            "distloop.weighted(values, weight) as the loss."
        )


def report_unread(reads: Sequence[Reads], policy: str, *, is_shown: bool) -> None:
    """Reports the entries that no `loss_fn` of the step reads, if there are any and this process shows anything.

    The policy "print" prints which ones, "ignore" does nothing, "warn" logs a warning, "refuse" raises a ValueError.
    """
    unread = [path for path in (reads[0].entries if reads else ()) if not any(r.entries.get(path) for r in reads)]
    if not unread:
        return
    names = ", ".join([*unread[:_MAX_NAMES], *([f"{rest} more"] if (rest := len(unread) - _MAX_NAMES) > 0 else [])])
    sentence = (
        f"No loss_fn reads these entries of a batch, which are loaded, decoded and batched all the same: {names}; drop "
        "them with dataset.map(...), or give unread_entries=ignore."
    )
    if policy == "refuse":
        raise ValueError(sentence)
    if policy == "warn" and is_shown:
        log.warning("%s", sentence)
    elif policy == "print" and is_shown:
        say(f"entries of each batch that no loss_fn reads: {names} (loaded all the same)")


def _count_consumers(rows: Any, outputs: Collection[int] = ()) -> dict[str, int]:
    """Returns how many operations read each entry, by its path, such as `meta/id`; `outputs` are read once more."""
    counts = {}
    for path, entry in keras.tree.flatten_with_path(rows):
        tensors = tf.nest.flatten(entry, expand_composites=True)
        counts["/".join(map(str, path))] = sum(len(tensor.consumers()) + (id(tensor) in outputs) for tensor in tensors)
    return counts
