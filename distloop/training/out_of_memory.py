"""Out of memory: explains what took the memory, and which settings to try.

    except tf.errors.ResourceExhaustedError as error:
        raise explain_step(error, state, 12, microbatches=1) from error

For evaluation and prediction there is `explain_pass`.
"""

import re

import tensorflow as tf

from distloop.actions import memory
from distloop.model.state import TrainState
from distloop.settings.precision import BFLOAT16, HALF_DTYPES

_TENSOR = re.compile(r"allocating tensor with shape\s*\[([\d,]*)\] and type (\w+)")
_DEVICE = re.compile(r"device:((?:GPU|TPU|CPU):\d+)")


def explain_step(
    error: tf.errors.OpError, state: TrainState, step: int, microbatches: int
) -> tf.errors.ResourceExhaustedError:
    """Returns the error of a train step with one sentence: what was in memory, and the settings to try.

    `step` is the number of the step that failed, or of the one that its loop began with.
    """
    advice = f"microbatches={2 * microbatches} or more (it is {microbatches})"
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
