"""The store of an optimizer's slots, and how the optimizer updates them: small ones together, in vectors.

    store = SlotStore(optimizer, [View(variable, variable, 1.0) for variable in variables])
    pairs = store.join(pairs, packing, segments, scale)         # small gradients as vectors
    optimizer.apply(*zip(*pairs))

It serves updates on every replica, and updates that are cut over replicas, where an optimizer has views of variables on
several devices. An update of many small variables is mostly the launching of operations. Each element of the updates
here depends on the same element of the gradient and the slots, so a vector of variables gets the bits that each of them
would get. Weights stay as they are, and get their elements of the change. `optimizer.variables` has the slots by
variable.

The private methods by which Keras's optimizers update are named here.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from distloop.optimizers.gradients import Packing, Segment
from distloop.optimizers.keras_hooks import is_schedule_free
from distloop.variables import ComposedVariable, tensorflow_variable

# Keras's optimizers each element of whose updates depends on the same element of the gradient, the weight and the
# slots, and on no other; with the lists of the slots that vectors replace. None: the last bits depend on the position
# in a vector, as the update divides by a square root, for which TensorFlow multiplies by `rsqrt`.
_ADAM = ["_momentums", "_velocities", "_velocity_hats"]
BY_ELEMENT: Mapping[type, Sequence[str] | None] = {
    keras.optimizers.SGD: ["momentums"],
    keras.optimizers.Adam: _ADAM,
    keras.optimizers.AdamW: _ADAM,
    keras.optimizers.Nadam: _ADAM,
    keras.optimizers.Adamax: ["_m", "_u"],
    keras.optimizers.Lion: ["_momentums"],
    **dict.fromkeys(
        [keras.optimizers.RMSprop, keras.optimizers.Adagrad, keras.optimizers.Adadelta, keras.optimizers.Ftrl]
    ),
}
# From this size on, one operation for all of Adam's update is faster than several: 1.1 times at this size, 2 times at
# 256 kB. At 4 kB it takes twice as long, since it wakes all threads.
MIN_FUSED_BYTES = 64 * 1024


class SliceVariable(ComposedVariable, tf.__internal__.tracking.Trackable):
    """Some elements of a vector as one variable.

    Attributes:
        name, shape, dtype: of the variable.
        shards: the same of each replica of this worker.
    """

    def __init__(self, name: str, vector: Any, start: int, shape: Sequence[int]):
        """Takes the elements from `start` on of a vector, a TensorFlow variable."""
        self.name = self._shared_name = name
        self.shape, self.dtype = tf.TensorShape(shape), vector.dtype
        self._vector, self._start, self._end = vector, start, start + self.shape.num_elements()
        copies = tf.distribute.get_strategy().experimental_local_results(vector)
        others = [SliceVariable(name, copy, start, shape) for copy in copies if copy is not vector]
        self.shards = tuple(others or [self])

    @property
    def device(self) -> str:
        """The name of the device that holds the vector."""
        return str(self._vector.device)

    @property
    def handle(self) -> Any:
        """The resource of the vector."""
        return self._vector.handle

    def value(self) -> tf.Tensor:
        """Returns the elements, in the shape of the variable."""
        return tf.reshape(tf.convert_to_tensor(self._vector)[self._start : self._end], self.shape)

    def assign(self, value: Any) -> None:
        """Sets the elements."""
        vector = tf.convert_to_tensor(self._vector)
        value = tf.reshape(tf.cast(value, self.dtype), [self._end - self._start])
        self._vector.assign(tf.concat([vector[: self._start], value, vector[self._end :]], 0))

    def assign_add(self, value: Any) -> None:
        """Adds to the elements."""
        self.assign(tf.convert_to_tensor(self) + tf.cast(value, self.dtype))

    def assign_sub(self, value: Any) -> None:
        """Subtracts from the elements."""
        self.assign(tf.convert_to_tensor(self) - tf.cast(value, self.dtype))

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        """Returns what `tf.train.Checkpoint` stores, as of a `tf.Variable`."""
        return {"VARIABLE_VALUE": tf.convert_to_tensor(self)}

    def _restore_from_tensors(self, restored: Mapping[str, tf.Tensor]) -> None:
        """Sets the elements to what `_serialize_to_tensors` returned."""
        self.assign(restored["VARIABLE_VALUE"])


@dataclasses.dataclass(frozen=True, eq=False)
class FlatWeights:
    """Small variables of one kind, which an optimizer updates as one.

    Attributes:
        variables: of the same dtype, on the same device.
        are_reached: whether each is to change.
        factor: of the learning rate.
        slots: the vectors of their slots, by the name of the optimizer's list.
        _unique_id: what Keras knows the first variable by.
        constraint: None, for Keras.
    """

    variables: Sequence[Any]
    are_reached: Sequence[bool]
    factor: float
    slots: Mapping[str, tf.Variable]
    _unique_id: str
    constraint = None

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute, such as dtype and device, of the first variable."""
        return getattr(tensorflow_variable(self.variables[0]), name)

    @property
    def reached(self) -> list[Any]:
        """The variables that are to change."""
        return [v for v, is_reached in zip(self.variables, self.are_reached, strict=True) if is_reached]

    def assign(self, vector: tf.Variable, value: tf.Tensor) -> None:
        """Sets a vector of slots, but for the variables that are not to change."""
        if not all(self.are_reached):
            pairs = zip(self.are_reached, self.variables, strict=True)
            are_set = tf.concat([tf.fill([v.shape.num_elements()], is_reached) for is_reached, v in pairs], 0)
            value = tf.where(are_set, value, vector)
        vector.assign(value, read_value=False)

    def assign_add(self, target: Any, value: tf.Tensor) -> None:
        """Adds to a vector of slots, or to the variables their elements of a vector."""
        if target is self:
            self._change("assign_add", value)
        else:
            self.assign(target, target + value)

    def assign_sub(self, target: Any, value: tf.Tensor) -> None:
        """Subtracts from the variables their elements of a vector; no optimizer here subtracts from a slot."""
        self._change("assign_sub", value)

    def _change(self, method: str, value: tf.Tensor) -> None:
        pieces = tf.split(value, [v.shape.num_elements() for v in self.variables])
        for variable, piece, is_reached in zip(self.variables, pieces, self.are_reached, strict=True):
            if is_reached:
                getattr(tensorflow_variable(variable), method)(tf.reshape(piece, variable.shape), read_value=False)


