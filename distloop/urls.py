"""URLs: recognizes URLs of fsspec, opens file systems, and names local staging directories.

    is_url("s3://bucket/run")                   # True
    local_directory("s3://bucket/run")          # "/home/me/.cache/distloop/bucket-run-0f3a..."
    require_no_password("sftp://me:secret@host/run")    # raises a ValueError

A URL with a password is refused where it comes in, so no file, message or other process has it. fsspec is imported for
a URL alone.
"""

import atexit
import hashlib
import os
import re
import shutil
import tempfile
from typing import Any

from distloop.threads import once

_PASSWORD = re.compile(r"(://[^/?#:\s]*):[^/?#\s]*@")  # of "scheme://user:password@host"
_TOKEN = re.compile(r"(https?://)(?!\*\*\*@)[^/?#@:\s]+@", re.IGNORECASE)  # in place of a user, whose name it may be
_UNENCODED = re.compile(r"://[^/?#:]*:(?![:\d])[^@]*@")  # of a password that ends what is the host
_KEY = re.compile(  # a value of a query, such as ?token=...
    r"""([?&;#][^=&;#\s]*(?:token|key|secret|sig|pass|pwd|credential|auth|jwt)[^=&;#\s]*=)[^&;#\s"']+""", re.IGNORECASE
)


def absolute(path: str) -> str:
    """Returns a path that a change of the current directory does not move; a URL, or nothing, as it is.

    Raises:
        ValueError: if the current directory is gone, or its name is not UTF-8.
    """
    if not path or is_url(path) or os.path.isabs(path):
        return path
    try:
        return _require_utf8(os.path.join(os.getcwd(), path))
    except FileNotFoundError as error:
        raise ValueError(
            f"The path {path!r} is relative, and the current directory was deleted: give it whole."
        ) from error


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path goes through fsspec."""
    return "://" in os.fspath(path)


def require_disk(path: str | os.PathLike[str], message: str) -> None:
    """Raises a ValueError with a message if a path goes through fsspec; `{}` in the message is the path.

    Raises:
        ValueError: if it does.
    """
    if is_url(path):
        raise ValueError(message.format(repr(without_credentials(os.fspath(path)))))


def without_credentials(text: str) -> str:
    """Returns a text whose URLs have no password, and `***` for keys and tokens."""
    if "://" not in text and "=" not in text:
        return text
    return _KEY.sub(r"\1***", _TOKEN.sub(r"\1***@", _PASSWORD.sub(r"\1@", text)))


def require_no_password(url: str) -> None:
    """Raises a ValueError if a URL has a password: files of the run, the console and other processes would show it.

    Raises:
        ValueError: if it has one.
    """
    if _PASSWORD.search(url) or _UNENCODED.search(url):
        raise ValueError(
            f"A URL that begins with {url.partition('://')[0]}:// has a password, which files of the run would hold: "
            "give it in the way of its package, or in the configuration of fsspec."
        )


def expand(path: str | os.PathLike[str]) -> str:
    """Returns a path that a user gave, with the home directory in place of `~`.

    Raises:
        ValueError: if it is a URL with a password, key or token, or not UTF-8.
    """
    path = os.path.expanduser(_require_utf8(os.fspath(path)))
    require_no_password(path)
    if is_url(path) and without_credentials(path) != path:
        raise ValueError(
            f"The URL {without_credentials(path)!r} has a key or token, which files of the run would hold: give the "
            "credentials in the way of its package."
        )
    return path


def _require_utf8(path: str) -> str:
    """Returns a path; raises a ValueError if TensorFlow, and files such as `flags.txt`, cannot hold it as a text."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"The path {path!r} has a name that is not UTF-8: rename it, or give another path.") from error
    return path


def file_system(url: str, **options: Any) -> Any:
    """Returns fsspec's file system of a URL.

    Args:
        url: of a file or directory.
        options: of the file system.

    Raises:
        ValueError: if fsspec, or its package for such URLs, is not installed, or nothing reads such URLs.
    """
    shown = without_credentials(url)
    try:
        import fsspec
    except ImportError:
        raise ValueError(f"The URL {shown!r} needs fsspec: pip install fsspec, or copy the files.") from None
    try:
        return fsspec.core.url_to_fs(url, **options)[0]
    except (ImportError, ValueError) as error:
        raise ValueError(f"The URL {shown!r} cannot be opened: {without_credentials(str(error))}") from error


def local_directory(workdir: str) -> str:
    """Returns where the files of a run are on this machine: its workdir; of a URL, a directory in the user's cache.

    `XDG_CACHE_HOME` moves the cache, which is `~/.cache` without it. What is at `memory://` ends with this process, and
    so does its directory.
    """
    if not is_url(workdir):
        return workdir
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = _directory_of_process() if workdir.startswith("memory://") else cache
    url = without_credentials(workdir.rstrip("/"))
    name = re.sub(r"[^\w.-]+", "-", url.partition("://")[2])[-40:].strip("-.")
    return os.path.join(cache, "distloop", f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:16]}")


@once
def _directory_of_process() -> str:
    """Returns a directory that is removed when this process ends."""
    path = tempfile.mkdtemp(prefix="distloop_")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
