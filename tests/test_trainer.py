"""Tests the user's verbs, as a user meets them."""

import os
import re
import textwrap
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.monitoring import timing
from distloop.run import overview
from tests import forked
from tests.problems import (
    FILES_OF_A_RUN,
    assert_equal,
    batches,
    classification,
    classifier,
    every,
    everything,
    files_of,
    looks,
    loss_fn_of,
    mostly_wide,
    of_unknown_length,
    on,
    rows_of,
    weights,
)

pytestmark = pytest.mark.slow


def train(steps, *, data=None, model_fn=None, replicas=1, **settings):
    trainer = distloop.Trainer(model_fn or classifier(), on(replicas, **settings))
    trainer.fit(batches() if data is None else data, steps=steps)
    return trainer


def rate(value):
    """Returns a function that makes an optimizer of this learning rate."""
    return lambda: keras.optimizers.SGD(value)


def weight_model_fn(loss, rate=1.0):
    """A `model_fn` of one number, from 0, whose values are `loss(weight, batch)`."""

    def model_fn():
        weight = tf.Variable(0.0)
        optimizer = keras.optimizers.SGD(rate)
        return distloop.ModelSpec({"weight": weight}, optimizer, lambda batch, training: loss(weight, batch))

    return model_fn


def test_fit_trains_until_a_global_step_and_does_nothing_after_it(capsys):
    trainer = distloop.Trainer(classifier(), on(1))
    assert trainer.step == 0
    first = trainer.fit(batches(), steps=5)
    before = everything(trainer)
    assert trainer.fit(batches(), steps=5) == first
    assert "distloop: Already at step 5 of 5: raise steps to go on." in capsys.readouterr().out.splitlines()
    assert_equal(everything(trainer), before)
    assert trainer.step == 5 and int(trainer.optimizer.iterations) == 5
    assert first["loss"] > 0


def test_a_second_fit_on_the_same_dataset_goes_on_where_the_first_stopped():
    whole = train(9, data=batches(shuffle=True))
    parts = distloop.Trainer(classifier(), on(1))
    data = batches(shuffle=True)
    for steps in (2, 7, 9):
        parts.fit(data, steps=steps)
    assert_equal(weights(parts), weights(whole))


def test_another_dataset_starts_at_its_beginning():
    model_fn = weight_model_fn(lambda weight, batch: {"loss": weight * 0 + batch, "row": batch}, 0.0)
    trainer = distloop.Trainer(model_fn, on(1, log_every=1))
    rows = np.arange(20, dtype=np.float32)
    ones, tens = (tf.data.Dataset.from_tensor_slices(rows[start : start + 3]).batch(1) for start in (0, 10))
    seen = [looks(trainer, *fit, 1, lambda report: report.metrics["row"]) for fit in ((ones, 2), (ones, 4), (tens, 5))]
    assert seen == [[0, 1], [2, 0], [10]]


def test_epochs_are_passes_or_some_batches_and_fit_goes_before_the_config():
    trainer = distloop.Trainer(classifier(), on(1, epochs=2))
    trainer.fit(batches())
    assert trainer.step == 10
    unknown = of_unknown_length(batches())
    assert unknown.cardinality() == tf.data.UNKNOWN_CARDINALITY
    trainer.fit(unknown, epochs=3)
    assert trainer.step == 15
    trainer.fit(batches(), steps=18)
    assert trainer.step == 18
    some = distloop.Trainer(classifier(), on(1, limit_train_batches=2))
    some.fit(batches(), epochs=3)
    assert some.step == 6


def test_training_values_are_weighted_means_over_the_steps_of_a_row():
    rows = {"x": np.arange(12, dtype=np.float32), "w": np.arange(12, dtype=np.float32) % 3}

    def values(weight, batch):
        value = batch["x"] + 0.0 * weight
        return {"loss": value, "weighted": distloop.weighted(value, batch["w"])}

    trainer = distloop.Trainer(weight_model_fn(values), on(2, log_every=2, steps_per_loop=1))
    seen = looks(trainer, distloop.make_dataset(rows, 3), 4, 2, lambda report: dict(report.metrics))
    for found, part in zip(seen, (slice(0, 6), slice(6, 12)), strict=True):
        assert found["loss"] == pytest.approx(rows["x"][part].mean())
        assert found["weighted"] == pytest.approx(np.average(rows["x"][part], weights=rows["w"][part]))


