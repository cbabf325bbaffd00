"""The schedule: trials in processes of their own, each with a time limit; a JSON line for each cell that is done.

    run(["ResNet50"], ["one_replica", "replicas_2"], "runs/public_models", limit_secs=600)

A trial whose cells are in the file already is not run again, so the same command goes on where it was stopped.
"""

import json
import multiprocessing
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.public_models import trials, zoo

_FORKS = multiprocessing.get_context(
    "forkserver"
)  # forks of a process that has imported TensorFlow, and not started it
_OF_EAGER = ("exact", "one_replica", "mixed_float16", "mixed_bfloat16", "split", "gpu_graph")


def read(directory: str) -> list[dict[str, Any]]:
    """Returns the cells that are done."""
    path = pathlib.Path(directory, "cells.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(models: Sequence[str], names: Sequence[str], directory: str, limit_secs: float) -> None:
    """Runs trials of models, those that are done left out, and appends their cells to `cells.jsonl`."""
    _FORKS.set_forkserver_preload(["experiments.public_models.trials"])
    os.makedirs(directory, exist_ok=True)
    done = {(cell["model"], cell["trial"]) for cell in read(directory)}
    for trial in names:
        for model in models:
            if (model, trial) in done or not _is_wanted(model, trial, directory):
                continue
            begun = time.monotonic()
            cells = list(_in_a_process(model, trial, os.path.join(directory, model), limit_secs))
            with open(os.path.join(directory, "cells.jsonl"), "a") as file:
                file.writelines(json.dumps({**cell, "secs": round(time.monotonic() - begun)}) + "\n" for cell in cells)
            print(f"{model} {trial}: {time.monotonic() - begun:.0f} s", flush=True)


def _is_wanted(model: str, trial: str, directory: str) -> bool:
    """Returns whether a trial is for a model, has a question, and what it compares with."""
    if trial != "exact" and zoo.representative_of(model, "rebuilt" if trial == "one_replica" else trial) != model:
        return False
    if trial == "exact" or zoo.is_eager(model):
        return zoo.is_eager(model) and trial in _OF_EAGER
    cells = [cell for cell in read(directory) if cell["model"] == model]
    if trial == "float64":
        return any(trials.is_open(cell) for cell in cells)
    return trial in ("one_replica", "gpu_graph") or any(cell["cell"] == "keras" for cell in cells)


def _in_a_process(model: str, trial: str, directory: str, limit_secs: float) -> Iterator[dict[str, Any]]:
    """Yields the cells of a trial as they come, and one more if its process dies, or is not done in time."""
    receiver, sender = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_send, args=(sender, model, trial, directory))
    process.start()
    sender.close()
    end = time.monotonic() + limit_secs
    reason = {"unfinished": f"it had not ended after {limit_secs:.0f} s"}
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            yield receiver.recv()
    except EOFError:
        process.join()
        reason = {"error": f"the process ended with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()
    if process.exitcode or "unfinished" in reason:
        yield {"model": model, "trial": trial, "cell": trial, **reason}


def _send(sender: Any, model: str, trial: str, directory: str) -> None:
    for cell in trials.run(model, trial, directory):
        sender.send(cell)
