"""User errors: raises errors of one sentence, also from a running graph, and shortens tracebacks.

require(tf.equal(rows, batch_size), 'The value "loss" has another number of rows than its batch; ...')
except tf.errors.OpError as error:
raise_as_user_error(error)

@with_short_tracebacks
class Verbs: ...
"""

import contextlib
import functools
import inspect
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, TracebackType
from typing import Any, NoReturn, TypeVar

import absl
import keras
import numpy as np
import tensorflow as tf

from distloop.log import IN_GRAPH, reason_of, shown

_Class = TypeVar("_Class", bound=type)

USER_ERROR = "distloop: "  # marks the beginning and the end of the sentence in the operation's message

EMPTY_DATASET = "The dataset given is empty; distloop needs one batch at least: check its files or filter."

TEXT_AS_NUMBER = (
    "A text reached a calculation that takes numbers: give numbers in its place, such as the number of a class, or "
    "leave the entry out of what the model and the loss read."
)

CANCELLED = "An operation failed, and TensorFlow names another that was cancelled: Config(eager=True) shows the first."

_CARRIED = "distloop carries error "
_MOST_CARRIED = 8
_LABEL = re.compile(r"Received a label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")
_BEFORE_REASON = re.compile(r"^(?:\[Errno -?\d+\] |/.*; (?=[A-Z][^;]*$))")  # Python's, and TensorFlow's with a path
_carried: list[Exception] = []  # the latest
_OF_OPERATIONS = (
    tf.errors.InvalidArgumentError,
    tf.errors.UnknownError,
    tf.errors.FailedPreconditionError,
    tf.errors.UnimplementedError,
    tf.errors.NotFoundError,
    tf.errors.CancelledError,
)

_DISTLOOP = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PATHS = (str(module.__file__) for module in (tf, keras, np, absl))
_LIBRARIES = (_DISTLOOP, *(os.path.dirname(os.path.abspath(path)) + os.sep for path in _PATHS))
_NOT_OF_USERS = (*_LIBRARIES, contextlib.__file__, functools.__file__, threading.__file__, "<frozen ")
# What distloop raises for users, or what their data and their operations raise in a compiled step.
_FOR_USERS = (ValueError, ArithmeticError, OSError, KeyboardInterrupt, tf.errors.OpError)


def require(condition: tf.Tensor, message: str) -> tf.Tensor:
    """Fails the step with a message for users if a condition does not hold that tracing cannot know.

    Returns:
        The condition. Operations that must not run after a failure take it as data, since TensorFlow's graph optimizer
        may drop a control dependency.
    """
    with tf.control_dependencies([tf.debugging.Assert(condition, [f"{USER_ERROR}{message}{USER_ERROR}"])]):
        return tf.identity(condition)


def cause(error: Exception) -> str:
    """Returns the first sentence of the cause in a message of Keras's, without its end; the type's name if it is empty.

    A sentence of more than 200 characters is cut between words, and before a bracket that would stay open.
    """
    text = " ".join(str(error).rpartition("Exception encountered: ")[2].split())
    sentence: str = re.split(r"[.!?](?:\s|$)", text, maxsplit=1)[0].rstrip(" :")
    if len(sentence) <= 200:
        return sentence or type(error).__name__
    sentence = sentence[:200].rpartition(" ")[0]
    for left, right in ("{}", "[]", "()"):
        while sentence.count(left) > sentence.count(right):
            sentence = sentence.rpartition(left)[0]
    return f"{sentence.rstrip(' :,')} ..."


def cannot_be_written(workdir: str, error: OSError) -> ValueError:
    """Returns the error that a file of a workdir cannot be written."""
    return ValueError(
        f"{error.filename!r} in workdir={workdir!r} cannot be written ({error.strerror}): remove what is in the way, "
        "or give another directory."
    )


@contextlib.contextmanager
def explaining_disk_errors(path: str) -> Iterator[None]:
    """Enters a scope in which an error of the disk becomes one sentence that names a path.

    Raises:
        ValueError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{path!r} cannot be written ({first_line(error)}): make room there, or give another path."
        ) from error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, TensorFlow's or any other; its type's name if it has none.

    Of an error of the operating system it is the reason, without the number and without TensorFlow's temporary path.
    """
    message = error.message if isinstance(error, tf.errors.OpError) else str(error)
    reason = _BEFORE_REASON.sub("", reason_of(message), count=1)
    return re.sub(r"(.{,200}(?!\S)|.{200}).*", r"\1", reason).rstrip(" .:") or type(error).__name__  # ends with a word


def carry(error: Exception) -> RuntimeError:
    """Returns an error to raise in an operation of TensorFlow in place of one of the user's Python code.

    TensorFlow would pass on a text; from the operation's error, `as_user_error` returns the user's, with its traceback.
    """
    _carried.append(error)
    del _carried[:-_MOST_CARRIED]
    return RuntimeError(f"{_CARRIED}{id(error)}")


def raise_as_user_error(error: tf.errors.OpError) -> NoReturn:
    """Raises what `as_user_error` or `as_operation_error` returns for a caught error, else the error itself."""
    explained = as_user_error(error) or as_operation_error(error)
    if explained is None:
        raise error
    raise explained from error


