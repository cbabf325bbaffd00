"""The gradients of one update by the user's `step_fn`, which may ask for gradients several times.

    def step_fn(step):                                          # sharpness-aware minimization, arXiv:2010.01412
        gradients = step.gradients()
        norm = tf.linalg.global_norm(list(gradients.values()))
        with step.moved({path: tf.math.divide_no_nan(0.05 * g, norm) for path, g in gradients.items()}):
            return step.gradients()

    sums = StepFnPass(update)(batch, num_examples, layout)      # in replica context: gradients of all replicas

All passes of a step start from the same random streams and statistics, and only the first one changes them.

Without a `loss_fn`, the step is the user's from the rows to the gradients, as in `OwnStep`.
"""

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.data.shards import Batch, BatchLayout, batch_size, take_shard
from distloop.distributed import gathering, strategies
from distloop.errors import explaining_merge_call, require
from distloop.model import metrics, variable_writes
from distloop.model.keras_metrics import without_padding
from distloop.optimizers import gradients
from distloop.training.application import checked
from distloop.training.differentiation import Trace
from distloop.training.forward_backward import ForwardBackward
from distloop.training.microbatches import Sums

_ROUNDING = 1e-5  # relative, of a number that is the same on all replicas


class StepFnPass:
    """The pass of an update by its `step_fn`, which adds up over all replicas itself, as often as it asks."""

    def __init__(self, update: ForwardBackward):
        """Prepares."""
        self._update = update

    def __call__(self, batch: Batch, examples: tf.Tensor, layout: BatchLayout) -> Sums:
        """Calls `step_fn` on the global batch, and returns what is to be applied; in replica context.

        The arguments are those of `ForwardBackward`.

        Raises:
            ValueError: if `step_fn` asks for what is not to be had, or returns something else than gradients.
        """
        update, own = self._update, self._update.update
        assert own.step_fn is not None, "made for an update that has one"
        step = GradientStep(update, batch, examples, layout) if own.has_loss else OwnStep(update, batch, layout)
        with (
            gathering.largest_shard(layout.max_replica_rows),
            explaining_merge_call(
                "step_fn asked for gradients or sums inside a tf.cond, a TensorFlow loop or a tf.function, where "
                "replicas cannot add them up: ask in plain Python, and choose between results with tf.where."
            ),
        ):
            with variable_writes.recorded_writes(update.writable, step._moves) as mutated:
                returned = own.step_fn(step)
            return step._finish(returned, mutated)

    def all_reduce(self, sums: Sums) -> Sums:
        """Returns the sums as they are."""
        return sums


