"""Histograms of weights and gradients, and how far the weights move."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.distributed.devices import Replicas
from distloop.histograms import histograms
from distloop.histograms.histograms import WeightHistograms
from distloop.optimizers import gradients
from distloop.tables.sparse_packing import SparsePacking
from tests import problems
from tests.problems import mostly_wide

pytestmark = pytest.mark.slow


def watcher():
    """Returns an action, and the weights by step that it notes at every boundary."""
    weights = {}

    def look(report):
        weights[report.step] = [np.array(w) for w in report.state.model.get_weights()]

    look.every = 1
    return look, weights


def norm(arrays, others=None):
    """Returns the norm of arrays, or of their differences to others."""
    differences = arrays if others is None else [a - b for a, b in zip(arrays, others, strict=True)]
    return np.sqrt(sum(np.square(d).sum() for d in differences))


def data():
    return tf.data.Dataset.from_tensor_slices(problems.classification()).batch(16)


def train(workdir, model_fn, replicas=2, steps=9, actions=(), **settings):
    config = problems.on(replicas, workdir=str(workdir), log_every=2, **settings)
    trainer = distloop.Trainer(model_fn, config)
    trainer.fit(data(), steps=steps, actions=actions)
    return trainer


SKIPPING = {"clip_norm": 0.1, "average_decay": 0.9, "precision": "mixed_float16", "on_nonfinite": "skip"}


@pytest.mark.parametrize(
    "settings",
    mostly_wide([SKIPPING | {"replicas": 1}, {"microbatches": 2}, {"jit_compile": True, "replicas": 1}]),
    ids=str,
)
def test_histograms_change_no_bit_of_a_run(settings, tmp_path):
    model_fn = problems.classifier()
    if "jit_compile" not in settings:
        model_fn = problems.classifier(dropout=0.2, batch_norm=None if "microbatches" in settings else "synchronized")
    plain = train(tmp_path / "a", model_fn, **settings)
    watched = train(tmp_path / "b", model_fn, histograms_every=2, **settings)
    assert plain._train_loop.histograms is None and watched._train_loop.histograms is not None
    problems.assert_equal(problems.everything(watched), problems.everything(plain))


def test_gradients_are_of_the_last_step_and_updates_since_the_last_row(tmp_path, replicas=2):
    (look, weights), seen = watcher(), []

    class Watch(WeightHistograms):
        def __call__(self, report):
            seen.append((report.step, found := super().__call__(report)))
            return found

    model_fn = problems.classifier(optimizer=lambda: keras.optimizers.SGD(0.5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distloop.histograms.histograms.WeightHistograms", Watch)
        train(tmp_path, model_fn, replicas, steps=7, actions=[look], histograms_every=3)
    assert [step for step, _ in seen] == [3, 6, 7]
    for step, found in seen:
        gradients = [display.values for name, display in found.items() if name.startswith("gradients/")]
        for gradient, old, new in zip(gradients, weights[step - 1], weights[step], strict=True):
            np.testing.assert_allclose(0.5 * gradient, old - new, atol=1e-6)
    rows = {row["step"]: row for row in distloop.read_metrics(tmp_path)}
    whole, moved = norm(weights[6]), norm(weights[6], weights[3])
    assert rows[6]["weight_norm"] == pytest.approx(whole, rel=1e-5)
    assert rows[6]["update_norm"] == pytest.approx(moved, rel=1e-4)
    assert rows[6]["update_ratio"] == pytest.approx(moved / whole, rel=1e-4)
    assert [step for step, row in rows.items() if "update_norm" in row] == [3, 6]


def test_each_update_has_its_own_norms(tmp_path):
    def model_fn():
        models = {name: keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)], name=name) for name in "ab"}

        def update(name):
            loss_fn = lambda batch, training: {"loss": models[name](batch["x"])[:, 0] ** 2}  # noqa: E731
            return distloop.Update(name, loss_fn, keras.optimizers.SGD(0.1), f"^{name}/")

        return distloop.ModelSpec(models, updates=[update("a"), update("b")])

    train(tmp_path, model_fn, steps=2, histograms_every=2)
    assert {"a/weight_norm", "b/update_norm", "b/update_ratio"} <= set(distloop.read_metrics(tmp_path)[-1])


@pytest.mark.wide
def test_a_run_that_goes_back_or_goes_on_forgets_the_weights_of_before(tmp_path):
    rows = problems.classification(128)
    rows["x"][112:] = np.inf  # batch 7, of step 8

    def fit(steps, name, **settings):
        (look, weights), workdir = watcher(), str(tmp_path / name)
        config = problems.on(1, workdir=workdir, checkpoint_every=4, log_every=1, on_divergence="rollback", **settings)
        data = distloop.make_dataset(rows, 16, shuffle=False)
        distloop.Trainer(problems.classifier(), config).fit(data, steps=steps, actions=[look])
        found = distloop.read_metrics(workdir)
        return weights, {row["step"]: row["update_norm"] for row in found if "update_norm" in row}

    weights, norms = fit(10, "back", histograms_every=3)  # from step 4, where the weights of step 6 are not known
    assert list(norms) == [3, 9] and norms[9] == pytest.approx(norm(weights[9], weights[6]), rel=1e-4)
    rows["x"][112:] = 0.0
    fit(10, "on", histograms_every="1 epoch")
    assert list(fit(17, "on", histograms_every="1 epoch")[1]) == [8]  # not 16: those of step 8 are not known


def test_weights_that_get_new_values_in_place_of_gradients_are_left_out(tmp_path):
    def model_fn():
        float8 = keras.layers.Dense(1, use_bias=False, name="out")
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6, name="in"), float8], name="net")
        float8.quantize("float8")
        return distloop.supervised(model, keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1))

    trainer = distloop.Trainer(model_fn, problems.on(1, workdir=str(tmp_path), histograms_every=2))
    trainer.fit(tf.data.Dataset.from_tensors((np.ones([4, 8], "f"), np.ones([4, 1], "f"))), steps=2)
    assert distloop.read_metrics(tmp_path)[-1]["update_norm"] > 0


def test_skipped_steps_have_an_update_norm_of_zero(tmp_path):
    rows = problems.classification()
    rows["x"][16:48] = np.nan  # the second batch and the third
    config = problems.on(2, workdir=str(tmp_path), histograms_every=1, on_nonfinite="skip")
    trainer = distloop.Trainer(problems.classifier(), config)
    metrics = trainer.fit(tf.data.Dataset.from_tensor_slices(rows).batch(16), steps=3)
    assert metrics["skipped_steps"] == 2 and metrics["update_norm"] == 0 and metrics["weight_norm"] > 0


def test_a_sparse_gradient_shows_its_rows_and_a_large_table_a_sample(monkeypatch):
    monkeypatch.setattr(histograms, "_MOST_ROWS", 50)
    monkeypatch.setattr(histograms, "_SAMPLED_ROWS", 10)
    monkeypatch.setattr(gradients, "LARGEST_PACKED_BYTES", 0)
    table = tf.Variable(tf.ones([100, 2]))
    action = WeightHistograms({"": [table]}, {id(table): "table"}, every=1)
    action.begin(0, 1, is_restored=False)
    state = types.SimpleNamespace(strategy=tf.distribute.get_strategy(), replicas=Replicas(1))
    packing = SparsePacking([table], state, for_rows=True)
    action.allocate("", packing)

    @tf.function
    def train(numbers):
        values = tf.ones([tf.size(numbers), 2])
        action.record("", packing.pack([tf.IndexedSlices(values, numbers, tf.constant([100, 2]))]), tf.constant(3.0))

    for numbers in ([5], [7, 9, 11]):
        train(tf.constant(numbers))
    table.assign(tf.zeros([100, 2]))
    found = action(types.SimpleNamespace(step=1))
    np.testing.assert_array_equal(found["gradients/table"].values, np.full([3, 2], 3.0))
    assert found["weights/table"].values.shape == (10, 2)
    np.testing.assert_allclose(found["update_norm"], np.sqrt(200))  # of all rows
