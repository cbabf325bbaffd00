"""`ActivationHistograms`: the action that shows what the layers of a Keras model compute: histogram, mean, deviation.

    with recorded_outputs(model) as outputs:        # in a graph that is being traced
        loss_fn(batch, False)
    outputs                                         # {"net/hidden": [Tensor], "net/relu": [Tensor]}

It changes no variable: a run with it and one without it end bit for bit alike.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from distloop.actions.action import Action, Report
from distloop.data.opening import open_batches
from distloop.graph_functions import graph_function
from distloop.layer_calls import ReplacedCalls
from distloop.monitoring.media import Histogram, Media
from distloop.variables import layers_by_path

_MOST_VALUES = 2**17  # of a layer, in its histogram


class ActivationHistograms(Action):
    """Shows the outputs of each layer for some examples: their histogram, mean and standard deviation.

        trainer.fit(train, actions=[distloop.ActivationHistograms(test, every=500)])

    The examples are the same each time, so a change is the model's. Layers compute as in an evaluation, with the
    weights that train. Of a layer with parts, such as a block, the parts are shown; of a recurrent layer the whole.
    """

    def __init__(self, dataset: Any, *, every: int | str = 0, rows: int = 64, layers: str = ""):
        """Stores the dataset.

        Args:
            dataset: as for `Trainer.fit`; every worker reads the first batch.
            every: how often, a duration; 0: at the end only.
            rows: the number of examples, from the first of that batch.
            layers: a regular expression; only layers in whose path it is found are shown.

        Raises:
            ValueError: if the data is something else.
        """
        self.every = every
        self._rows = rows
        self._pattern = re.compile(layers)
        self._batches = open_batches(dataset, rows)
        self._batch: Any = None
        self._model: Any = None
        self._measure: Any = None  # compiled, for the model of the last call

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
        with state.random_streams.preserved():
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
        A dict that the block fills: the floating-point outputs of all calls of each layer without parts, by its path; a
        second layer of one path has `#2` behind it. What is computed in a loop of TensorFlow is left out.
    """
    graph = tf.compat.v1.get_default_graph()
    outputs: dict[str, list[tf.Tensor]] = {}

    def recording(name: str, layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def recorded(*arguments: Any, **options: Any) -> Any:
            num_before = sum(map(len, outputs.values()))
            result = call(*arguments, **options)
            if sum(map(len, outputs.values())) > num_before:  # those of its parts
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
    cells = {id(part) for layer in recurrent for part in layer._flatten_layers(include_self=False)}
    return {path: layer for path, layer in layers.items() if id(layer) not in cells}


def _measure(outputs: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns mean and standard deviation of the values of some tensors, and evenly spaced ones of them."""
    values = tf.concat([tf.reshape(tf.cast(output, tf.float32), [-1]) for output in outputs], 0)
    mean, variance = tf.nn.moments(values, [0])
    spacing = tf.maximum((tf.size(values) + _MOST_VALUES - 1) // _MOST_VALUES, 1)
    return mean, tf.sqrt(variance), values[::spacing]
