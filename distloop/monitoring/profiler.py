"""Owns the profile of some steps, for TensorBoard's profile plugin.

    profile = Profile("100:110", "run/summaries/train")
    boundary = min(boundary, profile.next_boundary(step))
    with profile.loop(step):        # profiled if the window says so
        ...
    profile.close()

The plugin takes each turn of a compiled loop for a step, and then finds none. So in the window, and for the step before
it, which traces, steps are called one by one; what lies between two of them is what such a call costs.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from absl import logging

from distloop.config import profile_window


class Profile:
    """Starts the profiler when the first step of a window comes, names each, and stops it after the last.

    Attributes:
        directory: of a TensorBoard run, to which the profile is written.
        is_written: whether it was.
    """

    def __init__(self, window: str, directory: str):
        """Plans; starts nothing.

        Args:
            window: `"100:110"`: the steps after 100, up to 110; empty: none.
            directory: as the attribute.
        """
        self._window = profile_window(window)
        self.directory = directory
        self.is_written = False
        self._is_on = False

    def next_boundary(self, step: int) -> float:
        """Tells where a loop that begins after so many steps ends at the latest."""
        start, stop = self._window
        return start - 1 if step < start - 1 else step + 1 if step < stop else float("inf")

    def is_single(self, step: int) -> bool:
        """Says whether the step after so many is to be called alone."""
        start, stop = self._window
        return start - 1 <= step < stop

    @contextlib.contextmanager
    def loop(self, step: int) -> Iterator[None]:
        """Profiles what is run meanwhile, if it is a step of the window.

        Args:
            step: how many steps are done.
        """
        start, stop = self._window
        if not start <= step < stop:
            yield
            return
        if not self._is_on:
            self._start()
        with tf.profiler.experimental.Trace("train", step_num=step + 1, _r=1):  # _r=1: a step, for the plugin
            yield
        if step + 1 == stop:
            self.close()

    def _start(self) -> None:
        try:
            tf.profiler.experimental.start(self.directory)
            self._is_on = True
        except tf.errors.OpError as error:  # another profile is on, or a GPU's tools are missing
            logging.warning("These steps are not profiled: %s", error.message)
            self._window = (0, 0)

    def close(self) -> None:
        """Writes what was profiled, where the run ends within the window, too."""
        if self._is_on:
            self._is_on = False
            self._window = (0, 0)
            try:
                tf.profiler.experimental.stop()
                self.is_written = True
            except (tf.errors.OpError, OSError) as error:
                logging.error("The profile is lost: %s", error)
