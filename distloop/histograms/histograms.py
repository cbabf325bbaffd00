"""Histograms of weights and gradients, of the moves of weights in training, and of the outputs of layers.

    histograms = WeightHistograms(state.variables_of_update, state.paths, every=500)
    histograms.allocate("", packing)           # for an update's gradients, before the step is traced
    histograms.record("", segments, scale)     # in the compiled step
    histograms.begin(step, 500, is_restored=False)  # before the first step
    metrics_and_media = histograms(report)     # as an action

    trainer.fit(train, actions=[distloop.ActivationHistograms(test, every=500)])

Of a large table every n-th row counts, about 10,000 of them, and of a sparse gradient the rows that it has; of a large
output every n-th number.

Each step stores its packed gradients in variables, which take over the tensors without a copy. Nothing that trains
reads these variables, so runs with and without histograms end bit for bit alike. (A branch that copies at due steps
only costs a small step more, each time that it is not taken.)
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distloop.data.opening import open_batches
from distloop.graph_functions import graph_function
from distloop.log import shown
from distloop.model.variable_writes import preserved
from distloop.monitoring.media import Histogram, Media
from distloop.optimizers.gradients import Packing, Rows, Segment, scaled, values_of
from distloop.optimizers.keras_hooks import ReplacedCalls
from distloop.settings.durations import require_integer
from distloop.training.action import Action, Report
from distloop.variables import layers_by_path, tensorflow_variable

_MOST_ROWS = 100_000  # of a variable, up to which all count
_SAMPLED_ROWS = 10_000
_MOST_VALUES = 2**17  # of a layer, in its histogram


class WeightHistograms(Action):
    """Records the gradients of the last step, and reports histograms and norms."""

    def __init__(self, variables: Mapping[str, Sequence[Any]], paths: Mapping[int, str], every: int | str):
        """Stores the variables, without those that get new values in place of gradients, as the scales of float8.

        Args:
            variables: the variables that each update trains, by the update's name.
            paths: names of the variables, by identity.
            every: how often, until `begin`.
        """
        self.every = every
        self._variables = {
            update: [v for v in trained if not getattr(v, "overwrite_with_gradient", False)]
            for update, trained in variables.items()
        }
        self._paths = paths
        self._packings: dict[str, Packing] = {}
        self._gradients: dict[str, list[tf.Variable]] = {}  # by update: packed segments, then their scale
        self._sparse: dict[str, set[int]] = {}  # by update: which segments were rows when the step was traced
        self._read_all = graph_function(self._weights_and_gradients)  # faster than many small reads
        self._previous: dict[str, list[np.ndarray]] | None = None  # the weights at the last multiple of `every`

    def begin(self, step: int, every: int | str, *, is_restored: bool) -> None:
        """Begins or goes on with a run: reads the weights if it is at a multiple of `every`.

        Args:
            step: number of steps done.
            every: how often, in steps where they are known.
            is_restored: whether the weights are those of a checkpoint, so that earlier ones do not count.
        """
        self.every = every
        if self._is_multiple(step):
            self._previous = {update: [w.numpy() for w in weights] for update, weights in self._weights().items()}
        elif is_restored:
            self._previous = None

    def allocate(self, update: str, packing: Packing) -> None:
        """Creates the variables for an update's gradients, on the device of its weights, or where each is used.

        Args:
            update: the update's name.
            packing: the layout of its gradients.
        """
        self._packings[update] = packing
        first = tensorflow_variable(self._variables[update][0]).device
        self._gradients[update] = []
        segments = zip([*packing.shapes, ()], [*packing.dtypes, tf.float32], [*packing.devices, ""], strict=True)
        for shape, dtype, device in segments:
            with tf.device(device or first):
                zeros = np.zeros(shape, tf.as_dtype(dtype).as_numpy_dtype)  # no shape is sent: see step_marks.py
                self._gradients[update].append(tf.Variable(zeros, trainable=False, shape=tf.TensorShape(None)))

    def record(self, update: str, segments: Sequence[Segment], scale: tf.Tensor) -> None:
        """Stores the gradients of a step. Call in a `tf.function`, outside `strategy.run`.

        Args:
            update: the update's name.
            segments: its packed gradients, summed.
            scale: the factor that turns them into the optimizer's gradients.
        """
        self._sparse[update] = {i for i, segment in enumerate(segments) if isinstance(segment, Rows)}
        for variable, value in zip(self._gradients[update], [*map(values_of, segments), scale], strict=True):
            variable.assign(value)

    def __call__(self, report: Report) -> dict[str, float | Media]:
        """Returns histograms of weights and gradients, and how far the weights moved.

        How far they moved is reported at multiples of `every`, if the weights at the previous multiple are known.
        """
        result: dict[str, float | Media] = {}
        values: dict[str, Any] = {name: [t.numpy() for t in tensors] for name, tensors in self._read_all().items()}
        weights = {update: values[f"weights/{update}"] for update in self._variables}
        is_multiple = self._is_multiple(report.step)
        for update, variables in self._variables.items():
            prefix = f"{update}/" if update else ""
            if is_multiple and self._previous is not None:
                fractions = [1 / _stride(variable) for variable in variables]
                differences = [new - old for new, old in zip(weights[update], self._previous[update], strict=True)]
                moved, norm = _norm(differences, fractions), _norm(weights[update], fractions)
                result[prefix + "update_norm"] = moved
                result[prefix + "update_ratio"] = moved / norm if norm else float("nan")
            gradients = values[f"gradients/{update}"]
            for variable, weight, gradient in zip(variables, weights[update], gradients, strict=True):
                result[f"weights/{self._paths[id(variable)]}"] = Histogram(weight)
                result[f"gradients/{self._paths[id(variable)]}"] = Histogram(gradient)
        if is_multiple:
            self._previous = weights
        return result

    def _is_multiple(self, step: int) -> bool:
        return isinstance(self.every, str) or step % self.every == 0

    def _weights(self) -> dict[str, list[tf.Tensor]]:
        return {update: [_sample(variable) for variable in variables] for update, variables in self._variables.items()}

    def _weights_and_gradients(self) -> dict[str, list[tf.Tensor]]:
        tensors = {f"weights/{update}": weights for update, weights in self._weights().items()}
        for update, (*segments, scale) in self._gradients.items():
            sparse, packing = self._sparse.get(update, set()), self._packings[update]
            packed = [Rows(tf.range(tf.shape(s)[0]), s) if i in sparse else s for i, s in enumerate(segments)]
            gradients = packing.unpack(scaled(packed, tf.convert_to_tensor(scale)), keeps_sparse=True)
            tensors[f"gradients/{update}"] = [values_of(gradient) for gradient in gradients]
        return tensors


def _stride(variable: Any) -> int:
    """Returns n if every n-th row of a variable counts."""
    rows = variable.shape[0] if len(variable.shape) > 1 else 0
    return -(-rows // _SAMPLED_ROWS) if rows > _MOST_ROWS else 1


def _sample(variable: Any) -> tf.Tensor:
    """Returns the rows of a variable that count."""
    plain, stride = tensorflow_variable(variable), _stride(variable)
    return tf.identity(plain) if stride == 1 else plain[::stride]


def _norm(arrays: Sequence[np.ndarray], fractions: Sequence[float]) -> float:
    """Computes the Euclidean norm over all elements of variables from arrays of a fraction of each one's rows."""
    squares = [np.sum(np.square(array, dtype=np.float64)) for array in arrays]
    return float(np.sqrt(sum(square / fraction for square, fraction in zip(squares, fractions, strict=True))))


