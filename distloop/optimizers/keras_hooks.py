"""Keras hooks: overrides methods of an optimizer, for a shorter Adam and others, and a layer's call, within a scope.

    skip_reduction(optimizer)                               # distloop reduces gradients itself, once
    simplify_adam(optimizer)                                # the same update in fewer operations
    scale_learning_rates(optimizer, [(kernel, 0.1)])        # a tenth of the learning rate for one variable
    update_on_variable_devices(optimizer)                   # a pipeline's variables are on several devices
    update_instead_of(optimizer, [(shard, kernel)])        # before the build: shards stand in for the model's variables

    with ReplacedCalls({"block_0": layer}, replace):        # by `replace("block_0", layer, layer.call)`
        loss_fn(batch, True)

Every private method of Keras's optimizers that distloop relies on is named here. Each function changes one optimizer
object; call them in the order above, after `optimizer.build` unless it says otherwise.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from distloop.variables import tensorflow_variable

# From this size on, one operation for all of Adam's update is faster than several: 1.1 times at this size, 2 times at
# 256 kB. At 4 kB it takes twice as long, since it wakes all threads.
MIN_FUSED_BYTES = 64 * 1024

_CONTEXT = ("current_call_ctx", "autocast_scope")  # what Keras knows in a call of a layer, such as `training`
_METHODS = ("call", "quantized_call")  # by which Keras computes a layer
Replace = Callable[[str, Any, Callable[..., Any]], Callable[..., Any]]  # path, layer and its call -> another call


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


class _Scalars(NamedTuple):
    """What Adam's updates of all variables of one dtype on one device have in common."""

    learning_rate: Any  # as Keras passes it: a Keras variable or a tensor
    rate: tf.Tensor  # its value
    beta_1_power: tf.Tensor  # beta_1 ** t, t counting from 1
    beta_2_power: tf.Tensor
    step_size: tf.Tensor  # the rate with both bias corrections

    @classmethod
    def make(cls, optimizer: Any, learning_rate: Any, dtype: tf.DType) -> "_Scalars":
        step, rate = tf.cast(optimizer.iterations + 1, dtype), tf.cast(learning_rate, dtype)
        beta_1_power, beta_2_power = (tf.cast(beta, dtype) ** step for beta in (optimizer.beta_1, optimizer.beta_2))
        step_size = rate * tf.sqrt(1 - beta_2_power) / (1 - beta_1_power)
        return cls(learning_rate, rate, beta_1_power, beta_2_power, step_size)


