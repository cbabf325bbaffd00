"""Records the values of each example in each epoch of a run, and names the examples that look mislabelled.

    trainer.fit(train, actions=[distloop.ExampleHistory(values=("loss", "margin"))])
    numpy.load("runs/a/examples.npy")["margin"][3, 814]      # of row 814 in its fourth epoch
    rank_mislabelled("runs/a")[:20]                          # row numbers

`loss_fn` hands its values to a recorder among the Keras metrics, which gets them in the order of the batch, once for
each example, without padding. They stay on the device that computed them until the action is called or the run saved.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.atomic_files import replacing
from distloop.data.numbered import NumberedDataset
from distloop.data.shards import batch_size
from distloop.distributed import collectives, strategies
from distloop.distributed.devices import HOST
from distloop.examples.worst_examples import row_values
from distloop.log import shown
from distloop.model.metrics import Weighted
from distloop.model.state import TrainState
from distloop.settings.durations import require_integer
from distloop.training.action import Action, Report

FILE = "examples.npy"
_RECORDER = "example history"  # its name among the Keras metrics


class ExampleHistory(Action):
    """Writes what `loss_fn` returned for each example in each epoch to `examples.npy` in the workdir.

        trainer.fit(train, actions=[distloop.ExampleHistory(values=("loss", "margin"))])
        numpy.load("runs/a/examples.npy")["loss"]      # [epochs, rows], float32

    The values are those of the training step: of the weights before the step, with dropout and augmentation. Values
    `[B, T]` are means over T, with the weights of `distloop.weighted`. NaN stands for an example that the epoch has not
    had or that had no weight, and for a value that was NaN. A source of a mixture has its own epochs. After a stop or a
    kill the file goes on with the run; its bits are those of the run that never stopped.
    """

    phase = "recording examples"
    name = "ExampleHistory"

    def __init__(self, values: Sequence[str] = ("loss",), *, every: int | str = "1 epoch"):
        """Stores what to record.

        Args:
            values: names of values per example that `loss_fn` returns; of several updates, `<update>/<name>` of one.
            every: how often values go from the devices to the file, a duration in steps, epochs or examples. A device
                has memory for those of so many steps: 4 bytes for each value of each example.

        Raises:
            ValueError: if `values` are no names.
        """
        is_list = isinstance(values, Sequence) and not isinstance(values, str)
        if not is_list or not values or not all(isinstance(name, str) and name for name in values):
            raise ValueError(f"ExampleHistory was given values={shown(values)}; give names, as in values=('loss',).")
        self.every: int | str | None = every
        self._names = list(dict.fromkeys(values))
        self._removals = contextlib.ExitStack()  # of the recorder from the step
        self._recorder: Recorder | None = None
        self._history: Any = None  # [epochs, rows], of a field for each value
        self._call: Any = None  # a `FitCall`
        self._step = self._batch = 0  # the steps and batches whose values are in the file

    def set_fit(self, call: Any, loop: Any, checkpoints: Any) -> None:
        """Lets the step record the values; begins or reads the file.

        Raises:
            ValueError: if there is no workdir, the rows of the data have no numbers, the values are not those of one
                update, or the file is damaged or of other data or values.
        """
        self._call, self._verify = call, checkpoints.directory.verify
        self._step, self._batch = call.step, call.source.batches_taken
        capacity = self._capacity()
        self._history = self._read()
        self._removals.close()
        update, prefix = self._update()
        loss_fn, by_name = update.loss_fn, call.state.keras_metrics.by_name
        self._recorder = by_name[_RECORDER] = Recorder(call.state, len(self._names), capacity)
        guard = functools.partial(_add_recorded, [name.removeprefix(prefix) for name in self._names])
        loss_fn.guards.append(guard)
        self._removals.callback(loss_fn.guards.remove, guard)
        self._removals.callback(by_name.pop, _RECORDER)
        self._removals.callback(loop.trace_again)
        loop.trace_again()

    def __call__(self, report: Report) -> None:
        """Writes the values of the steps since the last call; all workers call it."""
        self._flush()

    def get_state(self) -> None:
        """Writes the values of the steps before a checkpoint, which then needs none."""
        self._flush()

    def on_end(self, report: Report) -> None:
        """Takes the recorder out of the step; a save after an error still writes what it has."""
        self._removals.close()

    def _capacity(self) -> int:
        """Returns the largest number of examples from one call to the next."""
        call, feed = self._call, self._call.source.numbered
        if not call.config.workdir:
            raise ValueError(f"ExampleHistory writes {FILE} into the workdir, and there is none: give workdir=....")
        if feed is None or _has_other_rows(feed):
            raise ValueError(
                "ExampleHistory was given data whose rows have no numbers, such as a worker's own shard, or batches "
                "that a map gave another number of rows: give fit arrays, or distloop.make_dataset."
            )
        if call.config.jit_compile == "loop":
            raise ValueError(
                "ExampleHistory was given with jit_compile=loop, whose steps keep no values: use jit_compile=pass."
            )
        steps = call.units.period(self.every).steps
        if not steps:
            raise ValueError(
                f"ExampleHistory was given every={shown(self.every)}; it takes steps, epochs or examples, as a device "
                "has memory for the values of so many: every='1 epoch'."
            )
        sizes = getattr(feed.order, "batch_sizes", [(0, feed.batch_size)])
        return steps * max(size for _, size in sizes)

    def _update(self) -> tuple[Any, str]:
        """Returns the update whose `loss_fn` returns the values, and what their names begin with."""
        updates = self._call.state.spec.updates
        for update in (update for update in updates if update.has_loss):
            prefix = f"{update.name}/" if update.name else ""
            if all(name.startswith(prefix) for name in self._names):
                return update, prefix
        raise ValueError(
            f"ExampleHistory was given values={self._names}, which no loss_fn returns; there are the updates "
            f"{[update.name for update in updates]}: give values of one of them, as in values=('critic/loss',)."
        )

    def _read(self) -> np.ndarray:
        """Returns the values in the file, `[epochs, rows]`, on the chief; on the others zeros of the same dtype."""
        path, rows = os.path.join(self._call.config.local_workdir, FILE), self._call.source.feed.order.num_rows
        history = np.zeros([0, rows], [(name, np.float32) for name in self._names])
        problem = ""
        if self._call.is_chief and self._step and os.path.exists(path):
            found = _load(path)
            if found is None:
                found, problem = history, f"a workdir whose {path!r} is damaged"
            elif not self._batch:
                problem = f"other data at step {self._step} than {path!r} is of"
            elif (found.dtype, found.shape[1:]) != (history.dtype, history.shape[1:]):
                has = f"{found.shape[1]} and {found.dtype.names}"
                problem = f"{rows} rows and values={self._names}, and {path!r} has {has}"
            history = found
        if problem := collectives.Workers(self._call.state.strategy).broadcast(problem):
            raise ValueError(f"ExampleHistory was given {problem}: give those, or move the file away.")
        return history

    def _flush(self) -> None:
        """Writes the values of finished steps that the devices have; all workers call it."""
        call, step = self._call, 0 if self._call is None else self._call.step
        if self._recorder is None or step <= self._step:
            return
        of_workers = collectives.gather(call.state.strategy, self._recorder.take())
        if call.is_chief:
            self._add(step, [pair for of_replicas in of_workers for pair in of_replicas])
            self._verify()
            path = os.path.join(call.config.local_workdir, FILE)
            with replacing(path, verify=self._verify) as temporary, open(temporary, "wb") as file:
                np.save(file, self._history)
        self._step, self._batch = step, call.source.batches_taken

    def _add(self, end: int, of_replicas: Sequence[Any]) -> None:
        """Adds the values of the steps up to one, given steps `[n]` and values `[n, V]` of each replica."""
        source = self._call.source
        batches = (n for n in range(self._batch, source.batches_taken) if n not in source.skipped_batches)
        for step, batch in zip(range(self._step, end), batches, strict=False):
            rows, epochs = source.feed.examples_of(batch)
            bounds = [np.searchsorted(steps, [step, step + 1]) for steps, _ in of_replicas]
            pieces = [values[first:last] for (first, last), (_, values) in zip(bounds, of_replicas, strict=True)]
            if not any(map(len, pieces)):
                continue  # of a `fit` without this action
            missing = max(epochs) + 1 - len(self._history)
            if missing > 0:
                more = np.full([missing, self._history.shape[1]], np.nan, self._history.dtype)
                self._history = np.concatenate([self._history, more])
            for name, values in zip(self._names, np.concatenate(pieces).T, strict=True):
                self._history[name][epochs, rows] = np.where(np.isnan(values), np.nan, values)  # of one sign


def _has_other_rows(feed: NumberedDataset) -> bool:
    """Returns whether the first batch has another number of rows than its order says, by a function over batches."""
    return not feed.are_rows_alike and int(batch_size(feed.first_rows())) != len(feed.examples_of(0)[0])


@contextlib.contextmanager
def _add_recorded(names: Sequence[str], arguments: Sequence[Any], returned: list[Any]) -> Iterator[None]:
    """Adds some values that `loss_fn` returns, in training, as the arguments of the recorder; with names, a guard."""
    yield
    outputs, is_training = returned[0], arguments[1]
    if not is_training or not isinstance(outputs, dict):
        return
    for name in names:
        value = outputs.get(name)
        if value is None or (isinstance(value, tuple) and not isinstance(value, Weighted)):
            raise ValueError(
                f"ExampleHistory was given the value {name!r}, and loss_fn returns {sorted(outputs)}: return one "
                "number for each example under that name."
            )
    returned[0] = outputs | {_RECORDER: tuple(row_values(outputs[name], np.nan) for name in names)}


class Recorder:
    """Keeps the values of examples on each replica, as a Keras metric that has no result."""

    is_of_layer = True  # evaluations may leave it alone
    variables = ()

    def __init__(self, state: TrainState, num_values: int, capacity: int):
        """Creates variables for the values of so many examples."""
        self._step, self._devices = state.step, strategies.replica_devices(state.strategy)
        self._values, self._steps, self._counts = [], [], []
        for device in self._devices:
            with tf.device(device):
                self._values.append(tf.Variable(tf.zeros([capacity, num_values]), trainable=False))
            with tf.device(HOST):
                self._steps.append(tf.Variable(tf.zeros([capacity], tf.int64), trainable=False))
                self._counts.append(tf.Variable(0, dtype=tf.int64, trainable=False))
        state.outside_variables.allow([*self._values, *self._steps, *self._counts])

    def update_state(self, *values: tf.Tensor) -> None:
        """Stores the values of some examples, `[b]` each; in replica context."""
        replica = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
        replica, rows = replica % len(self._devices), tf.stack(values, 1)  # [b, V]
        size = batch_size(rows)
        with tf.device(HOST):
            count = self._counts[replica]
            indices = (count.read_value() + tf.range(tf.cast(size, tf.int64)))[:, tf.newaxis]
            indices %= self._steps[replica].shape[0]  # steps that are taken again are not read
            self._steps[replica].scatter_nd_update(indices, tf.fill([size], self._step.read_value()))
            count.assign_add(tf.cast(size, tf.int64))
        with tf.device(self._devices[replica]):
            self._values[replica].scatter_nd_update(indices, rows)

    def result(self) -> dict[str, Any]:
        """Returns nothing to report."""
        return {}

    def reset_state(self) -> None:
        """Does nothing: values are kept over several rows of a run."""

    def take(self) -> list[list[np.ndarray]]:
        """Returns the steps before each example and its values, `[n]` and `[n, V]`, of each replica; forgets them."""
        taken = []
        for values, steps, count in zip(self._values, self._steps, self._counts, strict=True):
            taken.append([steps[: int(count)].numpy(), values[: int(count)].numpy()])
            count.assign(0)
        return taken


def margin(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns by how much the logit of the label exceeds the largest other logit, float32 [B].

    Pleiss et al., "Identifying Mislabeled Data using the Area Under the Margin Ranking" (2020), equation 1.

    Args:
        labels: numbers of classes, `[B]` or `[B, 1]`. The margin of a label that is no number of a class is NaN.
        logits: `[B, C]` of two classes or more.

    Raises:
        ValueError: if the shapes are others.
    """
    logits, labels = tf.cast(logits, tf.float32), tf.cast(labels, tf.float64)  # in which 1.5 stays no class
    if logits.shape.rank not in (None, 2) or logits.shape[-1:].as_list() in ([0], [1]):
        raise ValueError(
            f"distloop.margin was given logits of shape {logits.shape}; it takes [B, C] of two classes or more: of a "
            "binary model with logits [B, 1], give tf.concat([tf.zeros_like(logits), logits], 1)."
        )
    rank = labels.shape.rank
    if rank == 0 or not labels.shape.is_compatible_with([logits.shape[0], 1][:rank]):
        raise ValueError(
            f"distloop.margin was given labels of shape {labels.shape} for logits {logits.shape}; labels are numbers "
            "of classes, [B] or [B, 1]: of one-hot labels, give tf.argmax(labels, 1)."
        )
    labels = tf.reshape(labels, tf.shape(logits)[:1])
    is_label = labels[:, None] == tf.cast(tf.range(tf.shape(logits)[1]), tf.float64)  # [B, C]
    own = tf.reduce_sum(tf.where(is_label, logits, 0.0), 1)
    margins = own - tf.reduce_max(tf.where(is_label, -np.inf, logits), 1)
    return tf.where(tf.reduce_any(is_label, 1), margins, np.nan)