def test_keras_metrics_of_training_are_those_of_the_steps_of_a_row():
    rows = classification(64)
    trainer = distloop.Trainer(classifier(optimizer=rate(0.0), metrics=True), on(1, log_every=5))
    found = looks(trainer, distloop.make_dataset(rows, 16), 4, 2, lambda report: report.metrics["auc"])
    probability = tf.nn.softmax(trainer.model(rows["x"])).numpy()[:, 0]
    for value, part in zip(found, (slice(0, 32), slice(32, 64)), strict=True):
        auc = keras.metrics.AUC(num_thresholds=50)
        auc.update_state(rows["label"][part] == 0, probability[part])
        assert value == pytest.approx(float(auc.result()), rel=1e-6)


def test_reports_hold_the_standard_names():
    trainer = distloop.Trainer(classifier(l2=0.1, optimizer=rate(0.01)), on(2, clip_norm=1.0))
    found = trainer.fit(batches(), steps=4, evals={"test": batches()})
    names = "loss accuracy regularization learning_rate gradient_norm clipped_share skipped_steps"
    names += " weight_norm steps_per_sec examples_per_sec input_wait host_share examples_seen epochs_seen"
    names += " step_secs_p50 step_secs_p90 step_secs_p99 replica_imbalance host_memory_gb cpu_utilization"
    names += " model_flops_per_sec"
    of_test = {"test/loss", "test/accuracy", "test/regularization"}
    assert set(names.split()) | of_test >= set(found) >= set(names.split())
    assert all(isinstance(value, float) for value in found.values())
    assert 0 <= found["input_wait"] <= 1 and 0 <= found["host_share"] <= 1 and found["steps_per_sec"] > 0
    kernel = trainer.model.layers[0].kernel.numpy()
    assert trainer.evaluate(batches())["loss"] == found["test/loss"]
    assert found["regularization"] == pytest.approx(0.1 * (kernel**2).sum(), rel=0.2)


def test_tokens_a_second_count_each_token_of_all_replicas_once():
    def model_fn():
        table = keras.layers.Embedding(5, 1)

        def loss_fn(batch, training):
            return {"loss": distloop.weighted(table(batch["word"])[..., 0], batch["weight"])}  # [B, T]

        return distloop.ModelSpec(table, keras.optimizers.SGD(0.1), loss_fn)

    rows = {"word": np.ones([7, 6], np.int32), "weight": np.tile(np.float32([1, 1, 1, 1, 1, 0]), [7, 1])}
    found = distloop.Trainer(model_fn, on(2, microbatches=2)).fit(distloop.make_dataset(rows, 7), steps=3)
    assert found["tokens_per_sec"] == pytest.approx(7 * 5 * found["steps_per_sec"])
    assert found["examples_per_sec"] == pytest.approx(7 * found["steps_per_sec"])


def test_the_time_of_steps_is_told_in_percentiles():
    def slow(number):
        time.sleep(0.2 if number % 10 == 5 else 0.0)
        return number

    def with_pauses(number, rows):
        number = tf.numpy_function(slow, [number], tf.int64)
        with tf.control_dependencies([number]):
            return tf.nest.map_structure(tf.identity, rows)

    data = batches().repeat().enumerate().map(with_pauses)
    found = distloop.Trainer(classifier(), on(1)).fit(data, steps=40)
    assert found["step_secs_p50"] < 0.1 <= found["step_secs_p99"] <= 40 / found["steps_per_sec"]
    assert found["step_secs_p50"] <= found["step_secs_p90"] <= found["step_secs_p99"]


