"""Calls of a Trainer as Keras's and Lightning's users write them: a sentence each on what to write instead.

explain_call("fit", (x, y, 32, 3), {})      # "... call fit(x, y, batch_size=32, epochs=3)."
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from distloop.log import shown
from distloop.settings.config import OTHER_WORDS, Config, fields

_POSITIONS = ("x", "y", "batch_size", "epochs")  # of Keras's fit, as far as people give them
_OF_TRAINER = ("model_fn", "config", "strategy")
_DATA_FIRST = "give the data first, as in fit(x, y, epochs=2) or fit(dataset, epochs=2)"
_EVALS = "did you mean evals, as in evals={'val': dataset}?"
_BATCHES = "set Config(batch_size=...), by which arrays are read"
_IN_FIT = {
    "callbacks": "give actions=[distloop.from_callback(callback)]",
    "logger": "give writers=[distloop.WandbWriter(...)], and Config(workdir=...) for TensorBoard",
    "ckpt_path": "set Config(workdir=...), with which the same command resumes, or Config(init_from=...)",
    "shuffle": "fit shuffles arrays by Config(seed=...); for another order give distloop.make_dataset(arrays, size)",
    "initial_epoch": "with Config(workdir=...) a run resumes by itself",
    "validation_batch_size": "give evals={'val': distloop.make_dataset(arrays, batch_size)}",
    **dict.fromkeys(("workers", "use_multiprocessing", "max_queue_size"), "set it in the PyDataset"),
    **dict.fromkeys(("x", "data", "dataset", "train_data", "train_dataset", "datamodule"), _DATA_FIRST),
    **dict.fromkeys(("dataloader", "train_dataloader", "train_dataloaders"), _DATA_FIRST),
    **dict.fromkeys(("eval", "validation", "val", "val_data", "valid", "test", "test_data", "eval_data"), _EVALS),
    **dict.fromkeys(("val_dataloader", "val_dataloaders", "eval_dataset"), _EVALS),
}
_IN_A_PASS = {
    "x": "give the data first",
    "batch_size": _BATCHES,
    "verbose": "leave it out, as nothing is printed",
    "return_dict": "leave it out, as a dict is returned",
    "steps": "give dataset.take(steps)",
    "sample_weight": "give (x, y, sample_weight) as the data",
    "callbacks": "leave it out, as nothing calls them",
}


def explain_call(method: str, args: Sequence[Any], named: Mapping[str, Any]) -> str:
    """Returns a sentence about a call of a method of Trainer that has other arguments; empty: it is any other call.

    Args:
        method: its name.
        args: arguments by position.
        named: arguments by name.
    """
    if method == "__init__":
        return _of_trainer(named)
    if method == "fit" and len(args) > 2:
        keras_arguments = dict(zip(_POSITIONS[2:], args[2:], strict=False))
        rest = "".join(f", {name}={shown(value)}" for name, value in keras_arguments.items() if value is not None)
        return f"fit was given {len(args)} arguments by position: call it as fit(x, y{rest})."
    if method == "fit":
        name = next((name for name in named if _IN_FIT.get(name) == _DATA_FIRST), "")
        return f"fit was given {name}=...: {_DATA_FIRST}." if name else f"fit was called without data: {_DATA_FIRST}."
    if method in ("evaluate", "predict", "stream_predictions"):
        if name := next(filter(_IN_A_PASS.get, named), ""):
            return f"{method} was given {name}=..., which is no argument of it: {_IN_A_PASS[name]}."
        data = "the data and its labels" if method == "evaluate" else "the data"
        is_by_position = len(args) > 1 + (method == "evaluate")
        sentence = f"{method} was given {len(args)} arguments by position, and takes {data}: {_BATCHES}."
        return sentence if is_by_position else ""
    return ""


def hint(name: str, value: Any, known: Collection[str]) -> str:
    """Returns what to give in place of an argument that `fit` does not have; it ends a sentence.

    Args:
        name: of the argument.
        value: of the argument.
        known: the names of the arguments that `fit` has.
    """
    if (text := _IN_FIT.get(name)) is not None:
        return text if text.endswith("?") else f"{text}."
    if (setting := setting_of(name)) is not None and setting not in known:
        return f"set Config({as_arguments({name: value})})."
    close = [setting] if setting else difflib.get_close_matches(name, known)
    return f"did you mean {' or '.join(close)}?" if close else f"it takes {', '.join(known)}."


def setting_of(word: str) -> str | None:
    """Returns the field of `Config` of that name, or that another framework calls so; None: there is none."""
    return word if word in fields() else OTHER_WORDS.get(word)


def as_arguments(words: Mapping[str, Any]) -> str:
    """Returns settings, also by another framework's words, as arguments of `Config`; odd values as `...`."""
    return ", ".join(f"{setting_of(word)}={_value(setting_of(word), value)}" for word, value in words.items())


def _value(setting: Any, value: Any) -> str:
    try:
        Config(**{setting: value})
    except ValueError:
        return "..."
    return shown(value)


def _of_trainer(named: Mapping[str, Any]) -> str:
    others = {name: value for name, value in named.items() if name not in _OF_TRAINER}
    words = {name: value for name, value in others.items() if setting_of(name) is not None}
    if words:
        given = ", ".join(f"{name}={shown(value)}" for name, value in words.items())
        return f"Trainer was given {given}: give Trainer(model_fn, distloop.Config({as_arguments(words)}))."
    if "callbacks" in others or "logger" in others:
        return "Trainer was given callbacks or a logger, which fit takes: give fit(data, actions=[...], writers=[...])."
    return ""
