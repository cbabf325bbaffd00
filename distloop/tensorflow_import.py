"""Import of TensorFlow: holds back three lines that it prints on CPUs, which no setting of it stops.

    hold_back_known_lines()     # before TensorFlow is imported, by whomever

Its libraries log them while they are loaded, before they read TF_CPP_MIN_LOG_LEVEL, to file descriptor 2. So during the
import what is written there goes through `grep`, a process of its own: other lines appear at once, the last words of an
import that crashes included.
"""

import contextlib
import functools
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_KNOWN = (
    r"^WARNING: All log messages before absl::InitializeLog|cudart_stub\.cc.* Could not find cuda drivers"
    r"|port\.cc.* oneDNN custom operations are on"
)
_WAIT_SECS = 1.0  # for the end of `grep`, which a process that the import has started may delay


def hold_back_known_lines() -> None:
    """Has the import of TensorFlow print without the known lines; does nothing if it is imported already."""
    if "tensorflow" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds TensorFlow as the other finders do, and wraps what loads it."""

    def __init__(self) -> None:
        self._is_asking_others = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "tensorflow" or self._is_asking_others:
            return None
        self._is_asking_others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking_others = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(_call_without_known_lines, loader.exec_module)
        return spec


def _call_without_known_lines(execute: Any, module: ModuleType) -> None:
    with _filtered_stderr():
        execute(module)


@contextlib.contextmanager
def _filtered_stderr() -> Iterator[None]:
    """Filters what this process writes to file descriptor 2; without `grep` it is as ever."""
    import subprocess  # here, because it takes as long as the rest of `import distloop`

    with contextlib.ExitStack() as stack:
        try:
            stderr = os.dup(2)
            stack.callback(os.close, stderr)
            command = ["grep", "--line-buffered", "-v", "-E", _KNOWN]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stderr, stderr=subprocess.DEVNULL)
        except OSError:  # no grep, no standard error, no more processes
            yield
            return
        assert process.stdin is not None
        os.dup2(process.stdin.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_WAIT_SECS)
