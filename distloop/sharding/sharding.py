"""Sharding: builds an optimizer's slots in shards, one on each device, and updates the variables by shards.

    sharding = Sharding(strategy)
    sharding.build(optimizer, variables)          # slots on one device each
    sharding.apply(optimizer, shards, gradients)   # a gradient for each shard, where it is; outside of replicas
    sharding.slots(optimizer, variables, names)   # {"momentum/dense/kernel": variable, ...}, as if nothing was cut

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) and Xu et al. 2020 (arXiv:2004.13336). The optimizer works on the
weights of the replica on its device, or on a copy of the shard, if the variable is cut. With several workers, each has
variables without elements for the shards of the others, so that all have the same names in the same order.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.distributed import collectives, strategies
from distloop.optimizers.gradients import write_rows
from distloop.optimizers.slot_placement import SlotPlacement
from distloop.optimizers.slot_store import BY_ELEMENT, SlotStore, View
from distloop.sharding.exchange import Exchange, outside_strategies
from distloop.sharding.variable_shards import JoinedVariable, Slice, VariableShard, has_rows, plan, unit
from distloop.variables import slot_names, tensorflow_variable


class Sharding(SlotPlacement):
    """The shards of the trained variables, each with the device that updates it.

    Attributes:
        devices: of the replicas of this worker, in order.
        num_workers: that share.
        exchange: between them.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        """Starts without a variable; `strategy` has several replicas."""
        self.devices = list(strategy.extended.worker_devices)
        self._worker, self.num_workers = collectives.worker_index(strategy), collectives.num_workers(strategy)
        self.exchange = Exchange(strategy)
        self.num_shards = strategy.num_replicas_in_sync
        self._strategy = strategy
        self._shards: dict[int, list[VariableShard]] = {}  # by the variable's `id`
        self._joined: dict[tuple[int, ...], Any] = {}  # by the `id` of the shards: the same object each time
        self._slot_shapes: dict[int, list[tuple[int, ...]]] = {}  # by the slot's `id`: its shape on each worker
        self._has_gpus = strategies.has_gpus(strategy)

    def shards(self, variables: Sequence[Any]) -> list[VariableShard]:
        """Returns the shards of variables, in order, those on other workers included."""
        return [shard for variable in variables for shard in self._shards[id(variable)]]

    def copies(self) -> list[tf.Variable]:
        """Returns the variables that have the weights of a shard once more."""
        return [shard.view for shards in self._shards.values() for shard in shards if shard.view is not shard.replica]

    def add(self, variables: Sequence[Any], *, are_uncut: bool) -> None:
        """Splits variables over the devices of all workers, but for those that are split already.

        Args:
            variables: of the model, made in the strategy's scope.
            are_uncut: whether none may be cut.
        """
        new = [v for v in variables if id(v) not in self._shards]
        taken = [0] * self._strategy.num_replicas_in_sync
        for shard in self.shards([v for v in variables if id(v) in self._shards]):
            taken[shard.worker * len(self.devices) + self.devices.index(shard.device)] += shard.size
        sizes = [int(tf.TensorShape(v.shape).num_elements()) for v in new]
        units = [
            size if are_uncut or getattr(v, "constraint", None) is not None else unit(tuple(v.shape))
            for size, v in zip(sizes, new, strict=True)
        ]
        for variable, slices in zip(new, plan(sizes, units, len(taken), taken), strict=True):
            self._shards[id(variable)] = [self._make(variable, i, slices) for i in range(len(slices))]

    def _make(self, variable: Any, number: int, slices: Sequence[Slice]) -> VariableShard:
        """Makes a shard of a variable and its view."""
        start, size, device = slices[number]
        worker, device = divmod(device, len(self.devices))
        is_all, is_here = len(slices) == 1, worker == self._worker
        replica, on = self._replicas(variable)[device], self.devices[device]
        shape = tuple(variable.shape)
        if not is_all:
            shape = (size // math.prod(shape[1:]), *shape[1:]) if has_rows(shape) else (size,)
        name = variable.name if isinstance(variable, keras.Variable) else variable.name.split(":")[0].replace("/", "_")
        path = getattr(variable, "path", name)
        with outside_strategies(), tf.device(on):
            if not is_here:
                view = tf.Variable(tf.zeros([0, *shape[1:]], replica.dtype))
            elif is_all:
                view = replica
            else:
                view = tf.Variable(tf.reshape(tf.reshape(replica, [-1])[start : start + size], shape))
            trained = _keras_variable(view, name, path if is_all else f"{path}/{number}")
        trained.constraint = getattr(variable, "constraint", None)
        return VariableShard(variable, replica, start, size, shape, on, worker, view, trained)

    def prepare(self, pairs: Iterable[tuple[keras.optimizers.Optimizer, Sequence[Any]]]) -> None:
        """Splits the variables of optimizers that need uncut ones, before `build` cuts others."""
        for optimizer, variables in pairs:
            if type(optimizer) not in BY_ELEMENT:
                self.add(variables, are_uncut=True)

    def build(
        self, optimizer: Any, plain: keras.optimizers.Optimizer, variables: Sequence[Any], factors: Sequence[float]
    ) -> SlotStore:
        """Makes an optimizer's slots, each on the device of its shard; in the strategy's scope.

        Raises:
            ValueError: if it is built, with slots on every replica, or lazy.
        """
        if getattr(plain, "is_lazy", False):
            raise ValueError(
                f"shard_optimizer=True was given with {type(plain).__name__}, which updates the rows of a batch, "
                "but sharded updates have dense gradients: leave shard_optimizer out, or give "
                f"keras.optimizers.{type(plain).__name__[4:]}."
            )
        if plain.built:
            raise ValueError(
                f"shard_optimizer=True was given with the optimizer {plain.name!r}, which has its slots already, "
                "on every replica: let distloop build it, or leave shard_optimizer out."
            )
        self.add(variables, are_uncut=False)
        factored = zip(variables, factors, strict=True)
        views = [View(shard.trained, v, factor) for v, factor in factored for shard in self._shards[id(v)]]
        _decay_by_variable(plain, views)
        with outside_strategies():
            plain._distribution_strategy = tf.distribute.get_strategy()
            plain.build([view.variable for view in views])
            store = SlotStore(plain, views)
        of_workers = collectives.Workers(self._strategy).gather([list(slot.shape) for slot in plain.variables])
        for slot, shapes in zip(plain.variables, zip(*of_workers, strict=True), strict=True):
            self._slot_shapes[id(slot)] = [tuple(shape) for shape in shapes]
        return store

    def slots(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any], names: Sequence[str]
    ) -> dict[str, Any]:
        """Returns an optimizer's variables as `slot_names` does; those in shards as one each."""
        owners = [(shard, name) for v, name in zip(variables, names, strict=True) for shard in self._shards[id(v)]]
        views, numbers = [shard.trained for shard, _ in owners], [str(i) for i in range(len(owners))]
        named: dict[str, Any] = {}
        of_joined: dict[str, tuple[Any, list[Any]]] = {}  # by name: the variable, its slots in order
        for name, slot in slot_names(optimizer, views, numbers).items():
            kind, _, number = name.rpartition("/")
            if not kind:
                named[name] = slot
                continue
            shard, owner = owners[int(number)]
            of_joined.setdefault(f"{kind}/{owner}", (shard.variable, []))[1].append(slot)
        return named | {name: self.join(name, variable, slots) for name, (variable, slots) in of_joined.items()}

    def join(self, name: str, variable: Any, stored: Sequence[Any]) -> Any:
        """Returns what is stored for the shards of a variable as one variable of its shape."""
        if len(stored) == 1 and self.num_workers == 1:
            return stored[0]
        key = tuple(id(shard) for shard in stored)
        if key not in self._joined:
            shards = self._shards[id(variable)]
            shapes = [
                self._slot_shapes[id(one)][shard.worker] if id(one) in self._slot_shapes else shard.shape
                for shard, one in zip(shards, stored, strict=True)
            ]
            variables = [tensorflow_variable(one) for one in stored]
            read = functools.partial(self._of_all, shards, variables, shapes) if self.num_workers > 1 else None
            shape = shapes[0] if len(stored) == 1 else tuple(variable.shape)
            self._joined[key] = JoinedVariable(name, variables, shape, shapes, read)
        return self._joined[key]

    def apply(self, store: SlotStore, variables: Sequence[Any], of_shards: Sequence[tf.Tensor], *packed: Any) -> None:
        """Updates each shard on its device, and sends the weights round; outside of replicas.

        Args:
            store: what `build` has returned.
            variables: those that have a gradient.
            of_shards: the gradient of each of their shards, on its device.
            packed: the layout of the gradients in segments, the segments and their scale, as for `SlotStore.join`.
        """
        pairs = [(shard, gradient) for shard, gradient in zip(self.shards(variables), of_shards, strict=True)]
        shaped = []
        for shard, gradient in [pair for pair in pairs if pair[0].is_here] or pairs[:1]:  # for Keras to count the step
            self._set_view(shard)
            with tf.device(shard.device):
                shaped.append((tf.reshape(gradient, shard.view.shape), shard.trained))
        with outside_strategies():
            store.optimizer.apply(*zip(*store.join(shaped, *packed), strict=True))
        self.send([(variable, [shard.view for shard in self._shards[id(variable)]]) for variable in variables])

    def send(self, pairs: Sequence[tuple[Any, Sequence[tf.Variable]]]) -> None:
        """Assigns values to variables of the model on all replicas; all workers call it, outside of replicas.

        Args:
            pairs: each a variable, and the variables where the value of each of its shards is stored.
        """
        shards, stored = self.shards([variable for variable, _ in pairs]), [one for _, of in pairs for one in of]
        values = self._of_all(shards, stored, [shard.shape for shard in shards])
        for variable, of_variable in pairs:
            self._assign(variable, of_variable, values[: len(of_variable)])
            values = values[len(of_variable) :]

    def _of_all(
        self, shards: Sequence[VariableShard], stored: Sequence[tf.Variable], shapes: Sequence[Sequence[int]]
    ) -> list[tf.Tensor]:
        """Returns what is stored for each of some shards, from its worker on all, whose shapes are there `shapes`."""
        values: list[Any] = []
        for shard, variable, shape in zip(shards, stored, shapes, strict=True):
            with tf.device(shard.device):
                is_here = shard.worker == self._worker
                values.append(tf.identity(variable) if is_here else tf.TensorSpec(shape, variable.dtype))
        if self.num_workers == 1:
            return values
        return self.exchange.broadcast(values, [shard.worker for shard in shards])

    def _assign(self, variable: Any, stored: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
        """Assigns the values of its shards to a variable of the model on all replicas of this worker."""
        shards = self._shards[id(variable)]
        others = [replica for replica in self._replicas(variable) if replica is not stored[0]]
        if not self._has_gpus and has_rows(tuple(variable.shape)):
            for replica in others:
                for shard, value in zip(shards, values, strict=True):
                    with tf.device(replica.device):
                        write_rows(replica, shard.rows, value)
            return
        joined = None
        for replica in others:
            with tf.device(replica.device):
                if joined is None or self._has_gpus:  # CPUs share the memory of one, GPUs get each shard once
                    joined = values[0] if len(values) == 1 else tf.concat(values, 0)
                replica.assign(tf.reshape(joined, replica.shape))

    def _set_view(self, shard: VariableShard) -> None:
        """Sets the view of a shard to the weights."""
        if shard.view is shard.replica:
            return
        if not self._has_gpus and has_rows(tuple(shard.variable.shape)):
            write_rows(shard.view, tf.range(shard.view.shape[0]), tf.convert_to_tensor(shard))
        else:
            shard.view.assign(tf.convert_to_tensor(shard))

    def cut(self, variable: Any, of_replicas: Any) -> list[tf.Tensor]:
        """Returns the elements of each shard of a value of the variable's shape, from the replica on its device.

        Args:
            variable: of the model.
            of_replicas: a value per replica.
        """
        values = self._strategy.experimental_local_results(of_replicas)
        return [shard.take(values[self.devices.index(shard.device)]) for shard in self._shards[id(variable)]]

    def _replicas(self, variable: Any) -> tuple[tf.Variable, ...]:
        replicas: tuple[tf.Variable, ...] = self._strategy.experimental_local_results(tensorflow_variable(variable))
        return replicas


def _keras_variable(stored: tf.Variable, name: str, path: str) -> keras.Variable:
    """Returns a Keras variable around one of TensorFlow, with its memory; Keras names slots after the path."""
    made = keras.Variable(0, dtype=stored.dtype.name, name=name)
    made._value, made._shape, made._ndim, made._path = stored, tuple(stored.shape), len(stored.shape), path
    return made


def _decay_by_variable(optimizer: keras.optimizers.Optimizer, views: Sequence[View]) -> None:
    """Lets the weights of a shard decay if its variable is to, in the eyes of a plain Keras optimizer."""
    use_weight_decay = optimizer._use_weight_decay
    by_key = {optimizer._var_key(view.variable): tensorflow_variable(view.of) for view in views}
    optimizer._use_weight_decay = lambda shard: use_weight_decay(by_key.get(optimizer._var_key(shard), shard))