class View(NamedTuple):
    """What an optimizer updates in place of a variable of the model."""

    variable: Any  # the variable itself, or a shard of it on one device
    of: Any  # the variable of the model
    factor: float  # of the learning rate

    @property
    def is_large(self) -> bool:
        """Whether the variable of the model is large, and so each shard of it counts as large."""
        dtype = tf.as_dtype(self.of.dtype)
        return bool(tf.TensorShape(self.of.shape).num_elements() * dtype.size >= MIN_FUSED_BYTES)

    @property
    def may_be_joined(self) -> bool:
        """Whether it is small, and neither changed by itself afterwards nor by a replica for all."""
        plain = tensorflow_variable(self.variable)
        is_changed = getattr(self.of, "constraint", None) or getattr(self.of, "overwrite_with_gradient", False)
        is_joinable = plain.shape.num_elements() > 0 and plain.aggregation == tf.VariableAggregation.NONE
        return is_joinable and not (self.is_large or is_changed)


class SlotStore:
    """The slots of an optimizer, and the update of what it trains.

    Attributes:
        optimizer: the optimizer.
        stored: the variables that hold its slots and counts, each once.
    """

    def __init__(self, optimizer: Any, views: Sequence[View]):
        """Overrides methods of an optimizer, and moves the slots of small variables into vectors.

        Args:
            optimizer: a plain Keras optimizer, built in the scope of this call.
            views: what it updates.
        """
        skip_reduction(optimizer)
        self.optimizer, self._groups, self._powers = optimizer, list[FlatWeights](), dict[Any, list[tf.Tensor]]()
        self._views = {optimizer._var_key(view.variable): view for view in views}
        is_lazy = getattr(optimizer, "is_lazy", False)  # by rows alone where a gradient is sparse, else as its base
        kinds: list[type] = [kind for kind in type(optimizer).__mro__[: None if is_lazy else 1] if kind in BY_ELEMENT]
        names = BY_ELEMENT[kinds[0]] if kinds else None
        self._is_adam = kinds[:1] in ([keras.optimizers.Adam], [keras.optimizers.AdamW]) and not optimizer.amsgrad
        if names is not None:
            self._join_slots(views, [name for name in names if getattr(optimizer, name, None)])
        single = [v for v in optimizer.variables if not isinstance(tensorflow_variable(v), SliceVariable)]
        self.stored = [*single, *(vector for group in self._groups for vector in group.slots.values())]
        self._update_step, self._decay = optimizer.update_step, optimizer._apply_weight_decay
        optimizer._all_reduce_sum_gradients, optimizer.update_step = self._update_groups, self._update
        optimizer._apply_weight_decay = self._decay_weights

    def _join_slots(self, views: Sequence[View], names: Sequence[str]) -> None:
        """Joins the slots of the lists of these names, of small variables of one kind each."""
        by_kind: dict[Any, list[Any]] = {}
        for view in views:
            if view.may_be_joined:
                plain = tensorflow_variable(view.variable)
                by_kind.setdefault((view.factor, plain.dtype, plain.device), []).append(view.variable)
        for (factor, *_), of_kind in by_kind.items():
            if len(of_kind) > 1:
                numbers = [self.optimizer._get_variable_index(v) for v in of_kind]
                slots = {name: _join([getattr(self.optimizer, name)[i] for i in numbers]) for name in names}
                key = self.optimizer._var_key(of_kind[0])
                self._groups.append(FlatWeights(of_kind, [True] * len(of_kind), factor, slots, key))

    def join(
        self,
        pairs: Sequence[tuple[Any, Any]],
        packing: Packing | None = None,
        segments: Sequence[Segment] = (),
        scale: tf.Tensor | None = None,
    ) -> list[tuple[Any, Any]]:
        """Returns what the optimizer is to apply, with one gradient for each group.

        Args:
            pairs: of gradients and the views' variables.
            packing: the layout of the same gradients in segments, where a group may be a segment; None: there is none.
            segments: the gradients.
            scale: the factor to multiply the segments by; None: they are scaled.
        """
        gradient_of = {id(variable): gradient for gradient, variable in pairs}
        for group in self._groups:
            are_reached = [id(v) in gradient_of for v in group.variables]
            if not any(are_reached):
                continue
            with tf.device(group.device):
                if packing is not None:
                    joined = packing.join(segments, scale, group.variables)
                else:
                    filled = [gradient_of.get(id(v), tf.zeros(v.shape, v.dtype)) for v in group.variables]
                    joined = tf.concat([tf.reshape(gradient, [-1]) for gradient in filled], 0)
            ids = set(map(id, group.variables))
            pairs = [pair for pair in pairs if id(pair[1]) not in ids]
            pairs.append((joined, dataclasses.replace(group, are_reached=are_reached)))
        return list(pairs)

    def _update_groups(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Updates groups; returns the pairs of a gradient and a variable that are left. Keras calls it in each step."""
        self._powers.clear()
        joined = [(gradient, weights) for gradient, weights in pairs if isinstance(weights, FlatWeights)]
        for gradient, weights in joined:
            twin: Any = object.__new__(type(self.optimizer))  # one that has a single variable, the group
            vars(twin).update(vars(self.optimizer), **{name: [slot] for name, slot in weights.slots.items()})
            vars(twin).update({method: getattr(weights, method) for method in ("assign", "assign_add", "assign_sub")})
            vars(twin)["_get_variable_index"] = lambda variable: 0
            with tf.device(weights.device):
                type(twin).update_step(twin, gradient, weights, _times(self.optimizer.learning_rate, weights.factor))
        return [pair for pair in pairs if not isinstance(pair[1], FlatWeights)]

    def _update(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable on its device; without a strategy, Keras uses the default device.

        A large variable is updated in one operation of TensorFlow's, if the optimizer is Adam; of Keras's thirty, most
        read or write all of its memory. It follows Kingma & Ba 2015 (arXiv:1412.6980), the end of section 2, as Keras
        does. They differ by rounding alone, most in 1 - beta_2: by 1.3e-5 of it in float32. The mean of the squares
        differs as much, and its bias correction cancels the difference.
        """
        optimizer, plain = self.optimizer, tensorflow_variable(variable)
        view = self._views[optimizer._var_key(variable)]
        rate, dtype = _times(learning_rate, view.factor), plain.dtype
        with tf.device(plain.device):
            if not (self._is_adam and view.is_large and isinstance(gradient, tf.Tensor)):
                self._update_step(gradient, variable, rate)
                return
            if (key := (plain.device, dtype)) not in self._powers:
                step = tf.cast(optimizer.iterations + 1, dtype)
                self._powers[key] = [tf.cast(beta, dtype) ** step for beta in (optimizer.beta_1, optimizer.beta_2)]
            slot, powers = optimizer._get_variable_index(variable), self._powers[key]
            tf.raw_ops.ResourceApplyAdam(
                var=plain.handle,
                m=tensorflow_variable(optimizer._momentums[slot]).handle,
                v=tensorflow_variable(optimizer._velocities[slot]).handle,
                beta1_power=powers[0],
                beta2_power=powers[1],
                lr=tf.cast(rate, dtype),
                beta1=tf.constant(optimizer.beta_1, dtype),
                beta2=tf.constant(optimizer.beta_2, dtype),
                epsilon=tf.constant(optimizer.epsilon, dtype),
                grad=tf.cast(gradient, dtype),
            )

    def _decay_weights(self, variables: Sequence[Any]) -> None:
        """Lets weights decay on their devices, by the learning rate of each."""
        optimizer, by_device = self.optimizer, dict[str, list[Any]]()
        for variable in (v for w in variables for v in getattr(w, "reached", [w])):
            plain, factor = tensorflow_variable(variable), self._views[optimizer._var_key(variable)].factor
            if factor == 1.0:
                by_device.setdefault(plain.device, []).append(variable)
            elif (decay := _weight_decay_of(optimizer, variable)) is not None and optimizer._use_weight_decay(variable):
                with tf.device(plain.device):
                    plain.assign_sub(plain * tf.cast(optimizer.learning_rate * factor * decay, plain.dtype))
        for device, of_device in by_device.items():
            with tf.device(device):
                self._decay(of_device)


def skip_reduction(optimizer: keras.optimizers.Optimizer) -> None:
    """Keeps Keras from summing gradients over the replicas a second time.

    Keras 3 has no `skip_gradients_aggregation`; overriding this method on the object is the only way.

    Raises:
        RuntimeError: if this version of Keras has no such method.
    """
    if not hasattr(optimizer, "_all_reduce_sum_gradients"):
        raise RuntimeError(
            f"Keras {keras.__version__} has no Optimizer._all_reduce_sum_gradients, which distloop needs to reduce "
            "gradients once: install a tested version, keras>=3.12,<3.16."
        )
    optimizer._all_reduce_sum_gradients = list


def _times(learning_rate: Any, factor: float) -> Any:
    return learning_rate if factor == 1.0 else learning_rate * factor


def _weight_decay_of(optimizer: Any, variable: Any) -> float | None:
    """Returns the weight decay of a variable: Muon has another one for those that it trains by AdamW's rule.

    None: there is none, or it is in the optimizer's step.
    """
    if is_schedule_free(optimizer):
        return None
    has_other = hasattr(optimizer, "adam_weight_decay") and optimizer._should_use_adamw(variable)
    decay: float | None = optimizer.adam_weight_decay if has_other else optimizer.weight_decay
    return decay


def _join(slots: Sequence[keras.Variable]) -> tf.Variable:
    """Returns a vector with the values of some slots, which become slices of it."""
    values = [tf.reshape(tf.convert_to_tensor(slot), [-1]) for slot in slots]
    with tf.distribute.get_strategy().extended.colocate_vars_with(tensorflow_variable(slots[0])):
        vector = tf.Variable(tf.concat(values, 0), trainable=False, name="slots")
    start = 0
    for slot, value in zip(slots, values, strict=True):
        slot._value = SliceVariable(slot.name, vector, start, slot.shape)
        start += value.shape[0]
    return vector
