"""The forward and backward pass of one update on one replica."""

import keras
import pytest
import tensorflow as tf

import distloop
from distloop.data.shards import Batch, BatchLayout
from distloop.model.state import TrainState
from distloop.training.forward_backward import ForwardBackward
from tests.problems import classification, classifier, on

LAYOUT = BatchLayout(is_split=False, is_padded=False)


def make_pass(**settings):
    """A pass over `w * x + offset`, whose gradient by `w` is the sum of x; its loss_fn writes a statistic."""

    def model_fn():
        w, offset, mean = tf.Variable(2.0), tf.Variable(1.0), tf.Variable(0.0, trainable=False)

        def loss_fn(batch, training):
            mean.assign(tf.reduce_mean(batch["x"]))
            return {"double": 2 * batch["x"], "loss": w * batch["x"]}

        return distloop.ModelSpec([w, offset, mean], keras.optimizers.SGD(0.1), loss_fn)

    state = TrainState(model_fn, tf.distribute.get_strategy())
    return ForwardBackward(state, state.spec.updates[0], **settings)


def run(update_pass, x, factor=None):
    rows = {"x": tf.constant(x, tf.float32)}
    return tf.function(lambda rows: update_pass(Batch(rows, None), LAYOUT, factor), autograph=False)(rows)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_sums_over_microbatches_are_the_sums_over_the_batch(microbatches):
    update_pass = make_pass(microbatches=microbatches)
    summed = run(update_pass, range(1, 6))
    assert [g.numpy().tolist() for g in update_pass.packing.unpack(summed.segments)] == [15.0, 0.0]
    assert summed.tallies.numpy().tolist() == [30.0, 5.0, 30.0, 5.0]


def test_a_factor_multiplies_gradients_and_not_tallies():
    update_pass = make_pass()
    summed = run(update_pass, [1.0] * 4, tf.constant(8.0))
    assert update_pass.packing.unpack(summed.segments)[0].numpy() == 32.0
    assert summed.tallies.numpy().tolist() == [8.0, 4.0, 8.0, 4.0]


def test_tracing_reveals_names_gradients_and_writes():
    update_pass = make_pass()
    summed = run(update_pass, [1.0] * 4)
    trace = update_pass.trace
    assert (trace.names, trace.outputs, trace.reached) == (["loss", "double"], {"loss", "double"}, [True, False])
    assert len(trace.written) == 1 and [float(t) for t in (*summed.before, *summed.after)] == [0.0, 1.0]


def test_gradients_of_rows_come_by_path():
    update_pass = make_pass()
    by_path, tallies = update_pass.differentiate.by_path({"x": tf.ones(3)}, None, training=True)
    assert {path: g if g is None else float(g) for path, g in by_path.items()} == {"0": 3.0, "1": None}
    assert float(tallies["loss"].total) == 6.0


def test_other_names_than_before_are_refused():
    update_pass = make_pass()
    run(update_pass, [1.0] * 4)
    object.__setattr__(update_pass.update, "loss_fn", lambda batch, training: {"loss": batch["x"] * 0.0})
    with pytest.raises(ValueError, match="does not depend on any variable"):
        run(update_pass, [1.0] * 4)
    variable = update_pass.variables[0]
    object.__setattr__(update_pass.update, "loss_fn", lambda batch, training: {"loss": batch["x"] * variable})
    with pytest.raises(ValueError, match=r"returned \['loss'\], and \['loss', 'double'\] before"):
        run(update_pass, [1.0] * 4)


@pytest.mark.slow
def test_a_model_that_talks_to_other_replicas_is_refused():
    trainer = distloop.Trainer(classifier(batch_norm="synchronized"), on(2, jit_compile=True))
    with pytest.raises(
        ValueError, match=r"^jit_compile=True was given with a model that talks .*use jit_compile=False.$"
    ):
        trainer.fit(distloop.make_dataset(classification(16), 16), steps=1)
