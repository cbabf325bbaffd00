"""Evaluating the checkpoints of a run that another process trains."""

import json
import os
import textwrap
import types

import pytest
import tensorflow as tf

import distloop
from distloop.checkpoints.store import Checkpoints
from distloop.sidecar import following
from tests import forked
from tests.problems import batches, classification, classifier, on, refused


def trainer_of(workdir, **settings):
    return distloop.Trainer(classifier(), on(1, workdir=str(workdir), **settings))


def rows_of(workdir, name):
    return [json.loads(line) for line in (workdir / "evaluations" / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_second_process_evaluates_each_checkpoint_once(tmp_path):
    program = """
        import sys
        import distloop
        from tests.problems import classification, classifier, on

        data = distloop.make_dataset(classification(33, seed=1), 8)
        trainer = distloop.Trainer(classifier(), on(1, workdir=sys.argv[1], average_decay=0.9))
        found = trainer.evaluate_checkpoints(data, poll_secs=0.05, timeout_secs=60)
        print("measured", sorted(found))
    """
    (tmp_path / "sidecar.py").write_text(textwrap.dedent(program))
    workdir = tmp_path / "run"
    command = [tmp_path / "sidecar.py", workdir]
    logs = {"stdout": tmp_path / "out.txt", "stderr": tmp_path / "errors.txt"}
    sidecar = forked.Program(command, **logs, env=os.environ)
    training = """
        import json
        import sys
        import time
        import distloop
        from tests.problems import classification, classifier, on

        def note(report):
            measured[report.step] = report.metrics["test/loss"]
            time.sleep(0.5)

        measured, note.every = {}, 10
        evaluation = distloop.make_dataset(classification(33, seed=1), 8)
        config = on(1, workdir=sys.argv[1], average_decay=0.9, checkpoint_every=10, eval_every=10)
        data = distloop.make_dataset(classification(67), 16)
        distloop.Trainer(classifier(), config).fit(data, steps=45, evals={"test": evaluation}, actions=[note])
        print(json.dumps(measured))
    """
    (tmp_path / "training.py").write_text(textwrap.dedent(training))  # a new process, too: bits are compared
    trained = forked.run([tmp_path / "training.py", workdir], env=os.environ)
    measured = {int(step): loss for step, loss in json.loads(trained.stdout.splitlines()[-1]).items()}
    assert sidecar.wait(100) == 0 and "measured" in logs["stdout"].read_text(), logs["stderr"].read_text()
    rows = rows_of(workdir, "test")
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)) and steps[-1] == 45 and set(steps) <= {10, 20, 30, 40, 45}
    assert {row["step"]: row["test/loss"] for row in rows} == {step: measured[step] for step in steps}
    again = forked.run(command, env=os.environ)
    kept = {int(name) for name in os.listdir(workdir / "checkpoints")}
    assert again.stdout.strip().endswith(f"measured {sorted(kept - set(steps))}")


@pytest.mark.slow
def test_a_second_process_under_the_name_of_an_evaluation_is_refused(tmp_path):
    trainer_of(tmp_path).fit(batches(), steps=4)
    first, second = trainer_of(tmp_path), trainer_of(tmp_path)
    evaluate, refusals = first._eval_loop.evaluate, []

    def also(*args):
        with pytest.raises(ValueError, match="^name='test' was given .* another process writes its rows .*other name"):
            second.evaluate_checkpoints(batches())
        refusals.append(1)
        assert list(second.evaluate_checkpoints(batches(), name="other")) == [4]
        return evaluate(*args)

    first._eval_loop.evaluate = also
    assert list(first.evaluate_checkpoints(batches())) == [4] and refusals
    assert sorted(os.listdir(tmp_path / "evaluations")) == ["other.jsonl", "test.jsonl"]  # no lock is left


@pytest.mark.slow
def test_following_a_run_that_stands_still_times_out_with_its_last_row(tmp_path, monkeypatch):
    with pytest.raises(SystemExit):
        trainer_of(tmp_path, max_secs=1e-6, steps_per_loop=5).fit(batches(), steps=40)
    other, rows = trainer_of(tmp_path), []
    follow = following._follow

    def watched(*args):
        for saved in follow(*args):
            yield saved
            rows.extend(rows_of(tmp_path, "test"))

    monkeypatch.setattr(following, "_follow", watched)
    with pytest.raises(TimeoutError, match="No checkpoint came to .* for 0.3 seconds"):
        other.evaluate_checkpoints(batches(), poll_secs=0.05, timeout_secs=0.3)
    assert rows[0]["step"] == other.step == 5
    with pytest.raises(ValueError, match="no checkpoints to follow"):
        trainer_of("").evaluate_checkpoints(batches())


