"""A training loop for TensorFlow that gives the same numbers on one CPU, several GPUs and several machines.

trainer = distloop.Trainer(model_fn, distloop.Config(steps=1000))
trainer.fit(dataset)
"""

import importlib
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distloop.actions.action import Action, Report, StopTraining
    from distloop.actions.keras_callback import from_callback
    from distloop.actions.save import SaveBest
    from distloop.actions.stop_early import StopEarly
    from distloop.actions.summary import Summary
    from distloop.config import Config
    from distloop.data.arrays import make_dataset
    from distloop.diagnostics.tuning import BatchTest, RateTest, autotune_batch, find_learning_rate
    from distloop.distributed.gathering import gather_rows
    from distloop.distributed.pipeline import split, stages
    from distloop.distributed.strategies import prepare
    from distloop.flags import define_flags
    from distloop.monitoring.media import Audio, ConfusionMatrix, Histogram, Images, PRCurve, Text
    from distloop.monitoring.records import read_metrics
    from distloop.optimizers.learning_rates import make_schedule, scale_learning_rate
    from distloop.optimizers.loss_scale import LossScaleOptimizer
    from distloop.trainer import Trainer
    from distloop.training.keras_model import from_keras, supervised
    from distloop.training.metrics import weighted
    from distloop.training.state import ModelSpec, Update
    from distloop.variables import summarize

__all__ = [
    "Action",
    "Audio",
    "BatchTest",
    "Config",
    "ConfusionMatrix",
    "Histogram",
    "Images",
    "LossScaleOptimizer",
    "ModelSpec",
    "PRCurve",
    "RateTest",
    "Report",
    "SaveBest",
    "StopEarly",
    "StopTraining",
    "Summary",
    "Text",
    "Trainer",
    "Update",
    "autotune_batch",
    "define_flags",
    "find_learning_rate",
    "from_callback",
    "from_keras",
    "gather_rows",
    "make_dataset",
    "make_schedule",
    "prepare",
    "read_metrics",
    "scale_learning_rate",
    "split",
    "stages",
    "summarize",
    "supervised",
    "weighted",
]

# Which module each name is in. Names are looked up when they are first used, so that what needs no TensorFlow, such as
# the launcher, starts at once. tests/test_house.py holds the three lists together.
_MODULES = {
    "Action": "actions.action",
    "Audio": "monitoring.media",
    "BatchTest": "diagnostics.tuning",
    "Config": "config",
    "ConfusionMatrix": "monitoring.media",
    "Histogram": "monitoring.media",
    "Images": "monitoring.media",
    "LossScaleOptimizer": "optimizers.loss_scale",
    "ModelSpec": "training.state",
    "PRCurve": "monitoring.media",
    "RateTest": "diagnostics.tuning",
    "Report": "actions.action",
    "SaveBest": "actions.save",
    "StopEarly": "actions.stop_early",
    "StopTraining": "actions.action",
    "Summary": "actions.summary",
    "Text": "monitoring.media",
    "Trainer": "trainer",
    "Update": "training.state",
    "autotune_batch": "diagnostics.tuning",
    "define_flags": "flags",
    "find_learning_rate": "diagnostics.tuning",
    "from_callback": "actions.keras_callback",
    "from_keras": "training.keras_model",
    "gather_rows": "distributed.gathering",
    "make_dataset": "data.arrays",
    "make_schedule": "optimizers.learning_rates",
    "prepare": "distributed.strategies",
    "read_metrics": "monitoring.records",
    "scale_learning_rate": "optimizers.learning_rates",
    "split": "distributed.pipeline",
    "stages": "distributed.pipeline",
    "summarize": "variables",
    "supervised": "training.keras_model",
    "weighted": "training.metrics",
}

if not TYPE_CHECKING:  # type checkers would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Looks a public name or a submodule up when it is first used."""
        if name in _MODULES:
            value = getattr(importlib.import_module(f"distloop.{_MODULES[name]}"), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"distloop.{name}"):
            value = importlib.import_module(f"distloop.{name}")
        else:
            raise AttributeError(f"module 'distloop' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
    """Keeps `distloop.supervised` the function, where Python's import would set the submodule of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _MODULES and isinstance(value, types.ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
