"""Training of a recipe: the loop, optimizers, scores, and the folder of a run."""

from functools import partial

from nwise.app.training.build import autocast, compile_blocks, make_loss, make_pipeline, measurable, pick_device
from nwise.app.training.callback import Callback
from nwise.app.training.evaluation import Score, Scores, evaluate
from nwise.app.training.optimizers import LearningRate, make_optimizer, parameter_groups, rate_factor
from nwise.app.training.run import Run, new_run, versions
from nwise.app.training.saver import CheckpointPolicy
from nwise.app.training.trainer import StoppedError, Trainer
from nwise.lazy import submodule

__all__ = [
    "Callback",
    "CheckpointPolicy",
    "LearningRate",
    "Run",
    "Score",
    "Scores",
    "StoppedError",
    "Trainer",
    "autocast",
    "compile_blocks",
    "evaluate",
    "make_loss",
    "make_optimizer",
    "make_pipeline",
    "measurable",
    "new_run",
    "parameter_groups",
    "pick_device",
    "rate_factor",
    "versions",
]

__getattr__ = partial(submodule, __name__)
