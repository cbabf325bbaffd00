"""Profiler: profiles a window of steps for TensorBoard's profile plugin, and reads how busy each device was.

    profile = Profile("100:110", "run/train")
    boundary = min(boundary, profile.next_boundary(step))
    with profile.loop(step):        # profiled if the step is in the window
        ...
    profile.close()

The plugin does not recognize the steps inside a compiled loop. Therefore steps are called one by one in the window, and
the one before it, which traces; the gap between two of them in the profile is the cost of such a call.
"""

import collections
import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from distloop.log import log
from distloop.settings.durations import profile_window

FIRST_MAP = "first map"  # of a pipeline over the numbers of batches


class Profile:
    """Starts the profiler at the first step of a window, marks each step, and stops it after the last.

    One process writes; in the others it only says which steps run by themselves, which must be alike everywhere.

    Attributes:
        directory: the TensorBoard run that the profile is written to.
        is_written: whether the profile has been written.
    """

    def __init__(self, window: str, directory: str, *, writes: bool = True):
        """Stores the window; starts nothing.

        Args:
            window: `"100:110"` for steps 101 to 110; empty: no profile.
            directory: as the attribute.
            writes: whether this process profiles.
        """
        self._window = profile_window(window)
        self._writes = writes
        self.directory = directory
        self.is_written = False
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
                tf.profiler.experimental.start(self.directory)
                self._is_on = True
            except tf.errors.OpError as error:  # another profiler is running, or a GPU's tools are missing
                log.warning("These steps are not profiled: %s", error.message)
                self._writes = False
        with tf.profiler.experimental.Trace("train", step_num=step + 1, _r=1):  # _r=1: a step, for the plugin
            yield
        if step + 1 == stop:
            self.close()

    def close(self) -> None:
        """Stops the profiler and writes the profile, also if the run ends inside the window.

        Nothing is written if the directory is gone.
        """
        if self._is_on:
            self._is_on = self._writes = False
            try:
                is_there = os.path.isdir(self.directory)
                tf.profiler.experimental.stop(save=is_there)
                self.is_written = is_there
            except (tf.errors.OpError, OSError) as error:
                log.error("The profile is lost: %s", error)


def pipeline_secs(iterator: Any) -> dict[str, float]:
    """Returns the seconds that threads have worked on each kind of operation of a pipeline, as tf.data measures them.

    Args:
        iterator: of tf.data; for another one the result is empty.
    """
    if not isinstance(iterator, tf.data.Iterator):
        return {}
    nodes, secs = tf.data.experimental.get_model_proto(iterator).nodes, collections.defaultdict[str, float](float)
    for node in nodes.values():
        is_first = [nodes[i].name for i in node.inputs] == ["Range"] and "Map" in node.name
        secs[FIRST_MAP if is_first else re.sub(r"^Parallel|V\d+$", "", node.name)] += node.processing_time / 1e9
    return dict(secs)