class ActivationHistograms(Action):
    """Shows the outputs of each layer for some examples: their histogram, mean and standard deviation.

        trainer.fit(train, actions=[distloop.ActivationHistograms(test, every=500)])

    The examples are the same each time, so a change is the model's. Layers compute as in an evaluation, with the
    weights that train. Of a layer with sublayers, such as a block, these are shown; a recurrent layer as one.
    """

    def __init__(self, dataset: Any, *, every: int | str = 0, rows: int = 64, layers: str = ""):
        """Stores the dataset.

        Args:
            dataset: as for `Trainer.fit`; every worker reads the first batch.
            every: how often, a duration; 0: at the end only.
            rows: the number of examples, from the first of that batch.
            layers: a regular expression; only layers in whose path it is found are shown.

        Raises:
            ValueError: if the data is something else, `rows` no number of rows, or `layers` no regular expression.
        """
        require_integer("ActivationHistograms", 1, rows=rows)
        self.every, self._rows = every, rows
        try:
            self._pattern = re.compile(layers)
        except (re.error, TypeError):
            raise ValueError(f"ActivationHistograms(layers={shown(layers)}): give a regular expression.") from None
        self._batches = open_batches(dataset, rows)
        self._batch: Any = None
        self._model: Any = None
        self._measure: Any = None  # compiled, for the model of the last call

    def set_fit(self, call: Any, loop: Any, checkpoints: Any) -> None:
        """Raises a ValueError if an update has no `loss_fn`."""
        for update in call.state.spec.updates:
            if not update.has_loss:
                update.loss_fn({}, False)  # raises it

    def __call__(self, report: Report) -> dict[str, float | Media]:
        """Returns `<layer>/activation_mean`, `<layer>/activation_deviation`, and as `activations/<layer>` a histogram.

        Raises:
            ValueError: if no layer was seen.
        """
        state = report.state
        if self._batch is None:
            self._batch = tf.nest.map_structure(lambda t: t[: self._rows], next(iter(self._batches)))
        if self._model is not state.model:
            self._model, self._measure = state.model, graph_function(functools.partial(self._trace, state))
        with preserved(state):
            measured = self._measure(self._batch)
        if not measured:
            raise ValueError(
                f"ActivationHistograms(layers={self._pattern.pattern!r}) saw no such layer of Keras compute in loss_fn"
                ": give another pattern, or leave the action out."
            )
        result: dict[str, float | Media] = {}
        for path, (mean, deviation, values) in measured.items():
            result[f"{path}/activation_mean"] = float(mean)
            result[f"{path}/activation_deviation"] = float(deviation)
            result[f"activations/{path}"] = Histogram(values.numpy())
        return result

    def _trace(self, state: Any, batch: Any) -> dict[str, tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
        """Returns mean, deviation and values of each layer's outputs, by its path."""
        with recorded_outputs(state.model) as outputs:
            for update in state.spec.updates:
                update.loss_fn(batch, False)
        return {path: _measure(tensors) for path, tensors in outputs.items() if self._pattern.search(path)}


@contextlib.contextmanager
def recorded_outputs(model: Any) -> Iterator[dict[str, list[tf.Tensor]]]:
    """Records what the layers of a model compute in the block, which is traced into one graph.

    Args:
        model: as for `named_variables`.

    Yields:
        A dict that the block fills: the floating-point outputs of all calls of each layer without sublayers, by path;
        a second layer of one path has `#2` behind it. What is computed in a loop of TensorFlow is left out.
    """
    graph = tf.compat.v1.get_default_graph()
    outputs: dict[str, list[tf.Tensor]] = {}

    def recording(name: str, layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def recorded(*arguments: Any, **options: Any) -> Any:
            num_before = sum(map(len, outputs.values()))
            result = call(*arguments, **options)
            if sum(map(len, outputs.values())) > num_before:  # those of its sublayers
                return result
            passed_on = {id(value) for value in tf.nest.flatten([arguments, options])}  # as by a dropout
            for output in tf.nest.flatten(result):
                is_computed = isinstance(output, tf.Tensor) and id(output) not in passed_on and output.graph is graph
                if is_computed and output.dtype.is_floating:
                    outputs.setdefault(name, []).append(output)
            return result

        return recorded

    with ReplacedCalls(_watched_layers(model), recording):
        yield outputs


def _watched_layers(model: Any) -> dict[str, Any]:
    """Returns all layers of a model by path, without the cells of recurrent layers, which compute in loops."""
    layers = layers_by_path(model)
    recurrent = [layer for layer in layers.values() if isinstance(layer, keras.layers.RNN)]
    cells = {id(cell) for layer in recurrent for cell in layer._flatten_layers(include_self=False)}
    return {path: layer for path, layer in layers.items() if id(layer) not in cells}


def _measure(outputs: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns mean and standard deviation of the values of some tensors, and evenly spaced ones of them."""
    values = tf.concat([tf.reshape(tf.cast(output, tf.float32), [-1]) for output in outputs], 0)
    mean, variance = tf.nn.moments(values, [0])
    spacing = tf.maximum((tf.size(values) + _MOST_VALUES - 1) // _MOST_VALUES, 1)
    return mean, tf.sqrt(variance), values[::spacing]