def _load(path: str) -> Any:
    """Returns the values in a file, `[epochs, rows]`; None if it is damaged."""
    try:
        values = np.load(path, allow_pickle=False)
    except (ValueError, EOFError):
        return None
    return values if isinstance(values, np.ndarray) and values.ndim == 2 and values.dtype.names else None


def rank_mislabelled(workdir: str, *, epochs: int | None = None) -> np.ndarray:
    """Returns the numbers of a run's examples, those that look most mislabelled first.

    An example is ranked by its area under the margin, the mean of `margin` over the epochs (Pleiss et al. 2020): the
    labels of its neighbours pull its logits another way than its own label. Without margins it is ranked by its mean
    loss, the largest first.

    Args:
        workdir: of a run with `distloop.ExampleHistory`.
        epochs: how many to use, from the first; None: all. The paper stops where the learning rate first drops, as a
            model then learns its mislabelled examples by heart.

    Returns:
        The numbers of the rows, without those that had no value.

    Raises:
        ValueError: if there is no `examples.npy`, it is damaged or has neither margins nor losses, or `epochs` is no
            number.
    """
    path = os.path.join(workdir, FILE)
    if not os.path.isfile(path):
        raise ValueError(f"{workdir!r} holds no {FILE}: train with actions=[distloop.ExampleHistory(...)].")
    require_integer("rank_mislabelled", 1, epochs=1 if epochs is None else epochs)
    if (history := _load(path)) is None:
        raise ValueError(f"{path!r} is damaged: copy it again, or delete it and train again from a new workdir.")
    by_kind = {name.rpartition("/")[2]: name for name in history.dtype.names}
    name = by_kind.get("margin", by_kind.get("loss"))
    if name is None:
        raise ValueError(f"{path!r} has {list(history.dtype.names)}: record 'margin', as distloop.margin returns it.")
    values = history[name][: None if epochs is None else int(epochs)].astype(np.float64)  # [E, N]
    rows = np.flatnonzero(~np.isnan(values).all(0))
    means = np.nanmean(values[:, rows], 0)
    return rows[np.argsort(means if name == by_kind.get("margin") else -means, kind="stable")]
