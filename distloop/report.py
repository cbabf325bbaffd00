"""Compares runs in tables, as JSON or as a picture: `python -m distloop.report --help`; without TensorFlow."""

import signal
import sys
from collections.abc import Sequence

from distloop.installed import import_part


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the report with these arguments or those of the process; returns its exit code."""
    return int(import_part("reports.command_line", "python -m distloop.report").main(arguments))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # names that the terminal cannot encode
    sys.exit(main())