@pytest.mark.parametrize(("slow_replica", "least", "most"), mostly_wide([(None, 0.0, 0.7), (1, 0.8, 1.0)]))
def test_a_slow_replica_is_told(slow_replica, least, most):
    def model_fn():
        spec = classifier()()

        def loss_fn(batch, training):
            values = spec.updates[0].loss_fn(batch, training)
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            pause = lambda replica: np.float32(time.sleep(0.05 * (replica == slow_replica)) or 1)  # noqa: E731
            values["loss"] *= tf.ensure_shape(tf.numpy_function(pause, [replica], tf.float32), [])
            return values

        return distloop.ModelSpec(spec.model, spec.optimizer, loss_fn)

    found = distloop.Trainer(model_fn, on(2)).fit(batches(), steps=10)
    assert least <= found["replica_imbalance"] <= most


def steps_of_norms(*norms):
    """A `model_fn`, and a dataset whose batches' gradients have these norms."""
    model_fn = weight_model_fn(lambda weight, batch: {"loss": weight * batch})
    return model_fn, tf.data.Dataset.from_tensor_slices(np.repeat(np.float32(norms), 2)).batch(2)


@pytest.mark.parametrize("precision", mostly_wide(["float32", "mixed_float16"]))
@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_clipped_fraction_counts_clipped_steps_among_those_applied(replicas, precision):
    model_fn, data = steps_of_norms(1.0, 3.0, 2.0, np.nan, 5.0, 0.5, 1.0, -1.0, 2.0, 3.0, np.inf, 4.0)
    settings = dict(clip_norm=2.0, log_every=3, steps_per_loop=2, on_nonfinite="skip", precision=precision)
    trainer = distloop.Trainer(model_fn, on(replicas, **settings))
    seen = looks(trainer, data, 12, 3, lambda report: report.metrics["clipped_share"])
    assert seen == pytest.approx([1 / 3, 1 / 2, 0.0, 1.0])
    assert float(trainer.model["weight"].numpy()) == pytest.approx(-(1 + 2 + 2) - (2 + 0.5) - (1 - 1 + 2) - (2 + 2))


def test_nothing_is_clipped_without_a_norm():
    model_fn, data = steps_of_norms(1.0, 300.0)
    trainer = distloop.Trainer(model_fn, on(1))
    assert "clipped_share" not in trainer.fit(data, steps=2)
    assert float(trainer.model["weight"].numpy()) == -301.0


@pytest.mark.wide
def test_several_updates_report_a_clipped_share_each():
    def model_fn():
        a, b = tf.Variable(0.0), tf.Variable(0.0)
        losses = {
            "a": lambda batch, training: {"loss": a * batch},
            "b": lambda batch, training: {"loss": 2 * b * batch},
        }
        updates = [distloop.Update(name, losses[name], rate(1.0)(), [v]) for name, v in (("a", a), ("b", b))]
        return distloop.ModelSpec([a, b], updates=updates)

    found = distloop.Trainer(model_fn, on(2, clip_norm=1.5)).fit(steps_of_norms(1.0, 2.0)[1], steps=2)
    assert (found["a/clipped_share"], found["b/clipped_share"]) == (0.5, 1.0)
    assert "clipped_share" not in found


def test_actions_hand_numbers_on_in_order_and_can_stop_the_run():
    calls = []

    def add(report):
        calls.append(report.step)
        return {"mine": report.step * 10.0}

    def stop(report):
        if report.metrics["mine"] >= 40:
            raise distloop.StopTraining("enough")

    trainer = distloop.Trainer(classifier(), on(1))
    found = trainer.fit(batches(), steps=20, actions=[every(2, add), every(4, stop)])
    assert calls == [2, 4] and trainer.step == 4
    assert found["mine"] == 40.0


def test_stop_early_ends_a_run_that_gets_no_better():
    trainer = distloop.Trainer(classifier(optimizer=rate(0.0)), on(1, eval_every=2))
    trainer.fit(batches(), steps=100, evals={"test": batches()}, actions=[distloop.StopEarly("test/loss", patience=2)])
    assert trainer.step == 6


def test_a_run_leaves_its_files_and_without_a_workdir_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(2).evaluate(batches())
    assert os.listdir(tmp_path) == []
    trainer = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path / "run"), log_every=2))
    assert not (tmp_path / "run").exists()
    trainer.fit(batches(), steps=5, evals={"test": batches()})
    assert files_of(tmp_path / "run") == FILES_OF_A_RUN
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [2, 4, 5]
    assert "test/accuracy" in rows[-1] and "test/accuracy" not in rows[0]


