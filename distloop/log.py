"""Log: prints a warning or an error as one line on stderr, `distloop: warning: ...`.

    from distloop.log import log
    log.warning("Restored the export %s.", path)

It is Python's logger "distloop": a program sets its level or adds handlers with `logging.getLogger("distloop")`. What a
run prints about its progress belongs to `monitoring.console`.
"""

import logging
import sys


class StderrLines(logging.Handler):
    """Writes each record as a line to the `sys.stderr` of that moment, which notebooks and tests replace."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record."""
        text = f"distloop: {record.levelname.lower()}: {self.format(record)}"
        print(printable(text), file=sys.stderr, flush=True)


def printable(text: str, keep: str = "\n\t") -> str:
    """Returns a text with its control characters written out, ESC as four letters, so that no terminal obeys them.

    Args:
        text: with names, reasons or paths of a run's files, which may come from elsewhere.
        keep: characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


log = logging.getLogger("distloop")
log.addHandler(StderrLines())
log.setLevel(logging.WARNING)
log.propagate = False  # absl and TensorFlow put a handler on the root logger, which would print each line again
