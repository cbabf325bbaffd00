"""The same faults for what TensorFlow, Keras and Orbit save with; a process of its own, with `file_faults.c` loaded.

    gcc -shared -fPIC -o /tmp/file_faults.so tests/campaigns/crash_matrix/file_faults.c -ldl
    LD_PRELOAD=/tmp/file_faults.so python -m tests.campaigns.crash_matrix.peers /tmp/file_faults.so /dev/shm/peers

It prints the cells as JSON. They write in C++, so faults are in the functions of libc. A kill is a copy of the
directory before an operation, which a new set of objects restores. Orbit is tried if it can be imported (`pip install
--no-deps tf-models-official`). What a later save needs and what is left over is not judged.
"""

import ctypes
import dataclasses
import json
import os
import pathlib
import shutil
import sys
import traceback
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tests.campaigns.crash_matrix.faults import EIO, ENOSPC, KILL
from tests.campaigns.crash_matrix.scenarios import BEFORE, HAND, LOST, NEW, WRONG, Cell

try:
    import orbit
except ImportError:
    orbit = None


class Manager:
    """`tf.train.CheckpointManager`, with the step as the checkpoint's number."""

    name = "tf.train.CheckpointManager"
    interval: int | None = None

    def __init__(self, directory: str, keep: int):
        self.kernel, self.step = tf.Variable([0.0, 0.0]), tf.Variable(0, dtype=tf.int64)
        checkpoint = tf.train.Checkpoint(kernel=self.kernel, step=self.step)
        settings = {"step_counter": self.step, "checkpoint_interval": self.interval}
        self.manager = tf.train.CheckpointManager(checkpoint, directory, keep, **settings)
        self.restore()

    def restore(self) -> None:
        self.manager.restore_or_initialize()

    def save(self, step: int, version: int) -> None:
        self.kernel.assign([10.0 * step + version] * 2)
        self.step.assign(step)
        self.manager.save(checkpoint_number=step)

    def state(self) -> tuple[int, int]:
        return int(self.step), int(self.kernel[0])


class Orbit(Manager):
    """Orbit's `Controller`."""

    name = "Orbit"
    interval = 10  # it saves only with one

    def restore(self) -> None:
        class Trainer(orbit.AbstractTrainer):
            def train(trainer, num_steps):  # noqa: N805
                self.step.assign_add(int(num_steps))
                self.kernel.assign([10.0 * int(self.step)] * 2)

        self.controller = orbit.Controller(
            trainer=Trainer(), global_step=self.step, steps_per_loop=10, checkpoint_manager=self.manager
        )

    def save(self, step: int, version: int) -> None:
        self.controller.train(step)


class Backup:
    """`keras.callbacks.BackupAndRestore`; keep=3 stands for `double_checkpoint=True`."""

    name = "keras.callbacks.BackupAndRestore"

    def __init__(self, directory: str, keep: int):
        """Restores as the callback does when training begins."""
        self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, use_bias=False)])
        self.model.compile("sgd", "mse")
        self.model.set_weights([np.zeros((1, 2), np.float32)])
        self.callback = keras.callbacks.BackupAndRestore(directory, double_checkpoint=keep > 1)
        self.callback.set_model(self.model)
        self.callback.on_train_begin()

    def save(self, step: int, version: int) -> None:
        self.model.set_weights([np.full((1, 2), 10.0 * step + version, np.float32)])
        self.callback.on_epoch_end(step - 1)

    def state(self) -> tuple[int, int]:
        return int(getattr(self.model, "_initial_epoch", 0)), int(self.model.get_weights()[0][0][0])


PEERS = [Backup, Manager, *([Orbit] if orbit else [])]


def judge(peer: type, directory: str, keep: int, new: tuple[int, int], was_told: bool) -> str:
    """Returns what a later process goes on from."""
    try:
        step, kernel = peer(directory, keep).state()
    except Exception:
        return HAND
    if kernel // 10 != step:
        return WRONG
    if (step, kernel % 10) == new:
        return NEW
    return BEFORE if (step, kernel % 10) == (30, 0) and not was_told else LOST


