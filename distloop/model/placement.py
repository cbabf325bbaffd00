"""Placement: the interface to a pipeline's placement, with a plain version for other models.

    stages = make_placement(spec.model)                   # a pipeline if the model contains networks of several stages
    with stages.in_order(finished): ...                   # the forward and the backward pass of the next microbatch
    gradients = stages.differentiate(tape, loss, tensors)

`Placement` is the plain version: TensorFlow and the strategy place everything. A network of several stages has one with
the same methods, in `pipeline/`. A train step asks the placement of its `TrainState` for what it needs.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.optimizers.gradients import Packing
from distloop.variables import walk


class Placement:
    """The plain placement: every replica computes on its own device."""

    devices: Sequence[str] = ()  # of each stage, as in `GPU:0`; empty without stages

    def describe(self) -> list[str]:
        """Returns lines for the console."""
        return []

    def make_actions(self, profile: Any) -> list[Any]:
        """Returns the actions that report on the stages of a run, of which `profile` profiles some steps."""
        return []

    def require_stages(self, num_stages: int) -> None:
        """Checks that the model has as many stages as the settings say.

        Raises:
            ValueError: if `num_stages` is above 1 and no network has so many.
        """
        if num_stages > 1:
            raise wrong_num_stages(num_stages, "no network of several stages")

    def check_microbatches(self, microbatches: int, batch_size: int) -> None:
        """Checks that no microbatch is empty, which a pipeline cannot run.

        Raises:
            ValueError: if there are more microbatches than examples in a batch.
        """

    def make_packing(self, variables: Sequence[Any]) -> Packing | None:
        """Returns the layout of variables' gradients; None: one by which TensorFlow places them."""
        return None

    def layer_scope(self, layer: keras.Layer) -> contextlib.AbstractContextManager[Any]:
        """Returns a scope that places operations on a layer's device."""
        return contextlib.nullcontext()

    def differentiate(self, tape: Any, objective: tf.Tensor, tensors: Sequence[Any]) -> list[Any]:
        """Computes gradients.

        Args:
            tape: recorded the forward pass.
            objective: the scalar to differentiate.
            tensors: the TensorFlow variables.

        Returns:
            A gradient for each; None if the objective does not depend on the variable.
        """
        gradients: list[Any] = tape.gradient(objective, tensors)
        return gradients

    def in_order(self, finished: Sequence[Sequence[tf.Tensor]]) -> contextlib.AbstractContextManager[Any]:
        """Returns a scope in which a microbatch is traced.

        Args:
            finished: for each microbatch traced before it, the sum of the gradients up to that one.
        """
        return contextlib.nullcontext()

    def unplaced(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a scope in which the model is traced without devices, to be served anywhere."""
        return contextlib.nullcontext()


def make_placement(model: Any) -> Placement:
    """Returns the placement of a model: that of its stages if it contains networks of several.

    Args:
        model: as in `ModelSpec`.
    """
    networks = [leaf for _, leaf in walk(model) if hasattr(leaf, "make_placement") and leaf.devices]
    made: Placement = networks[0].make_placement(networks) if networks else Placement()
    return made


def wrong_num_stages(num_stages: int, made: str) -> ValueError:
    """Returns the error of a model that has another number of stages than the settings say."""
    return ValueError(
        f"num_stages={num_stages} was given, but model_fn made {made}: call distloop.split(model, {num_stages}) in "
        "it, or leave num_stages out."
    )
