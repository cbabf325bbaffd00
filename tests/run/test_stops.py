"""What workers compare before they train; tests/test_workers.py has workers that differ."""

import json
import os
import shutil
import time

import keras
import pytest

import distloop
from distloop.distributed import collectives
from distloop.launcher.inbox import Inbox
from distloop.run.fit_call import require_same_run
from distloop.workers import messages
from tests import forked
from tests.problems import batches, classification, classifier, mirrored, mostly_wide, on


def test_a_run_is_described_by_its_end_its_lists_and_its_variables(monkeypatch):
    compared = {}
    monkeypatch.setattr(collectives, "require_same", lambda strategy, what, facts: compared.update(facts))

    def act(report):
        return None

    act.every = 3
    trainer = distloop.Trainer(classifier(batch_norm="local", metrics=True), on(1))
    require_same_run(trainer.state, 5, [], [act, distloop.StopEarly("loss")])
    variables = {name: text for name, text in compared.items() if name.startswith("the variable ")}
    assert len(variables) == 7
    assert variables["the variable 'net/hidden/kernel'"] == "(8, 16) float32, trained"
    assert variables["the variable 'net/norm/moving_mean'"] == "(16,) float32"
    assert {name: fact for name, fact in compared.items() if name not in variables} == {
        "the last step": 5,
        "evals": [],
        "actions": [("act", 3), ("StopEarly", None)],
        "the Keras metrics": ["auc", "most"],
    }


@pytest.mark.slow
def test_a_layer_that_is_frozen_or_unfrozen_between_two_fits_is_named():
    trainer = distloop.Trainer(classifier(), on(1))
    trainer.fit(batches(8, 32), steps=2)
    hidden = trainer.model.get_layer("hidden")
    for frozen, sentence in (
        (hidden, "`trainable` of 'net/hidden/bias', 'net/hidden/kernel' was changed since"),
        (trainer.model, "another Trainer, whose model_fn sets it, in a workdir of its own"),
    ):
        frozen.trainable = False
        with pytest.raises(ValueError, match=sentence):
            trainer.fit(batches(8, 32), steps=4)
    trainer.model.trainable = True
    trainer.fit(batches(8, 32), steps=4)
    assert trainer.step == 4


@pytest.mark.slow
def test_a_users_layer_that_is_frozen_between_two_fits_is_named():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="head")])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows, trainer = classification(16), distloop.Trainer(distloop.from_keras(model), on(1))
    trainer.fit((rows["x"], rows["label"]), steps=2)
    model.get_layer("head").trainable = False
    with pytest.raises(ValueError, match="`trainable` of 'head' was changed"):
        trainer.fit((rows["x"], rows["label"]), steps=4)


def model_with_a_frozen_layer_on_one_worker():
    def model_fn():
        spec = classifier()()
        spec.model.get_layer("hidden").trainable = index == 0  # so that the other worker has no slots of it
        return spec

    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    distloop.Trainer(model_fn, distloop.Config(device="cpu", console="quiet"))


@pytest.mark.wide
@pytest.mark.slow
def test_models_whose_variables_differ_between_workers_end_in_a_sentence():
    shapes = r"\[(8,16\] and \[16,4|16,4\] and \[8,16)\]"  # of the worker that notices, and of the other one
    sentence = rf"ValueError: The workers computed tensors of different shapes \({shapes}\) where they"
    with pytest.raises(RuntimeError, match=sentence):
        forked.run_in_workers(model_with_a_frozen_layer_on_one_worker, 2)


@pytest.fixture
def launcher():
    launcher = Inbox()
    yield launcher
    launcher.close()


@pytest.fixture
def enter(launcher, monkeypatch):
    """Returns a function that lets this process be the only worker of a launcher."""

    def enter(**changes):
        membership = messages.Membership(1, "a", 1, 4, "", 0, launcher.pipe)._replace(**changes)
        monkeypatch.setenv(*next(iter(membership.variables().items())))

    return enter


def sharded(context):
    return batches(8, 32)


