"""Starts one process for each worker, prints all output, and restarts workers that fail: see `--help`."""

import sys
from collections.abc import Sequence

from distloop.installed import import_part


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher with these arguments or those of the process; returns its exit code."""
    return int(import_part("launcher.launch_command", "python -m distloop.launch").main(arguments))


if __name__ == "__main__":
    sys.exit(main())
