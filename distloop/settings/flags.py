"""Flags: a flag for each field of `Config`, `--help` by group, and `flags.txt`; without TensorFlow.

    flags.define_flags(steps=2_000, batch_size=64)     # when a module is imported: flags, and this program's defaults
    config = Config.from_flags()                       # in main
    flags.write(config, config.workdir)                # config.json for --config, and flags.txt for --flagfile
    TOKEN = flags.secret_flag(absl.flags.DEFINE_string("token", None, "..."))       # shown nowhere

The help texts are in `config`.
"""

import contextlib
import enum
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from absl import flags

from distloop.atomic_files import open_at_once, replacing
from distloop.settings import config_file
from distloop.settings.config import CHECKPOINTS, DEVICES, FAILURES, MONITORING, RUN, Config, check_names, fields
from distloop.settings.config_file import HIDDEN
from distloop.urls import without_credentials

_NOT_OF_TRIALS = (DEVICES, CHECKPOINTS, MONITORING, FAILURES)  # groups of settings that no trial is about

_HELP_WIDTH = 80
_NOT_IN_A_LINE = "a line break or a space at its end, which a flag file cannot: give it by hand"
_SECRET = "is_secret"  # an attribute of absl's flag
_secrets: dict[str, None] = {}  # the names of all that were marked
_SECRET_LETTERS = 8  # of values that are hidden in other arguments, too

Flag = TypeVar("Flag", bound=flags.FlagHolder[Any] | flags.Flag[Any])

# absl lists a flag under the module that defines it; with this, under the module that calls `define_flags`.
flags.disclaim_key_flags()


class Setting(NamedTuple):
    """A field of `Config` as `--help` and the settings page show it."""

    name: str
    type: type  # int | str for a duration
    default: Any
    choices: tuple[Any, ...]  # empty: any value
    help: str


def groups() -> dict[str, list[Setting]]:
    """Returns the settings by the heading of their group, in order."""
    grouped: dict[str, list[Setting]] = {}
    for name, field in fields().items():
        kind: Any = field.type
        item = Setting(name, kind, *(field.metadata[key] for key in ("default", "choices", "help")))
        grouped.setdefault(field.metadata["group"], []).append(item)
    return grouped


def define_flags(**new_defaults: Any) -> None:
    """Defines a flag for every field of `Config`, with this program's defaults.

    Call it when a module is imported, before flags are parsed. If it is called again, the last call holds: fields that
    the call does not name return to `Config`'s defaults. Values from the command line stay.

    Args:
        **new_defaults: defaults by field, instead of `Config`'s.

    Raises:
        ValueError: if a name is not a field, a value is not allowed, values contradict each other, or another module
            has defined a flag with the same name and another type.
    """
    check_names(new_defaults)
    made = _make_flags(Config(**new_defaults))
    clashes = [name for name in made if name in flags.FLAGS and _kind(flags.FLAGS[name]) != _kind(made[name])]
    if clashes:
        owner = flags.FLAGS.find_module_defining_flag(clashes[0])
        raise ValueError(
            f"The flag --{clashes[0]} is already defined by {owner}, with another type; distloop defines a flag of "
            "that name: rename the other one."
        )
    for name in made:
        if name in flags.FLAGS:
            flags.FLAGS.set_default(name, made[name].default)
        else:
            flags.DEFINE_flag(made[name], flags.FLAGS)
    config_file.define()
    # absl sorts flags by name and has no setting for it; an attribute of the instance takes precedence over the method.
    flags.FLAGS.__dict__["main_module_help"] = help_text


def secret_flag(flag: Flag) -> Flag:
    """Marks a flag as secret: its value is shown nowhere.

        TOKEN = distloop.secret_flag(flags.DEFINE_string("token", os.environ.get("TOKEN"), "For the dataset's host."))

    Files of the run, TensorBoard, W&B and `--help` have `***` in its place. Workers neither exchange nor compare it.
    `flags.txt` cannot repeat it. Every user of the machine can read a command line: set the default from the
    environment or from a file.

    Args:
        flag: what `flags.DEFINE_string` or the like has returned.

    Returns:
        The same.
    """
    setattr(flags.FLAGS[flag.name], _SECRET, True)
    _secrets[flag.name] = None
    return flag


