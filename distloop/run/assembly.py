"""Assembly: builds the state, the step, the loop and the data of a run from its settings.

    state = make_state(model_fn, strategy, config)
    source = make_training_source(data, state, config)
    loop = make_train_loop(state, config)           # once the weights are those that training begins with

It knows which setting goes where, and nothing of what is built.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from distloop.data.source import Source
from distloop.distributed import collectives, devices
from distloop.installed import import_part
from distloop.keras_models.fit_arguments import FitData
from distloop.model import dtype_policy, user_functions
from distloop.model.spec import ModelSpec
from distloop.model.state import TrainState
from distloop.optimizers import learning_rates
from distloop.optimizers.gradients import Clipping
from distloop.run import fit_call, overview, stops
from distloop.settings.config import Config
from distloop.settings.durations import Units
from distloop.settings.precision import PRECISIONS
from distloop.training.loop import TrainLoop
from distloop.training.step import TrainStep
from distloop.variables import digest

_WEIGHTS = "the weights (as by draws without a seed, a compiled model for from_keras, or another file)"


def make_state(model_fn: Callable[[], ModelSpec], strategy: tf.distribute.Strategy, config: Config) -> TrainState:
    """Returns the state of a run, made under its precision."""
    if config.recompute:
        recomputation = import_part("recompute.recomputation", f"recompute={config.recompute!r}")
        model_fn = recomputation.with_recomputation(model_fn, config.recompute)
    replicas = stops.make_replicas(strategy, config)
    with dtype_policy.policy(config.precision), devices.seeded(config.seed):
        state = TrainState(
            *(model_fn, strategy, config.average_decay or float(bool(config.average_from)), replicas),
            is_loss_scaled=PRECISIONS[config.precision].needs_loss_scale,
            shard_optimizer=config.shard_optimizer,
        )
    dtype_policy.check_precision(state.spec, config.precision)
    state.placement.require_stages(config.num_stages)
    return state


def make_train_loop(state: TrainState, config: Config) -> TrainLoop:
    """Builds what trains; all workers call it when the weights are those that training begins with.

    Raises:
        ValueError: on every worker, if the weights of one differ.
    """
    if collectives.num_workers(state.strategy) > 1:
        collectives.require_same(state.strategy, "train", {_WEIGHTS: digest(state.model)})
    histograms = None
    if every := config.histograms_every:
        module = import_part("histograms.histograms", f"histograms_every={every}")
        histograms = module.WeightHistograms(state.variables_of_update, state.paths, every)
    step = make_step(state, config, histograms=histograms)
    is_shown = collectives.is_chief(state.strategy) and config.console != "quiet"

    def report_trace(step: TrainStep, source: Source) -> None:
        reads = [update.differentiate.reads for update in step.updates if update.update.has_loss]
        if source.has_class_weights:
            user_functions.require_read(reads, "2", "class weights, the third entry of a batch")
        user_functions.report_unread(reads, config.unread_entries, is_shown=is_shown)
        overview.report_dense_tables(step.updates, state, is_shown=is_shown)
        stops.report_traced(state, config)

    return TrainLoop(
        *(state, step),
        steps_per_loop=config.steps_per_loop,
        eager=config.eager,
        max_traces=config.max_traces,
        on_trace=report_trace,
    )


def make_step(state: TrainState, config: Config, **options: Any) -> TrainStep:
    """Builds one step as the settings say; `options` are other arguments of `TrainStep`.

    Raises:
        ValueError: if the gradients of microbatches are to be compared, and there is one.
    """
    microbatches = config.microbatches * state.replicas.count
    if config.gradient_noise_every and (microbatches < 2 or any(update.step_fn for update in state.spec.updates)):
        raise ValueError(
            f"gradient_noise_every={config.gradient_noise_every} was given, and there are no two gradients of "
            "microbatches to compare: give microbatches, virtual replicas or more devices, and no step_fn."
        )
    return TrainStep(
        state,
        microbatches=config.microbatches,
        clipping=Clipping.from_settings(config),
        skip_nonfinite=config.on_nonfinite == "skip",
        jit_compile=config.jit_compile,
        measures_noise=bool(config.gradient_noise_every),
        locate_nonfinite=config.locate_nonfinite,
        loss_jump=config.loss_jump if config.on_divergence == "rollback" else None,
        **options,
    )


def begin_run(state: TrainState, config: Config, units: Units, loop: TrainLoop) -> None:
    """Resolves durations of the schedules and of the average, at the step that the state has been restored to."""
    learning_rates.resolve(state.plain_optimizers.values(), units, loop.trace_again, state.count_tokens)
    if state.average is not None:
        state.average.begin_at(fit_call.first_averaged(config, units), int(state.step))


def reading(state: TrainState, config: Config) -> dict[str, Any]:
    """Returns how all data of a run is read, as arguments of `Source`."""
    batch_size = config.global_batch_size(state.strategy)
    return {"batch_size": batch_size, "replicas": state.replicas, "empty_batches": config.empty_batches}


def make_training_source(data: FitData, state: TrainState, config: Config, latest: Source | None = None) -> Source:
    """Returns the source of the data to train on: the latest one if it is asked for again.

    Raises:
        ValueError: if the data breaks a rule, or a pipeline gets more microbatches than a batch has rows.
    """
    if latest is not None and data.is_asked_for(latest.asked_for):
        latest.refresh(data.train)
        return latest
    source = Source(
        *(data.train, state.strategy),
        shuffle_seed=config.seed,
        microbatches=config.microbatches,
        may_go_back=config.on_divergence == "rollback",
        limit=config.overfit_batches or config.limit_train_batches,
        is_cached=bool(config.overfit_batches),
        is_stacked=config.jit_compile == "loop",
        **{**reading(state, config), **data.source_settings(config.global_batch_size(state.strategy))},
    )
    if source.info.batch_size is not None:
        state.placement.check_microbatches(config.microbatches, source.info.batch_size)
    return source
