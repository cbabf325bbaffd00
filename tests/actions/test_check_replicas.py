"""The check that replicas hold the same bits."""

import keras
import pytest
import tensorflow as tf

import distloop
from distloop.actions.check_replicas import checksum
from distloop.distributed import workers
from tests.problems import classification, classifier, on

DATA = distloop.make_dataset(classification(16), 8)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int64", "bool"])
def test_a_checksum_changes_with_one_element(dtype):
    variable = tf.Variable(tf.cast([[0, 1], [1, 0]], dtype))
    before = int(checksum(variable))
    assert int(checksum(tf.Variable(variable))) == before
    variable.assign(tf.cast([[0, 1], [1, 1]], dtype))
    assert int(checksum(variable)) != before


@pytest.mark.slow
def test_a_variable_that_differs_between_replicas_ends_the_run_before_it_is_saved(tmp_path):
    def change(report):
        if report.step == 3:
            kernel = report.state.model.get_layer("logits").kernel.value
            report.state.strategy.experimental_local_results(kernel)[1].assign_add(tf.ones(kernel.shape))

    change.every = 3
    config = on(2, check_replicas_every=2, workdir=str(tmp_path), checkpoint_every=2, average_decay=0.9)
    trainer = distloop.Trainer(classifier(dropout=0.5, batch_norm="local"), config)
    message = "At step 4 model/net/logits/kernel and 1 more of replica 1 of worker 0 differs from that of the first"
    with pytest.raises(ValueError, match=message):  # the other one is its average
        trainer.fit(DATA, steps=8, actions=[change])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()) == ["2"]


@pytest.mark.slow
def test_an_integer_that_the_forward_pass_writes_is_named_as_a_cause():
    def model_fn():
        weight, total = tf.Variable(1.0), tf.Variable(0, trainable=False)

        def loss_fn(batch, training):
            if training:
                total.assign_add(tf.reduce_sum(tf.cast(batch["label"], tf.int32)))
            return {"loss": weight * batch["x"][:, 0]}

        return distloop.ModelSpec([weight, total], keras.optimizers.SGD(0.1), loss_fn)

    trainer = distloop.Trainer(model_fn, on(2, check_replicas_every=1))
    with pytest.raises(ValueError, match="model/1 of replica 1 .* differs .*: the forward pass writes an integer"):
        trainer.fit(DATA, steps=1)


@pytest.mark.slow
def test_a_variable_that_differs_between_workers_names_the_worker(monkeypatch):
    monkeypatch.setattr(workers.Workers, "gather", lambda self, sums: [sums, sums | {"model/net/logits/bias": [7]}])
    trainer = distloop.Trainer(classifier(), on(1, check_replicas_every=1))
    with pytest.raises(ValueError, match="At step 1 model/net/logits/bias of replica 0 of worker 1 differs"):
        trainer.fit(DATA, steps=1)
