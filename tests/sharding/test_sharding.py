"""The law of sharding: `shard_optimizer` changes memory, not weights, and checkpoints do not know of it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.model.memory import held_by_device
from distloop.model.saved_state import SavedState
from distloop.optimizers import slot_store
from distloop.run import overview
from distloop.sharding import variable_shards
from tests.problems import assert_equal, classification, classifier, local_values, mostly_wide, on, refused, weights

pytestmark = pytest.mark.usefixtures("graphs_of_other_tests_are_optimized")

ROWS = 67  # the last batch of an epoch is odd
RNG = np.random.default_rng(0)
DEVICES = [f"CPU:{i}" for i in range(4)]


def all_of(trainer):
    """All that a checkpoint holds, and the weights of every replica."""
    saved = SavedState(trainer.state).snapshot()
    values = {name: value.numpy() for name, value in saved.items() if value.dtype != tf.string}
    for name, variable in trainer.state.all_variables().items():
        if name.startswith("model/"):
            values |= {f"{name}@{i}": value for i, value in enumerate(local_values(trainer, variable))}
    return values


def train(model_fn, rows, replicas=2, steps=9, writers=(), **settings):
    """Trains with batches of 16, of which the last one is odd; returns the trainer."""
    trainer = distloop.Trainer(model_fn, on(replicas, **settings))
    trainer.fit(distloop.make_dataset(rows, 16), steps=steps, writers=writers)
    return trainer


def shared(trainer):
    """The bytes of slots and averages by device."""
    held = held_by_device(trainer.state)
    return {device: of["optimizer slots"] + of["averages of weights"] for device, of in held.items()}


def decaying():
    """AdamW that leaves biases out, with another learning rate for a layer."""
    layers = [keras.layers.Dense(48, activation="tanh", name="hidden"), keras.layers.Dense(4, name="logits")]
    model = keras.Sequential([keras.Input((8,)), *layers], name="net")

    def loss_fn(batch, training):
        logits = model(batch["x"], training=training)
        return {"loss": keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)}

    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    return distloop.ModelSpec(model, optimizer, loss_fn, no_decay="bias", learning_rates={"logits": 0.5})


@pytest.fixture(scope="module")
def half_precision():
    """A run in float16 with an overflow, microbatches and an average: whole, and sharded over two devices."""
    rows = classification(ROWS)
    rows["x"][33] = np.inf
    settings = {"precision": "mixed_float16", "microbatches": 2, "average_decay": 0.9}
    settings |= {"check_replicas_every": 4, "clip_variable_norm": 0.05}
    with pytest.MonkeyPatch.context() as patch:  # Adam in one operation, also for a shard of the larger variable
        patch.setattr(slot_store, "MIN_FUSED_BYTES", 1000)
        patch.setattr("distloop.optimizers.gradients.LARGEST_PACKED_BYTES", 200)
        patch.setattr(variable_shards, "_SMALLEST_ROW", 48)  # the variable is cut between rows
        patch.setattr(variable_shards, "_FEWEST_ROWS", 8)
        return [train(decaying, rows, shard_optimizer=is_sharded, **settings) for is_sharded in (False, True)]


@pytest.mark.slow
def test_a_sharded_run_ends_with_the_same_bits_by_the_same_names(half_precision):
    whole, sharded = half_precision
    assert int(sharded.state.skipped_steps) == 2
    shapes = [tuple(shard.view.shape) for shard in shards_of(sharded)]
    assert sorted(shapes) == [(1, 48), (4,), (7, 48), (48,), (48, 4)]  # of 4 variables: one is cut
    assert_equal(all_of(sharded), all_of(whole))


def shards_of(trainer):
    return trainer.state.slot_placement.shards(trainer.state.trained_variables)


@pytest.mark.slow
def test_evaluations_see_the_average_and_training_goes_on_from_the_weights(half_precision):
    scores = [t.evaluate(distloop.make_dataset(classification(20), 20, shuffle=False)) for t in half_precision]
    assert scores[0] == scores[1]
    sharded = half_precision[1]
    before = all_of(sharded)
    with sharded.state.averaged():
        inside = all_of(sharded)
    for name, value in before.items():
        if name.startswith("average/"):
            model = name.replace("average", "model")
            assert np.array_equal(inside[model], value) and np.array_equal(inside[f"{model}@1"], value)
    assert_equal(all_of(sharded), before)


@pytest.mark.slow
def test_each_device_has_its_part_of_the_slots_and_the_console_says_so(half_precision):
    sharded = half_precision[1]
    sizes = shared(sharded)
    total = sum(4 * int(v.shape.num_elements()) * 3 for v in sharded.state.trained_variables)
    assert sum(sizes.values()) == total + 2 * (8 + 4)  # and on each the count of steps, and the learning rate
    assert max(sizes.values()) - min(sizes.values()) <= 4 * 3 * 64  # 628 elements are cut at multiples of 64
    weights = [of["weights"] for of in held_by_device(sharded.state).values()]
    assert sorted(weights) == [4 * (628 + rows * 48) for rows in (1, 7)]  # of a matrix that is cut, its shard once more
    one = distloop.Trainer(classifier(), on(1, shard_optimizer=True))
    assert one.state.slot_placement.num_shards == 1
    of_two, of_one = (overview.console_lines(t.state, t.config, sharded._train_source) for t in (sharded, one))
    assert "slots and averages 0.0 MB on CPU:0, 0.0 MB on CPU:1" in of_two
    assert any("changes nothing" in line for line in of_one)


def test_the_small_slots_of_a_device_are_one_vector():
    state = distloop.Trainer(classifier(), on(2, shard_optimizer=True)).state
    shapes = [tuple(v.shape) for v in state.slot_stores[""].stored if tuple(v.shape)]
    assert shapes == [(8, 16), (16 + 16 * 4 + 4,)]  # the largest variable has a device of its own


def large():
    """A model of three matrices that no number of devices could share out whole."""
    layers = [keras.layers.Dense(n) for n in (300, 100, 10)]
    model = keras.Sequential([keras.Input((100,)), *layers], name="net")
    return distloop.ModelSpec(model, keras.optimizers.Adam(), lambda batch, training: {"loss": model(batch["x"])[:, 0]})


@pytest.mark.slow
@pytest.mark.parametrize("replicas", mostly_wide([2, 3, 4]))
def test_devices_hold_alike(replicas):
    trainer = distloop.Trainer(large, on(replicas, shard_optimizer=True, average_decay=0.9))
    sizes = {device: size - (8 + 4) for device, size in shared(trainer).items()}  # the count of steps, and the rate
    assert sum(sizes.values()) == 4 * 3 * trainer.state.num_parameters()
    assert set(sizes) == set(DEVICES[:replicas])
    assert max(sizes.values()) <= (1 / replicas + 0.01) * sum(sizes.values())


@pytest.mark.slow
def test_a_run_keeps_its_bits_on_any_number_of_devices_sharded_or_not(tmp_path):
    rows = classification(ROWS)
    settings = {"virtual_replicas": 4, "clip_norm": 0.3, "average_decay": 0.9}
    straight = train(classifier(), rows, 1, **settings)
    for replicas, is_sharded, steps in ((1, False, 3), (2, True, 7), (1, True, 9)):
        last = train(classifier(), rows, replicas, steps, workdir=str(tmp_path), shard_optimizer=is_sharded, **settings)
        assert last.step == steps
    assert_equal(all_of(last), all_of(straight))


@pytest.mark.wide
def test_values_of_a_whole_run_are_taken_apart_and_put_together():
    sharded = distloop.Trainer(large, on(2, shard_optimizer=True, average_decay=0.9)).state
    variables = {name: v for name, v in sharded.all_variables().items() if v.dtype == "float32"}
    values = {name: RNG.normal(size=tuple(v.shape)).astype("f") for name, v in variables.items()}
    SavedState(sharded).restore(SavedState(sharded).snapshot() | {n: tf.constant(v) for n, v in values.items()})
    found = SavedState(sharded).snapshot()
    assert_equal({name: found[name].numpy() for name in values}, values)


@pytest.mark.wide
def test_a_variable_that_one_of_several_optimizers_needs_whole_is_not_cut(monkeypatch):
    def model_fn():
        dense = keras.layers.Dense(64, activation="tanh", use_bias=False, name="hidden")
        model = keras.Sequential([keras.Input((8,)), dense, keras.layers.Dense(4, name="logits")], name="net")

        def loss_fn(batch, training):
            return {"loss": tf.reduce_sum(tf.square(model(batch["x"], training=training)), 1)}

        optimizers = {"a": keras.optimizers.Adam(0.01), "b": keras.optimizers.Lamb(0.01)}  # Lamb takes norms of kernels
        updates = [distloop.Update(name, loss_fn, optimizer, ".") for name, optimizer in optimizers.items()]
        return distloop.ModelSpec(model, updates=updates)

    monkeypatch.setattr(variable_shards, "_SMALLEST_ROW", 8)
    monkeypatch.setattr(variable_shards, "_FEWEST_ROWS", 2)
    whole, sharded = (train(model_fn, classification(16), steps=3, shard_optimizer=s) for s in (False, True))
    assert all(shard.shape == tuple(shard.variable.shape) for shard in shards_of(sharded))
    assert_equal(weights(whole), weights(sharded))


@pytest.mark.slow
def test_what_cannot_be_sharded_is_told_in_a_sentence():
    def lazy():
        spec = classifier()()
        return distloop.ModelSpec(spec.model, distloop.LazyAdam(), spec.updates[0].loss_fn)

    def built():
        spec = classifier()()
        spec.updates[0].optimizer.build(spec.model.trainable_variables)
        return spec

    config = on(2, shard_optimizer=True)
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
    refused(lambda: distloop.Config(shard_optimizer=True, num_stages=2), "num_stages=2", "leave shard_optimizer out")
    refused(lambda: distloop.Trainer(built, config), "slots already", "let distloop build it")
    refused(lambda: distloop.Trainer(lazy, config), "LazyAdam", "give keras.optimizers.Adam")
    words = "CentralStorageStrategy", "strategy=mirrored"
    refused(lambda: distloop.Trainer(classifier(), config, strategy=central), *words)
