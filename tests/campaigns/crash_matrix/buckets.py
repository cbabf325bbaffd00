"""Scenarios of a workdir in a bucket: a machine is lost at a request, and another one, or the same, goes on.

python -m tests.campaigns.crash_matrix.buckets            # the whole matrix; writes docs/bucket_matrix.md
"""

import collections
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import sys
import tempfile
import threading
from unittest import mock

import distloop
from distloop.actions.write import JsonWriter
from distloop.bucket import bucket_workdir
from distloop.bucket.remote_directory import RemoteDirectory
from distloop.checkpoints.store import Checkpoints
from distloop.log import log
from distloop.workdir.run_lock import Pace
from tests.bucket.unreliable import URL, Killed, Unreliable, bucket, sealed_steps
from tests.campaigns.crash_matrix.scenarios import BEFORE, HAND, LOST, NEW, WRONG, values

FOLDER = pathlib.Path(__file__).resolve().parent
DOCS = FOLDER.parents[2] / "docs"
SHARES = (0.0, 0.3)  # of the requests that fail, are slow or are cut short
ROWS = (10, 20, 30)
PACE = Pace(10.0, 0.05, 0.0, 0.0)  # of the lock


class Alone:
    """The only worker."""

    index, count, is_chief = 0, 1, True

    def gather(self, value):
        return [value]

    def broadcast(self, value):
        return value


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A save into a workdir whose bucket has the checkpoints of steps 10, 20 and 30; 10 is one of the best."""

    name: str
    step: int  # that is saved
    version: int
    befores: tuple[tuple[int, int], ...]  # what a run may go on from if it was not
    keep: int  # number of checkpoints
    rows: tuple[int, ...] = (10, 20, 30)  # that stay: a run that goes back cuts off the later ones at once
    is_elsewhere: bool = False  # whether the run is new to the machine, which has to bring its files first


SCENARIOS = [
    Scenario("new step", 40, 0, ((30, 0),), keep=1),
    Scenario("new step", 40, 0, ((30, 0),), keep=3),
    Scenario("replaced step", 30, 1, ((30, 0),), keep=1),
    Scenario("after going back", 15, 1, ((30, 0), (10, 0)), keep=3, rows=(10,)),
    Scenario("on another machine", 40, 0, ((30, 0),), keep=1, is_elsewhere=True),
]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A request at which a machine is lost, and what came of it."""

    number: int  # of the request
    request: str  # its kind and path
    share: float  # of the requests that fail
    is_fresh: bool  # whether another machine goes on; else the same one does, with its staging directory
    colour: str  # what the run goes on from


def open_workdir(keep):
    config = distloop.Config(workdir=URL, keep_checkpoints=keep, console="quiet")
    return bucket_workdir.Workdir(config, Alone()), config.local_workdir


def save(root, keep, step, version=0, best=None):
    """Writes a row, and saves a checkpoint."""
    store = Checkpoints(os.path.join(root, "checkpoints"), keep)
    if not (version and step in ROWS):
        rows = JsonWriter(os.path.join(root, "metrics.jsonl"), step - 1)
        rows.write(step, {"loss": float(version)}, 0.0)
        rows.close()
    store.save(step, values(step, version), {}, best)
    store.wait()


def cache():
    return os.environ["XDG_CACHE_HOME"]


def template():
    return f"{cache()}.template"


def prepare(scenario):
    """Saves what is there before; returns the content of the bucket."""
    shutil.rmtree(cache(), ignore_errors=True)
    shutil.rmtree(template(), ignore_errors=True)
    Unreliable.store.clear()
    with bucket(share=0.0):
        place, root = open_workdir(keep=3)
        with place:
            for step in ROWS:
                save(root, 3, step, best={"score": [10]})
    if scenario.is_elsewhere:
        shutil.rmtree(cache())
    else:
        shutil.copytree(cache(), template())
    return {path: file.getvalue() for path, file in Unreliable.store.items()}


