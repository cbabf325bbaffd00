"""Owns what training changes: `ModelSpec` and `Update`, which the user makes, and `TrainState`, which holds it all.

    def model_fn():
        model = keras.Sequential([...])
        return ModelSpec(model, keras.optimizers.Adam(1e-3), loss_fn)

    state = TrainState.make(model_fn, strategy, average_decay=0.0)

It does not know how a step goes.
"""

import contextlib
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from distloop.distributed import workers
from distloop.distributed.devices import HOST
from distloop.distributed.placement import make_placement
from distloop.optimizers import keras_hooks
from distloop.optimizers.loss_scale import LossScaleOptimizer
from distloop.optimizers.moving_average import MovingAverage
from distloop.training.loss_spikes import LossWatch
from distloop.variables import is_seed, named_variables, portable_names, slot_names, tensorflow_variable, top_layers

LossFn = Callable[[Any, bool], Mapping[str, Any]]
GradientFn = Callable[[dict[str, tf.Tensor]], Mapping[str, tf.Tensor]]

# What is saved of an optimizer beside its variables, and the variable it is about.
_CLASS, _INITIAL_RATE, _RATE = "/class", "/initial_learning_rate", "/learning_rate"

# Replicas start apart by this much in the key of each random stream; a prime, so that few streams meet.
SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class Update:
    """One optimizer's part of a step.

    Attributes:
        name: stands before the reported values, as in `discriminator/loss`.
        loss_fn: `(batch, training) -> dict` of values per example, `[B, ...]`; `"loss"` is minimized.
        optimizer: a plain Keras optimizer of its own, or a `LossScaleOptimizer` around one.
        variables: what it trains: a list of variables, or a regular expression found in their paths; None: all that
            are trainable.
        gradient_fn: `gradients -> gradients`, both by path, between clipping and the optimizer: they are reduced,
            divided and unscaled, and equal on all replicas. So must be what it returns: it draws no random numbers.
        learning_rates: what to multiply the learning rate with, weight decay's too, by regular expressions on paths:
            `{"^encoder/": 0.1}`; the first that is found in a path counts.
        no_decay: a regular expression found in the paths that the optimizer's weight decay leaves out.
    """

    name: str
    loss_fn: LossFn
    optimizer: keras.optimizers.Optimizer | LossScaleOptimizer
    variables: Sequence[Any] | str | None = None
    gradient_fn: GradientFn | None = field(default=None, kw_only=True)
    learning_rates: Mapping[str, float] | None = field(default=None, kw_only=True)
    no_decay: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise ValueError(f"loss_fn={self.loss_fn!r} was given; distloop needs a function of (batch, training).")
        _require_plain(_inner(self.optimizer))
        if self.gradient_fn is not None and not callable(self.gradient_fn):
            raise ValueError(
                f"gradient_fn={self.gradient_fn!r} was given; it is a function from gradients by path to as many."
            )
        for pattern, factor in (self.learning_rates or {}).items():
            if not _is_factor(factor):
                raise ValueError(
                    f"learning_rates={{{pattern!r}: {factor!r}}} was given; it multiplies the learning rate and is a "
                    "positive number: give trainable=... to leave variables as they are."
                )
        if self.no_decay is not None and getattr(_inner(self.optimizer), "weight_decay", None) is None:
            raise ValueError(
                f"no_decay={self.no_decay!r} was given, but the optimizer has no weight_decay to leave out: give it "
                "one, as in keras.optimizers.AdamW(1e-3, weight_decay=0.01), or drop no_decay."
            )


