"""Tests the user's verbs, as a user meets them."""

import json
import os
import re
import textwrap
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.training import overview
from tests import forked
from tests.problems import (
    FILES_OF_A_RUN,
    assert_equal,
    classification,
    classifier,
    everything,
    files_of,
    mostly_wide,
    on,
    weights,
)


def batches(size=16, rows=67, **arguments):
    return distloop.make_dataset(classification(rows), size, **arguments)


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


@pytest.mark.slow
def test_a_second_fit_on_the_same_dataset_goes_on_where_the_first_stopped():
    data = batches(shuffle=True)
    whole = distloop.Trainer(classifier(), on(1))
    whole.fit(data, steps=9)
    parts = distloop.Trainer(classifier(), on(1))
    data = batches(shuffle=True)
    for steps in (2, 7, 9):
        parts.fit(data, steps=steps)
    assert_equal(weights(parts), weights(whole))


@pytest.mark.slow
def test_another_dataset_starts_at_its_beginning():
    seen = []

    def model_fn():
        weight = tf.Variable(0.0)
        return distloop.ModelSpec(
            [weight], keras.optimizers.SGD(0.0), lambda batch, training: {"loss": weight * 0 + batch, "row": batch}
        )

    trainer = distloop.Trainer(model_fn, on(1, log_every=1))
    look = lambda report: seen.append(report.metrics["row"])  # noqa: E731
    look.every = 1
    data = [
        tf.data.Dataset.from_tensor_slices(np.arange(start, start + 3, dtype=np.float32)).batch(1) for start in (0, 10)
    ]
    trainer.fit(data[0], steps=2, actions=[look])
    trainer.fit(data[0], steps=4, actions=[look])
    trainer.fit(data[1], steps=5, actions=[look])
    assert seen == [0, 1, 2, 0, 10]


@pytest.mark.slow
def test_epochs_are_passes_over_the_dataset():
    trainer = distloop.Trainer(classifier(), on(1, epochs=2))
    trainer.fit(batches(16, 67))
    assert trainer.step == 10
    unknown = batches(16, 67).filter(lambda batch: True)
    assert unknown.cardinality() == tf.data.UNKNOWN_CARDINALITY
    trainer.fit(unknown, epochs=3)
    assert trainer.step == 15


@pytest.mark.slow
def test_what_fit_is_given_goes_before_the_config():
    trainer = distloop.Trainer(classifier(), on(1, epochs=50))
    trainer.fit(batches(), steps=3)
    assert trainer.step == 3


@pytest.mark.slow
def test_training_values_are_means_over_the_window_since_the_last_log():
    rows = {"x": np.arange(12, dtype=np.float32), "w": np.arange(12, dtype=np.float32) % 3}
    seen = []

    def model_fn():
        weight = tf.Variable(1.0)

        def loss_fn(batch, training):
            value = batch["x"] + 0.0 * weight
            return {"loss": value, "weighted": distloop.weighted(value, batch["w"])}

        return distloop.ModelSpec({"weight": weight}, keras.optimizers.SGD(1.0), loss_fn)

    trainer = distloop.Trainer(model_fn, on(2, log_every=2, steps_per_loop=1))
    look = lambda report: seen.append(dict(report.metrics))  # noqa: E731
    look.every = 2
    trainer.fit(distloop.make_dataset(rows, 3), steps=4, actions=[look])
    for found, part in zip(seen, (slice(0, 6), slice(6, 12)), strict=True):
        assert found["loss"] == pytest.approx(rows["x"][part].mean())
        assert found["weighted"] == pytest.approx(np.average(rows["x"][part], weights=rows["w"][part]))


@pytest.mark.slow
def test_keras_metrics_of_training_are_those_of_the_window():
    rows = classification(64)
    trainer = distloop.Trainer(
        classifier(optimizer=lambda: keras.optimizers.SGD(0.0), metrics=True), on(1, log_every=2)
    )
    found = []
    look = lambda report: found.append(report.metrics["auc"])  # noqa: E731
    look.every = 2
    trainer.fit(distloop.make_dataset(rows, 16), steps=4, actions=[look])
    probability = tf.nn.softmax(trainer.model(rows["x"])).numpy()[:, 0]
    for value, part in zip(found, (slice(0, 32), slice(32, 64)), strict=True):
        auc = keras.metrics.AUC(num_thresholds=50)
        auc.update_state(rows["label"][part] == 0, probability[part])
        assert value == pytest.approx(float(auc.result()), rel=1e-6)