def simplify_adam(optimizer: keras.optimizers.Optimizer, sizes: Sequence[tuple[Any, int]] = ()) -> None:
    """Lets Adam and AdamW update in fewer operations, with the same bits; large variables in one, TensorFlow's own.

    Keras computes what all variables have in common once for each, half of its thirty operations. For a large variable,
    most of the rest read or write all of its memory. TensorFlow's operation follows Kingma & Ba 2015
    (arXiv:1412.6980), the end of section 2, as Keras does. They differ by rounding alone, most in 1 - beta_2: by 1.3e-5
    of it in float32. The mean of the squares differs as much, and its bias correction cancels the difference.

    Args:
        optimizer: a plain Keras optimizer. Adam with `amsgrad` and all other classes stay as they are.
        sizes: pairs of a variable and the elements that decide, where it is a shard of a larger one.
    """
    is_lazy = getattr(optimizer, "is_lazy", False) and isinstance(optimizer, keras.optimizers.Adam)
    if not (is_lazy or type(optimizer) in (keras.optimizers.Adam, keras.optimizers.AdamW)) or optimizer.amsgrad:
        return
    update_all, update_step = optimizer._distributed_tf_update_step, optimizer.update_step
    elements = {optimizer._var_key(variable): size for variable, size in sizes}
    scalars: dict[Any, _Scalars] = {}  # of one call of `apply`; it keeps the learning rate, so that no other has its id

    def update_all_simply(*args: Any) -> None:
        scalars.clear()
        update_all(*args)

    def update_simply(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not isinstance(gradient, tf.Tensor):
            update_step(gradient, variable, learning_rate)
            return
        plain = tensorflow_variable(variable)
        dtype = plain.dtype
        key = plain.device, dtype, id(learning_rate)
        with tf.device(plain.device):
            if key not in scalars:
                scalars[key] = _Scalars.make(optimizer, learning_rate, dtype)
            size = elements.get(optimizer._var_key(variable), plain.shape.num_elements()) * dtype.size
            update = _update_in_one if size >= MIN_FUSED_BYTES else _update_in_several
            update(optimizer, plain, tf.cast(gradient, dtype), scalars[key])

    optimizer._distributed_tf_update_step, optimizer.update_step = update_all_simply, update_simply


def _update_in_several(optimizer: Any, variable: tf.Variable, gradient: tf.Tensor, scalars: _Scalars) -> None:
    """Updates a variable as `keras.optimizers.Adam.update_step` does."""
    m, v = _moments(optimizer, variable)
    m.assign_add((gradient - m) * (1 - optimizer.beta_1), read_value=False)
    v.assign_add((tf.square(gradient) - v) * (1 - optimizer.beta_2), read_value=False)
    variable.assign_sub((m * scalars.step_size) / (tf.sqrt(v) + optimizer.epsilon), read_value=False)


def _update_in_one(optimizer: Any, variable: tf.Variable, gradient: tf.Tensor, scalars: _Scalars) -> None:
    """Updates a variable by TensorFlow's operation for Adam."""
    m, v = _moments(optimizer, variable)
    beta_1, beta_2, epsilon = (
        tf.constant(number, variable.dtype) for number in (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon)
    )
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=m.handle,
        v=v.handle,
        beta1_power=scalars.beta_1_power,
        beta2_power=scalars.beta_2_power,
        lr=scalars.rate,
        beta1=beta_1,
        beta2=beta_2,
        epsilon=epsilon,
        grad=gradient,
    )


def _moments(optimizer: Any, variable: tf.Variable) -> list[tf.Variable]:
    """Returns the slots of Adam for a variable: the means of its gradients and of their squares."""
    slot = optimizer._get_variable_index(variable)
    return [tensorflow_variable(slots[slot]) for slots in (optimizer._momentums, optimizer._velocities)]


def scale_learning_rates(optimizer: keras.optimizers.Optimizer, factors: Sequence[tuple[Any, float]]) -> None:
    """Multiplies the learning rate of some variables by a factor each, for their weight decay too.

    Keras 3 calls `update_step` and `_apply_weight_decay` for each variable.
    """
    update_step, decay = optimizer.update_step, optimizer._apply_weight_decay
    by_key = {optimizer._var_key(variable): factor for variable, factor in factors}

    def factor_of(variable: Any) -> float:
        return by_key.get(optimizer._var_key(variable), 1.0)

    def update_scaled(gradient: Any, variable: Any, learning_rate: Any) -> Any:
        factor = factor_of(variable)
        return update_step(gradient, variable, learning_rate if factor == 1.0 else learning_rate * factor)

    def decay_scaled(variables: Sequence[Any]) -> None:
        decay([variable for variable in variables if factor_of(variable) == 1.0])
        for variable in variables:
            factor, weight_decay = factor_of(variable), _weight_decay_of(optimizer, variable)
            if factor != 1.0 and weight_decay is not None and optimizer._use_weight_decay(variable):
                plain = tensorflow_variable(variable)
                rate = tf.cast(optimizer.learning_rate * factor * weight_decay, plain.dtype)
                plain.assign_sub(plain * rate)

    optimizer.update_step, optimizer._apply_weight_decay = update_scaled, decay_scaled


def _weight_decay_of(optimizer: Any, variable: Any) -> float | None:
    """Returns the weight decay of a variable: Muon has another one for those that it trains by AdamW's rule."""
    has_other = hasattr(optimizer, "adam_weight_decay") and optimizer._should_use_adamw(variable)
    decay: float | None = optimizer.adam_weight_decay if has_other else optimizer.weight_decay
    return decay