@dataclass(frozen=True)
class ModelSpec:
    """What `model_fn` returns: a model and how it is trained.

    Attributes:
        model: a `keras.Model`, any `tf.Module`, or several of them in a dict or list.
        optimizer: a plain Keras optimizer, or a `LossScaleOptimizer` around one.
        loss_fn: `(batch, training) -> dict`; runs on each replica, on its share of the batch, and returns values per
            example, `[B, ...]`. `"loss"` is minimized, every other name is a metric. `weighted(values, weights)` gives
            a value its own weights.
        predict_fn: `batch -> outputs`, leading axis B; or a dict of such functions by name, of which `predict` takes
            the first unless it is told another, and `export` all.
        metrics: name -> `keras.metrics.Metric` for what is no mean; `loss_fn` returns the arguments of its
            `update_state` under that name, as a tuple.
        trainable: a regular expression found in the paths of the variables to train; None: all that are trainable.
        batch_fn: `(batch, training) -> batch`: changes a replica's share, on its device, before each `loss_fn` gets it,
            in training and evaluation; rows stay as many. `predict_fn` gets batches as they are, and may call it. What
            draws random numbers in it belongs into `model`.
        gradient_fn: as for `Update`.
        learning_rates: as for `Update`.
        no_decay: as for `Update`.
        updates: instead of `optimizer`, `loss_fn`, `trainable` and what is as for `Update`: several, which run in that
            order in one step.

    Raises:
        ValueError: if something is missing, given twice, or an optimizer has settings that belong to distloop.
    """

    model: Any
    optimizer: keras.optimizers.Optimizer | LossScaleOptimizer | None = None
    loss_fn: LossFn | None = None
    predict_fn: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None = field(default=None, kw_only=True)
    metrics: Mapping[str, keras.metrics.Metric] | None = field(default=None, kw_only=True)
    trainable: str | None = field(default=None, kw_only=True)
    batch_fn: Callable[[Any, bool], Any] | None = field(default=None, kw_only=True)
    gradient_fn: GradientFn | None = field(default=None, kw_only=True)
    learning_rates: Mapping[str, float] | None = field(default=None, kw_only=True)
    no_decay: str | None = field(default=None, kw_only=True)
    updates: Sequence[Update] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        rules: dict[str, Any] = {
            "gradient_fn": self.gradient_fn,
            "learning_rates": self.learning_rates,
            "no_decay": self.no_decay,
        }
        if self.updates:
            single = {"optimizer": self.optimizer, "loss_fn": self.loss_fn, "trainable": self.trainable, **rules}
            if given := [name for name, value in single.items() if value is not None]:
                raise ValueError(
                    f"ModelSpec was given updates and also {' and '.join(given)}; each Update holds its own: leave the "
                    "others out."
                )
            names = [update.name for update in self.updates]
            if len(set(names)) < len(names) or not all(names):
                raise ValueError(f"Updates named {names} were given; each needs a name of its own.")
            if len({id(_inner(update.optimizer)) for update in self.updates}) < len(names):
                raise ValueError(
                    "Two updates share one optimizer, whose slots and step count are one update's: make two."
                )
        else:
            if self.optimizer is None or self.loss_fn is None:
                raise ValueError(
                    "ModelSpec needs an optimizer and a loss_fn, or updates: give ModelSpec(model, optimizer, loss_fn)."
                )
            update = Update("", self.loss_fn, self.optimizer, self.trainable, **rules)
            object.__setattr__(self, "updates", (update,))
        if self.batch_fn is not None:
            changed = [replace(u, loss_fn=_after(self.batch_fn, u.loss_fn)) for u in self.updates]
            object.__setattr__(self, "updates", tuple(changed))
        for name, metric in (self.metrics or {}).items():
            if not isinstance(metric, keras.metrics.Metric):
                raise ValueError(
                    f'ModelSpec(metrics=...) holds a {type(metric).__name__} under "{name}"; it takes Keras '
                    "metrics: return means from loss_fn, as values per example."
                )
        _check_predict_fn(self.predict_fn)


