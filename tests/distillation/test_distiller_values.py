"""A compiled Distiller trains through `from_keras` to the numbers of Keras's own fit, on any number of devices."""

import keras
import numpy as np
import pytest

import distloop
from tests.keras_models.compiled_models import LABEL, SAMPLE_WEIGHT, X, assert_same_weights, batches
from tests.problems import mostly_wide, on

pytestmark = pytest.mark.slow
LOGITS, FEATURES = keras.distillation.LogitsDistillation, keras.distillation.FeatureDistillation
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network(width, name, has_batch_norm):
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(width, "tanh", name=f"{name}_hidden")(inputs)
    hidden = keras.layers.BatchNormalization()(hidden) if has_batch_norm else hidden
    bridge = keras.layers.Dense(4, name="bridge")(hidden)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(bridge), name=name)


def distiller(losses, loss=CROSS_ENTROPY, has_batch_norm=False, kind=keras.distillation.Distiller, **settings):
    keras.utils.set_random_seed(5)
    networks = (network(width, name, has_batch_norm) for width, name in ((16, "teacher"), (8, "student")))
    built = kind(*networks, losses, **settings)
    built.build((None, 6))
    # Keras runs eagerly, as a few batches take less time than tracing.
    built.compile(keras.optimizers.Adam(0.01), loss, ["accuracy"], run_eagerly=True)
    return built


KL = keras.losses.KLDivergence
CASES = {
    "logits": lambda: distiller(LOGITS(2.0, KL())),
    "Keras's default": lambda: distiller(LOGITS(), "sparse_categorical_crossentropy", student_loss_weight=0.3),
    "cross entropy": lambda: distiller(LOGITS(4.0, keras.losses.CategoricalCrossentropy(from_logits=True))),
    "features": lambda: distiller(FEATURES("mse", "bridge", "bridge")),
    "several": lambda: distiller(
        [LOGITS(3.0, KL()), FEATURES(keras.losses.MeanAbsoluteError(), "bridge", "bridge"), FEATURES("mse")],
        distillation_loss_weights=[1.0, 0.5, 0.2],
        student_loss_weight=0.7,
    ),
    "teacher alone": lambda: distiller(LOGITS(2.0, KL()), student_loss_weight=0.0),
    "labels alone": lambda: distiller(LOGITS(2.0, KL()), student_loss_weight=1.0),
}
RUNS = [(case, replicas) for case in CASES for replicas in (1, 2)]


@pytest.mark.parametrize(("case", "replicas"), mostly_wide(RUNS, ("logits", 1), ("several", 2)))
def test_weights_and_numbers_are_those_of_keras_own_fit(case, replicas):
    model, twin = CASES[case](), CASES[case]()
    teacher = [np.copy(w) for w in model.teacher.get_weights()]
    history = twin.fit(batches(X, LABEL), epochs=2, verbose=0).history
    trainer = distloop.Trainer(distloop.from_keras(model), on(replicas))
    numbers = trainer.fit(batches(X, LABEL), steps=8, evals={"test": batches(X, LABEL)})
    assert_same_weights(model, twin)
    assert_same_weights(trainer.model.student, twin.student)
    np.testing.assert_equal(model.teacher.get_weights(), teacher)
    evaluated = twin.evaluate(batches(X, LABEL), verbose=0, return_dict=True)
    names = ["loss", "student_loss", "distillation_loss", "total_loss", "accuracy"]
    assert {name: numbers[f"test/{name}"] for name in names} == pytest.approx(
        {name: float(evaluated[name]) for name in names}, rel=1e-4, abs=1e-6
    )
    assert history["student_loss"][-1] < history["student_loss"][0] or case == "teacher alone"


