"""The log of the package: a warning or an error is one line on stderr, `distloop: warning: ...`.

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
        print(f"distloop: {record.levelname.lower()}: {self.format(record)}", file=sys.stderr, flush=True)


log = logging.getLogger("distloop")
log.addHandler(StderrLines())
log.setLevel(logging.WARNING)
log.propagate = False  # absl and TensorFlow put a handler on the root logger, which would print each line again
