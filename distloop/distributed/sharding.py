"""Sharded updates: each part of the trained variables has its slots on one device, which updates it for all.

    sharding = Sharding(strategy)
    sharding.build(optimizer, variables)          # slots on one device each
    sharding.apply(optimizer, parts, gradients)   # a gradient for each part, where it is; outside of replicas
    sharding.slots(optimizer, variables, names)   # {"momentum/dense/kernel": variable, ...}, as if nothing was cut

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) and Xu et al. 2020 (arXiv:2004.13336). The optimizer works on the
weights of the replica on its device, or on a copy of the part, if the variable is cut. It does not know how a step
goes.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.distributed import strategies, tensorflow_internals, workers
from distloop.optimizers import gradients, keras_hooks, row_updates
from distloop.optimizers.parts import JoinedVariable, Part, Slice, has_rows, plan, unit
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


class Sharding:
    """The parts of the trained variables, each with the device that updates it.

    Attributes:
        devices: of the replicas of this worker, in order.
        sums_apart: whether gradients are summed where they are used; those of several workers are on every replica.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        """Starts without a variable; each worker of `strategy` has several replicas."""
        self.sums_apart = workers.num_workers(strategy) == 1
        self.devices = list(strategy.extended.worker_devices)
        self._strategy = strategy
        self._parts: dict[int, list[Part]] = {}  # by the variable's `id`
        self._joined: dict[tuple[int, ...], Any] = {}  # by the `id` of the parts: the same object each time
        self._has_gpus = strategies.has_gpus(strategy)

    def parts(self, variables: Sequence[Any]) -> list[Part]:
        """Returns the parts of variables, in order."""
        return [part for variable in variables for part in self._parts[id(variable)]]

    @property
    def copies(self) -> list[tf.Variable]:
        """The variables that have the weights of a part once more."""
        return [part.view for parts in self._parts.values() for part in parts if part.view is not part.replica]

    def add(self, variables: Sequence[Any], *, are_whole: bool) -> None:
        """Shares out variables to the devices, but for those that are shared out already.

        Args:
            variables: of the model, made in the strategy's scope.
            are_whole: whether none may be cut.
        """
        new = [v for v in variables if id(v) not in self._parts]
        taken = [0] * len(self.devices)
        for part in self.parts([v for v in variables if id(v) in self._parts]):
            taken[self.devices.index(part.device)] += part.size
        sizes = [int(tf.TensorShape(v.shape).num_elements()) for v in new]
        units = [
            size if are_whole or getattr(v, "constraint", None) is not None else unit(tuple(v.shape))
            for size, v in zip(sizes, new, strict=True)
        ]
        for variable, slices in zip(new, plan(sizes, units, len(self.devices), taken), strict=True):
            self._parts[id(variable)] = [self._make(variable, i, slices) for i in range(len(slices))]

    def _make(self, variable: Any, number: int, slices: Sequence[Slice]) -> Part:
        """Makes a part of a variable and its view."""
        start, size, device = slices[number]
        is_all = len(slices) == 1
        replica, place = self._replicas(variable)[device], self.devices[device]
        name = variable.name if isinstance(variable, keras.Variable) else variable.name.split(":")[0].replace("/", "_")
        path = getattr(variable, "path", name)
        with tensorflow_internals.outside_strategies(), tf.device(place):
            if is_all:
                view = replica
            else:
                shape = [-1, *variable.shape[1:]] if has_rows(tuple(variable.shape)) else [-1]
                view = tf.Variable(tf.reshape(tf.reshape(replica, [-1])[start : start + size], shape))
            trained = keras_hooks.keras_variable(view, name, path if is_all else f"{path}/{number}")
        trained.constraint = getattr(variable, "constraint", None)
        return Part(variable, replica, start, size, place, view, trained)

    def build(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
        """Makes an optimizer's slots, each on the device of its part; in the strategy's scope.

        Args:
            optimizer: a plain Keras optimizer, not built yet.
            variables: those that it trains.

        Raises:
            ValueError: if it is built, with slots on every replica, or lazy.
        """
        if getattr(optimizer, "is_lazy", False):
            raise ValueError(
                f"shard_optimizer=True was given with {type(optimizer).__name__}, which updates the rows of a batch, "
                "but sharded updates have whole gradients: leave shard_optimizer out, or give "
                f"keras.optimizers.{type(optimizer).__name__[4:]}."
            )
        if optimizer.built:
            raise ValueError(
                f"shard_optimizer=True was given with the optimizer {optimizer.name!r}, which has its slots already, "
                "on every replica: let distloop build it, or leave shard_optimizer out."
            )
        self.add(variables, are_whole=type(optimizer) not in _BY_ELEMENT)
        parts = self.parts(variables)
        keras_hooks.update_in_place_of(optimizer, [(part.trained, part.variable) for part in parts])
        with tensorflow_internals.outside_strategies():
            optimizer._distribution_strategy = tf.distribute.get_strategy()
            optimizer.build([part.trained for part in parts])

    def whole_sizes(self, variables: Sequence[Any]) -> list[tuple[tf.Variable, int]]:
        """Returns the view of each part of variables, with the elements of the whole variable."""
        return [(part.view, int(part.replica.shape.num_elements())) for part in self.parts(variables)]

    def slots(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any], names: Sequence[str]
    ) -> dict[str, Any]:
        """Returns an optimizer's variables as `slot_names` does; those in parts as one each."""
        owners = [(part, name) for v, name in zip(variables, names, strict=True) for part in self._parts[id(v)]]
        views, numbers = [part.trained for part, _ in owners], [str(i) for i in range(len(owners))]
        named: dict[str, Any] = {}
        of_whole: dict[str, tuple[Any, list[Any]]] = {}  # by name: the variable, its slots in order
        for name, slot in slot_names(optimizer, views, numbers).items():
            kind, _, number = name.rpartition("/")
            if not kind:
                named[name] = slot
                continue
            part, owner = owners[int(number)]
            of_whole.setdefault(f"{kind}/{owner}", (part.variable, []))[1].append(slot)
        return named | {name: self.join(name, variable, slots) for name, (variable, slots) in of_whole.items()}

    def join(self, name: str, variable: Any, stored: Sequence[Any]) -> Any:
        """Returns what is stored for the parts of a variable as one variable of its shape."""
        if len(stored) == 1:
            return stored[0]
        key = tuple(id(part) for part in stored)
        return self._joined.setdefault(key, JoinedVariable(name, stored, tuple(variable.shape)))

    def apply(self, optimizer: Any, variables: Sequence[Any], of_parts: Sequence[tf.Tensor]) -> None:
        """Updates each part on its device, and sends the weights round; outside of replicas.

        Args:
            optimizer: with which `build` was called.
            variables: those that have a gradient.
            of_parts: the gradient of each of their parts, on its device.
        """
        parts = self.parts(variables)
        for part in parts:
            self._set_view(part)
        shaped = []
        for gradient, part in zip(of_parts, parts, strict=True):
            with tf.device(part.device):
                shaped.append(tf.reshape(gradient, part.view.shape))
        with tensorflow_internals.outside_strategies():
            gradients.apply(optimizer, shaped, [part.trained for part in parts])
        for variable in variables:
            self.send(variable, [part.view for part in self._parts[id(variable)]])

    def send(self, variable: Any, stored: Sequence[tf.Variable]) -> None:
        """Assigns values that are stored in parts, one each, to a variable of the model on all replicas."""
        parts = self._parts[id(variable)]
        values = []
        for part, value in zip(parts, stored, strict=True):
            with tf.device(part.device):
                values.append(tf.identity(value))
        others = [replica for replica in self._replicas(variable) if replica is not stored[0]]
        if not self._has_gpus and has_rows(tuple(variable.shape)):
            for replica in others:
                for part, value in zip(parts, values, strict=True):
                    with tf.device(replica.device):
                        row_updates.write(replica, part.rows, value)
            return
        whole = None
        for replica in others:
            with tf.device(replica.device):
                if whole is None or self._has_gpus:  # CPUs share the memory of one, GPUs get each part once
                    whole = values[0] if len(values) == 1 else tf.concat(values, 0)
                replica.assign(tf.reshape(whole, replica.shape))

    def _set_view(self, part: Part) -> None:
        """Sets the view of a part to the weights."""
        if part.view is part.replica:
            return
        if not self._has_gpus and has_rows(tuple(part.variable.shape)):
            row_updates.write(part.view, tf.range(part.view.shape[0]), part.value())
        else:
            part.view.assign(part.value())

    def cut(self, variable: Any, of_replicas: Any) -> list[tf.Tensor]:
        """Returns a value of the variable's shape for each of its parts, from the replica that is on its device.

        Args:
            variable: of the model.
            of_replicas: a value per replica.
        """
        values = self._strategy.experimental_local_results(of_replicas)
        return [part.take(values[self.devices.index(part.device)]) for part in self._parts[id(variable)]]

    def _replicas(self, variable: Any) -> tuple[tf.Variable, ...]:
        replicas: tuple[tf.Variable, ...] = self._strategy.experimental_local_results(tensorflow_variable(variable))
        return replicas
