"""A stage at work: what it computes for a micro-batch, what it keeps, and the weights that it uses."""

from functools import partial

from nwise.lazy import submodule
from nwise.stage.stage import LossFn, Stage

__all__ = ["LossFn", "Stage"]

__getattr__ = partial(submodule, __name__)
