"""Moving average of a table, in which a step touches only the rows of its batch.

    a_t = w + (a_s - w) * d_(s+1) * ... * d_t        for a row that has the weights w since step s; d is the decay

So a step reads and writes the rows of its batch alone.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from distloop.optimizers import gradients
from distloop.optimizers.gradients import write_rows
from distloop.optimizers.slot_placement import MovingAverage
from distloop.tables import row_updates
from distloop.tables.row_updates import read_rows
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
        self.shards = (self._rows,)
        self.name, self.shape, self.dtype = self._rows.name, self._rows.shape, self._rows.dtype
        self._is_sparse = False  # the gradient of the update that is traced

    @property
    def device(self) -> str:
        """The name of the device that holds the average."""
        device: str = self._rows.device
        return device

    def value(self) -> tf.Tensor:
        """Returns the average, up to date."""
        return self._up_to_date(tf.identity(self._rows), tf.identity(self._table), tf.identity(self._marks))

    def assign(self, value: Any) -> None:
        """Sets the average as of the current step."""
        self._rows.assign(value)
        self._marks.assign(tf.zeros_like(self._marks))
        self._decay.assign(tf.zeros_like(self._decay))

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
        rows, weights = (read_rows(variable, numbers) for variable in (self._rows, self._table))
        write_rows(self._rows, numbers, self._up_to_date(rows, weights, read_rows(self._marks, numbers)))
        write_rows(self._marks, numbers, tf.fill(tf.shape(numbers), tf.identity(self._decay)))

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


class AverageByRows(MovingAverage):
    """The moving averages of variables of which some are tables whose rows an optimizer updates without the others."""

    def __init__(self, variables: Sequence[Any], decay: float, tables: set[int]):
        """Creates the averages with the variables' values, as `MovingAverage` does; `tables` by `id`."""
        self._tables = frozenset(tables)
        super().__init__(variables, decay)

    def _make(self, variable: Any) -> Any:
        return TableAverage(variable) if id(variable) in self._tables else super()._make(variable)

    def _swapped(self) -> list[tuple[Any, Any]]:
        return [(variable, average) for variable, average in self.pairs if not isinstance(average, TableAverage)]

    @property
    def stored(self) -> Sequence[tf.Variable]:
        """The variables that hold the averages."""
        lists = [a.stored.values() if isinstance(a, TableAverage) else [a] for a in self.variables]
        return [variable for stored in lists for variable in stored]

    def touch(self, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Brings up to date the rows that an update is about to change; in replica context."""
        for variable, gradient in zip(variables, gradients, strict=True):
            if isinstance(average := self._averaged[id(variable)], TableAverage):
                average.touch(gradient)

    def _move(self, variable: Any, average: Any, rate: tf.Tensor) -> None:
        if isinstance(average, TableAverage):
            average.move(rate)
        else:
            super()._move(variable, average, rate)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Enters a scope in which the variables have the averaged values; restores every bit on exit."""
        tables = [(variable, a) for variable, a in self.pairs if isinstance(a, TableAverage)]
        weights = [tf.identity(tensorflow_variable(variable)) for variable, _ in tables]
        with super().applied():
            for variable, average in tables:
                variable.assign(tf.convert_to_tensor(average))
            try:
                yield
            finally:
                for (variable, _), weight in zip(tables, weights, strict=True):
                    variable.assign(weight)


def make_average(variables: Sequence[Any], decay: float, trained: Sequence[tuple[Any, Any]]) -> MovingAverage:
    """Returns the moving averages of variables, those of tables by rows where optimizers update rows alone.

    Args:
        variables: the variables to average.
        decay: as for `MovingAverage`.
        trained: pairs of an optimizer and a variable.

    Raises:
        ValueError: if an optimizer is lazy, and the average would move all rows of its tables.
    """
    for name in (type(optimizer).__name__ for optimizer, _ in trained if getattr(optimizer, "is_lazy", False)):
        raise ValueError(
            f"average_decay or average_from was given with {name}, which changes the rows of a batch alone, but a "
            "moving average moves every row of a table at each step: leave it out, or give "
            f"keras.optimizers.{name[4:]}."
        )
    dense = {id(v) for optimizer, v in trained if row_updates.why_dense(optimizer, v) is not None}
    sizes = {id(v): tf.as_dtype(v.dtype).size * (tf.TensorShape(v.shape).num_elements() or 0) for _, v in trained}
    tables = {i for i, size in sizes.items() if i not in dense and size > gradients.LARGEST_PACKED_BYTES}
    if decay == 1.0:  # an equal average forgets all before its first step, which no sum of logarithms can
        return MovingAverage(variables, decay)
    return AverageByRows(variables, decay, tables)