def in_child(function: Callable[[], None]) -> None:
    """Calls a function in a fork, as HDF5 may spoil or end a process after an error; this one runs no operation."""
    if (process := os.fork()) == 0:
        code = 1
        try:
            function()
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.waitpid(process, 0)


class Block:
    """One save with each fault at each operation; each in a directory of its own."""

    def __init__(self, library: ctypes.CDLL, peer: type, keep: int, new: tuple[int, int], place: pathlib.Path):
        """Stores what is done, and makes a new place for it."""
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        self._library, self._peer, self._keep, self._new, self._place = library, peer, keep, new, place

    def cells(self) -> list[Cell]:
        in_child(self._record)
        operations = self._lines("operations")
        tasks = [
            (number, mode, fault)
            for number, (_, writes) in enumerate(operations)
            for mode, fault in enumerate((EIO, ENOSPC), start=1)
            if writes or fault == EIO
        ]
        while (num_done := len(self._lines("told"))) < len(tasks):
            in_child(lambda: self._act_all(tasks[num_done:]))  # noqa: B023 - called at once
            if len(self._lines("told")) < len(tasks):
                self._add_line("told", False)  # that one ended the process
        states = [(f"killed/{number}", number, KILL, False) for number in range(len(operations))]
        told = self._lines("told")
        states += [(f"{fault}/{number}", number, fault, told[i]) for i, (number, _, fault) in enumerate(tasks)]
        in_child(lambda: self._judge_all(states))
        colours = self._lines("colours")
        return [
            Cell(number, operations[number][0], fault, False, colour)
            for (_, number, fault, _), colour in zip(states, colours, strict=True)
        ]

    def _record(self) -> None:
        template, directory = str(self._place / "template"), str(self._place / "run")
        saved = self._peer(template, self._keep)
        for step in (10, 20, 30):
            saved.save(step, 0)

        def before(number: int, kind: bytes, path: bytes, writes: int) -> None:
            name = os.path.relpath(path.decode(), directory)
            self._add_line("operations", (f"{kind.decode()} {name}", bool(writes)))
            shutil.copytree(directory, self._place / "killed" / str(number))

        callback = ctypes.CFUNCTYPE(None, ctypes.c_long, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int)(before)
        assert self._act(directory, -1, 0, callback)

    def _act_all(self, tasks: list[tuple[int, int, str]]) -> None:
        for number, mode, fault in tasks:
            self._add_line("told", self._act(str(self._place / fault / str(number)), number, mode))

    def _act(self, directory: str, number: int, mode: int, before: Any = None) -> bool:
        shutil.copytree(self._place / "template", directory)
        saved = self._peer(directory, self._keep)
        self._library.file_faults_arm(directory.encode(), number, mode, before)
        try:
            saved.save(*self._new)
            return True
        except Exception:
            return False
        finally:
            self._library.file_faults_arm(None, 0, 0, None)

    def _judge_all(self, states: list[tuple[str, int, str, bool]]) -> None:
        for name, _, _, was_told in states:
            self._add_line("colours", judge(self._peer, str(self._place / name), self._keep, self._new, was_told))

    def _add_line(self, name: str, value: Any) -> None:
        with open(self._place / f"{name}.jsonl", "a") as file:
            file.write(json.dumps(value) + "\n")

    def _lines(self, name: str) -> list[Any]:
        path = self._place / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(library: str, place: str) -> None:
    """Prints the cells of all peers."""
    loaded = ctypes.CDLL(library)
    loaded.file_faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_void_p]
    logging.set_verbosity(logging.FATAL)
    tf.get_logger().setLevel("ERROR")
    result = []
    for peer in PEERS:
        for name, new in (("new step", (40, 0)), ("replaced step", (30, 1))):
            for keep in (1, 3):
                if peer is not Manager and new[1]:
                    continue  # the callback replaces what is there at each save; Orbit saves no step twice
                block = Block(loaded, peer, keep, new, pathlib.Path(place, f"{peer.__name__}-{new[0]}-{keep}")).cells()
                print(f"{peer.name}, {name}, keep {keep}: {len(block)} cells", file=sys.stderr)
                result += [{"who": peer.name, "what": name, "keep": keep, **dataclasses.asdict(c)} for c in block]
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
