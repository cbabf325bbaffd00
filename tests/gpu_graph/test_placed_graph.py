"""What a graph would do on GPUs: planted faults are found with their lines, and a clean step is clean."""

import functools
import inspect
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state

import distloop
from distloop.distributed import strategies
from distloop.graph_functions import graph_function
from tests.gpu_graph.gpu_graph import look
from tests.gpu_graph.pretended_gpus import trace_on_gpus
from tests.problems import classification, classifier

SPEC = tf.TensorSpec([4, 8])
NUMBERS = tf.data.Dataset.from_tensors(tf.ones([])).repeat()
WEIGHT = tf.Variable(tf.ones([8, 8]))


def found_in(fn, *specs):
    return look(graph_function(fn).get_concrete_function(*(specs or (SPEC,))).graph, "planted")


def step_of(body, dataset=None, device="/GPU:0"):
    """What is found in the step of a loop; `body(rows, carried)` returns what it hands to the next step."""
    dataset = tf.data.Dataset.from_tensors(tf.ones([4, 8])).repeat() if dataset is None else dataset

    def one(i, carried, *, iterator):
        with tf.device("/CPU:0"):
            rows = next(iterator)
        return i + 1, body(rows, carried)

    def run(iterator, count):
        with tf.device(device):
            last, one_of = tf.identity(count), functools.partial(one, iterator=iterator)
            return tf.while_loop(lambda i, _: i < last, one_of, (tf.constant(0), tf.zeros([])))

    return found_in(run, tf.data.IteratorSpec(dataset.element_spec), tf.TensorSpec([], tf.int32))


def lines_after(function, count):
    return f"{__file__.rpartition('/')[2]}:{inspect.getsourcelines(function)[1] + count}"


def test_operations_on_texts_and_python_in_a_graph_run_on_the_host():
    def fn(x):
        texts = tf.strings.as_string(x)
        return tf.cast(tf.strings.length(texts), tf.float32) @ WEIGHT

    found = found_in(fn)
    assert [(f.operation, f.reason, f.line) for f in found.on_host] == [
        ("AsString(float32)", "it has no GPU kernel", lines_after(fn, 1)),
        ("StringLength(string)", "it has no GPU kernel", lines_after(fn, 2)),
    ]
    assert f"runs on the host: AsString(float32), it has no GPU kernel ({lines_after(fn, 1)})" in str(found)
    for call, name in ((tf.py_function, "EagerPyFunc(float32)"), (tf.numpy_function, "PyFunc(float32)")):
        (of_python,) = found_in(lambda x: call(lambda x: x, [x], tf.float32)).on_host  # noqa: B023
        assert (of_python.operation, of_python.reason) == (name, "it runs Python")


def test_float64_without_a_kernel_is_found_and_float32_is_clean():
    def fn(x):
        logits = x @ tf.cast(WEIGHT, x.dtype)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.zeros([4], tf.int64), logits)

    assert not found_in(fn).on_host
    (found,) = found_in(fn, tf.TensorSpec([4, 8], tf.float64)).on_host
    assert found.operation == "SparseSoftmaxCrossEntropyWithLogits(float64, int64)"


def test_a_tensor_that_goes_to_the_host_and_back_is_found_with_its_line():
    def fn(x):
        hidden = x @ WEIGHT
        with tf.device("/CPU:0"):
            hidden = tf.sort(hidden)
        return tf.reduce_sum(hidden @ WEIGHT)

    down, up = found_in(fn).through
    assert (down.source, down.target, down.producer, down.bytes) == ("GPU:0", "host", "MatMul", 4 * 8 * 4)
    assert (up.source, up.target, up.consumer, up.bytes) == ("host", "GPU:0", "MatMul", 4 * 8 * 4)
    assert down.line == up.line == lines_after(fn, 3)


def test_a_comparison_of_int32_goes_to_the_host_and_of_int64_does_not():
    def producers(dtype):
        found = found_in(lambda x: tf.where(tf.cast(x * 2, dtype) < 3, x, 0.0))
        return {copy.producer for copy in found.through}

    assert producers(tf.int32) == {"Cast", "Less"}
    assert not producers(tf.int64)


def test_functions_branches_and_loops_are_followed():
    @tf.function(autograph=False)
    def inner(x):
        with tf.device("/CPU:0"):
            return tf.sort(x)

    def fn(x):
        x = tf.cond(tf.reduce_sum(x) > 0, lambda: inner(x @ WEIGHT) @ WEIGHT, lambda: x)
        return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, inner(x) @ WEIGHT), (0, x))

    found = found_in(fn)
    assert {copy.line for copy in found.through if copy.bytes == 4 * 8 * 4} == {lines_after(inner.python_function, 3)}
    assert any(copy.producer == "Greater" and copy.bytes == 1 for copy in found.through)  # the condition of tf.cond


