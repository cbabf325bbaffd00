"""Tests the flags of a Config: defaults and precedence, --help, config.json and flags.txt."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from absl import flags as absl_flags

import distloop
from distloop.settings import flags
from distloop.settings.config import Config

NAMES = [field.name for field in dataclasses.fields(Config)]
OTHER_VALUES = {"workdir": "/tmp/run=1 of 2", "strategy": "mirrored", "device": "cpu", "num_devices": 3}
OTHER_VALUES |= {"intra_op_threads": 18, "precision": "mixed_bfloat16", "steps": 7, "batch_size": 12}
OTHER_VALUES |= {"limit_train_batches": 15, "limit_eval_batches": 16, "microbatches": 4}
OTHER_VALUES |= {"max_traces": 3, "recompute": "block_[0-9]+", "clip_norm": 1e-7}
OTHER_VALUES |= {
    "average_decay": 0.1 + 0.2,
    "shard_optimizer": True,
    "on_nonfinite": "skip",
    "unread_entries": "warn",
    "empty_batches": "warn",
}
OTHER_VALUES |= {"executor": "serial", "on_divergence": "rollback", "loss_jump": 2.5, "max_rollbacks": 2}
OTHER_VALUES |= {"check_replicas_every": 13, "jit_compile": "pass", "steps_per_loop": 5, "log_every": 6}
OTHER_VALUES |= {"gradient_noise_every": 15, "histograms_every": 14, "graph": "always", "profile": "100:110"}
OTHER_VALUES |= {"peak_flops": 312e12, "eval_every": 8, "eval_first": True}
OTHER_VALUES |= {"checkpoint_every": 11, "keep_checkpoints": 4, "keep_every": 19, "resume": False}
OTHER_VALUES |= {"init_from": "runs/a=b", "init_rename": r"^a/(.*)=>b/\1 $", "console": "quiet", "max_secs": 1.5}
OTHER_VALUES |= {"start_timeout": 20.0, "hang_timeout": 30.5, "full_tracebacks": True}
OTHER_VALUES |= {"seed": 9, "deterministic": True, "evaluate": "best", "predict": "runs/outputs"}
OTHER_VALUES |= {"device_shares": "3,1"}
# Others contradict these.
EXCLUDED = {"average_from", "epochs", "until", "locate_nonfinite", "eager", "overfit_batches", "num_stages"}
EXCLUDED |= {"clip_variable_norm", "clip_value", "replica_batch_size", "virtual_replicas", "replay"}
EXCLUDED |= {"audit", "memory", "autotune_batch", "fast_dev_run"}


@pytest.fixture
def fresh_flags(monkeypatch):
    """Replaces the process's flags by an empty set, which is returned."""
    values = absl_flags.FlagValues()
    monkeypatch.setattr(absl_flags, "FLAGS", values)
    for name in ("DEFINE_string", "DEFINE_integer", "DEFINE_float", "DEFINE_bool", "DEFINE_enum"):
        define = getattr(absl_flags, name)
        monkeypatch.setattr(absl_flags, name, lambda *a, define=define, **k: define(*a, **{"flag_values": values} | k))
    return values


def parse(values, *arguments):
    values(["program", *arguments])
    return Config.from_flags()


def written(config, path):
    """Writes a config's files; returns the text of config.json and of flags.txt."""
    flags.write(config, str(path))
    return [(path / name).read_text() for name in ("config.json", "flags.txt")]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("--jit_compile", "pass"),
        ("--nojit_compile", "none"),
        ("--jit_compile=True", "pass"),
        ("--jit_compile=false", "none"),
        ("--jit_compile=loop", "loop"),
        ("--jit_compile=none", "none"),
    ],
)
def test_jit_compile_is_given_as_a_mode_or_as_the_bool_that_it_was(argument, value, fresh_flags, tmp_path):
    (tmp_path / "flags.txt").write_text(f"{argument}\n")
    for given in (argument, f"--flagfile={tmp_path / 'flags.txt'}"):
        flags.define_flags()
        config = parse(fresh_flags, given, "--steps=3")
        assert (config.jit_compile, config.steps) == (value, 3)
        assert f"--jit_compile={value}" in written(config, tmp_path)[1].splitlines()
        fresh_flags.unparse_flags()
    assert flags.flags_of(["--jit_compile", "a word"]) == ["jit_compile", ""]


