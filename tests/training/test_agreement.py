"""What workers compare before they train; tests/test_workers.py has workers that differ."""

import keras
import pytest

import distloop
from distloop.distributed import workers
from distloop.training.agreement import describe_variables, require_same_run
from tests.problems import classification, classifier, on


def test_a_run_is_described_by_its_end_its_lists_and_each_variable_with_what_trains_it(monkeypatch):
    compared = {}
    monkeypatch.setattr(workers, "require_same", lambda strategy, what, facts: compared.update(facts))

    def act(report):
        return None

    act.every = 3
    trainer = distloop.Trainer(classifier(batch_norm="local", metrics=True), on(1))
    require_same_run(trainer.state, 5, [], [act, distloop.StopEarly("loss")])
    variables = {name: text for name, text in compared.items() if name.startswith("the variable ")}
    assert len(variables) == len(describe_variables(trainer.state)) == 7
    assert variables["the variable 'net/hidden/kernel'"] == "(8, 16) float32, trained"
    assert variables["the variable 'net/norm/moving_mean'"] == "(16,) float32"
    assert {name: fact for name, fact in compared.items() if name not in variables} == {
        "the last step": 5,
        "evals": [],
        "actions": [("act", 3), ("StopEarly", None)],
        "the Keras metrics": ["auc"],
    }


@pytest.mark.slow
def test_a_layer_that_is_frozen_or_unfrozen_between_two_fits_is_named():
    data, trainer = distloop.make_dataset(classification(16), 8), distloop.Trainer(classifier(), on(1))
    trainer.fit(data, steps=2)
    trainer.model.get_layer("hidden").trainable = False
    with pytest.raises(ValueError, match="`trainable` of 'net/hidden/bias', 'net/hidden/kernel' was changed since"):
        trainer.fit(data, steps=4)
    trainer.model.trainable = False
    with pytest.raises(
        ValueError, match="model_fn set it and begin a new run from these weights, with Config.init_from"
    ):
        trainer.fit(data, steps=4)
    trainer.model.trainable = True
    trainer.fit(data, steps=4)
    assert trainer.step == 4


@pytest.mark.slow
def test_a_layer_of_the_users_model_that_is_frozen_between_two_fits_is_named():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="head")])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows, trainer = classification(16), distloop.Trainer(distloop.from_keras(model), on(1))
    trainer.fit((rows["x"], rows["label"]), steps=2)
    model.get_layer("head").trainable = False
    with pytest.raises(ValueError, match="`trainable` of 'head' was changed"):
        trainer.fit((rows["x"], rows["label"]), steps=4)
