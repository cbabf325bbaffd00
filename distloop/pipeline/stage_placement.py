"""Stage placement: puts each stage on its device, with its variables, gradients, slots and averages.

placement = StagePlacement(networks)        # in place of `model.placement.Placement`
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.model import memory
from distloop.model.placement import Compute, Placement, Sums, wrong_num_stages
from distloop.monitoring.profiler import Profile, busy_fractions
from distloop.optimizers import keras_hooks
from distloop.optimizers.gradients import Packing
from distloop.training.action import Action, Report
from distloop.variables import tensorflow_variable


class StagePlacement(Placement):
    """The placement of networks whose stages are on several devices.

    A stage's variables, slots, averages and gradients stay on its device, and its forward and backward pass run there.
    The loss is computed on the last stage's device. The microbatches of a step are in one graph, so that stages work on
    different ones at the same time.
    """

    def __init__(self, networks: Sequence[Any]):
        """Keeps the networks, each a `Pipeline`, at least one."""
        self._networks = list(networks)
        self.devices = [device for network in self._networks for device in network.devices]

    def describe(self) -> list[str]:
        """Returns a line for each network, as in `stages 2 = 1,024 on CPU:0 + 512 on CPU:1`."""
        return [f"stages {network.describe()}" for network in self._networks]

    def make_actions(self, profile: Profile) -> "list[Action]":
        """Returns the action that reports on the stages."""
        return [StageUsage(self.devices, profile)]

    def require_stages(self, num_stages: int) -> None:
        """Checks that a network has as many stages as the settings say."""
        if num_stages > 1 and num_stages not in [len(network) for network in self._networks]:
            raise wrong_num_stages(num_stages, f"a network of {len(self._networks[0])} stages")

    def check_microbatches(self, microbatches: int, batch_size: int) -> None:
        """Checks that no microbatch is empty."""
        if microbatches > batch_size:
            raise ValueError(
                f"microbatches={microbatches} was given for batches of {batch_size} rows, so stages would work on "
                f"empty ones: give microbatches={batch_size} or fewer, or larger batches."
            )

    def adapt_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Lets a built optimizer work where its variables are."""
        keras_hooks.update_on_variable_devices(optimizer)

    def gradient_devices(self, variables: Sequence[Any]) -> list[str] | None:
        """Returns the device of each variable."""
        return [tensorflow_variable(variable).device for variable in variables]

    def layer_scope(self, layer: keras.Layer) -> contextlib.AbstractContextManager[Any]:
        """Returns a scope that places operations on a layer's device."""
        scope: contextlib.AbstractContextManager[Any] = tf.device(tensorflow_variable(layer.variables[0]).device)
        return scope

    def differentiate(self, tape: Any, objective: tf.Tensor, tensors: Sequence[Any]) -> list[Any]:
        """Computes gradients; each operation runs beside its forward operation, which a tape cannot do."""
        is_eager, differentiate = tf.executing_eagerly(), super().differentiate
        return differentiate(tape, objective, tensors) if is_eager else list(tf.gradients(objective, tensors))

    def sum_microbatches(
        self, packing: Packing, count: int, compute: Compute, row_specs: Sequence[tf.TensorSpec] = ()
    ) -> Sums:
        """Sums gradients and tallies over microbatches that flow through the stages, all in one graph."""
        sums: list[list[tf.Tensor]] = []  # of the gradients, after each microbatch
        with contextlib.ExitStack() as stack:
            for network in self._networks:
                stack.enter_context(network.ordered(sums))
            segments, tallies, rows = self._compute_loss_last(compute, 0)
            for index in range(1, count):
                # A stage waits for the sum, not for the gradients: else TensorFlow may add up late and keep both.
                sums.append(segments)
                more_segments, more_tallies, more_rows = self._compute_loss_last(compute, index)
                segments, tallies = packing.add(segments, more_segments), tallies + more_tallies
                rows = [tf.concat(pieces, 0) for pieces in zip(rows, more_rows, strict=True)]
        return segments, tallies, rows

    def _compute_loss_last(self, compute: Compute, index: int) -> Sums:
        """Computes a microbatch; what is in no stage, such as the loss, runs on the last stage's device."""
        with tf.device(self.devices[-1]):
            return compute(index)

    @contextlib.contextmanager
    def unplaced(self) -> Any:
        """Enters a scope in which the networks are traced without devices, to be served anywhere."""
        with contextlib.ExitStack() as stack:
            for network in self._networks:
                stack.enter_context(network.unplaced())
            yield


class StageUsage(Action):
    """Reports `stage_N/device_memory_gb` and `stage_N/device_busy_share` for each stage of a pipeline.

    The memory is the peak of the stage's device, at each log; virtual CPUs share the host's memory and have none. The
    busy share is the fraction of a step's time in which an operation runs on the device; it is read from the profile,
    once `--profile` has written one. With several workers these are the chief's numbers.
    """

    every, phase, only_writes = None, "logging", True

    def __init__(self, devices: Sequence[str], profile: Profile):
        """Stores the device of each stage, and the profile."""
        self._devices, self._profile, self._was_read = devices, profile, False

    def __call__(self, report: Report) -> dict[str, float]:
        """Returns the metrics; stages that share a device have the same."""
        metrics, fractions = {}, {}
        if self._profile.is_written and not self._was_read:
            self._was_read, fractions = True, busy_fractions(self._profile.directory)
        for stage, device in enumerate(self._devices):
            if not device.startswith("CPU"):
                metrics[f"stage_{stage}/device_memory_gb"] = memory.device_peak_gb(device)
            if device in fractions:
                metrics[f"stage_{stage}/device_busy_share"] = fractions[device]
        return metrics
