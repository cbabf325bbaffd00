"""Agreement: checks that all workers are about to train the same run, so that none waits for ever.

    require_same_run(state, last_step=500, evaluations=[...], actions=[...])

What is known later is compared there: in `data.info`, `compiled_loop`, `evaluation` and `prediction`.
"""

from collections.abc import Sequence

from distloop.actions.action import Action
from distloop.distributed import workers
from distloop.training.state import TrainState
from distloop.variables import named_variables


def require_same_run(
    state: TrainState, last_step: float, evaluations: Sequence[Action], actions: Sequence[Action]
) -> None:
    """Compares a call of `fit` between the workers; all of them call it.

    Args:
        state: what is trained.
        last_step: the step to end with; inf: the run ends by time.
        evaluations: of the run.
        actions: the user's.

    Raises:
        ValueError: on every worker, if one differs.
    """
    facts = {
        "the last step": last_step,
        "evals": [(evaluation.name, evaluation.every) for evaluation in evaluations],
        "actions": [(getattr(action, "__name__", type(action).__name__), action.every) for action in actions],
        "the Keras metrics": sorted(state.keras_metrics),
        **{f"the variable {path!r}": text for path, text in describe_variables(state).items()},
    }
    workers.require_same(state.strategy, "train", facts)


def require_same_trainable(state: TrainState) -> None:
    """Checks that the update still trains what it was built to train.

    Raises:
        ValueError: if `trainable` of a layer or variable has been set since.
    """
    named, changed = named_variables(state.model), set(state.spec.changed_layers())
    for update in state.spec.updates:
        try:
            chosen = {id(variable) for variable in update.select_variables(named)}
        except ValueError:  # there is none
            chosen = set()
        built = {id(variable) for variable in state.variables_of_update[update.name]}
        changed |= {path for path, variable in named.items() if id(variable) in chosen ^ built}
    if changed:
        some = ", ".join(map(repr, sorted(changed)[:3])) + (", ..." if len(changed) > 3 else "")
        raise ValueError(
            f"`trainable` of {some} was changed since the Trainer was made, which fixes what a run trains: set it "
            "back, or let model_fn set it and begin a new run from these weights, with Config(init_from=...)."
        )


def describe_variables(state: TrainState) -> dict[str, str]:
    """Returns shape, dtype and updates of each variable of the model, by its path."""
    updates = {path: "" for path in state.paths.values()}
    for name, variables in state.variables_of_update.items():
        for variable in variables:
            updates[state.paths[id(variable)]] += f", trained by {name}" if name else ", trained"
    return {
        (path := state.paths[id(variable)]): f"{tuple(variable.shape)} {variable.dtype}{updates[path]}"
        for variable in [*state.trained_variables, *state.untrained_variables]
    }
