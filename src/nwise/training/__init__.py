"""What a training loop needs beside an optimizer of torch: clipping, guards, and optimizers for late gradients."""

from functools import partial

from nwise.lazy import submodule
from nwise.training.clip import Clip, ClipBy, clip_grad_norm_, clip_groups
from nwise.training.fused import Fused
from nwise.training.late import MuonWithAdam, actual_weights, extrapolate, hidden_matrices, predict, settle
from nwise.training.nonfinite import NonFiniteGuard, NotFiniteError

__all__ = [
    "Clip",
    "ClipBy",
    "Fused",
    "MuonWithAdam",
    "NonFiniteGuard",
    "NotFiniteError",
    "actual_weights",
    "clip_grad_norm_",
    "clip_groups",
    "extrapolate",
    "hidden_matrices",
    "predict",
    "settle",
]

__getattr__ = partial(submodule, __name__)
