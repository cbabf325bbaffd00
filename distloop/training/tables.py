"""Large tables: which of them a step walks as a whole, although the gradient of a batch is a few rows; a line for each.

    report(step.updates, state, is_shown=True)          # once the step is traced

It does not know how a table is updated.
"""

from collections.abc import Sequence

from distloop.monitoring.console import say
from distloop.training.forward_backward import ForwardBackward
from distloop.training.state import TrainState

_MANY_ROWS = 100_000  # with fewer, a step hardly shows it


def report(updates: Sequence[ForwardBackward], state: TrainState, *, is_shown: bool) -> None:
    """Prints the tables of many rows that a step updates or averages as a whole, and why, if anything is shown."""
    for update in updates if is_shown else ():
        for variable in (v for v in update.variables if id(v) in update.tables and v.shape[0] >= _MANY_ROWS):
            table = f"the table {state.paths[id(variable)]} of {variable.shape[0]:,} rows"
            if (reason := update.tables[id(variable)]) is not None:
                say(f"{table} is updated as a whole at each step, since {reason}")
            elif state.average is not None:
                say(f"{table} is walked as a whole at each step, for its moving average: average_decay=0 leaves it out")
