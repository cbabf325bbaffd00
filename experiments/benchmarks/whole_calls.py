"""Times of whole calls of `evaluate` and `predict`, and the overhead of a call of `fit` or `evaluate`."""

from collections.abc import Callable, Mapping

import tensorflow as tf

from experiments.benchmarks import by_hand, goals, turns, with_distloop, with_keras, workloads

ROUNDS = 3  # at most, because some systems take seconds per call
EXAMPLES, BATCH_SIZE = goals.EXAMPLES, goals.BATCH_SIZE
BATCHES = -(-EXAMPLES // BATCH_SIZE)


def measure(
    workload: workloads.Workload,
    strategy: tf.distribute.Strategy,
    keras_fit: with_keras.Fit,
    distloop_fit: with_distloop.Fit,
    others: Mapping[str, Mapping[str, turns.System]],
    rounds: int,
    turn_secs: float,
) -> dict[str, dict[str, list[float]]]:
    """Times calls in turns.

    Args:
        workload: the model and its data.
        strategy: for the hand-written loops.
        keras_fit: Keras's model.
        distloop_fit: distloop's trainer.
        others: by kind and name, systems whose steps are whole calls.
        rounds: turns per system, up to ROUNDS.
        turn_secs: approximate seconds per turn.

    Returns:
        Seconds in each round, by kind and system. `evaluate`, `predict`: a call. `beyond fit`, `beyond evaluate`: the
        part of a call that is not in its steps.
    """
    rounds = min(rounds, ROUNDS)
    hand, model, trainer = by_hand.ByHand(workload, strategy, BATCH_SIZE), keras_fit.model, distloop_fit.trainer
    data, batch = workload.dataset(BATCH_SIZE, EXAMPLES), workload.dataset(BATCH_SIZE, BATCH_SIZE)

    def take_turns(kind: str = "", **fns: Callable[[], object]) -> dict[str, list[float]]:
        passes = {name: turns.System(lambda count, fn=fn: [fn() for _ in range(count)]) for name, fn in fns.items()}
        return turns.take_turns({**passes, **others.get(kind, {})}, rounds, turn_secs, float)

    results = {
        "evaluate": take_turns(
            "evaluate",
            hand=hand.evaluate(EXAMPLES),
            handloop=hand.evaluate_compiled(EXAMPLES),
            keras=lambda: model.evaluate(data, verbose=0),
            distloop=lambda: trainer.evaluate(data),
        ),
        "predict": take_turns(
            "predict",
            hand=hand.predict(EXAMPLES),
            keras=lambda: model.predict(data, verbose=0),
            distloop=lambda: trainer.predict(data),
        ),
    }
    short = take_turns(keras=lambda: model.evaluate(batch, verbose=0), distloop=lambda: trainer.evaluate(batch))
    results["beyond evaluate"] = {
        # A call takes a + n * b seconds: two calls of different length give a.
        name: [one - (whole - one) / (BATCHES - 1) for one, whole in zip(times, results["evaluate"][name], strict=True)]
        for name, times in short.items()
    }
    results["beyond fit"] = {
        "keras": beyond_steps(keras_fit, rounds),
        "distloop": beyond_steps(distloop_fit, rounds),
    }
    return results


def beyond_steps(system: with_distloop.Fit | with_keras.Fit, rounds: int) -> list[float]:
    """Returns the seconds of a one-step call minus those of a step, from the third call on."""
    system.call(2)
    step = system.steps_secs(100) / 100
    return [turns.timed(system.call, 1) - step for _ in range(rounds)]
