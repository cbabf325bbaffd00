"""Variables that the forward pass writes: found and restored; their values in a step, on any cut, in a resumed run."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.shards import Batch, BatchLayout
from distloop.model import variable_writes
from distloop.model.state import TrainState
from distloop.training.step import TrainStep
from tests.problems import local_values, mostly_wide, on


def variables():
    return [tf.Variable(1.0), tf.Variable(2.0), keras.Variable(3.0, trainable=False)]


def test_only_variables_written_in_a_block_or_its_branches_are_recorded():
    before, within, read = variables()
    in_branch, recorded = tf.Variable(4.0), []

    @tf.function
    def run():
        before.assign(0.0)
        with variable_writes.recorded_writes([before, within, read, in_branch]) as written:
            within.assign_add(tf.convert_to_tensor(read))
            tf.cond(before > 0.0, lambda: in_branch.assign(before), lambda: in_branch.value())
            tf.while_loop(lambda i: i < before, lambda i: [i + read], [0.0])
            tf.function(lambda: before + 1.0)()
        recorded.extend(id(variable) for variable in written)

    run()
    assert recorded == [id(within), id(in_branch)]


def test_eagerly_what_is_not_trainable_or_has_changed_counts_as_written():
    changed, kept, statistic = variables()
    with variable_writes.recorded_writes([changed, kept, statistic]) as written:
        changed.assign_add(1.0)
    assert [id(v) for v in written] == [id(changed), id(statistic)]


@pytest.mark.parametrize("unless", [False, True])
def test_values_stay_on_the_device_of_their_variable(unless):
    devices = [f"/CPU:{i}" for i in range(2)]
    stages = []
    for device in devices:  # as the stages of a pipeline
        with tf.device(device):
            stages.append(tf.Variable([1.0, 2.0]))

    @tf.function
    def run(condition):
        with tf.device(devices[0]):
            before = variable_writes.read(stages)
            read_on.extend(value.device[-5:] for value in before)
            variable_writes.assign(stages, [value + 1.0 for value in before], condition)

    read_on = []
    run(tf.constant(unless))
    assert [v.numpy().tolist() for v in stages] == [[1.0, 2.0] if unless else [2.0, 3.0]] * 2
    operations = run.get_concrete_function(tf.constant(unless)).graph.get_operations()
    chosen_on = [op.device[-5:] for op in operations if op.type == "SelectV2"]
    assert read_on == chosen_on == ["CPU:0", "CPU:1"]


def test_writes_are_restored_except_those_of_random_streams():
    weight, seed, statistic = variables()
    untrained = [seed, statistic]
    state = SimpleNamespace(
        seeds=[seed], recurrent_states=[], untrained_variables=untrained, trained_variables=[weight], passes_write=False
    )

    @tf.function
    def run():
        with variable_writes.restored_writes(state):
            weight.assign_add(1.0)
            seed.assign_add(1.0)
            statistic.assign_add(1.0)
            return tf.identity(weight)

    assert float(run()) == 2.0 and state.passes_write
    assert [float(v.numpy()) for v in (weight, seed, statistic)] == [1.0, 3.0, 3.0]
    variable_writes.assign([statistic, weight, seed], variable_writes.read([weight, seed, statistic]))
    assert [float(v.numpy()) for v in (weight, seed, statistic)] == [3.0, 3.0, 1.0]


ROWS = 24
X = np.random.default_rng(0).normal(size=(ROWS, 8)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(ROWS, 1)).astype(np.float32)


def run_step(model_fn, x, **settings):
    """Runs one step over rows on one replica; returns its state."""
    state = TrainState(model_fn, tf.distribute.get_strategy())
    step = TrainStep(state, **settings)
    rows = {"x": tf.constant(x, tf.float32)}
    layout = BatchLayout(is_padded=False)
    tf.function(lambda rows: step(Batch(rows, None), layout).applied, autograph=False)(rows)
    return state


def counting():
    """A model whose forward pass writes an int, a float and a Keras metric; the loss is `weight * x`."""
    weight, calls, mean = tf.Variable(1.0), tf.Variable(0, trainable=False), tf.Variable(4.0, trainable=False)

    def loss_fn(batch, training):
        calls.assign_add(1)
        mean.assign(0.5 * mean + 0.5 * tf.reduce_mean(batch["x"]))
        return {"loss": weight * batch["x"], "seen": (batch["x"],)}

    metrics = {"seen": keras.metrics.Sum()}
    return distloop.ModelSpec([weight, calls, mean], keras.optimizers.SGD(0.1), loss_fn, metrics=metrics)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_microbatches_start_from_the_same_values_and_leave_their_mean(microbatches):
    state = run_step(counting, range(1, 6), microbatches=microbatches)
    weight, calls, mean = (variable.numpy() for variable in state.model)
    assert (calls, mean) == (1, pytest.approx(0.5 * 4.0 + 0.5 * 3.0))
    assert weight == pytest.approx(1.0 - 0.1 * 3.0)
    assert float(state.keras_metrics["seen"].result()) == 15.0


def normalized_by_itself():
    """A model whose forward pass writes its weight and a statistic, used by three updates; the last one is `log(x)`."""
    weight, others = tf.Variable([3.0, 4.0]), [tf.Variable(1.0) for _ in range(3)]
    count = tf.Variable(0.0, trainable=False)

    def update(i):
        def loss_fn(batch, training):
            weight.assign(2.0 * weight / tf.norm(weight))
            count.assign_add(1.0)
            value = batch["x"] if i < 2 else tf.math.log(batch["x"])
            return {"loss": tf.reduce_sum(weight) * others[i] * value}

        variables = [others[i], weight] if i == 0 else [others[i]]
        return distloop.Update(f"update{i}", loss_fn, keras.optimizers.SGD(0.1), variables)

    return distloop.ModelSpec([weight, count, *others], updates=[update(i) for i in range(3)])


@pytest.mark.slow
def test_a_skipped_step_restores_weights_that_several_updates_wrote():
    settings = dict(skip_nonfinite=True, microbatches=2)
    state = run_step(normalized_by_itself, [1.0, -1.0], **settings)
    assert [variable.numpy().tolist() for variable in state.model] == [[3.0, 4.0], 0.0, 1.0, 1.0, 1.0]
    state = run_step(normalized_by_itself, [1.0, 2.0], **settings)
    weight, count, *others = (variable.numpy() for variable in state.model)
    assert np.linalg.norm(weight) == pytest.approx(2.0) and count == 3.0 and 1.0 not in others


def make_model():
    """A model whose forward pass writes a weight, and one layer of which gets new values instead of gradients."""
    keras.utils.set_random_seed(1)
    spectral = keras.layers.SpectralNormalization(keras.layers.Dense(6, activation="tanh"))
    # Without a bias: Keras rounds the bias's gradient to bfloat16, in each part of a batch by itself.
    float8 = keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.Input((8,)), spectral, float8])
    float8.quantize("float8")
    return model


def optimizer():
    return keras.optimizers.SGD(0.1, weight_decay=0.1)


def trained(replicas, steps, x=X, **settings):
    """A trainer after some steps on the same batch."""
    model_fn = lambda: distloop.supervised(make_model(), keras.losses.MeanSquaredError(), optimizer())  # noqa: E731
    trainer = distloop.Trainer(model_fn, on(replicas, **settings))
    trainer.fit(tf.data.Dataset.from_tensors((x, Y)), steps=steps)
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas, settings", mostly_wide([(2, {"microbatches": 2, "clip_norm": 1e6}), (1, {"microbatches": 3})])
)
def test_written_and_overwritten_weights_are_those_of_keras_on_any_cut(replicas, settings):
    model = make_model()
    model.compile(optimizer(), keras.losses.MeanSquaredError())
    model.fit(X, Y, batch_size=ROWS, epochs=3, verbose=0)
    found = trained(replicas, 3, **settings).model.get_weights()
    for value, expected in zip(found, model.get_weights(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_skipped_step_restores_written_weights_on_every_replica():
    trainer = trained(2, 1, X * np.float32(np.nan), on_nonfinite="skip")
    for variable, expected in zip(trainer.model.weights, make_model().get_weights(), strict=True):
        np.testing.assert_equal(local_values(trainer, variable), [expected] * 2)


SEQUENCES = np.random.default_rng(2).normal(size=(8, 3, 5)).astype(np.float32)
TARGETS = np.random.default_rng(3).normal(size=(8, 1)).astype(np.float32)


def recurrent():
    keras.utils.set_random_seed(1)
    both = keras.layers.Bidirectional(keras.layers.GRU(2, stateful=True))
    model = keras.Sequential([keras.Input(batch_shape=(4, 3, 5)), both, keras.layers.Dense(1)])
    model.compile("sgd", keras.losses.MeanSquaredError())
    return model


def recurrent_trainer(replicas=1, **settings):
    spec = lambda: distloop.supervised(recurrent(), keras.losses.MeanSquaredError(), keras.optimizers.SGD())  # noqa: E731
    return distloop.Trainer(spec, on(replicas, **settings))


@pytest.mark.wide
@pytest.mark.slow
def test_states_of_recurrent_layers_train_evaluate_and_resume_as_in_keras(tmp_path):
    data = tf.data.Dataset.from_tensor_slices((SEQUENCES, TARGETS)).batch(4, drop_remainder=True)
    model = recurrent()
    model.fit(data, epochs=2, verbose=0)
    expected = model.get_weights()
    recurrent_trainer(workdir=str(tmp_path)).fit(data, steps=3)
    trainer = recurrent_trainer(workdir=str(tmp_path))
    trainer.fit(data, steps=4)
    np.testing.assert_equal(trainer.model.get_weights(), expected)
    # Within a pass the states go on, as in Keras; the pass leaves those of training.
    losses = [trainer.evaluate(data)["loss"] for _ in range(2)]
    assert losses == [pytest.approx(model.evaluate(data, verbose=0), rel=1e-6)] * 2


@pytest.mark.slow
def test_states_of_recurrent_layers_need_one_replica_and_whole_batches():
    data = tf.data.Dataset.from_tensors((SEQUENCES[:4], TARGETS[:4]))
    with pytest.raises(ValueError, match="^The layer '.*_gru.*' is stateful, .* one replica, and there are 2: give"):
        recurrent_trainer(2)
    with pytest.raises(ValueError, match="^microbatches=2 was given with a stateful recurrent layer, .* or stateful=F"):
        recurrent_trainer(microbatches=2).fit(data, steps=1)
