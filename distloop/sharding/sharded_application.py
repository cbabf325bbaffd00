"""Sharded application: updates by gradients that are summed only on the device whose slots need them.

    placement = place_slots(strategy)
    packing = placement.make_packing(...)           # segments that each belong to one device
    application = placement.adapt(Application(state))

`sharding.py` knows the shards.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.distributed import collectives, strategies, tensorflow_internals
from distloop.graph_functions import graph_function
from distloop.model import variable_writes
from distloop.model.memory import held_by_device
from distloop.model.spec import Update
from distloop.model.state import TrainState
from distloop.optimizers import gradients
from distloop.optimizers.gradients import Packing, Reduce, Segment
from distloop.optimizers.slot_placement import MovingAverage, SlotPlacement
from distloop.sharding.sharding import Sharding
from distloop.sharding.variable_shards import VariableShard
from distloop.training.application import Application, reached
from distloop.training.forward_backward import ForwardBackward, Summed
from distloop.variables import tensorflow_variable

_WHY_DENSE = "shard_optimizer cuts gradients into shards"


class SplitPacking(Packing):
    """The layout of gradients of which each shard is summed on the device that updates it.

    Attributes:
        owners: the worker that updates each segment.
    """

    def __init__(self, variables: Sequence[Any], shards: Sequence[Sequence[VariableShard]]):
        """Plans the layout: shards of different devices are in different segments.

        Args:
            variables: with static shapes.
            shards: of each variable, in order.
        """
        pairs = [(i, shard) for i, of in enumerate(shards) for shard in of]
        flat = [tf.TensorSpec([shard.size], variables[i].dtype) for i, shard in pairs]
        devices, owners = [shard.device for _, shard in pairs], [shard.worker for _, shard in pairs]
        super().__init__(flat, devices, owners, why_dense=_WHY_DENSE)
        self._packed_on = [""] * len(self.devices)
        self._of_variables = [(tuple(v.shape), list(of)) for v, of in zip(variables, shards, strict=True)]
        self._positions = [i for i, _ in pairs]
        firsts = [pairs[group[0]][1] for group in self._groups]
        self.owners = [shard.worker for shard in firsts]
        self._are_here = [shard.is_here for shard in firsts]

    def pack(self, gradients: Sequence[Any], *, keeps_sparse: bool = True) -> list[Segment]:
        """Packs one gradient a variable into segments."""
        flats: list[tf.Tensor] = []
        for gradient, (shape, shards) in zip(gradients, self._of_variables, strict=True):
            size = int(tf.TensorShape(shape).num_elements())
            flat = tf.reshape(tf.convert_to_tensor(gradient), [size])
            flats += [flat if shard.size == size else tf.slice(flat, [shard.start], [shard.size]) for shard in shards]
        return super().pack(flats)

    def unpack(
        self, segments: Sequence[Segment], scale: tf.Tensor | None = None, *, keeps_sparse: bool = False
    ) -> list[Any]:
        """Returns the gradients in segments, one a variable, multiplied by `scale`; all workers have all of them."""
        flats, unpacked = iter(self.unpack_flat(segments, scale)), []
        for shape, shards in self._of_variables:
            of_shards = [next(flats) for _ in shards]
            unpacked.append(tf.reshape(tf.concat(of_shards, 0) if len(of_shards) > 1 else of_shards[0], shape))
        return unpacked

    def unpack_shards(self, segments: Sequence[Segment], scale: tf.Tensor) -> list[list[tf.Tensor]]:
        """Returns the flat gradient of each shard of each variable; without elements if another worker updates it."""
        flats = iter(self.unpack_flat(segments, scale))
        return [[next(flats) for _ in shards] for _, shards in self._of_variables]

    def _split(self, segment: tf.Tensor, sizes: Sequence[int]) -> Sequence[tf.Tensor]:
        return [segment] * len(sizes) if segment.shape[0] == 0 else super()._split(segment, sizes)

    def diagnosis(self, segments: Sequence[Segment], squares: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the numbers of `Packing.diagnosis`, 0 for small gradients on another worker."""
        triples = zip(segments, self.shapes, self._are_here, strict=True)
        return super().diagnosis([s if is_here else tf.zeros(shape) for s, shape, is_here in triples], squares)

    def find_nonfinite(self, diagnosis: np.ndarray) -> list[int]:
        """Returns the positions of the variables whose gradients are not finite."""
        return sorted({self._positions[i] for i in super().find_nonfinite(diagnosis)})

    def all_reduce(
        self,
        segments: Sequence[Segment],
        sums: Mapping[str, Any],
        reduce: Reduce | None = None,
        shard: tuple[Any, Any] | None = None,
    ) -> tuple[list[Segment], dict[str, Any]]:
        """Sums values by name over all replicas and workers; segments stay those of this replica."""
        return list(segments), super().all_reduce([], sums, reduce)[1]