def shown_settings(config: Config) -> dict[str, Any]:
    """Returns all settings by name, as files may hold them: `***` for secret ones."""
    return {name: HIDDEN if _is_secret(name) else _shown(value) for name, value in vars(config).items()}


def run_settings(config: Config) -> dict[str, Any]:
    """Returns all settings and the program's own flags by name, as JSON holds them: `***` for secret ones."""
    values = {flag.name: HIDDEN if _is_secret(flag.name) else _shown(flag.value) for flag in _own_flags(config)}
    return shown_settings(config) | json.loads(json.dumps(values, default=lambda value: _without_secrets(str(value))))


def shown_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of a command line, with `***` in place of secret values, and without passwords of URLs."""
    shown = []
    for argument, name in zip(arguments, flags_of(arguments), strict=True):
        flag, sign, _ = argument.partition("=")
        is_value = flag.lstrip("-") != name
        is_secret = _is_secret(name) and (is_value or bool(sign))
        shown.append((HIDDEN if is_value else f"{flag}={HIDDEN}") if is_secret else _without_secrets(argument))
    return shown


def flags_of(arguments: Sequence[str]) -> list[str]:
    """Returns the name of the flag that each argument of a command line is, or is the value of; empty: of none."""
    names, owner = [], ""
    for i, argument in enumerate(arguments):
        name, sign, _ = argument.lstrip("-").partition("=")
        if owner or not argument.startswith("-") or "--" in arguments[: i + 1]:
            names.append(owner)
            owner = ""
            continue
        names.append(name)
        takes_value = not sign and name in flags.FLAGS and not flags.FLAGS[name].boolean
        owner = name if takes_value else ""
    return names


def help_text() -> str:
    """Returns the text of `--help`: the program's own flags, then distloop's settings by group."""
    settings = fields()
    ours = {*settings, config_file.NAME}
    own = [flag for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]) if flag.name not in ours]
    own_settings = [
        Setting(flag.name, _type_of(flag), _default_of(flag), tuple(getattr(flag.parser, "enum_values", ())), flag.help)
        for flag in sorted(own, key=lambda flag: flag.name)
    ]
    sections = {"This program": own_settings}
    for heading, group in groups().items():
        sections[heading] = [item._replace(default=_default_of(flags.FLAGS[item.name])) for item in group]
    sections[RUN] += [Setting(config_file.NAME, str, "", (), config_file.HELP)]
    return "\n".join(
        f"\n{heading}:\n" + "\n".join(map(_describe, section)) for heading, section in sections.items() if section
    )


def write(config: Config, workdir: str) -> None:
    """Writes `config.json` (for `--config`) and `flags.txt` (for `--flagfile`), each file atomically.

    Both hold the fields' values, every flag of the command line, and the flags of the main module and its package. If
    no command line was parsed, they hold the fields alone.

    Args:
        config: the settings of the run; they take precedence over the flags' values.
        workdir: created if it is missing; empty: nothing is written.

    Raises:
        ValueError: if the directory cannot be created or written.
    """
    if not workdir:
        return
    try:
        os.makedirs(workdir, exist_ok=True)
        lines = [_program()] if flags.FLAGS.is_parsed() else []
        flags_txt = "".join(line + "\n" for line in [*lines, *_flag_lines(config)])
        for name, text in {"config.json": as_json(config), "flags.txt": flags_txt}.items():
            _write_text(os.path.join(workdir, name), text)
    except OSError as error:
        raise ValueError(
            f"workdir={workdir!r} cannot be written ({error.strerror}): give a directory that you may write to, or "
            "leave workdir empty to write nothing."
        ) from error


def _write_text(path: str, text: str) -> None:
    """Writes a file atomically, unless it holds the text already."""
    with contextlib.suppress(OSError), open_at_once(path) as file:
        if file.read() == text.encode():
            return
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)


def _program() -> str:
    """Returns the command of this process without its flags and their values, as a comment of a flag file."""
    name = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "")
    words = ["python", *(["-m", name.removesuffix(".__main__")] if name else sys.argv[:1])]
    others = [word for word, flag in zip(sys.argv[1:], flags_of(sys.argv[1:]), strict=True) if not flag]
    text = shlex.join(map(_without_secrets, [*words, *others]))
    return f"# {text}" if text.splitlines() == [text] else f"# the program's arguments hold {_NOT_IN_A_LINE}"


def as_json(config: Config) -> str:
    """Returns the content of `config.json`: every setting and the program's own flags, by name."""
    return json.dumps(run_settings(config), indent=2) + "\n"


