"""The law of tables: a sparse gradient trains a table as its dense one, whatever lies between tape and optimizer."""

import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.model.saved_state import SavedState
from distloop.optimizers import gradients, slot_placement
from distloop.run import overview
from distloop.sharding import sharded_application
from distloop.tables import sparse_packing
from tests.problems import assert_close, assert_equal, local_values, mostly_wide, on, refused

ROWS = 40  # of a table
UPDATES = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "lazy": lambda: distloop.LazyAdam(0.1),
}


class Scores(tf.Module):
    """The sum of the rows of a table that a batch names, in TensorFlow without Keras."""

    def __init__(self, name):
        super().__init__(name=name)
        self.table = tf.Variable(np.linspace(-1, 1, 3 * ROWS).reshape([ROWS, 3]), dtype=tf.float32, name="table")

    def __call__(self, ids):
        return tf.reduce_sum(tf.gather(self.table, ids), 1)  # [b, 3]


def model_fn(names=tuple(UPDATES), *, is_dense=False, **spec):
    """Several updates, each with a table and an optimizer of its own."""

    def make():
        models = {name: Scores(name) for name in names}

        def loss_fn_of(model):
            def loss_fn(batch, training):
                table = model.table * 1.0 if is_dense else model.table  # a product has a dense gradient
                scores = tf.reduce_sum(tf.gather(table, batch["ids"]), 1)
                return {"loss": tf.reduce_sum(tf.square(scores - batch["y"]), 1)}

            return loss_fn

        updates = [
            distloop.Update(name, loss_fn_of(model), UPDATES[name](), [model.table], **spec)
            for name, model in models.items()
        ]
        if len(updates) > 1:
            return distloop.ModelSpec(models, updates=updates)
        (model,) = models.values()
        return distloop.ModelSpec(model, updates[0].optimizer, loss_fn_of(model), **spec)

    return make


def data(rows=22, batch_size=8, **batch):
    random = np.random.default_rng(0)
    ids = random.integers(0, 6, (rows, 3)) * 7  # many duplicates
    arrays = {"ids": ids.astype(np.int32), "y": random.normal(size=(rows, 3)).astype(np.float32)}
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size, **batch)


@pytest.fixture(autouse=True)
def tables_are_large(monkeypatch):
    monkeypatch.setattr(gradients, "LARGEST_PACKED_BYTES", 64)


@pytest.fixture
def merges(monkeypatch):
    """The lists of rows that were merged, one for each sparse gradient that was traced."""
    merged = []
    monkeypatch.setattr(sparse_packing, "merge", recorded(merged))
    return merged


def recorded(merged, merge=sparse_packing.merge):
    """Returns `merge`, which notes what it merges."""
    return lambda rows: merged.append(rows) or merge(rows)


def fit(make, config, dataset, steps=5, **arguments):
    keras.utils.clear_session(free_memory=False)
    trainer = distloop.Trainer(make, config)
    trainer.fit(dataset, steps=steps, **arguments)
    return trainer


def values_of(trainer):
    """Returns weights and slots, of which all replicas hold the same bits."""
    values = {}
    for name, variable in trainer.state.all_variables().items():
        values[name], *others = map(np.copy, local_values(trainer, variable))
        assert all(other.tobytes() == values[name].tobytes() for other in others), name
    return values


@pytest.mark.not_by_collectives("which gather rows of tables only where their number is known")
@pytest.mark.slow
def test_replicas_and_microbatches_train_as_with_dense_gradients(merges):
    names = tuple(name for name in UPDATES if name != "lazy")
    sparse = fit(model_fn(names), on(2, microbatches=2, clip_norm=0.5), data())
    assert len(merges) >= 2 * len(names)  # two replicas
    merges.clear()
    dense = fit(model_fn(names, is_dense=True), on(1, clip_norm=0.5), data())
    assert not merges
    assert_close(values_of(sparse), values_of(dense))


@pytest.mark.slow
def test_virtual_replicas_give_the_same_bits_on_any_number_of_devices(merges):
    found = []
    for devices in (1, 2):
        merges.clear()
        config = on(devices, virtual_replicas=4, microbatches=1)
        found.append(values_of(fit(model_fn(("lazy",)), config, data(drop_remainder=True), steps=3)))
        assert len(merges) >= devices
    assert_equal(*found)


@pytest.mark.not_by_collectives("which gather rows of tables only where their number is known")
@pytest.mark.slow
def test_an_overflow_of_one_row_changes_no_bit(merges):
    config = on(2, precision="mixed_float16")
    bad = data(8).map(lambda batch: batch | {"y": tf.where(batch["ids"][:, :1] == 35, np.inf, batch["y"])})
    before = values_of(distloop.Trainer(model_fn(("lazy",)), config))
    trainer = fit(model_fn(("lazy",)), config, bad, steps=2)
    after = values_of(trainer)
    assert merges and int(trainer.state.skipped_steps) == 2
    for name in before.keys() - {"step", "skipped_steps", "optimizer/loss_scale", "optimizer/streak"}:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


@pytest.mark.slow
def test_a_gradient_fn_and_a_step_fn_get_whole_gradients():
    seen = []

    def gradient_fn(by_path):
        seen.extend(by_path.values())
        return by_path

    def step_fn(step):
        (path,) = step.weights
        seen.append(step.gradients()[path])
        return {path: seen[-1]}

    trainers = [
        fit(model_fn(("adagrad",), **functions), on(1), data(16), steps=2)
        for functions in ({}, dict(gradient_fn=gradient_fn), dict(step_fn=step_fn))
    ]
    assert {tuple(gradient.shape) for gradient in seen} == {(ROWS, 3)}
    plain, *others = map(values_of, trainers)
    for other in others:
        assert_close(other, plain)


