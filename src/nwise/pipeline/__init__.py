"""The pipeline: a network cut into stages and trained by a strategy."""

from nwise.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
