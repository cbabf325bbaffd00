"""Log: prints a warning or an error as one line on stderr, `distloop: warning: ...`.

    from distloop.log import log
    log.warning("Restored the export %s.", path)

It is Python's logger "distloop": a program sets its level or adds handlers with `logging.getLogger("distloop")`. What a
run prints about its progress belongs to `monitoring.console`.
"""

import contextlib
import errno
import logging
import re
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
IN_GRAPH = "Graph execution error:"  # the first line of TensorFlow's errors in a compiled function


class StderrLines(logging.Handler):
    """Writes each record as a line to the `sys.stderr` of that moment, which notebooks and tests replace."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record."""
        print_line(printable(f"distloop: {record.levelname.lower()}: {self.format(record)}"), sys.stderr)


def print_line(text: str, file: IO[str] | None = None) -> None:
    """Prints a line to stdout or another file; a run goes on without the lines that a full disk does not take."""
    try:
        print(text, file=file, flush=True)
    except OSError as error:
        if error.errno not in _FULL:
            raise


def say(text: str) -> None:
    """Prints a message of distloop."""
    print_line(f"distloop: {printable(text)}")


def say_soon(text: str, wait_secs: float = 1.0) -> None:
    """Prints a message of distloop to stderr; returns after `wait_secs` if a console or pipe blocks."""

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            print(f"distloop: {printable(text)}", file=sys.stderr, flush=True)

    writing = threading.Thread(target=write, name="distloop-output", daemon=True)
    writing.start()
    writing.join(wait_secs)


def speaker(is_chief: bool, console: str) -> Callable[[str], None]:
    """Returns what prints the messages of a run: `say` on its chief, nothing elsewhere and with `console="quiet"`."""
    return say if is_chief and console != "quiet" else lambda text: None


def printable(text: str, keep: str = "\n\t") -> str:
    """Returns a text with its control characters written out, ESC as four letters, so that no terminal obeys them.

    Args:
        text: with names, reasons or paths of a run's files, which may come from elsewhere.
        keep: characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def shown(value: Any) -> str:
    """Returns a value as an error message shows it: on one line, in 100 letters at most."""
    try:
        return " ".join(repr(value).split())[:100]
    except ValueError:  # Python writes no more than 4,300 digits
        return "a number of more than 4,300 digits"


def reason_of(message: str) -> str:
    """Returns the first line of an error's message; of one of TensorFlow's, why an operation failed.

    In an error of a compiled function, the operations and the lines that made them come before the reason.
    """
    message = re.sub(r"(?s)\A\s*in user code:\n.*?\n    (?=[\w.]+(:|\n|\Z))", "", message)  # AutoGraph's lines
    line, *others = message.strip().splitlines() or [""]
    if line.endswith(IN_GRAPH):
        first_of_several = re.search(r"^ +\(0\) [A-Z_]+: +(.*)", message, re.MULTILINE)
        reasons = (other for other in others if not re.match(r"\s|$|Detected at|File |<stack", other))
        line = first_of_several[1] if first_of_several else next(reasons, line)
    return re.sub(r"\{\{\w+ [^}]*\}\} ?| ?\[Op:\w+\]", "", line).rstrip(" .:")


log = logging.getLogger("distloop")
log.addHandler(StderrLines())
log.setLevel(log.level or logging.WARNING)
log.propagate = False  # absl and TensorFlow put a handler on the root logger, which would print each line again
