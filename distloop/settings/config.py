"""Config: every setting of a run with its default, help text and allowed values; without TensorFlow.

config = Config(steps=2_000, batch_size=64)
config = Config.from_flags()                # in main, after `define_flags()`: defaults, file, command line
"""

import dataclasses
import difflib
import functools
import itertools
import math
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from absl import flags

from distloop import urls
from distloop.log import shown
from distloop.settings import contradictions, durations
from distloop.settings.precision import FLOAT16, FLOAT32, PRECISIONS

T = TypeVar("T", str, int, float, bool)

_BATCH_SIZES = ("batch_size", "replica_batch_size")  # of which a run has one
_LENGTHS = ("steps", "epochs", "until")  # of which a run has one
_PATHS = ("workdir", "init_from")  # in which shells leave `~` as it is: --workdir=~/x

# What Keras, Lightning and Hugging Face call a field.
_OTHER_WORDS = {
    "epochs": "max_epochs num_epochs n_epochs nb_epoch num_train_epochs epoch",
    "steps": "max_steps num_steps train_steps step",
    "until": "max_time",
    "replica_batch_size": "per_device_train_batch_size",
    "num_devices": "devices gpus num_gpus num_replicas",
    "device": "accelerator",
    "microbatches": "accumulate_grad_batches gradient_accumulation_steps",
    "clip_norm": "gradient_clip_val max_grad_norm global_clipnorm",
    "average_decay": "ema_decay ema_momentum",
    "eval_every": "val_check_interval check_val_every_n_epoch validation_freq eval_steps",
    "limit_eval_batches": "limit_val_batches validation_steps",
    "log_every": "log_every_n_steps logging_steps",
    "checkpoint_every": "save_steps",
    "keep_checkpoints": "save_total_limit max_to_keep",
    "workdir": "default_root_dir output_dir model_dir log_dir",
    "console": "verbose enable_progress_bar",
    "locate_nonfinite": "detect_anomaly",
    "steps_per_loop": "steps_per_execution",
}
OTHER_WORDS = {word: name for name, words in _OTHER_WORDS.items() for word in words.split()}  # by the other word

# The headings of `--help` and of the settings page, in order.
RUN = "The run"
DEVICES = "Devices and workers"
OPTIMIZATION = "Optimization"
NUMERICS = "Precision and speed"
CHECKPOINTS = "Evaluation and checkpoints"
MONITORING = "Watching a run"
FAILURES = "Failures"
TRYOUT = "Trying things out"


