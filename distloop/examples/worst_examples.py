"""`WorstExamples`: the rows of an evaluation with the largest loss, shown as images or texts."""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distloop.actions.summary import Summary
from distloop.data.arrays import are_arrays
from distloop.data.opening import open_batches
from distloop.graph_functions import graph_function
from distloop.monitoring.media import Images, Media, Text, are_pictures
from distloop.settings.durations import require_integer
from distloop.workdir.records import show_number


class WorstExamples(Summary):
    """Shows the rows of an evaluation with the largest loss: their images in a grid, or their texts in a table.

        trainer.fit(train, evals={"test": test}, actions=[distloop.WorstExamples("test", test, every=500)])

    Images are the first entry of a row whose shape is `[H, W, C]` with C in 1, 3, 4; texts are the entries of strings.
    Numbers of a row, such as its label, are beside its loss.
    """

    def __init__(self, name: str, dataset: Any = None, *, most: int = 16, every: int | str = 0, batch_size: int = 256):
        """Stores the dataset.

        Args:
            name: of the evaluation; the result is shown as `<name>/worst_examples`.
            dataset: as for `Trainer.fit`; finite; every worker reads all of it.
            most: the number of rows to show.
            every: how often, a duration; 0: at the end only.
            batch_size: of arrays.

        Raises:
            ValueError: if the data is something else, or a number is no whole one.
        """
        require_integer("WorstExamples", 1, most=most, batch_size=batch_size)
        if not isinstance(name, str) or dataset is None:
            found = "no data" if isinstance(name, str) else f"a {type(name).__name__} as a name"
            raise ValueError(
                f"WorstExamples was given {found}: give the name of the evaluation and its data, as in "
                "WorstExamples('test', test, every=500)."
            )
        super().__init__(f"{name}/worst_examples", self._show, every)
        self._open = functools.partial(open_batches, dataset, batch_size, again=every != 0)
        self._batches = None if are_arrays(dataset) else self._open()  # arrays may change in place
        self._most = most
        self._losses_fn: Any = None  # compiled, for the model of the last call
        self._model: Any = None

    def set_fit(self, call: Any, loop: Any, checkpoints: Any) -> None:
        """Raises a ValueError if no `loss_fn` returns losses."""
        if not (update := call.state.spec.updates[0]).has_loss:
            update.loss_fn({}, False)  # raises it

    def _show(self, state: Any) -> Media:
        """Returns the worst rows as images or as a text."""
        if self._model is not state.model:
            self._model, self._losses_fn = state.model, _compile_losses(state.spec.updates[0].loss_fn)
        worst: list[tuple[float, list[tuple[str, np.ndarray]]]] = []
        with state.averaged():
            for batch in self._batches or self._open():
                losses = self._losses_fn(batch).numpy()  # [B]
                largest = sorted(np.flatnonzero(losses != -np.inf), key=lambda i: _rank(losses[i]))[: self._most]
                rows = [(float(losses[i]), _row(batch, int(i))) for i in largest]
                worst = sorted([*worst, *rows], key=lambda row: _rank(row[0]))[: self._most]
        pictures = [next((v for _, v in row if are_pictures(v[None])), None) for _, row in worst]
        if pictures and all(picture is not None and picture.shape == pictures[0].shape for picture in pictures):  # type: ignore[union-attr]
            captions = ["  ".join([f"loss {show_number(loss)}", *_numbers(row)]) for loss, row in worst]
            return Images(np.stack(pictures), max=self._most, captions=captions)  # type: ignore[arg-type]
        lines = [" | ".join([show_number(loss), *_texts(row), ", ".join(_numbers(row))]) for loss, row in worst]
        head = ["loss", *(["text"] * max((len(_texts(row)) for _, row in worst), default=0)), "numbers"]
        return Text("\n".join([" | ".join(head), "|".join(["---"] * len(head)), *lines]))


def _rank(loss: float) -> float:
    """Returns the key to sort losses by, the worst first: NaN, then the largest."""
    return -np.inf if np.isnan(loss) else -loss


def _compile_losses(loss_fn: Any) -> Any:
    """Returns a compiled function from a batch to its rows' losses, `[B]`; those of rows of weight 0 are -inf."""

    def losses(batch: Any) -> tf.Tensor:
        return row_values(loss_fn(batch, False)["loss"], -np.inf)

    return graph_function(losses, reduce_retracing=True)


def row_values(value: Any, without_weight: float) -> tf.Tensor:
    """Returns a value of `loss_fn` for each row, float32 [B]: its weighted mean over all other axes.

    Args:
        value: `[B, ...]`, or a result of `distloop.weighted`.
        without_weight: what a row has that has no weight.
    """
    values, weights = value if isinstance(value, tuple) else (value, None)
    if weights is None:
        return _row_means(values, None)
    weights = tf.cast(weights, tf.float32)
    has_weight = tf.reduce_max(tf.abs(weights), list(range(1, weights.shape.rank))) > 0  # [B]
    return tf.where(has_weight, _row_means(values, weights), without_weight)


def _row_means(values: Any, weights: Any) -> tf.Tensor:
    """Returns the weighted means of rows over their other axes, `[B]`."""
    values = tf.cast(values, tf.float32)  # [B, ...]
    axes = list(range(1, values.shape.rank))
    if weights is None or not axes or isinstance(values, tf.RaggedTensor):
        return tf.reduce_mean(values, axes)
    missing = [1] * (values.shape.rank - weights.shape.rank)
    weights = tf.reshape(weights, tf.concat([tf.shape(weights), missing], 0)) * tf.ones_like(values)
    total = tf.reduce_sum(tf.math.multiply_no_nan(values, weights), axes)
    return tf.math.divide_no_nan(total, tf.reduce_sum(weights, axes))


def _row(batch: Any, i: int) -> list[tuple[str, np.ndarray]]:
    """Returns the entries of one row with their names."""
    entries = keras.tree.flatten_with_path(batch)
    return [("/".join(map(str, path)), np.asarray(value[i])) for path, value in entries if isinstance(value, tf.Tensor)]


def _texts(row: list[tuple[str, np.ndarray]]) -> list[str]:
    """Returns the strings of a row, as cells of a table."""
    texts = [value.item() for _, value in row if value.ndim == 0 and value.dtype.kind in "OS"]
    return [" ".join(text.decode(errors="replace").replace("|", "\\|").split()) for text in texts]


def _numbers(row: list[tuple[str, np.ndarray]]) -> list[str]:
    """Returns the numbers of a row with their names, such as `label 3`."""
    return [
        f"{name} {show_number(value.item())}" for name, value in row if value.size == 1 and value.dtype.kind in "iuf"
    ]
