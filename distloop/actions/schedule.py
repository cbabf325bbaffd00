"""Owns *when*: the next step at which anything is due, in integers, without TensorFlow.

It does not know what happens at a boundary. Everything comes due by steps, never by the clock, so that every worker
comes to the same answer without talking:

    step = 0
    while step < until:
        step = next_boundary(step, until, [100, 500])      # 100, 200, ..., 500, ...
"""

from collections.abc import Iterable


def next_boundary(step: int, until: int, everys: Iterable[int | None], steps_per_loop: int = 0) -> int:
    """Finds the next step at which to stop and look.

    Args:
        step: steps done so far.
        until: the last step of the run; `until > step`.
        everys: periods in steps; 0 or None asks for no boundary of its own.
        steps_per_loop: an upper bound on the distance, in steps; 0: none.

    Returns:
        The smallest boundary after `step`; at most `until`.
    """
    assert until > step, (step, until)
    boundary = min([until] + [step - step % every + every for every in everys if every])
    return min(boundary, step + steps_per_loop) if steps_per_loop else boundary


def is_due(step: int, every: int | None, until: int) -> bool:
    """Says whether something with period `every` (steps) is due at `step`; at the end, `until`, everything is."""
    return step >= until or bool(every and step % every == 0)