def as_user_error(error: tf.errors.OpError) -> Exception | None:
    """Returns an error of TensorFlow as a sentence about the user's data or functions; None if it is about neither."""
    message = error.message or ""
    if carried := [e for e in _carried if f"{_CARRIED}{id(e)}" in message]:
        return carried[-1]
    if isinstance(error, tf.errors.OutOfRangeError):
        return ValueError(EMPTY_DATASET)
    if "`generator` yielded" in message:
        line = next(line for line in message.splitlines() if "`generator` yielded" in line)
        difference = line[line.index("`generator` yielded") :].rstrip(". ").replace(". The", "; the")[:300]
        return ValueError(
            f"A batch differs from those before it: {difference}; every batch has the same structure, dtypes and "
            "number of axes: correct the generator or its output_signature."
        )
    if match := _LABEL.search(message):
        label, classes = match[1], int(match[2])
        return ValueError(
            f"A batch holds the label {label}, and the cross entropy has {classes} classes, 0 to {classes - 1}: number "
            "labels from 0, give the last layer more outputs, or leave such rows out."
        )
    if "Cast string to" in message:
        return ValueError(TEXT_AS_NUMBER)
    if "Shape mismatch in the collective" in message:
        shapes = " and ".join(re.findall(r"expected shape (\[[\d,]*\])", message)[:2])
        return ValueError(
            f"The workers computed tensors of different shapes ({shapes}) where they share them: let every worker run "
            "the same lines, with the same model."
        )
    if USER_ERROR in message:
        sentence = message.split(USER_ERROR)[1]
        return ValueError(sentence.replace("\\'", "'").replace('\\"', '"'))  # TensorFlow escapes quotes
    return None


def as_operation_error(error: tf.errors.OpError) -> tf.errors.OpError | None:
    """Returns the error of an operation in a compiled function as one sentence, with the user's line if it has one.

    TensorFlow's own message shows the line of each function on the way to the operation, distloop's too.

    Args:
        error: of TensorFlow, of which `as_user_error` knows nothing.

    Returns:
        An error of the same type; None if it is about devices or workers, or of no compiled function.
    """
    message = error.message or ""
    if not isinstance(error, _OF_OPERATIONS) or not message.startswith(IN_GRAPH):
        return None
    if isinstance(error, tf.errors.CancelledError):
        return tf.errors.CancelledError(None, None, CANCELLED)
    # Of a Python function, as of `py_function` or a generator, there is Python's own traceback.
    of_python = message.partition("Traceback (most recent call last):")[2].partition("[[{{node")[0]
    of_operation = message.partition("Detected at node ")[2].partition("Detected at node ")[0]
    frames = re.findall(r'^ +File "([^"]+)", line (\d+)', of_python or of_operation, re.MULTILINE)
    if not of_python:  # the line that called distloop made no operation
        frames = frames[next((i for i, (path, _) in enumerate(frames) if path.startswith(_DISTLOOP)), len(frames)) :]
    lines = [(path, line) for path, line in frames if not path.startswith(_NOT_OF_USERS)]
    operation = re.search(r"\{\{node (?:.*while/)?(?:replica_\d+/)?([^}]+)\}\}", message)
    where = f"its operation {operation[1]}" if operation else "an operation of TensorFlow's"
    where = f"{os.path.basename(lines[-1][0])}:{lines[-1][1]}" if lines else where
    advice = "" if of_python and lines else "; Config(eager=True) shows the line where it does"
    return type(error)(None, None, f"A compiled function failed at {where}: {reason_of(message)}{advice}.")


@contextlib.contextmanager
def explaining_merge_call(sentence: str) -> Iterator[None]:
    """Raises a ValueError of one sentence in place of TensorFlow's error about replicas that talk inside a loop."""
    try:
        yield
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise ValueError(sentence) from error


def user_line(frames: Iterable[Any] | None) -> str | None:
    """Returns the innermost line of the user's code in a traceback: `file.py:12`; None if there is none."""
    for frame in reversed(list(frames or [])):
        if not os.path.abspath(frame.filename).startswith(_NOT_OF_USERS) and not frame.filename.startswith("<"):
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return None


def innermost_line(frames: Iterable[Any] | None) -> str | None:
    """Returns the innermost line outside TensorFlow, Keras, NumPy and absl, distloop's as `distloop/trainer.py:12`."""
    for frame in reversed(list(frames or [])):
        path = os.path.abspath(frame.filename)
        if not path.startswith(_LIBRARIES[1:]) and not frame.filename.startswith("<"):
            is_own = path.startswith(_DISTLOOP)
            name = os.path.join("distloop", path.removeprefix(_DISTLOOP)) if is_own else os.path.basename(path)
            return f"{name}:{frame.lineno}"
    return None


def require_bool(owner: str, **arguments: Any) -> None:
    """Raises a ValueError for an argument that is neither True nor False, such as "no", which Python takes as true."""
    for name, value in arguments.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ValueError(f"{owner} was given {name}={shown(value)}; give True or False.")


