"""Owns *what can be set*: `Config`, its flags, `config.json` and `flags.txt`; without TensorFlow.

It does not know what a setting does; each field's help says what that is.

    config.define_flags(steps=2_000, batch_size=64)     # when a module is imported: flags, and this program's defaults
    settings = config.Config.from_flags()               # in main: defaults, then the command line
    config.write(settings, settings.workdir)
"""

import dataclasses
import difflib
import json
import math
import numbers
import os
import sys
from collections.abc import Collection
from typing import Any, TypeVar

from absl import flags

from distloop.atomic_files import replacing

T = TypeVar("T", str, int, float, bool)

# `--help` lists a flag under the module that defines it: let that be the experiment that calls `define_flags`.
flags.disclaim_key_flags()


def setting(default: T, help: str, *, choices: tuple[T, ...] = (), minimum: float = 0, below: float = math.inf) -> T:
    """Makes a field of `Config`.

    Args:
        default: its default.
        help: what it does, for `--help`.
        choices: every value allowed; empty: any.
        minimum: the least number allowed.
        below: numbers from here on are not allowed.

    Returns:
        A `dataclasses.Field`, typed as its default because that is how dataclasses read it.
    """
    metadata = {"help": help, "choices": choices, "minimum": minimum, "below": below}
    field: Any = dataclasses.field(default=default, metadata=metadata)
    return field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Holds every setting of a run; one that exists has been checked.

    Whole floats and NumPy numbers are taken where a whole number is due, paths where a string is; `~` in `workdir` is
    expanded.

    Raises:
        ValueError: if a value has the wrong type, is none of the choices, is out of range, or contradicts another.
    """

    workdir: str = setting("", "Local directory for everything that the run writes; empty: nothing is written.")
    strategy: str = setting(
        "auto",
        "How to distribute; auto: multi_worker where the environment tells of several workers (TF_CONFIG, Slurm), "
        "mirrored with several devices, else none.",
        choices=("auto", "none", "mirrored", "multi_worker"),
    )
    device: str = setting("auto", "What to run on; auto: gpu if any, else cpu.", choices=("auto", "cpu", "gpu"))
    num_devices: int = setting(0, "Devices per worker; 0: all. With device=cpu, that many virtual CPUs.")
    num_stages: int = setting(
        1,
        "Devices per worker that one network is spread over, one stage on each, by distloop.split(model, num_stages).",
        minimum=1,
    )
    inter_op_threads: int = setting(0, "Threads that run operations side by side; 0: TensorFlow's choice.")
    intra_op_threads: int = setting(0, "Threads within one operation; 0: all cores, shared by virtual CPUs.")
    communication: str = setting(
        "auto",
        "What adds up between workers; auto: nccl between GPUs, ring between CPUs.",
        choices=("auto", "ring", "nccl"),
    )
    bytes_per_pack: int = setting(0, "Gradients travel between workers in packs of so many bytes; 0: all in one.")
    precision: str = setting(
        "float32",
        "What layers compute in; weights stay float32. mixed_float16 scales the loss.",
        choices=("float32", "mixed_float16", "mixed_bfloat16"),
    )
    steps: int = setting(0, "Train until this global step; 0: unset. Not together with epochs.")
    epochs: int = setting(0, "Train until this many passes over the dataset; 0: unset. Not together with steps.")
    batch_size: int = setting(256, "Examples per step, over all replicas.", minimum=1)
    limit_train_batches: int = setting(0, "Train on the first so many batches of each pass over the data; 0: on all.")
    limit_eval_batches: int = setting(0, "Measure on the first so many batches of an evaluation's dataset; 0: on all.")
    overfit_batches: int = setting(
        0, "Train on the first so many batches again and again, as they were in the first pass; 0: on all."
    )
    autotune_batch: bool = setting(
        False, "Let fit look for the fastest batch size that fits, print what it found, and end the program."
    )
    microbatches: int = setting(1, "Parts to cut each replica's share of a batch into, to save memory.", minimum=1)
    clip_norm: float = setting(0.0, "Clip the gradients of an update to this global norm; 0: no clipping.")
    average_decay: float = setting(0.0, "Decay of the moving average of the weights; 0: no average.", below=1)
    on_nonfinite: str = setting(
        "raise", "What to do when a gradient is inf or NaN: stop, or skip the step.", choices=("raise", "skip")
    )
    on_divergence: str = setting(
        "none",
        "What to do when a loss is not finite, or jumps; rollback: go back to the last checkpoint and on without the "
        "batch. Needs a workdir.",
        choices=("none", "rollback"),
    )
    loss_jump: float = setting(
        10.0,
        "With on_divergence=rollback: a loss jumps when it exceeds its mean over the last 100 steps by this many times "
        "its deviation and the mean's size together.",
    )
    max_rollbacks: int = setting(3, "How often a run may go back without coming further.", minimum=1)
    locate_nonfinite: bool = setting(
        False, "Where a loss or gradient that is not finite is an error, find the operation it came from; slower."
    )
    jit_compile: bool = setting(False, "Compile the forward and backward pass with XLA; pays on large layers only.")
    executor: str = setting(
        "auto",
        "How the operations of a training step run; serial: one after another, which spares small steps the change of "
        "threads; parallel: each as soon as it can; auto: serial for small steps of one replica on a CPU.",
        choices=("auto", "parallel", "serial"),
    )
    eager: bool = setting(
        False, "Run steps, evaluations and predictions as plain Python, for breakpoints and prints; slow. One worker."
    )
    fast_dev_run: bool = setting(
        False, "Let fit try everything once, a step each, in a temporary directory; the workdir is not touched."
    )
    steps_per_loop: int = setting(1000, "At most this many steps between two looks at the host; 0: no bound.")
    log_every: int = setting(100, "Steps between two logs; 0: only at the end.")
    histograms_every: int = setting(
        0, "Steps between two histograms of weights and gradients, with norms; 0: none. Needs a workdir."
    )
    graph: str = setting(
        "auto",
        "Whether TensorBoard gets the graph of loss_fn; auto: of small models, where it costs little.",
        choices=("auto", "always", "never"),
    )
    profile: str = setting(
        "", "Which steps to profile for TensorBoard; 100:110: those after 100, up to 110. Needs a workdir."
    )
    peak_flops: float = setting(
        0.0,
        "What one device can do, in floating-point operations a second, to tell model_flops_utilization; 0: that of "
        "known GPUs.",
    )
    eval_every: int = setting(0, "Steps between two evaluations; 0: only at the end.")
    eval_first: bool = setting(False, "Evaluate before the first step, too.")
    checkpoint_every: int = setting(0, "Steps between two checkpoints; 0: only at the end. Needs a workdir.")
    keep_checkpoints: int = setting(3, "How many of the newest checkpoints are kept.", minimum=1)
    resume: bool = setting(True, "Go on from the newest checkpoint in workdir, if there is one.")
    init_from: str = setting(
        "", "Start from the weights in this workdir, checkpoint, .keras or .weights.h5 file; not where a run goes on."
    )
    init_rename: str = setting(
        "", "Which names of init_from to take, and what to call them here: PATTERN=>REPLACEMENT, as in re.sub."
    )
    console: str = setting(
        "auto",
        "What is printed; auto: a live display on a terminal, else lines; lines: lines, always; quiet: warnings and "
        "errors alone.",
        choices=("auto", "lines", "quiet"),
    )
    max_secs: float = setting(0.0, "After so many seconds save and leave, with exit code 75; 0: never.")
    start_timeout: float = setting(300.0, "How long workers wait for each other at the start, in seconds.", minimum=1)
    hang_timeout: float = setting(
        600.0, "How long, in seconds, a worker may be silent or a step take before the others give up; 0: for ever."
    )
    audit: bool = setting(
        False,
        "Look for mistakes in the program and its data, tell them and leave: exit code 1 if there are any, else 0.",
    )
    seed: int = setting(0, "Seed of Python, NumPy, Keras and TensorFlow.", below=2**32)
    deterministic: bool = setting(False, "Use deterministic operations only; slower.")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field, getattr(self, field.name)))
        if "://" in self.workdir:
            raise ValueError(
                f"workdir={self.workdir!r} is a remote address; distloop writes to local directories: mount it, or "
                "copy the files afterwards."
            )
        object.__setattr__(self, "workdir", os.path.expanduser(self.workdir))  # a shell leaves --workdir=~/x as it is
        if self.steps and self.epochs:
            raise ValueError(
                f"steps={self.steps} and epochs={self.epochs} were both given; a run has one length: set either to 0."
            )
        if self.locate_nonfinite and self.on_nonfinite == "skip":
            raise ValueError(
                "locate_nonfinite=True and on_nonfinite=skip contradict each other; nothing looks at a step that is "
                "skipped: give on_nonfinite=raise to look, or locate_nonfinite=False to skip."
            )
        if self.overfit_batches and self.limit_train_batches:
            raise ValueError(
                f"overfit_batches={self.overfit_batches} and limit_train_batches={self.limit_train_batches} were both "
                "given; each says which batches to train on: set either to 0."
            )
        for name in ("jit_compile", "locate_nonfinite"):
            if self.eager and getattr(self, name):
                raise ValueError(
                    f"eager=True and {name}=True contradict each other; eager runs the step without the graph that "
                    f"{name} needs: set either to False."
                )
        if self.on_divergence == "rollback" and not self.workdir:
            raise ValueError(
                "on_divergence=rollback was given without a workdir, so there is no checkpoint to go back to: give a "
                "workdir too."
            )
        if self.init_rename and not self.init_from:
            raise ValueError(
                f"init_rename={self.init_rename!r} was given without init_from, whose names it is for: add it."
            )
        if self.max_secs and not self.workdir:
            raise ValueError(
                f"max_secs={self.max_secs:g} was given without a workdir, so the run would be lost: give a workdir too."
            )
        if profile_window(self.profile) != (0, 0) and not self.workdir:
            raise ValueError(
                f"profile={self.profile!r} was given without a workdir, so the profile would be lost: give a workdir "
                "too."
            )
        if self.strategy == "mirrored" and self.num_stages > 1:
            raise ValueError(
                f"strategy=mirrored and num_stages={self.num_stages} contradict each other; mirroring copies the whole "
                "network to each device: give strategy=none for stages on the devices of this machine."
            )
        if self.num_devices and 1 < self.num_stages != self.num_devices:
            raise ValueError(
                f"num_stages={self.num_stages} and num_devices={self.num_devices} were given; each stage takes one "
                f"device: leave num_devices out, or give num_devices={self.num_stages}."
            )
        if self.num_stages > 1 and self.executor == "serial":
            raise ValueError(
                f"executor=serial and num_stages={self.num_stages} contradict each other; stages would wait for each "
                "other: give executor=auto."
            )
        if self.num_stages > 1 and self.jit_compile:
            raise ValueError(
                f"jit_compile=True and num_stages={self.num_stages} were given, but XLA compiles for one device: leave "
                "either out."
            )
        if self.strategy == "none" and self.num_devices > 1 and self.num_stages == 1:
            raise ValueError(
                f"strategy=none and num_devices={self.num_devices} contradict each other; without a strategy there is "
                "one device: give strategy=mirrored or num_devices=1."
            )

    @classmethod
    def from_flags(cls, **overrides: Any) -> "Config":
        """Reads the flags: `define_flags`' defaults, then what the command line gave, then `overrides`.

        What comes later wins; the later one of `steps` and `epochs` sets the other to 0. Before flags are parsed, and
        for fields without a flag, defaults are used, so that it works in a notebook.

        Args:
            **overrides: values that go before the command line.

        Returns:
            The settings of the run.

        Raises:
            ValueError: if a name is no field, a value is not allowed, or values contradict each other.
        """
        _check_names(overrides)
        found: dict[str, Any] = {name: flags.FLAGS[name] for name in _fields() if name in flags.FLAGS}
        given = {name: flag.value for name, flag in found.items() if flag.present or not flag.using_default_value}
        values = {name: flag.value for name, flag in found.items()}
        for later in (given, overrides):
            for name, other in (("steps", "epochs"), ("epochs", "steps")):
                if later.get(name) and other not in later:
                    values[other] = 0
            values.update(later)
        return cls(**values)


def profile_window(text: str) -> tuple[int, int]:
    """Reads `Config.profile`.

    Returns:
        How many steps are done when the profile begins and when it ends; 0 and 0 where there is none.

    Raises:
        ValueError: if it does not say that.
    """
    if not text:
        return 0, 0
    start, _, stop = text.partition(":")
    if not (start.isdecimal() and stop.isdecimal() and int(start) < int(stop)):
        raise ValueError(
            f"profile={text!r} is not allowed: give two whole numbers, the smaller one first, as in profile=100:110 "
            "for the steps after 100, up to 110."
        )
    return int(start), int(stop)


def define_flags(**new_defaults: Any) -> None:
    """Defines a flag for every field of `Config`, with this program's defaults.

    Call it when a module is imported, before flags are parsed. Called again, the last call holds: fields that it does
    not name go back to `Config`'s defaults. What the command line gave stays.

    Args:
        **new_defaults: defaults by field, in place of `Config`'s.

    Raises:
        ValueError: if a name is no field, a value is not allowed, values contradict each other, or another module has
            defined a flag of that name and another type.
    """
    _check_names(new_defaults)
    defaults = Config(**new_defaults)
    clashes = [name for name, field in _fields().items() if not _may_define(field)]
    if clashes:
        owner = flags.FLAGS.find_module_defining_flag(clashes[0])
        raise ValueError(
            f"The flag --{clashes[0]} is already defined by {owner}, with another type; distloop defines a flag of "
            "that name: rename the other one."
        )
    for name, field in _fields().items():
        if name in flags.FLAGS:
            flags.FLAGS.set_default(name, getattr(defaults, name))
        else:
            _define_flag(field, getattr(defaults, name))


def write(config: Config, workdir: str) -> None:
    """Writes `config.json` (every field) and `flags.txt` (for `--flagfile`), each file whole or not at all.

    `flags.txt` holds the fields' values, every flag that the command line gave, and the flags of the main module and
    its package. Where no command line was parsed, it holds the fields alone.

    Args:
        config: the settings of the run; they go before the flags' values.
        workdir: made if it is missing; empty: nothing is written.

    Raises:
        ValueError: if the directory cannot be made or written.
    """
    if not workdir:
        return
    try:
        os.makedirs(workdir, exist_ok=True)
        config_json = json.dumps(dataclasses.asdict(config), indent=2) + "\n"
        flags_txt = "".join(line + "\n" for line in _flag_lines(config))
        for name, text in {"config.json": config_json, "flags.txt": flags_txt}.items():
            with replacing(os.path.join(workdir, name)) as temporary, open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ValueError(
            f"workdir={workdir!r} cannot be written ({error.strerror}): give a directory that you may write to, or "
            "leave workdir empty to write nothing."
        ) from error


def facts(config: Config) -> dict[str, str]:
    """Tells, by name, what must be alike on all workers: every setting, and the flags that `flags.txt` would hold."""
    lines = [line.partition("=") for line in _flag_lines(config) if line.startswith("--")]
    return {f"--{name}": str(value) for name, value in dataclasses.asdict(config).items()} | {
        name: value for name, _, value in lines
    }


def hyperparameters(config: Config) -> dict[str, bool | float | str]:
    """Tells, by name, what tells runs apart: settings that differ from their defaults, and the program's own flags."""
    fields = _fields()
    found = {name: getattr(config, name) for name, field in fields.items() if getattr(config, name) != field.default}
    for fact in facts(config):
        # A flag that is a boolean and false is written as --noname.
        name = next((n for n in (fact[2:], fact[4:]) if n in flags.FLAGS), None)
        if name is not None and name not in fields:
            value = flags.FLAGS[name].value
            found[name] = value if isinstance(value, bool | int | float) else str(value)
    return {name: value for name, value in found.items() if name != "workdir"}


