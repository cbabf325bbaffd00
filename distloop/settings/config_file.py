"""`--config`: a YAML or JSON file with flags by name, such as `config.json` of a run; without TensorFlow.

    python -m experiments.digits --config=run.yaml --steps=500

    # run.yaml
    workdir: runs/digits
    steps: 2000
    checkpoint_every: 10 min
    learning_rate: 1e-3

A flag on the command line takes precedence over the file, wherever it stands. `flags.txt` and what workers compare hold
the values, not the file's name.
"""

import difflib
import json
from typing import Any

from absl import flags

_IS_FROM_FILE = "is_from_file"  # an attribute of absl's flag

HIDDEN = "***"  # in place of a secret value, which keeps its default
NAME = "config"
HELP = "YAML or JSON file of flags by name, such as config.json of a run; flags on the command line take precedence."

# absl lists a flag under the module that defines it; with this, under the program's.
flags.disclaim_key_flags()


def define() -> None:
    """Defines `--config`, unless the program has a flag of that name."""
    if NAME not in flags.FLAGS:
        parser: flags.ArgumentParser[str] = flags.ArgumentParser()
        flags.DEFINE_flag(_ConfigFlag(parser, flags.ArgumentSerializer(), NAME, "", HELP), flags.FLAGS)


def is_from_file(flag: flags.Flag[Any]) -> bool:
    """Returns whether a file gave the flag its value."""
    return getattr(flag, _IS_FROM_FILE, False) and not flag.present and not flag.using_default_value


class _ConfigFlag(flags.Flag[str]):
    """A flag that gives other flags the values of a file when it is parsed."""

    def parse(self, argument: str) -> None:  # also called with the default, ""
        super().parse(argument)
        for name, value in (_read(argument) if argument else {}).items():
            flag = flags.FLAGS[name]
            if flag.present or value is None or value == HIDDEN:
                continue
            try:
                flag.parse(_as_argument(flag, value))
            except (ValueError, flags.Error) as error:
                raise flags.IllegalFlagValueError(f"{argument}: {error}") from error
            flag.using_default_value = False
            flag.present = 0  # parsing has counted it as given on the command line, which may still come
            setattr(flag, _IS_FROM_FILE, True)


def _as_argument(flag: flags.Flag[Any], value: Any) -> Any:
    """Returns a value of a file as the flag's parser takes it: texts, or a list of texts for a flag of several."""
    if isinstance(value, list):
        texts = [_text(entry) for entry in value]
        takes_list = isinstance(flag, flags.MultiFlag) or isinstance(flag.parser, flags.BaseListParser)
        return texts if takes_list else ",".join(texts)
    return _text(value)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(path: str) -> dict[str, Any]:
    """Returns the values of a file by the name of their flag.

    Raises:
        flags.IllegalFlagValueError: if the file cannot be read, or a name is no flag.
    """
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file) if path.endswith(".json") else _parse_yaml(file.read())
    except OSError as error:
        raise flags.IllegalFlagValueError(f"--config={path} cannot be read ({error.strerror}): name a file.") from error
    except (ValueError, RecursionError) as error:
        raise flags.IllegalFlagValueError(f"--config={path} is no YAML or JSON: {error}") from error
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise flags.IllegalFlagValueError(
            f"--config={path} holds something else than values by name: write lines such as `steps: 500`."
        )
    for name in values:
        if name == NAME or name not in flags.FLAGS:
            close = difflib.get_close_matches(str(name), list(flags.FLAGS), 1)
            hint = f"did you mean {close[0]!r}?" if close else "--help lists the flags."
            raise flags.IllegalFlagValueError(
                f"--config={path} holds {name!r}, which is no flag of this program: {hint}"
            )
    return values


def _parse_yaml(text: str) -> Any:
    """Returns the content of a YAML file.

    Raises:
        ValueError: if it is no YAML, or PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ValueError("PyYAML is not installed: pip install pyyaml, or write JSON.") from error

    class Loader(yaml.SafeLoader):
        """Reads 10:20 as a text; YAML 1.1 has numbers to the base of 60."""

    for kind, construct in {"int": Loader.construct_yaml_int, "float": Loader.construct_yaml_float}.items():
        Loader.add_constructor(
            f"tag:yaml.org,2002:{kind}",
            lambda loader, node, construct=construct: node.value if ":" in node.value else construct(loader, node),
        )
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
