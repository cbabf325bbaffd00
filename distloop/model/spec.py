"""Model specification: `ModelSpec` and `Update`, by which users say what to train, and their checks.

    def model_fn():
        model = keras.Sequential([...])
        return ModelSpec(model, keras.optimizers.Adam(1e-3), loss_fn)

Several optimizers in one step, as of a GAN, are several `Update`s.
"""

import copy
import itertools
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import tensorflow as tf

from distloop.errors import require_call
from distloop.model.user_functions import NoLoss, preparing_batches
from distloop.optimizers.loss_scale import LossScaleOptimizer
from distloop.settings.precision import FLOAT16
from distloop.variables import is_seed, tensorflow_variable

# Settings of `Update` that `ModelSpec` takes, too, for a single update.
_OF_UPDATE = ("gradient_fn", "step_fn", "learning_rates", "no_decay")

LossFn = Callable[[Any, bool], Mapping[str, Any]]
GradientFn = Callable[[dict[str, tf.Tensor]], Mapping[str, tf.Tensor]]
StepFn = Callable[[Any], Mapping[str, tf.Tensor] | None]

# Settings of a Keras optimizer that Keras applies on each replica alone, and what to set instead.
_REPLACED_SETTINGS = {
    "clipnorm": "set Config(clip_variable_norm=...), which clips after the reduction",
    "clipvalue": "set Config(clip_value=...), which clips after the reduction",
    "global_clipnorm": "set Config(clip_norm=...), which clips after the reduction",
    "use_ema": "set Config(average_decay=...)",
    "gradient_accumulation_steps": "set Config(microbatches=...)",
    "loss_scale_factor": "set the precision in Config",
}


