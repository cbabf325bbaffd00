"""Pickles what worker processes need, and refuses what they could not import.

    pickled = to_pickle(reader, count=8)
    reader = from_pickle(pickled)       # in a worker process

It knows neither how they are started nor what they are asked for.
"""

import ast
import pathlib
import pickle
import pickletools
import sys
import traceback

from distloop.data.python_rows import RowReader


def names_program(pickled: bytes) -> bool:
    """Returns whether something pickled is defined in the program's own file or prompt."""
    name = "__main__"
    return name.encode() in pickled and any(argument == name for _, argument, _ in pickletools.genops(pickled))


def to_pickle(reader: RowReader, count: int) -> bytes:
    """Returns a reader, pickled.

    Raises:
        ValueError: if it cannot be pickled, or a worker process would not find what it names.
    """
    try:
        pickled = pickle.dumps(reader, 5)
    except Exception as error:
        raise ValueError(
            f"processes={count} was given, and the {reader.name} given or map_fn cannot be pickled for the worker "
            f"processes ({type(error).__name__}: {error}): define functions and classes at the top level of a file, "
            "and open files in __getitem__."
        ) from error
    if names_program(pickled):
        _require_guard(count, reader.name)
    return pickled


def from_pickle(pickled: bytes) -> RowReader:
    """Returns a reader.

    Raises:
        ValueError: if what it names cannot be imported.
    """
    try:
        reader: RowReader = pickle.loads(pickled)
    except Exception as error:
        raise ValueError(
            f"A worker process cannot import what the source or map_fn needs ({type(error).__name__}: {error}): define "
            "functions and classes at the top level of a file."
        ) from error
    return reader


def _require_guard(count: int, name: str) -> None:
    """Raises a ValueError unless worker processes can import the program's file, without running it again."""
    program = vars(sys.modules["__main__"])
    if "__file__" not in program:
        raise ValueError(
            f"processes={count} was given, and the {name} given or map_fn is defined in a notebook or at a prompt, "
            "from which worker processes cannot import: define it in a file, and import it."
        )
    frames = [frame for frame, _ in traceback.walk_stack(None) if frame.f_globals is program]
    lines = [frame.f_lineno for frame in frames if frame.f_code.co_name == "<module>"]
    statements = ast.parse(pathlib.Path(program["__file__"]).read_bytes()).body
    guards = [s for s in statements if isinstance(s, ast.If) and "__name__" in ast.unparse(s.test)]
    if not all(any(guard.lineno <= line <= (guard.end_lineno or line) for guard in guards) for line in lines):
        raise ValueError(
            f"processes={count} was given, and worker processes import the file of the program, in which the {name} "
            "given or map_fn is defined, so they would run it again: put what it does under "
            '`if __name__ == "__main__":`.'
        )