def _fields() -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(Config)}


def _check_names(names: Collection[str]) -> None:
    """Raises ValueError at the first name that is no field of `Config`."""
    for name in names:
        if name not in _fields():
            close = " or ".join(difflib.get_close_matches(name, _fields()))
            hint = f"did you mean {close}?" if close else f"give one of {', '.join(_fields())}."
            raise ValueError(f"{name!r} is no setting of distloop: {hint}")


def _checked(field: dataclasses.Field[Any], value: Any) -> Any:
    """Returns `value` as the field's own type.

    Raises:
        ValueError: if the field does not take it.
    """
    converted = _converted(field.type, value)
    choices, minimum, below = (field.metadata[key] for key in ("choices", "minimum", "below"))
    is_outside = field.type in (int, float) and converted is not None and not minimum <= converted < below
    if converted is None or is_outside or (choices and converted not in choices):
        raise ValueError(
            f"{field.name}={value!r} is not allowed: give {_allowed(field)}, or leave it out for the default, "
            f"{field.default!r}."
        )
    return converted


def _converted(kind: Any, value: Any) -> Any:
    """Returns `value` as a `kind`, or None where that would be a guess."""
    if kind is bool or isinstance(value, bool):
        return value if kind is bool and isinstance(value, bool) else None
    if kind is str:
        return os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        return None
    if kind is int and value != math.floor(value):
        return None
    return kind(value)