@pytest.mark.slow
def test_reports_hold_the_standard_names():
    slow = classifier(l2=0.1, optimizer=lambda: keras.optimizers.SGD(0.01))
    trainer = distloop.Trainer(slow, on(2, clip_norm=1.0))
    found = trainer.fit(batches(), steps=4, evals={"test": batches()})
    names = "loss accuracy regularization learning_rate gradient_norm clipped_share skipped_steps"
    names += " weight_norm steps_per_sec examples_per_sec input_wait host_share examples_seen epochs_seen"
    names += " step_secs_p50 step_secs_p90 step_secs_p99 replica_imbalance host_memory_gb cpu_utilization"
    names += " model_flops_per_sec"
    assert (
        set(names.split()) | {"test/loss", "test/accuracy", "test/regularization"} >= set(found) >= set(names.split())
    )
    assert all(isinstance(value, float) for value in found.values())
    assert 0 <= found["input_wait"] <= 1 and 0 <= found["host_share"] <= 1 and found["steps_per_sec"] > 0
    kernel = trainer.model.layers[0].kernel.numpy()
    assert trainer.evaluate(batches())["loss"] == found["test/loss"]
    assert found["regularization"] == pytest.approx(0.1 * (kernel**2).sum(), rel=0.2)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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

    def model_fn():
        weight = tf.Variable(0.0)
        return distloop.ModelSpec(
            {"weight": weight}, keras.optimizers.SGD(1.0), lambda batch, training: {"loss": weight * batch}
        )

    return model_fn, tf.data.Dataset.from_tensor_slices(np.repeat(np.float32(norms), 2)).batch(2)


@pytest.mark.slow
@pytest.mark.parametrize("precision", mostly_wide(["float32", "mixed_float16"]))
@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_clipped_share_is_the_share_of_applied_steps_that_were_clipped_since_the_last_log(replicas, precision):
    model_fn, data = steps_of_norms(1.0, 3.0, 2.0, np.nan, 5.0, 0.5, 1.0, -1.0, 2.0, 3.0, np.inf, 4.0)
    settings = dict(clip_norm=2.0, log_every=3, steps_per_loop=2, on_nonfinite="skip", precision=precision)
    trainer = distloop.Trainer(model_fn, on(replicas, **settings))
    seen = []
    look = lambda report: seen.append(report.metrics["clipped_share"])  # noqa: E731
    look.every = 3
    trainer.fit(data, steps=12, actions=[look])
    assert seen == pytest.approx([1 / 3, 1 / 2, 0.0, 1.0])
    assert float(trainer.model["weight"].numpy()) == pytest.approx(-(1 + 2 + 2) - (2 + 0.5) - (1 - 1 + 2) - (2 + 2))


@pytest.mark.slow
def test_nothing_is_clipped_without_a_norm():
    model_fn, data = steps_of_norms(1.0, 300.0)
    trainer = distloop.Trainer(model_fn, on(1))
    assert "clipped_share" not in trainer.fit(data, steps=2)
    assert float(trainer.model["weight"].numpy()) == -301.0


@pytest.mark.wide
@pytest.mark.slow
def test_several_updates_report_a_clipped_share_each():
    def model_fn():
        a, b = tf.Variable(0.0), tf.Variable(0.0)
        updates = [
            distloop.Update("a", lambda batch, training: {"loss": a * batch}, keras.optimizers.SGD(1.0), [a]),
            distloop.Update("b", lambda batch, training: {"loss": 2.0 * b * batch}, keras.optimizers.SGD(1.0), [b]),
        ]
        return distloop.ModelSpec([a, b], updates=updates)

    found = distloop.Trainer(model_fn, on(2, clip_norm=1.5)).fit(steps_of_norms(1.0, 2.0)[1], steps=2)
    assert (found["a/clipped_share"], found["b/clipped_share"]) == (0.5, 1.0)
    assert "clipped_share" not in found