def test_statistics_move_as_in_keras_own_fit_and_an_evaluation_uses_them():
    model, twin = (distiller(FEATURES("mse", "bridge", "bridge"), has_batch_norm=True) for _ in range(2))
    twin.fit(batches(X, LABEL), epochs=2, verbose=0)
    trainer = distloop.Trainer(distloop.from_keras(model), on(1))
    trainer.fit(batches(X, LABEL), epochs=2)
    assert_same_weights(model, twin)  # moved twice a step: Keras calls the student for its outputs and its features
    features = [net.get_layer("bridge").output for net in (twin.teacher, twin.student)]
    of_teacher, of_student = (
        keras.Model(net.inputs, output)(X, training=False)
        for net, output in zip((twin.teacher, twin.student), features, strict=True)
    )
    expected = float(np.mean((of_teacher - of_student) ** 2))  # Keras's evaluate takes the statistics of the batch
    assert trainer.evaluate(batches(X, LABEL))["distillation_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("settings", mostly_wide([{"microbatches": 3}, {"virtual_replicas": 4}, {}]))
def test_two_devices_train_as_one_does(settings):
    trainers = []
    for replicas in (1, 2):
        trainer = distloop.Trainer(distloop.from_keras(CASES["several"]), on(replicas, **settings))
        trainer.fit(batches(X[:29], LABEL[:29]), steps=7)  # the last batch is odd
        trainers.append(trainer)
    assert_same_weights(trainers[1].model, trainers[0].model)


def test_the_teacher_is_saved_once_and_the_student_alone_trains(tmp_path):
    trainer = distloop.Trainer(distloop.from_keras(CASES["features"]()), on(1, workdir=str(tmp_path / "run")))
    trainer.fit(batches(X, LABEL), steps=3)
    names = list(trainer.state.all_variables())
    model = [name for name in names if name.startswith("model/")]
    assert len(model) == 12 and len([name for name in names if "momentum" in name]) == 6
    assert {v.path.split("/")[0] for v in trainer.state.trained_variables} == {"student_hidden", "bridge", "logits"}
    np.testing.assert_allclose(trainer.predict(X), trainer.model.student(X), rtol=1e-5, atol=1e-6)
    resumed = distloop.Trainer(distloop.from_keras(CASES["features"]()), on(2, workdir=str(tmp_path / "run")))
    resumed.fit(batches(X, LABEL), steps=6)
    straight = distloop.Trainer(distloop.from_keras(CASES["features"]()), on(1))
    straight.fit(batches(X, LABEL), steps=6)
    assert_same_weights(resumed.model, straight.model)


@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_a_function_may_build_and_compile_the_distiller(replicas):
    twin = CASES["logits"]()
    twin.fit(batches(X, LABEL), epochs=1, verbose=0)
    trainer = distloop.Trainer(distloop.from_keras(CASES["logits"]), on(replicas))
    trainer.fit(batches(X, LABEL), epochs=1)
    assert_same_weights(trainer.model, twin)


CROSS_ENTROPIES = [keras.losses.CategoricalCrossentropy(), "categorical_crossentropy"]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (CASES["Keras's default"], "kl_divergence"),
        *((lambda loss=loss: distiller(LOGITS(loss=loss)), "categorical_crossentropy") for loss in CROSS_ENTROPIES),
    ],
)
def test_a_loss_of_logits_without_a_softmax_is_named(make, name, capsys):
    distloop.Trainer(distloop.from_keras(make()), on(1))
    assert f"compares logits by {name}, to which Keras gives no softmax" in capsys.readouterr().err


class OfItsOwn(keras.distillation.DistillationLoss):
    def compute_loss(self, teacher_outputs, student_outputs, **settings):
        return keras.ops.mean(keras.ops.abs(teacher_outputs - student_outputs))


class Doubled(keras.distillation.Distiller):
    def compute_loss(self, *arguments, **settings):
        return 2 * super().compute_loss(*arguments, **settings)


class OtherTarget(keras.distillation.Distiller):
    def _extract_all_teacher_features(self, x):
        return super()._extract_all_teacher_features(2 * x)


class DoubledInput(keras.distillation.Distiller):
    def call(self, inputs, training=None, **settings):
        return super().call(2 * inputs, training=training, **settings)


def two_outputs():
    def make(name):
        inputs = keras.Input((6,))
        return keras.Model(inputs, [keras.layers.Dense(2)(inputs), keras.layers.Dense(2)(inputs)], name=name)

    built = keras.distillation.Distiller(make("teacher"), make("student"), FEATURES(["mse", None]))
    built.compile("sgd", ["mse", "mse"])
    return built


@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_a_call_of_its_own_is_followed_as_in_keras_own_fit(replicas):
    model, twin = (distiller(LOGITS(2.0, KL()), kind=DoubledInput) for _ in range(2))
    twin.fit(batches(X, LABEL), epochs=1, verbose=0)
    distloop.Trainer(distloop.from_keras(model), on(replicas)).fit(batches(X, LABEL), epochs=1)
    assert_same_weights(model, twin)


REFUSED = {
    "own loss": (lambda: distiller(OfItsOwn()), "has a OfItsOwn, whose compute_loss returns one number for a batch"),
    "functions": (two_outputs, "a loss function for one of several outputs, whose values Keras sums over the batch"),
    "weights": (CASES["logits"], "was given sample weights or class_weight, which Keras leaves out of its loss: give"),
    "own compute_loss": (
        lambda: distiller(LOGITS(), kind=Doubled),
        "has a compute_loss of its own, which distloop would not call: write a model_fn",
    ),
    "own features": (lambda: distiller(LOGITS(), kind=OtherTarget), "has a _extract_all_teacher_features of its own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_values_per_example_is_refused(case):
    make, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        distloop.Trainer(distloop.from_keras(make), on(1)).fit(batches(X, LABEL, SAMPLE_WEIGHT), steps=1)