@dataclass(frozen=True)
class Update:
    """One optimizer's part of a step.

    Attributes:
        name: prefix of the reported values, as in `discriminator/loss`.
        loss_fn: `(batch, training) -> dict` of values per example, `[B, ...]`; `"loss"` is minimized. It may be None
            where `step_fn` does the whole step.
        optimizer: a plain Keras optimizer, or a `LossScaleOptimizer` around one. Updates that train the same variables
            may share one: several steps of it within one train step.
        variables: the variables to train: a list, or a regular expression that is searched in their paths; None, where
            there is no other update: all trainable variables. If all updates give regular expressions, layers that they
            leave out are frozen, as with `ModelSpec(trainable=...)`.
        gradient_fn: `gradients -> gradients`, both by path, called between clipping and the optimizer. The gradients
            are reduced, divided and unscaled, and equal on all replicas. The result must be equal too: draw no random
            numbers.
        step_fn: `step -> gradients` by path, to be clipped and applied: instead of the loss's, it returns what it makes
            of one or more looks at the gradients, `step.gradients()`, at these weights or, in `with step.moved(by):`,
            at others. `step` is a `GradientStep`. The result must be equal on all replicas, as what it is given is.
            Where `loss_fn` is None, `step` is an `OwnStep`: it has the rows, and differentiates nothing by itself.
        learning_rates: factors of the learning rate, and of the weight decay, by regular expressions on paths, as in
            `{"^encoder/": 0.1}`; the first that matches a path counts.
        no_decay: a regular expression; variables with a matching path have no weight decay.
    """

    name: str
    loss_fn: LossFn
    optimizer: keras.optimizers.Optimizer | LossScaleOptimizer
    variables: Sequence[Any] | str | None = None
    gradient_fn: GradientFn | None = field(default=None, kw_only=True)
    step_fn: StepFn | None = field(default=None, kw_only=True)
    learning_rates: Mapping[str, float] | None = field(default=None, kw_only=True)
    no_decay: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        loss_fn: Any = self.loss_fn
        if loss_fn is None and self.step_fn is not None:
            object.__setattr__(self, "loss_fn", NoLoss())
        if not callable(self.loss_fn):
            raise ValueError(f"loss_fn={self.loss_fn!r} was given; distloop needs a function of (batch, training).")
        _check_optimizer(plain_optimizer(self.optimizer))
        require_call(self.loss_fn, "loss_fn", "batch", "training")
        _check_function("gradient_fn", self.gradient_fn, "a function from gradients by path to as many", "gradients")
        described = "a function of a step that returns gradients by path, such as `lambda step: step.gradients()`"
        _check_function("step_fn", self.step_fn, described, "step")
        for pattern, factor in (self.learning_rates or {}).items():
            is_number = isinstance(factor, numbers.Real)
            if not is_number or not 0 < float(factor) < math.inf:
                raise ValueError(
                    f"learning_rates={{{pattern!r}: {factor!r}}} was given; it multiplies the learning rate and is a "
                    "positive number: give trainable=... to leave variables as they are."
                )
        if self.no_decay is not None and getattr(plain_optimizer(self.optimizer), "weight_decay", None) is None:
            raise ValueError(
                f"no_decay={self.no_decay!r} was given, but the optimizer has no weight_decay to leave out: give it "
                "one, as in keras.optimizers.AdamW(1e-3, weight_decay=0.01), or drop no_decay."
            )

    @property
    def has_loss(self) -> bool:
        """Whether there is a `loss_fn`; without one, `step_fn` does the whole step."""
        return not isinstance(self.loss_fn, NoLoss)

    def with_loss(self, change: Callable[[Any], Any]) -> "Update":
        """Returns this update with what a function makes of its `loss_fn`, if it has one."""
        return replace(self, loss_fn=change(self.loss_fn)) if self.has_loss else self

    def select_variables(self, named: Mapping[str, Any]) -> list[Any]:
        """Returns the variables that the update trains, given all variables of the model by path.

        Raises:
            ValueError: if there are none, or one is not in the model.
        """
        trainable = {path: v for path, v in named.items() if v.trainable and not is_seed(v)}
        owner = f'update "{self.name}"' if self.name else "the model"
        if self.variables is None:
            chosen = list(trainable.values())
        elif isinstance(self.variables, str):
            chosen = [v for path, v in trainable.items() if re.search(self.variables, path)]
            if not chosen:
                raise ValueError(
                    f"The regular expression {self.variables!r} for {owner} is found in no trainable variable's path; "
                    f"there are {_first_few(list(trainable))}: correct it."
                )
        else:
            known = {id(tensorflow_variable(v)): v for v in named.values()}
            unknown: list[Any] = [v for v in self.variables if id(tensorflow_variable(v)) not in known]
            if unknown:
                raise ValueError(
                    f"A variable of {owner}, {getattr(unknown[0], 'path', unknown[0].name)!r}, is not in ModelSpec's "
                    "model: put every model that trains into ModelSpec."
                )
            chosen = [known[id(tensorflow_variable(v))] for v in self.variables]
        if not chosen:
            raise ValueError(f"There is no trainable variable for {owner}: give a model that has some.")
        return chosen

    def learning_rate_factors(self, paths: Sequence[str]) -> list[float]:
        """Returns the factor of the learning rate of each trained variable, by path.

        Raises:
            ValueError: if a regular expression matches no path.
        """
        factors = self.learning_rates or {}
        _require_matches("learning_rates", factors, paths)
        return [next((float(f) for pattern, f in factors.items() if re.search(pattern, path)), 1.0) for path in paths]

    def are_decayed(self, paths: Sequence[str]) -> list[bool]:
        """Returns for each trained variable, by path, whether the optimizer's weight decay applies to it.

        Raises:
            ValueError: if the regular expression matches no path.
        """
        patterns = [self.no_decay] if self.no_decay else []
        _require_matches("no_decay", patterns, paths)
        return [not any(re.search(pattern, path) for pattern in patterns) for path in paths]


