"""Tuning: what it suggests, and that it changes nothing."""

import glob

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import distloop
from distloop.audit import tuning
from tests.problems import assert_equal, batches, classification, classifier, everything, on, refused, weights


def trainer_of(replicas=1, optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9), **settings):
    return distloop.Trainer(classifier(optimizer=optimizer), on(replicas, **{"console": "quiet", **settings}))


@pytest.mark.wide
@pytest.mark.slow
def test_the_suggestion_is_the_same_on_any_number_of_replicas():
    result = [distloop.find_learning_rate(trainer_of(replicas), batches()) for replicas in (1, 2)]
    assert result[0].suggestion == result[1].suggestion
    assert 1e-3 < result[0].suggestion < 1
    np.testing.assert_allclose(result[0].losses[:60], result[1].losses[:60], rtol=1e-5)


@pytest.mark.slow
def test_the_rate_grows_by_one_factor_until_the_loss_explodes():
    whole, trainer = distloop.make_dataset(classification(), 67), trainer_of()
    result = distloop.find_learning_rate(trainer, whole, lowest=1e-3, highest=1e5, steps=33)
    assert len(result.rates) == len(result.losses) == len(result.smoothed) < 33
    np.testing.assert_allclose(result.rates[1:] / result.rates[:-1], 10**0.25, rtol=1e-6)
    assert result.rates[0] == pytest.approx(1e-3)
    assert result.smoothed[-1] > 4 * result.smoothed.min()
    falls = result.smoothed[:-3] - result.smoothed[3:]
    assert result.suggestion == result.rates[falls.argmax()] > result.rates[0]
    assert float(trainer.optimizer.learning_rate) == pytest.approx(0.1)
    trainer.optimizer.learning_rate = 0.0
    before = weights(trainer)
    trainer.fit(whole, steps=2)
    assert_equal(weights(trainer), before)


@pytest.mark.slow
def test_a_loss_not_finite_at_the_lowest_rate_is_an_error_and_no_rate():
    trainer = trainer_of()
    before = weights(trainer)
    rows = classification()
    rows["x"][3, 1] = np.nan
    with pytest.raises(FloatingPointError, match="the batch itself holds such numbers, in x, first in row"):
        distloop.find_learning_rate(trainer, distloop.make_dataset(rows, 67))
    assert_equal(weights(trainer), before)


