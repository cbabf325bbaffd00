"""Arguments of another kind than the annotation of a public function allows: each is named in one sentence."""

import inspect
import pathlib

import keras
import numpy as np
import pytest
from keras.optimizers import SGD

import distloop
from tests.problems import classification, classifier, on, refused

DATA = {"x": np.zeros([4, 1], np.float32)}


def trainer():
    return distloop.Trainer(classifier(), on(1))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: distloop.Mixture([DATA], {"a": 1.0}), "Mixture was given sources=[{'x': array("),
        (lambda: distloop.Mixture({"a": DATA}, [1.0]), "Mixture was given weights=[1.0], a list: give a dict."),
        (lambda: distloop.make_dataset(DATA, 2, shuffle="no"), "shuffle='no', a str: give True or False or a whole"),
        (lambda: distloop.make_dataset(DATA, 2, map_fn=3), "make_dataset was given map_fn=3, an int: give a function"),
        (lambda: distloop.make_schedule(0.1, 10, drop_at=3), "drop_at=3, an int: give a list"),
        (lambda: distloop.open_records(3), "open_records was given files=3, an int: give a string or a path or a list"),
        (lambda: distloop.SaveBest("loss", restore="no"), "SaveBest was given restore='no', a str: give True or False"),
        (lambda: distloop.StopEarly("loss", restore_best="no"), "restore_best='no', a str: give True or False."),
        (lambda: distloop.Summary("a", 3), "Summary was given fn=3, an int: give a function."),
        (lambda: distloop.Export(print, "exports", suffix=3), "Export was given suffix=3, an int: give a string."),
        (lambda: distloop.Export(print, "exports", every=[]), "give a whole number or a string."),
        (lambda: distloop.ModelSpec(0, SGD(0.1), print, metrics=["auc"]), "metrics=['auc'], a list: give a dict"),
        (lambda: distloop.prepare(3), "prepare was given config=3, an int: give a Config."),
        (lambda: distloop.read_metrics(3), "read_metrics was given workdir=3, an int: give a string or a path."),
        (lambda: distloop.notebook_launch(3), "notebook_launch was given 3 to call: give a function."),
        (lambda: distloop.Trainer(classifier(), 3), "Trainer was given config=3, an int: give a Config."),
        (lambda: trainer().restore(3), "Trainer.restore was given path=3, an int: give a string or None."),
        (lambda: trainer().export(3), "Trainer.export was given path=3, an int: give a string."),
        (lambda: trainer().fit(classification(), actions=print), "actions=<built-in function print>"),
    ],
)
def test_an_argument_of_another_kind_is_named_with_what_to_give(call, message):
    refused(call, message)


def test_values_that_stand_for_an_allowed_kind_are_taken():
    distloop.make_schedule(np.float32(0.1), np.int64(10), drop_at=[])
    distloop.make_dataset(DATA, np.int64(2), shuffle=np.bool_(True), seed=np.int64(1))
    distloop.Export(print, pathlib.Path("exports"), every=10, suffix=".keras")
    distloop.StopEarly("loss", mode="min", min_delta=1, patience=np.int32(2))
    distloop.Summary("a", print, every="1 epoch")


def test_an_error_of_the_users_code_stays_as_it_is():
    def model_fn():
        return keras.nothing

    with pytest.raises(AttributeError, match="nothing"):
        distloop.Trainer(model_fn, on(1))


def test_a_call_without_a_required_argument_is_explained_by_python():
    with pytest.raises(TypeError, match="missing 1 required"):
        distloop.make_schedule(0.1)


def test_every_public_function_and_class_with_arguments_to_check_does_so():
    free = {"Action", "Report", "Writer", "History", "Config", "StopTraining", "GradientStep", "OwnStep", "Replay"}
    free |= {"MemoryEstimate", "BatchTest", "RateTest"}  # are made by distloop
    free |= {"synchronize", "secret_flag"}  # take one argument, of their caller's type
    free |= {"LazyAdam", "LazyAdamW", "LazySGD"}  # by Keras
    free |= {"Trainer"}  # by with_short_tracebacks
    unchecked = []
    for name in sorted(set(distloop.__all__) - free):
        public = getattr(distloop, name)
        called = public.__init__ if inspect.isclass(public) else public
        kinds = [p.annotation for p in inspect.signature(called).parameters.values()]
        if any("Any" not in str(kind) and kind is not inspect.Parameter.empty for kind in kinds):
            unchecked += [] if hasattr(called, "__wrapped__") else [name]
    assert unchecked == []