class TrainState(tf.Module):
    """Everything that training changes.

    Attributes:
        step: how many times the train step was called, a scalar int64.
        skipped_steps: how many of those changed nothing, a scalar int64.
        spec: what `model_fn` returned.
        optimizers: by update; a `LossScaleOptimizer` where the loss is scaled.
        loss_watch: what the losses of the updates usually are, where somebody asks.
        average: the moving average of the weights, or None.
        placement: the devices of the model, where it is a pipeline.
    """

    def __init__(
        self,
        spec: ModelSpec,
        strategy: tf.distribute.Strategy,
        average_decay: float,
        is_loss_scaled: bool,
        created: dict[int, Any],
    ):
        """Use `make`."""
        super().__init__(name="state")
        self.spec = spec
        self.strategy = strategy
        with tf.device(HOST):  # plain variables: a number for people, not for replicas
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
            self.skipped_steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="skipped_steps")
        self.loss_watch = LossWatch(len(spec.updates))
        self.average: MovingAverage | None = None
        self._average_decay = average_decay
        self._created = created
        self._initial_rates: dict[str, float] = {}
        self.is_built = False
        self.placement = make_placement(spec.model)
        self.train_metrics = dict(spec.metrics or {})
        with strategy.scope(), _recorded(created):
            self.eval_metrics = {name: _clone_metric(name, metric) for name, metric in self.train_metrics.items()}
            self.optimizers = {
                update.name: LossScaleOptimizer(update.optimizer)
                if is_loss_scaled and not isinstance(update.optimizer, LossScaleOptimizer)
                else update.optimizer
                for update in spec.updates
            }
            self.loss_scalers = {n: o for n, o in self.optimizers.items() if isinstance(o, LossScaleOptimizer)}
            self.plain_optimizers = {name: _inner(optimizer) for name, optimizer in self.optimizers.items()}
            if all(layer.built for layer in top_layers(spec.model, in_parts=True)):
                self._finish()

    @classmethod
    def make(
        cls,
        model_fn: Callable[[], ModelSpec],
        strategy: tf.distribute.Strategy,
        average_decay: float = 0.0,
        *,
        is_loss_scaled: bool = False,
    ) -> "TrainState":
        """Calls `model_fn` in the strategy's scope and builds what it can.

        Args:
            model_fn: makes models and optimizers and returns a `ModelSpec`.
            strategy: in whose scope.
            average_decay: of the moving average of the weights; 0: none.
            is_loss_scaled: whether optimizers get a `LossScaleOptimizer` around them.

        Raises:
            ValueError: if `model_fn` returns something else, or a model or optimizer that was made elsewhere.
        """
        created: dict[int, Any] = {}
        with strategy.scope(), _recorded(created):
            spec = model_fn()
        if not isinstance(spec, ModelSpec):
            raise ValueError(
                f"model_fn returned a {type(spec).__name__}; distloop needs a ModelSpec: "
                "return distloop.ModelSpec(model, optimizer, loss_fn)."
            )
        return cls(spec, strategy, average_decay, is_loss_scaled, created)

    @property
    def model(self) -> Any:
        """The user's model or models, with the weights that train."""
        return self.spec.model

    @property
    def optimizer(self) -> Any:
        """The optimizer; of several updates, a dict by name."""
        return self.optimizers.get("", self.optimizers)

    @property
    def loss_scale(self) -> Any:
        """What the loss is multiplied by, a scalar; of several updates, a dict by name; None where it is not scaled."""
        scales = {name: tf.convert_to_tensor(scaler.loss_scale) for name, scaler in self.loss_scalers.items()}
        return scales.get("", scales or None)

    def build(self, rows: Any) -> None:
        """Builds models that do not know their input shapes yet, by running them once, outside training.

        Args:
            rows: a batch `[B, ...]`, B >= 1.
        """
        with self.strategy.scope(), _recorded(self._created):
            for update in self.spec.updates:
                update.loss_fn(rows, False)
            unbuilt = [layer.name for layer in top_layers(self.spec.model, in_parts=True) if not layer.built]
            if unbuilt:
                raise ValueError(
                    f"Layers {unbuilt[:3]} of the model are not built and loss_fn does not call them, so their "
                    "variables are unknown: call them in loss_fn, or build them in model_fn."
                )
            self._finish()

    def _finish(self) -> None:
        """Finds the variables and makes what belongs to them; in scope."""
        named = named_variables(self.spec.model)
        self._require_created_here(named.items(), "model")
        by_id = {id(variable): path for path, variable in named.items()}
        self.paths = by_id
        self.variables_of_update = {update.name: _select(update, named) for update in self.spec.updates}
        trained = {id(v): v for variables in self.variables_of_update.values() for v in variables}
        for update in self.spec.updates:
            optimizer = self.optimizers[update.name]
            self._require_created_here([(v.name, v) for v in optimizer.variables], "optimizer")
            variables, plain = self.variables_of_update[update.name], self.plain_optimizers[update.name]
            factors, decays = _find_rules(update, [by_id[id(v)] for v in variables])
            if not all(decays):
                plain.exclude_from_weight_decay([v for v, does in zip(variables, decays, strict=True) if not does])
            if not optimizer.built:
                optimizer.build(variables)
            keras_hooks.skip_reduction(plain)
            keras_hooks.fuse_large_updates(plain)
            if update.learning_rates:
                keras_hooks.scale_learning_rates(plain, list(zip(variables, factors, strict=True)))
            self.placement.adapt_optimizer(plain)
            if isinstance(rate := self.plain_optimizers[update.name]._learning_rate, keras.Variable):
                self._initial_rates[update.name] = float(rate.numpy())
        layers = list(top_layers(self.spec.model, in_parts=True))
        self.layers_of_update = {
            name: [layer for layer in layers if {id(v) for v in layer.variables} & {id(v) for v in variables}]
            for name, variables in self.variables_of_update.items()
        }
        self.untrained_variables = [variable for variable in named.values() if id(variable) not in trained]
        seeds = {id(v) for v in named.values() if is_seed(v)}
        self.seeds = [v for v in self.untrained_variables if id(v) in seeds]
        if self._average_decay:
            self.average = MovingAverage(list(trained.values()), self._average_decay)
        self._part_seeds()

        def read() -> list[tf.Tensor]:
            return [tf.identity(seed) for seed in self.seeds]

        def write(values: list[tf.Tensor]) -> None:
            for seed, value in zip(self.seeds, values, strict=True):
                seed.assign(value)

        self._read_seeds = tf.function(lambda: self.strategy.run(read), autograph=False)
        self._read_metrics = tf.function(lambda: self.strategy.run(self._gather_metrics), autograph=False)
        self._write_seeds = tf.function(lambda values: self.strategy.run(write, args=(values,)), autograph=False)
        self.is_built = True

    def _require_created_here(self, variables: Any, owner: str) -> None:
        for path, variable in variables:
            if id(tensorflow_variable(variable)) not in self._created:
                raise ValueError(
                    f"The {owner}'s variable {path!r} was made outside model_fn, so replicas would not share it: make "
                    f"the {owner} inside model_fn, or give a compiled Keras model to distloop.from_keras(model)."
                )

    def _part_seeds(self) -> None:
        """Starts each replica's random streams elsewhere: Keras starts them all alike, with equal dropout masks."""

        def part() -> None:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            for seed in self.seeds:
                offset = tf.stack([tf.cast(replica, seed.dtype) * SEED_STRIDE, tf.zeros([], seed.dtype)])
                seed.assign(tf.convert_to_tensor(seed) + offset)

        if self.seeds and self.strategy.num_replicas_in_sync > 1:
            tf.function(lambda: self.strategy.run(part), autograph=False)()

    def snapshot(self) -> dict[str, tf.Tensor]:
        """Reads everything that training changes, by names that are the same in every process.

        Returns:
            `model/<path>`, `optimizer/<slot>/<path>` (of several updates `optimizer/<update>/...`), `average/<path>`,
            `metrics/<name>/<i>` with a value per replica, `step`, `skipped_steps`, `loss_statistics`. Of random
            streams, the first replica's: the others are `SEED_STRIDE` apart. Nothing writes to these tensors any more.
        """
        with tf.device(HOST):
            values = {name: tf.identity(tensorflow_variable(v)) for name, v in self._saved_variables().items()}
            for name, variable in self._metric_variables().items():
                values[name] = tf.stack([tf.identity(part) for part in self._parts(variable)])
            if self.train_metrics and workers.num_workers(self.strategy) > 1:
                values |= self.strategy.experimental_local_results(self._read_metrics())[0]
            return values | self._optimizer_facts()

    def differences(self, values: Mapping[str, tf.Tensor]) -> list[str]:
        """Says where a snapshot does not fit: what is missing or too much, and what has another shape or dtype."""
        expected = {name: tensorflow_variable(v) for name, v in self._saved_variables().items()}
        found = [f"{name} is missing" for name in expected if name not in values]
        known = {*expected, *self._optimizer_facts()}
        own = ("model/", "optimizer/", "average/")  # metrics may change; other values are not ours
        found += [f"{name} is unknown" for name in values if name not in known and name.startswith(own)]
        for name, variable in expected.items():
            if name in values:
                there, here = values[name], variable
                if there.shape != here.shape or there.dtype != here.dtype:
                    found.append(f"{name} is {_spell(there)} there and {_spell(here)} here")
        for name, here in self._optimizer_facts().items():
            if name.endswith(_CLASS) and name in values and values[name] != here:
                found.insert(0, f"{name} is {values[name].numpy().decode()} there and {here.numpy().decode()} here")
        return found

    def restore(self, values: Mapping[str, tf.Tensor]) -> None:
        """Sets everything to a snapshot without `differences`; random streams and metrics on any number of replicas.

        A learning rate goes on as it was, unless `model_fn` gives another one now than it did then.
        """
        facts = self._optimizer_facts()
        given_anew = {n.removesuffix(_INITIAL_RATE) for n, rate in facts.items() if n in values and values[n] != rate}
        with self.strategy.scope():
            seeds = {id(seed) for seed in self.seeds}
            for name, variable in self._saved_variables().items():
                if name.endswith(_RATE) and name.removesuffix(_RATE) in given_anew:
                    logging.warning(
                        "%s stays %g: model_fn gives another one than it did.", name, float(variable.numpy())
                    )
                elif id(variable) in seeds:
                    for replica, part in enumerate(self._parts(variable), self._first_replica):
                        part.assign(values[name] + tf.constant([replica * SEED_STRIDE, 0], part.dtype))
                else:
                    tensorflow_variable(variable).assign(values[name])
            for name, variable in self._metric_variables().items():
                parts, replicas = self._parts(variable), self.strategy.num_replicas_in_sync
                saved = values.get(name)
                if saved is None:
                    saved = tf.zeros([1, *variable.shape], variable.dtype)
                if len(saved) != replicas:  # one holds the sum of all
                    total = tf.reduce_sum(saved, 0)
                    saved = tf.stack([total, *[tf.zeros_like(total)] * (replicas - 1)])
                for part, value in zip(parts, tf.unstack(saved)[self._first_replica :], strict=False):
                    part.assign(value)

    def _saved_variables(self) -> dict[str, Any]:
        by_name = portable_names(self.spec.model)
        names = {id(variable): name for name, variable in by_name.items()}
        saved = {f"model/{name}": variable for name, variable in by_name.items()}
        for update in self.spec.updates:
            prefix = f"optimizer/{update.name}" if update.name else "optimizer"
            variables = self.variables_of_update[update.name]
            of_update = [names[id(v)] for v in variables]
            slots = slot_names(self.plain_optimizers[update.name], variables, of_update)
            saved |= {f"{prefix}/{name}": slot for name, slot in slots.items()}
            if (scaler := self.loss_scalers.get(update.name)) is not None:
                saved |= {f"{prefix}/loss_scale": scaler.loss_scale, f"{prefix}/streak": scaler.streak}
        if self.average is not None:
            saved |= {f"average/{names[id(v)]}": a for v, a in self.average.pairs}
        counts = {"step": self.step, "skipped_steps": self.skipped_steps}
        return saved | counts | {"loss_statistics": self.loss_watch.statistics}

    def _optimizer_facts(self) -> dict[str, tf.Tensor]:
        """Tells what an optimizer's variables do not: its class, and the learning rate it was given."""
        facts = {}
        for name, optimizer in self.plain_optimizers.items():
            prefix = f"optimizer/{name}" if name else "optimizer"
            facts[prefix + _CLASS] = tf.constant(type(optimizer).__name__)
            if name in self._initial_rates:
                facts[prefix + _INITIAL_RATE] = tf.constant(self._initial_rates[name])
        return facts

    def _metric_variables(self) -> dict[str, Any]:
        return {
            f"metrics/{name}/{i}": variable
            for name, metric in self.train_metrics.items()
            for i, variable in enumerate(metric.variables)
        }

    def _parts(self, variable: Any) -> tuple[Any, ...]:
        """Gives the variable of each replica of this worker."""
        return self.strategy.experimental_local_results(tensorflow_variable(variable))

    @property
    def _first_replica(self) -> int:
        """The number, among all, of this worker's first replica."""
        return workers.worker_index(self.strategy) * workers.num_local_replicas(self.strategy)

    def _gather_metrics(self) -> dict[str, tf.Tensor]:
        """Reads what each replica of each worker holds of Keras metrics, `[R, ...]`; in a replica's context."""
        context = tf.distribute.get_replica_context()
        variables = self._metric_variables().items()
        return {name: context.all_gather(tf.identity(variable)[None], axis=0) for name, variable in variables}

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Puts the averaged weights in place meanwhile, if there are any."""
        with self.average.applied() if self.average is not None else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def seeds_kept(self) -> Iterator[None]:
        """Puts every replica's random streams back where they were, at the end."""
        before = self.read_seeds()
        try:
            yield
        finally:
            self.write_seeds(before)

    def read_seeds(self) -> Any:
        """Reads the random streams, a value per replica."""
        return self._read_seeds() if self.seeds else []

    def write_seeds(self, values: Any) -> None:
        """Sets the random streams to what `read_seeds` gave."""
        if self.seeds:
            self._write_seeds(values)

    def model_variables(self) -> list[Any]:
        """Gives the TensorFlow variables of the model."""
        return [tensorflow_variable(v) for v in named_variables(self.spec.model).values()]

    def num_parameters(self) -> int:
        """Counts the numbers that the updates train."""
        trained = {id(v): v for variables in self.variables_of_update.values() for v in variables}
        return sum(int(tf.TensorShape(v.shape).num_elements()) for v in trained.values())


