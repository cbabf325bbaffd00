"""Ray actors: a launcher with one place in each, which Ray puts where there is room and brings back after a loss.

    arguments = ["--workers=1:8", "--workers_per_host=1", "-m", "experiments.digits", "--workdir=/shared/digits"]
    code = run(arguments, least=1, most=8, cpus=1, gpus=1, threads=0)

The launchers agree among themselves (`hosts`). Ray needs `least` bundles of resources to begin, which it reserves
together, and gives the others as they come. This module shows the launchers' lines, which Ray collects, passes signals
on and returns the exit code of the run.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from distloop.distributed.preemption import EXIT_CODE as SAVED_EXIT_CODE
from distloop.launcher import processes

_LOOK_SECS = 0.5
_ANSWER_SECS = 2.0  # for an actor that runs; one that waits for a place does not answer
_FOLLOW_SECS = 15.0  # for the other launchers to end when one has: if they go on, its host has left
_PR_SET_PDEATHSIG = 1


class Host:
    """A Ray actor that runs a launcher; Ray calls `run` again if it has to start the actor again."""

    def __init__(self) -> None:
        """Starts nothing."""
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, arguments: Sequence[str], directory: str, threads: int) -> int:
        """Runs a launcher and returns its exit code.

        Args:
            arguments: of the launcher.
            directory: where it starts, if this node has it.
            threads: of its worker; 0: TensorFlow's own number.
        """
        import ray

        counts = {"TF_NUM_INTRAOP_THREADS": str(threads), "TF_NUM_INTEROP_THREADS": str(max(2, threads))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "distloop.launch", f"--address={ray.util.get_node_ip_address()}", *arguments],
            cwd=directory if os.path.isdir(directory) else None,
            env={**os.environ, **(counts if threads else {})},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a second signal, to the actor's group, would kill the workers
            preexec_fn=_end_with_parent,
        )
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def is_running(self) -> bool:
        """Returns whether the launcher runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self, number: int) -> None:
        """Sends the launcher a signal."""
        if self._process is not None:
            self._process.send_signal(number)


def _end_with_parent() -> None:
    """Lets the kernel send this process SIGTERM when the actor has died, as a host that leaves gets it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run(arguments: Sequence[str], least: int, most: int, cpus: int, gpus: int, threads: int) -> int:
    """Runs launchers in Ray until the run ends, and returns its exit code.

    Args:
        arguments: of each launcher, the program's included.
        least: actors that Ray places together or not at all.
        most: actors; those beyond `least` wait for a place of their own.
        cpus: of each actor, as Ray counts them.
        gpus: of each actor, if the cluster has any.
        threads: of each worker; 0: TensorFlow's own number.

    Raises:
        ValueError: if Ray is missing or cannot be reached.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # every line of every launcher
    try:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ImportError:
        raise ValueError("--ray was given, but Ray is not installed: pip install 'distloop[ray]'.") from None
    try:
        ray.init()
    except ConnectionError as error:
        raise ValueError(
            f"Ray cannot be reached ({error}): start a cluster, or unset RAY_ADDRESS to start a local one."
        ) from error
    signals = processes.Signals()  # in place of Ray's handlers
    bundle = {"CPU": cpus, "GPU": gpus if ray.cluster_resources().get("GPU") else 0}
    groups = [placement_group([bundle] * count, strategy="SPREAD") for count in (least, *[1] * (most - least))]
    host = ray.remote(num_cpus=bundle["CPU"], num_gpus=bundle["GPU"], max_restarts=-1, max_concurrency=2)(Host)
    places = [PlacementGroupSchedulingStrategy(group, i) for group in groups for i in range(group.bundle_count)]
    actors = [host.options(scheduling_strategy=place).remote() for place in places]
    try:
        return _Driver(ray, actors, (list(arguments), os.getcwd(), threads), signals).wait()
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.shutdown()


class _Driver:
    """Waits for the launchers in all actors."""

    def __init__(self, ray: Any, actors: Sequence[Any], launch: tuple[Any, ...], signals: processes.Signals):
        self._ray, self._actors, self._launch, self._signals = ray, actors, launch, signals
        self._runs = {self._start(actor): actor for actor in actors}  # of those whose launcher has not ended
        self._codes: dict[Any, int] = {}  # of the others
        self._is_stopping = False

    def _start(self, actor: Any) -> Any:
        return actor.run.options(max_task_retries=-1).remote(*self._launch)

    def wait(self) -> int:
        """Returns the exit code of the run once it has ended."""
        while True:
            if number := self._signals.wait(_LOOK_SECS):
                if self._is_stopping:
                    return 128 + number
                self._is_stopping = True
                processes.log(f"{number.name}, the launchers in Ray are asked to end; again to kill them.")
                for actor in self._runs.values():
                    actor.stop.remote(signal.SIGTERM)
            self._take_ends(0)
            if not (self._codes or self._is_stopping):
                continue
            if not self._is_stopping:
                self._take_ends(_FOLLOW_SECS)
            running = self._running()
            if not running or self._final_codes():
                return max(self._final_codes(), default=SAVED_EXIT_CODE)
            for actor in () if self._is_stopping else list(self._codes):  # its host has left, and the run goes on
                del self._codes[actor]
                self._runs[self._start(actor)] = actor

    def _final_codes(self) -> list[int]:
        """Returns how launchers ended, but for those whose host has left a run that may go on."""
        return [code for code in self._codes.values() if code != SAVED_EXIT_CODE]

    def _take_ends(self, secs: float) -> None:
        """Notes the launchers that have ended, and waits so long for all others."""
        ended, _ = (
            self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=secs) if self._runs else ([], [])
        )
        for run in ended:
            try:
                code = self._ray.get(run)
            except self._ray.exceptions.RayTaskError as error:
                processes.log(f"a launcher in Ray failed ({str(error).strip().splitlines()[-1]}).")
                code = 1
            self._codes[self._runs.pop(run)] = code

    def _running(self) -> list[Any]:
        """Returns the actors whose launchers run; those that have no place do not answer."""
        answers = {actor.is_running.remote(): actor for actor in self._runs.values()}
        done, _ = self._ray.wait(list(answers), num_returns=len(answers), timeout=_ANSWER_SECS) if answers else ([], [])
        running = []
        for answer in done:
            with contextlib.suppress(self._ray.exceptions.RayError):  # Ray starts it again
                if self._ray.get(answer):
                    running.append(answers[answer])
        return running
