"""One train step, compiled by XLA or eager: the same numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.problems import (
    assert_close,
    assert_equal,
    batches,
    classification,
    classifier,
    everything,
    mostly_wide,
    on,
    weights,
)


def train(replicas, model_fn, **settings):
    trainer = distloop.Trainer(model_fn, on(replicas, **settings))
    return trainer, trainer.fit(batches(), steps=8)


# XLA adds up in another order and precision than TensorFlow's kernels do. A bias's gradient is a sum over 16 rows, and
# a sum in half precision may round at each of them: by 2^-11 of its size in float16, by 2^-9 in bfloat16.
@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas, microbatches, precision, tolerance",
    mostly_wide([(1, 1, "float32", 1e-6), (2, 2, "mixed_float16", 16 * 2**-11), (1, 1, "mixed_bfloat16", 16 * 2**-9)]),
)
def test_a_compiled_step_trains_to_the_same_weights(precision, tolerance, replicas, microbatches):
    settings = dict(precision=precision, microbatches=microbatches, clip_norm=0.5)
    model_fn = classifier(optimizer=lambda: keras.optimizers.SGD(0.1), is_weighted=True, l2=0.1, batch_norm="local")
    compiled, plain = (train(replicas, model_fn, jit_compile=by_xla, **settings)[0] for by_xla in (True, False))
    assert_close(weights(compiled), weights(plain), tolerance)
    assert runs_xla(compiled) and not runs_xla(plain)


def runs_xla(trainer):
    """Returns whether XLA compiles any part of the compiled loop."""
    source = trainer._train_source
    run = trainer._train_loop._compiled._run
    limits = [tf.constant(1, tf.int64)] * 2 + [tf.constant(np.inf, tf.float64)]
    graph = run.get_concrete_function(source.iterator(), source.layout, *limits).graph
    return any("_XlaMustCompile" in node.attr for f in graph.as_graph_def().library.function for node in f.node_def)


@pytest.mark.wide
@pytest.mark.slow
def test_a_compiled_step_draws_and_measures():
    trainer, found = train(1, classifier(dropout=0.5, metrics=True), jit_compile=True)
    assert 0 < found["auc"] < 1
    assert all(np.isfinite(value).all() for value in everything(trainer).values())
    seeds = [path for path in weights(trainer) if "seeds" in path]
    first = weights(distloop.Trainer(classifier(dropout=0.5, metrics=True), on(1)))
    assert seeds and all(not np.array_equal(weights(trainer)[path], first[path]) for path in seeds)


@pytest.mark.slow
def test_a_compiled_step_that_overflows_changes_nothing():
    rows = classification(16)
    rows["x"][13, 0] = np.inf
    data = distloop.make_dataset(rows, 8)
    trainer = distloop.Trainer(classifier(batch_norm="local"), on(2, jit_compile=True, on_nonfinite="skip"))
    trainer.fit(data, steps=1)
    before = everything(trainer)
    trainer.fit(data, steps=2)
    after = everything(trainer)
    assert_equal(after, before | {path: after[path] for path in after if path.startswith(("step", "skipped_steps"))})
    assert int(trainer.state.skipped_steps) == 1


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas, microbatches, batch_norm", mostly_wide([(1, 3, "local"), (2, 1, "synchronized")], (2, 1, "synchronized"))
)
def test_an_eager_step_trains_to_the_same_numbers(replicas, microbatches, batch_norm):
    settings = dict(microbatches=microbatches, average_decay=0.9, clip_norm=0.1, on_nonfinite="skip", log_every=2)
    optimizer = lambda: keras.optimizers.SGD(0.1, momentum=0.9)  # noqa: E731 - Adam would magnify roundings
    terms = dict(dropout=0.2, batch_norm=batch_norm, metrics=True, l2=0.01, is_weighted=True)
    model_fn, results = classifier(optimizer=optimizer, **terms), []
    for eager in (True, False):
        trainer = distloop.Trainer(model_fn, on(replicas, eager=eager, **settings))
        reported = trainer.fit(batches(), steps=7, evals={"test": batches()})
        numbers = {name: np.array(reported[name]) for name in ("loss", "auc", "test/loss", "test/auc", "gradient_norm")}
        results.append(everything(trainer) | numbers | {"predicted": trainer.predict(batches())})
    assert_close(*results)


@pytest.mark.slow
def test_an_eager_step_passes_tensors_with_values():
    seen = []

    def model_fn():
        spec = classifier()()

        def loss_fn(batch, training):
            seen.append((training, float(tf.reduce_sum(batch["x"]))))
            return spec.loss_fn(batch, training)

        return distloop.ModelSpec(spec.model, spec.optimizer, loss_fn)

    rows = classification(6)
    data = distloop.make_dataset(rows, 6)
    trainer = distloop.Trainer(model_fn, on(2, eager=True, limit_eval_batches=1))
    trainer.fit(data, steps=2, evals={"test": data.repeat()})
    halves = [float(tf.reduce_sum(rows["x"][part])) for part in (slice(0, 3), slice(3, 6))]
    assert seen == [(training, half) for training in (True, True, False) for half in halves]


@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas, settings", mostly_wide([(1, {}), (2, {"microbatches": 2, "precision": "mixed_float16"})])
)
def test_where_no_row_of_a_batch_has_a_weight_its_regularizers_alone_count(replicas, settings):
    rows = {**classification(6), "weight": np.zeros(6, np.float32)}
    model_fn = classifier(optimizer=lambda: keras.optimizers.SGD(0.5), is_weighted=True, l2=0.1)
    trainer = distloop.Trainer(model_fn, on(replicas, **settings))
    expected = weights(trainer)
    decay = 2 * 0.1 * expected["net/hidden/kernel"]  # the gradient of 0.1 * kernel^2
    expected["net/hidden/kernel"] -= 0.5 * decay
    numbers = trainer.fit(distloop.make_dataset(rows, 6), steps=1)
    assert np.isnan(numbers["loss"]) and numbers["gradient_norm"] == pytest.approx(np.linalg.norm(decay), rel=1e-5)
    assert_close(weights(trainer), expected)
