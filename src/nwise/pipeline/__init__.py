"""The pipeline: a network cut into stages and trained by a strategy."""

from functools import partial

from nwise.lazy import submodule
from nwise.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]

__getattr__ = partial(submodule, __name__)
