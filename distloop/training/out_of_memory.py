"""Out of memory: explains what took the memory, and repeats the steps with smaller microbatches.

    halving = Halving(state, step)                     # microbatches="auto"
    halving.keep(source)                               # before a loop
    except tf.errors.ResourceExhaustedError as error:
        if not halving.halve(source):                  # everything is as before the loop, and microbatches are halved
            raise explain_step(error, state, 12, microbatches=1) from error

For evaluation and prediction there is `explain_pass`.
"""

import re
from typing import Any

import tensorflow as tf

from distloop.actions import memory
from distloop.data import shards
from distloop.data.shards import Batch
from distloop.data.source import Source
from distloop.distributed import workers
from distloop.graph_functions import compiled
from distloop.log import log
from distloop.model.saved_state import SavedState
from distloop.model.state import TrainState
from distloop.settings.precision import BFLOAT16, HALF_DTYPES
from distloop.training.step import TrainStep

_TENSOR = re.compile(r"allocating tensor with shape\s*\[([\d,]*)\] and type (\w+)")
_DEVICE = re.compile(r"device:((?:GPU|TPU|CPU):\d+)")
_MOST_MICROBATCHES = 4096  # where the batch size is unknown


def explain_step(
    error: tf.errors.OpError, state: TrainState, step: int, microbatches: int
) -> tf.errors.ResourceExhaustedError:
    """Returns the error of a train step with one sentence: what was in memory, and the settings to try.

    `step` is the number of the step that failed, or of the one that its loop began with.
    """
    advice = f"microbatches={2 * microbatches} or more (it is {microbatches}; auto searches)"
    advice += f", {_half_precision(state)}a smaller batch, or optimizers with fewer slots"
    return _explain(error, state, f"in step {step} or soon after", "activations and gradients", advice)


def explain_pass(
    error: tf.errors.OpError, state: TrainState, doing: str, batch_size: int | None = None
) -> tf.errors.ResourceExhaustedError:
    """Returns the error of a pass that changes no weight with one sentence: what was in memory, and what to try.

    `doing` says what was done, as in "evaluating". The batch size of the data may be unknown.
    """
    advice = f"smaller batches, which change no result, or {_half_precision(state)}more devices"
    batches = f" batches of {batch_size} rows" if batch_size else ""
    return _explain(error, state, f"while {doing}{batches}", "activations and outputs", advice)


def _explain(
    error: tf.errors.OpError, state: TrainState, when: str, rest: str, advice: str
) -> tf.errors.ResourceExhaustedError:
    message = error.message or ""
    device = match[1] if (match := _DEVICE.search(message)) else "the device"
    tensor = f", for a tensor of shape [{match[1]}] and type {match[2]}" if (match := _TENSOR.search(message)) else ""
    most = max(memory.held_by_device(state).values(), key=lambda parts: sum(parts.values()), default={})
    held = ", ".join(f"{name} take {size / 1e9:.2g} GB" for name, size in most.items())
    sentence = (
        f"{device} ran out of memory {when}{memory.describe_use(device)}{tensor}; {held}, {rest} the rest: try "
        f"{advice}."
    )
    return tf.errors.ResourceExhaustedError(None, None, sentence)


def _half_precision(state: TrainState) -> str:
    """Returns the advice to compute in half precision; empty if a layer does."""
    layers = (layer for layers in state.layers_of_update.values() for layer in layers)
    return "" if any(layer.compute_dtype in HALF_DTYPES for layer in layers) else f"precision={BFLOAT16.name}, "


class Halving:
    """Takes steps again with microbatches of half the size where memory ends; every result is the same."""

    def __init__(self, state: TrainState, step: TrainStep):
        """Prepares to raise the `microbatches` of a step."""
        self._saved_state = SavedState(state)
        self._strategy = state.strategy
        self._step = step
        self._before: tuple[dict[str, tf.Tensor], dict[str, Any]] | None = None
        self._is_alone = workers.num_workers(state.strategy) == 1
        self._is_proven = False  # whether the step before had the memory that all steps need

    def keep(self, source: Source) -> bool:
        """Copies everything that training changes to the host, before a loop; several workers try the first batch.

        A worker without memory leaves the others waiting in a reduction. So several workers try forward and backward
        pass of the first batch, without a reduction, and agree on what fits on all. On one, batches of the same shape
        need no copy after the first loop.

        Returns:
            Whether the microbatches changed.
        """
        if self._is_proven:
            self._before = None
            return False
        before = self._saved_state.snapshot()
        if self._is_alone:
            self._before = before, source.save_position()
            specs = tf.nest.flatten(source.info.element_spec)
            self._is_proven = all(isinstance(s, tf.TensorSpec) and s.shape.is_fully_defined() for s in specs)
            return False
        self._is_proven, first = True, self._step.microbatches
        position = source.save_position()
        while not bool(workers.gather(self._strategy, self._fits(source)).all()):
            if not self._restore_and_double(before, source):
                break
        self._saved_state.restore(before)
        if self._step.microbatches == first:
            return False
        source.restore_position(position)
        return True

    def halve(self, source: Source) -> bool:
        """Restores what `keep` copied and halves the microbatches; returns whether that was possible."""
        if self._before is None:
            return False
        values, position = self._before
        if not self._restore_and_double(values, source):
            return False
        self._is_proven = False
        source.restore_position(position)
        return True

    def _restore_and_double(self, values: dict[str, tf.Tensor], source: Source) -> bool:
        """Restores values and doubles the microbatches, if a batch has rows for so many; returns whether it did."""
        microbatches, rows = 2 * self._step.microbatches, source.info.batch_size
        if microbatches > (_MOST_MICROBATCHES if rows is None else rows // self._strategy.num_replicas_in_sync):
            return False
        self._saved_state.restore(values)
        self._step.set_microbatches(microbatches)
        source.set_microbatches(microbatches)
        log.warning("Out of memory: each replica computes its batch in %d microbatches.", microbatches)
        return True

    def _fits(self, source: Source) -> bool:
        """Returns whether this worker has memory for the forward and backward pass of the first batch.

        What the pass itself exchanges is exchanged: rows for metrics that are no sums, `gather_rows`, the statistics of
        synchronized normalizations. A worker without memory may leave the others waiting there.
        """

        def compute(batch: Batch) -> Any:
            local = [update(batch, source.layout, tf.constant(1.0)).segments for update in self._step.updates]
            return [tf.reduce_sum(tensor) for tensor in tf.nest.flatten(local)]

        def run() -> Any:
            return self._strategy.run(compute, args=(shards.next_batch(iterator, source.layout),))

        iterator = source.new_iterator()
        try:
            compiled(run)()
        except tf.errors.ResourceExhaustedError:
            return False
        return True
