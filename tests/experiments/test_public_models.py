"""The command that tries public models: two tiny ones in place of the public ones, and the table that it writes."""

import re

import keras
import numpy as np
import pytest

import distloop
from experiments.public_models import page, schedule, trials, zoo

HOLDS = {"difference": 1e-6, "tolerance": 1e-4}
OPEN = {"difference": 3e-3, "tolerance": 1e-4}


def row_of(model, cells, column):
    lines = page.table(cells).splitlines()
    titles = [title.strip() for title in lines[0].split("|")]
    row = next(line for line in lines if line.startswith(f"| {model} |"))
    return row.split("|")[titles.index(page.COLUMNS[column])].strip()


def test_every_architecture_and_forty_backbones_are_on_the_list():
    assert {"ResNet50", "ConvNeXtXLarge", "NASNetLarge"} < set(zoo.ARCHITECTURES) and len(zoo.ARCHITECTURES) >= 40
    assert len(zoo.BACKBONES) >= 40


def test_a_difference_is_relative_to_what_training_changed():
    initial = {"kernel": np.array([100.0]), "bias": np.array([0.0])}
    reference = {"kernel": np.array([101.0]), "bias": np.array([1e-9])}  # a bias without a gradient
    assert trials.difference({**reference, "kernel": np.array([101.5])}, reference, initial) == (0.5, "kernel")
    rounding, name = trials.difference({**reference, "bias": np.array([-1e-9])}, reference, initial)
    assert rounding == pytest.approx(2e-7) and name == "bias"
    assert np.isnan(trials.difference({**reference, "bias": np.array([np.nan])}, reference, initial)[0])


def test_the_table_says_what_holds_and_why_a_number_is_too_large():
    cells = [
        {"model": "MobileNetV2", "trial": "one_replica", "cell": "keras", **HOLDS},
        {"model": "MobileNetV2", "trial": "replicas_2", "cell": "replicas_2", **OPEN},
        {"model": "MobileNetV2", "trial": "float64", "cell": "replicas_2/float64", "difference": 2e-13},
        {"model": "MobileNetV2", "trial": "resume", "cell": "resume", "difference": 0, "tolerance": 0},
        {"model": "MobileNetV2", "trial": "split", "cell": "split", "refused": "It cannot | be cut."},
        {"model": "VGG16", "trial": "replicas_2", "cell": "replicas_2", **OPEN},
        {"model": "VGG16", "trial": "resume", "cell": "resume", "difference": 3, "tolerance": 0},
        {"model": "VGG16", "trial": "mixed", "cell": "mixed_float16", "difference": float("nan"), "tolerance": 0.1},
        {"model": "VGG16", "trial": "mixed", "cell": "mixed_bfloat16", "error": "No.", "keras": None},
    ]  # fmt: skip
    of_columns = {"keras": "1e-06", "replicas_2": "**3e-03** float64 2e-13", "resume": "0", "export": "not run"}
    of_columns["split"] = "A"
    assert {name: row_of("MobileNetV2 (small/MobileNetV2)", cells, name) for name in of_columns} == of_columns
    assert "- A: refused: It cannot / be cut." in page.table(cells)
    row = "VGG16 (small/VGG16)"
    assert row_of(row, cells, "replicas_2") == "**3e-03**" and row_of(row, cells, "mixed_float16") == "**nan**"
    assert row_of(row, cells, "mixed_bfloat16") == "B Keras error"
    counts = [int(number) for number in re.findall(r"\d+", page.counted(cells))]
    assert counts[:6] == [sum(counts[1:-1]), 2, 2, 3, 1, 0]
    assert counts[0] + counts[-1] == len(zoo.NAMES) * len(page.COLUMNS)
    assert [trials.is_open(cell) for cell in cells] == [False, True, False, False, False, True, False, False, False]


def test_a_member_of_a_family_names_the_model_that_has_its_other_cells():
    models = ("VGG19", "small/VGG16", "hub/RobertaBackbone")
    cells = [{"model": model, "trial": "exact", "cell": "replicas_2", **HOLDS} for model in models]
    cells.append({"model": "small/VGG16", "trial": "half", "cell": "mixed_float16", **HOLDS})
    assert row_of("VGG19 (small/VGG16)", cells, "mixed_float16") == "family"
    assert row_of("VGG19 (small/VGG16)", cells, "split") == row_of("small/VGG16", cells, "split") == "not run"
    assert row_of("VGG19 (small/VGG16)", cells, "replicas_2") == "1e-06"
    assert row_of("hub/Roberta (hub/Bert)", cells, "split") == "not run"
    assert "Left to the model of their family" not in page.table(cells)
    cells.append({"model": "small/VGG16", "trial": "exact", "cell": "keras", **HOLDS})
    assert "\nLeft to the model of their family: VGG16 (small/VGG16).\n" in page.table(cells)
    assert all(model in zoo.NAMES for model in zoo.FAMILIES)


@pytest.mark.wide
def test_a_small_form_has_the_kinds_of_layers_of_its_architecture():
    for model in ("small/MobileNetV2", "small/VGG16"):
        kinds = [{type(layer) for layer in zoo.make(name).layers} for name in (model, model.removeprefix("small/"))]
        assert kinds[1] - kinds[0] <= {keras.layers.Flatten}
    assert zoo.make(model).count_params() == zoo.make(model).count_params()  # made again from its config


def tiny(name):
    """Returns a compiled classifier in place of a public model."""
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="gelu")(inputs)
    if name == "normalized":
        hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(zoo.CLASSES)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(zoo.LEARNING_RATE, momentum=zoo.MOMENTUM), loss)
    return model


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("plain", ["one_replica", "mixed_bfloat16"]),
        ("normalized", ["one_replica", "replicas_2", "microbatches", "resume"]),
        ("normalized", ["exact"]),
    ],
)
def test_promises_hold_for_a_small_model(name, names, tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "make", tiny)
    cells = [cell for trial in names for cell in trials.TRIALS[trial][1](name, str(tmp_path))]
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
    first = {"one_replica": "rebuilt keras export keras_file", "exact": "keras replicas_2 microbatches resume export"}
    assert [cell["cell"] for cell in cells] == [*first[names[0]].split(), *names[1:]]
    assert all(cell["difference"] <= cell["tolerance"] for cell in cells), cells


def echo(sender, model, trial, directory):
    if model == "VGG16":
        raise SystemExit(3)
    sender.send({"model": model, "trial": trial, "cell": "keras", **HOLDS})


@pytest.mark.wide
def test_a_trial_that_is_done_is_not_run_again_and_one_that_dies_is_a_cell(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(schedule, "_send", echo)
    for _ in range(2):
        schedule.run(["VGG16", "Xception"], ["exact"], str(tmp_path), limit_secs=60)
    first, second = schedule.read(str(tmp_path))
    assert first["error"] == "the process ended with exit code 3" and second["difference"] == 1e-6
    assert capfd.readouterr().out.count("exact:") == 2


def test_a_sentence_of_distloop_is_a_refusal_and_other_exceptions_errors():
    refusal = trials.attempt(lambda: distloop.synchronize({}))
    error = trials.attempt(lambda: keras.activations.get("no such activation"))
    assert refusal["refused"].startswith("synchronize was given") and error["error"].startswith("ValueError: ")