@pytest.mark.slow
def test_each_step_takes_its_rate():
    taken = []

    class Noting(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            if len(variable.shape) == 1 and variable.shape[0] == 4:
                tf.py_function(lambda rate: taken.append(float(rate)), [learning_rate], [])
            super().update_step(gradient, variable, learning_rate)

    trainer = trainer_of(optimizer=lambda: Noting(0.1), eager=True)
    result = distloop.find_learning_rate(trainer, batches(), lowest=1e-4, highest=1e-2, steps=5)
    np.testing.assert_allclose(taken, result.rates, rtol=1e-6)
    np.testing.assert_allclose(result.rates, [1e-4, 10**-3.5, 1e-3, 10**-2.5, 1e-2], rtol=1e-6)


def test_a_learning_rate_test_lets_no_failed_state_be_saved(tmp_path):
    rows = classification(67)
    rows["x"][5] = np.nan
    trainer = trainer_of(workdir=tmp_path)
    with pytest.raises(FloatingPointError):
        trainer.fit(distloop.make_dataset(rows, 16), steps=1)
    distloop.find_learning_rate(trainer, batches(), lowest=1e-4, highest=1e-2, steps=5)
    with pytest.raises(ValueError, match="The last step failed"):
        trainer.save()


@pytest.mark.wide
@pytest.mark.slow
def test_a_learning_rate_test_changes_no_bit():
    schedule = keras.optimizers.schedules.CosineDecay(0.01, 20)
    model_fn = classifier(optimizer=lambda: keras.optimizers.Adam(schedule), dropout=0.2, batch_norm="local")
    found = []
    for is_tested in (True, False):
        settings = on(1, console="quiet", precision="mixed_float16", average_decay=0.9)
        trainer, data = distloop.Trainer(model_fn, settings), batches(shuffle=True)
        trainer.fit(data, steps=3)
        if is_tested:
            before = everything(trainer)
            assert len(distloop.find_learning_rate(trainer, data, steps=20).rates) > 10
            assert_equal(everything(trainer), before)
        trainer.fit(data, steps=9)
        found.append(everything(trainer))
    assert_equal(*found)


def two_updates():
    """A spec of two updates whose losses are their weights, so that a step takes its rate from each."""
    first, second = tf.Variable(10.0), tf.Variable(20.0)

    def update(name, weight, rate):
        loss_fn = lambda batch, training: {"loss": weight * tf.ones_like(batch)}  # noqa: E731
        return distloop.Update(name, loss_fn, keras.optimizers.SGD(rate), [weight])

    return distloop.ModelSpec([first, second], updates=[update("first", first, 0.5), update("second", second, 0.25)])


@pytest.mark.slow
@pytest.mark.parametrize(("update", "begin"), [("first", 10.0), ("second", 20.0)])
def test_of_two_updates_the_named_one_gets_the_rates_and_has_the_curve(monkeypatch, update, begin):
    rows = []
    call = tuning._WatchLoss.__call__
    monkeypatch.setattr(tuning._WatchLoss, "__call__", lambda *args: rows.append(args[1].metrics) or call(*args))
    trainer, data = distloop.Trainer(two_updates, on(1, console="quiet")), tf.data.Dataset.from_tensors([1.0])
    result = distloop.find_learning_rate(trainer, data, lowest=0.01, highest=1.0, steps=5, update=update)
    np.testing.assert_allclose(result.rates, 0.01 * 10 ** (0.5 * np.arange(5)), rtol=1e-6)
    np.testing.assert_allclose(result.losses, begin - np.cumsum([0, *result.rates[:-1]]), rtol=1e-6)
    other, rate, at = ("second", 0.25, 20.0) if update == "first" else ("first", 0.5, 10.0)
    np.testing.assert_allclose([row[f"{other}/loss"] for row in rows], at - rate * np.arange(5), rtol=1e-6)
    assert [float(weight) for weight in trainer.model] == [10.0, 20.0]
    refused(lambda: distloop.find_learning_rate(trainer, data), "update=''", "['first', 'second']", "name one of them")


@pytest.mark.slow
def test_tensorboard_shows_the_curve_over_the_logarithm_of_the_rate(tmp_path):
    result = distloop.find_learning_rate(trainer_of(workdir=tmp_path), batches(), lowest=1e-4, highest=1e-2, steps=5)
    (path,) = glob.glob(str(tmp_path / "learning_rate" / "*"))
    events = EventAccumulator(path).Reload()
    assert set(events.Tags()["scalars"]) == {"Metrics/loss", "Metrics/smoothed_loss"}
    shown = events.Scalars("Metrics/loss")
    assert [e.step for e in shown] == [-400, -350, -300, -250, -200]
    assert [e.value for e in shown] == pytest.approx(result.losses)


@pytest.mark.slow
def test_a_loss_that_never_falls_gives_no_suggestion(capsys):
    result = distloop.find_learning_rate(trainer_of(), batches(), lowest=1e3, highest=1e6, steps=4)
    assert result.suggestion is None
    tuning._report(result, distloop.Config())
    assert "distloop: No learning rate is suggested: the loss never fell by more" in capsys.readouterr().out


def test_what_makes_no_sense_is_refused():
    trainer = trainer_of()
    for arguments, words in (
        ({"lowest": 0.0}, "lowest=0.0"),
        ({"lowest": 2.0, "highest": 1.0}, "0 < lowest < highest"),
        ({"steps": 1}, "steps=1; give a whole number, 2 or more"),
        ({"update": "generator"}, r"update='generator'; the model's updates are \[''\]"),
    ):
        with pytest.raises(ValueError, match=words):
            distloop.find_learning_rate(trainer, batches(), **arguments)


def test_noise_is_no_fall_and_a_fall_is_seen_through_it_without_bias():
    noises = [np.random.default_rng(seed).normal(1.0, 0.1, 100) for seed in range(100)]
    assert sum(tuning.steepest_fall(noise, 10) is not None for noise in noises) <= 3
    for noise in noises:
        falling = noise - np.clip(np.arange(-50, 50) / 20, 0, 1)  # by 1 from step 50 to 70
        assert 45 <= tuning.steepest_fall(falling, 10) <= 65
    assert tuning.steepest_fall(np.array([]), 10) is None
    np.testing.assert_allclose(tuning.smooth(np.full(5, 3.0)), 3.0)
    np.testing.assert_allclose(tuning.smooth(np.array([1.0, 2.0])), [1.0, (0.9 + 2.0) / 1.9])


def speeds(monkeypatch, result):
    """Makes each batch size as fast as given, in examples a second; or an error."""

    def measure(state, settings, rows, batch_size):
        value = result[batch_size]
        if isinstance(value, Exception):
            raise value
        return tuning.BatchTrial(batch_size, value, 1.0, cpu_utilization=0.874)

    monkeypatch.setattr(tuning, "_measure", measure)


def test_the_fastest_batch_is_suggested_and_larger_ones_are_not_tried(monkeypatch, capsys):
    speeds(monkeypatch, {16: 100.0, 32: 180.0, 64: 200.0, 128: 205.0, 256: 203.0})
    trainer = distloop.Trainer(classifier(), on(2))
    result = distloop.autotune_batch(trainer, batches().repeat())
    assert [trial.batch_size for trial in result.trials] == [16, 32, 64, 128, 256]
    assert result.suggestion == 64 and result.reason == "larger ones are no faster"
    printed = capsys.readouterr().out
    assert "batch 32 = 16 on each of 2 replicas: 180 examples/s, cores 87 % busy, 1.00 GB" in printed
    assert "take --batch_size=64, and a learning rate 4 times as high with SGD, 2 times with Adam" in printed


@pytest.mark.slow
def test_the_search_ends_at_the_dataset_or_a_batch_that_does_not_fit(monkeypatch):
    speeds(monkeypatch, {16: 100.0, 32: 200.0, 64: 400.0})
    result = distloop.autotune_batch(trainer_of(), batches())  # 67 rows
    assert result.suggestion == 64 and result.reason == "a batch of 128 is more than the dataset has"
    full = tf.errors.ResourceExhaustedError(None, None, "OOM")
    speeds(monkeypatch, {16: 100.0, 32: 200.0, 64: full})
    result = distloop.autotune_batch(trainer_of(), batches())
    assert result.suggestion == 32 and result.reason == "a batch of 64 does not fit"
    speeds(monkeypatch, {16: full})
    with pytest.raises(ValueError, match="own batch, of 16 rows, does not fit into memory"):
        distloop.autotune_batch(trainer_of(), batches())


@pytest.mark.slow
def test_a_batch_that_may_take_too_much_memory_is_not_tried(monkeypatch):
    speeds(monkeypatch, {16: 100.0, 32: 200.0, 64: 400.0})
    monkeypatch.setattr(tuning, "available_gb", lambda: 2.0)
    trainer = trainer_of()
    for arguments, reason in (
        ({}, "a batch of 32 may take more than 1 GB of memory"),
        ({"memory_share": 0.7}, "a batch of 64 may take more than 1.4 GB of memory"),
        ({"memory_share": 1}, "a batch of 128 is more than the dataset has"),
    ):
        levels = iter([1.0, 1.6, 1.8])
        monkeypatch.setattr(tuning.memory, "peaks", lambda: {"host_memory_gb": next(levels)})  # noqa: B023
        assert distloop.autotune_batch(trainer, batches(), **arguments).reason == reason


def test_a_share_of_memory_that_makes_no_sense_is_refused():
    trainer = trainer_of()
    for share in (0, -0.5, 1.5, float("nan")):
        call = lambda: distloop.autotune_batch(trainer, batches(), memory_share=share)  # noqa: B023, E731
        refused(call, f"memory_share={share} was given to autotune_batch", "above 0, up to 1")


@pytest.mark.wide
@pytest.mark.slow
def test_measuring_batches_changes_no_bit(monkeypatch):
    monkeypatch.setattr(tuning, "_MEASURED_SECS", 0.01)
    monkeypatch.setattr(tuning, "available_gb", lambda: -1.0)  # for no second one
    model_fn = classifier(dropout=0.2, batch_norm="local")
    trainer = distloop.Trainer(model_fn, on(2, console="quiet", average_decay=0.9))
    data = batches()
    trainer.fit(data, steps=3)
    before = everything(trainer)
    (result, *_) = distloop.autotune_batch(trainer, data).trials
    assert result.batch_size == 16 and result.examples_per_sec > 0 and result.memory_gb > 0.1
    assert 0.05 < result.cpu_utilization <= 1 and result.gpu_utilization is None
    assert_equal(everything(trainer), before)