def test_jit_compile_of_a_program_or_a_file_may_be_a_bool(fresh_flags, tmp_path):
    assert [Config(jit_compile=value).jit_compile for value in (False, True)] == ["none", "pass"]
    (tmp_path / "config.json").write_text(json.dumps({"jit_compile": True}))
    flags.define_flags()
    assert parse(fresh_flags, f"--config={tmp_path / 'config.json'}").jit_compile == "pass"
    with pytest.raises(ValueError, match="jit_compile='steps' is not allowed: give one of none, pass, loop"):
        Config(jit_compile="steps")


# --help.


def test_the_help_shows_every_setting_once_under_its_heading(fresh_flags):
    flags.define_flags(batch_size=64)
    absl_flags.DEFINE_float("learning_rate", 1e-3, "Step size.", module_name=sys.argv[0])
    text = fresh_flags.main_module_help()
    headings = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["This program", *flags.groups()]
    shown = re.findall(r"^  --(?:\[no\])?(\w+)", text, re.M)
    assert [name for name in shown if name != "config"] == ["learning_rate", *NAMES]
    assert text.index("  --config=TEXT") < text.index("\nDevices and workers:")
    assert "  --learning_rate=X  (default: 0.001)\n      Step size." in text
    assert "  --batch_size=N  (default: 64)" in text
    assert max(map(len, text.splitlines())) <= 80


def test_groups_hold_every_setting_in_the_order_of_the_fields():
    assert [setting.name for group in flags.groups().values() for setting in group] == NAMES
    (device,) = [setting for setting in flags.groups()["Devices and workers"] if setting.name == "device"]
    assert (device.type, device.default, device.choices) == (str, "auto", ("auto", "cpu", "gpu"))


# Flags.


def test_every_field_is_a_flag_with_its_default(fresh_flags):
    flags.define_flags()
    assert parse(fresh_flags) == Config()
    assert set(NAMES) <= set(fresh_flags)


@pytest.mark.parametrize(
    ("defaults", "arguments", "overrides", "expected"),
    [
        ({"batch_size": 64, "deterministic": True}, "--batch_size=32 --nodeterministic", {}, {"batch_size": 32}),
        ({}, "--batch_size=32", {"batch_size": 16}, {"batch_size": 16}),
        # A length unsets the other ones, a batch size the other one; 0 unsets nothing.
        ({"steps": 2_000}, "--epochs=3", {}, {"epochs": 3}),
        ({"epochs": 2_000}, "--steps=3", {}, {"steps": 3}),
        ({"until": 2_000}, "--steps=3", {}, {"steps": 3}),
        ({"steps": 2_000}, "--epochs=0", {}, {"steps": 2_000}),
        ({}, "--steps=2000", {"epochs": 3}, {"epochs": 3}),
        ({"batch_size": 64}, "--replica_batch_size=8", {}, {"replica_batch_size": 8}),
        ({"batch_size": 64}, "--replica_batch_size=8", {"batch_size": 32}, {"batch_size": 32}),
    ],
)
def test_later_values_take_precedence(fresh_flags, defaults, arguments, overrides, expected):
    flags.define_flags(**defaults)
    fresh_flags(["program", *arguments.split()])
    assert Config.from_flags(**overrides) == Config(**expected)


def test_flags_may_be_defined_again_also_after_parsing_and_read_before_it(fresh_flags):
    assert Config.from_flags(steps=20) == Config(steps=20)
    flags.define_flags(steps=20, batch_size=64)
    assert Config.from_flags() == Config(steps=20, batch_size=64)
    flags.define_flags(epochs=3)
    assert parse(fresh_flags, "--seed=5") == Config(epochs=3, seed=5)
    flags.define_flags(seed=1, batch_size=2)
    assert Config.from_flags() == Config(seed=5, batch_size=2)


def test_a_flag_set_by_the_program_takes_precedence_over_defaults(fresh_flags):
    flags.define_flags(steps=2_000)
    parse(fresh_flags)
    fresh_flags.epochs = 3
    assert Config.from_flags() == Config(epochs=3)


def test_steps_and_epochs_from_one_place_are_an_error(fresh_flags):
    both = dict(steps=5, epochs=3)
    for call in (
        lambda: flags.define_flags(**both),
        lambda: flags.define_flags() or parse(fresh_flags, "--steps=5", "--epochs=3"),
        lambda: Config.from_flags(**both),
    ):
        with pytest.raises(ValueError, match="steps=5 and epochs=3 were both given"):
            call()


