"""Resuming: a run goes on from its checkpoints as if it had not stopped."""

import contextlib
import functools
import json
import os
import shutil
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.checkpoints import store
from distloop.workdir import run_lock
from distloop.workdir.ledger import read_starts
from distloop.workdir.run_lock import RunLock
from tests.problems import (
    Lazy,
    assert_equal,
    batches,
    classification,
    classifier,
    everything,
    full_disk,
    json_lines,
    mostly_wide,
    on,
    rows_of,
    weights,
)

pytestmark = pytest.mark.slow

EVERYTHING = {"dropout": 0.5, "batch_norm": "local", "metrics": True}  # statistics, seeds and metrics
data = functools.partial(batches, shuffle=True)


def make_trainer(workdir, replicas=1, *, steps_per_log=7, model_fn=None, **settings):
    model_fn = model_fn or classifier(dropout=0.5)
    config = on(replicas, **{"workdir": str(workdir), "log_every": steps_per_log, "average_decay": 0.9, **settings})
    return distloop.Trainer(model_fn, config)


def make_full_trainer(workdir, **settings):
    return make_trainer(workdir, **{"model_fn": classifier(**EVERYTHING), **settings})


def every(steps, action):
    """Gives an action the number of steps after which it is called."""
    action.every = steps
    return action


def saved(workdir):
    return sorted(os.listdir(workdir / "checkpoints"))


def times_of(workdir):
    return {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}


@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_running_again_finishes_and_returns_the_last_numbers(replicas, tmp_path, capsys):
    first = make_full_trainer(tmp_path, replicas=replicas)
    numbers = first.fit(data(), steps=6, evals={"test": data()})
    again = make_full_trainer(tmp_path, replicas=replicas)
    assert again.fit(data(), steps=6) == numbers and "test/loss" in numbers and again.step == 6
    assert "distloop: Already at step 6 of 6: raise steps or use another workdir.\n" in capsys.readouterr().out
    assert_equal(everything(again), everything(first))
    further = make_full_trainer(tmp_path, replicas=replicas)
    further.fit(data(), steps=8)
    assert further.step == 8 and saved(tmp_path) == ["6", "8"]
    starts = read_starts(tmp_path)
    assert [(start["step"], start["devices"]) for start in starts] == [(0, replicas), (6, replicas)]
    assert starts[0]["restore_secs"] is None and starts[1]["restore_secs"] > 0
    times = further._checkpoints.times
    assert min(times.take("save_pause", "write").values()) > 0 and times.take("restore") == {} == times.take("write")


def test_the_lock_is_held_until_the_last_save_has_ended(tmp_path, monkeypatch):
    trainer = make_full_trainer(tmp_path)
    trainer.fit(data(), steps=2)
    held, write_files = [], store.write_files

    def write_slowly(*arguments):
        time.sleep(0.5)
        held.append((tmp_path / "run.lock").exists())
        write_files(*arguments)

    monkeypatch.setattr(store, "write_files", write_slowly)
    with pytest.raises(KeyboardInterrupt), trainer._checkpoints:
        trainer._checkpoints.save()
        raise KeyboardInterrupt
    assert held == [True] and not (tmp_path / "run.lock").exists()


@pytest.mark.wide
def test_restore_waits_for_a_model_that_is_not_built(tmp_path):
    def model_fn():
        model = Lazy()
        loss_fn = lambda batch, training: {"loss": model(batch["x"])[:, 0]}  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.Adam(0.1), loss_fn)

    first = make_trainer(tmp_path, model_fn=model_fn)
    first.fit(data(), steps=6)
    again = make_trainer("", model_fn=model_fn)
    again.restore(tmp_path)
    assert again.evaluate(data())["loss"] == pytest.approx(first.evaluate(data())["loss"], rel=1e-6)
    assert again.step == 6


@pytest.fixture(scope="module")
def after_six_steps(tmp_path_factory):
    """The workdir of a run of six steps; to be copied."""
    workdir = tmp_path_factory.mktemp("six")
    make_full_trainer(workdir).fit(data(), steps=6)
    return workdir


