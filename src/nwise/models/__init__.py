"""Networks in stages: the paper's models, `split` for any other network, and builders of heads."""

from functools import partial

from nwise._lazy import submodule
from nwise.models import heads
from nwise.models.convnet import convnet
from nwise.models.gpt import gpt
from nwise.models.mlp import mlp
from nwise.models.resnet import resnet
from nwise.models.staged import StagedModel, initialize, merged

__all__ = ["StagedModel", "convnet", "gpt", "heads", "initialize", "merged", "mlp", "resnet"]

__getattr__ = partial(submodule, __name__)
