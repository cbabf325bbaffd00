"""What `fit` does in place of training, chosen by the settings."""

import inspect
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.opening import WorkerContext
from distloop.diagnostics import tryouts
from distloop.diagnostics.tuning import BatchTrial
from distloop.keras_models.fit_arguments import read_arguments
from tests.problems import classification, classifier, on

X, Y = (classification(16)[name] for name in ("x", "label"))


def run(monkeypatch, **settings):
    """Returns what was called, and the code with which the process ended."""
    calls = []
    monkeypatch.setattr(tryouts.tuning, "autotune_batch", lambda trainer, data: calls.append("autotune_batch"))
    monkeypatch.setattr(tryouts.memory_estimate, "print_and_exit", lambda trainer, data: calls.append("memory"))
    monkeypatch.setattr(tryouts.audit, "print_and_exit", lambda result: calls.append(result))
    trainer = types.SimpleNamespace(
        config=distloop.Config(**settings), audit=lambda data: "audit", state=types.SimpleNamespace(strategy=None)
    )
    tryouts.run_instead(trainer, read_arguments((), None, {}))
    return calls


def test_nothing_is_done_unless_a_setting_asks_for_it(monkeypatch):
    assert run(monkeypatch) == []


@pytest.mark.parametrize("name", ["audit", "memory"])
def test_a_setting_chooses_what_is_done(monkeypatch, name):
    assert run(monkeypatch, **{name: True}) == [name]


def test_a_search_for_a_batch_size_ends_the_process_with_code_0(monkeypatch):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, autotune_batch=True)
    assert ended.value.code == 0


def weighted():
    """A model that is not built yet, for batches `(x, y, sample_weight)`."""
    model = keras.Sequential([keras.layers.Dense(4)])

    def loss_fn(batch, training):
        x, y, weight = batch
        logits = model(x, training=training)
        loss = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return {"loss": distloop.weighted(loss, weight)}

    return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)


def test_the_search_begins_with_the_batch_size_of_fit(monkeypatch):
    sizes = []

    def measure(meter, batch_size):
        sizes.append(batch_size)
        return BatchTrial(batch_size, 100.0 * batch_size, 1.0)

    monkeypatch.setattr(tryouts.tuning._Meter, "__call__", measure)
    trainer = distloop.Trainer(classifier(), on(1, autotune_batch=True, console="quiet"))
    with pytest.raises(SystemExit):
        trainer.fit(classification(16), batch_size=4, steps=1)
    assert sizes == [4, 8]


@pytest.mark.parametrize("name", ["audit", "memory", "autotune_batch"])
def test_batches_have_the_class_weights_of_fit(monkeypatch, name):
    monkeypatch.setattr(tryouts.tuning, "_MEASURED_SECS", 0.01)
    trainer = distloop.Trainer(weighted, on(1, console="quiet", **{name: True}))
    with pytest.raises(SystemExit) as ended:
        trainer.fit((X, Y), batch_size=8, class_weight={0: 2.0}, steps=1)
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("make", "signature"),
    [
        (lambda batches: lambda: batches, "()"),
        (lambda batches: lambda context: batches.shard(context.num_input_pipelines, 0), "(context)"),
        (lambda batches: (batch for batch in batches), "()"),
    ],
)
def test_data_of_any_kind_gets_class_weights(make, signature):
    data = make(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8))
    mapped = tryouts._as_trained_on(read_arguments(data, None, {"class_weight": {1: 3.0}}), 64, 0)
    assert str(inspect.signature(mapped.train)) == signature and mapped.map_batch is None
    arguments = [WorkerContext(1, 0)] if signature == "(context)" else []
    x, y, weights = next(iter(mapped.train(*arguments)))
    assert x.shape == (8, 8)
    np.testing.assert_array_equal(weights, np.where(Y[:8] == 1, 3, 1))
