"""Smaller programs that fail as a larger one does: parts are left out for as long as the failure stays."""

import dataclasses
import time
from collections.abc import Callable, Iterator

from tests.campaigns.keras_fuzz.comparison import Outcome
from tests.campaigns.keras_fuzz.programs import Program


def shrink(
    program: Program, outcome: Outcome, compare: Callable[[Program], Outcome], seconds: float
) -> tuple[Program, Outcome]:
    """Returns the smallest program seen to fail as this one does, and its outcome; begins none after `seconds`."""
    end = time.monotonic() + seconds
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in candidates(program):
            if time.monotonic() > end:
                return program, outcome
            result = compare(candidate)
            if result.kind == outcome.kind and _is_alike(result.signature, outcome.signature):
                program, outcome, is_smaller = candidate, result, True
                break
    return program, outcome


def _is_alike(one: str, other: str) -> bool:
    """Returns whether a failure may be a part of another: an error's sentence, or some of the names that differ."""
    if not other.startswith("wrong "):
        return one == other
    return bool(set(one.removeprefix("wrong ").split(", ")) & set(other.removeprefix("wrong ").split(", ")))


def candidates(program: Program) -> Iterator[Program]:
    """Yields programs with one part less, the largest parts first."""
    replace = dataclasses.replace
    if program.microbatches > 1:
        yield replace(program, microbatches=1)
    if max(program.replicas) > 1:
        yield replace(program, replicas=(1,))
    if len(program.heads) > 1:
        for index in range(len(program.heads)):
            heads, weights = _without(program.heads, index), _without(program.loss_weights, index)
            yield replace(program, heads=heads, loss_weights=weights)
    if len(program.inputs) > 1:
        for index in range(len(program.inputs)):
            yield replace(program, inputs=_without(program.inputs, index))
    if program.loss_weights:
        yield replace(program, loss_weights=())
    if program.trunk:
        yield replace(program, trunk=())
    for index, drawn in enumerate(program.inputs):
        for place in range(len(drawn.steps)):
            smaller = replace(drawn, steps=_without(drawn.steps, place))
            yield replace(program, inputs=(*program.inputs[:index], smaller, *program.inputs[index + 1 :]))
    for index, head in enumerate(program.heads):
        for smaller in _smaller_heads(head):
            yield replace(program, heads=(*program.heads[:index], smaller, *program.heads[index + 1 :]))
    if program.has_weights:
        yield replace(program, heads=tuple(replace(head, weights=None) for head in program.heads))
    if program.optimizer != "keras.optimizers.SGD(0.1)":
        yield replace(program, optimizer="keras.optimizers.SGD(0.1)", lines=())
    if program.lines:
        yield replace(program, lines=program.lines[1:])
    if program.epochs > 1:
        yield replace(program, epochs=1)
    if program.style == "subclassed":
        yield replace(program, style="functional")
    if program.route != "from_keras" and program.style != "subclassed":
        yield replace(program, route="from_keras")


def _without(parts, index):
    return parts[:index] + parts[index + 1 :]


def _smaller_heads(head):
    for name in ("metrics", "weighted_metrics"):
        values = getattr(head, name)
        for place in range(len(values)):
            yield dataclasses.replace(head, **{name: _without(values, place)})
