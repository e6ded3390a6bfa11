"""The paper's networks, each as a list of stages with heads."""

from nwise.models.convnet import convnet
from nwise.models.gpt import gpt
from nwise.models.mlp import mlp
from nwise.models.resnet import resnet
from nwise.models.staged import StagedModel, initialize, materialize, merged

__all__ = ["StagedModel", "convnet", "gpt", "initialize", "materialize", "merged", "mlp", "resnet"]
