"""Functions that TensorFlow traces without a warning; their operations, and counts against counts by hand."""

import pathlib
import re
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop import graph_functions
from distloop.graph_functions import (
    DRAWS_FROM_KERNEL,
    TimeLimit,
    count_flops,
    graph_clock,
    graph_function,
    outermost,
    peak_of,
    with_called,
)

PACKAGE = pathlib.Path(distloop.__file__).parent


@pytest.mark.parametrize(("make", "is_warned_of"), [(tf.function, True), (graph_function, False)])
def test_tensorflow_does_not_warn_of_a_function_that_many_trainers_trace(make, is_warned_of, monkeypatch):
    warnings = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda text, *_: warnings.append(text))
    one = tf.constant(1)
    code = "lambda: one + 1"  # in each case code of its own, of which TensorFlow counts the traces
    make_one = eval(f"lambda: {code}", {"one": one})
    assert [int(make(make_one())()) for _ in range(6)] == [2] * 6
    assert ("retracing" in "".join(warnings)) == is_warned_of


def test_no_module_makes_another_tensorflow_function():
    calls = re.compile(r"^[^`#\n]*(?:(?<!`)tf\.function\(|@tf\.function\b)", re.M)
    made = [path.name for path in sorted(PACKAGE.rglob("*.py")) if calls.search(without_docstrings(path.read_text()))]
    assert made == ["graph_functions.py"]


def without_docstrings(source):
    return re.sub(r'""".*?"""', "", source, flags=re.S)


@pytest.mark.parametrize(("passed_secs", "is_ahead"), [(0.5, True), (1.5, False), (-3600.0, False), (3600.0, False)])
def test_a_time_limit_is_over_when_its_time_is_or_the_clock_was_set(passed_secs, is_ahead, monkeypatch):
    times = iter([1.7e9, 1.7e9 + passed_secs])
    monkeypatch.setattr(tf, "timestamp", lambda: tf.constant(next(times), tf.float64))
    assert bool(TimeLimit(tf.constant(1.0, tf.float64)).is_ahead()) == is_ahead


@pytest.mark.parametrize("secs", [0.0, -100.0])
def test_a_time_limit_of_nothing_is_over_at_once_and_one_without_end_never(secs):
    assert not TimeLimit(tf.constant(secs, tf.float64)).is_ahead()
    assert TimeLimit(tf.constant(np.inf, tf.float64)).is_ahead()


def test_times_in_a_graph_are_those_of_the_monotonic_clock():
    began_at, clock = time.monotonic(), graph_clock()
    times = [tf.timestamp().numpy() for _ in range(3)]
    found = clock(times)
    assert np.allclose(np.diff(found), np.diff(times), atol=1e-5)
    assert began_at <= found[0] and found[-1] <= time.monotonic()


def test_times_in_a_graph_are_exact_though_the_process_is_suspended(monkeypatch):
    clock = graph_clock()
    times = [time.time() + 0.001 * i for i in range(3)]
    suspended = [0.2]

    def read_slowly():
        if suspended:
            time.sleep(suspended.pop())
        return time.time()

    monkeypatch.setattr(graph_functions, "time", types.SimpleNamespace(time=read_slowly, monotonic=time.monotonic))
    time.sleep(0.01)
    assert np.allclose(np.diff(clock(times)), 0.001, atol=1e-5)


@pytest.mark.parametrize("change_secs", [-3600.0, 3600.0])
def test_times_in_a_graph_stay_in_order_where_the_clock_is_set(change_secs):
    began_at, clock = time.monotonic(), graph_clock()
    now = time.time()
    found = clock([now, now + 0.1, now + 0.2 + change_secs, now + 0.3 + change_secs])
    assert (np.diff(found) >= 0).all() and began_at <= found[0] and found[-1] <= time.monotonic()


def test_operations_of_called_functions_and_of_branches_are_seen():
    inner = tf.function(lambda x: tf.cond(x > 0, lambda: x + tf.random.normal([]), lambda: x))
    graph = tf.function(lambda x: inner(x) * 2).get_concrete_function(tf.TensorSpec([])).graph
    assert not [op for op in graph.get_operations() if DRAWS_FROM_KERNEL.fullmatch(op.type)]
    assert [op.type for op in with_called(graph.get_operations()) if DRAWS_FROM_KERNEL.fullmatch(op.type)]


def test_a_captured_tensor_leads_out_to_the_variables_handle():
    variable = tf.Variable(1.0)
    handles = []

    @tf.function
    def outer():
        @tf.function
        def inner():
            result = variable + 1.0
            graph = tf.compat.v1.get_default_graph()
            handles.extend(op.inputs[0] for op in graph.get_operations() if op.type == "ReadVariableOp")
            return result

        return inner()

    outer()
    assert outermost(handles[0]) is variable.handle