def show_full_tracebacks() -> None:
    """Makes errors show all frames for the rest of the process: distloop's, Keras's and TensorFlow's, too."""
    keras.config.disable_traceback_filtering()  # which `with_short_tracebacks` follows
    tf.debugging.disable_traceback_filtering()


def with_short_tracebacks(cls: _Class, explain_call: Callable[..., str] = lambda *_: "") -> _Class:
    """Makes errors in the public methods of a class show the user's frames, and the place outside distloop that raised.

    The frames of distloop, Keras and TensorFlow between them are left out, unless Keras's filter of tracebacks is off.
    An error stays whole that is neither for users nor from their code: it is a mistake in distloop.

    Args:
        cls: the class.
        explain_call: returns a sentence about a call whose arguments do not fit the method's parameters, from the
            method's name, the arguments by position and those by name; empty: it knows none.
    """
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, _shortening(method, explain_call))
    return cls


def _shortening(method: Callable[..., Any], explain_call: Callable[..., str]) -> Callable[..., Any]:
    """Returns the method, or the generator, with short tracebacks."""
    if inspect.isgeneratorfunction(method):

        @functools.wraps(method)
        def generate(*args: Any, **kwargs: Any) -> Iterator[Any]:
            __tracebackhide__ = True  # IPython and pytest leave out this frame
            try:
                yield from method(*args, **kwargs)
            except BaseException as error:
                _shorten(error)
                raise error

        return generate

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, TypeError) and error.__traceback__ and error.__traceback__.tb_next is None:
                sentence = explain_call(method.__name__, args[1:], kwargs) or _is_called_otherwise(method, error)
                raise ValueError(sentence) from None
            _shorten(error)
            raise error

    return call


def _is_called_otherwise(method: Callable[..., Any], error: TypeError) -> str:
    """Returns a sentence about a call whose arguments do not fit the method's parameters."""
    right = re.sub(r"=\w+\(.*?\)", "=...", str(_parameters(inspect.signature(method))))  # as of `config=Config()`
    return f"{method.__qualname__} was called otherwise than it is made ({error}): call it as {right}."


def require_call(fn: Callable[..., Any], name: str, *arguments: str) -> None:
    """Checks that a function of the user's can be called as distloop calls it.

    Args:
        fn: the function.
        name: of the function, to begin a sentence with.
        *arguments: the names of what it gets, by position.

    Raises:
        ValueError: if it takes other arguments.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # Python does not know the signatures of some functions of C
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"{name} takes {_parameters(signature)} and is called with ({', '.join(arguments)}) ({error}): let it take "
            "these, or give a lambda that does."
        ) from None


def _parameters(signature: inspect.Signature) -> inspect.Signature:
    """Returns a signature without annotations and `self`."""
    parameters = [p.replace(annotation=p.empty) for name, p in signature.parameters.items() if name != "self"]
    return signature.replace(parameters=parameters, return_annotation=signature.empty)


def _shorten(error: BaseException) -> None:
    """Shortens the traceback of an error, which the caller has caught and raises again."""
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without the caller's frame, which raising adds
    is_from_users = any(is_users(entry) for entry in entries_of(error.__traceback__))
    if not keras.config.is_traceback_filtering_enabled() or not (is_from_users or isinstance(error, _FOR_USERS)):
        return
    is_sentence = isinstance(error, (ValueError, tf.errors.ResourceExhaustedError, *_OF_OPERATIONS))
    if (is_sentence or error in _carried) and isinstance(error.__cause__, tf.errors.OpError):
        error.__cause__ = None  # the sentence says it; the operation's error stays as the context
    link: BaseException | None = error
    seen = set[int]()
    while link is not None and id(link) not in seen:  # an error may be its own cause
        seen.add(id(link))
        link.__traceback__ = _without_libraries(entries_of(link.__traceback__))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def entries_of(entry: TracebackType | None) -> list[TracebackType]:
    """Returns the entries of a traceback, the outermost first."""
    entries = []
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    return entries


def up_to_users_line(traceback: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the frames behind the user's innermost one; None: it has none of the user's."""
    entries = entries_of(traceback)
    while entries and not is_users(entries[-1]):
        entries.pop()
    return _without_libraries(entries)


def _without_libraries(entries: list[TracebackType]) -> TracebackType | None:
    """Returns the traceback of the entries that are the user's, and of the innermost if it is not distloop's."""
    short = None
    for entry in reversed(entries):
        is_innermost = entry is entries[-1] and not _filename(entry).startswith(_DISTLOOP)
        if is_innermost or is_users(entry):
            short = TracebackType(short, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return short


def is_users(entry: TracebackType) -> bool:
    """Returns whether an entry of a traceback is a line of the user's."""
    return not _filename(entry).startswith(_NOT_OF_USERS)


def _filename(entry: TracebackType) -> str:
    """Returns the file of an entry's code; of code that a dataclass of distloop generated, distloop's directory."""
    is_generated = str(entry.tb_frame.f_globals.get("__name__")).startswith("distloop.")
    return _DISTLOOP if is_generated else entry.tb_frame.f_code.co_filename
