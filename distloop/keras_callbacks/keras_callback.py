"""`from_callback`: Keras callbacks that act at the end of an epoch, as actions.

    rate = distloop.from_callback(keras.callbacks.ReduceLROnPlateau("val_loss", patience=2), every=500)
    trainer.fit(train, evals={"val": test}, steps=10_000, actions=[rate])         # with eval_every=500

An epoch is `every` steps; a part of one, where a `fit` ends, is none. This module does not know the training loop.
"""

import contextlib
import copy
import math
from collections.abc import Mapping
from typing import Any

import keras

from distloop.actions.action_state import plain
from distloop.actions.save import choose_mode
from distloop.log import shown
from distloop.optimizers.keras_hooks import is_schedule_free
from distloop.settings import durations
from distloop.training.action import Action, Report, StopTraining

# The replacement of each callback that distloop has its own setting for.
_REPLACEMENTS = {
    "BackupAndRestore": "set Config(workdir=..., checkpoint_every=...)",
    "ModelCheckpoint": "use distloop.SaveBest(metric), or set Config(checkpoint_every=...)",
    "OrbaxCheckpoint": "set Config(workdir=..., checkpoint_every=...)",
    "EarlyStopping": "use distloop.StopEarly(metric, patience=...)",
    "TensorBoard": "set Config(workdir=...), which writes for TensorBoard",
    "LearningRateScheduler": "give the optimizer distloop.make_schedule(...) or another Keras schedule",
    "CSVLogger": "set Config(workdir=...) and read it with distloop.read_metrics",
    "ProgbarLogger": "set Config(console=...)",
    "History": "take what fit returns, or distloop.read_metrics(workdir)",
    "TerminateOnNaN": "leave Config(on_nonfinite='raise') as it is",
    "SwapEMAWeights": "set Config(average_decay=...)",
}
_EPOCHS = "epochs that have ended"  # no name of an attribute
_OTHERS = "attributes that JSON can no longer hold"
_SET_BY_KERAS = ("params", "model", "_model", "validation_data")
_SUPPORTED = {"on_epoch_end", "on_train_begin", "on_train_end"}


