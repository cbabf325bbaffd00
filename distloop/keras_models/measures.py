"""Keras metrics as means of values per example where possible, else as metrics with state.

measures = make_measures(["accuracy", keras.metrics.AUC()], None, names=[])        # inside model_fn
measures[0](target, output, weight)                                               # for loss_fn
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.utils.naming import get_object_name

from distloop.keras_models.losses import by_shapes, loss_values, per_example, weigh
from distloop.model.metrics import IS_OF_LAYER, RESERVED_NAMES
from distloop.optimizers.keras_hooks import made_again, mask_of
from distloop.variables import tensorflow_variable

OutputPosition = str | tuple[int, int] | None  # of an output: its name; its index in a list of so many; None: alone


class Measure:
    """A metric of one output.

    Attributes:
        name: under which it is reported.
        output: which output.
        is_weighted: whether sample weights count.
        metric: the Keras metric that has a state; None: the metric is a mean of values per example.
    """

    def __init__(self, identifier: Any, output: OutputPosition, is_weighted: bool):
        """Makes a metric from another, its class or name, a loss, or a function of `(y_true, y_pred)`.

        Raises:
            ValueError: if the metric cannot be made again from its config.
        """
        self.output, self.is_weighted = output, is_weighted
        self.metric: keras.metrics.Metric | None = None
        self._function = identifier
        # The function for "accuracy" depends on the shapes of target and output, known when the step is traced.
        if not isinstance(identifier, str) or identifier.lower() not in ("accuracy", "acc", "crossentropy", "ce"):
            self._function = keras.metrics.get(identifier)
        self.name = identifier if isinstance(identifier, str) else get_object_name(self._function)
        if isinstance(self._function, keras.metrics.Metric):
            if _is_mean(self._function):
                # Private: Keras has no public name for the function whose values a metric averages.
                self._function = functools.partial(self._function._fn, **self._function._fn_kwargs)
            else:
                self.metric = self._function if isinstance(identifier, (str, type)) else _made_again(self._function)

    def __call__(self, target: tf.Tensor, output: tf.Tensor, weight: Any) -> Any:
        """Returns the value for `loss_fn`; `weight` is that of the samples, or None. An output's mask counts, too."""
        if self.metric is not None:
            if isinstance(self.metric, keras.metrics.MeanMetricWrapper) and mask_of(output) is not None:
                return target, output, weigh(self._owner, output, mask_of(output), weight).weights
            return (target, output) if weight is None else (target, output, weight)
        fn = self._function
        if isinstance(fn, str):
            fn = by_shapes("accuracy" if fn.lower().startswith("acc") else "crossentropy", target, output)
        if isinstance(fn, keras.losses.Loss):
            values, mask = loss_values(fn, target, output)
            return weigh(self._owner, values, mask, weight)
        is_of_keras = str(getattr(fn, "func", fn).__module__).startswith("keras.")
        # As in Keras, others get what there is. Of Keras's some, as Poisson, would compare each label with each output.
        values = fn(*squeeze_or_expand_to_same_rank(target, output)) if is_of_keras else fn(target, output)
        mask = mask_of(output)
        if mask_of(values) is not None and (mask is not None or weight is not None):  # as in Keras
            mask = mask_of(values) if mask is None else tf.cast(mask, tf.bool) & mask_of(values)
        return weigh(self._owner, per_example(self._owner, values, output.shape[0]), mask, weight)

    @property
    def _owner(self) -> str:
        return f"metric {self.name!r}"


def make_measures(metrics: Any, weighted_metrics: Any, names: Sequence[str]) -> list[Measure]:
    """Returns the metrics that Keras would measure, under the names that Keras would report.

    Args:
        metrics: of `compile`: a list; for several outputs a dict or list of metrics or lists of them.
        weighted_metrics: the same, weighted by the sample weights.
        names: the outputs', in Keras's order; empty if the model does not know them before it is called.

    Raises:
        ValueError: if dicts and lists do not match the outputs, or a name is distloop's own.
    """
    by_name = [name for given in (metrics, weighted_metrics) if isinstance(given, Mapping) for name in given]
    are_several = len(names or set(by_name)) > 1
    measures = []
    for given, is_weighted in ((metrics, False), (weighted_metrics, True)):
        for output, identifiers in _by_output(given, names):
            measures += [Measure(i, output, is_weighted) for i in keras.tree.flatten(identifiers) if i is not None]
    counts: dict[str, int] = {}
    for measure in measures:
        output = names[measure.output[0]] if names and isinstance(measure.output, tuple) else measure.output
        prefix = f"{output}_" if are_several and isinstance(output, str) else ""
        name = prefix + measure.name
        if name in counts and measure.is_weighted:
            name = f"{prefix}weighted_{measure.name}"
        counts[name] = counts.get(name, -1) + 1
        measure.name = f"{name}_{counts[name]}" if counts[name] else name
        if measure.name in {*RESERVED_NAMES, "loss"}:
            raise ValueError(f"A metric has the name {measure.name!r}, which distloop reports: give it another name.")
    return measures