@pytest.mark.slow
def test_actions_hand_numbers_on_in_order_and_can_stop_the_run():
    calls = []

    def add(report):
        calls.append(report.step)
        return {"mine": report.step * 10.0}

    def stop(report):
        if report.metrics["mine"] >= 40:
            raise distloop.StopTraining("enough")

    add.every, stop.every = 2, 4
    trainer = distloop.Trainer(classifier(), on(1, log_every=0))
    found = trainer.fit(batches(), steps=20, actions=[add, stop])
    assert calls == [2, 4] and trainer.step == 4
    assert found["mine"] == 40.0


@pytest.mark.slow
def test_stop_early_ends_a_run_that_gets_no_better():
    trainer = distloop.Trainer(classifier(optimizer=lambda: keras.optimizers.SGD(0.0)), on(1, eval_every=2))
    trainer.fit(batches(), steps=100, evals={"test": batches()}, actions=[distloop.StopEarly("test/loss", patience=2)])
    assert trainer.step == 6


@pytest.mark.slow
def test_a_run_leaves_its_files(tmp_path):
    trainer = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path / "run"), log_every=2))
    assert not (tmp_path / "run").exists()
    trainer.fit(batches(), steps=5, evals={"test": batches()})
    assert files_of(tmp_path / "run") == FILES_OF_A_RUN
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 5]
    assert "test/accuracy" in rows[-1] and "test/accuracy" not in rows[0]


@pytest.mark.slow
def test_nothing_is_written_without_a_workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = distloop.Trainer(classifier(), on(1))
    trainer.fit(batches(), steps=2)
    trainer.evaluate(batches())
    assert os.listdir(tmp_path) == []


@pytest.mark.wide
@pytest.mark.slow
def test_several_trainers_work_side_by_side():
    alone = distloop.Trainer(classifier(), on(2))
    alone.fit(batches(), steps=4)
    first, second = distloop.Trainer(classifier(), on(2)), distloop.Trainer(classifier(), on(1))
    data = batches()
    for steps in (1, 4):
        first.fit(data, steps=steps)
        second.fit(data, steps=steps)
    assert_equal(weights(first), weights(alone))
    assert first.evaluate(data)["loss"] == pytest.approx(second.evaluate(data)["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_strategy_object_goes_before_the_config():
    devices = [device.name for device in tf.config.list_logical_devices("CPU")[:2]]
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.HierarchicalCopyAllReduce())
    trainer = distloop.Trainer(classifier(), on(1), strategy=strategy)
    trainer.fit(batches(), steps=3)
    assert trainer.strategy is strategy and trainer.strategy.num_replicas_in_sync == 2
    expected = distloop.Trainer(classifier(), on(1))
    expected.fit(batches(), steps=3)
    for path, value in weights(expected).items():
        np.testing.assert_allclose(weights(trainer)[path], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_function_of_the_input_context_gives_the_data():
    contexts = []

    def data_fn(context):
        contexts.append(context)
        return batches()

    trainer = distloop.Trainer(classifier(), on(1))
    trainer.fit(data_fn, steps=3)
    trainer.fit(data_fn, steps=5)
    assert [(c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync) for c in contexts] == [(1, 0, 1)]
    expected = distloop.Trainer(classifier(), on(1))
    expected.fit(batches(), steps=5)
    assert_equal(weights(trainer), weights(expected))


@pytest.mark.slow
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

        def loss_fn(batch, training):
            logits = model(batch["x"], training=training)
            return {"loss": keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)}

        return distloop.ModelSpec(
            model, keras.optimizers.Adam(0.01), loss_fn, predict_fn=lambda batch: model(batch["x"], training=False)
        )

    for replicas in (1, 2):
        trainer = distloop.Trainer(model_fn, on(replicas))
        assert trainer.predict(batches()).shape == (67, 4)
        before = trainer.evaluate(batches())["loss"]
        trainer.fit(batches(), steps=20)
        assert trainer.evaluate(batches())["loss"] < before


@pytest.mark.slow
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
@pytest.mark.slow
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
    result = forked.run([tmp_path / "program.py"], env=os.environ, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    assert float(result.stdout.split()[-1]) > 0.3


# What is printed.


@pytest.mark.wide
@pytest.mark.slow
def test_a_run_begins_with_what_it_trains_on_and_ends_with_its_numbers(tmp_path, capsys):
    workdir = str(tmp_path / "my run")
    settings = {"workdir": workdir, "average_decay": 0.9, "microbatches": 2}
    trainer = distloop.Trainer(classifier(batch_norm="local"), on(3, **settings))
    trainer.fit(batches(16), steps=4, evals={"test": batches()})
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
    assert [line.split()[1] for line in lines[12:]] == last
    assert re.match(r"distloop: time: \d+ % start-up, \d+ % ", lines[-2]) and len(lines[-2]) <= 100


@pytest.mark.slow
def test_a_run_that_goes_on_ends_with_the_best_of_all(tmp_path, capsys):
    def best(report):
        return {"test/score_accuracy": {2: 0.9, 4: 0.5}[report.step]}

    best.every = 2
    for steps in (2, 4):
        trainer = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path)))
        trainer.fit(batches(), steps=steps, evals={"test": batches()}, actions=[best])
    out = capsys.readouterr().out
    assert "distloop: step 2 restored from " in out
    assert "distloop: test/score_accuracy 0.5, best 0.9 at step 2" in out


