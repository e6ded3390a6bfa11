"""What a training loop needs beside an optimizer of torch: clipping, checkpoints, guards, and optimizers for late gradients."""

from functools import partial

from nwise.checkpoint import (
    Checkpoints,
    DamagedError,
    Resumed,
    gather_weights,
    load_main_state,
    main_state,
    save_tensors,
)
from nwise.lazy import submodule
from nwise.training.clip import Clip, ClipBy, clip_grad_norm_, clip_groups
from nwise.training.fused import Fused
from nwise.training.late import MuonWithAdam, actual_weights, extrapolate, hidden_matrices, predict, settle
from nwise.training.nonfinite import NonFiniteGuard, NotFiniteError

__all__ = [
    "Checkpoints",
    "Clip",
    "ClipBy",
    "DamagedError",
    "Fused",
    "MuonWithAdam",
    "NonFiniteGuard",
    "NotFiniteError",
    "Resumed",
    "actual_weights",
    "clip_grad_norm_",
    "clip_groups",
    "extrapolate",
    "gather_weights",
    "hidden_matrices",
    "load_main_state",
    "main_state",
    "predict",
    "save_tensors",
    "settle",
]

__getattr__ = partial(submodule, __name__)
