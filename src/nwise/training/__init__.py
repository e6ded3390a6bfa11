"""Training of a recipe: the loop, optimizers, scores, checkpoints, and the folder of a run."""

from functools import partial

from nwise._lazy import submodule
from nwise.training.build import compile_blocks, make_pipeline
from nwise.training.callback import Callback
from nwise.training.checkpoint.files import DamagedError
from nwise.training.checkpoint.policy import CheckpointPolicy, Checkpoints, Resumed
from nwise.training.clip import Clip, clip_grad_norm_
from nwise.training.evaluate import Score, Scores, evaluate
from nwise.training.nonfinite import NonFiniteGuard, NotFiniteError
from nwise.training.optimizers import LearningRate, make_optimizer, rate_factor
from nwise.training.run import Run, new_run
from nwise.training.trainer import StoppedError, Trainer
from nwise.training.weights import gather_weights, load_main_state, main_state, save_tensors

__all__ = [
    "Checkpoints",
    "Clip",
    "DamagedError",
    "NonFiniteGuard",
    "CheckpointPolicy",
    "NotFiniteError",
    "LearningRate",
    "Resumed",
    "Run",
    "Score",
    "Scores",
    "StoppedError",
    "Trainer",
    "Callback",
    "clip_grad_norm_",
    "compile_blocks",
    "evaluate",
    "load_main_state",
    "main_state",
    "new_run",
    "make_optimizer",
    "make_pipeline",
    "rate_factor",
    "save_tensors",
    "gather_weights",
]

__getattr__ = partial(submodule, __name__)