class ShardedApplication(Application):
    """The application of updates where each shard of the weights has its slots on one device."""

    def __init__(self, state: TrainState, sharding: Sharding):
        """Stores what is trained, and its shards."""
        super().__init__(state)
        self._sharding = sharding

    def apply(self, update: ForwardBackward, segments: Any, scale: Any, replacements: Any) -> None:
        """Changes weights, slots and averages; segments that were summed apart are each on the device of its shard."""
        variables = reached(update)
        if not variables and not update.replaced:
            return  # a step_fn applies nothing
        optimizer = self.state.plain_optimizers[update.name]
        self._sharding.apply(optimizer, variables, self._gradients_of_shards(update, segments, scale))
        if update.replaced:
            assign = functools.partial(variable_writes.assign, update.replaced)
            self._strategy.run(assign, args=(replacements,))
        if self.state.average is not None:
            average = self.state.average
            average.update([*update.variables, *update.replaced], average.count(optimizer))

    def _gradients_of_shards(self, update: ForwardBackward, segments: Any, scale: Any) -> list[tf.Tensor]:
        """Returns the gradient of each shard of the variables that the loss reaches, on the shard's device."""
        if isinstance(update.packing, SplitPacking):
            pairs = zip(update.packing.unpack_shards(segments, scale), update.trace.reached, strict=True)
            return [gradient for of_shards, is_reached in pairs if is_reached for gradient in of_shards]
        if update.update.gradient_fn is not None:
            on_replicas = self._strategy.run(functools.partial(self.gradients, update), args=(segments, scale))
            pairs = zip(reached(update), on_replicas, strict=True)
            return [gradient for variable, of in pairs for gradient in self._sharding.cut(variable, of)]
        on_replicas = self._strategy.run(update.packing.unpack, args=(segments,))
        (scale, *_) = self._strategy.experimental_local_results(scale)
        scaled = []
        for variable, of, is_reached in zip(update.variables, on_replicas, update.trace.reached, strict=True):
            for shard in self._sharding.cut(variable, of) if is_reached else ():
                with tf.device(shard.device):
                    scaled += gradients.scaled([shard], scale)  # of the shard alone
        return scaled

    def read_all(self, variables: Sequence[Any]) -> Any:
        """Returns the values of variables: per replica, and those that are on one device."""
        mirrored, single = self._apart(variables)
        values = []
        for variable in single:
            with tf.device(variable.device):
                values.append(tf.identity(variable))
        return super().read_all(mirrored), values

    def assign_all(self, variables: Sequence[Any], values: Any, unless: Any = None) -> None:
        """Assigns what `read_all` returned, unless a condition of each replica holds."""
        mirrored, single = self._apart(variables)
        super().assign_all(mirrored, values[0], unless)
        for variable, value in zip(single, values[1], strict=True):
            with tf.device(variable.device):
                condition = None if unless is None else self._strategy.experimental_local_results(unless)[0]
                variable_writes.assign([variable], [value], condition)

    def _apart(self, variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the variables that each replica has, and the others."""
        plain = [tensorflow_variable(v) for v in variables]
        are_mirrored = [isinstance(v, tf.distribute.DistributedValues) for v in plain]
        mirrored = [v for v, is_mirrored in zip(variables, are_mirrored, strict=True) if is_mirrored]
        return mirrored, [v for v, is_mirrored in zip(plain, are_mirrored, strict=True) if not is_mirrored]

    def reduce(self, update: ForwardBackward, sums: Summed) -> Summed:
        """Returns sums whose gradients are added up on the devices that use them; all else is the first replica's."""
        packing = update.packing
        if not isinstance(packing, SplitPacking):
            return sums

        def first(value: Any) -> Any:
            return tf.nest.map_structure(lambda v: self._strategy.experimental_local_results(v)[0], value)

        segments = []
        for of_replicas, device in zip(sums.segments, packing.devices, strict=True):
            with tf.device(device):
                segments.append(tf.add_n(self._strategy.experimental_local_results(of_replicas)))
        if self._sharding.num_workers > 1:
            segments = self._sharding.exchange.collect(segments, packing.owners)
        return sums._replace(
            segments=segments,
            weight=first(sums.weight),
            tallies=first(sums.tallies),
            replacements=first(sums.replacements),
            secs=None if sums.secs is None else first(sums.secs),
            noise=None if sums.noise is None else first(sums.noise),
        )

    def call(self, update: ForwardBackward, fn: Callable[[Summed], Any], sums: Summed) -> Any:
        """Calls a function of an update's sums where `reduce` has left them: once, or on each replica."""
        return fn(sums) if isinstance(update.packing, SplitPacking) else super().call(update, fn, sums)

    def sum_over_owners(self, update: ForwardBackward) -> Callable[[tf.Tensor], tf.Tensor] | None:
        """Returns what adds up numbers about an update's gradients, if each worker has some; None: each has all."""
        is_shared = isinstance(update.packing, SplitPacking) and self._sharding.num_workers > 1
        return functools.partial(collectives.sum_over_workers, self._strategy) if is_shared else None


class ShardedAverage(MovingAverage):
    """Moving averages that are stored in shards, each on the device that updates that shard of the weights."""

    def __init__(self, variables: Sequence[Any], decay: float, sharding: Sharding):
        """Creates the averages with the variables' values; outside of strategies, as each is on one device.

        Args:
            variables: the variables to average.
            decay: d, in (0, 1).
            sharding: knows their shards.
        """
        tf.Module.__init__(self, name="average")
        self.decay = decay
        self._variables = list(variables)
        self._sharding = sharding
        self._stored: dict[int, list[tuple[VariableShard, tf.Variable]]] = {}
        self._averaged = {}
        for variable in self._variables:
            stored = self._stored[id(variable)] = []
            for shard in sharding.shards([variable]):
                with tf.device(shard.device):
                    stored.append((shard, tf.Variable(tf.identity(shard.value()), trainable=False)))
            self._averaged[id(variable)] = sharding.join("average", variable, [average for _, average in stored])

        @graph_function
        def swap() -> None:
            stored = [pair for variable in self._variables for pair in self._stored[id(variable)]]
            weights = [tf.identity(shard.value()) for shard, _ in stored]
            sharding.send([(v, [average for _, average in self._stored[id(v)]]) for v in self._variables])
            for (_, average), weight in zip(stored, weights, strict=True):
                average.assign(weight)

        self._swap = swap

    @property
    def stored(self) -> list[tf.Variable]:
        """The variables that hold the averages, on the device of each shard."""
        return [average for stored in self._stored.values() for _, average in stored]

    def update(self, variables: Sequence[Any], applied_steps: tf.Tensor) -> None:
        """Moves the averages of some of the variables; outside of replicas, after an update was applied."""
        rate = self._rate(applied_steps)
        for shard, average in (pair for variable in variables for pair in self._stored[id(variable)]):
            with tf.device(shard.device):
                average.assign_add(tf.cast(rate, average.dtype) * (shard.value() - average))


class ShardedPlacement(Sharding):
    """Slots and averages that are shared out to the replicas."""

    def describe(self, state: TrainState) -> list[str]:
        """Returns a line on where slots and averages are, as in `slots 0.6 MB on CPU:0, ...`."""
        shared = ("optimizer slots", "averages of weights")
        of_device = {d: sum(held.get(name, 0) for name in shared) for d, held in held_by_device(state).items()}
        of_workers = collectives.Workers(state.strategy).gather(of_device)
        by_device = ", ".join(
            f"{size / 1e6:,.1f} MB on {device}" + (f" of worker {worker}" if len(of_workers) > 1 else "")
            for worker, sizes in enumerate(of_workers)
            for device, size in sizes.items()
        )
        return [f"slots {'and averages ' if state.average is not None else ''}{by_device}"]

    def make_average(
        self, variables: Sequence[Any], decay: float, trained: Sequence[tuple[Any, Any]]
    ) -> ShardedAverage:
        """Returns moving averages, each shard on the device that updates it."""
        self.add(variables, are_uncut=False)
        with tensorflow_internals.outside_strategies():
            return ShardedAverage(variables, decay, self)

    def make_packing(self, state: TrainState, update: Update, variables: Sequence[Any], *, needs_all: bool) -> Packing:
        """Returns the layout of gradients: of their shards, if each is needed on one device alone."""
        needs_full = bool(state.replicas.same_bits or update.gradient_fn or update.step_fn)
        if needs_full or (needs_all and self.num_workers > 1):
            return Packing(variables, why_dense=_WHY_DENSE)
        return SplitPacking(variables, [self._shards[id(variable)] for variable in variables])

    def adapt(self, application: Application) -> ShardedApplication:
        """Returns the application of updates to shards."""
        return ShardedApplication(application.state, self)


class OnlyReplica(SlotPlacement):
    """The placement of slots where there is nothing to split."""

    def describe(self, state: TrainState) -> list[str]:
        """Returns a line that says so."""
        return ["slots are on the only replica: shard_optimizer changes nothing"]


def place_slots(strategy: tf.distribute.Strategy) -> SlotPlacement:
    """Returns a placement that splits slots and averages over the replicas, if there are several.

    Raises:
        ValueError: if there are several, and distloop cannot do so.
    """
    return ShardedPlacement(strategy) if strategies.can_shard(strategy) else OnlyReplica()