def act(scenario, content, **faults):
    """Saves in the workdir; returns the requests, and whether the upload was reported as done."""
    shutil.rmtree(cache(), ignore_errors=True)
    if os.path.isdir(template()):
        shutil.copytree(template(), cache())
    Unreliable.store.clear()
    with bucket(share=0.0):
        for path, data in content.items():
            Unreliable().pipe_file(path, data)
    with bucket(**faults) as drawn:
        place, root = open_workdir(scenario.keep)
        try:
            with place:
                save(root, scenario.keep, scenario.step, scenario.version, {"last": [scenario.step]})
        except (Killed, OSError, ValueError) as error:
            if not drawn.is_dead:
                raise AssertionError(f"{scenario.name}: {error}") from error
        return drawn.requests, not drawn.is_dead


def judge(scenario, is_fresh, was_told, seed, share):
    """Returns the colour."""
    if is_fresh:
        shutil.rmtree(cache(), ignore_errors=True)
    with bucket(seed, share):
        place, root = open_workdir(scenario.keep)
        try:
            with place:
                store = Checkpoints(os.path.join(root, "checkpoints"), scenario.keep)
                saved, best = store.load_newest(), store.best_steps
                if saved is None:
                    return LOST
                is_best_there = 10 in best.get("score", []) and all(store.load(s) for b in best.values() for s in b)
                rows = steps_of(os.path.join(root, "metrics.jsonl"))
                save(root, scenario.keep, 50)
        except (OSError, ValueError):
            return HAND
    version = int(saved.values["kernel"][0]) % 10
    colour = NEW if (saved.step, version) == (scenario.step, scenario.version) else BEFORE
    if colour == BEFORE and (saved.step, version) not in scenario.befores:
        colour = LOST
    if int(saved.values["kernel"][0]) // 10 != saved.step:
        return WRONG
    new_rows = {scenario.step} if colour == NEW else set()
    if not is_best_there or was_told and colour == BEFORE or not {*scenario.rows, *new_rows} <= set(rows):
        colour = LOST
    with bucket(share=0.0):
        files = RemoteDirectory(URL).list()
        steps = sealed_steps(files)
        rows = steps_of(RemoteDirectory(URL).read("metrics.jsonl"))
    left_over = [path for path in files if path.endswith(".tmp") or ".old/" in path or path == "run.lock"]
    if steps[-1:] != [50] or left_over or len(set(rows)) != len(rows) or rows[-1] != 50:
        return HAND
    return colour


def steps_of(rows):
    if isinstance(rows, str):
        rows = pathlib.Path(rows).read_bytes()
    return [json.loads(line)["step"] for line in rows.splitlines()]


def cells(scenario, share, is_fresh, every=1, offset=0):
    """Loses the machine at each request, or at every so many; returns the cells."""
    content = prepare(scenario)
    requests, _ = act(scenario, content, share=share, seed=0)
    result = []
    for number in range(offset, len(requests), every):
        seed = number + 1
        requests_until, was_told = act(scenario, content, share=share, seed=seed, kill_at=number)
        request = " ".join(requests_until[min(number, len(requests_until) - 1)])
        colour = judge(scenario, is_fresh, was_told, seed + 1000, share)
        result.append(Cell(number, request.replace("/bucket/run/", ""), share, is_fresh, colour))
    return result


def main() -> int:
    """Writes the page; returns the process's code: 1 if a cell is not green."""
    log.setLevel("CRITICAL")
    threading.excepthook = lambda _: None  # of machines that are lost
    lines, bad = [], []
    with tempfile.TemporaryDirectory() as place, mock.patch.dict(os.environ, XDG_CACHE_HOME=f"{place}/cache"):
        with mock.patch.object(RemoteDirectory, "pace", PACE):
            for scenario, share, is_fresh in itertools.product(SCENARIOS, SHARES, (True, False)):
                block = cells(scenario, share, is_fresh)
                counts = collections.Counter(cell.colour for cell in block)
                bad += [(scenario.name, cell) for cell in block if cell.colour not in (NEW, BEFORE)]
                who = "another machine" if is_fresh else "the same machine"
                numbers = (counts[colour] for colour in (NEW, BEFORE, LOST, HAND, WRONG))
                line = (scenario.name, scenario.keep, f"{share:.0%}", who, len(block), *numbers)
                lines.append("| " + " | ".join(map(str, line)) + " |")
                print(lines[-1], flush=True)
    text = (FOLDER / "bucket_page.md").read_text()
    (DOCS / "bucket_matrix.md").write_text(text.format(table="\n".join(lines)))
    for cell in bad:
        print(cell)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