@pytest.mark.slow
def test_each_checkpoint_of_a_run_is_measured_under_the_evaluations_name(tmp_path):
    test = distloop.make_dataset(classification(33, seed=1), 8)
    trained = trainer_of(tmp_path, checkpoint_every=5)
    trained.fit(batches(), steps=10)
    found = trainer_of(tmp_path).evaluate_checkpoints(test, name="valid", poll_secs=0.01, timeout_secs=60)
    assert list(found) == [5, 10] and found[5] != found[10] == trained.evaluate(test)
    assert {row["step"]: (row["valid/loss"], row["valid/accuracy"]) for row in rows_of(tmp_path, "valid")} == {
        step: (numbers["loss"], numbers["accuracy"]) for step, numbers in found.items()
    }
    assert any(name.startswith("events.") for name in os.listdir(tmp_path / "valid"))
    assert trainer_of(tmp_path).evaluate_checkpoints(test, name="valid", timeout_secs=60) == {}
    assert list(trainer_of(tmp_path).evaluate_checkpoints(test, timeout_secs=60)) == [5, 10]  # under the name "test"
    assert sorted(os.listdir(tmp_path / "evaluations")) == ["test.jsonl", "valid.jsonl"]


def test_a_run_in_a_bucket_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trainer = trainer_of("memory://bucket/run")
    instead = f"give {trainer.config.local_workdir!r} on the machine that trains"
    refused(lambda: trainer.evaluate_checkpoints(batches()), "workdir='memory://bucket/run'", instead)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("secs", [-1, float("nan"), 1e300, True, "5"])
@pytest.mark.parametrize("setting", ["poll_secs", "timeout_secs"])
def test_a_time_that_is_no_number_of_seconds_is_refused(setting, secs, tmp_path):
    given = {"poll_secs": 5.0, "timeout_secs": 0.0, setting: secs}
    with pytest.raises(ValueError, match=rf"evaluate_checkpoints was given {setting}=.*: give seconds, 0 or more\."):
        following.evaluate_checkpoints(None, dict, str(tmp_path), "test", **given)


@pytest.mark.parametrize("name", ["", "../metrics", "a/b", ".."])
def test_a_name_that_is_no_files_is_refused(name, tmp_path):
    trainer = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path)))
    refused(
        lambda: trainer.evaluate_checkpoints(classification(8), name=name),
        "which writes evaluations/<name>.jsonl: give a name that is not empty, begins with no dot and has no slash",
    )


def save_of_5(directory, step):
    """Saves a checkpoint of a run of 5 steps."""
    kept = Checkpoints(str(directory), 10)
    kept.save(step, {"step": tf.constant(step, tf.int64)}, {"stop_reason": None, "until": 5}, None)
    kept.wait()
    return kept


def test_the_last_checkpoint_is_read_if_it_comes_after_the_listing(tmp_path, monkeypatch):
    kept = save_of_5(tmp_path, 4)

    def look(checkpoints, steps=Checkpoints.steps.fget):
        found = steps(checkpoints)
        if checkpoints is kept and 5 not in found and seen == [4]:  # right after the second look
            monkeypatch.undo()
            save_of_5(tmp_path, 5)
        return found

    seen = []
    monkeypatch.setattr(Checkpoints, "steps", property(look))
    for saved in following._follow(kept, (), 0.01, 0.0):
        seen.append(saved.step)
    assert seen == [4, 5]


def test_a_checkpoint_that_replaces_one_that_is_done_is_read(tmp_path):
    kept = save_of_5(tmp_path, 5)
    at = os.path.getmtime(tmp_path / "5")
    steps = lambda done: [saved.step for saved in following._follow(kept, done, 0.01, 0.0)]  # noqa: E731
    assert steps({5: at + 1}) == [] and steps({5: at - 1}) == [5]
    following_it = following._follow(kept, {}, 0.01, 0.0)
    next(following_it)
    os.utime(save_of_5(tmp_path, 5).directory + "/5", (at + 2, at + 2))
    assert [saved.step for saved in following_it] == [5]


def test_using_a_checkpoint_is_no_waiting_for_the_next(tmp_path, monkeypatch):
    kept, seen, now = save_of_5(tmp_path, 4), [], [0.0]

    def sleep(secs):
        now[0] += secs
        save_of_5(tmp_path, 5)

    monkeypatch.setattr(following, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    for saved in following._follow(kept, (), 0.01, 0.3):
        seen.append(saved.step)
        now[0] += 0.4  # longer than it waits
    assert seen == [4, 5]
