"""One bad example among 1,437 makes the loss jump; three commands find it: a diff, and a replay of one step.

    python -m experiments.bad_example --workdir=runs/clean --device=cpu
    python -m experiments.bad_example --workdir=runs/planted --device=cpu --bad_row=814

Two runs that should be equal end with different losses. Where do they differ first?

    python -m distloop.report --diff runs/clean runs/planted

It names what else differs (the data's content), the first step whose numbers do, and the command to look at that step:

    python -m experiments.bad_example --flagfile=runs/planted/flags.txt --workdir=runs/planted --replay=21

The largest loss of that step is nine times the next one, and beside it is the row of the data: 814. Which other steps
had it?

    python -m distloop.report runs/planted --steps-of 814

Measured on one CPU (2 cores): 9 s for each run, 4 s for the diff, 8 s for the replay.
"""

from absl import app, flags

import distloop
from experiments import datasets, digits

distloop.define_flags(steps=60, batch_size=64, log_every=1, checkpoint_every=10, keep_checkpoints=10)
BAD_ROW = flags.DEFINE_integer("bad_row", None, "The example whose pixels are 1,000 times too large.")


def main(_):
    config = distloop.Config.from_flags()
    distloop.prepare(config)
    rows = next(datasets.digits("train", 1437, shuffle=False).as_numpy_iterator())
    if BAD_ROW.value is not None:
        rows["image"] = rows["image"].copy()
        rows["image"][BAD_ROW.value] *= 1000.0
    train = distloop.make_dataset(rows, config.batch_size, shuffle=True, seed=0)
    result = distloop.Trainer(digits.model_fn, config).fit(train)
    print(f"training loss {result['loss']:.4f}")


if __name__ == "__main__":
    app.run(main)