def _allowed(field: dataclasses.Field[Any]) -> str:
    """Says in words what a field takes."""
    if field.metadata["choices"]:
        return "one of " + ", ".join(field.metadata["choices"])
    if field.type not in (int, float):
        return {str: "a string", bool: "True or False"}[field.type]  # type: ignore[index]
    minimum, below = field.metadata["minimum"], field.metadata["below"]
    words = f"a {'whole ' if field.type is int else ''}number, {minimum} or more"
    return words if below == math.inf else f"{words} and below {below}"


def _flag_type(field: dataclasses.Field[Any]) -> str:
    """Returns what absl calls the type of the field's flag."""
    if field.metadata["choices"]:
        return "string enum"
    return {str: "string", int: "int", float: "float", bool: "bool"}[field.type]  # type: ignore[index]


def _may_define(field: dataclasses.Field[Any]) -> bool:
    """Says whether the field's flag is free, or already there with the type and choices that it would have."""
    if field.name not in flags.FLAGS:
        return True
    flag = flags.FLAGS[field.name]
    choices = tuple(getattr(flag.parser, "enum_values", ()))
    return flag.flag_type() == _flag_type(field) and choices == field.metadata["choices"]


def _define_flag(field: dataclasses.Field[Any], default: Any) -> None:
    name, help, minimum = field.name, field.metadata["help"], field.metadata["minimum"]
    if field.metadata["choices"]:
        flags.DEFINE_enum(name, default, field.metadata["choices"], help)
    elif field.type is bool:
        flags.DEFINE_bool(name, default, help)
    elif field.type is int:
        flags.DEFINE_integer(name, default, help, lower_bound=minimum)
    elif field.type is float:
        flags.DEFINE_float(name, default, help, lower_bound=minimum)
    else:
        flags.DEFINE_string(name, default, help)


