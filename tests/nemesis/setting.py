"""How the runs of a round are started, and the size of what they train."""

from typing import NamedTuple

STEPS, ROWS, BATCH_SIZE = 40, 64, 8


class Setting(NamedTuple):
    """How the runs of a round are started.

    Attributes:
        placement: "alone": one process; "launcher": workers on this machine; "hosts": a launcher and a worker on each.
        workers: how many.
        checkpoint_every: steps.
        keep: checkpoints.
        child_of: the worker that forks a child; -1: none.
        is_first_process: whether each command has the process number 1, as in containers.
        noise: bytes that each worker prints a step.
    """

    placement: str
    workers: int
    checkpoint_every: int = 5
    keep: int = 3
    child_of: int = -1
    is_first_process: bool = False
    noise: int = 0

    @property
    def commands(self):
        """How many commands a scheduler starts."""
        return self.workers if self.placement == "hosts" else 1

    def command_of(self, worker):
        return worker if self.placement == "hosts" else 0
