"""Overrides of Keras's optimizers: gradients are applied once, and fused updates equal those of Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from distloop.model.saved_state import relative_difference
from distloop.optimizers import gradients, keras_hooks
from tests.problems import mirrored


def moved_by(strategy, *, is_hooked, optimizer_class=keras.optimizers.SGD):
    """Returns how far weights on every replica move when each replica applies the gradient 1."""
    with strategy.scope():
        variable = keras.Variable(np.zeros([2], np.float32))
        optimizer = optimizer_class(1.0)
        optimizer.build([variable])
    if is_hooked:
        keras_hooks.skip_reduction(optimizer)

    def replica_fn():
        # Made here: TensorFlow does not add up a tensor that all replicas capture.
        gradient = tf.ones([2]) * tf.cast(tf.distribute.get_replica_context().num_replicas_in_sync > 0, tf.float32)
        gradients.apply(optimizer, [gradient], [variable])

    tf.function(lambda: strategy.run(replica_fn), autograph=False)()
    assert int(optimizer.iterations.numpy()) == 1
    return [float(-value.numpy()[0]) for value in strategy.experimental_local_results(variable.value)]


def test_a_reduced_gradient_moves_the_weight_once_on_every_replica():
    assert moved_by(mirrored(2), is_hooked=True) == [1.0, 1.0]
    assert moved_by(mirrored(4), is_hooked=True) == [1.0] * 4
    assert moved_by(mirrored(2), is_hooked=False) == [2.0, 2.0]  # else skip_reduction is not needed any more


OPTIMIZERS = [keras.optimizers.Adam, keras.optimizers.Lion]
if tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 13):  # before, Muon knew no variables of tf.distribute
    OPTIMIZERS.append(keras.optimizers.Muon)


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_every_optimizer_takes_the_hook(optimizer_class):
    once = moved_by(tf.distribute.get_strategy(), is_hooked=False, optimizer_class=optimizer_class)
    assert moved_by(mirrored(2), is_hooked=True, optimizer_class=optimizer_class) == once * 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("make", [keras.optimizers.Adam, keras.optimizers.AdamW])
def test_a_shorter_adam_has_the_same_bits(make, dtype):
    def train(is_short):
        variables = [keras.Variable(np.linspace(-1, 1, size), dtype=dtype) for size in (5, 64) * 4]
        optimizer = make(keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.5), beta_2=0.97)
        optimizer.build(variables)
        keras_hooks.skip_reduction(optimizer)
        if is_short:
            keras_hooks.simplify_adam(optimizer)
            keras_hooks.scale_learning_rates(optimizer, [(variables[0], 1.0)])

        @tf.function(autograph=False)
        def step_fn(draw):
            gradients.apply(optimizer, [tf.cast(draw[: v.shape[0]], dtype) for v in variables], variables)

        for draw in np.random.default_rng(0).normal(size=(4, 64)):
            step_fn(tf.constant(draw))
        graph = step_fn.get_concrete_function(tf.constant(draw)).graph
        return [v.numpy() for v in (*variables, *optimizer.variables)], len(graph.get_operations())

    (expected, many), (found, few) = train(is_short=False), train(is_short=True)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert few < 0.8 * many


def test_a_shorter_adam_reads_the_learning_rate_in_each_step():
    def moves(is_short):
        variable = keras.Variable(np.ones(3, np.float32))
        optimizer = keras.optimizers.Adam(0.5)
        optimizer.build([variable])
        if is_short:
            keras_hooks.simplify_adam(optimizer)
        step_fn = tf.function(lambda: optimizer.apply([tf.ones(3)], [variable]), autograph=False)
        for rate in (0.5, 0.25):
            optimizer.learning_rate = rate
            before = variable.numpy()
            step_fn()
            yield before[0] - variable.numpy()[0]

    found = list(moves(is_short=True))
    assert found == list(moves(is_short=False))
    assert found == pytest.approx([0.5, 0.25], rel=1e-4)


def trained_with(optimizer, strategy, *, is_fused, steps=30):
    """Returns the weights and slots of a large and a small variable on the last replica, and the graph's operations."""
    with strategy.scope():
        shapes = [[keras_hooks.MIN_FUSED_BYTES // 16, 4], [3]]
        variables = [keras.Variable(np.ones(shape, np.float32)) for shape in shapes]
        optimizer = optimizer()
        optimizer.build(variables)
    keras_hooks.skip_reduction(optimizer)
    if is_fused:
        keras_hooks.simplify_adam(optimizer)
    directions = [np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in shapes]

    def replica_fn():
        step = tf.cast(optimizer.iterations, tf.float32)
        gradients.apply(optimizer, [direction * tf.cos(step) for direction in directions], variables)

    step_fn = tf.function(lambda: strategy.run(replica_fn), autograph=False)
    for _ in range(steps):
        step_fn()
    found = [*variables, *optimizer.variables]
    operations = [op.type for op in step_fn.get_concrete_function().graph.get_operations()]
    return [strategy.experimental_local_results(v.value)[-1].numpy() for v in found], operations


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 20), beta_1=0.8, epsilon=1e-3),
        lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, clipvalue=0.5),
    ],
)
def test_a_fused_update_equals_that_of_keras(make, count):
    strategy = mirrored(count) if count > 1 else tf.distribute.get_strategy()
    expected, _ = trained_with(make, strategy, is_fused=False)
    found, operations = trained_with(make, strategy, is_fused=True)
    assert operations.count("ResourceApplyAdam") == count
    differences = [relative_difference(a, b) for a, b in zip(found, expected, strict=True)]
    assert differences[0] < 2e-6 and differences[1] == 0
    assert max(differences) < 1.5e-5  # 1 - 0.999 in float32 is 1.3e-5 from 0.001, so the squares' mean is


@pytest.mark.slow
def test_other_optimizers_keep_their_updates():
    class Mine(keras.optimizers.Adam):
        pass

    for make in (Mine, lambda: keras.optimizers.Adam(amsgrad=True), keras.optimizers.Nadam, keras.optimizers.SGD):
        _, operations = trained_with(make, tf.distribute.get_strategy(), is_fused=True, steps=1)
        assert "ResourceApplyAdam" not in operations


def test_a_keras_without_the_method_is_refused():
    with pytest.raises(RuntimeError, match=r"has no Optimizer._all_reduce_sum_gradients, .*: install a tested version"):
        keras_hooks.skip_reduction(type("Optimizer", (), {})())


def test_layers_have_their_own_calls_again_when_the_last_scope_is_left():
    layer = keras.layers.Dense(2, kernel_initializer="ones", name="dense")
    rows = tf.ones([1, 3])
    own = layer(rows)
    layers = {"net/dense": layer}
    calls = keras_hooks.ReplacedCalls(layers, lambda path, layer, call: lambda rows: call(rows) * len(path))
    with calls:
        with calls:
            pass
        tf.debugging.assert_equal(layer(rows), 9 * own)
    tf.debugging.assert_equal(layer(rows), own)
    assert "call" not in vars(layer)