@pytest.mark.slow
def test_a_quiet_run_prints_nothing(tmp_path, capsys):
    trainer = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path), console="quiet"))
    trainer.fit(batches(), steps=4, evals={"test": batches()})
    again = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path), console="quiet"))
    again.fit(batches(), steps=6)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_time_between_two_loops_counts_to_the_host(capsys):
    seen = []

    def slow(report):
        seen.append(report.metrics["host_share"])
        time.sleep(0.3)

    slow.every = 2
    trainer = distloop.Trainer(classifier(), on(1, log_every=2))
    trainer.fit(batches(), steps=6, actions=[slow])
    assert seen[0] == 0 and min(seen[1:]) > 0.5
    assert "-bound" not in capsys.readouterr().out  # the run is too short for a verdict


@pytest.mark.slow
def test_an_evaluation_may_come_before_the_first_step(tmp_path):
    data = batches()
    trainer = distloop.Trainer(classifier(), on(1, workdir=tmp_path, eval_first=True))
    before = trainer.evaluate(data)
    trainer.fit(data, steps=2, evals={"test": data})
    first, last = distloop.read_metrics(tmp_path)
    assert first["step"] == 0 and first["test/loss"] == pytest.approx(before["loss"]) and "loss" not in first
    assert last["step"] == 2
    trainer.fit(data, steps=4, evals={"test": data})
    assert [row["step"] for row in distloop.read_metrics(tmp_path)] == [0, 2, 4]


@pytest.mark.slow
def test_an_evaluation_may_take_some_batches_only():
    rows = classification(67)
    trainer = distloop.Trainer(classifier(), on(2, limit_eval_batches=2))
    first = {name: values[:32] for name, values in rows.items()}
    some = distloop.Trainer(classifier(), on(2)).evaluate(distloop.make_dataset(first, 16))
    assert trainer.evaluate(distloop.make_dataset(rows, 16)) == pytest.approx(some)


@pytest.mark.slow
def test_an_epoch_may_take_some_batches_only():
    trainer = distloop.Trainer(classifier(), on(1, limit_train_batches=2))
    trainer.fit(batches(), epochs=3)
    assert trainer.step == 6


@pytest.mark.wide
@pytest.mark.slow
def test_the_same_batches_again_and_again_are_learned_by_heart():
    model_fn = classifier(optimizer=lambda: keras.optimizers.Adam(0.05))
    losses = []
    for k in (1, 0):
        trainer = distloop.Trainer(model_fn, on(1, overfit_batches=k, log_every=50))
        losses.append(trainer.fit(batches(8, rows=64, shuffle=True), steps=100)["loss"])
    assert losses[0] < 0.01 < losses[1]