def setting(
    group: str,
    default: T,
    help: str,
    *,
    choices: tuple[T, ...] = (),
    of_bool: tuple[T, ...] = (),
    is_none: bool = False,
    **limits: float,
) -> T:
    """Returns a `dataclasses.Field` of `Config`, typed as its default because that is how dataclasses read it.

    Args:
        group: the heading that `--help` shows it under.
        default: its default.
        help: what it does, for `--help`.
        choices: the allowed values; empty: any.
        of_bool: the values that False and True stand for, which are allowed, too; empty: none.
        is_none: whether the field is None until `Config` knows whether a setting that excludes it was given.
        **limits: `minimum`, the smallest allowed number, and `below`, the upper bound, exclusive.
    """
    limits = {"minimum": 0, "below": math.inf} | limits
    metadata = dict(group=group, default=default, help=help, choices=choices, of_bool=of_bool, **limits)
    field: Any = dataclasses.field(default=None if is_none else default, metadata=metadata)
    return field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run; checked when it is created.

    Integer fields also take floats without a fraction and NumPy numbers, string fields also paths. `~` in `workdir` and
    `init_from` is expanded.

    Raises:
        ValueError: if a value has the wrong type, is not among the choices, is out of range, or contradicts another.
    """

    workdir: str = setting(
        RUN, "", "Directory for all files of the run, or a URL such as s3://bucket/run; empty: nothing is written."
    )
    steps: int = setting(RUN, 0, "Train until this global step; 0: unset. Give one of steps, epochs and until.")
    epochs: int = setting(RUN, 0, "Train until this many passes over the dataset; 0: unset.")
    until: int | str = setting(
        RUN, "", "Train for this duration, over interruptions, then end: 2 h, 3 epochs, 1e9 tokens; empty: unset."
    )
    batch_size: int = setting(RUN, 256, "Examples per step, over all replicas; a dataset has its own.", is_none=True)
    replica_batch_size: int = setting(RUN, 0, "Examples per step of each replica, in place of batch_size; 0: unset.")
    seed: int = setting(RUN, 0, "Seed of Python, NumPy, Keras and TensorFlow.", below=2**32)
    max_secs: float = setting(RUN, 0.0, "Save and exit with code 75 after this many seconds; 0: no limit.")

    strategy: str = setting(
        DEVICES,
        "auto",
        "How to distribute; auto: multi_worker if the environment describes several workers (TF_CONFIG, Slurm), "
        "mirrored on several devices, else none.",
        choices=("auto", "none", "mirrored", "multi_worker"),
    )
    device: str = setting(
        DEVICES, "auto", "Device type; auto: gpu if there is one, else cpu.", choices=("auto", "cpu", "gpu")
    )
    num_devices: int = setting(
        DEVICES, 0, "Devices per worker; 0: all. With device=cpu: the number of virtual CPUs to create."
    )
    device_shares: Sequence[int] | str = setting(DEVICES, "", "Ratios of the replicas' rows: 3,1; empty: equal.")
    virtual_replicas: int = setting(
        DEVICES, 0, "Replicas that devices split, for the same bits on any number of them: 2, 4, 8, ...; 0: none."
    )
    num_stages: int = setting(
        DEVICES, 1, "Pipeline stages of a network, each on a device of its own: distloop.split(model, n).", minimum=1
    )
    intra_op_threads: int = setting(DEVICES, 0, "Threads of an operation; 0: one per core, divided among virtual CPUs.")

    microbatches: int = setting(
        OPTIMIZATION, 1, "Parts in which each replica computes its batch, to save memory.", minimum=1
    )
    recompute: str = setting(OPTIMIZATION, "", "Recompute layers whose path has this regular expression; empty: none.")
    clip_norm: float = setting(OPTIMIZATION, 0.0, "Clip the gradients of an update to this global norm; 0: none.")
    clip_variable_norm: float = setting(
        OPTIMIZATION, 0.0, "Clip the gradient of each variable to this norm, instead of clip_norm; 0: none."
    )
    clip_value: float = setting(
        OPTIMIZATION, 0.0, "Clip each element of the gradients to this absolute value, instead of clip_norm; 0: none."
    )
    average_decay: float = setting(OPTIMIZATION, 0.0, "Decay per step of the weights' average; 0: no average.", below=1)
    average_from: int | str = setting(
        OPTIMIZATION,
        0,
        "Average the weights equally from here to the end, in place of average_decay: 75 %, 10 epochs; 0: no average.",
    )
    shard_optimizer: bool = setting(OPTIMIZATION, False, "Store optimizer slots and averages on one device each.")

    precision: str = setting(
        NUMERICS,
        FLOAT32.name,
        f"Compute type of layers; weights stay float32. {FLOAT16.name} uses loss scaling.",
        choices=tuple(PRECISIONS),
    )
    deterministic: bool = setting(NUMERICS, False, "Use deterministic operations only, in the whole process; slower.")
    jit_compile: str = setting(
        NUMERICS,
        "none",
        "What XLA compiles; pass: forward and backward pass, of large layers; loop: many small steps in one program.",
        choices=("none", "pass", "loop"),
        of_bool=("none", "pass"),
    )
    executor: str = setting(
        NUMERICS,
        "auto",
        "How a train step runs its operations; serial: one by one, faster for small steps; parallel: on several "
        "threads; auto: serial for small steps of one replica on a CPU.",
        choices=("auto", "parallel", "serial"),
    )
    steps_per_loop: int = setting(
        NUMERICS, 1000, "The most steps before control returns to the host, as it does after every second; 0: no limit."
    )

    eval_every: int | str = setting(
        CHECKPOINTS,
        "auto",
        "Duration between two evaluations: 500, 2 epochs, 30 min; 0: only at the end; auto: each epoch if the run's "
        "length is given in epochs, else only at the end.",
    )
    eval_first: bool = setting(CHECKPOINTS, False, "Also evaluate before the first step.")
    checkpoint_every: int | str = setting(
        CHECKPOINTS, "10 min", "Duration between two checkpoints: 500, 1 epoch, 2 h; 0: only at the end."
    )
    keep_checkpoints: int = setting(CHECKPOINTS, 3, "Number of newest checkpoints to keep.", minimum=1)
    keep_every: int | str = setting(CHECKPOINTS, 0, "Duration between kept checkpoints: 500; 0: none. Needs a workdir.")
    resume: bool = setting(CHECKPOINTS, True, "Resume from the newest checkpoint in the workdir, if there is one.")
    init_from: str = setting(
        CHECKPOINTS,
        "",
        "Start a new run from the weights in this workdir, its checkpoints/best.json, checkpoint, .keras, .weights.h5, "
        ".npz or .safetensors file; empty: from the model's initial weights.",
    )
    init_rename: str = setting(CHECKPOINTS, "", "Select and rename weights of init_from: PATTERN=>REPLACEMENT.")

    console: str = setting(
        MONITORING,
        "auto",
        "What is printed; auto: a live display on a terminal, otherwise lines; quiet: warnings and errors only.",
        choices=("auto", "lines", "quiet"),
    )
    log_every: int | str = setting(
        MONITORING,
        "auto",
        "Duration between logs: 500, 1 epoch, 30 s; 0: only at the end; auto: each epoch if the run's length is given "
        "in epochs, else 100 steps.",
    )
    gradient_noise_every: int | str = setting(MONITORING, 0, "Duration between two gradient noise scales; 0: none.")
    histograms_every: int | str = setting(
        MONITORING, 0, "Duration between histograms of weights and gradients: 500, 1 epoch; 0: none. Needs a workdir."
    )
    graph: str = setting(
        MONITORING,
        "auto",
        "Write the graph of loss_fn for TensorBoard; auto: for small models only, where it is cheap.",
        choices=("auto", "always", "never"),
    )
    profile: str = setting(MONITORING, "", "Steps to profile; 100:110: steps 101 to 110. Needs a workdir.")
    peak_flops: float = setting(
        MONITORING, 0.0, "Peak FLOP/s of one device, for model_flops_utilization; 0: the data sheet's, for known GPUs."
    )

    on_nonfinite: str = setting(
        FAILURES, "raise", "If a gradient is inf or NaN: the run stops, or skips the step.", choices=("raise", "skip")
    )
    unread_entries: str = setting(
        FAILURES,
        "print",
        "What to do about entries of a batch that no loss_fn reads; print: one line.",
        choices=("print", "ignore", "warn", "refuse"),
    )
    empty_batches: str = setting(
        FAILURES, "step", "Batches without rows; step: gradients of 0.", choices=("step", "ignore", "warn", "refuse")
    )
    max_traces: int = setting(
        FAILURES, 0, "The most traces of the train step, and of evaluations, before an error; 0: no limit."
    )
    locate_nonfinite: bool = setting(
        FAILURES, False, "Name the operation that produced the first inf or NaN of a failed step; slower."
    )
    on_divergence: str = setting(
        FAILURES,
        "none",
        "What happens if a loss is not finite or jumps; rollback: return to the last checkpoint and leave the batch "
        "out. Needs a workdir.",
        choices=("none", "rollback"),
    )
    loss_jump: float = setting(
        FAILURES, 10.0, "A loss jumps if it exceeds the mean of 100 steps by so many times (deviation + absolute mean)."
    )
    check_replicas_every: int | str = setting(
        FAILURES, 0, "Duration between comparisons of all variables over all replicas and workers; 0: none."
    )
    max_rollbacks: int = setting(FAILURES, 3, "Rollbacks without progress before the run fails.", minimum=1)
    start_timeout: float = setting(FAILURES, 300.0, "Seconds that workers wait for each other at the start.", minimum=1)
    hang_timeout: float = setting(
        FAILURES,
        600.0,
        "Seconds without a heartbeat of a worker, or within one step, after which the others give up; three times as "
        "many without a byte end a process that saves; 0: no limit.",
    )

    audit: bool = setting(
        TRYOUT, False, "Check the program and its data for mistakes, then exit: code 1 if there are any, else 0."
    )
    memory: bool = setting(
        TRYOUT, False, "Estimate the memory of a step on each device, then exit: code 1 if it does not fit, else 0."
    )
    replay: int = setting(
        TRYOUT, 0, "Take this step of the workdir's run again, print what it computed, and exit; 0: train."
    )
    evaluate: str = setting(
        TRYOUT, "", "Evaluate on the evals of fit with this checkpoint, newest, best or a step, and exit; empty: train."
    )
    predict: str = setting(TRYOUT, "", "Write predict_fn's outputs on evals to this directory, and exit; empty: train.")
    fast_dev_run: bool = setting(
        TRYOUT, False, "Try each part of a run for one step, in a temporary directory; the workdir is not changed."
    )
    eager: bool = setting(TRYOUT, False, "Run steps as plain Python, for breakpoints; slow. One worker only.")
    full_tracebacks: bool = setting(TRYOUT, False, "Show all frames of an error, not only those of your code.")
    overfit_batches: int = setting(
        TRYOUT, 0, "Train only on the first batches, unchanged in every epoch: this many; 0: on all."
    )
    limit_train_batches: int = setting(TRYOUT, 0, "Train on this many batches per pass over the dataset; 0: all.")
    limit_eval_batches: int = setting(TRYOUT, 0, "Evaluate on this many batches of each dataset; 0: all.")
    autotune_batch: bool = setting(
        TRYOUT, False, "Search for the fastest batch size that fits into memory, print the result and exit."
    )

    def __new__(cls, **settings: Any) -> "Config":
        """Checks the names of the settings, which `__init__` would refuse without a hint."""
        check_names(settings)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:  # batch_size, which nobody gave
                value = 0 if self.replica_batch_size else field.metadata["default"]
            object.__setattr__(self, field.name, _checked(field, value))
        durations.profile_window(self.profile)
        contradictions.check(self)

    @property
    def local_workdir(self) -> str:
        """Where the run's files are on this machine: the workdir, or the staging directory of a URL."""
        return urls.local_directory(self.workdir)

    def global_batch_size(self, strategy: Any) -> int:
        """Returns the examples per step over all replicas of a strategy, such as `trainer.strategy`."""
        return self.batch_size or int(self.virtual_replicas or strategy.num_replicas_in_sync) * self.replica_batch_size

    @classmethod
    def from_flags(cls, **overrides: Any) -> "Config":
        """Returns the settings from the flags: `define_flags`' defaults, `--config`, command line, then `overrides`.

        Later ones take precedence; a later one of `steps`, `epochs` and `until` unsets the others; `batch_size` and
        `replica_batch_size` unset each other, too. Before flags are parsed, and for fields without a flag, defaults are
        used, so it works in a notebook.

        Args:
            **overrides: values that take precedence over the command line.

        Raises:
            ValueError: if a name is not a field, a value is not allowed, or values contradict each other.
        """
        defined = [flags.FLAGS[name] for name in fields() if name in flags.FLAGS]
        given = [flag for flag in defined if not flag.using_default_value]
        present = [flag for flag in defined if flag.present]  # --config and the program set flags that are not present
        layers = [{flag.name: flag.value for flag in layer} for layer in (defined, given, present)]
        return cls(**_merged([*layers, overrides]))


