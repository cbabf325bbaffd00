"""Profiler: profiles a window of steps for TensorBoard's profile plugin.

    profile = Profile("100:110", "run/train")
    boundary = min(boundary, profile.next_boundary(step))
    with profile.loop(step):        # profiled if the step is in the window
        ...
    profile.close()

The plugin does not recognize the steps inside a compiled loop. Therefore steps are called one by one in the window, and
the one before it, which traces; the gap between two of them in the profile is the cost of such a call.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from distloop.log import log
from distloop.settings.durations import profile_window


class Profile:
    """Starts the profiler at the first step of a window, marks each step, and stops it after the last.

    One process writes; in the others it only says which steps run by themselves, which must be alike everywhere.
    """

    def __init__(self, window: str, directory: str, *, writes: bool = True):
        """Stores the window; starts nothing.

        Args:
            window: `"100:110"` for steps 101 to 110; empty: no profile.
            directory: the TensorBoard run to write the profile to.
            writes: whether this process profiles.
        """
        self._window = profile_window(window)
        self._writes = writes
        self._directory = directory
        self._is_on = False

    def next_boundary(self, step: int) -> float:
        """Returns the step at which a loop that starts at `step` must end at the latest."""
        start, stop = self._window
        return start - 1 if step < start - 1 else step + 1 if step < stop else float("inf")

    def is_single(self, step: int) -> bool:
        """Returns True if the next step must be called by itself."""
        start, stop = self._window
        return start - 1 <= step < stop

    @contextlib.contextmanager
    def loop(self, step: int) -> Iterator[None]:
        """Profiles the block if its step is in the window.

        Args:
            step: number of steps done before it.
        """
        start, stop = self._window
        if not self._writes or not start <= step < stop:
            yield
            return
        if not self._is_on:
            try:
                tf.profiler.experimental.start(self._directory)
                self._is_on = True
            except tf.errors.OpError as error:  # another profiler is running, or a GPU's tools are missing
                log.warning("These steps are not profiled: %s", error.message)
                self._writes = False
        with tf.profiler.experimental.Trace("train", step_num=step + 1, _r=1):  # _r=1: a step, for the plugin
            yield
        if step + 1 == stop:
            self.close()

    def close(self) -> None:
        """Stops the profiler and writes the profile, also if the run ends inside the window."""
        if self._is_on:
            self._is_on = self._writes = False
            try:
                tf.profiler.experimental.stop()
            except (tf.errors.OpError, OSError) as error:
                log.error("The profile is lost: %s", error)
