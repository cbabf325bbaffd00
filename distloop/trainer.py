"""Owns the user's verbs: `fit`, `evaluate`, `predict`, `export`. It holds the parts and no knowledge of its own.

trainer = Trainer(model_fn, Config(steps=1000, device="cpu", num_devices=2))
trainer.fit(train_dataset, evals={"test": test_dataset})
outputs = trainer.predict(test_dataset)
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distloop.actions.action import Action
from distloop.actions.evaluate import Evaluate
from distloop.actions.histograms import WeightHistograms
from distloop.checkpoints import sidecar, signatures
from distloop.checkpoints.keras_file import write_keras_file
from distloop.checkpoints.resume import Progress
from distloop.checkpoints.saved_model import write_saved_model
from distloop.config import Config
from distloop.data.arrays import are_arrays, as_dataset
from distloop.data.copies import fresh_copy
from distloop.data.source import Data, Source
from distloop.diagnostics import dry_run, tuning
from distloop.diagnostics.audit import Audit, audit
from distloop.distributed import devices, strategies, workers
from distloop.fit import Fit, check_actions, last_step
from distloop.monitoring.console import say
from distloop.monitoring.timing import Clock
from distloop.optimizers import loss_scale
from distloop.training import overview
from distloop.training.evaluation import EvalLoop
from distloop.training.loop import TrainLoop
from distloop.training.prediction import PredictLoop, PredictStep, cannot_join
from distloop.training.state import ModelSpec, TrainState
from distloop.training.step import TrainStep

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
        self._passes: list[Source] = []  # of evaluations and predictions, the latest first
        self._element_spec: Any = None
        self._forward: tuple[Any, tf.Graph | None] | None = None  # the kind of data, and the graph of the forward pass
        self._predict_loops: dict[tuple[str, bool], PredictLoop] = {}  # by signature and keep_dtypes

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
        clock = Clock()
        if self.config.audit:
            self._leave_after_audit(train)
        if self.config.autotune_batch:
            tuning.autotune_batch(self, train)
            raise SystemExit(0)
        source = self._training_source(train)
        until = self.step + 1 if self.config.fast_dev_run else last_step(self.config, source, steps, epochs)
        check_actions(actions)
        evaluations = self._evaluations(evals or {})
        self._build(source)
        run = Fit(
            state=self.state,
            config=self.config,
            progress=self._progress,
            make_loop=lambda: self._train_loop,
            source=source,
            until=until,
            evaluations=evaluations,
            actions=actions,
            trace_forward=functools.partial(self._trace_forward, source),
            clock=clock,
        )
        if run.resume().is_over:
            return {}
        with run.interruptible():
            metrics = run.train()
        if self.config.fast_dev_run:
            self._dry_run(source)
        return metrics

    def _training_source(self, data: Data) -> Source:
        """Returns the source of the data, the same as in the last call if the data is the same object."""
        config = self.config
        if self._train_source is None or self._train_source.data is not data:
            self._train_source = Source(
                data,
                self.strategy,
                batch_size=config.batch_size,
                shuffle_seed=config.seed,
                microbatches=config.microbatches,
                may_go_back=config.on_divergence == "rollback",
                limit=config.overfit_batches or config.limit_train_batches,
                is_cached=bool(config.overfit_batches),
            )
        if (batch_size := self._train_source.info.batch_size) is not None:
            self.state.placement.check_microbatches(config.microbatches, batch_size)
        return self._train_source

    def _evaluations(self, evals: Mapping[str, Data]) -> list[Evaluate]:
        if not isinstance(evals, Mapping):
            raise ValueError(
                f"evals={evals!r} was given; fit takes a dict of datasets by name: evals={{'test': dataset}}."
            )
        sources = {name: self._eval_source(data) for name, data in evals.items()}
        return [
            Evaluate(name, functools.partial(self._evaluate, source), self.config.eval_every)
            for name, source in sources.items()
        ]

    @functools.cached_property
    def _train_loop(self) -> TrainLoop:
        """Traced once for each kind of data, so it serves every call of `fit`."""
        config, state = self.config, self.state
        histograms = None
        if config.workdir and config.histograms_every:
            histograms = WeightHistograms(state.variables_of_update, state.paths, state.step, config.histograms_every)
        step = TrainStep(
            state,
            microbatches=config.microbatches,
            clip_norm=config.clip_norm,
            skip_nonfinite=config.on_nonfinite == "skip",
            jit_compile=config.jit_compile,
            locate_nonfinite=config.locate_nonfinite,
            loss_jump=config.loss_jump if config.on_divergence == "rollback" else None,
            histograms=histograms,
        )
        return TrainLoop(
            state, step, log_every=config.log_every, steps_per_loop=config.steps_per_loop, eager=config.eager
        )

    def _trace_forward(self, source: Source) -> tf.Graph | None:
        """Returns the graph of the forward pass, traced once for each kind of data; None: it would take too long."""
        kind = source.info.element_spec, source.info.batch_size
        if self._forward is None or self._forward[0] != kind:
            self._forward = kind, overview.trace_forward(self.state, self.config, *kind)
        return self._forward[1]

    def _dry_run(self, source: Source) -> None:
        """Tries what a run may need after its steps; see `dry_run.check`."""
        self._say(f"fast_dev_run: step {self.step} trained, all evaluations measured on a batch")
        predict_fns = self._predict_fns() if self.state.spec.predict_fn is not None else {}

        def predict(signature: str) -> int:
            outputs = next(self.stream_predictions(source.data, signature=signature))
            return len(tf.nest.flatten(outputs)[0])

        for line in dry_run.check(
            self.state,
            train=functools.partial(self._train_loop.train, source, self.step + 1, []),
            restore=self.restore if workers.num_workers(self.strategy) == 1 else None,
            predict={name: functools.partial(predict, name) for name in predict_fns},
            export=functools.partial(self.export, os.path.join(self.config.workdir, "export", "rehearsal")),
        ):
            self._say(f"fast_dev_run: {line}")

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
        evaluate = functools.partial(self._evaluate, source)
        return sidecar.evaluate_checkpoints(
            self._progress, evaluate, self.config.workdir, name, poll_secs=poll_secs, timeout_secs=timeout_secs
        )

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

    def _pass_over(self, data: Data, may_be_endless: bool = False) -> Source:
        """Makes of data what can be read from its beginning, or finds what was made of it before."""
        source = next((s for s in self._passes if s.data is data), None)
        source = source or Source(data, self.strategy, repeat=False, batch_size=self.config.batch_size)
        if source.info.is_endless and not may_be_endless:
            raise ValueError(
                "The dataset given to measure on is endless; one pass over it never ends: use take(batches)."
            )
        if not are_arrays(data):  # a copy of arrays is as large as they are, and they may change in place
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
        self._element_spec = source.info.element_spec
        if not self.state.is_built:
            with loss_scale.policy(self.config.precision):
                self.state.build(source.first_rows())
            self._progress.take_over()

    def _evaluate(self, source: Source) -> dict[str, float]:
        return self._eval_loop.evaluate(source, self.config.limit_eval_batches)

    @functools.cached_property
    def _eval_loop(self) -> EvalLoop:
        return EvalLoop(self.state, eager=self.config.eager)

    def _say(self, text: str) -> None:
        if self._is_chief and self.config.console != "quiet":
            say(text)