class LayerMetrics(dict[str, keras.metrics.Metric]):
    """The metrics that the layers of a model update in their `call`, as Keras reports them, by name.

    In `recorded`, their arguments are kept for the `loss_fn` to return, so that padding and replicas count as for any
    other metric. A number that is no value per example counts for each of them.
    """

    def __init__(self, model: keras.Model, taken: Collection[str]):
        """Finds the metrics; names that are taken, or twice there, get a number."""
        super().__init__()
        self._calls = threading.local()
        for layer in model._flatten_layers():
            for metric in layer._metrics if layer is model or not isinstance(layer, keras.Model) else ():
                names = (f"{metric.name}_{i}" if i else metric.name for i in itertools.count())
                name = next(name for name in names if name not in {*taken, *self, *RESERVED_NAMES, "loss"})
                self[name] = metric
                setattr(metric, IS_OF_LAYER, True)

    @contextlib.contextmanager
    def recorded(self, size: Any) -> Iterator[dict[str, Any]]:
        """Yields a dict that gets the arguments of each metric that is updated meanwhile, of `size` examples.

        Raises:
            ValueError: if a metric is updated more than once.
        """
        before, self._calls.fed = getattr(self._calls, "fed", None), ({}, size)
        for name, metric in self.items():
            vars(metric).setdefault("update_state", functools.partial(self._record, name, metric.update_state))
        try:
            yield self._calls.fed[0]
        finally:
            self._calls.fed = before

    def _record(self, name: str, update_state: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        if getattr(self._calls, "fed", None) is None:  # distloop's own update, or a call outside of `loss_fn`
            return update_state(*arguments, **settings)
        fed, size = self._calls.fed
        if name in fed:
            raise ValueError(
                f"The metric {name!r} of a layer was updated twice in one call of the model; distloop reports one "
                "update of each: concatenate the values, or give each call a metric of its own."
            )
        given = signature(update_state).bind(*arguments, **settings).args
        fed[name] = tuple(_per_row(value, size) for value in given if value is not None)
        return None


def _per_row(value: Any, size: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    return tf.fill([size], value) if value.shape.rank == 0 else value


def _by_output(given: Any, names: Sequence[str]) -> list[tuple[OutputPosition, Any]]:
    """Returns metrics by the output that they measure."""
    if not given:
        return []
    if len(names) == 1:
        return [(None, given)]
    if not isinstance(given, (Mapping, list, tuple)):
        given = [given]
    if isinstance(given, Mapping) and not names:
        return list(given.items())
    given = spread(given, names) if names else given
    return [((i, len(given)), each) for i, each in enumerate(given)]


def spread(given: Any, names: Sequence[str]) -> list[Any]:
    """Returns an argument by output: from a dict by name, a list in order, or one value for all outputs.

    A value in a dict is that of each output that has its name.
    """
    if isinstance(given, Mapping):
        if set(given) - set(names):
            raise ValueError(f"{sorted(given)} were given by name; the outputs are {list(names)}: use those names.")
        return [given.get(name) for name in names]
    if isinstance(given, (list, tuple)):
        if len(given) != len(names):
            raise ValueError(
                f"A list of {len(given)} was given for the {len(names)} outputs {list(names)}: give one for each."
            )
        return list(given)
    return [given] * len(names)


def _is_mean(metric: keras.metrics.Metric) -> bool:
    """Returns whether a metric is the mean of a function's values, and nothing else."""
    of_keras = keras.metrics.MeanMetricWrapper
    return isinstance(metric, of_keras) and all(
        getattr(type(metric), method) is getattr(of_keras, method) for method in ("update_state", "result")
    )


def metrics_made_again(metrics: Any) -> Any:
    """Returns the metrics of `compile`, in their structure, with new metrics of the same settings in place of objects.

    Raises:
        ValueError: as for `make_measures`.
    """
    is_object = keras.metrics.Metric
    return keras.tree.map_structure(lambda one: _made_again(one) if isinstance(one, is_object) else one, metrics)


def _made_again(metric: keras.metrics.Metric) -> keras.metrics.Metric:
    """Returns a new metric with the same settings, made in the strategy's scope; the same if it has no complete config.

    Raises:
        ValueError: if it has no complete config, and was made in another scope.
    """
    try:
        return made_again(metric, f"The metric {metric.name!r}", "make the metric inside model_fn")
    except ValueError:
        in_scope = tf.distribute.get_strategy().extended.variable_created_in_scope
        if all(in_scope(tensorflow_variable(v)) for v in metric.variables):
            return metric
        raise
