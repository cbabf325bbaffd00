"""How the runs of a round are started, and the size of what they train."""

from typing import NamedTuple

STEPS, ROWS, BATCH_SIZE = 40, 64, 8
ELASTIC_REPLICAS = 4  # virtual ones of an elastic run, and so many workers at most


class Setting(NamedTuple):
    """How the runs of a round are started.

    Attributes:
        placement: "alone": one process; "launcher": workers on this machine; "hosts": a launcher and a worker on each;
            "elastic": a launcher whose workers fall and come back.
        workers: how many; the most of an elastic run.
        checkpoint_every: steps.
        keep: checkpoints.
        child_of: the worker that starts a child; -1: none.
        is_first_process: whether each command has the process number 1, as in containers.
        noise: bytes that each worker prints a step.
        least: workers of an elastic run, below which it waits.
        pause_secs: how long a place of an elastic run is empty after the first fall: shorter than a start, or longer.
    """

    placement: str
    workers: int
    checkpoint_every: int = 5
    keep: int = 3
    child_of: int = -1
    is_first_process: bool = False
    noise: int = 0
    least: int = 1
    pause_secs: float = 1.0

    @property
    def virtual_replicas(self):
        """How many, so that the bits do not depend on the number of workers; 0: none."""
        return ELASTIC_REPLICAS if self.placement == "elastic" else 0

    @property
    def reference(self):
        """The setting of the undisturbed run with the same bits."""
        if self.placement == "elastic":
            count = 1 << self.workers.bit_length() - 1  # 2 of 3 places: virtual replicas are shared out evenly
            return Setting("elastic", count, least=count)
        return Setting("launcher" if self.workers > 1 else "alone", self.workers)

    @property
    def commands(self):
        """How many commands a scheduler starts."""
        return self.workers if self.placement == "hosts" else 1

    def command_of(self, worker):
        return worker if self.placement == "hosts" else 0
