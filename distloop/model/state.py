"""Training state: the model, the optimizers, the average and the counts; everything that training changes.

    state = TrainState(model_fn, strategy, average_decay=0.0)
    state.build(rows)                                # if the model needs a batch to know its input shapes

`saved_state.py` reads and restores it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from distloop.distributed import devices, strategies
from distloop.distributed.devices import Replicas
from distloop.errors import raise_as_user_error
from distloop.installed import import_part
from distloop.model import guards
from distloop.model.guards import Guard, OutsideVariables, guarded
from distloop.model.keras_metrics import KerasMetrics
from distloop.model.layers import Frozen, RandomStreams, frozen_layers, keep_losses_apart
from distloop.model.metrics import LossWatch
from distloop.model.placement import make_placement
from distloop.model.spec import ModelSpec, Update, plain_optimizer
from distloop.model.user_functions import explain_mistakes
from distloop.optimizers import keras_hooks
from distloop.optimizers.loss_scale import LossScaleOptimizer
from distloop.optimizers.slot_placement import MovingAverage, make_slot_placement
from distloop.optimizers.slot_store import SlotStore
from distloop.variables import (
    ComposedVariable,
    is_seed,
    mark_frozen,
    named_variables,
    portable_names,
    recurrent_states,
    tensorflow_variable,
    top_layers,
)


class TrainState(tf.Module):
    """Everything that training changes.

    Attributes:
        step: how many times the train step was called, a scalar int64.
        token_count: the sum of the loss's weights over the steps of the run, a scalar float64, if a schedule reads it.
        skipped_steps: how many of those calls changed nothing, a scalar int64.
        spec: the result of `model_fn`.
        strategy: the strategy in whose scope everything was created.
        replicas: on which a step is defined: the strategy's, or virtual ones.
        placement: where the model computes: on the device of its replica, or in stages on several.
        stage_devices: the device of each stage, as in `GPU:0`; empty without stages.
        make_stage_actions: returns the actions that report on the stages, given a `Profile`.
        unplaced: returns a scope in which the model is traced without devices, to be served anywhere.
        num_shards: the number of shards into which replicas cut an update.
        weight_copies: returns the variables that have weights of the model once more.
        slot_placement: where slots and averages are: on every replica, or cut over them.
        optimizers: by name of the update; a `LossScaleOptimizer` if the loss is scaled.
        plain_optimizers: by name of the update, the Keras optimizers.
        slot_stores: by name of the update, the slots of its optimizer.
        loss_scalers: by name of the update, those of the optimizers that scale the loss.
        initial_learning_rates: by `id` of their variables, the constant learning rates that `model_fn` gave.
        keras_metrics: the Keras metrics, by name.
        loss_watch: statistics of the updates' losses, for the detection of spikes.
        average: the moving average of the weights, or None.
        outside_variables: watches what the user's functions use beside the model.
        created: by `id`, the TensorFlow variables that were made for it, those of no model included.
        may_be_saved: whether every variable is that of a finished step; not after one that failed.
        passes_write: whether an evaluation or a prediction writes variables of the model, which it then restores.

    Once the model is built:
        paths: paths of the model's variables by `id`.
        variables_of_update: by name of the update, the variables that it trains.
        layers_of_update: by name of the update, the top-level layers with variables that it trains.
        trained_variables: variables of the model that any update trains, each once.
        untrained_variables: the others.
        seeds: those of them that are states of random streams.
        recurrent_states: those of stateful recurrent layers.
        frozen: the scope in which frozen layers are not trainable.
        random_streams: the random streams on all replicas, and the recurrent states.
    """

    def __init__(
        self,
        model_fn: Callable[[], ModelSpec],
        strategy: tf.distribute.Strategy,
        average_decay: float = 0.0,
        replicas: Replicas | None = None,
        *,
        is_loss_scaled: bool = False,
        shard_optimizer: bool = False,
    ):
        """Calls `model_fn` in the strategy's scope and builds the state, as far as the model is built.

        Args:
            model_fn: creates models and optimizers and returns a `ModelSpec`.
            strategy: the strategy.
            average_decay: of the moving average of the weights; 1: an equal average; 0: no average.
            replicas: as the attribute; None: the strategy's.
            is_loss_scaled: True to put a `LossScaleOptimizer` around each optimizer.
            shard_optimizer: as `Config.shard_optimizer`.

        Raises:
            ValueError: if `model_fn` returns something else, or a model or optimizer that was created elsewhere.
        """
        super().__init__(name="state")
        self.slot_placement = make_slot_placement(strategy, shard_optimizer=shard_optimizer)
        created: dict[int, Any] = {}
        spec = _call(model_fn, strategy, created)
        self.spec = spec.with_functions(lambda fn: guarded(fn, explain_mistakes))
        self.strategy = strategy
        self.replicas = replicas = replicas or Replicas(strategy.num_replicas_in_sync)
        with tf.device(devices.HOST):  # plain variables: replicas do not read them
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        with tf.device(strategies.lead_device(strategy)):  # a step changes them without the host
            self.token_count: tf.Variable | None = None
            self.skipped_steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="skipped_steps")
            self.loss_watch = LossWatch(len(spec.updates))
        self.outside_variables = OutsideVariables(self)
        self.average: MovingAverage | None = None
        self._averages: Any = None  # the average, or `ScheduleFreeWeights`
        self._average_decay, self.created = average_decay, created
        self.initial_learning_rates: dict[int, float] = {}
        self.is_built, self.may_be_saved, self.passes_write = False, True, False
        self.placement = make_placement(spec.model)
        self.stage_devices, self.make_stage_actions = self.placement.devices, self.placement.make_actions
        self.unplaced = self.placement.unplaced
        self.num_shards, self.weight_copies = self.slot_placement.num_shards, self.slot_placement.copies
        self.keras_metrics = KerasMetrics(spec.metrics or {}, strategy, gathers_all=replicas.same_bits)
        with strategy.scope(), guards.recorded(created), _explained():
            optimizers = {id(update.optimizer): update.optimizer for update in spec.updates}
            for key, optimizer in optimizers.items():
                if is_loss_scaled and not isinstance(optimizer, LossScaleOptimizer):
                    optimizers[key] = LossScaleOptimizer(optimizer)
            self.optimizers = {update.name: optimizers[id(update.optimizer)] for update in spec.updates}
            self.loss_scalers = {n: o for n, o in self.optimizers.items() if isinstance(o, LossScaleOptimizer)}
            self.plain_optimizers = {name: plain_optimizer(optimizer) for name, optimizer in self.optimizers.items()}
            if all(layer.built for layer in _layers_with_variables(spec.model)):
                self._finish()

    def count_tokens(self) -> tf.Variable:
        """Returns `token_count`, which the steps raise from now on."""
        if self.token_count is None:
            with tf.device(devices.HOST):
                self.token_count = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        return self.token_count

    def end_steps(self, *, are_complete: bool) -> None:
        """Lets nothing be saved after a step that was not finished, until a checkpoint is restored."""
        self.may_be_saved &= are_complete

    @property
    def model(self) -> Any:
        """The user's model or models, with the weights that train."""
        return self.spec.model

    @property
    def optimizer(self) -> Any:
        """The optimizer; a dict by name if there are several updates."""
        return self.optimizers.get("", self.optimizers)

    @property
    def loss_scale(self) -> Any:
        """The factor of the loss, a scalar; a dict by name if there are several updates; None if it is not scaled."""
        scales = {name: tf.convert_to_tensor(scaler.loss_scale) for name, scaler in self.loss_scalers.items()}
        return scales.get("", scales or None)

    def build(self, rows: Any) -> None:
        """Builds models that do not know their input shapes yet, by one call of each `loss_fn` without training.

        Args:
            rows: a batch `[B, ...]`, B >= 1.

        Raises:
            ValueError: if a layer is not built by the calls, or they create a variable outside the model.
        """
        with self.strategy.scope(), guards.recorded(self.created), _explained():
            known = set(self.created)
            for update in self.spec.updates:
                if update.has_loss:
                    update.loss_fn(rows, False)
            unbuilt = [layer.name for layer in top_layers(self.spec.model, in_modules=True) if not layer.built]
            if unbuilt:
                raise ValueError(
                    f"Layers {unbuilt[:3]} of the model are not built and nothing calls them, so their variables "
                    "are unknown: call them, or build them in model_fn."
                )
            in_model = set(map(id, self.model_variables()))
            if outside := [variable.name for i, variable in self.created.items() if i not in known | in_model]:
                raise ValueError(guards.explain_new_variable(outside[0]))
            self._finish()

    def _finish(self) -> None:
        """Assigns variables to updates, builds the optimizers and the average; no more variables after it; in scope."""
        named = named_variables(self.spec.model)
        _require_created(self.created, named.items(), "model")
        layers = list(top_layers(self.spec.model, in_modules=True))
        self.paths = {id(variable): path for path, variable in named.items()}
        self.variables_of_update = {update.name: update.select_variables(named) for update in self.spec.updates}
        of_updates = [(self.plain_optimizers[n], of) for n, of in self.variables_of_update.items()]
        self.slot_placement.prepare(of_updates)
        if any(keras_hooks.is_schedule_free(optimizer) for optimizer, _ in of_updates):
            module = import_part("schedule_free.schedule_free_weights", "keras.optimizers.ScheduleFreeAdamW")
            self._averages = module.ScheduleFreeWeights(of_updates, self.slot_placement.slots, self._average_decay)
        stores = {id(self.optimizers[u.name]): _build_optimizer(self, u) for u in self.optimizer_updates}
        self.slot_stores = {name: stores[id(optimizer)] for name, optimizer in self.optimizers.items()}
        keep_losses_apart(layers)
        self.layers_of_update = {
            name: [layer for layer in layers if {id(v) for v in layer.variables} & {id(v) for v in variables}]
            for name, variables in self.variables_of_update.items()
        }
        trained = {id(v): v for variables in self.variables_of_update.values() for v in variables}
        self.trained_variables, self.untrained_variables = list(trained.values()), mark_frozen(named.values(), trained)
        self.seeds = [variable for variable in self.untrained_variables if is_seed(variable)]
        if self._average_decay:
            pairs = [(optimizer, v) for optimizer, of in of_updates for v in of]
            self.average = self.slot_placement.make_average(self.trained_variables, self._average_decay, pairs)
            self.average.follow(optimizer for optimizer, _ in of_updates)
            self._averages = self.average
        _refuse_synchronized(layers, self.replicas)
        replicas, per_device = self.replicas.count, self.replicas.per_device
        self.recurrent_states = _find_recurrent_states(layers, replicas)
        self.random_streams = RandomStreams(self.strategy, self.seeds, self.recurrent_states, per_device=per_device)
        self.frozen = Frozen(frozen_layers(layers, self.spec.updates, trained, self.paths))
        scopes: list[Guard] = [guards.refuse_new_variables, self.frozen]
        if sizes := guards.fixed_sizes(self.spec.model):
            scopes.append(functools.partial(guards.explain_fixed_sizes, sizes, replicas))
        watch = self.outside_variables.watch
        spec = self.spec.with_functions(lambda fn: guarded(fn, *scopes, watch))
        self.spec = guards.with_guarded_steps(spec, watch)
        self.is_built = True

    def prepared(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of a batch that was given beside the spec's, with the same checks."""
        return guarded(fn, explain_mistakes, guards.refuse_new_variables, self.outside_variables.watch)

    @property
    def optimizer_updates(self) -> list[Update]:
        """The first update of each optimizer, after which checkpoints name it; updates may share one."""
        first: dict[int, Update] = {}
        for update in self.spec.updates:
            first.setdefault(id(self.optimizers[update.name]), update)
        return list(first.values())

    @property
    def slots(self) -> list[Any]:
        """The variables of all optimizers, each once, as they are stored; what else they count is among them."""
        return [v for update in self.optimizer_updates for v in self.plain_optimizers[update.name].variables]

    def all_variables(self) -> dict[str, Any]:
        """Returns every variable that training changes, except those of Keras metrics, by the names of checkpoints.

        Returns:
            `model/<path>`, `optimizer/<slot>/<path>` (`optimizer/<update>/...` if there are several updates),
            `average/<path>`, `step`, `skipped_steps` and `loss_statistics`.
        """
        by_name = portable_names(self.spec.model)
        names = {id(variable): name for name, variable in by_name.items()}
        variables = {f"model/{name}": variable for name, variable in by_name.items()}
        for update in self.optimizer_updates:
            prefix = optimizer_prefix(update.name)
            trained = self.variables_of_update[update.name]
            plain = self.plain_optimizers[update.name]
            slots = self.slot_placement.slots(plain, trained, [names[id(v)] for v in trained])
            variables |= {f"{prefix}/{name}": slot for name, slot in slots.items()}
            if (scaler := self.loss_scalers.get(update.name)) is not None:
                variables |= {f"{prefix}/loss_scale": scaler.loss_scale, f"{prefix}/streak": scaler.streak}
        if self.average is not None:
            variables |= {f"average/{names[id(v)]}": a for v, a in self.average.pairs}
        counts = {"step": self.step, "skipped_steps": self.skipped_steps}
        return variables | counts | {"loss_statistics": self.loss_watch.statistics}

    def replica_variables(self, variable: Any) -> tuple[Any, ...]:
        """Returns the TensorFlow variable of each replica of this worker; of one stored in shards, the shards."""
        plain = tensorflow_variable(variable)
        shards = plain.shards if isinstance(plain, ComposedVariable) else [plain]
        return tuple(replica for shard in shards for replica in self.strategy.experimental_local_results(shard))

    def changed_by(self, update: Update) -> list[Any]:
        """Returns the variables that applying an update changes: weights, slots and averages; their shards, if any."""
        averages = self.average.stored if self.average is not None else ()
        return [*self.variables_of_update[update.name], *self.slot_stores[update.name].stored, *averages]

    def describe(self) -> list[str]:
        """Returns lines for the console: where stages, slots and averages are, if not on every replica."""
        return [*self.placement.describe(), *self.slot_placement.describe(self), *getattr(self._averages, "lines", ())]

    @property
    def for_evaluation(self) -> Any:
        """What `averaged` applies: the average, `ScheduleFreeWeights`, or None: there is none before the first step."""
        return self._averages if int(self.step) else None

    def start_slots(self) -> None:
        """Sets the averages, and the slots that begin as the weights, to the weights of now."""
        if self._averages is not None:
            self._averages.start()

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Returns a scope in which the model has its weights for evaluation: averaged ones, if there are any."""
        return self.for_evaluation.applied() if self.for_evaluation is not None else contextlib.nullcontext()

    def model_variables(self) -> list[Any]:
        """Returns the TensorFlow variables of the model."""
        return [tensorflow_variable(v) for v in named_variables(self.spec.model).values()]

    def num_parameters(self) -> int:
        """Returns the number of trained parameters."""
        return sum(int(tf.TensorShape(v.shape).num_elements()) for v in self.trained_variables)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raises an error of TensorFlow as a sentence."""
    try:
        yield
    except tf.errors.OpError as error:
        raise_as_user_error(error)


def _call(model_fn: Callable[[], ModelSpec], strategy: tf.distribute.Strategy, created: dict[int, Any]) -> ModelSpec:
    """Returns what `model_fn` makes in the strategy's scope; stores the variables in `created`."""
    with strategy.scope(), guards.recorded(created), _explained():  # initial values go to the other workers
        try:
            spec = model_fn()
        except RuntimeError as error:
            if "tf.distribute.Strategy" not in str(error):  # "Mixing different tf.distribute.Strategy objects"
                raise
            raise devices.another_scope("model_fn entered") from error
    if not isinstance(spec, ModelSpec):
        raise ValueError(
            f"model_fn returned a {type(spec).__name__}; distloop needs a ModelSpec: "
            "return distloop.ModelSpec(model, optimizer, loss_fn)."
        )
    return spec


def _build_optimizer(state: TrainState, update: Update) -> SlotStore:
    """Builds an update's optimizer over its variables, overrides methods of Keras, and returns the slots."""
    optimizer, plain = state.optimizers[update.name], state.plain_optimizers[update.name]
    _require_created(state.created, [(v.name, v) for v in optimizer.variables], "optimizer")
    variables = state.variables_of_update[update.name]
    paths = [state.paths[id(v)] for v in variables]
    factors, are_decayed = update.learning_rate_factors(paths), update.are_decayed(paths)
    if not all(are_decayed):  # Keras forgets what model_fn has excluded when it is told what to exclude
        pairs = zip(variables, are_decayed, strict=True)
        decayed = {id(v) for v, is_decayed in pairs if is_decayed and plain._use_weight_decay(tensorflow_variable(v))}
        plain.exclude_from_weight_decay([v for v in variables if id(v) not in decayed])
    store = state.slot_placement.build(optimizer, plain, variables, factors)
    rates = [v for v in plain.variables if v.name == "learning_rate" and v.shape == ()]
    state.initial_learning_rates |= {id(rate): float(rate.numpy()) for rate in rates}
    return store


def _require_created(created: Mapping[int, Any], variables: Iterable[tuple[str, Any]], owner: str) -> None:
    """Refuses variables by path that are not among those that were created in `model_fn`."""
    for path, variable in variables:
        if id(tensorflow_variable(variable)) not in created:
            raise ValueError(
                f"The {owner}'s variable {path!r} was made outside model_fn, so replicas would not share it: make "
                f"the {owner} inside model_fn, or give a compiled Keras model to distloop.from_keras(model)."
            )


def optimizer_prefix(update_name: str) -> str:
    """Returns the prefix of an optimizer's names in a checkpoint."""
    return f"optimizer/{update_name}" if update_name else "optimizer"


def _layers_with_variables(model: Any) -> Iterator[keras.Layer]:
    """Yields the layers of a model that may create variables: those at its top, and all below that have a `build`."""
    for top in top_layers(model, in_modules=True):
        yield top
        yield from (layer for layer in top._flatten_layers(False) if type(layer).build is not keras.Layer.build)


def _refuse_synchronized(layers: Iterable[keras.Layer], replicas: Replicas) -> None:
    """Refuses layers that sum over replicas in their forward pass, which on one device would be silently wrong."""
    for each in (each for layer in layers for each in layer._flatten_layers()):
        if replicas.same_bits and getattr(each, "synchronized", False):
            raise ValueError(
                f"{replicas.setting} was given with the layer {each.name!r}, which is synchronized=True, but virtual "
                "replicas run one after another and cannot talk to each other: use plain BatchNormalization."
            )


def _find_recurrent_states(layers: Iterable[keras.Layer], replicas: int) -> list[Any]:
    """Returns the states of stateful recurrent layers, each once; they belong to the rows of one replica."""
    states = [pair for layer in layers for pair in recurrent_states(layer)]
    if states and replicas > 1:
        raise ValueError(
            f"The layer {states[0][0].name!r} is stateful, so its states belong to the rows of one replica, and there "
            f"are {replicas}: give num_devices=1, one worker and no virtual replicas, or stateful=False."
        )
    return list({id(state): state for _, state in states}.values())
