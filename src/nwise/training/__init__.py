"""Training a recipe: the loop, optimizers, scores, and the folder a run leaves."""

from nwise.training.evaluate import Score, Scores, evaluate
from nwise.training.optimizers import Rate, optimizer_of, rate_factor
from nwise.training.run import Run, load_main_state, main_state, save_tensors, weights_of
from nwise.training.trainer import Trainer, Watcher, compile_blocks, new_run, pipeline_of

__all__ = [
    "Rate",
    "Run",
    "Score",
    "Scores",
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
