"""A stage at work: what it computes for a micro-batch, what it keeps, and the weights that it uses."""

from nwise.stage.stage import LossFn, Stage

__all__ = ["LossFn", "Stage"]
