"""Owns the user's verbs: `fit`, `evaluate`, `predict`, `export`. It holds the parts and no knowledge of its own.

trainer = Trainer(model_fn, Config(steps=1000, device="cpu", num_devices=2))
trainer.fit(train_dataset, evals={"test": test_dataset})
outputs = trainer.predict(test_dataset)
"""

import contextlib
import functools
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distloop import flags
from distloop.actions.action import Action, Report, Saves, member
from distloop.actions.action import run as run_actions
from distloop.actions.evaluate import Evaluate
from distloop.actions.histograms import WeightHistograms
from distloop.actions.pipeline_usage import PipelineUsage
from distloop.actions.save import Save
from distloop.actions.sync_stop import SyncStop
from distloop.actions.utilization import Utilization
from distloop.actions.write import Write
from distloop.checkpoints import signatures
from distloop.checkpoints.keras_file import write_keras_file
from distloop.checkpoints.resume import Progress
from distloop.checkpoints.saved_model import write_saved_model
from distloop.checkpoints.warm_start import warm_start
from distloop.config import Config
from distloop.data.arrays import are_arrays, as_dataset
from distloop.data.copies import fresh_copy
from distloop.data.source import Data, Source
from distloop.diagnostics import dry_run, tuning
from distloop.diagnostics.audit import Audit, audit
from distloop.distributed import devices, strategies, workers
from distloop.distributed.preemption import EXIT_CODE, Interrupted, Interrupts
from distloop.monitoring.console import Console, say, show_parts, show_split
from distloop.monitoring.json_writer import JsonWriter
from distloop.monitoring.profiler import Profile
from distloop.monitoring.records import read_metrics, read_steps
from distloop.monitoring.tensorboard import SummaryWriter
from distloop.monitoring.timing import Clock
from distloop.optimizers import loss_scale
from distloop.training import overview
from distloop.training.evaluation import EvalLoop
from distloop.training.loop import Diverged, TrainLoop
from distloop.training.prediction import PredictLoop, PredictStep, cannot_join
from distloop.training.state import ModelSpec, TrainState
from distloop.training.step import TrainStep
from distloop.variables import count_parameters

_KEPT_PASSES = 8  # datasets that are remembered: to make them ready takes as long as a short pass over them


