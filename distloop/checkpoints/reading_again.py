"""Reading again: takes data that cannot start at a place up to the place where a run goes on, before its first step.

    read_again(source, strategy, stop_requests, say, show_progress)

All workers look every half second whether the run is to stop, and stop together. It does not know how batches are read.
"""

import time
from collections.abc import Callable

import tensorflow as tf

from distloop.data.source import Source
from distloop.distributed import workers
from distloop.distributed.preemption import SAVES, Interrupted, StopRequests

_PIECE_SECS = 0.5
_SILENT_SECS = 2.0  # reading that takes no longer is not announced
_GOES_ON, _IS_ASKED, _IS_TOO_SLOW = range(3)  # what a worker answers whether the run is to stop


def read_again(
    source: Source,
    strategy: tf.distribute.Strategy,
    stop_requests: StopRequests | None = None,
    say: Callable[[str], None] | None = None,
    show_progress: Callable[[int, str], None] | None = None,
) -> None:
    """Reads a source up to its place; all workers call it.

    Args:
        source: the data, which may be at its place already.
        strategy: of the workers.
        stop_requests: asked between two pieces whether to go on; None: nothing stops it.
        say: prints a line, once, if it takes longer than two seconds; None: none is printed.
        show_progress: called between two pieces with the batches read so far, and what is being done.

    Raises:
        Interrupted: if any worker has a reason to leave the run.
        ValueError: if the time limit of the process is too short for it, so that the run would never go on.
    """
    behind = source.behind
    if not (total := behind.num_batches):
        return
    workers.report_phase(strategy, "skipping the batches already seen")
    start = time.monotonic()
    if stop_requests is not None:
        stop_requests.plan = "leaving after this batch, with the checkpoint as it is"
    left = behind.skip(1)  # takes longer than others: buffers are filled
    first_secs, is_announced = time.monotonic() - start, False
    while True:
        left = behind.skip(left, _PIECE_SECS)
        secs, done = time.monotonic() - start, total - left
        whole_secs = first_secs + (secs - first_secs) / max(1, done - 1) * (total - 1)
        stops = _GOES_ON if stop_requests is None else _answer(stop_requests, whole_secs)
        answers = workers.gather(strategy, [left, stops])
        if not answers[:, 0].any():
            if stop_requests is not None:
                stop_requests.plan = SAVES
            return
        if answers[:, 1].any():
            where = f"with {left:,} of {total:,} batches left to skip"
            if _IS_ASKED not in answers[:, 1]:
                raise ValueError(
                    f"max_secs ended the process {where}, so the same command would never train: raise max_secs, or "
                    "use distloop.make_dataset, whose data is at its place at once."
                )
            why = (stop_requests and stop_requests.reason) or f"by worker {answers[:, 1].argmax()}"
            raise Interrupted(f"Interrupted {why} {where}", has_trained=False)
        if not is_announced and whole_secs > _SILENT_SECS:
            is_announced = True
            if say is not None:
                say(
                    f"Skipping {total:,} batches already seen (about {whole_secs:,.0f} s); data of "
                    "distloop.make_dataset is at its place at once."
                )
        if is_announced and show_progress is not None:
            show_progress(done, "skipping batches already seen")


def _answer(stop_requests: StopRequests, whole_secs: float) -> int:
    """Returns whether this worker is to stop, and why, if the reading takes so long as a whole."""
    if stop_requests.reason is None:
        return _GOES_ON
    return _IS_TOO_SLOW if stop_requests.is_out_of_time and whole_secs >= stop_requests.max_secs else _IS_ASKED
