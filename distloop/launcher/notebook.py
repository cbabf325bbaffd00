"""Notebook: runs a function of a notebook on several workers, which are local processes; without TensorFlow.

    def train():
        trainer = distloop.Trainer(model_fn, distloop.Config(device="cpu"))
        return trainer.fit(data, steps=500)

    result = distloop.notebook_launch(train, workers=2)

The processes are those of `distloop.launch`. The function and what it returns travel through files, by cloudpickle.
"""

import glob
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from distloop.distributed import environment
from distloop.log import shown
from distloop.settings.durations import whole_number

_FUNCTION, _RESULT, _ERROR = "function.pkl", "result.pkl", "error-{}.txt"


def notebook_launch(fn: Callable[..., Any], args: tuple[Any, ...] = (), *, workers: int = 2) -> Any:
    """Calls a function on each of several local workers, and returns what it returned on the chief.

    Lines that workers print are shown behind `[worker 0]`. An interrupt of the kernel is passed on: a run with a
    workdir saves a checkpoint, and the same cell resumes it. The workers end within seconds of a kernel that is killed.

    Args:
        fn: makes its Trainer itself; it and what it uses from the notebook are copied to the workers.
        args: its arguments.
        workers: the number of processes.

    Returns:
        The chief's result; None if the workers were interrupted.

    Raises:
        ValueError: if cloudpickle is missing, or the function cannot be copied.
        RuntimeError: if a worker failed, with its error.
    """
    if not callable(fn):
        raise ValueError(f"notebook_launch was given {shown(fn)} to call: give a function.")
    if (whole_number(workers) or 0) < 1:
        raise ValueError(f"notebook_launch was given workers={shown(workers)}: give 1 or more.")
    with tempfile.TemporaryDirectory(prefix="distloop-") as directory:
        with open(os.path.join(directory, _FUNCTION), "wb") as file:
            file.write(_pickle(fn, args))
        launch = [sys.executable, "-m", "distloop.launch", f"--workers={workers}", f"--parent={os.getpid()}"]
        return _read_result(directory, _run([*launch, "-m", "distloop.launcher.notebook", directory]))


def _pickle(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise ValueError("notebook_launch needs cloudpickle: pip install 'distloop[notebook]'.") from None
    try:
        content: bytes = cloudpickle.dumps((fn, args))
        return content
    except Exception as error:
        raise ValueError(
            f"The function {getattr(fn, '__name__', fn)!r} cannot be copied to the workers ({error}): make models, "
            "datasets and Trainers inside it."
        ) from error


def _run(command: list[str]) -> int:
    """Runs the launcher, for which modules are where this process finds them, and shows its lines.

    Returns:
        Its exit code.
    """
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    while True:
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)  # the second one ends the workers


def _read_result(directory: str, code: int) -> Any:
    """Returns the chief's result; None after an interruption.

    Args:
        directory: has the files of the workers.
        code: the launcher's exit code.

    Raises:
        RuntimeError: if a worker failed.
    """
    if errors := glob.glob(os.path.join(directory, _ERROR.format("*"))):
        first = min(errors, key=os.path.getmtime)  # the others failed because it did
        with open(first, encoding="utf-8") as file:
            raise RuntimeError(f"Worker {re.sub('[^0-9]', '', os.path.basename(first))} failed: {file.read()}")
    path = os.path.join(directory, _RESULT)
    if os.path.exists(path):
        with open(path, "rb") as file:
            return pickle.load(file)
    if code in (75, 130, 143):
        return None
    raise RuntimeError(f"The workers ended with exit code {code}: the lines above say why.")


def work(directory: str) -> None:
    """Calls the function on one worker, and writes its result or its error.

    Args:
        directory: has the function; shared by the workers.

    Raises:
        SystemExit: with code 1 if the function failed.
    """
    import cloudpickle

    cluster = environment.find_cluster()
    index = cluster.index if cluster is not None else 0
    try:
        with open(os.path.join(directory, _FUNCTION), "rb") as file:
            fn, args = pickle.load(file)
        content = cloudpickle.dumps(fn(*args))
    except Exception as error:
        with open(os.path.join(directory, _ERROR.format(index)), "w", encoding="utf-8") as file:
            file.write("".join(traceback.format_exception_only(error)).strip())
        raise SystemExit(1) from None
    if index == 0:
        with open(os.path.join(directory, _RESULT), "wb") as file:
            file.write(content)


if __name__ == "__main__":
    work(sys.argv[1])
