"""`Evaluate`: the action that evaluates on a dataset."""

from collections.abc import Callable, Mapping, Sequence

from distloop.actions.action import Action, Report
from distloop.monitoring.run_files import Series


class Evaluate(Action):
    """Evaluates on a dataset; reports `<name>/<metric>`."""

    phase = "evaluation"
    has_fixed_metrics = True

    def __init__(self, name: str, evaluate: Callable[[], Mapping[str, float]], every: int | str):
        """Stores the function.

        Args:
            name: name of the evaluation, such as "test".
            evaluate: returns the metrics by name.
            every: how often, a duration.
        """
        self.name = name
        self.every = every
        self._evaluate = evaluate
        self.rows: list[dict[str, float]] = []  # `step`, and one metric: the best and the last value of each

    def __call__(self, report: Report) -> Mapping[str, float]:
        """Returns the metrics, with the evaluation's name before each."""
        metrics = {f"{self.name}/{key}": value for key, value in self._evaluate().items()}
        rows = [*self.rows, *({"step": report.step, name: float(value)} for name, value in metrics.items())]
        self.rows = [row for name in metrics for row in _best_and_last([row for row in rows if name in row], name)]
        return metrics

    def get_state(self) -> list[dict[str, float]] | None:
        """Returns the best and the last values, for a run that goes on; None: nothing was measured."""
        return self.rows or None

    def set_state(self, state: list[dict[str, float]]) -> None:
        """Restores a state that `get_state` returned."""
        self.rows = state


def _best_and_last(rows: Sequence[dict[str, float]], name: str) -> list[dict[str, float]]:
    series = Series(name, [int(row["step"]) for row in rows], [row[name] for row in rows])
    best = [{"step": series.best[1], name: series.best[0]}] if series.best else []
    return [*best, rows[-1]] if best != [rows[-1]] else best