def _describe_fields() -> str:
    """Returns the section of `Config`'s docstring with each field, for `help(distloop.Config)`."""
    described = ("{} ({default!r}): {help}".format(name, **field.metadata) for name, field in fields().items())
    wrap = functools.partial(textwrap.wrap, width=100, initial_indent=" " * 8, subsequent_indent=" " * 12)
    lines = ["", "    Attributes, with their defaults:", *itertools.chain(*map(wrap, described)), "    "]
    return "\n".join(lines)


def fields() -> dict[str, dataclasses.Field[Any]]:
    """Returns the fields of `Config` by name, in order of their groups."""
    return {field.name: field for field in dataclasses.fields(Config)}


def check_names(names: Collection[str]) -> None:
    """Raises ValueError at the first name that is not a field of `Config`."""
    known = fields()
    for name in (name for name in names if name not in known):
        close = OTHER_WORDS.get(name) or " or ".join(difflib.get_close_matches(name, known))
        hint = f"did you mean {close}?" if close else "help(distloop.Config) lists all."
        raise ValueError(f"{name!r} is no setting of distloop: {hint}")


def _merged(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns settings of which later ones take precedence, and unset others of the same group."""
    values: dict[str, Any] = {}
    for later in layers:
        for group in (_LENGTHS, _BATCH_SIZES):
            if any(later.get(name) for name in group):
                values.update({name: fields()[name].default for name in group})
        values.update(later)
    return values


def _checked(field: dataclasses.Field[Any], value: Any) -> Any:
    """Returns a value as the field's type; raises ValueError if it is not allowed."""
    if field.type == int | str and isinstance(value, str) and value == field.default:
        return value  # "auto", or empty
    choices, of_bool, minimum, below = (field.metadata[key] for key in ("choices", "of_bool", "minimum", "below"))
    converted = durations.converted(field.type, of_bool[value] if of_bool and isinstance(value, bool) else value)
    is_number = field.type in (int, float) and isinstance(converted, int | float)
    is_outside = is_number and not minimum <= converted < below
    if converted is None or is_outside or (choices and converted not in choices):
        meant = durations.as_until(field.name, value)
        rest = f"or {meant}" if meant else f"or leave it out for the default, {field.metadata['default']!r}"
        raise ValueError(f"{field.name}={shown(value)} is not allowed: give {_allowed(field)}, {rest}.")
    return urls.expand(converted) if field.name in _PATHS else converted


def _allowed(field: dataclasses.Field[Any]) -> str:
    """Returns the allowed values of a field, in words."""
    if field.metadata["choices"]:
        return "one of " + ", ".join(field.metadata["choices"])
    if field.type == int | str and durations.normalize(field.default) is None:
        return f"{durations.ALLOWED}, or {field.default or 'nothing'}"
    if field.type not in (int, float):
        return durations.ALLOWED_OF[field.name if field.name in durations.ALLOWED_OF else field.type]
    minimum, below = field.metadata["minimum"], field.metadata["below"]
    words = f"a {'whole ' if field.type is int else ''}number, {minimum} or more"
    return words if below == math.inf else f"{words} and below {below}"


Config.__doc__ = f"{Config.__doc__}{_describe_fields()}"