of_adamw = classifier(**EVERYTHING, optimizer=keras.optimizers.AdamW)


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(model_fn=classifier(metrics=True)), "model/net/hidden/bias is missing"),
        (dict(average_decay=0.0), "average/"),
        (dict(precision="mixed_float16"), "optimizer/loss_scale is missing"),
        (dict(model_fn=of_adamw), "optimizer/class is SGD there and AdamW here"),
    ],
)
def test_another_model_or_optimizer_is_refused_and_nothing_is_restored(change, says, tmp_path, after_six_steps):
    shutil.copytree(after_six_steps, tmp_path, dirs_exist_ok=True)
    other = make_full_trainer(tmp_path, **change)
    before = everything(other)
    for _ in range(2):
        with pytest.raises(ValueError, match="is of another model or optimizer") as caught:
            other.fit(data(), steps=8)
        assert says in str(caught.value) and "\n" not in str(caught.value)
        assert_equal(everything(other), before)
    assert saved(tmp_path) == ["6"]


@pytest.mark.wide
def test_a_run_may_go_on_with_other_metrics(tmp_path):
    make_trainer(tmp_path, model_fn=classifier()).fit(data(), steps=3)  # between two logs

    def more():
        spec = classifier()()
        loss_fn = lambda batch, training: {**spec.loss_fn(batch, training), "one": tf.ones_like(batch["weight"])}  # noqa: E731
        return distloop.ModelSpec(spec.model, spec.optimizer, loss_fn)

    assert make_trainer(tmp_path, model_fn=more).fit(data(), steps=7)["one"] == 1.0


def test_another_shape_is_refused_with_both_shapes(tmp_path):
    def model_fn(units):
        def make():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(units)])
            loss_fn = lambda batch, training: {"loss": model(batch["x"])[:, 0]}  # noqa: E731
            return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)

        return make

    make_trainer(tmp_path, model_fn=model_fn(2)).fit(data(), steps=2)
    with pytest.raises(ValueError, match=r"kernel is float32\[8, 2\] there and float32\[8, 3\] here"):
        make_trainer(tmp_path, model_fn=model_fn(3)).fit(data(), steps=4)


def test_a_new_learning_rate_goes_before_the_saved_one(tmp_path, caplog):
    def rate(value):
        return classifier(optimizer=lambda: keras.optimizers.SGD(value))

    first = make_trainer(tmp_path, model_fn=rate(0.1))
    first.fit(data(), steps=2)
    first.optimizer.learning_rate = 0.05  # an action may do that
    first.fit(data(), steps=4)
    same, other = make_trainer(tmp_path, model_fn=rate(0.1)), make_trainer(tmp_path, model_fn=rate(0.2))
    assert same.fit(data(), steps=6)["learning_rate"] == pytest.approx(0.05)
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    assert other.fit(data(), steps=6)["learning_rate"] == pytest.approx(0.2)
    assert "optimizer/learning_rate is 0.2, as model_fn says now; the checkpoint has 0.05." in caplog.text


def test_not_resuming_keeps_existing_checkpoints(tmp_path):
    make_trainer(tmp_path).fit(data(), steps=2)
    sentence = "resume=False was given, but workdir=.* holds checkpoints, the newest of step 2"
    with pytest.raises(ValueError, match=sentence):
        make_trainer(tmp_path, resume=False).fit(data(), steps=4)
    assert saved(tmp_path) == ["2"]


def test_an_early_stop_goes_on_from_its_best_value(tmp_path):
    measure = every(1, lambda report: {"score": [3.0, 1.0, 2.0, 2.0, 2.0][report.step - 1]})

    def run(steps):
        stop = distloop.StopEarly("score", mode="min", patience=100)
        trainer = make_trainer(tmp_path, steps_per_log=1, model_fn=classifier())
        trainer.fit(data(), steps=steps, actions=[measure, stop])
        return stop.best, stop.waited

    assert run(4) == (1.0, 2)
    assert run(5) == (1.0, 3)


class Counts(distloop.Action):
    """Counts its calls, and keeps the last numbers as NumPy's."""

    every = 1

    def __init__(self, name):
        self.name, self.state = name, {"calls": 0}

    def __call__(self, report):
        self.state = {"calls": self.state["calls"] + 1, "loss": np.float32(report.metrics["loss"])}

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@pytest.mark.wide
def test_states_of_actions_follow_their_names_also_after_a_refusal(tmp_path):
    first = Counts("a")
    make_trainer(tmp_path, 1, steps_per_log=1, model_fn=classifier()).fit(data(), steps=2, actions=[first])
    trainer = make_trainer(tmp_path, 1, steps_per_log=1, model_fn=classifier())
    with pytest.raises(ValueError, match="Two actions are called 'a'"):
        trainer.fit(data(), steps=3, actions=[Counts("a"), Counts("a")])
    new, again = Counts("b"), Counts("a")
    trainer.fit(data(), steps=3, actions=[new, again])
    assert [action.state["calls"] for action in (first, new, again)] == [2, 1, 3]


