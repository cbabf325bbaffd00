"""Outputs of Keras models by name, each with its targets, sample weights, losses and factors.

    outputs = outputs_by_name(model(x), names)                     # {"box": ..., "cls": ...}
    spread({"cls": "crossentropy"}, list(outputs))                 # by output

It does not know losses or metrics.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras


def names_before_call(model: Any) -> list[str]:
    """Returns the names of a model's outputs; none if it does not know them before it is called."""
    names = getattr(model, "output_names", None)
    if not names:
        return []
    return list(outputs_by_name(model.output, names))


def outputs_by_name(outputs: Any, names: Sequence[str]) -> dict[str, Any]:
    """Returns outputs (one tensor, a list or a dict) as a dict by name, in Keras's order.

    Args:
        outputs: of a model.
        names: the outputs' names; empty if the model has none.

    Raises:
        ValueError: if the outputs are nested deeper.
    """
    if isinstance(outputs, Mapping):
        by_name = {path[0]: outputs[path[0]] for path, _ in keras.tree.flatten_with_path(outputs)}
    elif isinstance(outputs, (list, tuple)):
        names = names if len(names) == len(outputs) else [f"output_{i}" for i in range(len(outputs))]
        by_name = dict(zip(names, outputs, strict=True))
    else:
        by_name = {(names or ["output"])[0]: outputs}
    if nested := [name for name, output in by_name.items() if isinstance(output, (Mapping, list, tuple))]:
        raise ValueError(
            f"The model's outputs {nested} are dicts or lists themselves; losses and metrics take one dict or list of "
            "tensors: return such, or write a ModelSpec with a loss_fn of your own."
        )
    return by_name


def targets_by_output(targets: Any, names: Sequence[str], with_loss: Sequence[str]) -> dict[str, Any]:
    """Returns targets (one tensor, a list or a dict) by the names of the outputs.

    Args:
        targets: of a batch.
        names: of the outputs.
        with_loss: the outputs that have a loss; a list may hold targets for them alone.

    Raises:
        ValueError: if a list has another length.
    """
    if isinstance(targets, Mapping):
        return dict(targets)
    if not isinstance(targets, (list, tuple)):
        targets = [targets]
    if len(targets) != len(names):
        names = with_loss
    if len(targets) != len(names):
        raise ValueError(f"{len(targets)} targets were given for {len(names)} outputs: give one for each.")
    return dict(zip(names, targets, strict=True))


def weights_by_output(sample_weight: Any, names: Sequence[str]) -> dict[str, Any]:
    """Returns sample weights by output."""
    if len(names) > 1 and isinstance(sample_weight, (Mapping, list, tuple)):
        raise ValueError(
            "A model with several outputs was given sample weights for each of them; their losses have no common "
            "weights: write a ModelSpec with a loss_fn of your own, and distloop.weighted."
        )
    return spread(sample_weight, names)


def spread(given: Any, names: Sequence[str]) -> dict[str, Any]:
    """Returns an argument by output: from a dict by name, a list in order, or one value for all outputs.

    Raises:
        ValueError: if a dict or list does not match the outputs.
    """
    if isinstance(given, Mapping) and not set(given) - set(names):
        return dict(given)
    if isinstance(given, Mapping):
        raise ValueError(f"{sorted(given)} were given by name; the outputs are {list(names)}: use those names.")
    if isinstance(given, (list, tuple)):
        if len(given) != len(names):
            raise ValueError(
                f"A list of {len(given)} was given for the {len(names)} outputs {list(names)}: give one for each."
            )
        return dict(zip(names, given, strict=True))
    return dict.fromkeys(names, given)
