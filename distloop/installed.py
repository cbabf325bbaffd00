"""Installed: checks the versions of TensorFlow and Keras, and imports parts of distloop, which may be missing.

    require_supported()      # an ImportError for what is too old, a warning for what nobody has tried
    recomputation = import_part("recompute.recomputation", "recompute='block'")

distloop overrides private methods of TensorFlow and Keras, so each new version is tried by `make matrix` before it is
declared here and in pyproject.toml. docs/versions.md has the table. The loop imports no part in any other way than
`import_part`, so it runs without parts.
"""

import importlib
import importlib.metadata
import re
import warnings
from typing import Any

# The least version, and the first one that was not tried.
SUPPORTED = {"TensorFlow": ("2.18", "2.23"), "Keras": ("3.12", "3.16")}
# The distributions of each, the usual one first.
_DISTRIBUTIONS = {
    "TensorFlow": ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu"),
    "Keras": ("keras", "keras-nightly"),
}


def import_part(module: str, given: str) -> Any:
    """Returns a module of a part.

    Args:
        module: its name within the package: the part, a dot and the file.
        given: what needs it, for the error.

    Raises:
        ValueError: if the part's folder is not there.
    """
    folder = module.partition(".")[0]
    try:
        return importlib.import_module(f"distloop.{module}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(f"distloop.{folder}"):
            raise
        raise ValueError(
            f"{given} needs the part {folder!r} of distloop, and there is no folder distloop/{folder}: install "
            f"distloop with all its parts, or leave {given} out."
        ) from error


def require_supported() -> None:
    """Checks the versions of TensorFlow and Keras; one that was installed in another way than by pip passes.

    Raises:
        ImportError: if one is older than the least version.
    """
    for package, (least, untried) in SUPPORTED.items():
        version = _version(package)
        requirement = f"{_DISTRIBUTIONS[package][0]}>={least},<{untried}"
        if version is not None and _major_and_minor(version) < _major_and_minor(least):
            raise ImportError(
                f"{package} {version} is installed, with which distloop does not work: install '{requirement}'."
            )
        if version is not None and _major_and_minor(version) >= _major_and_minor(untried):
            warnings.warn(
                f"{package} {version} is newer than the versions that distloop was tried with: run `python -m "
                f"distloop.smoke`, or install '{requirement}'.",
                stacklevel=3,
            )


def _version(package: str) -> str | None:
    """Returns the installed version of a package, or None if no distribution of it is known."""
    for distribution in _DISTRIBUTIONS[package]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _major_and_minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