def fit(data, steps=2, **settings):
    trainer = distloop.Trainer(classifier(), on(1, **{"console": "quiet", **settings}))
    trainer.fit(data, steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "is_sharded", "sentence"),
    [
        ({"workdir": ""}, False, r"^workers=1:4 was given to the launcher with no workdir, but after a change of"),
        ({"resume": False}, False, "with resume=False, but after a change of workers the run goes on from its newest"),
        ({}, True, r"with data that is one worker's part \(a function of InputContext.* cannot be cut anew"),
        ({"replica_batch_size": 8, "batch_size": 0}, False, "with replica_batch_size=8, so that the batch would"),
    ],
)
def test_what_cannot_go_on_with_other_workers_is_refused_at_once(
    settings, is_sharded, sentence, enter, launcher, tmp_path
):
    enter()
    with pytest.raises(ValueError, match=sentence):
        fit(sharded if is_sharded else batches(8, 32), **{"workdir": str(tmp_path), **settings})
    launcher.read()
    assert launcher.step is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "is_sharded"),
    mostly_wide(
        [
            ({"resume": False, "replica_batch_size": 8, "batch_size": 0}, True),
            ({"workdir": ""}, False),
            ({"resume": False}, False),
            ({}, True),
            ({"replica_batch_size": 8, "batch_size": 0}, False),
        ]
    ),
)
def test_with_a_fixed_number_of_workers_none_of_it_is_refused(settings, is_sharded, enter, tmp_path):
    enter(least=4)
    fit(sharded if is_sharded else batches(8, 32), **{"workdir": str(tmp_path), **settings})


@pytest.mark.slow
@pytest.mark.parametrize("virtual_replicas, sizes", mostly_wide([(0, (1, 2, 3, 4)), (4, (1, 2, 4))], (4, (1, 2, 4))))
def test_the_launcher_is_told_when_the_run_can_be_asked_to_leave(enter, launcher, tmp_path, virtual_replicas, sizes):
    enter()
    fit(batches(8, 32), workdir=str(tmp_path), virtual_replicas=virtual_replicas)
    launcher.read()
    assert (launcher.step, launcher.sizes, launcher.began_at) == (0, sizes, None)


@pytest.mark.slow
def test_a_change_of_workers_is_noted_with_its_cause_and_what_it_cost(enter, launcher, monkeypatch, tmp_path):
    settings = dict(workdir=str(tmp_path), log_every=1, checkpoint_every=1, keep_checkpoints=3)
    enter()
    fit(batches(8, 32), steps=3, **settings)
    shutil.rmtree(tmp_path / "checkpoints" / "3")
    monkeypatch.setattr(messages, "_marks", {})  # as in a new process
    now = time.time()
    enter(number=2, cause="worker 1 failed", lost_at=now - 9, ended_at=now - 6, started_at=now - 5)
    fit(batches(8, 32), steps=3, **settings)
    (row,) = map(json.loads, (tmp_path / "incidents.jsonl").read_text().splitlines())
    secs = {name: row.pop(name) for name in list(row) if name.endswith("_secs")}
    expected = {"step": 2, "action": "membership", "membership": 2, "workers": 1, "steps_again": 1}
    assert row.pop("time") >= now and row == expected | {"reason": "worker 1 failed"}
    assert list(secs) == ["ended_secs", "waited_secs", "imported_secs", "restored_secs", "traced_secs"]
    assert abs(secs["ended_secs"] - 3) < 0.01 and abs(secs["waited_secs"] - 1) < 0.01 and secs["imported_secs"] >= 5


@pytest.mark.slow
@pytest.mark.parametrize("devices_each, sizes", [(3, ()), (1, (1, 2, 4))])
def test_workers_that_do_not_divide_the_virtual_replicas_say_which_do(
    launcher, enter, monkeypatch, devices_each, sizes
):
    enter()
    monkeypatch.setattr(collectives, "num_local_replicas", lambda strategy: devices_each)  # 1: as on three workers
    with pytest.raises(ValueError, match="virtual_replicas=4 was given for 3 replicas"):
        distloop.Trainer(classifier(), on(1, virtual_replicas=4), strategy=mirrored(3))
    launcher.read()
    assert launcher.sizes == sizes