def _is_factor(value: Any) -> bool:
    return isinstance(value, numbers.Real) and 0 < float(value) < math.inf


def _after(batch_fn: Callable[[Any, bool], Any], loss_fn: LossFn) -> LossFn:
    """Lets `loss_fn` see what `batch_fn` makes of a batch."""
    if not callable(batch_fn):
        raise ValueError(
            f"batch_fn={batch_fn!r} was given; it is a function of (batch, training) that returns a batch."
        )
    return lambda batch, training: loss_fn(batch_fn(batch, training), training)


def _find_rules(update: Update, paths: Sequence[str]) -> tuple[list[float], list[bool]]:
    """Finds by the paths of an update's variables what multiplies their learning rate, and whether they decay.

    Raises:
        ValueError: if a pattern is found in no path.
    """
    rates = update.learning_rates or {}
    for setting, patterns in (
        ("learning_rates", list(rates)),
        ("no_decay", [update.no_decay] if update.no_decay else []),
    ):
        for pattern in patterns:
            if not any(re.search(pattern, path) for path in paths):
                raise ValueError(
                    f"{setting} was given the regular expression {pattern!r}, which is found in no trained variable's "
                    f"path; there are {list(paths)[:4]}{' ...' if len(paths) > 4 else ''}: correct it."
                )
    factors = [next((float(f) for pattern, f in rates.items() if re.search(pattern, path)), 1.0) for path in paths]
    return factors, [update.no_decay is None or not re.search(update.no_decay, path) for path in paths]


