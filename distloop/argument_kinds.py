"""Argument kinds: names the argument of a public function that is of another kind than its annotation allows.

    @checks_kinds
    def open_records(files: str | Sequence[str], ...): ...

    open_records(3)     # ValueError: open_records was given files=3, an int: give a string or a list.

A check of the function's own goes first, as its message knows more. What may run for long, such as `Trainer.fit`, is
explained by `explain` once it has failed; all else is refused although it did not fail, such as `shuffle="no"`.
"""

import functools
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_ERRORS = (TypeError, AttributeError)  # of Python, for a value of the wrong kind
# Annotations that are looked at, with their name in a sentence and the types that they stand for.
_KINDS: Mapping[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("True or False", (bool, numbers.Integral)),
    int: ("a whole number", (numbers.Integral,)),
    float: ("a number", (numbers.Real,)),
    str: ("a string", (str, os.PathLike)),
    os.PathLike: ("a path", (os.PathLike,)),
    Mapping: ("a dict", (Mapping,)),
}


def checks_kinds(function: Function) -> Function:
    """Returns a function, or a class, that raises a ValueError for an argument of another kind than its annotation."""
    called: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]

    @functools.wraps(called)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = called(*args, **kwargs)
        except Exception as error:
            if mistake := explain(called, args, kwargs, error):
                raise mistake from error
            raise
        if (mistake := _find(called, args, kwargs, is_certain=True)) is not None:
            raise mistake
        return result

    if isinstance(function, type):
        function.__init__ = call  # type: ignore[misc]
        return function
    return typing.cast(Function, call)


def explain(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], error: BaseException
) -> ValueError | None:
    """Returns the error for the first argument of a failed call that its annotation does not allow.

    Args:
        function: what was called.
        args: of the call.
        kwargs: of the call.
        error: what it raised; errors other than Python's own for a value of the wrong kind explain themselves.
    """
    return _find(function, args, kwargs, is_certain=False) if isinstance(error, _ERRORS) else None


def shown(value: Any) -> str:
    """Returns a value as an error message shows it: on one line, in 100 letters at most."""
    try:
        return " ".join(repr(value).split())[:100]
    except ValueError:  # Python writes no more than 4,300 digits
        return "a number of more than 4,300 digits"


def _find(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], is_certain: bool
) -> ValueError | None:
    """Returns the error for an argument of a wrong kind; a call that did not fail may be given None, and any class."""
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # Python says which argument is missing or unknown
        return None
    for name, value in given.items():
        if hasattr(value, "item") and not isinstance(value, Iterable):  # a scalar of NumPy
            value = value.item()
        parameter = signature.parameters[name]
        is_one = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_one and not (_accepts(parameter.annotation, value, is_certain) or (is_certain and value is None)):
            title = function.__qualname__.removesuffix(".__init__")
            kind, wanted = _with_article(type(value).__name__), _describe(parameter.annotation)
            return ValueError(f"{title} was given {name}={shown(value)}, {kind}: give {wanted}.")
    return None


def _accepts(annotation: Any, value: Any, is_certain: bool) -> bool:
    """Returns whether an annotation allows a value; True where it is not known what the annotation means."""
    origin, choices = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_accepts(choice, value, is_certain) for choice in choices)
    if origin is typing.Literal:
        return any(value is choice or (isinstance(value, str) and value == choice) for choice in choices)
    if origin is Callable:
        return callable(value)
    if origin in (Sequence, Iterable, list, tuple):  # whatever can be a list; a string is rarely meant as one
        return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    if origin in _KINDS:
        return isinstance(value, _KINDS[origin][1])
    is_known = isinstance(origin, type) and origin not in (Any, inspect.Parameter.empty)
    if is_certain or not is_known or getattr(origin, "_is_protocol", False):
        return True
    return isinstance(value, origin)


def _describe(annotation: Any) -> str:
    """Returns what an annotation allows, in words."""
    origin, choices = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_describe(choice) for choice in choices))
    if origin is typing.Literal:
        return " or ".join(map(repr, choices))
    if origin is Callable:
        return "a function"
    if origin in (Sequence, Iterable, list, tuple):
        return "a list"
    if origin is types.NoneType:
        return "None"
    return _KINDS[origin][0] if origin in _KINDS else _with_article(origin.__name__)


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"