@pytest.mark.slow
def test_a_large_table_that_a_step_walks_is_named(monkeypatch, capsys):
    monkeypatch.setattr(overview, "_MANY_ROWS", ROWS)
    trainer = fit(model_fn(("adam",)), on(1, console="lines"), data(8), steps=1)
    (path,) = trainer.state.paths.values()
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(f"the table {path} of 40 rows is updated as a whole at each step, since Adam moves", printed)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """Runs of 2 replicas with averages, on sparse gradients with a pause after step 4, and on dense ones."""
    path = str(tmp_path_factory.mktemp("averaged"))
    settings = dict(average_decay=0.9, clip_norm=0.5, check_replicas_every=3)
    names = ("sgd", "adagrad")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "LARGEST_PACKED_BYTES", 64)
        whole = fit(model_fn(names), on(2, **settings), data(), steps=9)
        dense = fit(model_fn(names, is_dense=True), on(1, **settings), data(), steps=9)
        for steps in (4, 9):
            resumed = fit(model_fn(names), on(2, workdir=path, **settings), data(), steps=steps)
    return whole, dense, resumed


@pytest.mark.wide
@pytest.mark.slow
def test_the_average_of_a_table_is_that_of_dense_gradients(averaged):
    whole, dense, _ = averaged
    assert_close(values_of(whole), values_of(dense))
    for name, average in whole.state.all_variables().items():
        if name.startswith("average/"):
            rows, old = average.stored["rows"].numpy(), np.linspace(-1, 1, 3 * ROWS, dtype=np.float32).reshape(-1, 3)
            unread = [i for i in range(ROWS) if i % 7 or i > 35]
            assert np.array_equal(rows[unread], old[unread]) and not np.array_equal(rows[0], average.numpy()[0])


@pytest.mark.wide
@pytest.mark.slow
def test_a_run_that_paused_goes_on_with_the_bits_of_the_average(averaged):
    whole, _, resumed = averaged
    assert_equal(values_of(resumed), values_of(whole))
    stored = [SavedState(trainer.state).snapshot() for trainer in (resumed, whole)]
    assert "stored/average/sgd/table/marks" in stored[0]
    assert_equal(*({name: v.numpy() for name, v in of.items() if v.dtype != tf.string} for of in stored))


@pytest.mark.wide
@pytest.mark.slow
def test_evaluations_of_an_averaged_table_leave_no_trace(averaged):
    whole, dense, _ = averaged
    before = values_of(whole)
    inside = []
    for trainer in (whole, dense):
        with trainer.state.averaged():
            inside.append({str(i): np.copy(v.numpy()) for i, v in enumerate(trainer.state.trained_variables)})
    assert_close(*inside)
    assert_equal(values_of(whole), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "settings"), mostly_wide([(("adagrad",), {}), (("sgd", "adagrad"), {"average_decay": 0.9})])
)
def test_a_run_on_sparse_packing_goes_on_with_dense_ones(names, settings, tmp_path):
    for is_dense, steps in ((False, 5), (True, 9)):
        config = on(1, workdir=str(tmp_path), clip_norm=0.5, **settings)
        trainer = fit(model_fn(names, is_dense=is_dense), config, data(), steps=steps)
    dense = fit(model_fn(names, is_dense=True), on(1, clip_norm=0.5, **settings), data(), steps=9)
    assert_close(values_of(trainer), values_of(dense))


@pytest.mark.parametrize("settings", [{"average_decay": 0.9}, {"average_from": 3}])
def test_a_moving_average_of_a_lazily_trained_table_is_refused(settings):
    parts = ("average_decay or average_from", "LazyAdam", "leave it out", "keras.optimizers.Adam.")
    refused(lambda: distloop.Trainer(model_fn(("lazy",)), on(1, **settings)), *parts)


@pytest.mark.parametrize("part", ["sharding", "none"])
def test_a_packing_of_whole_gradients_says_why_and_the_console_too(part, capsys):
    reason = sharded_application._WHY_DENSE if part == "sharding" else "the folder is gone"
    table = types.SimpleNamespace(shape=(200_000, 2), dtype="float32")
    packing = gradients.Packing([table], why_dense=reason)
    sparse = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 1]), tf.constant([3, 2]))
    whole = packing.sized(sparse, table)
    assert whole.numpy().tolist() == [[0, 0], [2, 2], [0, 0]] and packing.by_rows == set()
    update = types.SimpleNamespace(packing=packing, variables=[table])
    state = types.SimpleNamespace(paths={id(table): "ids/embeddings"})
    overview.report_dense_tables([update], state, is_shown=True)
    assert (
        f"ids/embeddings of 200,000 rows is updated as a whole at each step, since {reason}" in capsys.readouterr().out
    )


@pytest.mark.not_by_collectives("which gather rows of tables only where their number is known")
@pytest.mark.slow
def test_without_the_part_a_table_trains_as_with_dense_gradients(merges, monkeypatch, capsys):
    monkeypatch.setattr(overview, "_MANY_ROWS", ROWS)
    with_part = fit(model_fn(("adagrad",)), on(2, average_decay=0.9), data())
    assert merges
    merges.clear()

    def gone(module, given):
        raise ValueError(f"{given} needs {module}")

    monkeypatch.setattr(slot_placement, "import_part", gone)
    without = fit(model_fn(("adagrad",)), on(2, average_decay=0.9, console="lines"), data())
    assert not merges and "the folder tables, is gone" in " ".join(capsys.readouterr().out.split())
    assert_close(values_of(without), values_of(with_part))
