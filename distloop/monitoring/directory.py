"""Run directory: a workdir on a disk; the part `bucket` has the class for a workdir at a URL.

    directory = directory_of(config, Workers(strategy))
    with directory:                                     # on every worker
        train()                                         # in config.local_workdir, as in any directory
    with local_copy("s3://bucket/run") as path:         # a local path stays as it is
        load_newest(path)

No other module of the loop knows that the part is there.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from distloop.installed import import_part
from distloop.settings.config import Config
from distloop.urls import is_url, without_credentials


class Directory:
    """The interface to a run's directory; on a disk, its methods have nothing to do."""

    def __enter__(self) -> None:
        """Brings the files that the run goes on from into `config.local_workdir`. All workers call it."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Waits until all files of the workdir are written or uploaded. All workers call it."""

    def verify(self) -> None:
        """Checks that this process may still write; raises as `RunLock.verify` if not."""

    def share(self, step: int) -> None:
        """Brings a checkpoint that the chief has chosen to the hosts that lack it. All workers call it."""

    @contextlib.contextmanager
    def reading(self, path: str, *, best: bool = False) -> Iterator[str]:
        """Yields a local path with what is at a path or URL, as `local_copy`. All workers call it.

        Raises:
            ValueError: if it cannot be read.
        """
        with contextlib.ExitStack() as stack:
            try:
                local = stack.enter_context(local_copy(path, best=best))
            except OSError as error:
                raise ValueError(f"{path!r} cannot be read ({error}): correct it, or try again later.") from error
            yield local


def directory_of(config: Config, workers: Any) -> Directory:
    """Returns the directory of a run; sends no request.

    Args:
        config: of the run.
        workers: the `Workers` of the run.
    """
    if config.workdir == config.local_workdir:
        return Directory()
    directory: Directory = _bucket("workdir", config.workdir).Workdir(config, workers)
    return directory


@contextlib.contextmanager
def local_copy(path: str, *, best: bool = False) -> Iterator[str]:
    """Yields a local path with what is at a URL, for as long as the block runs; a local path stays as it is.

    Args:
        path: of a workdir, of which the newest whole checkpoint comes; a checkpoint; an `.npz`, `.keras` or
            `.weights.h5` file; or the prefix of a TensorFlow checkpoint.
        best: whether the best checkpoints of a workdir come, with their list, in place of the newest.

    Raises:
        OSError: if it cannot be read.
    """
    if not is_url(path):
        yield path
        return
    with _bucket("tree", path).fetched(path, best=best) as local:
        yield local


def send(path: str, url: str) -> None:
    """Writes a file, or the directory of an export, to a URL, for good; what a directory was before is deleted.

    Raises:
        ValueError: if the URL cannot be written to.
    """
    _bucket("upload", url).send(path, url)


def fetch_reports(path: str, root: str) -> str:
    """Returns a local path with what a report reads of a run, or of the runs in a directory.

    Args:
        path: of a workdir, or of a directory of them; of a URL, the files are brought below `root`.
        root: a local directory.

    Raises:
        ValueError: if a URL cannot be read, or is no run.
    """
    return str(_bucket("tree", path).fetch_reports(path, root)) if is_url(path) else path


def _bucket(module: str, url: str) -> Any:
    return import_part(f"bucket.{module}", f"the URL {without_credentials(url)!r}")
