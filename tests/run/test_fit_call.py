"""When a run ends, and what an epoch, an example and a percent of it are in steps."""

import types

import numpy as np
import pytest

import distloop
from distloop.data.shards import BatchLayout
from distloop.run import fit_call
from distloop.settings.durations import Period
from tests.problems import classification, classifier, on

SOURCE = types.SimpleNamespace(
    steps_per_epoch=7, info=types.SimpleNamespace(batch_size=64), layout=BatchLayout(False), strategy=None
)


def chosen(config=None, steps=None, epochs=None, until=None):
    return fit_call.run_end(config or distloop.Config(), 3, steps=steps, epochs=epochs, until=until)


def end(**length):
    return fit_call.make_units(SOURCE, chosen(**length)).run


def test_a_run_ends_after_the_length_that_fit_was_given():
    assert end(steps=5) == end(steps=np.int64(5)) == end(until=5) == end(until="5 steps") == Period(steps=5)
    assert end(epochs=3) == end(until="3 epochs") == Period(steps=21)
    assert end(until="1e3 examples") == Period(steps=16) and end(until="2 min") == Period(secs=120.0)


def test_without_arguments_the_config_says_when():
    for length, expected in (({"steps": 4}, 4), ({"epochs": 2}, "2 epochs"), ({"until": "1 h"}, "1 h")):
        config = distloop.Config(**length)
        assert chosen(config) == expected
        assert chosen(config, steps=5) == 5 and chosen(config, until="2 h") == "2 h"
    assert chosen(distloop.Config(fast_dev_run=True)) == 4


@pytest.mark.parametrize(
    "length, every", [({"steps": 100}, 0), ({"epochs": 3}, 7), ({"until": "3 epochs"}, 7), ({"until": "2 h"}, 0)]
)
def test_a_run_of_epochs_is_evaluated_after_each_and_another_at_its_end(length, every):
    assert fit_call.make_units(SOURCE, chosen(**length)).period(distloop.Config().eval_every) == Period(steps=every)


def test_settings_of_no_effect_are_told():
    def told(evaluations, **settings):
        call = types.SimpleNamespace(config=distloop.Config(**settings), evaluations=evaluations, step=10)
        call.units = types.SimpleNamespace(run=Period(steps=20))
        return fit_call.idle_settings(call)

    given = {"checkpoint_every": 5, "keep_checkpoints": 9, "eval_every": "1 epoch", "eval_first": True}
    of_evals = [f"{given} has no effect without evals" for given in ("eval_every=1 epoch", "eval_first=True")]
    of_saves = [f"{given} has no effect without a workdir" for given in ("checkpoint_every=5", "keep_checkpoints=9")]
    assert told([]) == told(["one"], **given, workdir="run") == []
    assert told([], **given) == [*of_saves, *of_evals]
    assert told([], **given, workdir="run") == of_evals
    assert not [line for window in ("0:11", "12:14", "19:30") for line in told([], profile=window, workdir="run")]
    of_profile = "profile={} has no effect: this call of fit trains none of these steps"
    for window in ("0:10", "20:30"):
        assert told([], profile=window, workdir="run") == [of_profile.format(window)]


@pytest.mark.slow
def test_a_batch_size_of_replicas_beside_data_with_batches_is_told(caplog):
    for data, is_told in (((rows := classification(32)), False), (distloop.make_dataset(rows, 8), True)):
        trainer = distloop.Trainer(classifier(), on(2, replica_batch_size=8))
        trainer.fit(data, steps=1)
        assert ("replica_batch_size=8 has no effect: the data comes in batches" in caplog.text) is is_told


def test_a_run_that_is_over_says_what_to_raise():
    def why(step, secs=5.0, reason=None, **length):
        units, config = fit_call.make_units(SOURCE, chosen(**length)), distloop.Config()
        call = types.SimpleNamespace(units=units, step=step, config=config)
        return fit_call.why_over(call, secs, 0.0, reason).removesuffix(" to go on.")

    assert why(9, steps=9) == "Already at step 9 of 9: raise steps"
    assert why(60, steps=30) == (
        "Nothing to train: already at step 60, and the run ends at step 30, counted from its start and not from "
        "this call: raise steps"
    )
    assert why(14, epochs=2) == "Already at step 14 of 14: raise epochs"
    assert why(2, until="100 examples") == "Already at step 2 of 2: raise until"
    assert why(9, 61.0, until="1 min").endswith("after 0:01:01 of 0:01:00: raise until")
    assert why(4, reason="enough", steps=9) == "Stopped at step 4 before (enough): raise steps"


def logs(log_every="auto", **length):
    return fit_call.log_every(distloop.Config(log_every=log_every), fit_call.make_units(SOURCE, chosen(**length)))


def test_an_epoch_is_a_log_where_the_length_is_in_epochs():
    assert logs(epochs=10) == logs(until="10 epochs") == "1 epoch"
    assert logs(steps=70) == logs(until="1e3 examples") == 100
    assert logs(100, epochs=10) == 100 and logs(0, epochs=10) == 0 and logs("3 s", steps=70) == "3 s"


@pytest.mark.slow
def test_the_history_of_epochs_has_a_mean_of_each_and_changes_no_weight():
    def train(**settings):
        config = distloop.Config(device="cpu", num_devices=1, **settings)
        trainer, data = distloop.Trainer(classifier(), config), distloop.make_dataset(classification(48), 16)
        return trainer, trainer.fit(data, epochs=4, evals={"test": data})

    (trainer, result), (again, each) = train(), train(log_every=1)
    assert result.steps["loss"] == result.steps["test/loss"] == [3, 6, 9, 12]
    by_epoch = np.reshape(each.history["loss"], [4, 3]).mean(1)
    np.testing.assert_allclose(result.history["loss"], by_epoch, rtol=1e-6)
    for one, other in zip(trainer.model.get_weights(), again.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_stop_that_an_action_was_asked_for_is_no_warning(capsys):
    stop = distloop.StopEarly("loss", patience=1, mode="min", min_delta=1e9)
    stop.every = 1
    distloop.Trainer(classifier(), on(1, console="lines", log_every=1)).fit(classification(16), steps=5, actions=[stop])
    out, err = capsys.readouterr()
    assert "distloop: Stopped at step 2: loss was no better than" in out and "Stopped" not in err
