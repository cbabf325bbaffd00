"""Sending: writes a file or a sealed directory of this machine to a URL, for good.

send("/tmp/export", "s3://models/digits")       # saved_model.pb last
"""

import os

from distloop.remote import tree
from distloop.remote.directory import RemoteDirectory, RemoteError


def send(path: str, url: str) -> None:
    """Writes a file or a directory to a URL; what was there before of a directory is deleted.

    Args:
        path: of this machine.
        url: where it goes.

    Raises:
        ValueError: if the URL cannot be written to.
    """
    try:
        _send(path, url)
    except RemoteError as error:
        raise ValueError(
            f"{url!r} cannot be written ({error}): give a bucket that is there, and credentials in the way of its "
            "package, or another path."
        ) from error


def _send(path: str, url: str) -> None:
    parent, _, name = url.rstrip("/").rpartition("/")
    if os.path.isfile(path):
        return RemoteDirectory(parent).upload(path, name)
    directory = RemoteDirectory(url)
    _, units = tree.scan(path)
    (unit,) = units
    there = directory.list()
    if unit.seal in there:
        directory.delete(unit.seal)
    for file in unit.names:
        directory.upload(os.path.join(path, file), file)
    for file in there.keys() - unit.files.keys():
        directory.delete(file)
