"""`--evaluate` and `--predict`: a finished run from the command line of its own program."""

import hashlib
import json
import os
import pathlib
import textwrap

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.checkpoints.loading import NoBestError
from tests import forked
from tests.problems import assert_close, classification, classifier, on, refused

PROGRAM = """
    import distloop
    from absl import app
    from tests.problems import classification, classifier

    distloop.define_flags(steps=30, batch_size=16, log_every=10, eval_every=10, checkpoint_every=10, num_devices=2)

    def main(_):
        config = distloop.Config.from_flags()
        trainer = distloop.Trainer(classifier(), config)
        evals = {"test": classification(37, seed=1), "hard": classification(21, seed=2)}
        trainer.fit(classification(67), evals=evals, actions=[distloop.SaveBest("test/accuracy")])
        print("trained to step", trainer.step)

    app.run(main)
"""


def digests(root):
    """Returns a digest of each file below a directory, by its path."""
    files = [path for path in sorted(pathlib.Path(root).rglob("*")) if path.is_file()]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A function that runs the program of a finished run with more flags, and that run's workdir."""
    root = tmp_path_factory.mktemp("finished")
    (root / "program.py").write_text(textwrap.dedent(PROGRAM))

    def run(*given):
        flags = [f"--workdir={root}/run", "--device=cpu", "--console=quiet", *given]
        return forked.run([root / "program.py", *flags], env=os.environ)

    done = run()
    assert done.stdout == "trained to step 30\n", done.stderr
    return run, root / "run"


@pytest.mark.slow
@pytest.mark.parametrize("which", ["newest", "best", "10"])
def test_a_checkpoint_is_evaluated_as_when_the_run_trained(finished, which):
    run, workdir = finished
    before = digests(workdir)
    done = run(f"--evaluate={which}")
    assert done.returncode == 0 and digests(workdir) == before, done.stderr
    numbers = json.loads(done.stdout)  # nothing else is printed, and what follows fit is not reached
    rows = {row["step"]: row for row in distloop.read_metrics(workdir)}
    best = max(rows, key=lambda step: (rows[step]["test/accuracy"], -step))
    step = numbers.pop("step")
    assert step == {"newest": 30, "best": best, "10": 10}[which]
    assert set(numbers) == {"test/loss", "test/accuracy", "hard/loss", "hard/accuracy"}
    assert numbers == {name: rows[step][name] for name in numbers}


@pytest.mark.slow
def test_predictions_of_a_checkpoint_are_files_of_each_evaluation(finished, tmp_path):
    run, workdir = finished
    before = digests(workdir)
    done = run(f"--predict={tmp_path}/outputs", "--evaluate=20", "--num_devices=1")
    assert done.returncode == 0 and digests(workdir) == before, done.stderr
    numbers = json.loads(done.stdout)
    paths = {name: f"{tmp_path}/outputs/{name}" for name in ("test", "hard")}
    assert numbers["step"] == 20 and {n: numbers[f"{n}/predictions"] for n in paths} == paths and "test/loss" in numbers
    trainer = distloop.Trainer(classifier(), on(1, batch_size=16))
    trainer.restore(str(workdir / "checkpoints" / "20"))
    for name, rows in {"test": classification(37, seed=1), "hard": classification(21, seed=2)}.items():
        assert_close({name: np.load(f"{paths[name]}/outputs.npy")}, {name: trainer.predict(rows)})
    alone = json.loads(run(f"--predict={tmp_path}/alone").stdout)
    assert set(alone) == {"step", "test/predictions", "hard/predictions"} and alone["step"] == 30


def test_an_evaluation_keeps_its_limit_and_what_is_no_number_is_null(tmp_path, capsys):
    def broken(batch, training):
        return {"root": tf.sqrt(-1.0 - tf.abs(batch["x"][:, 0]))}

    def fit(**settings):
        rows = distloop.make_dataset(classification(64), 8).repeat()  # endless, so the limit is needed
        evals = {"test": distloop.Evaluation(rows, batches=3, loss_fn=broken)}
        trainer = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path / "run"), **settings))
        trainer.fit(classification(33), steps=4, evals=evals)

    fit()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        fit(evaluate="newest", predict=str(tmp_path / "out"))
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert row["test/root"] is None and row["step"] == 4
    assert len(np.load(tmp_path / "out" / "test" / "outputs.npy")) == 3 * 8


@pytest.mark.slow
def test_a_run_of_two_workers_is_evaluated_by_two_workers(finished):
    run, workdir = finished
    given = [f"--workdir={workdir}", "--device=cpu", "--console=quiet", "--num_devices=1", "--evaluate=best"]
    done = forked.launch(["--workers=2", workdir.parent / "program.py", *given], env=os.environ)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "test/accuracy" in line]
    alone = json.loads(run("--evaluate=best").stdout)
    assert json.loads(line[line.index("{") :]) == pytest.approx(alone, rel=1e-6)


@pytest.mark.slow
def test_what_cannot_be_evaluated_is_refused(tmp_path):
    def fit(evals=True, **settings):
        trainer = distloop.Trainer(classifier(), on(1, **settings))
        trainer.fit(classification(33), steps=4, evals={"test": classification(9)} if evals else None)

    run = str(tmp_path / "run")
    fit(workdir=run)
    refused(lambda: fit(workdir=run, evaluate="last"), "evaluate=last was given: give newest, best or the st")
    refused(lambda: fit(workdir=run, evaluate="3"), "evaluate=3 was given, and ", "has checkpoints of the steps 4: g")
    refused(lambda: fit(workdir=run, evaluate="best"), "No best checkpoint is kept in ", kind=NoBestError)
    refused(lambda: fit(workdir=run, evals=False, predict="out"), "predict='out' was given, and fit has no evals")
    other, empty = str(tmp_path / "other"), str(tmp_path / "empty")
    os.mkdir(empty)
    refused(lambda: fit(workdir=other, evaluate="best"), "evaluate=best was given, and there is no workdir ")
    refused(lambda: fit(workdir=empty, predict="out"), "predict='out' was given, and no checkpoint is in")
    refused(lambda: fit(evaluate="newest"), "evaluate=newest was given without a workdir, so there is no checkpoint")
