"""Tries distloop's promises on this machine's devices, and prints a line for each: see `--help`."""

import sys
from collections.abc import Sequence

from distloop.installed import import_part


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks with these arguments or those of the process; returns the exit code."""
    return int(import_part("testing.smoke_checks", "python -m distloop.smoke").main(arguments))


if __name__ == "__main__":
    sys.exit(main())
