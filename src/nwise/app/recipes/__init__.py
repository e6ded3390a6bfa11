"""Named, complete configurations: the experiments of the paper, full size and small."""

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

__all__ = [
    "RECIPES",
    "Adam",
    "ConvNet",
    "Digits",
    "EmbeddedText",
    "Gpt",
    "ImageSource",
    "Mlp",
    "Recipe",
    "ResNet",
    "Sgd",
    "TextSource",
    "from_json",
    "recipe",
    "to_json",
]
