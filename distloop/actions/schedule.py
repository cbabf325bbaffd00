"""Schedule: the steps at which something is due, in integers, without TensorFlow.

It does not know what happens at a boundary. Everything is due by steps, never by the clock, so that every worker
computes the same boundaries without communication:

    step = 0
    while step < until:
        step = next_boundary(step, until, [100, 500])      # 100, 200, ..., 500, ...
"""

from collections.abc import Iterable


def next_boundary(step: int, until: int, everys: Iterable[int | None], steps_per_loop: int = 0) -> int:
    """Returns the next step at which a compiled loop has to end: the smallest boundary after `step`, at most `until`.

    Args:
        step: number of steps done.
        until: the last step of the run; `until > step`.
        everys: periods in steps; 0 and None cause no boundary.
        steps_per_loop: the most steps up to the boundary; 0: no limit.
    """
    assert until > step, (step, until)
    boundary = min([until] + [step - step % every + every for every in everys if every])
    return min(boundary, step + steps_per_loop) if steps_per_loop else boundary


def is_due(step: int, every: int | None, until: int) -> bool:
    """Returns True if something with period `every` (steps) is due at `step`; at the end, `until`, everything is."""
    return step >= until or bool(every and step % every == 0)
