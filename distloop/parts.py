"""Parts: imports folders of the package that can be taken away, when a setting or a name asks for one.

    recomputation = import_part("recompute.recomputation", "recompute='block'")

The loop imports no part in any other way, so it runs without them.
"""

import importlib
from typing import Any


def import_part(module: str, given: str) -> Any:
    """Returns a module of a part.

    Args:
        module: its name within the package: the part, a dot and the file.
        given: what needs it, for the error.

    Raises:
        ValueError: if the part's folder is not there.
    """
    part = module.partition(".")[0]
    try:
        return importlib.import_module(f"distloop.{module}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(f"distloop.{part}"):
            raise
        raise ValueError(
            f"{given} needs the part {part!r} of distloop, and there is no folder distloop/{part}: install distloop "
            f"with all its parts, or leave {given} out."
        ) from error