def slots_that_begin_as_weights(optimizer: Any) -> list[Any]:
    """Returns the slots, one a variable, that Keras sets to the weights when it makes them; empty: it has none."""
    return list(optimizer._momentums) if type(optimizer).__name__ == "ScheduleFreeAdamW" else []


def update_on_variable_devices(optimizer: keras.optimizers.Optimizer) -> None:
    """Places an optimizer's operations on each variable's device; without a strategy Keras uses the default device."""
    _update_step_on_devices(optimizer)
    decay = optimizer._apply_weight_decay

    def decay_on_devices(variables: Sequence[Any]) -> None:
        for variable in variables:
            with tf.device(tensorflow_variable(variable).device):
                decay([variable])

    optimizer._apply_weight_decay = decay_on_devices


def _update_step_on_devices(optimizer: keras.optimizers.Optimizer) -> None:
    update_step = optimizer.update_step

    def update_on_device(gradient: Any, variable: Any, *rest: Any) -> None:
        with tf.device(tensorflow_variable(variable).device):
            update_step(gradient, variable, *rest)

    optimizer.update_step = update_on_device


def keras_variable(stored: tf.Variable, name: str, path: str) -> keras.Variable:
    """Returns a Keras variable around one of TensorFlow, with its memory; Keras names slots after the path."""
    made = keras.Variable(0, dtype=stored.dtype.name, name=name)
    made._value, made._shape, made._ndim, made._path = stored, tuple(stored.shape), len(stored.shape), path
    return made


def update_instead_of(optimizer: keras.optimizers.Optimizer, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Updates each shard of the model's variables on its device, with the weight decay of its variable.

    Args:
        optimizer: a plain Keras optimizer that is not built yet, and gets the shards when it is.
        pairs: pairs of a shard and the model's variable.
    """
    use_weight_decay = optimizer._use_weight_decay
    by_key = {optimizer._var_key(shard): tensorflow_variable(variable) for shard, variable in pairs}

    def use_for_shard(variable: Any) -> Any:
        return use_weight_decay(by_key.get(optimizer._var_key(variable), variable))

    optimizer._use_weight_decay = use_for_shard
    _update_step_on_devices(optimizer)


class ReplacedCalls:
    """A scope in which layers are called by other functions; several threads may be in it, as those of replicas."""

    def __init__(self, layers: Mapping[str, Any], replace: Replace):
        """Takes the layers by path, and a function that returns what to call in place of a layer's `call`."""
        self._layers, self._replace = dict(layers), replace
        self._lock = threading.Lock()
        self._num_inside = 0
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            if self._num_inside > 1:
                return
            for path, layer in self._layers.items():
                for method in _METHODS:
                    self._before.append((layer, method, vars(layer).get(method)))
                    # Not by setattr, which Keras watches.
                    vars(layer)[method] = self._replace(path, layer, getattr(layer, method))

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._num_inside -= 1
            while not self._num_inside and self._before:
                layer, method, function = self._before.pop()
                del vars(layer)[method]
                if function is not None:
                    vars(layer)[method] = function


def call_context() -> dict[str, Any]:
    """Returns the context in which Keras calls a layer now, for `in_call_context`.

    It is a copy: in Keras's own, a layer that is called with `training=False` changes `training` for all later ones.
    """
    return {name: copy.copy(global_state.get_global_attribute(name)) for name in _CONTEXT}


@contextlib.contextmanager
def in_call_context(values: Mapping[str, Any]) -> Iterator[None]:
    """Enters the context of an earlier call."""
    before = {name: global_state.get_global_attribute(name) for name in values}
    for name, value in values.items():
        global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)


def masks_of(tensors: Any) -> list[Any]:
    """Returns the masks that Keras's layers have attached to the tensors of a structure; None: a tensor has none."""
    return [getattr(tensor, "_keras_mask", None) for tensor in tf.nest.flatten(tensors)]


def with_masks(tensors: Any, masks: Sequence[Any]) -> Any:
    """Attaches masks to the tensors of a structure, for the next layer; returns the structure."""
    for tensor, mask in zip(tf.nest.flatten(tensors), masks, strict=False):
        if mask is not None:
            tensor._keras_mask = mask
    return tensors