@dataclass(frozen=True)
class ModelSpec:
    """A model and how to train it; `model_fn` returns one.

    Attributes:
        model: a `keras.Model`, any `tf.Module`, or several of them in a dict or list.
        optimizer: a plain Keras optimizer, or a `LossScaleOptimizer` around one.
        loss_fn: `(batch, training) -> dict`; runs on each replica with its shard of the batch, and returns values per
            example, `[B, ...]`. `"loss"` is minimized, every other name is a metric. `weighted(values, weights)` gives
            a value its own weights.
        predict_fn: `batch -> outputs`, leading axis B; or a dict of such functions by name: `predict` calls the first
            unless told otherwise, and `export` writes all.
        metrics: name -> `keras.metrics.Metric` for metrics that are no mean; `loss_fn` returns the arguments of its
            `update_state` under that name, as a tuple of tensors `[B, ...]`.
        trainable: a regular expression; variables with a matching path are trained. None: all trainable variables. A
            layer without a trained variable computes as with `layer.trainable = False`: BatchNormalization uses its
            statistics and does not move them.
        batch_fn: `(batch, training) -> batch`: changes a replica's shard, on its device, before each `loss_fn` gets it,
            in training and evaluation; the number of rows stays. `predict_fn` gets batches unchanged, and may call it.
            Objects in it that draw random numbers belong into `model`.
        gradient_fn: as for `Update`.
        step_fn: as for `Update`; with it, `loss_fn` may be None.
        learning_rates: as for `Update`.
        no_decay: as for `Update`.
        updates: several updates, which run in this order in one step; instead of `optimizer`, `loss_fn`, `trainable`,
            `gradient_fn`, `step_fn`, `learning_rates` and `no_decay`.
        original: the Keras model of which `model` is a copy, if `from_keras` made the spec; not an argument.

    Raises:
        ValueError: if an argument is missing or contradicts another, or an optimizer has settings that belong to
            distloop.
    """

    model: Any
    optimizer: keras.optimizers.Optimizer | LossScaleOptimizer | None = None
    loss_fn: LossFn | None = None
    predict_fn: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None = field(default=None, kw_only=True)
    metrics: Mapping[str, keras.metrics.Metric] | None = field(default=None, kw_only=True)
    trainable: str | None = field(default=None, kw_only=True)
    batch_fn: Callable[[Any, bool], Any] | None = field(default=None, kw_only=True)
    gradient_fn: GradientFn | None = field(default=None, kw_only=True)
    step_fn: StepFn | None = field(default=None, kw_only=True)
    learning_rates: Mapping[str, float] | None = field(default=None, kw_only=True)
    no_decay: str | None = field(default=None, kw_only=True)
    updates: Sequence[Update] = field(default=(), kw_only=True)
    original: keras.Model | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for model in self.model.values() if isinstance(self.model, Mapping) else tf.nest.flatten([self.model]):
            refuse_tf_keras(model)
        if self.updates:
            self._check_updates()
        else:
            object.__setattr__(self, "updates", (self._single_update(),))
        _check_function("batch_fn", self.batch_fn, "a function that returns a batch", "batch", "training")
        object.__setattr__(self, "updates", tuple(update.with_loss(self.prepared) for update in self.updates))
        if (self.metrics or self.batch_fn) and not any(update.has_loss for update in self.updates):
            given = f"metrics={sorted(self.metrics)}" if self.metrics else "a batch_fn"
            raise ValueError(
                f"ModelSpec was given {given} and no loss_fn, which it serves: give one, or let step_fn do it."
            )
        for name, metric in (self.metrics or {}).items():
            if not isinstance(metric, keras.metrics.Metric):
                raise ValueError(
                    f'ModelSpec(metrics=...) holds a {type(metric).__name__} under "{name}"; it takes Keras '
                    "metrics: return means from loss_fn, as values per example."
                )
        _check_predict_fn(self.predict_fn)

    def of_copy(self, original: keras.Model) -> "ModelSpec":
        """Returns this spec for a model that is a copy of another one, which gets the weights whenever `fit` ends."""
        spec = copy.copy(self)
        object.__setattr__(spec, "original", original)
        object.__setattr__(spec, "_trainable_in_original", _trainable_layers(original))
        return spec

    def changed_layers(self) -> list[str]:
        """Returns the names of the layers of `original` whose `trainable` has changed since the copy was made."""
        if self.original is None:
            return []
        before = self._trainable_in_original  # type: ignore[attr-defined]
        now = _trainable_layers(self.original)
        return [name for name in now if before.get(name, now[name]) != now[name]]

    def with_functions(self, change: Callable[..., Any]) -> "ModelSpec":
        """Returns this spec with what `change` makes of each `loss_fn` and `predict_fn`."""
        spec = copy.copy(self)  # `replace` would call batch_fn twice
        object.__setattr__(spec, "updates", tuple(update.with_loss(change) for update in self.updates))
        if isinstance(self.predict_fn, Mapping):
            functions = {name: change(function) for name, function in self.predict_fn.items()}
            object.__setattr__(spec, "predict_fn", functions)
        elif self.predict_fn is not None:
            object.__setattr__(spec, "predict_fn", change(self.predict_fn))
        return spec

    def prepared(self, loss_fn: LossFn) -> LossFn:
        """Returns another `loss_fn` that gets its batches as this spec's do."""
        return loss_fn if self.batch_fn is None else preparing_batches(loss_fn, self.batch_fn)

    def _single_update(self) -> Update:
        if self.optimizer is None or (self.loss_fn is None and self.step_fn is None):
            raise ValueError(
                "ModelSpec needs an optimizer and a loss_fn, or updates: give ModelSpec(model, optimizer, loss_fn)."
            )
        settings = {name: getattr(self, name) for name in _OF_UPDATE}
        return Update("", self.loss_fn or NoLoss(), self.optimizer, self.trainable, **settings)

    def _check_updates(self) -> None:
        names_of_one = ("optimizer", "loss_fn", "trainable", *_OF_UPDATE)
        if given := [name for name in names_of_one if getattr(self, name) is not None]:
            raise ValueError(
                f"ModelSpec was given updates and also {' and '.join(given)}; each Update holds its own: leave the "
                "others out."
            )
        names = [update.name for update in self.updates]
        if len(set(names)) < len(names) or not all(names):
            raise ValueError(f"Updates named {names} were given; each needs a name of its own.")
        if len(self.updates) > 1 and (without := [u.name for u in self.updates if u.variables is None]):
            raise ValueError(
                f"The update {without[0]!r} has no variables, so its loss would train what the others train, too: give "
                "Update a list or a regular expression, such as '^generator/', or '.' for all."
            )
        for a, b in itertools.combinations(self.updates, 2):
            is_shared = plain_optimizer(a.optimizer) is plain_optimizer(b.optimizer)
            if is_shared and _optimizer_settings(a) != _optimizer_settings(b):
                raise ValueError(
                    f"The updates {a.name!r} and {b.name!r} share one optimizer, whose slots belong to the same "
                    "variables with the same rules: give both the same optimizer object, variables, learning_rates and "
                    "no_decay, or make two optimizers."
                )


