"""Data by number of 10 million rows that notes what is read, and runs that are anywhere in it, for tests."""

import numpy as np
import tensorflow as tf

import distloop
from tests.problems import weights

COUNT = 10_000_000
PER_EPOCH = COUNT // 16  # batches of 16


class ManyRows:
    """Rows that hold their numbers; `asked` lists those that were read."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return COUNT

    def __getitem__(self, row):
        self.asked.append(row)
        return {"row": row}


def augmented(source):
    """Returns shuffled, augmented batches of 16 rows for `classifier`, and the list of those that it has given."""

    def augment(example, seed):
        x = tf.sin(tf.cast(example["row"] + 1, tf.float32) * tf.range(1.0, 9.0))
        label = tf.cast(x[0] > 0, tf.int64) + 2 * tf.cast(x[1] > 0, tf.int64)
        return {"x": x + 0.1 * tf.random.stateless_normal([8], seed), "label": label, "row": example["row"]}

    def note(x, row):
        given.append((row, x))
        return x

    def watch(batch):
        x = tf.numpy_function(note, [batch["x"], batch["row"]], tf.float32)
        return {**batch, "x": tf.ensure_shape(x, [None, 8])}

    given = []
    return distloop.make_dataset(source, 16, shuffle=True, seed=3, map_fn=augment).map_rows(watch), given


def save_at(trainer, step):
    """Writes a checkpoint of a trainer that has run, as if it had come to a step."""
    trainer.state.step.assign(step)
    trainer._train_source.batches_taken = step
    trainer.save()


def over_the_end_of_an_epoch(make, workdir, begins_at=PER_EPOCH - 8, ends_at=PER_EPOCH + 4):
    """Trains from a few steps before the end of an epoch on, or goes on from a checkpoint in the workdir.

    Returns:
        The weights; under names that begin with `local/` the rows that were asked for, and the batches as this worker
        has read them.
    """
    rows = ManyRows()
    data, given = augmented(rows)
    if begins_at is not None:
        trainer = make(workdir)
        trainer.fit(data, steps=1)
        save_at(trainer, begins_at)
        rows.asked.clear()
        given.clear()
    trainer = make(workdir)
    trainer.fit(data.fresh(), steps=ends_at)
    return {
        **weights(trainer),
        "local/asked": np.array(rows.asked),
        "local/rows": np.stack([row for row, _ in given]),
        "local/x": np.stack([x for _, x in given]),
    }
