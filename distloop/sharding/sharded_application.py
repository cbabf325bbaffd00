"""Sharded application: updates by gradients that are summed only on the device whose slots need them.

    slots = place_slots(strategy)
    packing = slots.make_packing(...)               # segments that each belong to one device
    application = slots.adapt(Application(state, clipping))

`sharding.py` knows the shards.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.distributed import collectives, strategies
from distloop.model import variable_writes
from distloop.model.memory import held_by_device
from distloop.model.spec import Update
from distloop.model.state import TrainState
from distloop.optimizers.gradients import Clipping, Packing, Reduce, Segment
from distloop.optimizers.slot_placement import MovingAverage, SlotPlacement
from distloop.sharding.exchange import outside_strategies
from distloop.sharding.sharding import Sharding
from distloop.sharding.variable_shards import VariableShard
from distloop.training.application import Application, Gradients, reached
from distloop.training.forward_backward import ForwardBackward
from distloop.training.microbatches import Sums

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
        self._numbers = {id(shard.trained): number for number, (_, shard) in enumerate(pairs)}
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

    def __init__(self, state: TrainState, clipping: Clipping, sharding: Sharding):
        """Stores what is trained, the limit of gradients, and the shards."""
        super().__init__(state, clipping)
        self._sharding = sharding

    def apply(self, update: ForwardBackward, gradients: Gradients) -> None:
        """Changes weights, slots and averages; segments that were summed apart are each on the device of its shard."""
        if variables := reached(update):  # a step_fn may apply nothing
            store, of_shards = self.state.slot_stores[update.name], self._gradients_of_shards(update, gradients)
            packed = update.packing, gradients.segments, gradients.scale
            is_cut = isinstance(update.packing, SplitPacking)
            self._sharding.apply(store, variables, of_shards, *(packed if is_cut else ()))
            self._applied[update.name] = store.optimizer
        if update.replaced:
            assign = functools.partial(variable_writes.assign, update.replaced)
            self._strategy.run(assign, args=(gradients.replacements,))
        self._move_averages(update)

    def _gradients_of_shards(self, update: ForwardBackward, gradients: Gradients) -> list[tf.Tensor]:
        """Returns the gradient of each shard of the variables that the loss reaches, on the shard's device."""
        segments, scale = gradients.segments, gradients.scale
        if isinstance(update.packing, SplitPacking):
            flats, ids = update.packing.unpack_flat(segments, scale), {id(v) for v in reached(update)}
            shards = zip(flats, self._sharding.shards(update.variables), strict=True)
            return [gradient for gradient, shard in shards if id(shard.variable) in ids]
        on_replicas = self._strategy.run(functools.partial(self._wanted, update), args=(segments, scale))
        pairs = zip(reached(update), on_replicas, strict=True)
        return [gradient for variable, of in pairs for gradient in self._sharding.cut(variable, of)]

    def reduce(self, update: ForwardBackward, sums: Sums) -> Sums:
        """Returns sums whose gradients are added up on the devices that use them; all else is the first replica's."""
        packing = update.packing
        if not isinstance(packing, SplitPacking):
            return sums

        segments = []
        for of_replicas, device in zip(sums.segments, packing.devices, strict=True):
            with tf.device(device):
                segments.append(tf.add_n(self._strategy.experimental_local_results(of_replicas)))
        if self._sharding.num_workers > 1:
            segments = self._sharding.exchange.collect(segments, packing.owners)
        first: Sums = self.first(sums._replace(segments=segments, writes={}))
        return first._replace(writes=sums.writes)

    def check(self, update: ForwardBackward, sums: Sums) -> Gradients:
        """Divides, unscales and clips an update's sums where `reduce` has left them: once, or on each replica."""
        return self._check(update, sums) if isinstance(update.packing, SplitPacking) else super().check(update, sums)

    def has_all_gradients(self, update: ForwardBackward) -> bool:
        """Returns whether each worker has all gradients of an update after `reduce`, rather than those that it uses."""
        return not isinstance(update.packing, SplitPacking) or self._sharding.num_workers == 1

    def _sum_over_owners(self, update: ForwardBackward, numbers: list[tf.Tensor]) -> list[tf.Tensor]:
        if self.has_all_gradients(update):
            return numbers
        return list(tf.unstack(collectives.sum_over_workers(self._strategy, tf.stack(numbers))))


class ShardedAverage(MovingAverage):
    """Moving averages that are stored in shards, each on the device that updates that shard of the weights."""

    def __init__(self, variables: Sequence[Any], decay: float, sharding: Sharding):
        """Creates the averages with the variables' values, as `MovingAverage` does; `sharding` has their shards."""
        self._sharding = sharding
        with outside_strategies():  # each is on one device
            super().__init__(variables, decay)

    def _colocate(self, variable: Any) -> Any:
        stored = []
        for shard in self._sharding.shards([variable]):
            with tf.device(shard.device):
                stored.append(tf.Variable(tf.identity(shard), trainable=False))
        return self._sharding.join("average", variable, stored)

    def _stored_with(self, variables: Sequence[Any]) -> list[tuple[Any, Any]]:
        averages = [self._averaged[id(variable)] for variable in variables]
        stored = [shard for average in averages for shard in getattr(average, "shards", [average])]
        return list(zip(self._sharding.shards(variables), stored, strict=True))

    def _exchange(self) -> None:
        pairs = self._stored_with(self._variables)
        weights = [tf.identity(shard) for shard, _ in pairs]
        self._sharding.send([(v, [average for _, average in self._stored_with([v])]) for v in self._variables])
        for (_, average), weight in zip(pairs, weights, strict=True):
            average.assign(weight)


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
        return ShardedAverage(variables, decay, self)

    def make_packing(self, state: TrainState, update: Update, variables: Sequence[Any], *, needs_all: bool) -> Packing:
        """Returns the layout of gradients: of their shards, if each is needed on one device alone."""
        needs_full = bool(state.replicas.same_bits or update.gradient_fn or update.step_fn)
        if needs_full or (needs_all and self.num_workers > 1):
            return Packing(variables, why_dense=_WHY_DENSE)
        return SplitPacking(variables, [self._shards[id(variable)] for variable in variables])

    def adapt(self, application: Application) -> ShardedApplication:
        """Returns the application of updates to shards."""
        return ShardedApplication(application.state, application.clipping, self)


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
    return ShardedPlacement(strategy) if _can_shard(strategy) else OnlyReplica()


def _can_shard(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether there are several replicas, to split an optimizer's slots over.

    Raises:
        ValueError: if there are several replicas, and distloop cannot do so.
    """
    if strategy.num_replicas_in_sync == 1:
        return False
    if not isinstance(strategy, strategies.MIRRORED):
        raise ValueError(
            f"shard_optimizer=True was given with a {type(strategy).__name__}; slots are shared out to the devices of "
            "a MirroredStrategy: use strategy=mirrored, or leave shard_optimizer out."
        )
    return True