def other_process(workdir):
    """Writes the lock of a process that is alive, as this one's parent is."""
    with RunLock(str(workdir)):
        lock = json.loads((workdir / "run.lock").read_text())
    lock |= {"token": "another", "process": os.getppid(), "start": run_lock.start_ticks(os.getppid())}
    (workdir / "run.lock").write_text(json.dumps(lock))


def test_one_process_at_a_time_writes_to_a_workdir(tmp_path):
    first = make_trainer(tmp_path, 1, checkpoint_every=1)
    first.fit(data(), steps=2)
    assert not (tmp_path / "run.lock").exists()
    other_process(tmp_path)
    files = times_of(tmp_path)
    for write in (lambda: first.fit(data(), steps=4), first.save):
        with pytest.raises(ValueError, match=f"is being written to by process {os.getppid()} on "):
            write()
    first.restore()
    assert first.step == 2 and files == times_of(tmp_path)

    def take_over(report):
        if report.step == 3:
            other_process_lock = (tmp_path / "run.lock").read_text().replace('"token": "', '"token": "not ')
            (tmp_path / "run.lock").write_text(other_process_lock)

    os.remove(tmp_path / "run.lock")
    with pytest.raises(run_lock.LockLost, match="was taken over by"):
        first.fit(data(), steps=10, actions=[every(1, take_over)])
    assert first.step == 3 and saved(tmp_path) == ["1", "2"]
    assert (tmp_path / "run.lock").exists()


def test_a_workdir_that_moves_while_it_trains_ends_the_run_and_goes_on(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    move = every(5, lambda report: None if new.exists() else old.rename(new) and None)
    with pytest.raises(run_lock.LockLost, match="old' was moved or removed while"):
        make_trainer(old, steps_per_log=1, checkpoint_every=2).fit(data(), steps=12, actions=[move])
    assert not old.exists() and "2" in saved(new)
    make_trainer(new, steps_per_log=1, checkpoint_every=2).fit(data(), steps=12)
    assert [row["step"] for row in json_lines(new / "metrics.jsonl")] == [*range(1, 13)]


@pytest.mark.parametrize("looks_by", mostly_wide(["fit", "restore"]))
def test_a_run_that_another_process_has_trained_on_is_refused_and_stays(looks_by, tmp_path):
    first, second = make_trainer(tmp_path), make_trainer(tmp_path)
    first.fit(data(), steps=4)
    if looks_by == "restore":
        first = make_trainer(tmp_path)
        first.restore()
    second.fit(data(), steps=20)
    files = times_of(tmp_path)
    writes = [lambda: first.fit(data(), steps=8)] + [first.save] * (looks_by == "fit")
    for write in writes:
        with pytest.raises(ValueError, match="^Another process has saved 20 under workdir=.*: call restore"):
            write()
    assert files == times_of(tmp_path)
    first.restore()
    first.fit(data(), steps=24)
    assert saved(tmp_path) == ["20", "24", "4"]


@pytest.mark.wide
def test_a_run_from_an_earlier_step_leaves_later_ones_before_cutting_rows(tmp_path):
    def train(steps, restored=None, **settings):
        trainer = make_trainer(tmp_path, steps_per_log=1, keep_checkpoints=9, **settings)
        if restored is not None:
            trainer.restore(tmp_path / "checkpoints" / restored)
        trainer.fit(data(), steps=steps, actions=[every(3, fail)] if restored else [])
        return everything(trainer)

    def fail(report):
        raise RuntimeError("before the first save")

    train(8, checkpoint_every=2)
    with pytest.raises(RuntimeError, match="before the first save"):
        train(8, restored="2")
    assert saved(tmp_path) == ["2", "3", "4.abandoned", "6.abandoned", "8.abandoned"]  # step 3: after the error
    again = train(10)
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, 11))
    shutil.rmtree(tmp_path)
    assert_equal(again, train(10))


def generated():
    rows = classification(64)
    spec = {name: tf.TensorSpec([None, *value.shape[1:]], value.dtype) for name, value in rows.items()}

    def batches():
        for start in range(0, 64, 16):
            yield {name: value[start : start + 16] for name, value in rows.items()}

    return tf.data.Dataset.from_generator(batches, output_signature=spec)


