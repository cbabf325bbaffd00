"""A training loop for TensorFlow with the same numbers on any number of devices and machines.

With a `model_fn`, which makes a model and says how it is trained, and a dataset of global batches:

    trainer = distloop.Trainer(model_fn, distloop.Config(steps=1000))
    trainer.fit(dataset)
"""

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from distloop import installed
from distloop import log as log  # which sets the level of its logger, before a program does

# The public names of each module. A name is imported when it is first used, so that what needs no TensorFlow, such as
# the launcher, starts at once.
_NAMES = {
    "actions.evaluate": "Evaluation",
    "actions.save": "SaveBest when_better",
    "actions.stop_early": "StopEarly",
    "actions.summary": "Summary",
    "audit.memory_estimate": "MemoryEstimate estimate_memory",
    "audit.tuning": "BatchTest RateTest autotune_batch find_learning_rate",
    "data.make_dataset": "make_dataset",
    "distributed.gathering": "gather_rows synchronize",
    "distributed.strategies": "prepare",
    "examples.example_history": "ExampleHistory margin rank_mislabelled",
    "examples.worst_examples": "WorstExamples",
    "exports.export_action": "Export",
    "histograms.histograms": "ActivationHistograms",
    "keras_callbacks.keras_callback": "from_callback",
    "keras_models.compiled_model": "from_keras",
    "keras_models.supervised": "supervised",
    "mixtures.mixtures": "Mixture",
    "mixtures.packing": "pack",
    "model.metrics": "weighted",
    "model.spec": "ModelSpec Update",
    "monitoring.curves": "History",
    "monitoring.media": "Audio Histogram Images PRCurve Text",
    "monitoring.writers": "Writer",
    "optimizers.learning_rates": "make_schedule scale_learning_rate",
    "optimizers.loss_scale": "LossScaleOptimizer",
    "pipeline.pipeline": "split stages",
    "records.record_files": "open_records",
    "replay.inspection": "Replay",
    "replay.rerun_faults": "RerunFaults",
    "settings.config": "Config",
    "settings.flags": "define_flags secret_flag",
    "tables.lazy": "LazyAdam LazyAdamW LazySGD",
    "trackers.trackers": "MLflowWriter WandbWriter",
    "trainer": "Trainer",
    "training.action": "Action Report StopTraining",
    "step_fn.gradient_step": "GradientStep OwnStep",
    "variables": "digest summarize",
    "workdir.records": "read_metrics",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__version__ = "0.3.0"

__all__ = sorted(_MODULES)

installed.require_supported()

# TensorFlow reads this when it is imported: of its own log lines, errors remain. Without a driver for GPUs it reports
# missing libraries as errors, so none remain; what fails raises an error in Python all the same.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2" if os.path.exists("/proc/driver/nvidia/version") else "3")

if TYPE_CHECKING:  # the same names for type checkers, which do not run the code below
    from distloop.actions.evaluate import Evaluation as Evaluation
    from distloop.actions.save import SaveBest as SaveBest
    from distloop.actions.save import when_better as when_better
    from distloop.actions.stop_early import StopEarly as StopEarly
    from distloop.actions.summary import Summary as Summary
    from distloop.audit.memory_estimate import MemoryEstimate as MemoryEstimate
    from distloop.audit.memory_estimate import estimate_memory as estimate_memory
    from distloop.audit.tuning import BatchTest as BatchTest
    from distloop.audit.tuning import RateTest as RateTest
    from distloop.audit.tuning import autotune_batch as autotune_batch
    from distloop.audit.tuning import find_learning_rate as find_learning_rate
    from distloop.data.make_dataset import make_dataset as make_dataset
    from distloop.distributed.gathering import gather_rows as gather_rows
    from distloop.distributed.gathering import synchronize as synchronize
    from distloop.distributed.strategies import prepare as prepare
    from distloop.examples.example_history import ExampleHistory as ExampleHistory
    from distloop.examples.example_history import margin as margin
    from distloop.examples.example_history import rank_mislabelled as rank_mislabelled
    from distloop.examples.worst_examples import WorstExamples as WorstExamples
    from distloop.exports.export_action import Export as Export
    from distloop.histograms.histograms import ActivationHistograms as ActivationHistograms
    from distloop.keras_callbacks.keras_callback import from_callback as from_callback
    from distloop.keras_models.compiled_model import from_keras as from_keras
    from distloop.keras_models.supervised import supervised as supervised
    from distloop.mixtures.mixtures import Mixture as Mixture
    from distloop.mixtures.packing import pack as pack
    from distloop.model.metrics import weighted as weighted
    from distloop.model.spec import ModelSpec as ModelSpec
    from distloop.model.spec import Update as Update
    from distloop.monitoring.curves import History as History
    from distloop.monitoring.media import Audio as Audio
    from distloop.monitoring.media import Histogram as Histogram
    from distloop.monitoring.media import Images as Images
    from distloop.monitoring.media import PRCurve as PRCurve
    from distloop.monitoring.media import Text as Text
    from distloop.monitoring.writers import Writer as Writer
    from distloop.optimizers.learning_rates import make_schedule as make_schedule
    from distloop.optimizers.learning_rates import scale_learning_rate as scale_learning_rate
    from distloop.optimizers.loss_scale import LossScaleOptimizer as LossScaleOptimizer
    from distloop.pipeline.pipeline import split as split
    from distloop.pipeline.pipeline import stages as stages
    from distloop.records.record_files import open_records as open_records
    from distloop.replay.inspection import Replay as Replay
    from distloop.replay.rerun_faults import RerunFaults as RerunFaults
    from distloop.settings.config import Config as Config
    from distloop.settings.flags import define_flags as define_flags
    from distloop.settings.flags import secret_flag as secret_flag
    from distloop.step_fn.gradient_step import GradientStep as GradientStep
    from distloop.step_fn.gradient_step import OwnStep as OwnStep
    from distloop.tables.lazy import LazyAdam as LazyAdam
    from distloop.tables.lazy import LazyAdamW as LazyAdamW
    from distloop.tables.lazy import LazySGD as LazySGD
    from distloop.trackers.trackers import MLflowWriter as MLflowWriter
    from distloop.trackers.trackers import WandbWriter as WandbWriter
    from distloop.trainer import Trainer as Trainer
    from distloop.training.action import Action as Action
    from distloop.training.action import Report as Report
    from distloop.training.action import StopTraining as StopTraining
    from distloop.variables import digest as digest
    from distloop.variables import summarize as summarize
    from distloop.workdir.records import read_metrics as read_metrics
else:

    def __getattr__(name: str) -> Any:
        """Imports a public name or a submodule when it is first used."""
        if name in _MODULES:
            try:
                value = getattr(installed.import_part(_MODULES[name], f"distloop.{name}"), name)
            except ValueError as error:
                raise AttributeError(str(error)) from error
        elif not name.startswith("_") and importlib.util.find_spec(f"distloop.{name}"):
            value = importlib.import_module(f"distloop.{name}")
        else:
            raise AttributeError(f"module 'distloop' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
