"""Owns the audit: a look at the user's own code and data that names what will go wrong, where, and what to do.

    found = trainer.audit(dataset)
    print(found)                       # a line for each finding
    assert not found.findings

One batch is computed as a whole, and in two halves as two replicas would do it, on whatever devices there are; what
`loss_fn` draws, reads and writes is seen in its graph; two steps are trained. Everything is put back in the end. It
does not know how a run goes.
"""

import contextlib
import functools
import gc
import hashlib
import random
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from distloop.data import shards
from distloop.data.copies import fresh_copy
from distloop.data.source import Data, Source
from distloop.distributed import devices
from distloop.training import nonfinite
from distloop.training.state import SEED_STRIDE, TrainState, Update
from distloop.training.step import TrainStep
from distloop.training.variable_writes import READS
from distloop.variables import named_variables, tensorflow_variable

REPLICAS = 2  # that are compared with one
_ORDERED_BATCHES = 8  # of a pass over the data, that are compared with another pass
_TOLERANCE, _TOLERANCE_OF_HALF_PRECISION = 1e-3, 5e-2
_GIVE_SEED = "give a keras.random.SeedGenerator as seed, an attribute of a layer in the model or of the model itself"
_DRAWS = re.compile("Random(?!.*Get)|TruncatedNormal|Multinomial")  # types of operations


class Finding(NamedTuple):
    """Something in the user's code or data that will go wrong."""

    what: str  # which kind it is of, as in "identical random numbers"
    name: str  # of the culprit: a value, a variable, a layer, an operation with its line
    hint: str  # what to do

    def __str__(self) -> str:
        return f"{self.what}: {self.name}: {self.hint}."


@dataclass(frozen=True)
class Audit:
    """What an audit found; printed, a line for each.

    Attributes:
        findings: empty where nothing is wrong.
        unchecked: what could not be checked, and why.
    """

    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [*map(str, self.findings)] or ["nothing found."]
        return "\n".join([*lines, *(f"not checked: {text}." for text in self.unchecked)])


def audit(state: TrainState, data: Data, *, seed: int = 0, microbatches: int = 1) -> Audit:
    """Looks at a model and its data; changes neither.

    Args:
        state: what is trained; built.
        data: as for `Trainer.audit`.
        seed: that of the run.
        microbatches: as for `TrainStep`.

    Returns:
        What was found.

    Raises:
        ValueError: if the data is a `DistributedDataset`, its first batch has one row, or `loss_fn` breaks a rule.
    """
    with devices.preserved_random_state():
        look = _Look(state, data, seed)
        look.at_order()
        if look.at_graph():
            look.at_parts()
            with _kept(look.everything(), state.strategy) as put_back:
                look.at_draws()
                put_back()
                if look.is_steady:
                    look.at_replicas(put_back)
                else:
                    look.unchecked.append("one replica against several, until what was found is repaired")
                look.at_steps(microbatches)
        return Audit(tuple(look.findings), tuple(look.unchecked))


class _Replica(tf.distribute.ReplicaContext):
    """Stands for one of several replicas, on one device; it notes where the model talks to the others."""

    def __init__(self, replica: int, replicas: int, meetings: set[str]):
        super().__init__(tf.distribute.get_strategy(), 0)  # TensorFlow's default one; variables have a first part
        self._replica = replica
        self._replicas = replicas
        self._meetings = meetings

    @property
    def replica_id_in_sync_group(self) -> int:
        return self._replica

    @property
    def num_replicas_in_sync(self) -> int:
        return self._replicas

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        self._meetings.add("all_reduce")
        return value

    def all_gather(self, value: Any, axis: Any, options: Any = None) -> Any:
        self._meetings.add("all_gather")
        return value


class _Measured(NamedTuple):
    """What an update's `loss_fn` gave over some rows."""

    gradients: dict[str, np.ndarray | None]
    values: dict[str, float]
    written: dict[str, np.ndarray]  # by path, what the forward pass left in variables that do not train


