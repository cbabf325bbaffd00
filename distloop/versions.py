"""The versions of TensorFlow and Keras that distloop works with; it imports neither.

    require_supported()      # an ImportError for what is too old, a warning for what nobody has tried

distloop overrides private methods of both, so each new version is tried by `make matrix` before it is declared here and
in pyproject.toml. docs/versions.md has the table.
"""

import importlib.metadata
import re
import warnings

# The least version, and the first one that was not tried.
SUPPORTED = {"TensorFlow": ("2.18", "2.23"), "Keras": ("3.12", "3.16")}
# The distributions of each, the usual one first.
_DISTRIBUTIONS = {
    "TensorFlow": ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu"),
    "Keras": ("keras", "keras-nightly"),
}


def require_supported() -> None:
    """Checks the installed versions; a package that was installed in another way passes.

    Raises:
        ImportError: if one is older than the least version.
    """
    for package, (least, untried) in SUPPORTED.items():
        version = _installed(package)
        requirement = f"{_DISTRIBUTIONS[package][0]}>={least},<{untried}"
        if version is not None and _parts(version) < _parts(least):
            raise ImportError(
                f"{package} {version} is installed, with which distloop does not work: install '{requirement}'."
            )
        if version is not None and _parts(version) >= _parts(untried):
            warnings.warn(
                f"{package} {version} is newer than the versions that distloop was tried with: run `python -m "
                f"distloop.smoke`, or install '{requirement}'.",
                stacklevel=3,
            )


def _installed(package: str) -> str | None:
    """Returns the installed version of a package, or None if no distribution of it is known."""
    for distribution in _DISTRIBUTIONS[package]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _parts(version: str) -> tuple[int, int]:
    """Returns major and minor number of a version."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)
