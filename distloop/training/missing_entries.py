"""Entries that a user's function looks up in a batch that has none of that name.

    loss_fn = explaining_missing_entries(loss_fn)         # raises a ValueError that names the entries there are

It does not know what reads a batch otherwise.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

_MAX_NAMES = 8  # in a message


def explaining_missing_entries(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that raises ValueError where `fn`, called with a batch, looks up what it lacks."""

    @functools.wraps(fn)
    def call(batch: Any, *arguments: Any) -> Any:
        try:
            return fn(batch, *arguments)
        except KeyError as error:
            (name,) = error.args[:1] or (None,)
            if not isinstance(batch, Mapping) or not isinstance(name, str) or name in batch:
                raise
            names = [repr(entry) for entry in batch]
            shown = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
            explained = ValueError(
                f"The key {name!r} was looked up by a function of the model, and the batch has the entries {shown}: "
                "use their names, or name them otherwise in the dataset."
            )
            raise explained.with_traceback(error.__traceback__) from None  # which ends with the user's line
        except TypeError as error:
            if not isinstance(batch, tuple) or not str(error).startswith("tuple indices must be integers"):
                raise
            explained = ValueError(
                f"A name was looked up in a batch that is a tuple of {len(batch)} entries: take them by their places, "
                "as in `features, labels = batch`, or let the dataset give a dict."
            )
            raise explained.with_traceback(error.__traceback__) from None

    return call
