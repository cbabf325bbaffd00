"""Rollback: decides which batches to leave out when a run diverges; a function of steps and batch numbers alone."""

from collections.abc import Set

from distloop.training.loop import Diverged


class Rollback:
    """The batches that were left out since the run last made progress."""

    def __init__(self, max_tries: int):
        """Begins without any.

        Args:
            max_tries: how often a run may go back before it comes further than ever.
        """
        self._max_tries = max_tries
        self._furthest_step = 0  # the last step that diverged
        self._blamed: list[int] = []

    @property
    def num_tries(self) -> int:
        """How often the run went back before the last failure."""
        return max(len(self._blamed) - 1, 0)

    def choose(self, step: int, batch: int, skipped: Set[int]) -> tuple[int, Set[int]] | None:
        """Chooses the batch to leave out after a failure, which is the one that failed.

        If one batch after another fails, the weights may be at fault: the last try leaves out the batch that they
        learned from last, and takes the others back.

        Args:
            step: that failed.
            batch: that it failed on, counted from 0.
            skipped: the batches that are left out already.

        Returns:
            The batch, and all batches to leave out; None after the last try.
        """
        if step > self._furthest_step:
            self._furthest_step, self._blamed = step, []
        if len(self._blamed) >= self._max_tries:
            self._blamed.append(batch)
            return None
        if self._blamed and len(self._blamed) == self._max_tries - 1:
            batch = next((earlier for earlier in reversed(range(batch)) if earlier not in skipped), 0)
            skipped = skipped - set(self._blamed)
        self._blamed.append(batch)
        return batch, skipped | {batch}


def gave_up(diverged: Diverged, tries: int, workdir: str) -> Diverged:
    """Returns the error of a run that goes back no more."""
    times = f"{tries} times" if tries else "not once"
    return Diverged(
        f"{diverged} The run went back {times} and came no further: {workdir}/incidents.jsonl tells what was tried.",
        diverged.step,
        diverged.batch,
    )
