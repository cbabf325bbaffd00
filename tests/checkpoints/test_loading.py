"""Which checkpoint is the best one of a run; tests/checkpoints/test_resume.py restores it."""

from types import SimpleNamespace

import pytest

from distloop.checkpoints.loading import NoBestError, best_step, load_best


def checkpoints(**best_steps):
    """The checkpoints of the steps 100 to 500, and the best by metric."""
    return SimpleNamespace(directory="run/checkpoints", steps=[100, 200, 300, 400, 500], best_steps=best_steps)


def test_the_first_step_of_a_metric_that_is_still_kept_is_the_best():
    assert best_step(checkpoints(loss=[300, 100])) == 300
    assert best_step(checkpoints(loss=[300, 100], accuracy=[400]), "accuracy") == 400
    assert best_step(checkpoints(loss=[300, 100], accuracy=[300])) == 300  # of both metrics: no name is needed
    assert best_step(checkpoints(loss=[250, 100])) == 100


@pytest.mark.parametrize(
    ("kept", "metric", "words"),
    [
        (checkpoints(), "", "No best checkpoint is kept in 'run/checkpoints': give fit SaveBest"),
        (checkpoints(loss=[300]), "accuracy", "No best checkpoint of 'accuracy'"),
        (checkpoints(loss=[300], accuracy=[400]), "", "^Metrics .*: give restore the path, 'run/.*' for 'loss', .*"),
    ],
)
def test_where_no_step_is_the_best_the_sentence_says_what_to_do(kept, metric, words):
    with pytest.raises(ValueError, match=words):
        best_step(kept, metric)


def test_all_workers_take_what_the_chief_finds():
    kept, nothing = (checkpoints(**best) for best in ({"loss": [300]}, {}))
    kept.load = nothing.load = lambda step: step
    assert load_best(nothing, "loss", lambda step: [300, step]) == 300
    for found in (kept, nothing):
        with pytest.raises(NoBestError, match="No best checkpoint of 'loss' is kept.*not be written: see the log"):
            load_best(found, "loss", lambda step: [-1, step])


def test_without_a_workdir_there_is_none():
    with pytest.raises(ValueError, match=r'restore\("best"\) was called without a workdir.*Config'):
        load_best(None, "", lambda step: [step])