def _check_predict_fn(given: Any) -> None:
    """Refuses what is neither a function nor some by name."""
    functions = given if isinstance(given, Mapping) else {}
    if given is not None and not callable(given) and not functions:
        raise ValueError(
            f"predict_fn={given!r} was given; it is a function from a batch to outputs, or a dict of them by name: "
            "give one at least, or leave predict_fn out."
        )
    for name, function in functions.items():
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"ModelSpec(predict_fn=...) holds a function under {name!r}; names are strings: give it one that "
                "says what it predicts."
            )
        if not callable(function):
            raise ValueError(
                f"ModelSpec(predict_fn=...) holds a {type(function).__name__} under {name!r}, which cannot be called: "
                "give a function from a batch to outputs."
            )


def _select(update: Update, named: Mapping[str, Any]) -> list[Any]:
    """Finds the variables that an update trains, in the model's order."""
    trainable = {path: v for path, v in named.items() if v.trainable and not is_seed(v)}
    of = f'update "{update.name}"' if update.name else "the model"
    if update.variables is None:
        chosen = list(trainable.values())
    elif isinstance(update.variables, str):
        chosen = [v for path, v in trainable.items() if re.search(update.variables, path)]
        if not chosen:
            raise ValueError(
                f"The regular expression {update.variables!r} for {of} is found in no trainable variable's path; "
                f"there are {list(trainable)[:4]}{' ...' if len(trainable) > 4 else ''}: correct it."
            )
    else:
        known = {id(tensorflow_variable(v)): v for v in named.values()}
        unknown: list[Any] = [v for v in update.variables if id(tensorflow_variable(v)) not in known]
        if unknown:
            raise ValueError(
                f"A variable of {of}, {getattr(unknown[0], 'path', unknown[0].name)!r}, is not in ModelSpec's model: "
                "put every model that trains into ModelSpec."
            )
        chosen = [known[id(tensorflow_variable(v))] for v in update.variables]
    if not chosen:
        raise ValueError(f"There is no trainable variable for {of}: give a model that has some.")
    return chosen