class FromCallback(Action):
    """An action that calls a Keras callback; created by `from_callback`."""

    takes_keras_names = True  # `val_loss` for `val/loss`

    def __init__(self, callback: keras.callbacks.Callback, every: int | str):
        """Use `from_callback`."""
        self.every = every
        self.name = f"from_callback({type(callback).__name__})"
        self._callback = callback
        if hasattr(callback, "_set_monitor_op") and callback.monitor_op is None:
            # Whether smaller is better, which Keras finds out at the first epoch's end.
            callback.mode = choose_mode(type(callback).__name__, callback.monitor, callback.mode)
            callback._set_monitor_op()  # negates min_delta, too: once, and not again after a resume
            self.required_metric = callback.monitor
        self._settings = self._attributes()  # and the counters at the start
        self._model: _Model | None = None
        self._restored: Mapping[str, Any] | None = None  # a state that no epoch has followed yet
        self._epochs = 0  # that have ended, if they are no number of steps
        self._steps = 0  # of an epoch; 0: not known, as time decides, or the end of the run

    def on_start(self, report: Report) -> None:
        """Calls `on_train_begin`; the callback's attributes go on from the checkpoint, or from the `fit` before."""
        before = None if self._model is None else self._attributes()
        if before is not None and self._restored is not None:  # what on_train_begin makes is another run's
            before = {n: v for n, v in before.items() if n in self._settings or n in self._restored}
        _require_settable_rate(self._callback, report.state)
        self._model = _Model(report.state)
        self._callback.set_model(self._model)
        self._steps = report.units.period(self.every).steps
        self._callback.set_params(_params(self.every, report))
        self._callback.on_train_begin({})
        if before is not None:  # on_train_begin often resets them
            vars(self._callback).update(before)
        elif self._restored is not None:
            self._restore(self._restored)

    def __call__(self, report: Report) -> None:
        """Calls `on_epoch_end`, unless the run ends within an epoch: it may go on, as if it had not ended there.

        Raises:
            StopTraining: if the callback set `model.stop_training`.
        """
        assert self._model is not None
        if self._steps and report.step % self._steps:
            return
        self._restored = None
        self._callback.on_epoch_end(self._epoch(report), _logs(report))
        if self._model.stop_training:
            raise StopTraining(f"the callback {type(self._callback).__name__} set stop_training")

    def on_end(self, report: Report) -> None:
        """Calls `on_train_end`."""
        self._callback.on_train_end(_logs(report))

    def get_state(self) -> dict[str, Any]:
        """Returns the attributes that JSON can hold and have changed, and the number of epochs if counted."""
        settings, attributes = self._settings, self._attributes()
        changed = {n: v for n, v in attributes.items() if n not in settings or settings[n] != v}
        others = [name for name in settings if name not in attributes and name in vars(self._callback)]
        return changed | ({_EPOCHS: self._epochs} if self._epochs else {}) | ({_OTHERS: others} if others else {})

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `get_state` returned, after `on_train_begin` if that is to come."""
        self._restored = {name: value for name, value in state.items() if name != _EPOCHS}
        self._epochs = state.get(_EPOCHS, 0)
        if self._model is not None:
            self._restore(self._restored)

    def _restore(self, changed: Mapping[str, Any]) -> None:
        """Sets the attributes that had changed, and the others to what they are set to when the callback is made."""
        others = {*changed.get(_OTHERS, ())}
        changed = {name: copy.deepcopy(value) for name, value in changed.items() if name != _OTHERS}
        unchanged = {n: v for n, v in self._settings.items() if n not in others and hasattr(self._callback, n)}
        vars(self._callback).update({**copy.deepcopy(unchanged), **changed})

    def _attributes(self) -> dict[str, Any]:
        """Returns the attributes that JSON can hold, copied: numbers, strings, and lists and dicts of them."""
        attributes = {}
        for name, value in vars(self._callback).items():
            if name not in _SET_BY_KERAS:
                with contextlib.suppress(TypeError):
                    attributes[name] = plain(value)
        return attributes

    def _epoch(self, report: Report) -> int:
        """Returns the number of the epoch that has ended, from 0."""
        if isinstance(self.every, str):
            self._epochs += 1
            return self._epochs - 1
        return report.step // self.every - 1 if self.every else 0


def _require_settable_rate(callback: keras.callbacks.Callback, state: Any) -> None:
    """Raises a ValueError for a callback that sets the learning rate where it is not that of one optimizer."""
    if not isinstance(callback, keras.callbacks.ReduceLROnPlateau):
        return
    name, optimizers = type(callback).__name__, [*state.plain_optimizers.values()]
    if len(optimizers) > 1:
        raise ValueError(
            f"The callback {name} sets the learning rate of one optimizer, and the model has {len(optimizers)}: write "
            "an action that sets state.optimizer[name].learning_rate."
        )
    if isinstance(optimizers[0]._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        raise ValueError(
            f"The callback {name} sets the learning rate, and so does the optimizer's schedule: give the optimizer a "
            "number as its learning rate, or leave the callback out."
        )
    if is_schedule_free(optimizers[0]):
        raise ValueError(
            f"{name} sets the learning rate, which has to stay in a schedule-free optimizer: leave the callback out."
        )


class _Model:
    """The callback's model: the user's model, with the optimizer of the run and `stop_training`."""

    def __init__(self, state: Any):
        self.optimizer = state.optimizer
        self.stop_training = False
        self._model = state.model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _params(every: int | str, report: Report) -> dict[str, int | None]:
    """Returns the steps of an epoch and the number of whole epochs; None: not known, as time decides."""
    last_step = int(report.until) if report.until < math.inf else None
    period = report.units.period(every)
    steps = period.steps or (None if any(period) else last_step)
    return {"steps": steps, "epochs": last_step // steps if last_step and steps else None, "verbose": 0}


def _logs(report: Report) -> dict[str, float]:
    logs = {name: float(value) for name, value in report.metrics.items()}
    return logs | {name.replace("/", "_"): value for name, value in logs.items()}


def from_callback(callback: keras.callbacks.Callback, every: int | str = "1 epoch") -> FromCallback:
    """Returns an action that calls a Keras callback, as Keras does at the end of an epoch.

    Supported are `ReduceLROnPlateau`, `RemoteMonitor`, `LambdaCallback`, and your own callbacks if they define only
    `on_epoch_end`, `on_train_begin` and `on_train_end` (called whenever `fit` ends). `logs` are the
    report's metrics; an evaluation's `val/loss` also has the name `val_loss`. `model` is the user's model, with
    `optimizer` and `stop_training`. The callback's attributes that JSON can hold (numbers, strings, lists and dicts of
    them), and have changed, are saved with the run; a new run with the same callback begins with those that it had at
    first. Every worker calls the callback.

    Args:
        callback: the Keras callback.
        every: how often: a number of steps, or another duration; 0: whenever `fit` ends. What `fit` trains beyond the
            last whole epoch of steps ends none, so that the calls do not depend on how a run is cut.

    Returns:
        The action.

    Raises:
        ValueError: for a callback that distloop has its own setting for, or that must be called before each epoch or
            each batch.
    """
    if not isinstance(callback, keras.callbacks.Callback):
        raise ValueError(f"from_callback was given {callback!r}; it takes a keras.callbacks.Callback.")
    if (period := durations.normalize(every)) is None:
        raise ValueError(
            f"from_callback was given every={shown(every)}; it takes the steps of an epoch, a whole number, "
            "or another duration, such as '1 epoch'."
        )
    for kind in type(callback).__mro__:
        if kind.__module__.startswith("keras.") and kind.__name__ in _REPLACEMENTS:
            raise ValueError(
                f"The callback {type(callback).__name__} was given, which distloop does by itself: "
                f"{_REPLACEMENTS[kind.__name__]}."
            )
    hooks = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_") and name not in _SUPPORTED]
    for name in hooks:
        if name in vars(callback) or getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name):
            raise ValueError(
                f"The callback {type(callback).__name__} has {name}, which nobody calls, as distloop looks at a run "
                "between its loops alone: use on_epoch_end, or an action with `every`."
            )
    action = getattr(callback, "_distloop_action", None)  # of an earlier call: the counters are the callback's
    if action is None or action.every != period:
        action = callback._distloop_action = FromCallback(callback, period)
    return action
