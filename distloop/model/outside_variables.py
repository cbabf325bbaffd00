"""Variables outside the model: refuses those that the user's functions train or write, warns of those that they read.

    spec = OutsideVariables(state).watching_all(spec)       # a function that is traced raises a ValueError

`ModelSpec`'s model lacks such a variable, so nothing trains it, and no checkpoint holds it. The graph of a function
knows what the function captures; eagerly, nothing is checked.
"""

import dataclasses
import functools
import gc
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.errors import user_line
from distloop.graph_functions import outermost, written_resources
from distloop.log import log
from distloop.model.spec import ModelSpec

_MAX_NAMES = 3  # in a sentence
_PUT = (
    "put what holds them, such as a layer or a SeedGenerator, into it, as in ModelSpec([model, it], ...), and make "
    "what belongs to a Keras layer with add_weight"
)
_WRITTEN = "writes variables", f"so no checkpoint would hold them: {_PUT}"
_TRAINED = (
    "uses trainable variables",
    f"so they would be neither trained nor saved: {_PUT}, or set trainable = False on a layer that stays as it is",
)
_READ = "reads variables", f"so no checkpoint holds them: {_PUT}, unless the program sets them at each start"


@dataclasses.dataclass(frozen=True)
class _Outside:
    """A variable that the model lacks."""

    handle: tf.Tensor
    name: str
    is_trainable: bool


class OutsideVariables:
    """What the functions of a `ModelSpec` use beside the variables of a `TrainState`."""

    def __init__(self, state: Any):
        """Stores the state, whose variables are listed when a function is traced."""
        self._state = state
        self._known: dict[int, tf.Tensor] = {}  # handles of the state's variables, and of tables, by their `id`
        self._outside: dict[int, _Outside] = {}  # likewise

    def watching_all(self, spec: ModelSpec) -> ModelSpec:
        """Returns a spec each of whose functions is watched."""
        spec, updates = spec.with_functions(self.watching), []
        for update in spec.updates:
            step_fn, gradient_fn = (fn and self.watching(fn) for fn in (update.step_fn, update.gradient_fn))
            updates.append(dataclasses.replace(update, step_fn=step_fn, gradient_fn=gradient_fn))
        object.__setattr__(spec, "updates", tuple(updates))
        return spec

    def watching(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that raises a ValueError where `fn`, while it is traced, trains or writes such a variable.

        A warning names the variables that are only read, each once.
        """

        @functools.wraps(fn)
        def call(*arguments: Any) -> Any:
            if tf.executing_eagerly():
                return fn(*arguments)
            graph = tf.compat.v1.get_default_graph()
            before, num_operations = {id(inner) for _, inner in _captures(graph)}, len(graph.get_operations())
            returned = fn(*arguments)
            captured = [outermost(outer) for outer, inner in _captures(graph) if id(inner) not in before]
            self._check(captured, graph.get_operations()[num_operations:])
            return returned

        return call

    def _check(self, captured: Sequence[tf.Tensor], operations: Sequence[tf.Operation]) -> None:
        """Looks at what a function captured, and at the operations that it added to the graph."""
        known_names = {outside.name for outside in self._outside.values()}
        used = self._find([tensor for tensor in captured if tensor.dtype == tf.resource], operations)
        if not self._outside:
            return
        resources = written_resources(operations)
        if written := [outside for key, outside in self._outside.items() if key in resources]:
            raise ValueError(_sentence(_WRITTEN, written, operations))
        if trained := [outside for outside in used if outside.is_trainable]:
            raise ValueError(_sentence(_TRAINED, trained, operations))
        if read := [outside for outside in used if outside.name not in known_names]:
            log.warning("%s", _sentence(_READ, read, operations))

    def _find(self, handles: Sequence[tf.Tensor], operations: Sequence[tf.Operation]) -> list[_Outside]:
        """Returns the variables among some resources that the model lacks, those of TensorFlow's collectives apart."""
        new = {id(handle): handle for handle in handles}
        if not new.keys() <= self._known.keys() | self._outside.keys():
            state = self._state
            variables = [*state.all_variables().values(), *state.keras_metrics.variables().values()]
            parts = [part for variable in variables for part in state.replica_variables(variable)]
            self._known |= {id(part.handle): part.handle for part in parts}
            new = {key: new[key] for key in new.keys() - self._known.keys() - self._outside.keys()}
            found = {key: variable for key, variable in _variables_of(new).items() if _first_user(variable, operations)}
            self._outside |= found
            self._known |= {key: new[key] for key in new.keys() - found.keys()}
        return [self._outside[id(handle)] for handle in handles if id(handle) in self._outside]


def _captures(graph: Any) -> Iterable[tuple[tf.Tensor, tf.Tensor]]:
    """Returns what a function's graph has captured so far, each with what stands for it in the graph."""
    return getattr(graph, "captures", ())


def _variables_of(handles: Mapping[int, tf.Tensor]) -> dict[int, _Outside]:
    """Returns the variables with some handles, both by the `id` of the handle; other resources have none."""
    if not handles:
        return {}
    objects = gc.get_objects()  # millions in some processes
    variables = {id(v.handle): v for v in objects if _is_of_one_device(type(v)) and id(v.handle) in handles}
    owners: dict[int, Any] = {}  # Keras's variables; some are only half made
    for owner in (owner for owner in objects if issubclass(type(owner), keras.Variable)):
        value = getattr(owner, "_value", None)
        owners |= {id(part): owner for part in getattr(value, "values", [value])}
    outside = {}
    for key, variable in variables.items():
        owner = owners.get(id(variable), variable)
        name = getattr(owner, "path", None) or re.sub(r"(/replica_\d+)?:0$", "", owner.name)
        outside[key] = _Outside(handles[key], name, owner.trainable)
    return outside


def _is_of_one_device(kind: type) -> bool:
    """Returns whether a type is one of variables of one device; proxies answer isinstance for other objects."""
    return issubclass(kind, tf.Variable) and hasattr(kind, "handle") and not hasattr(kind, "values")


def _sentence(words: tuple[str, str], found: Sequence[_Outside], operations: Sequence[tf.Operation]) -> str:
    """Returns a sentence about some variables, with the line that uses the first of them."""
    names = list(dict.fromkeys(outside.name for outside in found))
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    line = user_line(getattr(_first_user(found[0], operations), "traceback", None))
    shown = f"{', '.join(names[:_MAX_NAMES])}{more}{f' ({line})' if line else ''}"
    return f"A function of the model {words[0]} that ModelSpec's model lacks, {shown}, {words[1]}."


def _first_user(outside: _Outside, operations: Sequence[tf.Operation]) -> tf.Operation | None:
    """Returns the first operation that uses a variable; collectives, whose order is a variable, do not count."""
    others = (op for op in operations if not op.type.startswith("Collective"))
    return next((op for op in others if any(outermost(tensor) is outside.handle for tensor in op.inputs)), None)