class Trainer:
    """Trains, evaluates and predicts with one model, on the devices that the config names.

    Attributes:
        config: the settings of the run.
        strategy: the `tf.distribute.Strategy`.
        state: everything that training changes.
    """

    def __init__(
        self,
        model_fn: Callable[[], ModelSpec],
        config: Config = Config(),  # noqa: B008 - frozen
        *,
        strategy: tf.distribute.Strategy | None = None,
    ):
        """Builds the model; touches no disk.

        Args:
            model_fn: makes models and optimizers and returns a `ModelSpec`; called once, in the strategy's scope.
            config: the settings of the run.
            strategy: goes before the config's strategy, device and num_devices.

        Raises:
            ValueError: if there are no such devices, or `model_fn` breaks a rule; the message says which.
        """
        if not callable(model_fn) or isinstance(model_fn, keras.Model):
            raise ValueError(
                f"Trainer was given {model_fn!r} as model_fn; it takes a function that makes the model and returns a "
                "ModelSpec, or distloop.from_keras(model) for a compiled Keras model."
            )
        devices.prepare_process(config)
        self.strategy = strategies.make_strategy(config) if strategy is None else strategies.check_strategy(strategy)
        if config.eager and workers.num_workers(self.strategy) > 1:
            raise ValueError(
                "eager=True was given on several workers, which would wait for one that a breakpoint holds: look at it "
                "on one worker, with as many devices."
            )
        self.config = config = dry_run.settings(config, owner=self) if config.fast_dev_run else config
        with loss_scale.policy(config.precision):
            self.state = TrainState.make(
                model_fn,
                self.strategy,
                config.average_decay,
                is_loss_scaled=loss_scale.needs_loss_scale(config.precision),
            )
        self.state.placement.require_stages(config.num_stages)
        self._is_chief = workers.is_chief(self.strategy)
        self._progress = Progress(self.state, config)
        if (others := workers.heartbeat_of(self.strategy)) is not None:
            others.step = lambda: self.step
            others.phase = "starting"
        self._train_source: Source | None = None
        self._passes: list[Source] = []  # data that was measured on or predicted for, the last one first
        self._element_spec: Any = None
        self._forward: tuple[Any, tf.Graph | None] | None = None  # of what data, the forward pass
        self._train_loop: TrainLoop | None = None
        self._watched: WeightHistograms | None = None
        self._eval_loop: EvalLoop | None = None
        self._predict_loops: dict[tuple[str, bool], PredictLoop] = {}  # by signature and whether dtypes are kept

    @property
    def step(self) -> int:
        """How many times the train step was called, skipped ones too."""
        return int(self.state.step)

    @property
    def model(self) -> Any:
        """The model or models, with the weights that train."""
        return self.state.model

    @property
    def optimizer(self) -> Any:
        """The optimizer, under float16 the `LossScaleOptimizer` around it; of several updates, a dict by name."""
        return self.state.optimizer

    def fit(
        self,
        train: Data,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        evals: Mapping[str, Data] | None = None,
        actions: Sequence[Action] = (),
    ) -> dict[str, float]:
        """Trains until a global step; does nothing if it is reached already.

        A second call with the same dataset goes on where the first stopped; another dataset starts at its beginning.
        With a workdir it goes on from the newest checkpoint there, saves each `checkpoint_every` steps and at the end;
        SIGTERM, Ctrl-C and `max_secs` end the process with code 75 when the loop in flight has ended and is saved.

        Args:
            train: a dataset of global batches, a function of `tf.distribute.InputContext`, a `DistributedDataset`, or
                NumPy arrays `[N, ...]`, alone or in a dict, tuple or list: batches of `Config.batch_size` examples,
                shuffled with `Config.seed`; `evals` and other methods take them in order.
            steps: the global step to end with; goes before the config's steps and epochs.
            epochs: instead of `steps`: how many passes over the dataset, counted from step 0.
            evals: name -> data to evaluate on each `eval_every` steps and at the end.
            actions: called in order after the evaluations; see `distloop.Action`.

        Returns:
            The last numbers, evaluations as `"test/accuracy"`; empty if there was nothing to do.

        Raises:
            ValueError: if the data, the loss or an argument breaks a rule; the message says which.
            FloatingPointError: at the first step whose loss or gradient is not finite (`on_nonfinite="raise"`).
            OSError: if the last checkpoint could not be written.
            SystemExit: with code 75, if the run was interrupted and saved; before anything is trained, with
                `audit=True`, with code 1 if there are findings, else 0, and with `autotune_batch=True`, with code 0.
        """
        settings, clock = self.config, Clock()
        if settings.audit:
            self._leave_after_audit(train)
        if settings.autotune_batch:
            tuning.autotune_batch(self, train)
            raise SystemExit(0)
        if self._train_source is None or self._train_source.data is not train:
            self._train_source = Source(
                train,
                self.strategy,
                microbatches=settings.microbatches,
                may_go_back=settings.on_divergence == "rollback",
                limit=settings.overfit_batches or settings.limit_train_batches,
                is_cached=bool(settings.overfit_batches),
                batch_size=settings.batch_size,
                shuffle_seed=settings.seed,
            )
        source = self._train_source
        split = source.split()
        batch_size = split[0] if split is not None else None
        if batch_size is not None:
            self.state.placement.check_microbatches(settings.microbatches, batch_size)
        until = self._until(source, steps, epochs)
        if settings.fast_dev_run:
            until = self.step + 1
        for action in actions:
            if not callable(action) or not hasattr(action, "every"):
                raise ValueError(
                    f"The action {action!r} was given; an action is a callable with an attribute `every`, in steps: "
                    "set it, as in `action.every = 100`."
                )
        if not isinstance(evals or {}, Mapping):
            raise ValueError(
                f"evals={evals!r} was given; fit takes a dict of datasets by name: evals={{'test': dataset}}."
            )
        sources = {name: self._eval_source(data) for name, data in (evals or {}).items()}
        evaluations = [
            Evaluate(name, functools.partial(self._evaluate, s), settings.eval_every) for name, s in sources.items()
        ]
        self._build(source)
        self._progress.resume()
        if settings.init_from and self._progress.is_new:
            self._say(warm_start(self.state, settings.init_from, settings.init_rename))
        if reason := self._progress.stop_reason(until):
            self._say(f"this run stopped at step {self.step} ({reason}); other steps make it go on.")
        if self._train_loop is None:
            self._train_loop = self._make_train_loop()
        window = self._progress.attach(source, self._train_loop, actions, until)
        if self.step >= until or reason:
            return {}
        if self._is_chief:
            flags.write(settings, settings.workdir)
        for line in self._describe(source):
            self._say(line)
        if workers.num_workers(self.strategy) > 1 and settings.console != "quiet":
            say(source.describe())  # on each of them
        may_roll_back = settings.on_divergence == "rollback"
        if may_roll_back and not self._progress.has_checkpoint():
            self._progress.save()
        if self._forward is None or self._forward[0] != (source.element_spec, batch_size):
            forward = overview.trace_forward(self.state, settings, source.element_spec, batch_size)
            self._forward = (source.element_spec, batch_size), forward
        forward = self._forward[1]
        flops_per_example = overview.flops_per_example(forward, batch_size)
        step_flops = flops_per_example and flops_per_example * (batch_size or 0)
        executor = self.state.placement.choose_executor(self.strategy, settings.executor, step_flops)
        profile = Profile(settings.profile, os.path.join(settings.workdir, "summaries", "train"))
        to_do: list[Action] = [
            Utilization(flops_per_example, overview.peak_flops(self.state, settings)),
            PipelineUsage(self.state.placement.devices, profile),
            *evaluations,
            *actions,
            *([self._watched] if self._watched is not None else []),
        ]
        if actions and workers.num_workers(self.strategy) > 1:
            to_do.append(SyncStop(functools.partial(workers.gather, self.strategy), actions))
        with Interrupts(settings.max_secs, catch_signals=bool(settings.workdir)) as interrupts:
            while True:
                try:
                    return self._train(
                        source, until, to_do, evaluations, forward, window, interrupts, clock, profile, executor
                    )
                except Diverged as diverged:
                    if not may_roll_back:
                        raise
                    self._progress.roll_back(diverged)
                    window = self._progress.attach(source, self._train_loop, actions, until)
                except Interrupted as interrupted:
                    if settings.workdir:
                        self.save()
                    if self._is_chief:  # even where it is to be quiet
                        say(f"{interrupted}; the same command goes on from there.")
                    raise SystemExit(EXIT_CODE) from None

    def _train(
        self,
        source: Source,
        until: int,
        to_do: Sequence[Action],
        evaluations: Sequence[Evaluate],
        forward: tf.Graph | None,
        window: Mapping[str, Any] | None,
        interrupts: Interrupts,
        clock: Clock,
        profile: Profile,
        executor: str,
    ) -> dict[str, float]:
        """Trains from where the run is, with files of its own, and waits until the last save is whole."""
        assert self._train_loop is not None
        evals = [evaluation.name for evaluation in evaluations]
        with contextlib.closing(profile), Write(self._make_writers(until, evals, forward)) as write:
            if self.config.eval_first and self.step == 0:
                run_actions([*evaluations, write], Report(0, 0, {}, self.state, time=time.time()), clock)
            metrics = self._train_loop.train(
                source,
                until,
                [*to_do, write, *self._make_saves(to_do, write)],
                log_every=self.config.log_every,
                steps_per_loop=self.config.steps_per_loop,
                window=window,
                interrupts=interrupts,
                clock=clock,
                profile=profile if self._is_chief else None,
                executor=executor,
            )
            with clock.phase("saving"):
                self._progress.wait()
        for writer in write.writers:
            if isinstance(writer, Console):
                writer.summarize(clock)
        if self.config.fast_dev_run:
            for line in self._rehearse(source):
                self._say(f"fast_dev_run: {line}")
        return metrics

    def _make_saves(self, to_do: Sequence[Action], write: Write) -> list[Action]:
        """Returns the action that saves, if there is a workdir, and hands the run's checkpoints to the others."""

        def save(report: Report, best_steps: Mapping[str, list[int]]) -> None:
            write.flush()  # a run that resumes from this checkpoint finds all rows up to it
            self._progress.save(report, best_steps)

        saves = Saves(save) if self.config.workdir else None
        for action in to_do:
            member(action, "set_saves")(saves)
        return [Save(saves, self.config.checkpoint_every)] if saves else []

    def _rehearse(self, source: Source) -> Iterator[str]:
        """Tries what a run may need after its steps; see `rehearsal.check`."""
        assert self._train_loop is not None
        yield f"step {self.step} trained, all evaluations measured on a batch"
        predict_fns = self._predict_fns() if self.state.spec.predict_fn is not None else {}

        def predict(signature: str) -> int:
            outputs = next(self.stream_predictions(source.data, signature=signature))
            return len(tf.nest.flatten(outputs)[0])

        yield from dry_run.check(
            self.state,
            train=functools.partial(self._train_loop.train, source, self.step + 1, []),
            restore=self.restore if workers.num_workers(self.strategy) == 1 else None,
            predict={name: functools.partial(predict, name) for name in predict_fns},
            export=functools.partial(self.export, os.path.join(self.config.workdir, "export", "rehearsal")),
        )

    def _make_train_loop(self) -> TrainLoop:
        settings, state = self.config, self.state
        if settings.workdir and settings.histograms_every:
            self._watched = WeightHistograms(
                state.variables_of_update, state.paths, state.step, settings.histograms_every
            )
        step = TrainStep(
            self.state,
            microbatches=settings.microbatches,
            clip_norm=settings.clip_norm,
            skip_nonfinite=settings.on_nonfinite == "skip",
            jit_compile=settings.jit_compile,
            locate_nonfinite=settings.locate_nonfinite,
            loss_jump=settings.loss_jump if settings.on_divergence == "rollback" else None,
            watched=self._watched,
        )
        return TrainLoop(self.state, step, eager=settings.eager)

    def save(self) -> None:
        """Saves a checkpoint to the workdir, and waits until it is whole.

        Raises:
            ValueError: if there is no workdir, or nothing was trained or restored.
            OSError: if it could not be written.
        """
        self._progress.save()
        self._progress.wait()

    def restore(self, path: str | None = None) -> None:
        """Goes on from a checkpoint: weights, optimizer, averages, counts, and in the next `fit` the place in the data.

        Args:
            path: a checkpoint's directory, or a workdir, whose newest is taken; None: this run's workdir.

        Raises:
            ValueError: if there is none, it is damaged, or it is of another model or optimizer.
        """
        self._progress.restore(path)

    def audit(self, dataset: Data) -> Audit:
        """Looks for mistakes in `model_fn`, `loss_fn` and the data that no error tells of; changes nothing.

        On one device or more it finds: what depends on the number of replicas, such as a mean over the rows in
        `loss_fn`; random numbers that are the same on every replica; statistics of one replica; variables in which the
        replicas differ; what is traced again and again, and Python values that tracing freezes; variables made in a
        step; state that no checkpoint holds; layers left out of training; gradients that are None or 0; data that is in
        another order when it is read again. Weights, optimizer, random streams and the place in the data stay as they
        are; a model that is not built yet is built, and what Python generators of the data's own keep moves on.

        Args:
            dataset: as for `fit`; its first batches are taken.

        Returns:
            The findings, each with what, name and hint; printed, a line for each.

        Raises:
            ValueError: on several workers, if the first batch has less than two rows, or `loss_fn` breaks a rule.
        """
        if workers.num_workers(self.strategy) > 1:
            raise ValueError(
                "audit was called on several workers; one process shows the same: call it there, without TF_CONFIG."
            )
        dataset = as_dataset(dataset, self.config.batch_size, self.config.seed)
        self._build(Source(fresh_copy(dataset) if isinstance(dataset, tf.data.Dataset) else dataset, self.strategy))
        return audit(self.state, dataset, seed=self.config.seed, microbatches=self.config.microbatches)

    def _leave_after_audit(self, dataset: Data) -> None:
        """Ends the process with what an audit found."""
        found = self.audit(dataset)
        say(f"audit: {len(found.findings)} findings")
        for line in str(found).splitlines():
            say(line)
        raise SystemExit(1 if found.findings else 0)

    def evaluate(self, dataset: Data) -> dict[str, float]:
        """Measures one pass over a dataset; changes nothing.

        Args:
            dataset: as for `fit`; finite.

        Returns:
            Name -> number, over all examples, with the averaged weights where there are some.

        Raises:
            ValueError: if the data is endless, empty or breaks a rule.
        """
        source = self._eval_source(dataset)
        self._build(source)
        return self._evaluate(source)

    def evaluate_checkpoints(
        self, dataset: Data, *, name: str = "test", poll_secs: float = 5.0, timeout_secs: float = 0.0
    ) -> dict[int, dict[str, float]]:
        """Measures each checkpoint of a run that another process trains, once, until that run is complete.

        The run's workdir gets `evaluations/<name>.jsonl`, and `summaries/<name>` for TensorBoard; called again, it goes
        on with the checkpoints that have no row yet. Give the run `keep_checkpoints` enough that none is gone before
        its turn.

        Args:
            dataset: as for `fit`; finite.
            name: of the evaluation.
            poll_secs: how often to look for a new checkpoint.
            timeout_secs: how long to wait for one; 0: for ever.

        Returns:
            Step -> name -> number, of the checkpoints measured now.

        Raises:
            ValueError: if there is no workdir, the data breaks a rule, or a checkpoint is of another model.
            TimeoutError: if no checkpoint came for so long.
        """
        if workers.num_workers(self.strategy) > 1:
            raise ValueError(
                "evaluate_checkpoints was called on several workers, which do not see a new checkpoint at the same "
                "moment: call it in one process beside them, without TF_CONFIG."
            )
        if self.config.fast_dev_run:
            raise ValueError(
                "evaluate_checkpoints was called with fast_dev_run=True, whose temporary directory no other run writes "
                "to: leave fast_dev_run out."
            )
        source = self._eval_source(dataset)
        self._build(source)
        path = os.path.join(self.config.workdir, "evaluations", f"{name}.jsonl")
        found: dict[int, dict[str, float]] = {}
        writers: list[Any] = []
        try:
            for step in self._progress.follow(read_steps(path), poll_secs, timeout_secs):
                found[step] = self._evaluate(source)
                if not writers:
                    writers = [SummaryWriter(os.path.join(self.config.workdir, "summaries"), [name]), JsonWriter(path)]
                for writer in writers:
                    writer.write(step, {f"{name}/{key}": v for key, v in found[step].items()}, time.time())
        finally:
            for writer in writers:
                writer.close()
        return found

    def predict(self, dataset: Data, *, signature: str | None = None, keep_dtypes: bool = False) -> Any:
        """Predicts for every row of a dataset, in its order.

        Args:
            dataset: as for `fit`; finite.
            signature: which function of a `predict_fn` that is a dict, by name; None: the first.
            keep_dtypes: whether float16 and bfloat16 outputs stay as they are; else they become float32.

        Returns:
            What `predict_fn` returns, as NumPy arrays `[N, ...]`.

        Raises:
            ValueError: if there is no such `predict_fn`, or outputs of different batches do not fit together.
        """
        name = self._signature(signature)
        batches = list(self._stream(self._pass_over(dataset), name, keep_dtypes, is_joined=True))
        if not batches:
            raise ValueError("The dataset to predict for is empty; distloop needs one batch at least.")
        try:
            return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)
        except ValueError as error:
            raise cannot_join(error) from None

    def stream_predictions(
        self, dataset: Data, *, signature: str | None = None, keep_dtypes: bool = False
    ) -> Iterator[Any]:
        """Predicts a batch at a time.

        Args:
            dataset: as for `fit`.
            signature: as for `predict`.
            keep_dtypes: as for `predict`.

        Yields:
            What `predict_fn` returns for each batch, as NumPy arrays `[B, ...]`.

        Raises:
            ValueError: if there is no such `predict_fn`.
        """
        name = self._signature(signature)
        return self._stream(self._pass_over(dataset, may_be_endless=True), name, keep_dtypes)

    def _stream(self, source: Source, signature: str, keep_dtypes: bool, is_joined: bool = False) -> Iterator[Any]:
        self._build(source)
        if (signature, keep_dtypes) not in self._predict_loops:
            step = PredictStep(self.state, self._predict_fns()[signature], keep_dtypes)
            self._predict_loops[signature, keep_dtypes] = PredictLoop(self.state, step, eager=self.config.eager)
        return self._predict_loops[signature, keep_dtypes].predict(source, is_joined=is_joined)

    def export(self, path: str, *, keep_dtypes: bool = False) -> None:
        """Writes what can be served without distloop, with the averaged weights if there are any.

        `path/model.keras` gets the Keras model as a file: layers and weights, without optimizer and losses. Any other
        path gets a SavedModel of `predict_fn`. Its signature `serving_default` takes the batch entries that
        `predict_fn` reads, by name, with a free batch dimension, and returns the outputs by name (`output` where there
        is one without a name). Of a dict of functions, each has a signature of its name, and the first is also
        `serving_default` unless one has that name.

        Args:
            path: of a file, if it ends with `.keras`, else of a directory; replaced, if it is an older export, when the
                new one is whole.
            keep_dtypes: as for `predict`; a Keras model gives what its layers give.

        Raises:
            ValueError: for a SavedModel, if there is no `predict_fn`, or no dataset was seen yet; for a Keras file, if
                the model is not a Keras model, not built, or has layers that Keras cannot read back; for both, if
                something else is in the way, or what was written answers otherwise than the model.
        """
        path = os.fspath(path)
        if self.config.fast_dev_run and (path := dry_run.aside(given := path, self.config.workdir)) != given:
            self._say(f"fast_dev_run: {given!r} is not written; the export goes to a directory that is removed.")
        if os.path.normpath(path).endswith(".keras"):
            write_keras_file(self.state, path)
            return
        predict_fns = self._predict_fns()
        if self._element_spec is None:
            raise ValueError(
                "export needs to know what a batch looks like; call fit, evaluate or predict with a dataset before it."
            )
        write_saved_model(self.state, predict_fns, self._element_spec, path, keep_dtypes)

    def _predict_fns(self) -> Mapping[str, Callable[[Any], Any]]:
        """Gives what predicts, by the names of the signatures."""
        given = self.state.spec.predict_fn
        if given is None:
            raise ValueError(
                "ModelSpec has no predict_fn; give ModelSpec(..., predict_fn=lambda batch: model(batch['image'])), a "
                "function from a batch to outputs, [B, ...]."
            )
        return given if isinstance(given, Mapping) else {signatures.DEFAULT: given}

    def _signature(self, signature: str | None) -> str:
        """Gives the name of the function that is meant."""
        names = list(self._predict_fns())
        if signature in names:
            return str(signature)
        if signature in (None, signatures.DEFAULT):  # as exports call the first one, too
            return names[0]
        if names == [signatures.DEFAULT]:
            raise ValueError(
                f"signature={signature!r} was given, but there is just one predict_fn: leave signature out, or give "
                f"ModelSpec(..., predict_fn={{{signature!r}: function, ...}})."
            )
        raise ValueError(f"signature={signature!r} was given; predict_fn has {names}: give one of them.")

    def _until(self, source: Source, steps: int | None, epochs: int | None) -> int:
        if steps is None and epochs is None:
            steps, epochs = self.config.steps, self.config.epochs

        def is_whole(value: Any) -> bool:
            return isinstance(value, (int, np.integer)) and not isinstance(value, bool)

        for name, value in (("steps", steps), ("epochs", epochs)):
            if value is not None and not (is_whole(value) and value >= 0):
                raise ValueError(f"fit was given {name}={value!r}; it takes a whole number, 1 or more.")
        if bool(steps) == bool(epochs):
            raise ValueError(
                f"fit was given steps={steps} and epochs={epochs}; it needs exactly one of them: give fit(steps=...), "
                "fit(epochs=...), or set one in the config."
            )
        return int(steps) if steps else int(epochs or 0) * source.batches_per_epoch()

    def _pass_over(self, data: Data, may_be_endless: bool = False) -> Source:
        """Makes of data what can be read from its beginning, or finds what was made of it before."""
        source = next((s for s in self._passes if s.data is data), None)
        source = source or Source(data, self.strategy, repeat=False, batch_size=self.config.batch_size)
        if source.is_endless and not may_be_endless:
            raise ValueError(
                "The dataset given to measure on is endless; one pass over it never ends: use take(batches)."
            )
        if not are_arrays(data):  # whose copy is as large as they are, and which may change in place
            self._passes = [source, *(s for s in self._passes if s is not source)][:_KEPT_PASSES]
        return source

    def _eval_source(self, data: Data) -> Source:
        return self._pass_over(data, may_be_endless=self.config.limit_eval_batches > 0)

    def build(self, dataset: Data) -> None:
        """Builds a model that does not know its input shapes yet, as `fit` does; reads no more than a batch.

        Args:
            dataset: as for `fit`.

        Raises:
            ValueError: if the data breaks a rule, or a layer stays without variables.
        """
        self._build(Source(dataset, self.strategy, repeat=False, batch_size=self.config.batch_size))

    def _build(self, source: Source) -> None:
        self._element_spec = source.element_spec
        if not self.state.is_built:
            with loss_scale.policy(self.config.precision):
                self.state.build(source.first_rows())
            self._progress.take_over()

    def _evaluate(self, source: Source) -> dict[str, float]:
        if self._eval_loop is None:
            self._eval_loop = EvalLoop(self.state, eager=self.config.eager)
        return self._eval_loop.evaluate(source, self.config.limit_eval_batches)

    def _make_writers(self, until: int, evals: Sequence[str], forward: tf.Graph | None) -> list[Any]:
        if not self._is_chief:
            return []
        writers: list[Any] = []
        console, workdir = self.config.console, self.config.workdir
        if workdir:
            try:
                summaries = os.path.join(workdir, "summaries")
                os.makedirs(summaries, exist_ok=True)
                writers.append(SummaryWriter(summaries, evals, self.step))
                overview.introduce(writers[-1], self.state, self.config, forward)
                writers.append(JsonWriter(os.path.join(workdir, "metrics.jsonl"), self.step))
            except OSError as error:
                raise ValueError(
                    f"{error.filename!r} in workdir={workdir!r} cannot be written ({error.strerror}): remove what is "
                    "in the way, or give another directory."
                ) from error
        if console != "quiet":
            writers.append(Console(until, self.step, evals=evals, may_draw=console == "auto"))
            if workdir and self.step:
                writers[-1].remember(read_metrics(workdir))  # the best may have been before
        return writers

    def _describe(self, source: Source) -> list[str]:
        """Says on what, with what and where to the run trains: a line each, which begins with a word to look for."""
        settings = self.config
        parts, trained = count_parameters(self.state.model), self.state.num_parameters()
        total = sum(parts.values())
        some = "" if trained == total else f", of which {trained:,} train"
        lines = [
            f"devices {strategies.describe(self.strategy)}",
            f"precision {settings.precision}",
            f"parameters {total:,}{some}" + (f" = {show_parts(parts)}" if len(parts) > 1 else ""),
        ]
        if (split := source.split()) is not None:
            batch_size, sizes = split
            of_worker = " on each worker" if source.layout.is_sharded else ""
            lines.append(f"batch {batch_size}{of_worker}" + (f" = {show_split(sizes)}" if len(sizes) > 1 else ""))
        lines += self.state.placement.describe()
        if settings.microbatches > 1:
            lines.append(f"microbatches {settings.microbatches}")
        if settings.workdir and not settings.fast_dev_run:
            lines.append(f"workdir {os.path.abspath(settings.workdir)}")
            lines.append(f"tensorboard --logdir {shlex.quote(settings.workdir)}")
        return lines

    def _say(self, text: str) -> None:
        """Tells the user, unless it is to be quiet; once, where there are several workers."""
        if self._is_chief and self.config.console != "quiet":
            say(text)
