"""Trains public models under each of distloop's promises, and writes a table of what holds.

pip install -e ".[public-models]"
python -m experiments.public_models --models="ResNet50$|hub/Bert" --trials=one_replica,replicas_2
python -m experiments.public_models                  # all: hours; the same command goes on where it was stopped
python -m experiments.public_models --page           # writes docs/public_models.md from what is done
"""

import re

from absl import app, flags

from experiments.public_models import page, schedule, trials, zoo

_MODELS = flags.DEFINE_string("models", "", "A regular expression on the models' names; empty: all.")
_TRIALS = flags.DEFINE_list("trials", list(trials.TRIALS), "Trials to run, in this order.")
_DIRECTORY = flags.DEFINE_string("directory", "runs/public_models", "Where weights and cells.jsonl are kept.")
_LIMIT_SECS = flags.DEFINE_float("limit_secs", 900.0, "The longest time of one trial.", lower_bound=1)
_PAGE = flags.DEFINE_bool("page", False, "Write the page from the cells that are done, and run nothing.")


def main(_):
    if not _PAGE.value:
        models = [name for name in zoo.NAMES if re.search(_MODELS.value, name)]
        schedule.run(models, _TRIALS.value, _DIRECTORY.value, _LIMIT_SECS.value)
    page.write(schedule.read(_DIRECTORY.value), is_page=_PAGE.value)


if __name__ == "__main__":
    app.run(main)