class GradientStep:
    """What a `step_fn` can ask about the batch of a step, `gradients` and `weights`, and from where, `moved`.

    Every number is that of the global batch, the same on all replicas, divided and unscaled.
    """

    def __init__(self, update: ForwardBackward, batch: Batch, examples: tf.Tensor, layout: BatchLayout):
        """Prepares; `StepFnPass` makes one for each step."""
        self._update = update
        self._arguments = (batch, examples, layout)
        self._variables = {update.state.paths[id(v)]: v for v in update.variables}
        self._before = update.values()
        self._passes: list[tuple[Sums, tf.Tensor, list[tf.Tensor]]] = []  # of each, also `is_finite` and the gradients
        self._mutated: dict[int, Any] = {}  # variables that any pass wrote
        self._start: dict[int, tf.Tensor] = {}  # what these hold when a pass begins; all others are as they are then
        self._moves = set[str]()  # names of the operations of a graph that assign moved weights

    def gradients(self, value: str = "loss") -> dict[str, tf.Tensor]:
        """Computes the gradients of one of the values that `loss_fn` returns, at the weights as they are.

        Each call is a forward and a backward pass over the batch and a reduction over all replicas and workers. Values,
        metrics and statistics of the step are those of the first call. All calls draw the same random numbers.

        Args:
            value: its name. The gradients of "loss" include those of losses that layers carry, such as L2 terms, which
                are to be had alone as "regularization".

        Returns:
            The gradient of each variable that the update trains, by path; 0 where the value does not depend on it.

        Raises:
            ValueError: if `loss_fn` returns no such value.
        """
        update, held = self._update, self._update.values()
        start = held | self._start
        variable_writes.assign([self._mutated[i] for i in self._start], [*self._start.values()])
        summed = update.all_reduce(update(*self._arguments, value, again_from=start if self._passes else None))
        written = update.variables_of(summed.writes)
        after = {id(v): write.after for v, write in zip(written, summed.writes.values(), strict=True)}
        if tf.executing_eagerly() and not update.state.replicas.same_bits:  # where any variable counts as written
            written = variable_writes.changed(written, [held[id(v)] for v in written])
        self._mutated |= {id(v): v for v in written}
        self._start = {i: start[i] for i in self._mutated}
        # After a pass, variables hold what they held before it, and after the first one what that one wrote.
        if not self._passes:
            held |= after
        variable_writes.assign([*self._mutated.values()], [held[i] for i in self._mutated])
        norm, scale = gradients.norm_and_scale(gradients.squared_norms(summed.segments), summed.weight)
        unpacked = update.packing.unpack(summed.segments, scale)
        self._passes.append((summed, tf.math.is_finite(norm + summed.tallies[0]), unpacked))
        return dict(zip(self._variables, unpacked, strict=True))

    @property
    def weights(self) -> dict[str, tf.Tensor]:
        """The value of each variable that the update trains, by path; in `moved`, the moved one."""
        return {path: tf.identity(variable) for path, variable in self._variables.items()}

    @contextlib.contextmanager
    def moved(self, by: Mapping[str, tf.Tensor]) -> Iterator[None]:
        """Enters a scope in which weights are moved; scopes add up, and each restores every bit on exit.

        Args:
            by: path -> what is added to the variable, of its shape; variables left out stay.

        Raises:
            ValueError: if the update trains no such variable, or a shape differs.
        """
        if unknown := sorted(set(by) - set(self._variables)):
            raise ValueError(
                f"step.moved was given {unknown}; the update trains {sorted(self._variables)}: use their paths."
            )
        before = {path: weight for path, weight in self.weights.items() if path in by}
        by = checked("step.moved was given", by, before)
        try:
            self._set({path: before[path] + difference for path, difference in by.items()})
            yield
        finally:
            self._set(before)

    def _set(self, weights: Mapping[str, tf.Tensor]) -> None:
        graph = tf.compat.v1.get_default_graph()  # has no operations in an eager step
        num_ops = len(graph.get_operations())
        for path, weight in weights.items():
            self._variables[path].assign(weight)
            self._start.pop(id(self._variables[path]), None)
        self._moves |= {op.name for op in graph.get_operations()[num_ops:]}

    def _finish(self, returned: Any, assigned: Sequence[Any]) -> Sums:
        """Returns what is to be applied, after `step_fn` returned.

        `assigned` are the variables that were assigned while it ran, by itself or in a pass.
        """
        update = self._update
        if not self._passes:
            raise ValueError(
                "step_fn returned without gradients: call step.gradients() and return the gradients to apply, by path."
            )
        returned = checked("step_fn returned", returned, self.weights)
        sums, are_finite, given = zip(*self._passes, strict=True)
        # What is not the very tensor of a pass is applied, even if no loss depends on the variable.
        is_own = [all(g is not each for each in known) for g, *known in zip(returned.values(), *given, strict=True)]
        update.trace.reached[:] = map(operator.or_, update.trace.reached, is_own)
        own = [v for v in assigned if id(v) not in self._mutated]
        _refuse_assigned(self._variables, own, "use `with step.moved(...)` for other gradients, and ")
        mutated = update.add_mutated([*self._mutated.values(), *own])
        return sums[0]._replace(
            segments=update.packing.pack(list(returned.values())),
            weight=tf.constant(1.0),
            writes=update.writes(mutated, self._before, [tf.identity(v) for v in mutated]),
            are_finite=are_finite,
        )


