"""The networks of the paper, in stages with heads."""

from functools import partial

from nwise.app.models.gpt import gpt
from nwise.app.models.own import own
from nwise.app.models.plain import convnet, mlp
from nwise.app.models.resnet import resnet
from nwise.app.models.staged import StagedModel, initialize, merged
from nwise.lazy import submodule

__all__ = ["StagedModel", "convnet", "gpt", "initialize", "merged", "mlp", "own", "resnet"]

__getattr__ = partial(submodule, __name__)