@pytest.mark.wide
def test_a_dataset_that_python_makes_goes_on_where_it_was(tmp_path):
    def run(workdir, steps):
        trainer = make_trainer(workdir, 1, model_fn=classifier())
        trainer.fit(generated(), steps=steps)
        return everything(trainer)

    run(tmp_path, 7)
    assert_equal(run(tmp_path, 12), run("", 12))


def test_save_needs_a_place_and_something_to_save(tmp_path):
    with pytest.raises(ValueError, match="save needs a workdir"):
        make_trainer("").save()
    with pytest.raises(ValueError, match="call fit first"):
        make_trainer(tmp_path).save()
    with pytest.raises(ValueError, match="There is no checkpoint in"):
        make_trainer(tmp_path).restore()


def test_a_full_disk_stops_no_training_but_is_an_error_at_the_end(tmp_path, caplog, capsys):
    trainer = make_trainer(tmp_path, checkpoint_every=2, keep_checkpoints=1)
    trainer.fit(data(), steps=2)
    with contextlib.ExitStack() as stack:
        fill = every(3, lambda report: stack.enter_context(full_disk()) if report.step == 3 else None)
        with pytest.raises(OSError, match=r"could not be written to '.*checkpoints' \(File too large\): make room"):
            trainer.fit(data(), steps=7, actions=[fill])
    assert trainer.step == 7 and saved(tmp_path) == ["2"]
    assert caplog.text.count("could not be written (File too large)") == 3
    make_trainer(tmp_path, checkpoint_every=2).fit(data(), steps=7)
    assert saved(tmp_path) == ["4", "6", "7"]


def test_checkpoints_that_stay_have_their_own_steps_and_outlive_later_runs(tmp_path):
    data_of_4_batches = {name: rows[:64] for name, rows in classification().items()}
    for steps, every_few in ((10, "1 epoch"), (13, 0), (18, 6)):
        trainer = make_trainer(tmp_path, keep_checkpoints=1, checkpoint_every=5, keep_every=every_few, batch_size=16)
        trainer.fit(data_of_4_batches, steps=steps)
    assert saved(tmp_path) == ["18", "4", "8"]  # 18 is the newest, and one that stays
    make_trainer(tmp_path, keep_checkpoints=1, batch_size=16).fit(data_of_4_batches, steps=20)
    assert saved(tmp_path) == ["18", "20", "4", "8"]


@pytest.mark.wide
def test_the_best_are_kept_beside_the_newest(tmp_path):
    values = {2: 0.1, 4: 0.7, 6: 0.5, 8: 0.2, 10: 0.3, 12: 0.25}
    measure = every(2, lambda report: {"score": values[report.step]} if report.step in values else {})
    for steps in (7, 12):
        trainer = make_trainer(tmp_path, keep_checkpoints=1, checkpoint_every=3)
        trainer.fit(data(), steps=steps, actions=[measure, distloop.SaveBest("score", mode="max", keep=2)])
    assert saved(tmp_path) == ["12", "4", "6", "best.json"]
    assert sorted(json.loads((tmp_path / "checkpoints" / "best.json").read_text())["score"]) == [4, 6]
    make_trainer(tmp_path, keep_checkpoints=1).fit(data(), steps=13)  # without it, they stay
    assert saved(tmp_path) == ["13", "4", "6", "best.json"]
    trainer.restore(tmp_path / "checkpoints" / "4")
    assert trainer.step == 4


def test_the_best_of_another_workdir_is_restored_by_its_name(tmp_path):
    measure = every(2, lambda report: {"score": float(report.step == 4)})
    actions = [measure, distloop.SaveBest("score", mode="max")]
    make_trainer(tmp_path / "a", checkpoint_every=2).fit(data(), steps=8, actions=actions)
    for path, which, step in ((tmp_path / "a", "best", 4), (tmp_path / "a", "newest", 8), ("best", "newest", None)):
        other = make_trainer(tmp_path / "b")
        if step is None:
            with pytest.raises(ValueError, match="best"):
                other.restore(path, which=which)
        else:
            other.restore(path, which=which)
            assert other.step == step
    with pytest.raises(ValueError, match="which='last'; it takes 'newest' or 'best'."):
        other.restore(tmp_path / "a", which="last")
    again = make_trainer(tmp_path / "a")
    again.restore(which="best")
    assert again.step == 4