@pytest.mark.wide
def test_several_trainers_work_side_by_side():
    alone = train(4, replicas=2)
    first, second = distloop.Trainer(classifier(), on(2)), distloop.Trainer(classifier(), on(1))
    data = batches()
    for steps in (1, 4):
        first.fit(data, steps=steps)
        second.fit(data, steps=steps)
    assert_equal(weights(first), weights(alone))
    assert first.evaluate(data)["loss"] == pytest.approx(second.evaluate(data)["loss"], rel=1e-5)


def test_a_strategy_object_goes_before_the_config():
    devices = [device.name for device in tf.config.list_logical_devices("CPU")[:2]]
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.HierarchicalCopyAllReduce())
    trainer = distloop.Trainer(classifier(), on(1), strategy=strategy)
    trainer.fit(batches(), steps=3)
    assert trainer.strategy is strategy and trainer.strategy.num_replicas_in_sync == 2
    for path, value in weights(train(3)).items():
        np.testing.assert_allclose(weights(trainer)[path], value, rtol=1e-5, atol=1e-6)


def test_a_function_of_the_input_context_gives_the_data():
    contexts = []

    def data_fn(context):
        contexts.append(context)
        return batches()

    trainer = distloop.Trainer(classifier(), on(1))
    trainer.fit(data_fn, steps=3)
    trainer.fit(data_fn, steps=5)
    assert [(c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync) for c in contexts] == [(1, 0, 1)]
    assert_equal(weights(trainer), weights(train(5)))


def test_a_model_without_input_shape_is_built_from_the_data():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = keras.layers.Dense(6, activation="relu"), keras.layers.Dense(4)
            self.norm = keras.layers.BatchNormalization()

        def call(self, x, training=False):
            return self.out(self.norm(self.hidden(x), training=training))

    def model_fn():
        model = Net()
        predict_fn = lambda batch: model(batch["x"], training=False)  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.Adam(0.01), loss_fn_of(model), predict_fn=predict_fn)

    for replicas in (1, 2):
        trainer = distloop.Trainer(model_fn, on(replicas))
        assert trainer.predict(batches()).shape == (67, 4)
        before = trainer.evaluate(batches())["loss"]
        trainer.fit(batches(), steps=20)
        assert trainer.evaluate(batches())["loss"] < before


def test_trainable_picks_what_trains_by_path():
    def model_fn():
        spec = classifier()()
        return distloop.ModelSpec(spec.model, spec.optimizer, spec.loss_fn, trainable="logits/")

    trainer = distloop.Trainer(model_fn, on(1))
    before = weights(trainer)
    trainer.fit(batches(), steps=3)
    after = weights(trainer)
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    assert changed == {path for path in before if "logits" in path}


