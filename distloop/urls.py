"""URLs of fsspec's: what is one, its file system, and the directory of this machine that stands for it.

    is_url("s3://bucket/run")                   # True
    staging_directory("s3://bucket/run")        # "/home/me/.cache/distloop/bucket-run-0f3a..."

fsspec is imported for a URL alone.
"""

import hashlib
import os
import re
from typing import Any


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path goes through fsspec."""
    return "://" in os.fspath(path)


def file_system(url: str, extra: str = "records", **options: Any) -> Any:
    """Returns fsspec's file system of a URL.

    Args:
        url: of a file or directory.
        extra: the extra of distloop that installs fsspec for this use.
        options: of the file system.

    Raises:
        ValueError: if fsspec, or its package for such URLs, is not installed, or nothing reads such URLs.
    """
    try:
        import fsspec
    except ImportError:
        raise ValueError(f"The URL {url!r} needs fsspec: pip install 'distloop[{extra}]', or copy the files.") from None
    try:
        return fsspec.core.url_to_fs(url, **options)[0]
    except (ImportError, ValueError) as error:
        raise ValueError(f"The URL {url!r} cannot be opened: {error}") from error


def staging_directory(url: str) -> str:
    """Returns the directory in the user's cache that the files of a run are in, whose workdir is a URL.

    `XDG_CACHE_HOME` moves the cache, which is `~/.cache` without it.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    url = url.rstrip("/")
    name = re.sub(r"[^\w.-]+", "-", url.partition("://")[2])[-40:].strip("-.")
    return os.path.join(cache, "distloop", f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:16]}")