def _optimizer_settings(update: Update) -> tuple[Any, ...]:
    """Returns what updates that share an optimizer have in common."""
    variables = update.variables
    if variables is not None and not isinstance(variables, str):
        variables = [id(tensorflow_variable(variable)) for variable in variables]
    return id(update.optimizer), variables, dict(update.learning_rates or {}), update.no_decay


def plain_optimizer(optimizer: Any) -> Any:
    """Returns the Keras optimizer inside a `LossScaleOptimizer`; any other optimizer as it is."""
    return optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer


def _trainable_layers(model: keras.Model) -> dict[str, bool]:
    return {layer.name: layer.trainable for layer in model._flatten_layers(include_self=False)}


def refuse_tf_keras(model: Any) -> None:
    """Raises ValueError for a model of tf_keras, which is Keras 2."""
    if any(kind.__module__.partition(".")[0] == "tf_keras" for kind in type(model).__mro__):
        raise ValueError(
            f"The model {getattr(model, 'name', 'given')!r} is one of tf_keras (Keras 2), whose layers and optimizers "
            "distloop does not know: build it with `import keras` (Keras 3), without TF_USE_LEGACY_KERAS."
        )


def _check_function(name: str, fn: Any, described: str, *arguments: str) -> None:
    if fn is not None and not callable(fn):
        raise ValueError(f"{name}={fn!r} was given; it is {described}.")
    if fn is not None:
        require_call(fn, name, *arguments)