@pytest.mark.parametrize("call", [flags.define_flags, Config.from_flags])
def test_an_unknown_name_is_refused_with_similar_names(fresh_flags, call):
    with pytest.raises(ValueError, match="'batchsize' is no setting of distloop: did you mean batch_size"):
        call(batchsize=3)
    with pytest.raises(ValueError, match="'xyz' is no setting of distloop: help.distloop.Config. lists all"):
        call(xyz=3)


def test_a_wrong_default_fails_and_defines_nothing(fresh_flags):
    with pytest.raises(ValueError, match="keep_checkpoints=0 is not allowed"):
        flags.define_flags(keep_checkpoints=0)
    assert not set(NAMES) & set(fresh_flags)


def test_the_command_line_refuses_a_wrong_value(fresh_flags):
    flags.define_flags()
    for argument in ("--precision=float61", "--steps=-1", "--keep_checkpoints=0"):
        with pytest.raises(absl_flags.IllegalFlagValueError, match=argument.strip("-").partition("=")[0]):
            fresh_flags(["program", argument])


def test_a_flag_of_another_type_is_refused_in_one_sentence(fresh_flags):
    absl_flags.DEFINE_string("steps", "many", "Not ours.")
    with pytest.raises(ValueError, match="The flag --steps is already defined by .*, with another type"):
        flags.define_flags()
    assert "epochs" not in fresh_flags


def test_a_flag_of_the_same_type_is_shared(fresh_flags):
    absl_flags.DEFINE_integer("seed", 17, "Not ours.")
    flags.define_flags(seed=3)
    assert parse(fresh_flags) == Config(seed=3)


# Files.


def test_both_files_restore_every_field(fresh_flags, tmp_path):
    flags.define_flags(epochs=2)
    given = Config(**OTHER_VALUES)
    assert set(OTHER_VALUES) == set(NAMES) - EXCLUDED
    as_json, _ = written(given, tmp_path / "a" / "b")
    assert Config(**json.loads(as_json)) == given
    assert parse(fresh_flags, f"--flagfile={tmp_path}/a/b/flags.txt") == given


def test_flags_txt_holds_the_config_if_flags_differ_or_were_not_parsed(fresh_flags, tmp_path):
    absl_flags.DEFINE_float("learning_rate", 0.1, "Not ours.")
    lines = written(Config(), tmp_path)[1].splitlines()
    assert [line.partition("=")[0] for line in lines] == [f"--{name}" for name in NAMES]
    flags.define_flags()
    parse(fresh_flags, "--seed=5")
    lines = written(Config(seed=6), tmp_path)[1].splitlines()
    assert [line for line in lines if line.startswith("--seed")] == ["--seed=6"]


def test_a_value_with_a_line_break_is_left_to_the_user(fresh_flags, tmp_path):
    flags.define_flags()
    absl_flags.DEFINE_string("prompt", "", "Not ours.")
    given = parse(fresh_flags, "--prompt=a\nb")
    assert "# --prompt holds a line break" in written(given, tmp_path)[1]
    assert parse(fresh_flags, f"--flagfile={tmp_path}/flags.txt") == Config()