def counted(fn, *shapes):
    specs = [tf.TensorSpec(shape) for shape in shapes]
    return count_flops(tf.function(fn, autograph=False).get_concrete_function(*specs).graph)


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (keras.layers.Dense(5), (4, 3), 2 * 4 * 3 * 5),
        (keras.layers.Dense(5), (4, 7, 3), 2 * 4 * 7 * 3 * 5),
        (keras.layers.Conv2D(5, 3, padding="same"), (4, 8, 6, 2), 2 * (4 * 8 * 6 * 5) * (3 * 3 * 2)),
        (keras.layers.Conv2D(6, 3, strides=2, groups=2), (4, 9, 9, 4), 2 * (4 * 4 * 4 * 6) * (3 * 3 * 2)),
        (keras.layers.DepthwiseConv2D(3, padding="same"), (4, 8, 6, 2), 2 * (4 * 8 * 6 * 2) * 9),
        (keras.layers.Conv2DTranspose(5, 3, strides=2), (4, 8, 6, 2), 2 * (4 * 8 * 6 * 2) * (3 * 3 * 5)),
        (keras.layers.Conv3D(5, 3, padding="same"), (1, 4, 4, 4, 2), 2 * (64 * 5) * (27 * 2)),
        (keras.layers.LayerNormalization(), (4, 3), 0),
    ],
)
def test_layers_are_counted(layer, shape, expected):
    layer.build(shape)
    assert counted(layer, shape) == expected


def test_attention_is_counted():
    layer = keras.layers.MultiHeadAttention(num_heads=2, key_dim=4, flash_attention=False)
    layer.build((3, 5, 8), (3, 5, 8))
    projections = 4 * 2 * (3 * 5) * 8 * (2 * 4)  # query, key, value, output
    scores_and_mixing = 2 * 2 * 3 * 2 * (5 * 5) * 4
    assert counted(lambda x: layer(x, x), (3, 5, 8)) == projections + scores_and_mixing


def test_each_call_of_a_function_counts():
    square = tf.function(lambda x: x @ x)
    assert counted(lambda x: square(square(x)), (3, 3)) == 2 * 2 * 27


@pytest.mark.slow
def test_functions_without_a_graph_are_not_counted():
    assert counted(lambda output: keras.losses.ctc(tf.ones([4, 2]), output), (4, 5, 3)) is None


def test_unknown_shapes_and_loops_are_not_counted():
    assert counted(lambda x, w: x @ w, (None, 3), (3, 5)) is None
    loop = lambda body: lambda x: tf.while_loop(lambda i, _: i < 3, body, [0, x])  # noqa: E731
    assert counted(loop(lambda i, x: (i + 1, x @ x)), (3, 3)) is None
    assert counted(loop(lambda i, x: (i + 1, x + x)), (3, 3)) == 0
    assert counted(lambda x: tf.cond(x[0, 0] > 0, lambda: x @ x, lambda: x), (3, 3)) is None


@pytest.mark.parametrize(
    ("device", "is_half", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", True, 312e12),
        ("NVIDIA H100 PCIe", False, 378e12),
        ("NVIDIA H100 80GB HBM3", True, 989e12),
        ("Tesla T4", False, 8.1e12),
        ("NVIDIA L40S", True, 362e12),
        ("NVIDIA L4", True, 121e12),
        ("GeForce 256", True, None),
    ],
)
def test_peaks_of_known_devices(device, is_half, expected):
    assert peak_of(device, is_half) == expected


def test_a_trace_is_called_for_its_kind_of_iterator_and_layout():
    traced = []

    def total(iterator, layout, factor):
        traced.append(layout)
        return factor * sum(tf.nest.flatten(tf.nest.map_structure(tf.reduce_sum, next(iterator))))

    call = graph_functions.called_by_kind(graph_functions.compiled(total), eager=False)
    pair, named = (tf.ones([3]), tf.ones([3])), {"a": tf.ones([3]), "b": tf.zeros([3])}
    for data, layout, expected in [(pair, 1, 12), (named, 1, 6), (pair, 2, 12), (pair, 1, 12), (named, 1, 6)]:
        iterator = iter(tf.data.Dataset.from_tensors(data))
        assert call(iterator, layout, tf.constant(2.0)).numpy() == expected
    assert traced == [1, 1, 2]
    tf.config.run_functions_eagerly(True)
    try:
        call(iter(tf.data.Dataset.from_tensors(pair)), 1, tf.constant(2.0))
    finally:
        tf.config.run_functions_eagerly(False)
    assert len(traced) == 4
