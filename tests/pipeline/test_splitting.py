"""Splitting of a network into stages: where it is cut, and what is refused."""

import keras
import numpy as np
import pytest

import distloop
from distloop.pipeline import splitting
from tests.pipeline.test_pipeline import functional
from tests.problems import refused


@pytest.mark.parametrize(
    "costs, num_stages, ends",
    [
        ([1.0, 1.0, 2.0], 1, [3]),
        ([1.0, 1.0, 2.0], 2, [2, 3]),
        ([4.0, 1.0, 1.0, 1.0], 2, [1, 4]),
        ([1.0, 1.0, 1.0], 3, [1, 2, 3]),
    ],
)
def test_the_largest_cost_of_a_stage_is_as_small_as_possible(costs, num_stages, ends):
    assert splitting.balance(np.array(costs), num_stages, "the network") == ends


def names_of(network):
    return [[layer.name for layer in part.layers if layer.variables] for (part,) in network.modules]


def test_a_network_is_cut_where_the_costliest_stage_costs_least():
    layers = [keras.layers.Dense(size, name=f"of_{i}") for i, size in enumerate([8, 8, 8, 64, 64, 8])]
    network = distloop.split(keras.Sequential([keras.Input((8,)), *layers]), 2)
    assert names_of(network) == [["of_0", "of_1", "of_2", "of_3"], ["of_4", "of_5"]]


def test_a_skip_connection_stays_within_a_stage():
    network = distloop.split(functional(), 3)
    assert names_of(network) == [["inner_0", "outer_0"], ["inner_1", "outer_1"], ["logits"]]


def test_layers_that_cannot_be_cut_apart_are_named():
    words = "num_stages=6 was given", "'inner_1' and 'add_0' cross a cut", "give num_stages=3"
    refused(lambda: distloop.split(functional(), 6), *words)
    inputs, twice = keras.Input((8,)), keras.layers.Dense(8, name="twice")
    model = keras.Model(inputs, twice(keras.layers.Dense(8)(twice(inputs))))
    refused(lambda: distloop.split(model, 2), "'twice' is called before and after")
