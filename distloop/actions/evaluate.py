"""`Evaluate`: the action that evaluates on a dataset."""

from collections.abc import Callable, Mapping

from distloop.actions.action import Action, Report


class Evaluate(Action):
    """Evaluates on a dataset; reports `<name>/<metric>`."""

    phase = "evaluation"
    has_fixed_metrics = True

    def __init__(self, name: str, evaluate: Callable[[], Mapping[str, float]], every: int):
        """Stores the function.

        Args:
            name: name of the evaluation, such as "test".
            evaluate: returns the metrics by name.
            every: steps.
        """
        self.name = name
        self.every = every
        self._evaluate = evaluate

    def __call__(self, report: Report) -> Mapping[str, float]:
        """Returns the metrics, with the evaluation's name before each."""
        return {f"{self.name}/{key}": value for key, value in self._evaluate().items()}
