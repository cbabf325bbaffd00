"""The estimate of a step's memory: its parts, what fits, what to do; the bytes of tensors, counted by hand."""

import os
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.audit import bug_report, memory_estimate
from distloop.audit.memory_estimate import Peak, peak_of
from distloop.distributed import strategies
from distloop.reports import runs as report_runs
from distloop.workdir import ledger
from tests.problems import assert_equal, classification, classifier, everything, on

WIDTH, ROWS = 256, 64
N = 1000  # numbers of a vector: 4,000 bytes


def wide(layers=8):
    """A `model_fn` for a batch {"x": [B, WIDTH]}, whose layers keep an input each."""

    def model_fn():
        hidden = [keras.layers.Dense(WIDTH, activation="tanh", use_bias=False) for _ in range(layers)]
        model = keras.Sequential([keras.Input((WIDTH,)), *hidden])
        loss_fn = lambda batch, training: {"loss": tf.reduce_sum(model(batch["x"], training=training), 1)}  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.Adam(), loss_fn)

    return model_fn


def estimate(rows=ROWS, layers=8, **settings):
    trainer = distloop.Trainer(wide(layers), on(1, batch_size=rows, **settings))
    return distloop.estimate_memory(trainer, {"x": np.zeros([rows, WIDTH], np.float32)})


def available(monkeypatch, gigabytes):
    monkeypatch.setattr(memory_estimate, "available_gb", lambda: gigabytes)


@pytest.mark.slow
def test_weights_slots_averages_batch_activations_and_gradients_are_told():
    parts = estimate(average_decay=0.9).parts
    weights = 8 * WIDTH**2 * 4
    assert parts["weights"] == pytest.approx(weights, rel=0.01)
    assert parts["optimizer slots"] == pytest.approx(2 * weights, rel=0.01)
    assert parts["averages of weights"] == weights
    assert parts["batch"] == ROWS * WIDTH * 4
    assert parts["gradients"] >= 2 * weights  # more than the activations of so few rows


@pytest.mark.slow
def test_on_gpus_a_step_that_may_be_skipped_copies_what_it_changes(monkeypatch):
    monkeypatch.setattr(strategies, "has_gpus", lambda strategy: True)
    changed = ("weights", "optimizer slots", "averages of weights")
    parts = estimate(average_decay=0.9, on_nonfinite="skip").parts
    assert parts["copy to undo a step that is skipped"] == sum(parts[name] for name in changed)
    assert "copy to undo a step that is skipped" not in estimate(average_decay=0.9).parts
    assert parts["batch"] == 2 * ROWS * WIDTH * 4  # the next one arrives while a step computes


@pytest.mark.slow
def test_activations_grow_with_rows_and_enough_microbatches_are_named(monkeypatch):
    activation = 100 * ROWS * WIDTH * 4
    available(monkeypatch, 5 * activation / 1e9)
    whole = estimate(100 * ROWS)
    assert 8 * activation <= whole.parts["activations"] <= 9 * activation
    halves = estimate(100 * ROWS, microbatches=2)
    assert halves.parts["activations"] == pytest.approx(whole.parts["activations"] / 2, rel=0.01)
    assert not whole.fits and whole.enough_microbatches == 4
    assert "It does not fit: give --microbatches=4" in str(whole)
    available(monkeypatch, 0.0)
    assert "does not fit with any number of microbatches" in str(estimate(2, layers=2))


@pytest.mark.slow
def test_a_replica_holds_its_own_rows():
    trainer = distloop.Trainer(classifier(batch_norm="synchronized"), on(2, batch_size=9))
    before = everything(trainer)
    result = distloop.estimate_memory(trainer, classification(9))
    assert result.rows == 5
    assert_equal(everything(trainer), before)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_table_counts_apart_and_its_gradient_by_the_rows_of_the_batch(optimizer):
    def model_fn():
        table = keras.layers.Embedding(100_000, 8, name="items")
        model = keras.Sequential([keras.Input((2,), dtype="int32"), table, keras.layers.Dense(1)], name="net")
        loss_fn = lambda batch, training: {"loss": tf.reduce_sum(model(batch["x"], training=training), (1, 2))}  # noqa: E731
        return distloop.ModelSpec(model, getattr(keras.optimizers, optimizer)(), loss_fn)

    rows = {"x": np.zeros([64, 2], np.int32)}
    found = distloop.estimate_memory(distloop.Trainer(model_fn, on(2, batch_size=64)), rows)
    table, of_batch = 100_000 * 8 * 4, 64 * 2 * 8 * 4
    assert found.parts["embedding tables"] == table and found.tables == {"net/items": table}
    assert found.parts["activations"] < 4 * of_batch
    whole = table if optimizer == "Adam" else 0
    assert whole + of_batch <= found.parts["gradients"] < whole + 4 * of_batch


