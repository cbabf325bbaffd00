"""Errors of a failed operation, as one sentence for users."""

import numpy as np
import pytest
import tensorflow as tf

from distloop import errors
from distloop.data.source import Source
from tests.problems import batch_taker, mirrored


def test_a_condition_that_holds_costs_nothing_and_is_returned():
    assert bool(errors.require(tf.constant(True), "never seen"))


def test_a_condition_that_does_not_hold_fails_with_the_sentence():
    with pytest.raises(tf.errors.InvalidArgumentError, match="rows were given; keep the batch"):
        errors.require(tf.constant(False), "rows were given; keep the batch")


def explained(dataset, strategy=None, batches=9):
    """Returns what `explain` says of the error that reading the data raises."""
    source = Source(dataset, strategy or tf.distribute.get_strategy(), repeat=False)
    take = batch_taker(source, source.iterator())
    with pytest.raises(tf.errors.OpError) as caught:
        for _ in range(batches):
            take()
    return errors.as_user_error(caught.value)


def generated(batches, **specs):
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=specs)


X = tf.TensorSpec([None, 2])


@pytest.mark.parametrize(
    ("second", "mark"),
    [
        ({"y": np.zeros([3, 2])}, "structure"),
        ({"x": np.array([["a", "b"]])}, "expected type"),
        ({"x": np.zeros([3])}, "element of shape"),
        ({"x": np.zeros([3, 5])}, "element of shape"),
    ],
    ids=["structure", "dtype", "rank", "axis"],
)
def test_a_generator_that_changes_its_batches_is_explained(second, mark):
    error = explained(generated([{"x": np.zeros([3, 2])}, second], x=X))
    assert isinstance(error, ValueError)
    assert str(error).startswith("A batch differs from those before it: ")
    assert mark in str(error)
    assert str(error).endswith("correct the generator or its output_signature.")


def test_entries_that_differ_in_their_number_of_rows_are_explained():
    dataset = generated([{"x": np.zeros([3, 2]), "y": np.zeros([4, 2])}], x=X, y=X)
    error = explained(dataset, mirrored(2), batches=1)
    assert "A batch's entries differ in their number of rows" in str(error)
    assert "\n" not in str(error)


def test_the_end_of_all_data_is_explained_as_empty():
    assert str(explained(generated([], x=X))).startswith("The dataset given is empty")


def test_an_error_of_another_kind_is_left_alone():
    assert errors.as_user_error(tf.errors.InvalidArgumentError(None, None, "Matrix size-incompatible")) is None
    assert errors.as_user_error(tf.errors.InternalError(None, None, None)) is None
