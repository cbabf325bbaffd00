"""Passes over finite datasets, as evaluation and prediction make them; the latest datasets are remembered."""

import tensorflow as tf

from distloop.data.arrays import are_arrays
from distloop.data.source import Data, Source

_MAX_REMEMBERED = 8  # preparing a dataset takes as long as a short pass over it


class Passes:
    """The sources of the latest datasets that were read in passes.

    Attributes:
        batch_size: of arrays, the examples in a global batch.
    """

    def __init__(self, strategy: tf.distribute.Strategy, batch_size: int, virtual_replicas: int = 0):
        """Starts without sources.

        Args:
            strategy: whose replicas share out each batch.
            batch_size: of arrays, the examples in a global batch.
            virtual_replicas: as `Config.virtual_replicas`.
        """
        self._strategy = strategy
        self._virtual_replicas = virtual_replicas
        self.batch_size = batch_size
        self._sources: list[Source] = []  # the latest first

    def source(self, data: Data, *, may_be_endless: bool = False) -> Source:
        """Returns the source of a dataset: a new one, unless the same object is among the latest.

        Args:
            data: a dataset, a function of `tf.distribute.InputContext`, a `DistributedDataset`, or arrays.
            may_be_endless: whether the caller ends a pass over endless data itself.

        Raises:
            ValueError: if the data breaks a rule, or is endless and may not be.
        """
        source = next((s for s in self._sources if s.data is data), None)
        source = source or Source(
            data,
            self._strategy,
            virtual_replicas=self._virtual_replicas,
            repeat=False,
            batch_size=self.batch_size,
        )
        if source.info.is_endless and not may_be_endless:
            raise ValueError(
                "The dataset given to measure on is endless; one pass over it never ends: use take(batches)."
            )
        if not are_arrays(data):  # a copy of arrays is as large as they are, and they may change in place
            self._sources = [source, *(s for s in self._sources if s is not source)][:_MAX_REMEMBERED]
        return source