def facts(config: Config) -> dict[str, str]:
    """Returns the values that must be equal on all workers, by the name of the flag: as `run_settings`, as texts."""
    values = {f"--{name}": value for name, value in run_settings(config).items()}
    return {name: ", ".join(map(str, v)) if isinstance(v, list) else str(v) for name, v in values.items()}


def hyperparameters(config: Config) -> dict[str, bool | float | str]:
    """Returns, by name, what a trial was tried with: the seed, other settings that are not at their default, own flags.

    Left out are settings that change no weights: devices, where files go, when to log, evaluate and save, ...
    """
    shown, values = shown_settings(config), {}
    for name, field in fields().items():
        is_of_trial = field.metadata["group"] not in _NOT_OF_TRIALS and name not in ("workdir", "max_secs")
        is_changed = getattr(config, name) != field.metadata["default"]
        if name == "seed" or is_changed and (is_of_trial or name == "init_from"):
            values[name] = shown[name]
    for flag in _own_flags(config):
        value = HIDDEN if _is_secret(flag.name) else flag.value
        values[flag.name] = value if isinstance(value, bool | int | float) else _without_secrets(str(value))
    return values


def _without_secrets(text: str) -> str:
    """Returns a text with `***` in place of values of secret flags, of 8 letters or more, and of keys of URLs."""
    for name in filter(_is_secret, _secrets):
        value = flags.FLAGS[name].value
        for secret in value if isinstance(value, list) else [value]:
            text = text.replace(secret, HIDDEN) if isinstance(secret, str) and len(secret) >= _SECRET_LETTERS else text
    return without_credentials(text)


def _is_secret(name: str) -> bool:
    return name in flags.FLAGS and getattr(flags.FLAGS[name], _SECRET, False)


def _default_of(flag: flags.Flag[Any]) -> Any:
    """Returns a flag's default as `--help` shows it."""
    return HIDDEN if _is_secret(flag.name) and flag.default else flag.default


def _type_of(flag: flags.Flag[Any]) -> type:
    """Returns the Python type of a flag's value, `str` for lists and others."""
    return {"int": int, "float": float, "bool": bool}.get(flag.flag_type(), str)


def _kind(flag: flags.Flag[Any]) -> tuple[str, tuple[str, ...]]:
    """Returns the type and the choices of a flag."""
    return flag.flag_type(), tuple(getattr(flag.parser, "enum_values", ()))


def _make_flags(defaults: Config) -> flags.FlagValues:
    """Returns a flag for each field of `Config`; the program has none of them yet."""
    made = flags.FlagValues()
    for name, field in fields().items():
        default, help = getattr(defaults, name), field.metadata["help"]
        if field.metadata["of_bool"]:
            flags.DEFINE_flag(_SwitchFlag(name, default, field.metadata), made)
        elif field.metadata["choices"]:
            flags.DEFINE_enum(name, default, field.metadata["choices"], help, flag_values=made)
        elif field.type is bool:
            flags.DEFINE_bool(name, default, help, flag_values=made)
        elif field.type is int:
            flags.DEFINE_integer(name, default, help, field.metadata["minimum"], flag_values=made)
        elif field.type is float:
            flags.DEFINE_float(name, default, help, field.metadata["minimum"], flag_values=made)
        else:
            flags.DEFINE_string(name, str(default), help, flag_values=made)
    return made


class _SwitchParser(flags.EnumParser):
    """Parses the values of a setting, of which two may be given as those of a bool: --name, --noname, --name=true."""

    def __init__(self, choices: Sequence[str], of_bool: Sequence[str]):
        """Stores all values, and those that False and True stand for."""
        super().__init__(list(choices))
        self._of_bool = of_bool

    def parse(self, argument: Any) -> str:
        with contextlib.suppress(ValueError):
            argument = self._of_bool[flags.BooleanParser().parse(argument)]
        return super().parse(argument)


