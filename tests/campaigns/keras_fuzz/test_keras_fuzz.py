"""Programs drawn from Keras's public names give the same numbers with Keras and with distloop.

`python -m tests.campaigns.keras_fuzz --seconds=3600 --seed=1` compares as many as there is time for.
"""

import dataclasses
import re

import keras
import pytest

from tests.campaigns.keras_fuzz import grammar, objectives
from tests.campaigns.keras_fuzz.comparison import Outcome, compare
from tests.campaigns.keras_fuzz.drawing import draw_program
from tests.campaigns.keras_fuzz.shrinking import shrink
from tests.problems import mostly_wide

# Programs of half a minute of one processor together.
NUMBERS = [200007, 300001, 400023, 400065, 400140]

# Public names that no program draws, and why.
EXCEPTIONS = {
    "layers": {
        "FlaxLayer": "needs JAX",
        "JaxLayer": "needs JAX",
        "TorchModuleWrapper": "needs PyTorch",
        "TFSMLayer": "loads a SavedModel",
        "InputSpec": "no layer",
        "InputLayer": "made by Input",
        "Layer": "the parent of layers",
        "Wrapper": "the parent of layers",
        "HashedCrossing": "takes two integer inputs",
        "MaxNumBoundingBoxes": "takes bounding boxes",
    },
    "losses": {
        "Loss": "the parent of losses",
        "categorical_generalized_cross_entropy": "needs an argument; its class is drawn",
        "circle": "needs an argument; its class is drawn",
    },
    "metrics": {
        "Metric": "the parent of metrics",
        "Mean": "takes values, not labels and predictions",
        "Sum": "takes values, not labels and predictions",
    },
    "optimizers": {"Optimizer": "the parent of optimizers", "legacy": "a module", "schedules": "a module"},
    "optimizers.schedules": {"LearningRateSchedule": "the parent of schedules"},
    "regularizers": {"Regularizer": "the parent of regularizers"},
    "constraints": {"Constraint": "the parent of constraints"},
}
FOR_CONFIGS = {"get", "serialize", "deserialize"}


def module_of(name):
    return keras.optimizers.schedules if name == "optimizers.schedules" else getattr(keras, name)


def texts_of(value):
    """Yields all texts in the tables that programs are drawn from."""
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from texts_of([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, dict):
        yield from texts_of(list(value.items()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from texts_of(part)


def drawn_names(module_name):
    """Returns the objects of a module of Keras that the tables name, by the class or function itself."""
    tables = [grammar.SYMBOLS, grammar.MERGES, grammar.ATTENTIONS, grammar.SQUASHES, objectives.KINDS]
    text = " ".join(texts_of(tables)).replace("keras.optimizers.schedules.{schedule}", "")
    names = re.findall(rf"keras\.{re.escape(module_name)}\.(\w+)", text)
    names += {"layers": list(grammar.LAYERS), "optimizers": list(grammar.OPTIMIZERS)}.get(module_name, [])
    if module_name == "optimizers":
        names += re.findall(r"keras\.optimizers\.(\w+)", " ".join(grammar.OPTIMIZERS.values()))
    if module_name == "optimizers.schedules":
        names += [text.partition("(")[0] for text in grammar.SYMBOLS["schedule"]]
    if module_name == "layers":
        names += ["Input"]
    return {id(getattr(module_of(module_name), name)) for name in names if hasattr(module_of(module_name), name)}


@pytest.mark.parametrize("module_name", [*EXCEPTIONS])
def test_every_public_name_of_keras_is_drawn_or_an_exception_with_a_reason(module_name):
    module, exceptions = module_of(module_name), EXCEPTIONS[module_name]
    drawn = drawn_names(module_name)
    names = [name for name in dir(module) if not name.startswith("_") and name not in FOR_CONFIGS]
    missing = [name for name in names if name not in exceptions and id(getattr(module, name)) not in drawn]
    assert not missing, "give each a line in grammar.py or objectives.py, or a reason here"
    assert not [name for name in exceptions if not hasattr(module, name) or id(getattr(module, name)) in drawn]


@pytest.mark.slow
@pytest.mark.parametrize("number", mostly_wide(NUMBERS, *NUMBERS[:1]))
def test_a_drawn_program_trains_as_keras_does(number):
    outcome = compare(draw_program(number))
    assert outcome.kind == "equal", f"{outcome.text}: python -m tests.campaigns.keras_fuzz --program={number}"


@pytest.mark.wide
def test_a_program_that_draws_or_that_keras_trains_to_nan_is_no_finding():
    program = draw_program(9100123)  # Ftrl divides by the learning rate, which falls to 0
    assert compare(program).kind == "invalid" and "RandomPosterization" in program.source()


def test_a_program_is_drawn_alike_from_its_number():
    assert draw_program(17) == draw_program(17) != draw_program(18)


def test_a_failing_program_shrinks_to_what_fails():
    program = draw_program(200009)
    wanted = program.heads[-1].loss

    def fails_with_the_loss(candidate):
        is_there = wanted in [head.loss for head in candidate.heads]
        return Outcome("wrong", "wrong loss") if is_there else Outcome("equal")

    smaller, _ = shrink(program, Outcome("wrong", "wrong loss"), fails_with_the_loss, seconds=10.0)
    assert [head.loss for head in smaller.heads] == [wanted]
    assert not smaller.trunk and len(smaller.inputs) == 1 and not smaller.inputs[0].steps
    assert smaller.epochs == 1 and smaller.replicas == (1,) and not smaller.has_weights
