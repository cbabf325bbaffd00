"""What workers compare before they train; tests/test_workers.py has workers that differ."""

import distloop
from distloop.distributed import workers
from distloop.training.agreement import describe_variables, require_same_run
from tests.problems import classifier, on


def test_a_run_is_described_by_its_end_its_lists_and_each_variable_with_what_trains_it(monkeypatch):
    compared = {}
    monkeypatch.setattr(workers, "require_same", lambda strategy, what, facts: compared.update(facts))

    def act(report):
        return None

    act.every = 3
    trainer = distloop.Trainer(classifier(batch_norm="local", metrics=True), on(1))
    require_same_run(trainer.state, 5, [], [act, distloop.StopEarly("loss")])
    variables = {name: text for name, text in compared.items() if name.startswith("the variable ")}
    assert len(variables) == len(describe_variables(trainer.state)) == 7
    assert variables["the variable 'net/hidden/kernel'"] == "(8, 16) float32, trained"
    assert variables["the variable 'net/norm/moving_mean'"] == "(16,) float32"
    assert {name: fact for name, fact in compared.items() if name not in variables} == {
        "the last step": 5,
        "evals": [],
        "actions": [("act", 3), ("StopEarly", None)],
        "the Keras metrics": ["auc"],
    }
