"""Lazy optimizers: the rows of a sparse gradient move as in Keras, and no other row does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.tables.test_row_updates import NUMBERS, SHAPE, start, train

LAZY = {
    "LazySGD": (distloop.LazySGD, dict(momentum=0.9)),
    "LazySGD, nesterov": (distloop.LazySGD, dict(momentum=0.9, nesterov=True, weight_decay=0.1)),
    "LazySGD, plain": (distloop.LazySGD, dict()),
    "LazyAdam": (distloop.LazyAdam, dict()),
    "LazyAdam, amsgrad": (distloop.LazyAdam, dict(amsgrad=True)),
    "LazyAdamW": (distloop.LazyAdamW, dict(weight_decay=0.1)),
}


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_optimizer_changes_rows_as_its_parent_and_leaves_all_others(name):
    lazy, arguments = LAZY[name]
    parent = lazy.__mro__[-1 - len(keras.optimizers.Optimizer.__mro__)]
    first_lazy, *later = train(lazy(0.1, **arguments), is_sparse=True)
    first_dense = train(parent(0.1, **arguments), is_sparse=True, steps=1)[0]
    untouched = [row for row in range(6) if row not in NUMBERS[0]]
    before = [start(), *[np.zeros(SHAPE, np.float32)] * (len(first_lazy) - 1)]
    for after, dense, initial in zip(first_lazy, first_dense, before, strict=True):
        np.testing.assert_allclose(after[NUMBERS[0]], dense[NUMBERS[0]], rtol=1e-6)
        np.testing.assert_array_equal(after[untouched], initial[untouched])
    for after, initial in zip(later[-1], before, strict=True):
        np.testing.assert_array_equal(after[[0, 2, 3]], initial[[0, 2, 3]])  # in no step
        assert (after[[1, 4, 5]] != initial[[1, 4, 5]]).all()


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_optimizer_is_its_parent_for_dense_gradients(name):
    lazy, arguments = LAZY[name]
    parent = lazy.__mro__[-1 - len(keras.optimizers.Optimizer.__mro__)]
    copy = keras.optimizers.deserialize(keras.optimizers.serialize(lazy(0.1, **arguments)))
    assert type(copy) is lazy
    for one, other in zip(
        train(copy, is_sparse=False)[-1], train(parent(0.1, **arguments), is_sparse=False)[-1], strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_duplicates_count_once_and_rows_without_a_gradient_not_at_all():
    table = keras.Variable(start())
    optimizer = distloop.LazyAdam(0.1)
    optimizer.build([table])
    values = tf.constant([[1.0, 2.0], [0.0, 0.0], [1.0, 1.0]])
    optimizer.apply([tf.IndexedSlices(values, tf.constant([4, 2, 4]), tf.constant(SHAPE))], [table])
    momentum = np.zeros(SHAPE, np.float32)
    momentum[4] = [0.2, 0.3]
    np.testing.assert_allclose(optimizer._momentums[0], momentum, rtol=1e-6)
    assert (table.numpy()[[0, 1, 2, 3, 5]] == start()[[0, 1, 2, 3, 5]]).all()