@pytest.mark.wide
def test_a_loop_that_waits_for_data_does_not_hang_with_one_thread(tmp_path):
    program = """
        import time, tensorflow as tf
        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)
        import distloop
        distloop.prepare(distloop.Config(device="cpu", num_devices=2))
        from tests.problems import classification, classifier
        def slow(x):
            time.sleep(0.002)
            return x
        data = tf.data.Dataset.from_tensor_slices(classification(64))
        data = data.map(lambda r: {**r, "x": tf.ensure_shape(tf.py_function(slow, [r["x"]], tf.float32), [8])},
                        num_parallel_calls=tf.data.AUTOTUNE).batch(16)
        trainer = distloop.Trainer(classifier(), distloop.Config(device="cpu", num_devices=2))
        found = trainer.fit(data, steps=12, evals={"test": data})
        print("waited", found["input_wait"])
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    result = forked.run([tmp_path / "program.py"], env=os.environ)
    assert result.returncode == 0, result.stderr[-2000:]
    assert float(result.stdout.split()[-1]) > 0.3


# What is printed.


@pytest.mark.wide
def test_a_run_begins_with_what_it_trains_on_and_ends_with_its_numbers(tmp_path, capsys):
    workdir = str(tmp_path / "my run")
    settings = {"workdir": workdir, "average_decay": 0.9, "microbatches": 2}
    trainer = distloop.Trainer(classifier(batch_norm="local"), on(3, **settings))
    trainer.fit(batches(), steps=4, evals={"test": batches()})
    lines = capsys.readouterr().out.splitlines()
    assert lines[:8] == [
        "distloop: devices 3 replicas (CPU:0, CPU:1, CPU:2)",
        "distloop: precision float32",
        "distloop: parameters 260, of which 228 train = hidden 128 + norm 64 + logits 68",
        "distloop: global batch 16 (5 + 5 + 6)",
        "distloop: averaged weights, decay 0.9: evaluate, predict and export use them",
        "distloop: microbatches 2",
        f"distloop: workdir {workdir}",
        f"distloop: {overview._tensorboard()} --logdir '{workdir}'",
    ]
    assert lines[8] == "step 0/4  tracing the train step ..."
    assert lines[9] == "distloop: entries of each batch that no loss_fn reads: weight (loaded all the same)"
    assert lines[10].startswith("step 4/4  loss ")
    assert lines[11].startswith("distloop: Finished 4 steps in ")
    last = ["test/loss", "test/accuracy", "loss", "accuracy", "time:", "busy"]
    assert [line.split()[1] for line in lines[12:18]] == last  # a slow run ends with a hint, too
    assert {"start-up", "evaluation"} <= set(re.findall(r"\d+ % ([a-z-]+)", lines[16]))  # the order depends on the time


def test_a_run_that_goes_on_ends_with_the_best_of_all(tmp_path, capsys):
    best = every(2, lambda report: {"test/score_accuracy": {2: 0.9, 4: 0.5}[report.step]})
    for steps in (2, 4):
        trainer = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path)))
        trainer.fit(batches(), steps=steps, evals={"test": batches()}, actions=[best])
    out = capsys.readouterr().out
    assert "distloop: step 2 restored from " in out
    assert "distloop: test/score_accuracy 0.5, best 0.9 at step 2" in out


def test_a_quiet_run_prints_nothing(tmp_path, capsys):
    for steps in (4, 6):
        trainer = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path), console="quiet"))
        trainer.fit(batches(), steps=steps, evals={"test": batches()})
    assert capsys.readouterr().out == ""


def test_time_between_two_loops_counts_to_the_host(capsys, monkeypatch):
    monkeypatch.setattr(timing, "VERDICT_SECS", 1000)
    seen = []

    def slow(report):
        seen.append(report.metrics["host_share"])
        time.sleep(0.3)

    distloop.Trainer(classifier(), on(1, log_every=2)).fit(batches(), steps=6, actions=[every(2, slow)])
    assert seen[0] == 0 and min(seen[1:]) > 0.5
    assert "-bound" not in capsys.readouterr().out  # the run is too short for a verdict


def test_an_evaluation_may_come_before_the_first_step(tmp_path):
    data = batches()
    trainer = distloop.Trainer(classifier(), on(1, workdir=tmp_path, eval_first=True))
    before = trainer.evaluate(data)
    trainer.fit(data, steps=2, evals={"test": data})
    first, last = distloop.read_metrics(tmp_path)
    assert first["step"] == 0 and first["test/loss"] == pytest.approx(before["loss"]) and "loss" not in first
    assert last["step"] == 2
    trainer.fit(data, steps=4, evals={"test": data})
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 2, 4]


def test_an_evaluation_may_take_some_batches_only():
    trainer = distloop.Trainer(classifier(), on(2, limit_eval_batches=2))
    first = {name: values[:32] for name, values in classification(67).items()}
    some = distloop.Trainer(classifier(), on(2)).evaluate(distloop.make_dataset(first, 16))
    assert trainer.evaluate(batches()) == pytest.approx(some)


@pytest.mark.wide
def test_the_same_batches_again_and_again_are_learned_by_heart():
    model_fn = classifier(optimizer=lambda: keras.optimizers.Adam(0.05))
    trainers = [distloop.Trainer(model_fn, on(1, overfit_batches=k, log_every=50)) for k in (1, 0)]
    first, all_of_them = (trainer.fit(batches(8, 64, shuffle=True), steps=100)["loss"] for trainer in trainers)
    assert first < 0.01 < all_of_them
