"""Dated workdirs: `runs/digits-{time}` is a new directory for each run; the same command finds its unfinished run.

    config = resolve(config, Workers(strategy))     # workdir="runs/digits-20261123-184500"

A run is this command's if its `config.json` holds the same settings and flags.
"""

import dataclasses
import glob
import json
import os
import time

from distloop import urls
from distloop.distributed.workers import Workers
from distloop.monitoring import records, run_files, run_lock
from distloop.settings import flags
from distloop.settings.config import Config

TIME = "{time}"
_FORMAT = "%Y%m%d-%H%M%S"
_DIGITS = "[0-9]" * 8 + "-" + "[0-9]" * 6  # what the format writes; for glob

_chosen: set[str] = set()  # by this process, whose `fit` makes the directory later


def resolve(config: Config, workers: Workers) -> Config:
    """Returns the settings with the date and time in place of `{time}` in the workdir, the same on all workers.

    The workdir and `init_from` are absolute: a program that changes its directory goes on in the same one.
    """
    workdir = config.workdir
    if TIME in workdir:
        workdir = workers.broadcast(_choose(config) if workers.is_chief else None)
    return dataclasses.replace(config, workdir=urls.absolute(workdir), init_from=urls.absolute(config.init_from))


def _choose(config: Config) -> str:
    """Returns the workdir of this command's newest run that has not ended and that no process trains, or a new one."""
    pattern = _DIGITS.join(map(glob.escape, config.workdir.split(TIME)))
    settings = _without_workdir(json.loads(flags.as_json(config)))
    for path in sorted(glob.glob(pattern), reverse=True):
        if _settings_of(path) == settings and not run_files.has_ended(path) and not run_lock.is_held(path):
            return path
    while _is_taken(path := config.workdir.replace(TIME, time.strftime(_FORMAT))):
        time.sleep(0.1)  # another run began within this second
    _chosen.add(os.path.abspath(path))
    return path


def _is_taken(path: str) -> bool:
    return os.path.exists(path) or os.path.abspath(path) in _chosen


def _settings_of(path: str) -> dict[str, object] | None:
    file = os.path.join(path, "config.json")
    return records.read_json(file, _without_workdir, instead="its run is not taken for this command's")


def _without_workdir(settings: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if name != "workdir"}
