"""Moving average of a table of which a step changes few rows: a row is brought up to date before its weights change.

    a_t = w + (a_s - w) * d_(s+1) * ... * d_t        for a row that has the weights w since step s; d is the decay

So a step reads and writes the rows of its batch alone. It does not know which rows these are, or what the decay is.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from distloop.optimizers import row_updates
from distloop.variables import ComposedVariable, tensorflow_variable


class TableAverage(ComposedVariable):
    """The moving average of a table; for all but its own methods, a variable with the average of today.

    Attributes:
        stored: its variables by name: `rows`, each the average of the step at which it was brought up to date; `marks`,
            `[rows of the table]`: what `decay` was then; `decay`: the sum of log(d) since all rows were up to date.
        name, shape, dtype: of the average.
    """

    def __init__(self, table: Any):
        """Creates the average with the table's values; in the strategy's scope."""
        self._table = tensorflow_variable(table)
        self._rows = tf.Variable(tf.convert_to_tensor(table), trainable=False)
        self._marks = tf.Variable(tf.zeros(self._table.shape[:1], tf.float64), trainable=False)
        self._decay = tf.Variable(tf.zeros([], tf.float64), trainable=False)
        self.stored = {"rows": self._rows, "marks": self._marks, "decay": self._decay}
        self.parts = (self._rows,)
        self.name, self.shape, self.dtype = self._rows.name, self._rows.shape, self._rows.dtype
        self.trainable = False
        self._is_sparse = False  # the gradient of the update that is traced

    @property
    def device(self) -> str:
        """The name of the device that holds it."""
        device: str = self._rows.device
        return device

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Returns the average, up to date."""
        value = self._up_to_date(tf.identity(self._rows), tf.identity(self._table), tf.identity(self._marks))
        return value if dtype is None else tf.cast(value, dtype)

    def assign(self, value: Any) -> None:
        """Sets the average of today."""
        self._rows.assign(value)
        self._marks.assign(tf.zeros_like(self._marks))
        self._decay.assign(tf.zeros_like(self._decay))

    def numpy(self) -> Any:
        """Returns the average of today as an array; eagerly."""
        return tf.convert_to_tensor(self).numpy()

    def touch(self, gradient: Any) -> None:
        """Brings up to date the rows that an update is about to change; in replica context.

        Args:
            gradient: of the table; None: it changes no row, one that is not sparse all of them.
        """
        self._is_sparse = gradient is None or isinstance(gradient, tf.IndexedSlices)
        if gradient is None:
            return
        if not self._is_sparse:
            tf.cond(tf.equal(self._decay, 0), lambda: None, lambda: self.assign(tf.convert_to_tensor(self)))
            return
        numbers = gradient.indices
        rows, weights = (row_updates.read(variable, numbers) for variable in (self._rows, self._table))
        row_updates.write(self._rows, numbers, self._up_to_date(rows, weights, row_updates.read(self._marks, numbers)))
        row_updates.write(self._marks, numbers, tf.fill(tf.shape(numbers), tf.identity(self._decay)))

    def move(self, rate: tf.Tensor) -> None:
        """Moves the average towards the weights by a rate, `1 - d`, after an update; in replica context."""
        if self._is_sparse:
            self._decay.assign_add(tf.math.log1p(-tf.cast(rate, tf.float64)))
        else:
            self._rows.assign_add(tf.cast(rate, self.dtype) * (tf.identity(self._table) - self._rows))

    def raw(self) -> dict[str, tf.Tensor]:
        """Returns what is stored, by name, with which a run goes on with the same bits; {} if it is the average."""
        return {} if not self._decay.numpy() else {name: tf.identity(v) for name, v in self.stored.items()}

    def restore_raw(self, values: Mapping[str, tf.Tensor]) -> None:
        """Sets what is stored to what `raw` returned."""
        for name, variable in self.stored.items():
            if name in values:
                variable.assign(values[name])

    def _up_to_date(self, rows: tf.Tensor, weights: tf.Tensor, marks: tf.Tensor) -> tf.Tensor:
        """Returns the average of today of some rows, `[n, ...]`, which has been `rows` at their marks, `[n]`."""
        shape = [-1, *(1 for _ in rows.shape[1:])]
        passed = tf.reshape(tf.identity(self._decay) - marks, shape)
        moved = weights + (rows - weights) * tf.cast(tf.exp(passed), rows.dtype)
        return tf.where(tf.equal(passed, 0), rows, moved)
