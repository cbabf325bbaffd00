"""The contract of the writers in `fit(..., writers=[writer])`; without TensorFlow.

    class Losses:
        def write(self, step, numbers, time):
            print(step, numbers["loss"])

        def close(self):
            pass

`deliveries` decides what comes when.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class MediaFile(NamedTuple):
    """Media as the content of a file.

    Attributes:
        suffix: `.png` for images, `.wav` for sounds, `.md` for texts, `.json` for histograms, with
            `edges` and `counts`.
        data: the bytes.
    """

    suffix: str
    data: bytes


class RunFile(NamedTuple):
    """A file or directory that a run leaves: an export or a checkpoint.

    Attributes:
        name: what it is, such as `best/test/accuracy`; later ones of the same name replace it.
        path: where it is.
        step: of its weights.
    """

    name: str
    path: str
    step: int


class Writer(Protocol):
    """Receives the rows of a run: `fit(..., writers=[writer])`; only `write` and `close` are required.

    All calls come from one thread, which is not the main one, and on several workers on the chief alone. After a kill,
    the rows of the last seconds come again, with the same step.

    Attributes:
        name: the workdir records under it which rows the writer has; two writers of a run need different ones. Empty:
            the name of the class.
        last_step: after `open`: the step of the last row that the writer has, -1 if it has none; those after it come,
            and no others, as far as `metrics.jsonl` has them. None: unknown.
    """

    name: str = ""
    last_step: int | None = None

    def new_run_id(self) -> str | None:
        """Returns the `run_id` for the first `open` of a run; a kill before the end of `open` does not lose it."""
        return None

    def open(self, settings: Mapping[str, Any], run_id: str | None) -> str | None:
        """Prepares for the rows of a call of `fit`.

        Args:
            settings: of the run and the program's own flags, by name, with `workdir`; secret ones are `***`.
            run_id: what `open` returned for this workdir before; None: nothing, or there is no workdir.

        Returns:
            A text that identifies the run where the rows go, for the next `open`; None: there is none.
        """
        return None

    def write(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        """Receives a row; after an error it comes again with the next one.

        Args:
            step: of the numbers.
            numbers: by name, as in `metrics.jsonl`.
            time: when the step ended; Unix, seconds.
        """

    def write_media(self, step: int, media: Mapping[str, MediaFile], time: float) -> None:
        """Receives images, sounds, texts and histograms, before the row of the same step; not again after an error.

        Args:
            step: of the media.
            media: by name, as an action returned them.
            time: when the step ended; Unix, seconds.
        """

    def write_file(self, name: str, path: str, step: int) -> None:
        """Receives an export or a checkpoint when the run is over, as `RunFile`; again if it goes on with more steps.

        Args:
            name: what it is.
            path: of a file or directory.
            step: of its weights.
        """

    def on_error(self, error: BaseException) -> None:
        """Receives the error or interruption that ended `fit`, before `close`."""

    def close(self) -> None:
        """Ends the rows of a call of `fit`."""


def check_writers(writers: Any) -> None:
    """Checks what `fit` was given as writers.

    Raises:
        ValueError: if they are something else, `write` or `close` takes other arguments, or two have the same name.
    """
    from distloop.errors import require_call  # imports TensorFlow, which `fit` has done

    if not isinstance(writers, Sequence):
        raise ValueError(f"writers={writers!r} was given; fit takes a list of writers: writers=[writer].")
    for writer in writers:
        if not (callable(getattr(writer, "write", None)) and callable(getattr(writer, "close", None))):
            raise ValueError(
                f"The writer {writer!r} was given; a writer is an object with write(step, numbers, time) and close()."
            )
        require_call(writer.write, f"write of the writer {name_of(writer)!r}", "step", "numbers", "time")
        require_call(writer.close, f"close of the writer {name_of(writer)!r}")
    names = [name_of(writer) for writer in writers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"Two writers are called {twice[0]!r}, and the workdir knows by name which rows a writer has: give one of "
            "them another attribute `name`."
        )


def name_of(writer: Any) -> str:
    """Returns the name under which the workdir records what a writer has."""
    return str(getattr(writer, "name", "") or type(writer).__name__)
