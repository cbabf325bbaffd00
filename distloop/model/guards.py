"""Guards: scopes around each call of a user's function, which refuse variables that training would not know.

    loss_fn = guarded(loss_fn, refuse_new_variables, functools.partial(explain_fixed_sizes, fixed_sizes(model), 2))
    loss_fn = guarded(loss_fn, OutsideVariables(state).watch)       # raises a ValueError while the function is traced
    with recorded(created):                                         # created: {id(variable): variable}
        spec = model_fn()

A variable that the first step creates would not be trained, averaged or saved; nor is one that `ModelSpec`'s model
lacks. The graph of a function knows what the function captures; eagerly, nothing is checked. Most models that were made
for a fixed number of rows, by `keras.Input(batch_shape=...)`, take any, so only the errors of the others are explained.
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from distloop.data import shards
from distloop.errors import user_line
from distloop.graph_functions import assigned_resources, outermost
from distloop.log import log
from distloop.model.spec import ModelSpec
from distloop.variables import top_layers

_MAX_NAMES = 3  # in a sentence
_PUT = (
    "put what holds them, such as a layer or a SeedGenerator, into it, as in ModelSpec([model, it], ...), and make "
    "what belongs to a Keras layer with add_weight"
)
_ASSIGNED = "writes variables", f"so no checkpoint would hold them: {_PUT}"
_TRAINED = (
    "uses trainable variables",
    f"so they would be neither trained nor saved: {_PUT}, or set trainable = False on a layer that stays as it is",
)
_READ = "reads variables", f"so no checkpoint holds them: {_PUT}, unless the program sets them at each start"

SEED_ADVICE = (
    "give keras.random and its layers a keras.random.SeedGenerator that ModelSpec's model holds, as in "
    "ModelSpec([model, seed_generator], ...)"
)


# Returns the scope of one call, given the arguments and a list that gets what the function returns.
Guard: TypeAlias = Callable[[Sequence[Any], list[Any]], contextlib.AbstractContextManager[Any]]


class GuardedFunction:
    """A function of the user's that is called within scopes, of which a debugger shows one frame."""

    def __init__(self, fn: Callable[..., Any], guards: Sequence[Guard]):
        """Stores the function and its guards, the innermost first."""
        functools.update_wrapper(self, fn)
        self.unguarded, self.guards = fn, guards

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function."""
        returned: list[Any] = []
        with contextlib.ExitStack() as scopes:
            for guard in reversed(self.guards):
                scopes.enter_context(guard(arguments, returned))
            returned.append(self.unguarded(*arguments))
        return returned[0]


def guarded(fn: Callable[..., Any], *guards: Guard) -> GuardedFunction:
    """Returns a function that is called within more scopes than before, around those that it has."""
    if isinstance(fn, GuardedFunction):
        return GuardedFunction(fn.unguarded, [*fn.guards, *guards])
    return GuardedFunction(fn, guards)


def with_guarded_steps(spec: ModelSpec, guard: Guard) -> ModelSpec:
    """Returns a spec whose `step_fn`s and `gradient_fn`s are guarded."""
    spec, updates = copy.copy(spec), []
    for update in spec.updates:
        step_fn, gradient_fn = (fn and guarded(fn, guard) for fn in (update.step_fn, update.gradient_fn))
        updates.append(dataclasses.replace(update, step_fn=step_fn, gradient_fn=gradient_fn))
    object.__setattr__(spec, "updates", tuple(updates))
    return spec


class VariableCreatedError(ValueError):
    """A step created a variable, of the name `variable`."""

    def __init__(self, message: str, variable: str):
        super().__init__(message)
        self.variable = variable


def recorded(created: dict[int, Any]) -> contextlib.AbstractContextManager[None]:
    """Returns a scope that stores each new variable by its identity; as it is held, no other object gets the same."""

    def record(next_creator: Callable[..., Any], **settings: Any) -> Any:
        variable = next_creator(**settings)
        created[id(variable)] = variable
        return variable

    scope: contextlib.AbstractContextManager[None] = tf.variable_creator_scope(record)
    return scope


@contextlib.contextmanager
def refuse_new_variables(arguments: Sequence[Any], returned: list[Any]) -> Iterator[None]:
    """Raises VariableCreatedError where a function that a step calls creates a variable."""
    refused: list[str] = []

    def refuse(next_creator: Callable[..., Any], **settings: Any) -> Any:
        scope = re.sub("^(while/|replica_[0-9]+/)+", "", tf.get_current_name_scope() + "/").lstrip("/")
        refused.append(scope + (settings.get("name") or "variable"))
        raise ValueError("too late for a new variable")

    try:
        with tf.variable_creator_scope(refuse), contextlib.ExitStack() as stack:
            with tf.init_scope():  # Keras's layers create variables there, under creators of its own
                stack.enter_context(tf.variable_creator_scope(refuse))
            yield
    except Exception as error:  # Keras raises others from it, with the arguments of layers
        if not refused:
            raise
        raise VariableCreatedError(explain_new_variable(refused[0]), refused[0]) from error


def explain_new_variable(variable: str) -> str:
    """Returns the message about a variable that was created too late."""
    advice = (
        SEED_ADVICE
        if "seed_generator_state" in variable
        else "create it with the model, by a call of the whole model on an example or by the build of its layer, and "
        "let it belong to ModelSpec's model"
    )
    return f"The variable {variable!r} was created by a step, so it would not be trained or saved: {advice}."


def fixed_sizes(model: Any) -> dict[int, str]:
    """Returns the numbers of rows that the layers of a model were made for, each with the name of one."""
    inputs = [(layer.name, tensor) for layer in top_layers(model) for tensor in getattr(layer, "inputs", None) or ()]
    return {tensor.shape[0]: name for name, tensor in inputs if len(tensor.shape) and tensor.shape[0] is not None}


@contextlib.contextmanager
def explain_fixed_sizes(
    sizes: Mapping[int, str], replicas: int, arguments: Sequence[Any], returned: list[Any]
) -> Iterator[None]:
    """Raises ValueError where a function fails by a fixed number of rows, or computes so many; a guard.

    The function takes a replica's rows first; `sizes` is a result of `fixed_sizes` that is not empty.
    """
    (size, model), *_ = sizes.items()
    rows = shards.batch_size(arguments[0])
    if isinstance(rows, int) and rows in sizes:
        yield
        return
    actual = f"{rows}" if isinstance(rows, int) else "a number that is known when it runs"
    explanation = (
        f"The model {model!r} is made for {size} rows by keras.Input(batch_shape=...), and a replica gets {actual}: "
        f"give keras.Input a shape in place of batch_shape, or batches of {size * replicas} rows, with "
        "drop_remainder=True."
    )
    try:
        yield
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        if not re.search(rf"\b{size}\b", str(error)):  # a Sequential built by a call has that call's size, too
            raise
        raise ValueError(explanation) from error
    tensors = [value for value in tf.nest.flatten(returned) if isinstance(value, tf.Tensor) and value.shape.rank]
    if any(tensor.shape[0] in sizes for tensor in tensors):
        raise ValueError(explanation)


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

    def allow(self, variables: Iterable[tf.Variable]) -> None:
        """Lets a step write variables that no checkpoint has to hold."""
        self._known |= {id(variable.handle): variable.handle for variable in variables}

    @contextlib.contextmanager
    def watch(self, arguments: Sequence[Any], returned: list[Any]) -> Iterator[None]:
        """Raises a ValueError where a function, while it is traced, trains or writes such a variable; a guard.

        A warning names the variables that are only read, each once.
        """
        if tf.executing_eagerly():
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        before, num_operations = {id(inner) for _, inner in _captures(graph)}, len(graph.get_operations())
        yield
        captured = [outermost(outer) for outer, inner in _captures(graph) if id(inner) not in before]
        self._check(captured, graph.get_operations()[num_operations:])

    def _check(self, captured: Sequence[tf.Tensor], operations: Sequence[tf.Operation]) -> None:
        """Looks at what a function captured, and at the operations that it added to the graph."""
        known_names = {outside.name for outside in self._outside.values()}
        used = self._find([tensor for tensor in captured if tensor.dtype == tf.resource], operations)
        if not self._outside:
            return
        resources = assigned_resources(operations)
        if assigned := [outside for key, outside in self._outside.items() if key in resources]:
            raise ValueError(_sentence(_ASSIGNED, assigned, operations))
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
            copies = [copy for variable in variables for copy in state.replica_variables(variable)]
            self._known |= {id(copy.handle): copy.handle for copy in copies}
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
    variables = {id(v.handle): v for v in objects if _is_of_one_device(v) and id(v.handle) in handles}
    owners: dict[int, Any] = {}  # Keras's variables; some are only half made, too
    for owner in (owner for owner in objects if issubclass(type(owner), keras.Variable)):
        value = getattr(owner, "_value", None)
        owners |= {id(each): owner for each in getattr(value, "values", [value])}
    outside = {}
    for key, variable in variables.items():
        owner = owners.get(id(variable), variable)
        name = getattr(owner, "path", None) or re.sub(r"(/replica_\d+)?:0$", "", owner.name)
        outside[key] = _Outside(handles[key], name, owner.trainable)
    return outside


def _is_of_one_device(it: Any) -> bool:
    """Returns whether an object is a variable of one device, and more than half made; proxies answer isinstance."""
    return issubclass(type(it), tf.Variable) and not hasattr(type(it), "values") and hasattr(it, "handle")


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