def test_in_a_loop_on_the_host_an_operation_without_a_device_is_there():
    found = step_of(lambda rows, carried: carried + tf.reduce_sum(rows @ WEIGHT), device="/CPU:0")
    assert found.operations["host"] > 4 and found.operations["GPU:0"] == 1  # it reads the variable
    (wait,) = step_of(clean, device="/CPU:0").waits
    assert (wait.what, wait.numbers) == ("the loop, whose variables are not on GPU:0,", ("4 side effects",))


def clean(rows, carried):
    with tf.device("/GPU:0"):
        WEIGHT.assign_add(WEIGHT @ WEIGHT)
        return carried + tf.reduce_sum(WEIGHT)


def test_a_clean_step_is_clean():
    found = step_of(clean)
    assert not (found.on_host or found.copies or found.waits)
    assert found.operations["GPU:0"] > 4 and "planted: " in str(found)


def test_rows_that_the_step_itself_reads_are_late():
    def body(rows, carried):
        with tf.device("/GPU:0"):
            return carried + tf.reduce_sum(rows @ WEIGHT)

    (copy,) = step_of(body).copies
    assert (copy.path, copy.is_late, copy.bytes) == ("into", True, 4 * 8 * 4)


@pytest.mark.parametrize("is_read_first", [True, False])
def test_rows_that_a_variable_keeps_are_late_where_the_step_reads_it_after(is_read_first):
    kept = tf.Variable(tf.ones([4, 8]))
    kept.handle._distloop_device = "/device:GPU:0"

    def body(rows, carried):
        with tf.device("/GPU:0"):
            if is_read_first:
                before = kept.read_value()
            kept.assign(rows)
            return carried + tf.reduce_sum((before if is_read_first else kept.read_value()) @ WEIGHT)

    assert [copy.is_late for copy in step_of(body).copies if copy.bytes] == [not is_read_first]


def test_rows_that_go_to_the_next_step_are_not_late():
    def body(rows, carried):
        with tf.device("/GPU:0"):
            WEIGHT.assign_add(WEIGHT * carried)
            return tf.identity(rows)

    (copy,) = step_of(body, NUMBERS).copies
    assert (copy.path, copy.is_late) == ("into", False)


def test_an_effect_on_the_host_that_needs_a_number_holds_back_the_next():
    with tf.device("/CPU:0"):
        counter = tf.Variable(0.0)
    counter.handle._distloop_device = "/device:CPU:0"

    def body(rows, carried):
        result = clean(rows, carried)
        counter.assign_add(result)
        return result

    (wait,) = step_of(body).waits
    assert (wait.what, wait.numbers, wait.line) == ("AssignAddVariableOp", ("AddV2",), lines_after(body, 2))


@pytest.mark.parametrize(("age", "count"), [(1, 1), (2, 0)])
def test_a_condition_may_look_at_the_step_before_the_last(age, count):
    def run(iterator):
        def body(older, newer):
            with tf.device("/CPU:0"):
                next(iterator)
            with tf.device("/GPU:0"):
                WEIGHT.assign_add(WEIGHT @ WEIGHT)
                return newer, tf.reduce_sum(WEIGHT)

        with tf.device("/GPU:0"):
            start = (tf.constant(0.0), tf.constant(0.0))
            return tf.while_loop(lambda older, newer: (older if age == 2 else newer) < 9, body, start)

    waits = found_in(run, tf.data.IteratorSpec(NUMBERS.element_spec)).waits
    assert [(wait.what, wait.numbers) for wait in waits] == [("the condition of the loop", ("Sum",))] * count


def test_pretending_changes_nothing_for_what_comes_after():
    def state():
        num_strategies = strategies._make_mirrored.__wrapped__.cache_info().currsize
        return random.getstate(), str(np.random.get_state()), num_strategies

    keras.utils.set_random_seed(3)
    before = state()
    keras.layers.Dense(1)
    names = dict(global_state.get_global_attribute("object_name_uids"))
    expected = tf.random.uniform([3], seed=None).numpy()
    keras.utils.set_random_seed(3)
    config = distloop.Config(batch_size=16)
    graphs = trace_on_gpus(classifier(dropout=0.1), config, distloop.make_dataset(classification(64), 16), 2)
    assert [found.name for found in graphs] == ["train step", "evaluation", "prediction"]
    assert all(found.operations["GPU:0"] and found.operations["GPU:1"] for found in graphs)
    assert before == state()
    assert dict(global_state.get_global_attribute("object_name_uids")) == names
    assert tf.random.uniform([3], seed=None).numpy().tolist() == expected.tolist()
    assert not tf.config.list_logical_devices("GPU") and "GPU" not in tf.Variable(0.0).device
