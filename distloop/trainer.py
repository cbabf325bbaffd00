"""The Trainer: `fit`, `evaluate`, `predict`, `export` and the other methods that users call.

trainer = Trainer(model_fn, Config(steps=1000, device="cpu", num_devices=2))
trainer.fit(train_dataset, evals={"test": test_dataset})
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import Unpack

from distloop.actions.evaluate import Evaluation
from distloop.checkpoints.resume import RunCheckpoints
from distloop.data.arrays import with_labels
from distloop.data.iterators import fresh_copy
from distloop.data.source import Data, Passes, Source
from distloop.distributed import collectives, devices, strategies
from distloop.errors import with_short_tracebacks
from distloop.evaluation.evaluation import EvalLoop, make_evaluations
from distloop.evaluation.prediction import Predictor
from distloop.installed import import_part
from distloop.keras_models.compiled_model import warn_of_changes, weights_returned
from distloop.keras_models.fit_arguments import KerasArguments, explain_call, read_arguments
from distloop.log import speaker
from distloop.model import dtype_policy
from distloop.model.spec import ModelSpec, check_model_fn
from distloop.monitoring.curves import History
from distloop.monitoring.timing import Clock
from distloop.monitoring.writers import Writer, check_writers
from distloop.run.assembly import make_state, make_train_loop, make_training_source, reading
from distloop.run.fit import Fit
from distloop.run.fit_call import FitCall, as_given, make_units, run_end
from distloop.run.overview import ForwardPass
from distloop.settings.config import Config
from distloop.training.action import Action, check_actions
from distloop.training.loop import TrainLoop
from distloop.urls import expand
from distloop.workdir.directory import with_absolute_paths

# Settings with which `fit` does something in place of training, and the module of a part that does it.
_INSTEAD = dict.fromkeys(("audit", "autotune_batch", "memory"), "audit.tryouts")
_INSTEAD |= dict.fromkeys(("evaluate", "predict"), "sidecar.finished_run")


@functools.partial(with_short_tracebacks, explain_call=explain_call)
class Trainer:
    """Trains, evaluates and predicts with one model, on the devices that the config names.

    Attributes:
        config: the settings of the run.
        strategy: the `tf.distribute.Strategy`.
        state: everything that training changes.
        workers: the processes that train; exchanges values between them.
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
            strategy: used in place of the one that the config's strategy, device and num_devices describe.

        Raises:
            ValueError: if there are no such devices, or `model_fn` breaks a rule.
        """
        check_model_fn(model_fn)
        devices.prepare_process(config)
        self.strategy = strategies.make_strategy(config) if strategy is None else strategies.check_strategy(strategy)
        strategies.prepare_eager(self.strategy, config.eager)
        self.workers = collectives.Workers(self.strategy)
        config = dtype_policy.with_policy_of_keras(config)
        settings = _tryouts("fast_dev_run").dry_settings(config, owner=self) if config.fast_dev_run else config
        self.config = config = with_absolute_paths(settings)
        self._say = speaker(self.workers.is_chief, config.console)
        self.state = make_state(model_fn, self.strategy, config)
        self._checkpoints = RunCheckpoints(self.state, config)
        collectives.report_phase(self.strategy, "starting", self.state.step)
        self._train_source: Source | None = None
        self._passes = Passes(self.strategy, reading(self.state, config))
        self._predictor = Predictor(self.state, eager=config.eager)
        self._eval_loop = EvalLoop(self.state, eager=config.eager, max_traces=config.max_traces)
        self._forward_pass = ForwardPass(self.state, config)
        self._element_spec: Any = None
        self.has_replayed = False

    def __repr__(self) -> str:
        return f"Trainer(step {self.step}, {strategies.describe(self.strategy)})"

    @property
    def step(self) -> int:
        """The number of calls of the train step, skipped steps included."""
        return int(self.state.step)

    @property
    def model(self) -> Any:
        """The model or models, with the weights that train."""
        return self.state.model

    @property
    def optimizer(self) -> Any:
        """The optimizer, under float16 the `LossScaleOptimizer` around it; with several updates, a dict by name."""
        return self.state.optimizer

    def fit(
        self,
        train: Data,
        y: Any = None,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        until: int | str | None = None,
        evals: Mapping[str, Data | Evaluation] | None = None,
        actions: Sequence[Action] = (),
        writers: Sequence[Writer] = (),
        **keras_arguments: Unpack[KerasArguments],
    ) -> History:
        """Trains until a global step; says so and does nothing if the run is there already.

        A second call with the same dataset or arrays goes on where the first stopped; another starts at its beginning.
        With a workdir, training resumes from the newest checkpoint, and saves every 10 minutes (`checkpoint_every`) and
        at the end. After SIGTERM, Ctrl-C or `max_secs` it saves after the current step, and exits with code 75.

        Args:
            train: a dataset of global batches, a function that returns one, or one worker's part for a
                `tf.distribute.InputContext`, `PyDataset`, generator, `DataLoader`, or arrays
                `[N, ...]`: batches of `Config.batch_size`, shuffled with `Config.seed`; `evals` take them in order.
            y: the labels, if `train` is features alone: `fit(x, y)` is `fit((x, y))`.
            steps: the global step to end with; overrides the config's steps, epochs and until.
            epochs: instead of `steps`: the number of passes over the dataset, counted from step 0.
            until: instead of `steps`: a duration, such as "2 h" of training or "1e6 examples".
            evals: name -> data to evaluate on, every `eval_every` and at the end, or `distloop.Evaluation`.
            actions: called in order after the evaluations; see `distloop.Action`.
            writers: receive each row of `metrics.jsonl`, in order, over stops and kills; see `distloop.Writer`.
            **keras_arguments: `batch_size`, `steps_per_epoch`, `class_weight`, `sample_weight`, `validation_data`,
                `validation_split`.

        Returns:
            The last metrics, also of a run that was there already; those of evaluations as `"test/accuracy"`.

        Raises:
            ValueError: if the data, the loss or an argument breaks a rule, or another process writes to the workdir.
            FloatingPointError: at the first step whose loss or gradient is not finite (`on_nonfinite="raise"`).
            OSError: if the last checkpoint could not be written.
            SystemExit: with code 75 after an interruption; without training, with `audit`, `evaluate` and the like.
        """
        clock, data = Clock(), read_arguments(train, evals, keras_arguments, y)
        if (step := self.config.replay) and not self.has_replayed:
            print(self.replay(train, y, step=step, steps=steps, epochs=epochs, until=until, **keras_arguments))
            raise SystemExit(0)
        if self.has_replayed:
            raise ValueError("fit was called after replay, which has set the weights back: make another Trainer.")
        if asked := next((name for name in _INSTEAD if getattr(self.config, name)), ""):
            import_part(_INSTEAD[asked], asked).run_instead(self, data)
        check_actions(actions)
        check_writers(writers)
        source = self._train_source = make_training_source(data, self.state, self.config, self._train_source)
        length = run_end(self.config, self.step, steps=steps, epochs=epochs, until=until)
        evaluations = make_evaluations(data.evals, self.config, self._passes, self._eval_loop, self._predictor)
        self._build(source)
        call = FitCall(
            state=self.state,
            config=as_given(self.config, source, length),
            source=source,
            units=make_units(source, length),
            evaluations=evaluations,
            actions=actions,
            writers=writers,
            clock=clock,
        )
        result = Fit(call, self._checkpoints, self._forward_pass, lambda: self._train_loop).run()
        if self.config.fast_dev_run:
            another_step = source.gate(functools.partial(self._train_loop.train, source, self.step + 1, []))
            _tryouts("fast_dev_run").check_dry_run(self, source.data, evaluations, another_step, self._say)
        return result

    @functools.cached_property
    def _train_loop(self) -> TrainLoop:
        """What trains: traced once for each kind of data, so it serves every call of `fit`."""
        return make_train_loop(self.state, self.config)

    def replay(self, train: Data, y: Any = None, *, step: int, **arguments: Any) -> Any:
        """Takes a step of the workdir's run again, from the newest checkpoint before it; the workdir is only read.

        One process replays a run of any number of devices and workers. The weights are then those after the step.

        Args:
            train: as for `fit`, of the run.
            y: as for `fit`.
            step: its number, from 1 to the last one that the run has reached.
            **arguments: `steps`, `epochs`, `until` and Keras's arguments, as for `fit`, if they were given to it.

        Returns:
            A `distloop.Replay`; `print` shows the largest losses and gradients.

        Raises:
            ValueError: if there is no such step, nothing to start from, another model, or the trainer has trained.
        """
        replays = import_part("replay.replay", "replay")
        lengths = {name: arguments.pop(name, None) for name in ("steps", "epochs", "until")}
        replays.check(self)
        source = make_training_source(read_arguments(fresh_copy(train), None, arguments, y), self.state, self.config)
        units = make_units(source, run_end(self.config, 0, **lengths))
        self._build(source)
        self.has_replayed = True
        return replays.replay(self.state, self.config, source, units, step)

    def save(self) -> None:
        """Saves a checkpoint and waits until it is complete; only warns while a restored best one is shown after `fit`.

        Raises:
            ValueError: if there is no workdir, another process writes to it, or fit has not run.
            OSError: if it could not be written.
        """
        warn_of_changes(self.state)
        with self._checkpoints:
            self._checkpoints.save_and_wait()

    def restore(self, path: str | None = None, *, which: str = "newest") -> None:
        """Restores a checkpoint: weights, optimizer, averages, counters, and the data position for the next `fit`.

        Args:
            path: a checkpoint, a workdir, an `.npz` or `.safetensors` file; None: this workdir, whose best is "best".
            which: of the checkpoints of a workdir, the "newest" or the "best".

        Raises:
            ValueError: if there is none, it is damaged, or it belongs to another model or optimizer.
        """
        warn_of_changes(self.state)
        with weights_returned(self.state, is_dry_run=self.config.fast_dev_run):
            self._checkpoints.restore(path, which)

    def audit(self, dataset: Data, y: Any = None) -> Any:
        """Looks for mistakes in `model_fn`, `loss_fn` and the data that raise no error; changes nothing.

        `distloop.audit.audit` lists the checks. One device is enough. A model that is not built yet is built.

        Args:
            dataset: as for `fit`; its first batches are read.
            y: as for `fit`.

        Returns:
            An `Audit`: its `findings`, each with `what`, `name` and `hint`; `print` shows a line for each kind.

        Raises:
            ValueError: on several workers, if the first batch has less than two rows, or `loss_fn` breaks a rule.
        """
        return _tryouts("Trainer.audit").audit(self, dataset, y)

    def evaluate(self, dataset: Data, y: Any = None) -> dict[str, float]:
        """Returns name -> metric of one pass over a dataset, with averaged weights if there are any; changes nothing.

        Args:
            dataset: as for `fit`; finite.
            y: as for `fit`.

        Raises:
            ValueError: if the data is endless, empty or breaks a rule.
        """
        return self._evaluation(with_labels(dataset, y))()

    def evaluate_checkpoints(
        self, dataset: Data, *, name: str = "test", poll_secs: float = 5.0, timeout_secs: float = 0.0
    ) -> dict[int, dict[str, float]]:
        """Evaluates each checkpoint of a run that another process trains, once, until that run is complete.

        It writes `evaluations/<name>.jsonl`, and `<name>/` for TensorBoard. A second call leaves out checkpoints that
        have a newer row. `keep_checkpoints` of the run must be so large that none is deleted before its turn.

        Args:
            dataset: as for `fit`; finite.
            name: of the evaluation.
            poll_secs: how often to look for a new checkpoint.
            timeout_secs: how long to wait for one; 0: for ever.

        Returns:
            Step -> name -> metric, of the checkpoints that this call evaluated.

        Raises:
            ValueError: if there is no workdir, the name or the data breaks a rule, or a checkpoint is of another model.
            TimeoutError: if there was no new checkpoint for so long.
        """
        following = import_part("sidecar.following", "evaluate_checkpoints")
        following.check(self.config, self.strategy, name)
        run = self._checkpoints, self._evaluation(dataset), self.config.workdir
        return dict(following.evaluate_checkpoints(*run, name, poll_secs, timeout_secs))

    def predict(
        self, dataset: Data, *, signature: str | None = None, keep_dtypes: bool = False, batches: int = 0,
        path: str = ""
    ) -> Any:  # fmt: skip
        """Predicts for every row of a dataset, in its order, with the averaged weights if there are any.

        Args:
            dataset: as for `fit`; finite.
            signature: the key of a function if `predict_fn` is a dict; None: the first.
            keep_dtypes: whether float16 and bfloat16 outputs keep their dtype; else they become float32.
            batches: the largest number of batches; 0: all.
            path: a directory that gets each output as `<name>.npy`, a batch at a time; it holds no other files.

        Returns:
            The outputs of `predict_fn`, as NumPy arrays `[N, ...]`; None if they are in files.

        Raises:
            ValueError: if there is no such `predict_fn`, or outputs of different batches do not fit together.
        """
        source = self._build(self._passes.source(dataset, batches), metrics=False)
        if path:
            stream = self._predictor.stream(source, signature, keep_dtypes, batches)
            return import_part("sidecar.prediction_files", "path").write_outputs(path, stream, self.workers.is_chief)
        return self._predictor.predict(source, signature, keep_dtypes, batches)

    def stream_predictions(
        self, dataset: Data, *, signature: str | None = None, keep_dtypes: bool = False, batches: int = 0
    ) -> Iterator[Any]:
        """Predicts a batch at a time, with the averaged weights if there are any.

        Args:
            dataset: as for `fit`.
            signature: as for `predict`.
            keep_dtypes: as for `predict`.
            batches: the largest number of batches; 0: all.

        Yields:
            The outputs of `predict_fn` for each batch, as NumPy arrays `[B, ...]`.

        Raises:
            ValueError: if there is no such `predict_fn`.
        """
        source = self._build(self._passes.source(dataset, batches, may_be_endless=True), metrics=False)
        return self._predictor.stream(source, signature, keep_dtypes, batches)

    def export(self, path: str, *, keep_dtypes: bool = False) -> None:
        """Writes the model for use without distloop, with the averaged weights if there are any.

        `.keras`: layers and weights, no optimizer; `.npz`, `.safetensors`: the trained weights; `.tflite`: quantized;
        `.onnx`; else a SavedModel: a signature for each `predict_fn`, the first as `serving_default`, of named entries.

        Args:
            path: a file if it has one of these suffixes, else a directory; replaces an older one when complete.
            keep_dtypes: as for `predict`; a Keras file returns what the layers return.

        Raises:
            ValueError: if something else is at the path, no dataset was seen yet, or the file predicts otherwise.
        """
        devices.require_no_other_scope(self.strategy)
        warn_of_changes(self.state)
        path = expand(path)
        if self.config.fast_dev_run:
            path = _tryouts("fast_dev_run").export_path(path, self.config, self._say)
        exports = import_part("exports.formats", "trainer.export")
        exports.write_export(self.state, self._predictor, self._element_spec, path, keep_dtypes)

    def build(self, dataset: Data, y: Any = None) -> None:
        """Builds a model that does not know its input shapes yet, as `fit` does; reads no more than a batch.

        Args:
            dataset: as for `fit`.
            y: as for `fit`.

        Raises:
            ValueError: if the data breaks a rule, or a layer stays without variables.
        """
        self._build(Source(with_labels(dataset, y), self.strategy, repeat=False, **self._passes.reading))

    def _build(self, source: Source, *, metrics: bool = True) -> Source:
        """Builds the model, and its Keras metrics if asked to, if they are not built yet; returns the data."""
        self._element_spec = source.info.element_spec
        warn_of_changes(self.state)
        with dtype_policy.policy(self.config.precision):
            if not self.state.is_built:
                self.state.build(source.first_rows())
                self._checkpoints.restore_built_model()
            if metrics:
                self._eval_loop.build_metrics(source)
        return source

    def _evaluation(self, data: Data) -> Callable[[], dict[str, float]]:
        source = self._build(self._passes.source(data, self.config.limit_eval_batches))
        return functools.partial(self._eval_loop.evaluate, source, self.config.limit_eval_batches)


def _tryouts(given: str) -> Any:
    """Returns the module by which the part `audit` is known; `given` is the setting or the method that needs it."""
    return import_part("audit.tryouts", given)