ODD = ["a\n--seed=9", "a\n--prompt=b", "\n--seed=9", "a\r--seed=9", "a\n", "a\u2028b", " a "]


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("form", ["--prompt={}", "--prompt {}", "--layer={}", "{}"])
def test_no_line_break_or_space_of_a_value_sets_a_flag(value, form, fresh_flags, tmp_path):
    flags.define_flags()
    absl_flags.DEFINE_string("prompt", "p", "Not ours.")
    absl_flags.DEFINE_multi_string("layer", ["l"], "Neither.", flag_values=fresh_flags)
    arguments = [word.replace("{}", value) for word in form.split()]
    fresh_flags(["program", "--steps=3", *arguments])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", "--steps=3", *arguments])
        text = written(Config.from_flags(), tmp_path)[1]
    given = fresh_flags["prompt"].value, fresh_flags["layer"].value
    fresh_flags.unparse_flags()
    fresh_flags["prompt"].unparse(), fresh_flags["layer"].unparse()
    assert parse(fresh_flags, f"--flagfile={tmp_path}/flags.txt") == Config(steps=3)
    again = fresh_flags["prompt"].value, fresh_flags["layer"].value
    assert again == given or again == ("p", ["l"]) and "which a flag file cannot" in text


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        ("--token hunter22-hunter22 --steps 5 --workdir /tmp/run", "python train.py"),
        ("-token=x9 -steps 5 data.csv --audit --resume false", "python train.py data.csv false"),
        ("--noaudit a --flagfile=/tmp/f b -- --token c", "python train.py a b -- --token c"),
        ("hunter22-hunter22 'my data.csv' ftp://me:pw@host/x", "python train.py '***' 'my data.csv' ftp://me@host/x"),
        ("'a\n--steps=1'", ""),
    ],
)
def test_the_program_is_noted_quoted_and_without_flags(arguments, program, fresh_flags, tmp_path, monkeypatch):
    flags.define_flags()
    flags.secret_flag(absl_flags.DEFINE_string("token", None, "Of a host."))
    (tmp_path / "f").touch()
    words = ["train.py", *shlex.split(arguments.replace("/tmp/f", f"{tmp_path}/f"))]
    monkeypatch.setattr(sys, "argv", words)
    fresh_flags(words)
    fresh_flags["token"].value = "hunter22-hunter22"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    first = written(Config.from_flags(), tmp_path)[1].splitlines()[0]
    assert first == f"# {program}" if program else first.startswith("# the program's arguments hold a line break")


def test_a_file_with_the_same_settings_stays_and_a_fifo_is_replaced(tmp_path):
    def inodes():
        return {name: os.stat(tmp_path / name).st_ino for name in os.listdir(tmp_path)}

    flags.write(Config(seed=5), str(tmp_path))
    before = inodes()
    flags.write(Config(seed=5), str(tmp_path))
    assert inodes() == before and sorted(before) == ["config.json", "flags.txt"]
    os.remove(tmp_path / "flags.txt")
    os.mkfifo(tmp_path / "flags.txt")
    as_json, as_flags = written(Config(seed=6), tmp_path)
    assert json.loads(as_json)["seed"] == 6 and "--seed=6" in as_flags


