"""Slots in vectors: the bits of Keras's own update, for every optimizer whose update is by element."""

import contextlib
import itertools
import unittest.mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from distloop.model.saved_state import relative_difference
from distloop.optimizers import slot_store
from distloop.optimizers.gradients import Packing
from distloop.optimizers.slot_store import SlotStore, View
from distloop.variables import ComposedVariable, tensorflow_variable
from tests.problems import mirrored, mostly_wide

SHAPES = [(3, 5), (7,), (), (17, 3), (2,), (slot_store.MIN_FUSED_BYTES // 2, 1), (13,)]
DECAY = keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.5)
MAKE = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda: keras.optimizers.Adam(0.01, beta_1=0.8, beta_2=0.9),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(DECAY, weight_decay=0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "lion": lambda: keras.optimizers.Lion(0.01, weight_decay=0.01),
}
BESIDE = {
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "own": lambda: OwnAdam(0.01),
}


class OwnAdam(keras.optimizers.Adam):
    """A user's own class, whose update may look at a variable as a whole."""


def trained(make, strategy, dtype="float32", *, is_flat, is_packed=True, reached=None, factors=None):
    """Returns weights and slots on every replica after four steps, how many operations a step has, and the store."""
    rng = np.random.default_rng(0)
    with strategy.scope():
        variables = [keras.Variable(rng.normal(size=shape), dtype=dtype) for shape in SHAPES]
        optimizer = make()
        optimizer.exclude_from_weight_decay(variables[1:2])
        optimizer.build(variables)
        views = [View(v, v, factor) for v, factor in zip(variables, factors or [1.0] * len(SHAPES), strict=True)]
        with contextlib.nullcontext() if is_flat else unittest.mock.patch.object(View, "may_be_joined", False):
            store = SlotStore(optimizer, views)
        for slot in (v for v in optimizer.variables if len(v.shape)):
            slot.assign(rng.uniform(size=slot.shape))
    reached = reached or [True] * len(variables)
    packing = Packing(variables)

    def replica_fn(draws):
        cast = [tf.cast(draw, dtype) * is_reached for draw, is_reached in zip(draws, reached, strict=True)]
        segments, scale = packing.pack(cast), tf.constant(0.5)
        triples = zip(packing.unpack(segments, scale), variables, reached, strict=True)
        pairs = [(gradient, variable) for gradient, variable, is_reached in triples if is_reached]
        packed = (packing, segments, scale) if is_packed else ()
        optimizer.apply(*zip(*store.join(pairs, *packed), strict=True))

    step_fn = tf.function(lambda draws: strategy.run(replica_fn, args=(draws,)), autograph=False)
    for _ in range(4):
        draws = [tf.constant(rng.normal(size=shape), tf.float32) for shape in SHAPES]
        step_fn(draws)
    values = [copy.numpy() for v in (*variables, *optimizer.variables) for copy in copies(strategy, v)]
    return values, len(step_fn.get_concrete_function(draws).graph.get_operations()), store


def copies(strategy, variable):
    """Returns what each replica has of a variable."""
    plain = tensorflow_variable(variable)
    shards = plain.shards if isinstance(plain, ComposedVariable) else [plain]
    return [copy for shard in shards for copy in strategy.experimental_local_results(shard)]


def assert_same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


CASES = [(name, "float32") for name in MAKE] + [("adam", dtype) for dtype in ("float16", "bfloat16", "float64")]


KEPT = [(name, "float32") for name in ("momentum", "amsgrad", "adamw", "nadam", "lion")] + [("adam", "bfloat16")]


@pytest.mark.parametrize("name, dtype", mostly_wide(CASES, *KEPT))
def test_the_bits_are_those_of_keras(name, dtype):
    strategy = tf.distribute.get_strategy()
    expected, many, _ = trained(MAKE[name], strategy, dtype, is_flat=False)
    found, few, store = trained(MAKE[name], strategy, dtype, is_flat=True)
    assert_same_bits(found, expected)
    assert [tuple(v.shape) for v in store.stored].count((89,)) == (len(found) - len(SHAPES)) // len(SHAPES)
    assert few < 0.9 * many or name == "sgd"


ON_TWO = list(itertools.product(["sgd", "nesterov", "adamw", "nadam"], [True, False]))


@pytest.mark.parametrize("name, is_packed", mostly_wide(ON_TWO, ("sgd", True), ("adamw", True), ("nadam", False)))
def test_unreached_variables_and_own_learning_rates_on_two_replicas(name, is_packed):
    reached = [True, False, True, True, True, True, False]
    settings = {"reached": reached, "factors": [1.0, 1.0, 0.5, 1.0, 0.5, 1.0, 0.1]}
    expected, many, _ = trained(MAKE[name], mirrored(2), is_flat=False, **settings)
    found, few, _ = trained(MAKE[name], mirrored(2), is_flat=True, is_packed=is_packed, **settings)
    assert_same_bits(found, expected)
    assert_same_bits(found[::2], found[1::2])


@pytest.mark.parametrize("name", mostly_wide(BESIDE, "adagrad", "own"))
def test_other_optimizers_keep_a_slot_a_variable(name):
    values, _, store = trained(BESIDE[name], tf.distribute.get_strategy(), is_flat=True)
    assert len(store.stored) == len(values) - len(SHAPES)


def test_a_slot_is_a_variable_of_its_own_for_whoever_looks():
    _, _, store = trained(MAKE["adam"], mirrored(2), is_flat=True)
    optimizer = store.optimizer
    slot, other = [v for v in optimizer.variables if v.shape == (3, 5)]
    before = other.numpy()
    slot.assign(np.ones([3, 5]))
    slot.assign_add(np.ones([3, 5]))
    assert slot.numpy().tolist() == np.asarray(slot).tolist() == [[2.0] * 5] * 3
    assert [copy.numpy().tolist() for copy in slot.value.shards] == [[[2.0] * 5] * 3] * 2
    assert float(tf.reduce_sum(slot * 2.0)) == float(tf.reduce_sum(slot.value + slot)) == 60.0
    np.testing.assert_array_equal(other.numpy(), before)


def test_a_checkpoint_of_tensorflow_holds_slots_by_variable(tmp_path):
    _, _, store = trained(MAKE["adam"], tf.distribute.get_strategy(), is_flat=True)
    slots = [v for v in store.optimizer.variables if len(v.shape)]
    expected = [slot.numpy() for slot in slots]
    checkpoint = tf.train.Checkpoint(optimizer=store.optimizer)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    for slot in slots:
        slot.assign(tf.zeros_like(slot))
    checkpoint.read(path).assert_consumed()
    assert_same_bits([slot.numpy() for slot in slots], expected)


def moved_by(strategy, *, is_hooked, optimizer_class=keras.optimizers.SGD):
    """Returns how far weights on every replica move when each replica applies the gradient 1."""
    with strategy.scope():
        variable = keras.Variable(np.zeros([2], np.float32))
        optimizer = optimizer_class(1.0)
        optimizer.build([variable])
    if is_hooked:
        slot_store.skip_reduction(optimizer)

    def replica_fn():
        # Made here: TensorFlow does not add up a tensor that all replicas capture.
        gradient = tf.ones([2]) * tf.cast(tf.distribute.get_replica_context().num_replicas_in_sync > 0, tf.float32)
        optimizer.apply([gradient], [variable])

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


def trained_with(optimizer, strategy, *, is_fused, steps=30):
    """Returns the weights and slots of a large and a small variable on the last replica, and the graph's operations."""
    with strategy.scope():
        shapes = [[slot_store.MIN_FUSED_BYTES // 16, 4], [3]]
        variables = [keras.Variable(np.ones(shape, np.float32)) for shape in shapes]
        optimizer = optimizer()
        optimizer.build(variables)
        slot_store.skip_reduction(optimizer)
        if is_fused:
            SlotStore(optimizer, [View(v, v, 1.0) for v in variables])
    directions = [np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in shapes]

    def replica_fn():
        step = tf.cast(optimizer.iterations, tf.float32)
        optimizer.apply([direction * tf.cos(step) for direction in directions], variables)

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


@pytest.mark.parametrize("sizes", [[3], [3, 2], [slot_store.MIN_FUSED_BYTES // 4]], ids=["one", "joined", "fused"])
def test_an_update_reads_the_learning_rate_in_each_step(sizes):
    def moves(has_store):
        variables = [keras.Variable(np.ones(size, np.float32)) for size in sizes]
        optimizer = keras.optimizers.Adam(0.5)
        optimizer.build(variables)
        gradients_of = [(tf.ones(size), variable) for size, variable in zip(sizes, variables, strict=True)]
        store = SlotStore(optimizer, [View(v, v, 1.0) for v in variables]) if has_store else None

        @tf.function(autograph=False)
        def step_fn():
            pairs = gradients_of if store is None else store.join(gradients_of)
            optimizer.apply(*zip(*pairs, strict=True))

        for rate in (0.5, 0.25):
            optimizer.learning_rate = rate
            before = variables[0].numpy()
            step_fn()
            yield before[0] - variables[0].numpy()[0]

    found = list(moves(has_store=True))
    assert found == pytest.approx(list(moves(has_store=False)), rel=1e-5)
    assert found == pytest.approx([0.5, 0.25], rel=1e-4)


def test_a_keras_without_the_method_is_refused():
    with pytest.raises(RuntimeError, match=r"has no Optimizer._all_reduce_sum_gradients, .*: install a tested version"):
        slot_store.skip_reduction(type("Optimizer", (), {})())
