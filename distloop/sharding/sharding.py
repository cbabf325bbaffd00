"""Sharding: builds an optimizer's slots in shards, one on each device, and updates the variables by shards.

    sharding = Sharding(strategy)
    sharding.build(optimizer, variables)          # slots on one device each
    sharding.apply(optimizer, shards, gradients)   # a gradient for each shard, where it is; outside of replicas
    sharding.slots(optimizer, variables, names)   # {"momentum/dense/kernel": variable, ...}, as if nothing was cut

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) and Xu et al. 2020 (arXiv:2004.13336). The optimizer works on the
weights of the replica on its device, or on a copy of the shard, if the variable is cut. With several workers, each has
variables without elements for the shards of the others, so that all have the same names in the same order.

    exchange = Exchange(strategy)                           # in a `tf.function`, on every worker
    sums = exchange.collect([a, b], owners=[0, 1])          # on worker 0 the sum of a, on worker 1 the sum of b
    values = exchange.broadcast([c, spec], senders=[0, 1])  # c of worker 0 and d of worker 1, on both
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.distributed import collectives, strategies, tensorflow_internals
from distloop.distributed.devices import HOST
from distloop.optimizers import gradients, keras_hooks
from distloop.optimizers.gradients import write_rows
from distloop.optimizers.slot_placement import SlotPlacement
from distloop.sharding.variable_shards import JoinedVariable, Slice, VariableShard, has_rows, plan, unit
from distloop.variables import slot_names, tensorflow_variable

# Each element of their updates depends on the same element of the gradient, the weight and the slots, and on no other.
_BY_ELEMENT = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)


class Exchange:
    """Sends tensors between the workers of a run."""

    def __init__(self, strategy: tf.distribute.Strategy):
        """Prepares; all workers make one."""
        self._strategy = strategy
        self._worker, self._num_workers = collectives.worker_index(strategy), collectives.num_workers(strategy)
        self._has_gpus = strategies.has_gpus(strategy)
        tensorflow_internals.make_pairs(strategy)
        with tensorflow_internals.outside_strategies(), tf.device(HOST):
            self._count = tf.Variable(0, dtype=tf.int64, trainable=False)

    def collect(self, tensors: Sequence[tf.Tensor], owners: Sequence[int]) -> list[tf.Tensor]:
        """Returns sums of tensors over the workers, each on one worker alone.

        Each worker sends its tensor as soon as it is computed: the last layers', while the backward pass goes on.

        Args:
            tensors: of this worker, flat.
            owners: the worker that gets each sum.

        Returns:
            The sums that this worker gets, each on the device of its tensor, and empty tensors for the others.
        """
        sums, sent = [], list[tf.Tensor]()

        def pass_on(sender: int, receiver: int, value: Any) -> tf.Tensor:
            # NCCL waits for ever if two workers begin with different ones; in one order, none does.
            with tf.control_dependencies(sent[-1:] if self._has_gpus else []):
                sent.append(tensorflow_internals.send(self._strategy, sender, receiver, value))
            return sent[-1]

        for tensor, owner in reversed(list(zip(tensors, owners, strict=True))):
            if owner != self._worker:
                pass_on(self._worker, owner, tensor)
                sums.append(tf.zeros([0], tensor.dtype))
                continue
            spec = tf.TensorSpec(tensor.shape, tensor.dtype)
            of_workers = [tensor if w == owner else pass_on(w, owner, spec) for w in range(self._num_workers)]
            with tf.device(tensor.device):
                sums.append(tf.add_n(of_workers))
        self._keep(sent)
        return sums[::-1]

    def broadcast(self, values: Sequence[tf.Tensor | tf.TensorSpec], senders: Sequence[int]) -> list[tf.Tensor]:
        """Returns tensors of several workers on every worker; the small ones of a worker travel together.

        Args:
            values: of static shapes; what another worker sends is given as its spec.
            senders: the worker that sends each.
        """
        groups: dict[Any, list[int]] = {}  # which values travel together
        for i, (value, sender) in enumerate(zip(values, senders, strict=True)):
            is_large = value.shape.num_elements() * value.dtype.size > gradients.LARGEST_PACKED_BYTES
            groups.setdefault((sender, value.dtype, i if is_large else None), []).append(i)
        received: dict[int, tf.Tensor] = {}
        before: list[tf.Tensor] = []  # one after the other: all workers in one order, and little memory
        for (sender, dtype, _), numbers in groups.items():
            of_group = [values[i] for i in numbers]
            sizes = [value.shape.num_elements() for value in of_group]
            is_here = isinstance(of_group[0], tf.Tensor)
            flat = tf.TensorSpec([sum(sizes)], dtype)
            if is_here:
                flat = tf.concat([tf.reshape(value, [-1]) for value in of_group], 0)
            with tf.control_dependencies(before):
                flat = tensorflow_internals.broadcast(self._strategy, sender, flat)
            before = [flat]
            pieces = tf.split(flat, sizes) if len(sizes) > 1 else [flat]
            received |= {i: tf.reshape(piece, values[i].shape) for i, piece in zip(numbers, pieces, strict=True)}
        self._keep(before)
        return [received[i] for i in range(len(values))]

    def _keep(self, sent: Sequence[tf.Tensor]) -> None:
        """Keeps TensorFlow from leaving out a send that nothing waits for, whose receiver would hang.

        An assignment is never left out.
        """
        with tf.control_dependencies(sent):
            self._count.assign_add(1)


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
        with tensorflow_internals.outside_strategies(), tf.device(on):
            if not is_here:
                view = tf.Variable(tf.zeros([0, *shape[1:]], replica.dtype))
            elif is_all:
                view = replica
            else:
                view = tf.Variable(tf.reshape(tf.reshape(replica, [-1])[start : start + size], shape))
            trained = keras_hooks.keras_variable(view, name, path if is_all else f"{path}/{number}")
        trained.constraint = getattr(variable, "constraint", None)
        return VariableShard(variable, replica, start, size, shape, on, worker, view, trained)

    def prepare(self, pairs: Iterable[tuple[keras.optimizers.Optimizer, Sequence[Any]]]) -> None:
        """Splits the variables of optimizers that need uncut ones, before `build` cuts others."""
        for optimizer, variables in pairs:
            if type(optimizer) not in _BY_ELEMENT:
                self.add(variables, are_uncut=True)

    def build(self, optimizer: Any, plain: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
        """Makes an optimizer's slots, each on the device of its shard; in the strategy's scope.

        Raises:
            ValueError: if it is built, with slots on every replica, or lazy.
        """
        optimizer = plain
        if getattr(optimizer, "is_lazy", False):
            raise ValueError(
                f"shard_optimizer=True was given with {type(optimizer).__name__}, which updates the rows of a batch, "
                "but sharded updates have dense gradients: leave shard_optimizer out, or give "
                f"keras.optimizers.{type(optimizer).__name__[4:]}."
            )
        if optimizer.built:
            raise ValueError(
                f"shard_optimizer=True was given with the optimizer {optimizer.name!r}, which has its slots already, "
                "on every replica: let distloop build it, or leave shard_optimizer out."
            )
        self.add(variables, are_uncut=False)
        shards = self.shards(variables)
        keras_hooks.update_instead_of(optimizer, [(shard.trained, shard.variable) for shard in shards])
        with tensorflow_internals.outside_strategies():
            optimizer._distribution_strategy = tf.distribute.get_strategy()
            optimizer.build([shard.trained for shard in shards])
        slots = optimizer.variables
        of_workers = collectives.Workers(self._strategy).gather([list(slot.shape) for slot in slots])
        for slot, shapes in zip(slots, zip(*of_workers, strict=True), strict=True):
            self._slot_shapes[id(slot)] = [tuple(shape) for shape in shapes]

    def views(self, variable: Any) -> list[tf.Variable]:
        """Returns the view of each shard of a variable, which an optimizer updates in its stead."""
        return [shard.view for shard in self._shards[id(variable)]]

    def weights(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the weights of each shard of variables, without elements if the shard is on another worker."""
        return [shard.value() if shard.is_here else shard.view.read_value() for shard in self.shards(variables)]

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

    def apply(self, optimizer: Any, variables: Sequence[Any], of_shards: Sequence[tf.Tensor]) -> None:
        """Updates each shard on its device, and sends the weights round; outside of replicas.

        Args:
            optimizer: with which `build` was called.
            variables: those that have a gradient.
            of_shards: the gradient of each of their shards, on its device.
        """
        pairs = [(shard, gradient) for shard, gradient in zip(self.shards(variables), of_shards, strict=True)]
        shaped = []
        pairs = [pair for pair in pairs if pair[0].is_here] or pairs[:1]  # without any, Keras would not count the step
        for shard, gradient in pairs:
            self._set_view(shard)
            with tf.device(shard.device):
                shaped.append(tf.reshape(gradient, shard.view.shape))
        with tensorflow_internals.outside_strategies():
            gradients.apply(optimizer, shaped, [shard.trained for shard, _ in pairs])
        self.send([(variable, self.views(variable)) for variable in variables])

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
            write_rows(shard.view, tf.range(shard.view.shape[0]), shard.value())
        else:
            shard.view.assign(shard.value())

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
