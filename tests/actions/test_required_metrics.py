"""Metrics that actions wait for are looked for before the first step."""

import keras
import pytest

import distloop
from distloop.actions.evaluate import Evaluate
from distloop.actions.save import require_metrics
from tests.problems import classification, classifier, on

MEANT = "did you mean 'val/loss'?"


@pytest.fixture(scope="module")
def rows():
    return distloop.make_dataset(classification(16), 8)


def fit(rows, *actions, evals=None, steps=4, model_fn=None, **settings):
    """Fits with these actions; returns the trainer and the error, if there was one."""
    trainer, error = distloop.Trainer(model_fn or classifier(), on(1, **settings)), None
    try:
        trainer.fit(rows, steps=steps, evals={"val": rows} if evals is None else evals, actions=actions)
    except ValueError as raised:
        error = str(raised)
    return trainer, error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: distloop.StopEarly("val_loss"), f"waits for the metric 'val_loss', which nothing reports: {MEANT}"),
        (lambda: distloop.SaveBest("val/acuracy", mode="max"), "did you mean 'val/accuracy'?"),
        (lambda: distloop.Export(print, "unused", metric="vall/loss", suffix=".keras"), MEANT),
        (lambda: distloop.StopEarly("loss/val"), "waits for the metric 'loss/val', which nothing reports"),
        (lambda: distloop.StopEarly("perplexity"), "give one of accuracy, gradient_norm, loss, "),
        (lambda: distloop.from_callback(keras.callbacks.ReduceLROnPlateau("valid_loss"), every=2), "'val/loss'"),
    ],
)
def test_a_metric_that_nothing_reports_is_refused_before_the_first_step(rows, make, hint):
    trainer, error = fit(rows, make())
    assert trainer.step == 0 and hint in error


def test_a_name_that_a_step_and_an_evaluation_report_is_refused():
    evaluations = [Evaluate("val", lambda stop_requests: {}, 1)]
    with pytest.raises(ValueError, match="^'val/loss' is reported by the training step and by an evaluation: rename"):
        require_metrics([], evaluations, ["loss", "val/loss"])
    require_metrics([], evaluations, ["val/loss", "error"])


@pytest.mark.slow
def test_what_steps_evaluations_and_the_run_itself_report_is_known(rows):
    entry = keras.callbacks.ReduceLROnPlateau("val_loss")
    known = ["loss", "val/loss", "val/accuracy", "auc", "val/auc", "gradient_norm", "steps_per_sec", "learning_rate"]
    stops = [distloop.StopEarly(name, mode="min", patience=9) for name in known]
    trainer, error = fit(rows, *stops, distloop.from_callback(entry, every=2), model_fn=classifier(metrics=True))
    assert error is None and trainer.step == 4


@pytest.mark.slow
def test_values_of_an_evaluation_alone_are_known_from_its_trace(rows):
    def own(batch, training):
        return {"error": batch["x"][:, 0]}

    evals = {"own": distloop.Evaluation(rows, loss_fn=own)}
    evals["rows"] = distloop.Evaluation(rows, rows_fn=lambda outputs: {"bleu": 0.5})
    actions = [distloop.StopEarly("own/error"), distloop.StopEarly("rows/bleu")]
    assert fit(rows, *actions, evals=evals)[1] is None
    trainer, error = fit(rows, distloop.StopEarly("own/loss"), evals=evals)
    assert trainer.step == 0 and "'own/loss', which nothing reports" in error


@pytest.mark.slow
def test_what_a_users_action_reports_is_unknown_and_keras_names_are_said(rows, caplog):
    def measure(report):
        return {"val/reward": 1.0}

    measure.every = 1
    stop = distloop.StopEarly("val/reward", mode="max", patience=9)
    others = [distloop.StopEarly("val_loss"), distloop.SaveBest("val/acuracy", mode="max")]
    _, error = fit(rows, measure, stop, *others, distloop.StopEarly("val/bleu", mode="max"))
    for wrong, meant in (("val_loss", "val/loss"), ("val/acuracy", "val/accuracy")):
        assert f"The metric {wrong!r} is waited for: is {meant!r} meant?" in caplog.text
    assert error is None and caplog.text.count("is waited for") == 2


@pytest.mark.slow
def test_an_action_that_returns_none_by_its_annotation_reports_nothing(rows):
    def show(report) -> None:
        pass

    show.every = 1
    trainer, error = fit(rows, show, distloop.StopEarly("val_loss"))
    assert trainer.step == 0 and MEANT in error


@pytest.mark.slow
def test_a_number_of_an_action_due_after_an_evaluation_is_awaited(rows):
    def measure(report):
        return {"val/reward": float(report.step)}

    measure.every = 4
    best = distloop.SaveBest("val/reward", mode="max")
    _, error = fit(rows, measure, best, evals={"val": distloop.Evaluation(rows, every=2)})
    assert error is None and best.best == [(4.0, 4)]


@pytest.mark.slow
def test_what_is_measured_where_a_run_stops_early_is_among_the_best(rows, tmp_path):
    best, stop = distloop.SaveBest("val/loss", restore=True), distloop.StopEarly("loss", patience=1, min_delta=9.0)
    trainer, error = fit(rows, best, stop, steps=40, workdir=str(tmp_path), log_every=2)
    assert error is None and best.best[0][1] == trainer.step < 40
