import pytest
import tensorflow as tf

from distloop import errors


def test_a_condition_that_holds_costs_nothing_and_is_returned():
    assert bool(errors.require(tf.constant(True), "never seen"))


def test_a_condition_that_does_not_hold_fails_with_the_sentence():
    with pytest.raises(tf.errors.InvalidArgumentError, match="rows were given; keep the batch"):
        errors.require(tf.constant(False), "rows were given; keep the batch")
