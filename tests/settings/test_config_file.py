"""`--config`: the values of a YAML or JSON file as flags."""

import enum
import json

import pytest
from absl import flags as absl_flags

from distloop.settings import flags
from distloop.settings.config import Config
from tests.settings.test_flags import fresh_flags, parse  # noqa: F401 - a fixture

DEFINE_FLAG = absl_flags.DEFINE_flag


class Optimizer(enum.IntEnum):
    SGD, ADAM = 0, 1


def own_flags(values):
    """Defines one of absl's flags of each kind that holds a list or a member of an enum."""
    absl_flags.DEFINE_spaceseplist("widths", [], "Split at spaces.", flag_values=values)
    absl_flags.DEFINE_list("words", [], "Split at commas.", flag_values=values)
    absl_flags.DEFINE_enum_class("optimizer", Optimizer.SGD, Optimizer, "One of several.", flag_values=values)
    absl_flags.DEFINE_multi_enum_class("optimizers", [], Optimizer, "Some of several.", flag_values=values)


@pytest.fixture
def program(fresh_flags):  # noqa: F811
    """A program's flags: distloop's and its own."""
    flags.define_flags(batch_size=64)
    absl_flags.DEFINE_float("learning_rate", 1e-3, "Step size.")
    DEFINE_FLAG(absl_flags.MultiFlag(absl_flags.ArgumentParser(), None, "layer", [], "Layers."), fresh_flags)
    return fresh_flags


def test_a_yaml_file_sets_flags_and_the_command_line_takes_precedence(program, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "workdir: runs/a\nsteps: 2000\nlearning_rate: 1e-2\ncheckpoint_every: 10 min\ndeterministic: true\n"
        "seed: 3\nbatch_size: 32\nlayer: [a, b]\nclip_norm: null\n"
    )
    config = parse(program, "--seed=1", f"--config={path}", "--batch_size=16", "--learning_rate=0.1")
    assert config == Config(
        workdir="runs/a", steps=2000, checkpoint_every="10 min", deterministic=True, seed=1, batch_size=16
    )
    assert (program.learning_rate, program.layer) == (0.1, ["a", "b"])


@pytest.mark.parametrize(
    ("content", "argument", "settings"),
    [
        ({"steps": 2000, "epochs": 0}, "--epochs=3", {"epochs": 3, "batch_size": 64}),
        ({"epochs": 3}, "--until=2 h", {"until": "2 h", "batch_size": 64}),
        ({"batch_size": 32}, "--replica_batch_size=8", {"replica_batch_size": 8}),
        ({"batch_size": 0, "replica_batch_size": 8}, "--batch_size=32", {"batch_size": 32}),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_the_command_line_unsets_what_the_file_says_otherwise(program, tmp_path, content, argument, settings, is_first):
    (tmp_path / "run.json").write_text(json.dumps(content))
    arguments = [f"--config={tmp_path}/run.json", argument]
    assert parse(program, *arguments[:: 1 if is_first else -1]) == Config(**settings)


def test_a_file_that_contradicts_itself_is_refused(program, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"steps": 2000, "epochs": 3}))
    with pytest.raises(ValueError, match="steps=2000 and epochs=3 were both given"):
        parse(program, f"--config={tmp_path}/run.json")


@pytest.mark.parametrize("step", [1, -1])
def test_a_flag_that_is_repeated_on_the_command_line_has_its_values_alone(program, tmp_path, step):
    (tmp_path / "run.json").write_text(json.dumps({"layer": ["a", "b"]}))
    parse(program, *[f"--config={tmp_path}/run.json", "--layer=c", "--layer=d"][::step])
    assert sorted(program.layer) == ["c", "d"]


def test_a_text_with_colons_stays_one(program, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("profile: 10:20\nworkdir: 1:20.5\nsteps: 2_000\n")
    config = parse(program, f"--config={path}")
    assert (config.profile, config.workdir, config.steps) == ("10:20", "1:20.5", 2000)


def test_the_config_json_of_a_run_is_read_back_with_the_programs_own_flags(program, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["program"])
    own_flags(program)
    arguments = ["--steps=7", "--learning_rate=0.5", f"--workdir={tmp_path}", "--layer=x", "--widths=64 32"]
    arguments += ['--words="a, b",c', "--optimizer=adam", "--optimizers=sgd", "--optimizers=adam"]
    first = parse(program, *arguments)
    flags.write(first, str(tmp_path))
    program.unparse_flags()
    for name in program:
        program[name].unparse()
    again = parse(program, f"--config={tmp_path}/config.json")
    assert again == first
    assert (program.learning_rate, program.layer) == (0.5, ["x"])
    assert (program.widths, program.words) == (["64", "32"], ["a, b", "c"])
    assert (program.optimizer, program.optimizers) == (Optimizer.ADAM, [Optimizer.SGD, Optimizer.ADAM])
    assert "--config" not in (tmp_path / "flags.txt").read_text()
    flags.write(again, str(tmp_path / "again"))
    for name in ("config.json", "flags.txt"):
        assert (tmp_path / "again" / name).read_text() == (tmp_path / name).read_text()


def test_a_secret_that_a_file_hides_keeps_its_default(program, tmp_path):
    flags.secret_flag(absl_flags.DEFINE_string("token", "from the environment", "Of a host."))
    (tmp_path / "config.json").write_text(json.dumps({"token": "***", "steps": 5}))
    assert parse(program, f"--config={tmp_path}/config.json").steps == 5
    assert program.token == "from the environment"


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("stepz: 5", "'stepz', which is no flag of this program: did you mean 'steps'?"),
        ("- 5", "values by name"),
        ("model: {layers: 2}", "values by name"),
        ("steps: many", "invalid literal for int"),
        ("steps: [", "no YAML or JSON"),
        (None, "run.yaml cannot be read (No such file"),
    ],
)
def test_a_wrong_or_missing_file_is_refused_in_a_sentence(program, tmp_path, text, sentence):
    if text is not None:
        (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(absl_flags.IllegalFlagValueError) as error:
        parse(program, f"--config={tmp_path}/run.yaml")
    assert sentence in str(error.value) and str(tmp_path / "run.yaml") in str(error.value)


def test_a_programs_own_flag_of_that_name_stays(fresh_flags):  # noqa: F811
    absl_flags.DEFINE_string("config", "small", "Name of an architecture.")
    flags.define_flags()
    parse(fresh_flags, "--config=large")
    assert fresh_flags.config == "large"