class _Look:
    """One audit, part by part; each adds to `findings`."""

    def __init__(self, state: TrainState, data: Data, seed: int):
        if isinstance(data, tf.distribute.DistributedDataset):
            raise ValueError(
                "audit was given a DistributedDataset, whose rows TensorFlow has shared out: give the plain dataset."
            )
        self.findings: list[Finding] = []
        self.unchecked: list[str] = []
        self.is_steady = True  # whether loss_fn gives the same when it is called again
        self._state = state
        self._data = data
        self._seed = seed
        self._foreign: list[Any] = []  # variables that loss_fn uses and no checkpoint holds
        self._meetings: set[str] = set()  # how the model talks to other replicas in training
        self._is_random = False
        self._rows = next(iter(self._dataset()), None)
        if self._rows is None or shards.batch_size(self._rows) < REPLICAS:
            raise ValueError(
                f"The dataset's first batch has less than {REPLICAS} rows; an audit shares it out between as many "
                "replicas: give larger batches."
            )
        size = int(shards.batch_size(self._rows))
        cuts = [size * i // REPLICAS for i in range(REPLICAS + 1)]
        self._shares = [self._part(start, end) for start, end in zip(cuts, cuts[1:], strict=False)]
        self._layers = [
            layer for layers in state.layers_of_update.values() for top in layers for layer in top._flatten_layers()
        ]
        is_half = any(layer.compute_dtype in ("float16", "bfloat16") for layer in self._layers)
        self._tolerance = _TOLERANCE_OF_HALF_PRECISION if is_half else _TOLERANCE

    def everything(self) -> list[Any]:
        """Lists every variable that `loss_fn` or a step may change."""
        state = self._state
        metrics = [*state.train_metrics.values(), *state.eval_metrics.values()]
        return [
            *named_variables(state.model).values(),
            *(variable for optimizer in state.plain_optimizers.values() for variable in optimizer.variables),
            *(variable for scaler in state.loss_scalers.values() for variable in (scaler.loss_scale, scaler.streak)),
            *(variable for metric in metrics for variable in metric.variables),
            *(state.average.variables if state.average is not None else []),
            *(state.step, state.skipped_steps, state.loss_watch.statistics),
            *self._foreign,
        ]

    def at_order(self) -> None:
        """Reads the beginning of the data twice, each time as a new process would."""
        passes = []
        for _ in range(2):
            random.seed(self._seed)
            np.random.seed(self._seed)
            tf.random.set_seed(self._seed)
            passes.append([_digest(rows) for rows in self._dataset().take(_ORDERED_BATCHES)])
        first, second = passes
        if first != second:
            batch = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(second))
            self._find(
                "data in another order",
                f"batch {batch}",
                "two passes with the same seed differ from there on, so a run that goes on sees other rows: give "
                "shuffle and Python generators a seed, start each pass alike, and keep the dataset deterministic",
            )

    def at_graph(self) -> bool:
        """Traces `loss_fn` three times, as replicas 0, 0 and 1; says whether it could be."""
        state = self._state
        self._calls: list[list[tf.Operation]] = []  # of loss_fn, each with its operations

        def trace(rows: Any, other_rows: Any) -> Any:
            first_seeds = [tf.convert_to_tensor(seed) for seed in state.seeds]
            for replica, given in ((0, rows), (0, rows), (1, other_rows)):
                for seed, value in zip(state.seeds, first_seeds, strict=True):
                    seed.assign(value + tf.constant([replica * SEED_STRIDE, 0], value.dtype))
                with _new_operations() as operations, self._as_replica(replica), tf.variable_creator_scope(_refuse):
                    for update in state.spec.updates:
                        update.loss_fn(given, True)
                self._calls.append(operations)
            return [[op.outputs[0] for op in _draws(self._calls[call])] for call in (0, 2)]

        try:
            self._run_traced = _traced(trace, self._rows, self._reversed())
        except _Created as created:
            advice = "make it, or the layer that makes it, in model_fn, and put it into ModelSpec's model"
            self._find(
                "variable made in a step",
                f"{created} ({nonfinite.user_line(traceback.extract_tb(created.__traceback__))})",
                _GIVE_SEED if "seed_generator_state" in str(created) else f"each trace makes another one: {advice}",
            )
            return False
        self._is_random = bool(_draws(self._calls[0]))
        self._at_foreign_variables()
        self._at_second_trace()
        return True

    def _at_foreign_variables(self) -> None:
        """Finds variables that `loss_fn` reads or writes and nobody knows."""
        known = {id(part.handle) for variable in self.everything() for part in self._parts(variable)}
        graph = self._run_traced.graph
        foreign = {
            id(outer): inner for outer, inner in graph.captures if outer.dtype == tf.resource and id(outer) not in known
        }
        objects = gc.get_objects() if foreign else []  # millions in some processes
        plain = {id(v.handle): v for v in objects if _is_variable(v) and id(v.handle) in foreign}
        self._foreign = list(plain.values())
        written = {
            id(tensor)
            for operations in self._calls
            for op in operations
            if op.type not in READS
            for tensor in op.inputs
            if tensor.dtype == tf.resource
        }
        for verb, is_wanted in (("writes", True), ("reads", False)):
            names = [v.name.removesuffix(":0") for h, v in plain.items() if (id(foreign[h]) in written) == is_wanted]
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                self._find(
                    "state in no checkpoint",
                    f"{', '.join(names[:3])}{more}",
                    f"loss_fn {verb} what is not in ModelSpec's model, so that a run that goes on starts it anew: put "
                    "it, or the layer that holds it, into the model, as in ModelSpec([model, it], ...)",
                )

    def _at_second_trace(self) -> None:
        """Compares two traces that ought to be alike."""
        first, second, _ = self._calls
        if [op.type for op in first] != [op.type for op in second]:
            return  # something was kept from the first trace, as caches are
        for one, other in zip(first, second, strict=True):
            if "PartitionedCall" in one.type and (changed := _changed_argument(one, other)):
                function, argument, values = changed
                self.is_steady = False
                self._find(
                    "traced again and again",
                    f"{function}({argument})",
                    f"this tf.function gets the Python values {values} one after the other, and is traced for each: "
                    "give it a tensor",
                )
                return
            if one.type == "Const" and one.node_def.attr["value"] != other.node_def.attr["value"]:
                self.is_steady = False
                self._find(
                    "Python value that changes",
                    nonfinite.user_line(one.traceback) or one.name,
                    "loss_fn is traced once, so a counter or a random number of Python's stays what it was then: use a "
                    "tf.Variable in the model, such as the optimizer's iterations, or keras.random",
                )
                return

    def at_parts(self) -> None:
        """Finds what could train and is in no update."""
        trained = {id(v) for variables in self._state.variables_of_update.values() for v in variables}
        seeds = {id(seed) for seed in self._state.seeds}
        left_out: dict[str, list[str]] = {}  # layer -> variables
        for path, variable in named_variables(self._state.model).items():
            if variable.trainable and id(variable) not in trained | seeds:
                left_out.setdefault(path.rpartition("/")[0] or path, []).append(path)
        for layer, paths in left_out.items():
            self._find(
                "left out of training",
                layer,
                f"no update trains {', '.join(map(_last, paths))}: widen the pattern of trainable or of the update, or "
                "set layer.trainable = False if it is to stay as it is",
            )

    def at_draws(self) -> None:
        """Compares the random numbers of two replicas."""
        drawn = self._run_traced(self._rows, self._reversed())
        found = set()
        for op, one, other in zip(_draws(self._calls[0]), *drawn, strict=False):
            is_telling = one.dtype.is_floating or tf.size(one) >= 16  # a few whole numbers may be equal by chance
            if is_telling and np.array_equal(one.numpy(), other.numpy()):
                found.add(nonfinite.describe(op, self._layers))
        self.is_steady &= not found
        for name in sorted(found):
            self._find(
                "identical random numbers",
                name,
                f"every replica draws the same: {_GIVE_SEED}",
            )

    def at_replicas(self, put_back: Callable[[], None]) -> None:
        """Compares one replica with several, update by update."""
        for update in self._state.spec.updates:
            whole = self._measure(update, [self._rows], put_back, training=True)[0]
            culprits = self._at_normalizations(whole)
            training = not (self._is_random or culprits or self._meetings)
            if training:
                shares = self._measure(update, self._shares, put_back, training=True)
                self._compare_written(whole, shares)
            else:
                meetings = set(self._meetings)
                self._meetings.clear()
                whole = self._measure(update, [self._rows], put_back, training=False)[0]
                shares = self._measure(update, self._shares, put_back, training=False)
                meets, self._meetings = self._meetings, meetings
                if meets:
                    self.unchecked.append(
                        f"loss and gradients{_of(update)} on several replicas, because loss_fn talks to the "
                        f"others with {' and '.join(sorted(meets))}: distloop.testing.assert_replica_law compares them"
                    )
                    continue
            self._compare(update, whole, shares, training)

    def _at_normalizations(self, whole: _Measured) -> list[str]:
        """Finds BatchNormalization that takes its statistics from one replica."""
        written = {id(v): path for path, v in named_variables(self._state.model).items() if path in whole.written}
        before = self._start_of_written
        found = []
        for layer in self._layers:
            if not isinstance(layer, keras.layers.BatchNormalization) or layer.synchronized:
                continue
            paths = [written[id(v)] for v in layer.variables if id(v) in written]
            if any(not np.array_equal(whole.written[path], before[path]) for path in paths):
                found.append(layer.path)
        for path in found:
            if not any(finding.name == path for finding in self.findings):
                self._find(
                    "statistics of one replica",
                    path,
                    "each replica normalizes by its own rows, so the numbers depend on how many there are: use "
                    "BatchNormalization(synchronized=True)",
                )
        return found

    def _compare_written(self, whole: _Measured, shares: Sequence[_Measured]) -> None:
        """Compares what the forward pass wrote: of floats distloop keeps the mean over the replicas."""
        sizes = np.array([int(shards.batch_size(share)) for share in self._shares], np.float64)
        for path, value in whole.written.items():
            parts = [share.written[path] for share in shares]
            if np.issubdtype(value.dtype, np.floating):
                mean = sum(size * part for size, part in zip(sizes, parts, strict=True)) / sizes.sum()
                if _differ(value, mean, self._tolerance):
                    self._find(
                        "statistics of one replica",
                        path,
                        "its mean over the replicas is not what one replica with all rows writes: sum over the "
                        "replicas before, with tf.distribute.get_replica_context().all_reduce",
                    )
            elif any(not np.array_equal(part, parts[0]) for part in parts):
                self._find_apart(path)

    def _compare(self, update: Update, whole: _Measured, shares: Sequence[_Measured], training: bool) -> None:
        """Compares values and gradients; names the operation where rows begin to differ."""
        weights = [share.values.pop("") for share in shares]  # of the loss
        whole.values.pop("")
        several = {
            name: sum(w * share.values[name] for w, share in zip(weights, shares, strict=True)) / sum(weights)
            for name in whole.values
        }
        different = [name for name, value in whole.values.items() if _differ(value, several[name], self._tolerance)]
        numbers = [
            f"{name} is {whole.values[name]:.6g} on 1 and {several[name]:.6g} on {REPLICAS}" for name in different
        ]
        if not different:
            least = 0.01 * np.sqrt(sum(np.sum(np.square(g)) for g in whole.gradients.values() if g is not None))
            for path, gradient in whole.gradients.items():
                parts = [share.gradients[path] for share in shares]
                if gradient is not None and all(part is not None for part in parts):
                    total = sum(w * part for w, part in zip(weights, parts, strict=True)) / sum(weights)  # type: ignore
                    if _differ(gradient, total, self._tolerance, least):
                        different.append(path)
                        numbers.append(f"the gradient of {path} differs between 1 and {REPLICAS}")
        if different:
            where = self._locate(update, training)
            self._find(
                "depends on the number of replicas",
                f"{different[0]}{_of(update)}{f', by {where}' if where else ''}",
                f"{numbers[0]} replicas: take no mean, sum, size or statistic over the rows, and divide by no number "
                "of rows or replicas, distloop sums over all of them and divides once",
            )

    def _locate(self, update: Update, training: bool) -> str | None:
        """Finds the first operation whose rows are not those of the whole batch, though its inputs' are."""
        calls: list[list[tf.Operation]] = []

        def trace(whole: Any, shares: Any) -> Any:
            for replica, rows in enumerate([whole, *shares]):
                as_replica = self._as_replica(max(replica - 1, 0), REPLICAS if replica else 1)
                with _new_operations() as operations, as_replica:
                    update.loss_fn(rows, training)
                calls.append(operations)
            if len({tuple(op.type for op in operations) for operations in calls}) > 1:
                calls.clear()  # the model is another one for other sizes
            return [
                [op.outputs[0] for op in operations]
                for operations in zip(*calls, strict=True)
                if _is_comparable(operations[0])
            ]

        found = _traced(trace, self._rows, self._shares)(self._rows, self._shares)
        comparable = [op for op in calls[0] if _is_comparable(op)] if calls else []
        differs: set[int] = set()
        for op, (whole, *shares) in zip(comparable, found, strict=True):
            if whole.shape[:1] == [sum(share.shape[0] for share in shares)]:
                joined = np.concatenate([share.numpy() for share in shares])
                if _differ(whole.numpy(), joined, self._tolerance):
                    if not any(id(source) in differs for source in op.inputs):
                        return nonfinite.describe(op, self._layers)
                    differs.add(id(op.outputs[0]))
        return None

    def at_steps(self, microbatches: int) -> None:
        """Trains two steps, and looks at gradients before and after, and at the replicas."""
        first = self._gradients()
        source = Source(self._dataset(), self._state.strategy, microbatches=microbatches)
        step = TrainStep(self._state, microbatches=microbatches)

        def train(iterator: Any) -> tf.Tensor:
            with tf.device(devices.HOST):
                batch = shards.next_batch(iterator, source.layout)
            return step(batch, source.layout).tallies

        iterator = source.new_iterator()
        run = _traced(train, iterator)
        for _ in range(2):
            run(iterator)
        self._at_drift()
        for path, gradient in self._gradients().items():
            if gradient is None:
                self._find(
                    "no gradient",
                    path,
                    "the loss does not depend on it: compute the loss from it without tf.stop_gradient, NumPy or "
                    "whole numbers between, or leave it out with ModelSpec(trainable=...)",
                )
            elif not np.any(gradient) and not np.any(first[path]):
                self._find(
                    "zero gradient",
                    path,
                    "it is exactly 0 for a whole batch, at the start and after two steps: look for dead units, a "
                    "factor or a mask of 0 on the way to the loss",
                )

    def _at_drift(self) -> None:
        """Compares what each replica holds of each variable."""
        state = self._state
        apart = {id(v) for v in state.seeds} | {id(v) for m in state.train_metrics.values() for v in m.variables}
        named = dict(named_variables(state.model))
        named |= {f"{name}/{v.path}": v for name, o in state.plain_optimizers.items() for v in o.variables}
        for path, variable in named.items():
            parts = [part.numpy() for part in self._parts(variable)]
            if id(variable) not in apart and any(part.tobytes() != parts[0].tobytes() for part in parts):
                self._find_apart(path)

    def _find_apart(self, path: str) -> None:
        if not any(finding.name == path for finding in self.findings):
            self._find(
                "replicas apart",
                path,
                "each replica writes another value, and a checkpoint holds the first one's: make it a float, of which "
                "distloop keeps the mean, or give add_weight(..., aggregation='sum' or 'mean')",
            )

    def _gradients(self) -> dict[str, np.ndarray | None]:
        """Finds the gradients of all updates over the whole batch."""
        found: dict[str, np.ndarray | None] = {}
        for update in self._state.spec.updates:
            found |= self._measure(update, [self._rows], lambda: None, training=True)[0].gradients
        return found

    def _measure(
        self, update: Update, shares: Sequence[Any], put_back: Callable[[], None], *, training: bool
    ) -> list[_Measured]:
        """Computes an update over some rows, each as a replica of its own, and each from the same start."""
        step = TrainStep(self._state)
        examples = tf.constant(shards.batch_size(self._rows))

        def compute(replica: int, rows: Any) -> Any:
            with self._as_replica(replica, len(shares)):
                return step.gradients_of(update.name, rows, examples, training=training)

        seeds = {id(seed) for seed in self._state.seeds}
        written = {self._state.paths[id(v)]: v for v in self._state.untrained_variables if id(v) not in seeds}
        self._start_of_written = {path: self._parts(v)[0].numpy() for path, v in written.items()}
        found = []
        for replica, rows in enumerate(shares):
            run = _traced(functools.partial(compute, replica), rows)
            put_back()
            by_path, tallies = run(rows)
            weight = float(tallies["loss"].weight)
            gradients = {path: None if g is None else _divide(g.numpy(), weight) for path, g in by_path.items()}
            values = {name: _divide(float(tally.total), float(tally.weight)) for name, tally in tallies.items()}
            after = {path: self._parts(variable)[0].numpy() for path, variable in written.items()}
            found.append(_Measured(gradients, {**values, "": weight}, after))
        put_back()
        return found

    def _dataset(self) -> tf.data.Dataset:
        """Gives the data as nobody has read it yet."""
        data = self._data
        if isinstance(data, tf.data.Dataset):
            return fresh_copy(data)
        assert callable(data)
        return data(tf.distribute.InputContext(1, 0, self._state.strategy.num_replicas_in_sync))

    def _part(self, start: int, end: int) -> Any:
        return tf.nest.map_structure(lambda t: t[start:end], self._rows)

    def _reversed(self) -> Any:
        numbers = tf.range(int(shards.batch_size(self._rows)))[::-1]
        return tf.nest.map_structure(lambda t: tf.gather(t, numbers), self._rows)

    def _as_replica(self, replica: int, replicas: int = REPLICAS) -> _Replica:
        return _Replica(replica, replicas, self._meetings)

    def _parts(self, variable: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self._state.strategy.experimental_local_results(tensorflow_variable(variable))
        return found

    def _find(self, what: str, name: str, hint: str) -> None:
        self.findings.append(Finding(what, name, hint))


class _Created(Exception):  # noqa: N818 - a finding, not an error
    """A variable was made where none may be; its message is the name."""


def _refuse(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    raise _Created(kwargs.get("name") or "a variable without a name")


@contextlib.contextmanager
def _kept(variables: Iterable[Any], strategy: tf.distribute.Strategy) -> Iterator[Callable[[], None]]:
    """Gives a function that puts variables back as they are now, on every replica; calls it in the end."""
    parts = [part for v in variables for part in strategy.experimental_local_results(tensorflow_variable(v))]
    values = [tf.identity(part) for part in parts]

    def put_back() -> None:
        for part, value in zip(parts, values, strict=True):
            part.assign(value)

    try:
        yield put_back
    finally:
        put_back()


@contextlib.contextmanager
def _new_operations() -> Iterator[list[tf.Operation]]:
    """Collects the operations that come into the graph being traced, without the places of what it takes from outside.

    The first call of two has those alone, the second one finds them there.
    """
    graph = tf.compat.v1.get_default_graph()
    found: list[tf.Operation] = []
    before = len(graph.get_operations())
    yield found
    found += [op for op in graph.get_operations()[before:] if op.type != "Placeholder"]


def _draws(operations: Iterable[tf.Operation]) -> list[tf.Operation]:
    """Picks those that draw random numbers."""
    return [op for op in operations if _DRAWS.search(op.type)]


def _traced(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Compiles a function for some arguments."""
    return tf.function(fn, autograph=False).get_concrete_function(*arguments)


def _changed_argument(one: tf.Operation, other: tf.Operation) -> tuple[str, str, list[Any]] | None:
    """Finds an argument of a `tf.function` that is another Python value in each of two calls."""
    types = []
    for op in (one, other):
        function = op.graph._get_function(op.node_def.attr["f"].func.name)
        if function is None:
            return None
        types.append(function.function_type)
    for name, parameter in types[0].parameters.items():
        constraints = [parameter.type_constraint, getattr(types[1].parameters.get(name), "type_constraint", None)]
        values = [getattr(constraint, "value", None) for constraint in constraints]
        if constraints[0] != constraints[1] and None not in values:
            return re.sub(r"^__(inference|forward)_(.*?)_\d+$", r"\2", one.node_def.attr["f"].func.name), name, values
    return None


def _is_comparable(op: tf.Operation) -> bool:
    return len(op.outputs) == 1 and op.outputs[0].dtype.is_floating and bool(op.outputs[0].shape.rank)


def _is_variable(found: Any) -> bool:
    """Says whether an object is a variable, without asking it: proxies answer for others."""
    return issubclass(type(found), tf.Variable) and hasattr(found, "handle")


def _differ(one: Any, other: Any, tolerance: float, least: float = 1e-6) -> bool:
    """Compares by the norm of the difference, relative to that of the values."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    scale = max(float(np.linalg.norm(one.ravel())), float(np.linalg.norm(other.ravel())), least)
    return bool(np.linalg.norm((one - other).ravel()) > tolerance * scale)


def _divide(value: Any, weight: float) -> Any:
    return value / weight if weight else value


def _digest(rows: Any) -> str:
    """Sums a batch up, whatever is in it."""
    found = hashlib.sha256()
    for part in tf.nest.flatten(rows, expand_composites=True):
        found.update(tf.io.serialize_tensor(part).numpy())
    return found.hexdigest()


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _of(update: Update) -> str:
    return f" of update {update.name!r}" if update.name else ""
