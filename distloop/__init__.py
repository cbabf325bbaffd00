"""A training loop for TensorFlow that gives the same numbers on one CPU, several GPUs and several machines.

trainer = distloop.Trainer(model_fn, distloop.Config(steps=1000))
trainer.fit(dataset)
"""

from distloop.actions import Action, Report, SaveBest, StopEarly, StopTraining
from distloop.cluster import prepare
from distloop.config import Config, define_flags
from distloop.inputs import make_dataset
from distloop.learning_rates import make_schedule, scale_learning_rate
from distloop.metrics import weighted
from distloop.precision import LossScaleOptimizer
from distloop.state import ModelSpec, Update
from distloop.supervised import from_keras, supervised
from distloop.trainer import Trainer

__all__ = [
    "Action",
    "Config",
    "LossScaleOptimizer",
    "ModelSpec",
    "Report",
    "SaveBest",
    "StopEarly",
    "StopTraining",
    "Trainer",
    "Update",
    "define_flags",
    "from_keras",
    "make_dataset",
    "make_schedule",
    "prepare",
    "scale_learning_rate",
    "supervised",
    "weighted",
]
