"""The gradients of one update by the user's `step_fn`, which may ask for gradients several times.

    def step_fn(step):                                          # sharpness-aware minimization, arXiv:2010.01412
        gradients = step.gradients()
        norm = tf.linalg.global_norm(list(gradients.values()))
        with step.moved({path: tf.math.divide_no_nan(0.05 * g, norm) for path, g in gradients.items()}):
            return step.gradients()

    summed = call_step_fn(update, batch, layout, factor)        # in replica context: gradients of all replicas

All passes of a step start from the same random streams and statistics, and only the first one changes them.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from distloop.data.shards import Batch, BatchLayout
from distloop.errors import explaining_merge_call
from distloop.model import variable_writes
from distloop.model.spec import StepFn
from distloop.optimizers import gradients
from distloop.training.forward_backward import ForwardBackward, Summed


def call_step_fn(
    update: ForwardBackward, step_fn: StepFn, batch: Batch, layout: BatchLayout, factor: tf.Tensor | None
) -> Summed:
    """Calls an update's `step_fn`; in replica context.

    Args:
        update: the pass.
        step_fn: the function.
        batch: the global batch.
        layout: its layout.
        factor: of the loss, as `ForwardBackward.loss_factor` returns it.

    Returns:
        What is to be applied.

    Raises:
        ValueError: if `step_fn` asks for what is not to be had, or returns something else than gradients.
    """
    step = GradientStep(update, batch, layout, factor)
    with explaining_merge_call(
        "step_fn asked for gradients inside a tf.cond, a TensorFlow loop or a tf.function, where replicas cannot add "
        "them up: ask in plain Python, and choose between results with tf.where."
    ):
        with variable_writes.recorded_writes(update.writable) as written:
            returned = step_fn(step)
        return step._finish(returned, written)


class GradientStep:
    """What a `step_fn` can ask about the batch of a step, `gradients` and `weights`, and where to look from, `moved`.

    Every number is that of the global batch, the same on all replicas, divided and unscaled.
    """

    def __init__(self, update: ForwardBackward, batch: Batch, layout: BatchLayout, factor: tf.Tensor | None):
        """Prepares; `call_step_fn` makes one for each step."""
        self._update = update
        self._arguments = (batch, layout, factor)
        self._variables = {update.state.paths[id(v)]: v for v in update.variables}
        self._before = update.values()
        self._start = dict(self._before)  # of each pass: moved weights, all else as before the step
        self._first: Summed | None = None
        self._written: dict[int, Any] = {}  # variables that any pass wrote
        self._after: dict[int, tf.Tensor] = {}  # what the first pass wrote
        self._are_finite: list[tf.Tensor] = []
        self._has_moved = False

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
        update = self._update
        if self._first is None:
            summed = self._first = update(*self._arguments, value)
            self._after = {id(v): new for v, new in zip(summed.written, summed.after, strict=True)}
        else:
            for i, variable in self._written.items():
                variable.assign(self._start[i])
            summed = update(*self._arguments, value, again_from=self._start)
        self._written |= {id(v): v for v in summed.written}
        _, norm, scale = gradients.norm_and_scale(summed.segments, summed.weight)
        self._are_finite.append(tf.math.is_finite(norm + summed.tallies[0]))
        return dict(zip(self._variables, update.packing.unpack(summed.segments, scale), strict=True))

    @property
    def weights(self) -> dict[str, tf.Tensor]:
        """The value of each variable that the update trains, by path; in `moved`, the moved one."""
        return {path: self._start[id(variable)] for path, variable in self._variables.items()}

    @contextlib.contextmanager
    def moved(self, by: Mapping[str, tf.Tensor]) -> Iterator[None]:
        """Enters a scope in which weights are moved; scopes add up, and each restores every bit on exit.

        Args:
            by: path -> what is added to the variable, of its shape; variables left out stay.

        Raises:
            ValueError: if the update trains no such variable, or a shape differs.
        """
        if unknown := sorted(set(by) - set(self.weights)):
            raise ValueError(
                f"step.moved was given {unknown}; the update trains {sorted(self.weights)}: use their paths."
            )
        by = checked("step.moved was given", by, {path: w for path, w in self.weights.items() if path in by})
        self._has_moved = True
        before = {path: self.weights[path] for path in by}
        try:
            self._set({path: before[path] + difference for path, difference in by.items()})
            yield
        finally:
            self._set(before)

    def _set(self, weights: Mapping[str, tf.Tensor]) -> None:
        for path, weight in weights.items():
            self._variables[path].assign(weight)
            self._start[id(self._variables[path])] = weight

    def _finish(self, returned: Any, assigned: Sequence[Any]) -> Summed:
        """Returns what is to be applied, after `step_fn` ran.

        Args:
            returned: by `step_fn`.
            assigned: the variables that were assigned while it ran, by itself or in a pass.
        """
        update = self._update
        if self._first is None:
            raise ValueError(
                "step_fn returned without a look at the gradients: call step.gradients() in it and return the "
                "gradients to apply, by path."
            )
        returned = checked("step_fn returned", returned, self.weights)
        own = [v for v in assigned if id(v) not in self._written]
        if not self._has_moved and (trained := {id(v) for v in update.variables} & {id(v) for v in own}):
            paths = [path for path, variable in self._variables.items() if id(variable) in trained]
            raise ValueError(
                f"step_fn assigned {paths[0]}, a weight that the optimizer is to change: use `with step.moved(...)` "
                "for another look, and return what the optimizer applies."
            )
        own = [v for v in own if id(v) not in {id(v) for v in update.variables}]
        self._after |= {id(v): tf.identity(v) for v in own}
        written = update.add_written([*self._written.values(), *own])
        return self._first._replace(
            segments=update.packing.pack(list(returned.values())),
            weight=tf.constant(1.0),
            written=written,
            before=[self._before[id(v)] for v in written],
            after=[self._after.get(id(v), self._before[id(v)]) for v in written],
            are_finite=self._are_finite,
        )


def checked(subject: str, returned: Any, expected: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns tensors by path, in the order and of the dtypes of others.

    Args:
        subject: how a message begins.
        returned: the tensors by path.
        expected: tensors of the right shapes, for the same paths.

    Raises:
        ValueError: if they are not of the same paths and shapes.
    """
    names = sorted(map(str, returned)) if isinstance(returned, Mapping) else type(returned).__name__
    if names != sorted(expected):
        raise ValueError(
            f"{subject} {names}; it was given the gradients of {sorted(expected)}, by path: return a dict "
            "with one of the same shape for each."
        )
    tensors = {}
    for path, like in expected.items():
        tensors[path] = new = tf.cast(tf.convert_to_tensor(returned[path]), like.dtype)
        if not new.shape.is_compatible_with(like.shape):
            raise ValueError(
                f"{subject} a gradient of shape {list(new.shape)} for {path}, whose shape is "
                f"{list(like.shape)}: keep the shapes."
            )
    return tensors
