"""Whole calls of `evaluate` and `predict`, and what a call of `fit` or `evaluate` takes beyond its steps."""

from collections.abc import Callable

import tensorflow as tf

from experiments.benchmarks import by_hand, goals, turns, with_distloop, with_keras, workloads

ROUNDS = 3  # at most: some systems take seconds a call
EXAMPLES, BATCH_SIZE = goals.EXAMPLES, goals.BATCH_SIZE
BATCHES = -(-EXAMPLES // BATCH_SIZE)


def measure(
    workload: workloads.Workload,
    strategy: tf.distribute.Strategy,
    of_keras: with_keras.Fit,
    of_distloop: with_distloop.Fit,
    rounds: int,
    turn_secs: float,
) -> dict[str, dict[str, list[float]]]:
    """Times calls by turns.

    Args:
        workload: what is evaluated.
        strategy: of the loops by hand.
        of_keras: Keras's model.
        of_distloop: distloop's trainer.
        rounds: turns that each one gets, up to ROUNDS.
        turn_secs: how long a turn lasts, about.

    Returns:
        Seconds in each round, by kind and system. `evaluate`, `predict`: a call. `beyond fit`, `beyond evaluate`: what
        a call takes beyond its steps.
    """
    rounds = min(rounds, ROUNDS)
    hand, model, trainer = by_hand.ByHand(workload, strategy, BATCH_SIZE), of_keras.model, of_distloop.trainer
    data, batch = workload.dataset(BATCH_SIZE, EXAMPLES), workload.dataset(BATCH_SIZE, BATCH_SIZE)

    def take_turns(**fns: Callable[[], object]) -> dict[str, list[float]]:
        passes = {name: turns.System(lambda count, fn=fn: [fn() for _ in range(count)]) for name, fn in fns.items()}
        return turns.take_turns(passes, rounds, turn_secs, float)

    found = {
        "evaluate": take_turns(
            hand=hand.evaluate(EXAMPLES),
            handloop=hand.evaluate_compiled(EXAMPLES),
            keras=lambda: model.evaluate(data, verbose=0),
            distloop=lambda: trainer.evaluate(data),
        ),
        "predict": take_turns(
            hand=hand.predict(EXAMPLES),
            keras=lambda: model.predict(data, verbose=0),
            distloop=lambda: trainer.predict(data),
        ),
    }
    short = take_turns(keras=lambda: model.evaluate(batch, verbose=0), distloop=lambda: trainer.evaluate(batch))
    found["beyond evaluate"] = {
        # A call takes a + n * b: of both calls' times, what is left without the batches.
        name: [one - (whole - one) / (BATCHES - 1) for one, whole in zip(times, found["evaluate"][name], strict=True)]
        for name, times in short.items()
    }
    found["beyond fit"] = {
        "keras": beyond_steps(of_keras, rounds),
        "distloop": beyond_steps(of_distloop, rounds),
    }
    return found


def beyond_steps(system: with_distloop.Fit | with_keras.Fit, rounds: int) -> list[float]:
    """Returns the seconds of a call of one step less those of a step, from the third call on."""
    system.call(2)
    step = system.steps_secs(100) / 100
    return [turns.timed(system.call, 1) - step for _ in range(rounds)]