def _flag_lines(config: Config) -> list[str]:
    """Returns the lines of `flags.txt`, one `--name=value` each."""
    is_parsed = flags.FLAGS.is_parsed()
    values = {name: value for name, value in dataclasses.asdict(config).items() if name in flags.FLAGS or not is_parsed}
    lines = [line for name, value in values.items() for line in _lines(name, f"--{name}={value}")]
    if not is_parsed:
        return lines
    # Flags of other modules stand at their defaults unless given; a module that is imported only later in the run would
    # make its flags unknown to the command that reads this file.
    package = (getattr(sys.modules["__main__"], "__package__", None) or "").partition(".")[0]
    for module, module_flags in sorted(flags.FLAGS.flags_by_module_dict().items()):
        is_own = module == sys.argv[0] or bool(package) and module.partition(".")[0] == package
        for flag in module_flags:
            if flag.name not in values and flag.value is not None and (is_own or flag.present):
                lines += _lines(flag.name, flag.serialize() if flag.serializer else f"--{flag.name}={flag.value}")
    return lines


def _lines(name: str, text: str) -> list[str]:
    """Splits a flag's text into lines: none or several for one that may be given several times."""
    lines = text.splitlines()
    if all(line.startswith(f"--{name}=") for line in lines):
        return lines
    return [f"# --{name} holds a line break, which a flag file cannot: give it by hand"]
