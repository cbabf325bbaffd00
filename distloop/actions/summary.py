"""Summary: the action that shows media and numbers computed from the training state."""

from collections.abc import Callable, Mapping
from typing import Any

from distloop.errors import require_call
from distloop.model.variable_writes import preserved
from distloop.monitoring.media import Media
from distloop.training.action import Action, Report


class Summary(Action):
    """Shows what a function returns for the state: images, sounds, texts, histograms, curves or numbers.

        noise = tf.random.normal([16, LATENT])
        distloop.Summary("samples", lambda state: distloop.Images(state.model(noise)), every=500)

    A name that begins with the name of an evaluation, as in `test/confusion`, is shown beside that evaluation's charts.
    """

    def __init__(self, name: str, fn: Callable[[Any], Any], every: int | str = 0):
        """Stores the function.

        Args:
            name: the name to show the result under.
            fn: takes the `TrainState`, and returns media, a number, or a dict of both by name. The model has the
                weights that train; `with state.averaged():` puts the averages in their place. Every worker calls it.
            every: how often, a duration; 0: at the end only.
        """
        if not isinstance(name, str) or not callable(fn):
            raise ValueError(f"Summary was given {name!r} and {fn!r}; give a name and a function of the TrainState.")
        require_call(fn, f"The function of Summary {name!r}", "state")
        self.name = name
        self.every = every
        self._fn = fn

    def __call__(self, report: Report) -> dict[str, float | Media]:
        """Returns the function's result, with the name before each entry; what the model wrote is put back."""
        with preserved(report.state):
            result = self._fn(report.state)
        entries = result.items() if isinstance(result, Mapping) else [("", result)]
        return {f"{self.name}/{key}" if key else self.name: value for key, value in entries}