class _SwitchFlag(flags.Flag[str]):
    """A flag that absl takes without a value, too."""

    def __init__(self, name: str, default: str, metadata: Mapping[str, Any]):
        """Makes the flag of a setting with this metadata."""
        parser = _SwitchParser(metadata["choices"], metadata["of_bool"])
        super().__init__(parser, flags.ArgumentSerializer(), name, default, metadata["help"], boolean=True)

    def serialize(self) -> str:
        return f"--{self.name}={self.value}"


def _describe(setting: Setting) -> str:
    """Returns the lines of `--help` for a setting: its form and default, then what it does."""
    value = "{" + ",".join(map(str, setting.choices)) + "}" if setting.choices else _PLACEHOLDERS.get(setting.type, "")
    name = f"  --[no]{setting.name}" if setting.type is bool else f"  --{setting.name}={value}"
    default = f"{setting.default:g}" if isinstance(setting.default, float) else setting.default
    default = "empty" if default in ("", None) else default
    head = textwrap.wrap(f"{name}  (default: {default})", _HELP_WIDTH, subsequent_indent=" " * 6)
    body = textwrap.wrap(setting.help or "", _HELP_WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join([*head, *body])


_PLACEHOLDERS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", int | str: "DURATION", Sequence[int] | str: "N,N"}


def _flag_lines(config: Config) -> list[str]:
    """Returns the lines of `flags.txt`, one `--name=value` each; a comment for a secret flag."""
    is_parsed = flags.FLAGS.is_parsed()
    names = [name for name in vars(config) if name in flags.FLAGS or not is_parsed]
    texts = {name: [f"--{name}={getattr(config, name)}"] for name in names}
    for flag in _own_flags(config):
        texts[flag.name] = _serialized(flag)
    return [line for name, lines in texts.items() for line in _lines(name, [*map(_without_secrets, lines)])]


def _serialized(flag: flags.Flag[Any]) -> list[str]:
    """Returns a flag as a flag file has it; of one that may be repeated, each of its values."""
    if isinstance(flag, flags.MultiFlag):
        serialize = flag.serializer.serialize if flag.serializer else str
        return [f"--{flag.name}={serialize(value)}" for value in flag.value or []]
    return [flag.serialize() if flag.serializer else f"--{flag.name}={flag.value}"]


def _own_flags(config: Config) -> list[flags.Flag[Any]]:
    """Returns the flags with a value that are no setting: those of the program's modules, and of the command line."""
    if not flags.FLAGS.is_parsed():
        return []
    # Flags of other modules count only if the command line or --config has them: a module that is imported later in the
    # run would make its flags unknown to the command that reads the files.
    ours = {*vars(config), config_file.NAME}
    package = (getattr(sys.modules["__main__"], "__package__", None) or "").partition(".")[0]

    def is_own(flag: flags.Flag[Any], module: str) -> bool:
        is_of_program = module == sys.argv[0] or bool(package) and module.partition(".")[0] == package
        return is_of_program or bool(flag.present) or config_file.is_from_file(flag)

    return [
        flag
        for module, module_flags in sorted(flags.FLAGS.flags_by_module_dict().items())
        for flag in module_flags
        if flag.name not in ours and flag.value is not None and is_own(flag, module)
    ]


def _shown(value: Any) -> Any:
    """Returns a flag's value with members of an enum by their names, which `--config` reads, and without passwords."""
    if isinstance(value, list):
        return [_shown(entry) for entry in value]
    value = value.name if isinstance(value, enum.Enum) else value
    return _without_secrets(value) if isinstance(value, str) else value


def _lines(name: str, lines: list[str]) -> list[str]:
    """Returns lines of a flag, or a comment where a flag file cannot hold them as they are."""
    if _is_secret(name):
        return [f"# --{name}={HIDDEN}, which is secret: give it by hand"]
    if all(line.strip().splitlines() == [line] for line in lines):
        return lines
    return [f"# --{name} holds {_NOT_IN_A_LINE}"]