def _require_matches(setting: str, patterns: Iterable[str], paths: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(re.search(pattern, path) for path in paths):
            raise ValueError(
                f"{setting} was given the regular expression {pattern!r}, which is found in no trained variable's "
                f"path; there are {_first_few(paths)}: correct it."
            )


def _first_few(paths: Sequence[str]) -> str:
    return f"{list(paths)[:4]}{' ...' if len(paths) > 4 else ''}"


def _check_predict_fn(predict_fn: Any) -> None:
    """Refuses anything but a function or functions by name."""
    functions = predict_fn if isinstance(predict_fn, Mapping) else {}
    if predict_fn is not None and not callable(predict_fn) and not functions:
        raise ValueError(
            f"predict_fn={predict_fn!r} was given; it is a function from a batch to outputs, or a dict of them by "
            "name: give one at least, or leave predict_fn out."
        )
    for name, function in functions.items():
        if not isinstance(name, str) or not name or not callable(function):
            raise ValueError(
                f"ModelSpec(predict_fn=...) holds a {type(function).__name__} under {name!r}; names are strings, and "
                "say what is predicted: give a function from a batch to outputs under each."
            )
    for function in functions.values() if functions else [predict_fn]:
        _check_function("predict_fn", function, "", "batch")


def _check_optimizer(optimizer: Any) -> None:
    """Refuses an optimizer that would change gradients before the reduction, or that distloop would repeat."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"optimizer={optimizer!r} was given; distloop needs a keras.optimizers.Optimizer object, such as "
            "keras.optimizers.Adam(1e-3)."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "A Keras LossScaleOptimizer was given, which asks one replica alone whether gradients are finite: give the "
            f"optimizer inside it and set Config(precision={FLOAT16.name!r}), or give distloop.LossScaleOptimizer."
        )
    for inner in getattr(optimizer, "optimizers", ()):  # inside a MultiOptimizer, which is new in Keras 3.15
        _check_optimizer(inner)
    if type(optimizer) is getattr(keras.optimizers, "MultiOptimizer", None):
        raise ValueError(
            "A Keras MultiOptimizer was given in a ModelSpec; distloop takes it from a compiled model: give "
            "distloop.from_keras the model, or a function that builds and compiles the model."
        )
    for setting, advice in _REPLACED_SETTINGS.items():
        if getattr(optimizer, setting, None):
            raise ValueError(
                f"The optimizer {optimizer.name!r} has {setting}={getattr(optimizer, setting)}, which Keras applies "
                f"on each replica alone: leave it out and {advice}."
            )
    rate = optimizer._learning_rate
    if callable(rate) and not isinstance(rate, (keras.optimizers.schedules.LearningRateSchedule, keras.Variable)):
        raise ValueError(
            f"The optimizer {optimizer.name!r} has a plain callable as learning rate, which is called once, while "
            "tracing: give a keras.optimizers.schedules.LearningRateSchedule, such as distloop.make_schedule(...)."
        )


def check_model_fn(model_fn: Any) -> None:
    """Raises a ValueError unless a `Trainer` can make its model with this."""
    if not callable(model_fn) or isinstance(model_fn, keras.Model):
        raise ValueError(
            f"Trainer was given {model_fn!r} as model_fn; it takes a function that makes the model and returns a "
            "ModelSpec, or distloop.from_keras(model) for a compiled Keras model."
        )
    require_call(model_fn, "model_fn")