def test_the_best_is_restored_at_the_end_and_the_run_goes_on_from_either(tmp_path):
    def make(workdir):
        return make_trainer(workdir, 1, model_fn=classifier(dropout=0.5), checkpoint_every=2)

    measure = every(2, lambda report: {"score": float(report.step == 4)})
    settings = {"actions": [measure, distloop.SaveBest("score", mode="max", restore=True)]}
    undisturbed, trainer, dataset = make(""), make(tmp_path), data()
    undisturbed.fit(dataset, steps=4)
    at_4 = weights(undisturbed)
    undisturbed.fit(dataset, steps=7)
    dataset = data()
    for steps in (6, 6, 7):  # nothing is left for the second call, which restores the best again
        trainer.fit(dataset, steps=steps, **settings)
        assert trainer.step == 4
        assert_equal(weights(trainer), at_4)
    assert saved(tmp_path) == ["4", "6", "7", "best.json"]
    trainer.restore()
    assert_equal(weights(trainer), weights(undisturbed))
    trainer.restore("best")
    trainer.save()  # with the place in the data that belongs to step 4
    assert saved(tmp_path) == ["4", "6.abandoned", "7.abandoned", "best.json"]
    again = make(tmp_path)
    again.fit(data(), steps=7)
    assert_equal(weights(again), weights(undisturbed))


@pytest.mark.parametrize("console", ["lines", "quiet"])
def test_a_save_of_the_best_that_is_shown_leaves_the_end_of_the_run(console, tmp_path, capsys):
    measure = every(2, lambda report: {"score": float(report.step == 4)})
    settings = {"actions": [measure, distloop.SaveBest("score", mode="max", restore=True)]}
    undisturbed, dataset = make_trainer(""), data()
    undisturbed.fit(dataset, steps=8)
    trainer, dataset = make_trainer(tmp_path, checkpoint_every=2, console=console), data()
    for steps in (6, 6):  # nothing is left for the second call
        trainer.fit(dataset, steps=steps, **settings)
        capsys.readouterr()
        trainer.save()
        shown = "the model shows the best checkpoint, of step 4"
        line = f"distloop: warning: Nothing saved: {shown}; the run goes on from step 6, which is saved.\n"
        assert capsys.readouterr() == ("", line)
        assert saved(tmp_path) == ["2", "4", "6", "best.json"] and trainer.step == 4
    trainer.fit(dataset, steps=8)
    assert_equal(weights(trainer), weights(undisturbed))
    trainer.save()
    assert saved(tmp_path) == ["4", "6", "8", "best.json"]


def test_weights_that_are_loaded_over_the_best_are_saved(tmp_path):
    trainer = make_trainer(tmp_path, steps_per_log=2)
    trainer.fit(data(), steps=4, actions=[distloop.SaveBest("loss", restore=True)])
    trainer.export(tmp_path / "other.npz")
    with np.load(tmp_path / "other.npz") as values:
        np.savez(tmp_path / "zeros.npz", **{name: 0 * value for name, value in values.items()})
    trainer.restore(tmp_path / "zeros.npz")
    loaded = weights(trainer)
    assert not loaded["net/hidden/kernel"].any()
    trainer.save()
    again = make_trainer(tmp_path)
    again.restore()
    assert_equal(weights(again), loaded)


def test_portable_names_hold_where_keras_counts_on(tmp_path):
    def model_fn():
        layers = [keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        loss_fn = lambda batch, training: {"loss": model(batch["x"], training=training)[:, 0]}  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.Adam(0.1), loss_fn)

    first = make_trainer(tmp_path, model_fn=model_fn)
    first.fit(data(), steps=3)
    again = make_trainer(tmp_path, model_fn=model_fn)  # its layers have other names
    assert again.model.layers[0].name != first.model.layers[0].name
    again.fit(data(), steps=3)
    for variable, expected in zip(again.model.variables, first.model.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), expected.numpy())
    names = [name for name, _ in tf.train.list_variables(str(tmp_path / "checkpoints" / "3" / "variables"))]
    assert "model/sequential/dense_1/kernel" in names and "optimizer/momentum/sequential/dense/bias" in names


def test_a_run_without_a_checkpoint_says_that_it_starts_over(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 70, "time": 1.0, "loss": 0.5}\n')
    make_trainer(tmp_path, checkpoint_every="1 h").fit(data(), steps=1)
    said = "distloop: No checkpoint to resume from: starting over at step 0. Earlier rows: "
    assert f"{said}{tmp_path}/metrics.jsonl.1.\n" in capsys.readouterr().out
    assert saved(tmp_path) == ["1"]


