"""Named, complete configurations: the experiments of the paper, full size and small."""

from functools import partial

from nwise.app.recipes.book import RECIPES, recipe
from nwise.app.recipes.config import (
    ConvNet,
    Digits,
    EmbeddedText,
    Gpt,
    ImageSource,
    Mlp,
    Recipe,
    ResNet,
    TextSource,
    from_json,
    to_json,
)
from nwise.app.recipes.optimizers import Adam, Sgd
from nwise.app.recipes.phases import Phases, in_force, joined, parse_phases, spans
from nwise.lazy import submodule

__all__ = [
    "RECIPES",
    "Adam",
    "ConvNet",
    "Digits",
    "EmbeddedText",
    "Gpt",
    "ImageSource",
    "Mlp",
    "Phases",
    "Recipe",
    "ResNet",
    "Sgd",
    "TextSource",
    "from_json",
    "in_force",
    "joined",
    "parse_phases",
    "recipe",
    "spans",
    "to_json",
]

__getattr__ = partial(submodule, __name__)