def test_a_failed_write_keeps_the_old_file_and_is_one_sentence(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    flags.write(Config(seed=1), str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(ValueError, match=r"workdir='.*' cannot be written \(No space left on device\)"):
            flags.write(Config(seed=2), str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 1
    assert sorted(os.listdir(tmp_path)) == ["config.json", "flags.txt"]
    sentence = r"workdir='.*/config.json/run' cannot be written \(Not a directory\): give a directory"
    with pytest.raises(ValueError, match=sentence):
        flags.write(Config(), str(tmp_path / "config.json" / "run"))


@pytest.mark.parametrize("arguments", [[], ["--token=hf_line", "--workdir=/hf_workdir"]])
def test_a_secret_is_written_nowhere(arguments, fresh_flags, tmp_path):
    flags.define_flags(workdir="/hf_default")
    define = {"module_name": sys.argv[0]}
    token = flags.secret_flag(absl_flags.DEFINE_string("token", "hf_default", "Of a host.", **define))
    flags.secret_flag(fresh_flags["workdir"])
    given = parse(fresh_flags, *arguments)
    assert token.value.startswith("hf_")
    files = written(given, tmp_path)
    shown = [str(show(given)) for show in (flags.facts, flags.hyperparameters, flags.shown_settings)]
    shown += [*files, fresh_flags.main_module_help()]
    assert not any("hf_" in text for text in shown) and all("***" in text for text in shown)
    assert "# --token=***, which is secret: give it by hand" in files[1].splitlines()
    assert flags.facts(given)["--token"] == flags.facts(given)["--workdir"] == "***"


def test_a_command_line_is_shown_without_secret_values(fresh_flags):
    flags.secret_flag(absl_flags.DEFINE_string("token", None, "Of a host."))
    flags.secret_flag(absl_flags.DEFINE_bool("is_hidden", False, "A switch."))
    fresh_flags["token"].value = "hf_12345"
    given = "--name=run-hf_12345 --token=hf_1 -token hf_2 --data=ftp://me:pw@host/x --is_hidden --token_count=3 token"
    shown = "--name=run-*** --token=*** -token *** --data=ftp://me@host/x --is_hidden --token_count=3 token"
    assert flags.shown_arguments(given.split()) == shown.split()
    flags.define_flags()
    absl_flags.DEFINE_string("name", "", "Of a run.")
    config = parse(fresh_flags, "--name=run-hf_12345", "--token=hf_12345")
    texts = [flags.as_json(config), str(flags.facts(config)), str(flags.hyperparameters(config))]
    assert not any("hf_12345" in text for text in texts)


def test_passwords_of_urls_in_flags_are_written_nowhere(fresh_flags, tmp_path):
    flags.define_flags()
    absl_flags.DEFINE_string("source", None, "Of the data.")
    absl_flags.DEFINE_list("mirrors", [], "More of them.", flag_values=fresh_flags)
    arguments = ["--workdir=sftp://me@host/run", "--source=https://me:pa55word@host/x?sig=pa55word"]
    given = parse(fresh_flags, *arguments, "--mirrors=ftp://a:pa55word@b,ftp://c:pa55word@d")
    shown = written(given, tmp_path)
    shown += [str(show(given)) for show in (flags.facts, flags.run_settings, flags.hyperparameters)]
    assert not any("pa55word" in text for text in shown)
    assert "--workdir=sftp://me@host/run\n" in shown[1] and "--source=https://***@host/x?sig=***\n" in shown[1]
    assert json.loads(shown[0])["mirrors"] == ["ftp://a@b", "ftp://c@d"]


def test_all_values_of_a_repeated_flag_are_compared(fresh_flags):
    flags.define_flags()
    absl_flags.DEFINE_multi_string("layer", [], "Layers.", flag_values=fresh_flags)
    given = parse(fresh_flags, "--layer=a", "--layer=c")
    assert flags.facts(given)["--layer"] == "a, c"
    fresh_flags.layer = ["b", "c"]
    assert flags.facts(given)["--layer"] == "b, c"


def test_a_trial_has_no_schedules_and_no_devices():
    config = Config(clip_norm=1.0, eval_every=5, log_every=7, checkpoint_every="2 h", num_devices=2, workdir="/tmp/a")
    assert flags.hyperparameters(config) == {"seed": 0, "clip_norm": 1.0}


PROGRAM = """
import json, sys, types
sys.modules["distloop"] = types.ModuleType("distloop")  # config and flags alone, without TensorFlow
sys.modules["distloop"].__path__ = [{package!r}]
import absl.flags
from absl import app
from distloop.settings import config, flags
flags.define_flags(steps=2000, batch_size=64)
absl.flags.DEFINE_float("learning_rate", 1e-3, "Step size.")
absl.flags.DEFINE_multi_string("layers", ["a b", "c"], "Layers.")
absl.flags.DEFINE_bool("fast", True, "Whether to hurry.")
absl.flags.DEFINE_list("words", ["x"], "Words.")
absl.flags.DEFINE_string("unset", None, "Left out.")
def main(_):
    settings = config.Config.from_flags()
    flags.write(settings, settings.workdir)
    values = {{f.name: f.value for f in absl.flags.FLAGS.get_flags_for_module("__main__")}} | vars(settings)
    print(json.dumps([values, absl.flags.FLAGS.verbosity, "tensorflow" in sys.modules]))
app.run(main)
"""


@pytest.mark.slow
def test_flagfile_repeats_a_run(tmp_path):
    package = os.path.dirname(distloop.__file__)
    (tmp_path / "program.py").write_text(PROGRAM.format(package=package))

    def run(*arguments):
        command = [sys.executable, str(tmp_path / "program.py"), *arguments]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=900).stdout)

    run_flags = "--epochs=3 --learning_rate=0.1 --nofast --words= --layers=d --layers=e --verbosity=1".split()
    first = run(f"--workdir={tmp_path}/run", *run_flags)
    again = run(f"--flagfile={tmp_path}/run/flags.txt")
    assert first == again
    values, verbosity, has_tensorflow = first
    assert (values["learning_rate"], values["fast"], values["words"], values["layers"]) == (0.1, False, [], ["d", "e"])
    assert (values["steps"], values["epochs"]) == (0, 3)
    assert verbosity == 1  # no flag of the program, but given
    assert not has_tensorflow
    assert "--unset" not in (tmp_path / "run" / "flags.txt").read_text()