def test_a_run_that_an_action_ended_is_over(tmp_path, capsys):
    def fit(steps, stop_at=12):
        def stop(report):
            if report.step == stop_at:
                raise distloop.StopTraining("it is good enough")

        trainer = make_trainer(tmp_path)
        trainer.fit(data(), steps=steps, actions=[every(4, stop)])
        return trainer.step

    assert fit(40) == 12
    capsys.readouterr()
    assert fit(40, stop_at=None) == 12
    said = "distloop: Stopped at step 12 before (it is good enough): raise steps or use another workdir.\n"
    assert said in capsys.readouterr().out
    assert fit(44, stop_at=None) == 44
    assert fit(44, stop_at=None) == 44


def test_a_restored_run_goes_on_and_shuffles_as_it_did(tmp_path):
    straight = make_full_trainer(tmp_path / "straight")
    straight.fit(data(), steps=30)
    there_and_back = make_full_trainer(tmp_path / "back", keep_checkpoints=9, checkpoint_every=7)
    there_and_back.fit(dataset := data(), steps=21)
    at_21 = everything(there_and_back)
    there_and_back.restore(tmp_path / "back" / "checkpoints" / "14")
    assert there_and_back.step == 14
    there_and_back.restore()
    assert_equal(everything(there_and_back), at_21)
    there_and_back.restore(tmp_path / "back" / "checkpoints" / "14")
    there_and_back.fit(dataset, steps=30)
    assert_equal(everything(there_and_back), everything(straight))


def test_a_run_whose_metric_was_never_a_number_ends_with_its_last_weights(tmp_path, caplog):
    measure = every(2, lambda report: {"score": np.nan})
    trainer = make_trainer(tmp_path, steps_per_log=2)
    actions = [measure, distloop.SaveBest("score", mode="min", restore=True)]
    for _ in range(2):  # nothing is left for the second call
        assert trainer.fit(data(), steps=4, actions=actions)["loss"] > 0 and trainer.step == 4
    assert caplog.text.count("No best checkpoint of 'score' is kept in") == 2


class Killed(Exception):
    """Ends a run as no signal does."""


def numbered(rows, seed):
    return data(8, rows, seed=seed)


def of_tf_data(rows, seed):
    return tf.data.Dataset.from_tensor_slices(classification(rows)).shuffle(rows, seed=seed).batch(8)


@pytest.mark.parametrize("make_data", mostly_wide([numbered, of_tf_data]))
@pytest.mark.parametrize("last_step", mostly_wide([4, 5]))
def test_a_program_that_died_before_its_second_save_begins_the_second_data(make_data, last_step, tmp_path):
    def die(report):
        if report.step == last_step:
            raise Killed

    def program(workdir, *, dies=False):
        trainer = make_trainer(workdir, steps_per_log=2)
        trainer.fit(make_data(67, 1), steps=4, actions=[distloop.SaveBest("loss")])
        if dies and last_step == 4:
            raise Killed
        actions = [distloop.SaveBest("loss", mode="max"), *([every(1, die)] if dies else [])]
        return trainer, trainer.fit(make_data(50, 3), steps=11, actions=actions)

    expected, numbers = program(tmp_path / "whole")
    with pytest.raises(Killed):
        program(tmp_path / "parts", dies=True)
    resumed, numbers_of_resumed = program(tmp_path / "parts")
    assert_equal(everything(resumed), everything(expected))
    assert seen_in(numbers_of_resumed).items() >= seen_in(numbers).items()  # the boundary of the error is called again


def seen_in(numbers):
    return dict(zip(numbers.steps["examples_seen"], numbers.history["examples_seen"], strict=True))


@pytest.mark.wide
def test_the_second_of_two_fits_begins_its_data_after_the_firsts_best(tmp_path):
    def program(workdir, restore):
        trainer = make_trainer(workdir, steps_per_log=2)
        trainer.fit(numbered(67, 1), steps=4, actions=[distloop.SaveBest("loss", restore=restore)])
        trainer.fit(numbered(50, 3), steps=7)
        return everything(trainer)

    assert_equal(program(tmp_path / "shown", True), program(tmp_path / "plain", False))


def test_a_program_that_changes_its_directory_goes_on_in_the_same_workdir(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer("run", checkpoint_every=2)
    os.chdir("elsewhere")
    trainer.fit(data(), steps=4)
    assert saved(tmp_path / "run") == ["2", "4"] and not os.listdir(".")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["workdir"] == str(tmp_path / "run")
