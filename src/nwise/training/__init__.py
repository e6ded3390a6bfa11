"""Training a recipe: the loop, optimizers, scores, checkpoints, and the folder a run leaves."""

from nwise.training.build import compile_blocks, pipeline_of
from nwise.training.checkpoint import DamagedError
from nwise.training.checkpoints import Checkpoints, Resumed
from nwise.training.evaluate import Score, Scores, evaluate
from nwise.training.finite import Finite, NotFiniteError
from nwise.training.optimizers import Rate, optimizer_of, rate_factor
from nwise.training.run import Run, new_run
from nwise.training.saver import Keeping
from nwise.training.trainer import StoppedError, Trainer, Watcher
from nwise.training.weights import load_main_state, main_state, save_tensors, weights_of

__all__ = [
    "Checkpoints",
    "DamagedError",
    "Finite",
    "Keeping",
    "NotFiniteError",
    "Rate",
    "Resumed",
    "Run",
    "Score",
    "Scores",
    "StoppedError",
    "Trainer",
    "Watcher",
    "compile_blocks",
    "evaluate",
    "load_main_state",
    "main_state",
    "new_run",
    "optimizer_of",
    "pipeline_of",
    "rate_factor",
    "save_tensors",
    "weights_of",
]
