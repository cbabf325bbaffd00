"""Saved state: a training state as values by name, for checkpoints, going back in memory, and comparisons.

    saved_state = SavedState(state)
    values = saved_state.snapshot()               # {"model/dense/kernel": tensor, ..., "step": tensor}
    saved_state.differences(values)               # [] if they fit the state
    saved_state.restore(values)
    ReplicaComparison(state, without=state.seeds).require_equal(step, "...")

Names are the same in every process, and values do not depend on the number of replicas, Keras metrics aside. It does
not know files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.distributed import collectives
from distloop.distributed.devices import HOST
from distloop.graph_functions import graph_function
from distloop.log import log
from distloop.model.layers import stream_of
from distloop.model.state import TrainState, optimizer_prefix
from distloop.variables import ComposedVariable, portable_names, tensorflow_variable

# Names below `optimizer_prefix`: two facts about the optimizer. The others are its initial learning rates.
_CLASS, _TRAINED = "/class", "/trained"
_METRICS = "metrics/"
_STORED = "stored/"  # what values of composed variables are computed from
# Only names with these prefixes are distloop's own; Keras metrics may change from run to run.
_CHECKED_PREFIXES = ("model/", "optimizer/", "average/")
_INTEGERS = {1: tf.uint8, 2: tf.int16, 4: tf.int32, 8: tf.int64}  # by the bytes of an element


class SavedState:
    """The values of a training state by name."""

    def __init__(self, state: TrainState):
        """Stores the state, which may be built later."""
        self._state = state
        self._strategy = state.strategy
        self._far_reader: Any = None  # for `_read_far`

    def snapshot(self, *, is_needed: bool = True) -> dict[str, tf.Tensor]:
        """Returns a copy of everything that training changes. All workers call it: some values come from others.

        Args:
            is_needed: whether this worker needs the values; else those of which others have shards are left out.

        Returns:
            The values of `TrainState.all_variables`, `metrics/<name>/<i>` as `KerasMetrics.snapshot` returns them,
            `stored/average/<path>/<kind>` as `ComposedVariable.raw` does, and `optimizer/class`, `optimizer/trained`
            (the names of variables, one a line) and `optimizer/initial_learning_rate`, of several in a `MultiOptimizer`
            `..._1`, `..._2`, too. Random streams have the value of the first replica; those of the others are
            `SEED_STRIDE` apart.
        """
        state = self._state
        with tf.device(HOST):
            named = state.all_variables()
            variables = {name: tensorflow_variable(v) for name, v in named.items()}
            far = {name: v for name, v in variables.items() if isinstance(v, ComposedVariable) and not v.is_here}
            values = {name: _on_host(v) for name, v in variables.items() if name not in far}
            values |= self._read_far(far, is_needed=is_needed) if far else {}
            values |= self._first_streams(named, values)
            values |= {_METRICS + name: value for name, value in state.keras_metrics.snapshot().items()}
            for name, composed in _composed(named).items():
                values |= {f"{_STORED}{name}/{kind}": value for kind, value in composed.raw().items()}
            return values | self._optimizer_facts(named)

    def _read_far(self, variables: Mapping[str, ComposedVariable], *, is_needed: bool) -> dict[str, tf.Tensor]:
        """Returns the values of variables of which other workers have shards, if they are needed here."""

        def read(is_needed: tf.Tensor) -> dict[str, tf.Tensor]:
            values = {name: tf.identity(v) for name, v in variables.items()}
            empty = {name: tf.zeros([0], v.dtype) for name, v in variables.items()}
            return {n: tf.cond(is_needed, lambda n=n: values[n], lambda n=n: empty[n]) for n in values}

        if self._far_reader is None:  # traced once and alike on all workers, whether they need the values or not
            self._far_reader = graph_function(read)
        values: dict[str, tf.Tensor] = self._far_reader(tf.constant(is_needed))
        return values if is_needed else {}

    def differences(self, values: Mapping[str, tf.Tensor]) -> list[str]:
        """Returns how a snapshot of any process differs from the state: by a name, a shape, a dtype or a class."""
        facts = self._optimizer_facts(named := self._state.all_variables())
        expected = {name: tensorflow_variable(v) for name, v in named.items()}
        differences = [
            f"{name} is {values[name].numpy().decode()} there and {fact.numpy().decode()} here"
            for name, fact in reversed(facts.items())
            if name.endswith(_CLASS) and name in values and values[name] != fact
        ]
        for name, fact in facts.items():
            if name.endswith(_TRAINED) and name in values:
                there, here = ({*text.numpy().decode().split("\n")} for text in (values[name], fact))
                of_both = {variable.removeprefix("model/") for variable in expected if variable in values}
                where = {True: "there alone", False: "here alone"}
                others = sorted(line for line in there ^ here if line.partition(",")[0] in of_both)
                differences += [f"{line} is trained {where[line in there]}" for line in others]
        differences += [f"{name} is missing" for name in expected if name not in values]
        known = {*expected, *facts}
        unknown = [name for name in values if name not in known and name.startswith(_CHECKED_PREFIXES)]
        differences += [f"{name} is unknown" for name in unknown]
        for name, variable in expected.items():
            if name in values and (values[name].shape != variable.shape or values[name].dtype != variable.dtype):
                differences.append(f"{name} is {_spell(values[name])} there and {_spell(variable)} here")
        # Users know the first class as the second, which it takes the place of.
        return [each.replace("VariableOptimizers", "MultiOptimizer") for each in differences]

    def restore(self, values: Mapping[str, tf.Tensor]) -> None:
        """Sets the state to a snapshot of any number of replicas, which has no `differences`.

        A learning rate continues with its saved value, unless `model_fn` gives another one now than in the saved run.
        """
        seeds = {id(seed) for seed in self._state.seeds}
        with self._strategy.scope():
            facts = self._optimizer_facts(named := self._state.all_variables())
            for name, variable in named.items():
                initial = _initial(name)
                if initial in facts and initial in values and values[initial] != facts[initial]:
                    rates = float(variable.numpy()), float(values[name])
                    log.warning("%s is %g, as model_fn says now; the checkpoint has %g.", name, *rates)
                elif id(variable) in seeds:
                    self._restore_seed(variable, values[name])
                else:
                    tensorflow_variable(variable).assign(values[name])
            for name, composed in _composed(named).items():
                prefix = f"{_STORED}{name}/"
                raw = {n.removeprefix(prefix): value for n, value in values.items() if n.startswith(prefix)}
                composed.restore_raw(raw)
            of_metrics = {n.removeprefix(_METRICS): v for n, v in values.items() if n.startswith(_METRICS)}
            self._state.keras_metrics.restore(of_metrics)
        self._state.may_be_saved = True

    def _first_streams(self, named: Mapping[str, Any], values: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns the states of random streams, as the first replica has them, from those of this worker's first."""
        first = collectives.first_replica(self._strategy) * self._state.replicas.per_device
        seeds = {id(seed) for seed in self._state.seeds} if first else {}
        names = [name for name, variable in named.items() if id(variable) in seeds]
        return {name: stream_of(values[name], -first) for name in names}

    def _restore_seed(self, variable: Any, value: tf.Tensor) -> None:
        first = collectives.first_replica(self._strategy)
        for replica, copy in enumerate(self._state.replica_variables(variable), first):
            copy.assign(stream_of(value, replica * self._state.replicas.per_device))

    def _optimizer_facts(self, variables: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        """Returns what an optimizer's variables do not show: its class, what it trains, and its given rates."""
        rates = self._state.initial_learning_rates
        facts = {_initial(name): tf.constant(rates[id(v)]) for name, v in variables.items() if id(v) in rates}
        names = {id(variable): name for name, variable in portable_names(self._state.model).items()}
        for name in (update.name for update in self._state.optimizer_updates):
            optimizer = self._state.plain_optimizers[name]
            facts[optimizer_prefix(name) + _CLASS] = tf.constant(type(optimizer).__name__)
            rule = getattr(optimizer, "describe_rule", lambda variable: "")  # of a `MultiOptimizer`
            trained = sorted(names[id(v)] + rule(v) for v in self._state.variables_of_update[name])
            facts[optimizer_prefix(name) + _TRAINED] = tf.constant("\n".join(trained))
        return facts


def _initial(name: str) -> str:
    """Returns the name of the value that a variable had in `model_fn`."""
    return "/initial_".join(name.rsplit("/", 1))


def _composed(named: Mapping[str, Any]) -> dict[str, ComposedVariable]:
    return {name: v for name, v in named.items() if isinstance(v, ComposedVariable)}


def _on_host(variable: Any) -> tf.Tensor:
    """Returns the value of a variable in the memory of the host, in less than half of the time of `tf.identity`."""
    value = variable.value() if isinstance(variable, tf.Variable) else tf.identity(variable)
    return value if value.device.endswith(HOST.removeprefix("/")) else tf.identity(value)


def _spell(tensor: Any) -> str:
    return f"{tf.as_dtype(tensor.dtype).name}{list(tensor.shape)}"


class ReplicasDifferError(ValueError):
    """Replicas have variables with other bits."""


class ReplicaComparison:
    """Compares the variables of all replicas and workers, by checksums of their bits; traced once."""

    def __init__(self, state: TrainState, without: Sequence[Any]):
        """Stores the state; `without` are variables whose values may differ between replicas."""
        self._state, left_out = state, {id(v) for v in without}
        shared = {n: v for n, v in state.all_variables().items() if id(v) not in left_out}
        self._names = [name for name, variable in shared.items() if getattr(variable, "is_mirrored", True)]
        copies = [state.replica_variables(shared[name]) for name in self._names]
        self._checksums = graph_function(lambda: [[checksum(copy) for copy in of] for of in copies])

    def require_equal(self, step: int, cause: str) -> None:
        """Compares them; all workers call it.

        Args:
            step: the number of the last step, for the sentence.
            cause: the rest of the sentence, where variables differ.

        Raises:
            ReplicasDifferError: if a variable differs; the state is not to be saved then.
        """
        local = [np.array([int(number) for number in of]) for of in self._checksums()]  # [L] each, L local replicas
        of_workers = collectives.Workers(self._state.strategy).gather(dict(zip(self._names, local, strict=True)))
        different = [name for name in self._names if len({int(s) for of in of_workers for s in of[name]}) > 1]
        if not different:
            return
        name = different[0]
        by_replica = [(w, r, int(s)) for w, of in enumerate(of_workers) for r, s in enumerate(of[name])]
        worker, replica, _ = next(each for each in by_replica if each[2] != by_replica[0][2])
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        self._state.may_be_saved = False
        raise ReplicasDifferError(
            f"At step {step} {name}{more} of replica {replica} of worker {worker} differs from that of the first "
            f"replica: {cause}."
        )


def checksum(variable: tf.Variable) -> tf.Tensor:
    """Returns the sum of a variable's bits, read as integers, modulo 2^64: a scalar int64."""
    value = tf.cast(variable, tf.uint8) if variable.dtype == tf.bool else tf.convert_to_tensor(variable)
    return tf.reduce_sum(tf.cast(tf.bitcast(value, _INTEGERS[value.dtype.size]), tf.int64))


def relative_difference(values: Any, reference: Any, least_norm: float = 1e-30) -> float:
    """Returns ||values - reference|| / max(||reference||, least_norm), with Euclidean norms over all entries.

    Args:
        values: a number or an array; computed in float64.
        reference: as `values`.
        least_norm: the least denominator, for references near 0.

    Returns:
        0.0 for equal arrays, where NaN equals NaN; infinity if the shapes differ, or a difference is not finite.
    """
    values, reference = np.asarray(values, np.float64), np.asarray(reference, np.float64)
    if values.shape != reference.shape:
        return float("inf")
    same = (values == reference) | (np.isnan(values) & np.isnan(reference))
    if not np.isfinite([values[~same], reference[~same]]).all():
        return float("inf")
    norm = float(np.linalg.norm(reference[np.isfinite(reference)]))
    return float(np.linalg.norm(values[~same] - reference[~same])) / max(norm, least_norm)