def _spell(tensor: Any) -> str:
    return f"{tf.as_dtype(tensor.dtype).name}{list(tensor.shape)}"


def _recorded(created: dict[int, Any]) -> Any:
    """Notes each variable that is made, by identity; holding it keeps its identity from being given again."""

    def record(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        variable = next_creator(**kwargs)
        created[id(variable)] = variable
        return variable

    return tf.variable_creator_scope(record)


def _clone_metric(name: str, metric: keras.metrics.Metric) -> keras.metrics.Metric:
    """Makes a metric like another, for evaluation, which must not touch the one that training feeds."""
    try:
        return type(metric).from_config(metric.get_config())
    except TypeError as error:
        raise ValueError(
            f'The metric under "{name}", a {type(metric).__name__}, cannot be made again from its get_config() '
            f"({error}); evaluation needs one of its own: let get_config return every argument of __init__."
        ) from None


def _inner(optimizer: Any) -> Any:
    """Gives the plain optimizer inside one that scales the loss."""
    return optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer


def _require_plain(optimizer: Any) -> None:
    """Refuses what Keras would do before the reduction, or a second time."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"optimizer={optimizer!r} was given; distloop needs a keras.optimizers.Optimizer object, such as "
            "keras.optimizers.Adam(1e-3)."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "A Keras LossScaleOptimizer was given, which asks one replica alone whether gradients are finite: give the "
            "optimizer inside it and set Config(precision='mixed_float16'), or give distloop.LossScaleOptimizer."
        )
    instead = {
        "clipnorm": "set Config(clip_norm=...), which clips one norm over all variables after the reduction",
        "clipvalue": "set Config(clip_norm=...), which clips after the reduction",
        "global_clipnorm": "set Config(clip_norm=...), which clips after the reduction",
        "use_ema": "set Config(average_decay=...)",
        "gradient_accumulation_steps": "set Config(microbatches=...)",
        "loss_scale_factor": "set the precision in Config",
    }
    for setting, advice in instead.items():
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
