"""Tests Keras callbacks as actions."""

import math
import types

import keras
import numpy as np
import pytest

import distloop
from distloop.keras_callbacks import keras_callback
from distloop.settings.durations import Period, Units
from distloop.training.action import Report
from tests.problems import batches, classifier, on, refused


def fit(callback, steps, actions=(), **settings):
    """Trains with a callback, whose epochs are of two steps; returns the trainer."""
    trainer = distloop.Trainer(classifier(), on(1, **settings))
    trainer.fit(batches(), steps=steps, actions=[*actions, distloop.from_callback(callback, every=2)])
    return trainer


SGD = keras.optimizers.SGD(0.1)
STATE = types.SimpleNamespace(optimizer=SGD, plain_optimizers={"": SGD}, model=None)


def started(callback):
    """Returns the action of a callback in a run that begins."""
    action = distloop.from_callback(callback, every=1)
    action.on_start(Report(0, 10, {}, STATE))
    return action


class Seen(keras.callbacks.Callback):
    """Notes its calls."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.calls = []
        self.epochs_seen = 0
        self.stop_at = stop_at

    def on_train_begin(self, logs=None):
        self.calls.append("begin")
        self.epochs_seen = 0

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append((epoch, sorted({"loss", "val_loss", "val/loss"} & set(logs))))
        self.epochs_seen += 1
        self.model.stop_training = epoch == self.stop_at

    def on_train_end(self, logs=None):
        self.calls.append("end")


@pytest.mark.slow
def test_a_callback_is_called_each_epoch_and_a_plateau_changes_the_rate():
    seen = Seen()
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=100.0)
    trainer = distloop.Trainer(classifier(), on(2, eval_every=2))
    actions = [distloop.from_callback(callback, every=2) for callback in (seen, plateau)]
    trainer.fit(batches(), steps=7, evals={"val": batches()}, actions=actions)
    logs = ["loss", "val/loss", "val_loss"]
    assert seen.calls == ["begin", (0, logs), (1, logs), (2, logs), "end"]
    assert seen.params == {"steps": 2, "epochs": 3, "verbose": 0}
    assert seen.model.count_params() == trainer.model.count_params()
    np.testing.assert_allclose(trainer.optimizer.learning_rate.numpy(), 0.1 * 0.5**2, rtol=1e-6)


@pytest.mark.slow
def test_an_epoch_may_be_one_of_the_data_and_the_next_fit_goes_on_counting():
    seen = Seen()
    trainer, action = distloop.Trainer(classifier(), on(1)), distloop.from_callback(seen, every="1 epoch")
    for steps in (8, 16):  # epochs of 4 steps
        trainer.fit(batches(rows=64), steps=steps, actions=[action])
    epochs = [call if isinstance(call, str) else call[0] for call in seen.calls]
    assert epochs == ["begin", 0, 1, "end", "begin", 2, 3, "end"] and seen.epochs_seen == 4
    assert seen.params == {"steps": 4, "epochs": 4, "verbose": 0}


@pytest.mark.parametrize(
    ("every", "until", "steps", "epochs"),
    [(0, 7, 7, 1), ("10 s", 7, None, None), (2, math.inf, 2, None), ("50 %", 7, 4, 1), ("1 epoch", 30, 5, 6)],
)
def test_params_are_the_steps_of_an_epoch_and_the_epochs_if_known(every, until, steps, epochs):
    units = Units(lambda: 5, run=Period(until if until < math.inf else 0))
    params = keras_callback._params(every, Report(0, until, {}, None, units=units))
    assert params == {"steps": steps, "epochs": epochs, "verbose": 0}


@pytest.mark.slow
def test_a_callback_ends_the_run():
    seen = Seen(stop_at=1)
    assert fit(seen, 10).step == 4 and seen.calls[-1] == "end"


@pytest.mark.slow
def test_a_callbacks_counters_resume_with_the_run(tmp_path):
    for steps in (4, 8):
        fit(seen := Seen(), steps, workdir=str(tmp_path))
    assert seen.calls[0] == "begin" and seen.epochs_seen == 4


@pytest.mark.wide
@pytest.mark.slow
def test_a_callbacks_counters_go_back_with_the_run(tmp_path):
    trainer, seen = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path), checkpoint_every=4)), Seen()
    trainer.fit(batches(), steps=10, actions=[action := distloop.from_callback(seen, every=2)])
    trainer.restore(str(tmp_path / "checkpoints" / "4"))
    trainer.fit(batches(), steps=6, actions=[action])
    assert seen.epochs_seen == 3


@pytest.mark.parametrize("every", [5, "80 examples", "1 epoch", 0])
def test_the_calls_do_not_depend_on_how_a_run_is_cut(every):
    def calls(ends):
        trainer, seen = distloop.Trainer(classifier(), on(1)), Seen()
        for end in ends:
            trainer.fit(batches(rows=80), steps=end, actions=[distloop.from_callback(seen, every=every)])
        return [call[0] for call in seen.calls if call not in ("begin", "end")]

    assert (calls([7, 12]), calls([12])) == (([0, 1], [0, 1]) if every else ([0, 0], [0]))


def test_a_state_holds_counters_and_no_settings():
    action = started(plateau := keras.callbacks.ReduceLROnPlateau("loss", patience=5))
    at_start = action.get_state()
    for step in (1, 2, 3):
        action(Report(step, 10, {"loss": 1.0}, None))
    state = action.get_state()
    assert (plateau.wait, plateau.best) == (2, 1.0)
    action.set_state(at_start)
    assert (plateau.wait, plateau.best) == (0, None)
    started(plateau := keras.callbacks.ReduceLROnPlateau("loss", patience=10)).set_state(state)
    assert (plateau.wait, plateau.best, plateau.patience) == (2, 1.0, 10)


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (lambda: keras.callbacks.EarlyStopping(), "StopEarly"),
        (lambda: keras.callbacks.ModelCheckpoint("x.keras"), "SaveBest"),
        (lambda: keras.callbacks.TensorBoard(), "workdir"),
        (lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1), "make_schedule"),
        (lambda: keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None), "on_train_batch_end"),
        (lambda: keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: None), "on_epoch_begin"),
        (lambda: "ModelCheckpoint", "keras.callbacks.Callback"),
    ],
)
def test_an_unsupported_callback_or_half_a_step_is_refused_with_advice(make, instead):
    refused(lambda: distloop.from_callback(make(), every=10), instead)
    refused(lambda: distloop.from_callback(Seen(), every=0.5), "every=0.5", "whole number")


def test_every_callback_of_keras_is_supported_or_refused():
    known = {"Callback", "CallbackList", "ReduceLROnPlateau", "RemoteMonitor", "LambdaCallback"}
    known |= set(keras_callback._REPLACEMENTS)
    assert {name for name in dir(keras.callbacks) if name[0].isupper()} <= known


class Losses(keras.callbacks.Callback):
    """Keeps what it was shown in attributes of several kinds."""

    def __init__(self):
        super().__init__()
        self.losses, self.best, self.last = [], {}, np.float32(0)

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])
        self.best["loss"] = min(self.losses)
        self.last = np.float32(logs["loss"])


def test_lists_dicts_and_numbers_of_numpy_are_attributes_that_go_on():
    action = started(first := Losses())
    for step, loss in ((1, 3.0), (2, 2.0)):
        action(Report(step, 10, {"loss": loss}, None))
    again = distloop.from_callback(second := Losses(), every=1)
    again.set_state(kept := action.get_state())
    again.on_start(Report(2, 10, {}, STATE))
    assert (second.losses, second.best, second.last) == ([3.0, 2.0], {"loss": 2.0}, 2.0)
    action(Report(3, 10, {"loss": 1.0}, None))
    assert kept["losses"] == [3.0, 2.0] and first.losses == [3.0, 2.0, 1.0]  # the state is a copy


@pytest.mark.wide
@pytest.mark.slow
def test_a_plateau_reduces_the_rate_after_a_stop_as_without_one(tmp_path):
    def measure(report):
        return {"val/loss": 1.0}

    def rate(lengths, workdir):
        for steps in lengths:
            plateau = keras.callbacks.ReduceLROnPlateau("val/loss", patience=2, cooldown=1, factor=0.5)
            trainer = fit(plateau, steps, [measure], workdir=str(workdir))
        return float(trainer.optimizer.learning_rate.numpy())

    measure.every = 2
    assert rate([24], tmp_path / "whole") == rate([4, 8, 14, 24], tmp_path / "parts") < 0.1


def test_a_plateau_takes_its_direction_from_the_monitors_name():
    for monitor, mode in (("val/loss", "min"), ("test_accuracy", "max")):
        plateau = keras.callbacks.ReduceLROnPlateau(monitor)
        distloop.from_callback(plateau, every=1)
        assert plateau.mode == mode
    refused(
        lambda: distloop.from_callback(keras.callbacks.ReduceLROnPlateau("reward"), every=1), "'reward'", "mode='max'"
    )


@pytest.mark.slow
def test_a_callback_goes_on_in_the_next_fit_and_is_refused_by_another_run():
    class Listing(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.epochs = []

        def on_epoch_end(self, epoch, logs=None):
            self.epochs.append(epoch)

    losses, listing, seen = Losses(), Listing(), []
    actions = lambda: [distloop.from_callback(callback, every=2) for callback in (losses, listing)]  # noqa: E731
    trainer = distloop.Trainer(classifier(), on(1))
    for steps in (4, 8):
        trainer.fit(batches(), steps=steps, actions=actions())
        seen.append((len(losses.losses), listing.epochs))
    assert seen == [(2, [0, 1]), (4, [0, 1, 2, 3])]
    another = distloop.Trainer(classifier(), on(1))
    sentence = "'from_callback(Losses)' was given to another run"
    refused(lambda: another.fit(batches(), steps=4, actions=actions()), sentence)