class OwnStep:
    """What a `step_fn` gets where ModelSpec has no `loss_fn`: rows, sums over all replicas, and a place for numbers.

    A `step_fn` takes gradients by a tape of its own or in any other way, adds up with `sum`, divides, and returns what
    is to be clipped and applied, by path: of some variables or all. It returns None to apply nothing.

    Attributes:
        batch: the rows of this replica, `[b, ...]`, without padding; b may be 0.
        loss_scale: a factor for a loss before a tape differentiates it, and a divisor for the gradients; 1 unless the
            precision is float16. The step is skipped, and the scale halved, if what is returned is not finite.
    """

    def __init__(self, update: ForwardBackward, batch: Batch, layout: BatchLayout):
        """Prepares; `StepFnPass` makes one for each step."""
        state = update.state
        settings = {"microbatches": update.microbatches > 1, state.replicas.setting: state.replicas.same_bits}
        settings |= {"num_stages": len(state.stage_devices) > 1, "jit_compile": update.jit_compile == "pass"}
        if given := [name for name, is_given in settings.items() if is_given]:
            raise ValueError(
                f"{given[0]} was given with a step_fn and no loss_fn, so that distloop cannot cut the step up: "
                f"leave {given[0]} out, or give a loss_fn."
            )
        rows, row_weights = take_shard(batch, layout)
        self.batch = without_padding(rows, row_weights)
        self.loss_scale = tf.constant(1.0) if update.loss_scaler is None else update.loss_scaler.scale_loss(1.0)
        self._update = update
        self._size = batch_size(rows) if row_weights is None else tf.reduce_sum(row_weights)
        self._moves = frozenset[str]()  # as in `GradientStep`
        self._variables = {state.paths[id(v)]: v for v in update.variables}
        self._before = update.values()
        self._reported: dict[str, tuple[tf.Tensor, tf.Tensor]] = {}
        self._without_weight: set[str] = set()  # names

    @property
    def weights(self) -> dict[str, tf.Tensor]:
        """The value of each variable that the update trains, by path."""
        return {path: self._before[id(variable)] for path, variable in self._variables.items()}

    def sum(self, values: Any) -> Any:
        """Returns the sums over all replicas and workers of each tensor in a nested structure; they have no gradient.

        Args:
            values: tensors of the same shapes on all replicas, such as gradients by path and the number of rows.

        Raises:
            ValueError: if one holds no integers or floating-point numbers.
        """
        tensors = [tf.convert_to_tensor(value) for value in tf.nest.flatten(values)]
        if other := [t.dtype.name for t in tensors if not (t.dtype.is_floating or t.dtype.is_integer)]:
            raise ValueError(f"step.sum was given a tensor of {other[0]}: give numbers, as by tf.cast(x, tf.float32).")
        # TensorFlow adds up int32 on the host, one tensor in each call.
        others = [tensor for tensor in tensors if tensor.dtype != tf.int32]
        sums, add_up = iter(self._update.add_up(others) if others else ()), self._update.add_up
        summed = [add_up([tensor])[0] if tensor.dtype == tf.int32 else next(sums) for tensor in tensors]
        return tf.nest.pack_sequence_as(values, summed)

    def report(self, name: str, total: Any, weight: Any = None) -> None:
        """Adds to a number of the run: the sum of all totals, over replicas and steps, by the sum of all weights.

        With a weight, total and weight are this replica's parts, which differ between replicas and are not compared.
        Without one, the total is a number that is the same on all replicas, such as one made of `sum`'s; it is
        compared in each step, as a mean of unequal means would depend on the number of replicas. Gradients, which are
        the same on all replicas too, are compared by the weights that they leave after the first two steps.

        Args:
            name: of the number; "loss" is what `on_divergence` watches, else the first one that is reported.
            total: this replica's part of the sum, a scalar, such as the sum of the losses of `batch`.
            weight: this replica's part of the divisor, such as the number of rows; None: the total is the number.

        Raises:
            ValueError: if the name is one of distloop's own, or the others are no scalars; from the step, if a total
                without a weight differs between replicas.
        """
        metrics.check_name(name, "step.report was given a number")
        self._without_weight |= {name} if weight is None else set()
        pair = (tf.cast(total, tf.float32), tf.cast(1.0 if weight is None else weight, tf.float32))
        if any(number.shape.rank != 0 for number in pair):
            raise ValueError(
                f"step.report was given {name!r}, and a total and a weight of the shapes {pair[0].shape} and "
                f"{pair[1].shape}: give a name and two scalars, sums over the rows of step.batch."
            )
        known = self._reported.get(name, (0.0, 0.0))
        self._reported[name] = (known[0] + pair[0], known[1] + pair[1])

    def _finish(self, returned: Any, assigned: Sequence[Any]) -> Sums:
        """Returns what is to be applied; the arguments are those of `GradientStep._finish`."""
        update, paths = self._update, list(self._variables)
        if not self._reported:
            raise ValueError('step_fn reported no number: call step.report("loss", total, weight) in it.')
        _refuse_assigned(self._variables, assigned, "")
        gradients = {} if returned is None else returned
        known = self.weights
        if isinstance(gradients, Mapping) and set(gradients) <= set(known):
            known = {path: weight for path, weight in known.items() if path in gradients}
        gradients = checked("step_fn returned", gradients, known)
        names = sorted(self._reported, key=lambda name: name != "loss")
        reached = [path in gradients for path in paths]
        mutated = update.set_own_trace(Trace(names, set(names), reached, list(assigned), False, lambda tensors: {}))
        after = [tf.identity(v) for v in mutated]
        flat = update.state_updates.flatten(mutated, after, [], self._size, 0)
        tallies = tf.stack([number for name in names for number in self._reported[name]])
        sums = self.sum({"tallies": tallies} | ({} if flat is None else {"writes": flat}))
        after, _ = update.state_updates.merge(mutated, after, sums.get("writes"))
        filled = [gradients.get(path, tf.zeros(v.shape, v.dtype)) for path, v in self._variables.items()]
        replicas = update.state.strategy.num_replicas_in_sync
        total = sums["tallies"]
        are_same = [_is_mean(total, tallies, i, name) for i, name in enumerate(names) if name in self._without_weight]
        return Sums(
            segments=update.packing.pack(filled),
            weight=tf.constant(1.0),
            tallies=tf.where(tf.reduce_all(are_same), total, np.nan) if are_same else total,
            writes=update.writes(mutated, self._before, after),
            replacements=[tf.identity(v) for v in update.replaced],
            secs=tf.ones([replicas]) if strategies.times_replicas(update.state.strategy) else None,  # not measured
        )


def _is_mean(sums: tf.Tensor, tallies: tf.Tensor, i: int, name: str) -> tf.Tensor:
    """Checks in the step that number `i` of this replica is the mean over all replicas; a number that is nan may be."""
    mean, own = (of[2 * i] / of[2 * i + 1] for of in (sums, tallies))
    return require(
        (tf.abs(own - mean) <= _ROUNDING * tf.abs(mean)) | ~tf.math.is_finite(own),
        f"step.report was given {name!r} without a weight, and it differs between replicas: give this replica's sum "
        f"and its number of rows, as in step.report({name!r}, total, count), or add the totals up by step.sum.",
    )


def _refuse_assigned(variables: Mapping[str, Any], assigned: Sequence[Any], advice: str) -> None:
    """Raises ValueError if a trained variable was assigned."""
    ids = {id(variable) for variable in assigned}
    for path in (path for path, variable in variables.items() if id(variable) in ids):
        raise ValueError(
            f"step_fn assigned {path}, a weight that the optimizer is to change: {advice}return what the optimizer "
            "applies."
        )