@pytest.mark.slow
def test_memory_prints_the_estimate_and_ends_before_training(monkeypatch, capsys, tmp_path):
    trainer = distloop.Trainer(classifier(), on(1, memory=True, workdir=str(tmp_path / "run")))
    with pytest.raises(SystemExit) as ended:
        trainer.fit(classification(8), batch_size=4, steps=1)
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and trainer.step == 0
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["memory.json"]  # for the report
    (planned,) = report_runs.load_all([str(tmp_path)])
    assert planned.status == "planned" and planned.memory["CPU:0"]["weights"] > 0
    assert "Estimated memory of each device, where a step of 4 rows needs most:" in printed
    assert "B  activations" in printed and "GB that are available" in printed
    available(monkeypatch, 0.0)
    with pytest.raises(SystemExit) as ended:
        trainer.fit(classification(8), batch_size=4, steps=1)
    assert ended.value.code == 1
    assert ledger.read_memory(planned.path) == planned.memory


def peak(fn, *shapes):
    specs = [tf.TensorSpec(shape) for shape in shapes or [[N]]]
    return peak_of(tf.function(fn, autograph=False).get_concrete_function(*specs).graph)


def test_a_tensor_takes_memory_until_its_last_use():
    assert peak(lambda x: tf.exp(x)) == Peak(4 * N)
    assert peak(lambda x: tf.exp(tf.exp(tf.exp(x)))) == Peak(2 * 4 * N)  # an input and an output

    def reshaped_and_of_no_use(x):
        tf.exp(x)
        return tf.reshape(tf.exp(x), [10, -1])

    assert peak(reshaped_and_of_no_use) == Peak(4 * N)
    twice = tf.function(lambda x: tf.exp(tf.exp(x)), autograph=False)
    assert peak(lambda x: tf.reduce_sum(twice(x))).total == 2 * 4 * N  # while a called function runs
    assert peak(lambda x: tf.boolean_mask(x, x > 0)).num_unknown > 0


def test_the_backward_pass_keeps_what_it_reads():
    weight = tf.Variable(1.0)

    def fn(x):
        with tf.GradientTape() as tape:
            y = x * weight
            for _ in range(3):
                y = tf.sin(y)  # whose gradient needs its input
            y = tf.reduce_sum(y)
        return tape.gradient(y, weight)

    most = peak(fn)
    assert 3 * 4 * N <= most.activations < 4 * 4 * N
    assert 4 * N <= most.gradients <= 3 * 4 * N


def test_activations_computed_again_in_the_backward_pass_are_no_gradients():
    def fn(x):
        with tf.name_scope("gradient_tape"):
            slope = tf.exp(x)
        for _ in range(2):  # the second scope is "recomputed_1"
            with tf.name_scope("recomputed"):
                slope = tf.concat([slope, slope], 0)
        return slope

    assert peak(fn) == Peak((2 + 4) * 4 * N)


def test_a_recurrent_layer_keeps_its_states_of_all_time_steps():
    layer = keras.layers.SimpleRNN(8, activation="tanh")
    layer.build((None, 50, 3))

    def fn(x):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(layer(x))
        return tape.gradient(y, [v.value for v in layer.trainable_variables])

    state = 50 * 16 * 8 * 4
    assert state < peak(fn, [16, 50, 3]).activations < 6 * state


def test_available_memory_is_positive_and_at_most_all():
    total_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    assert 0 < memory_estimate.available_gb() <= total_gb


@pytest.mark.parametrize(("printed", "expected"), [("81559\n40960\n", 40960 * 2**20 / 1e9), ("No devices\n", None)])
def test_the_memory_of_the_smallest_gpu_is_read_from_its_tool(monkeypatch, printed, expected):
    monkeypatch.setenv("PATH", "")
    assert memory_estimate.gpu_memory_gb() is None  # without the tool
    monkeypatch.setattr(bug_report.subprocess, "run", lambda *args, **kwargs: types.SimpleNamespace(stdout=printed))
    assert memory_estimate.gpu_memory_gb() == expected
