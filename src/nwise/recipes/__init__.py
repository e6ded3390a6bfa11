"""Complete, named configurations, one for each experiment of the paper in full and in small size."""

from nwise.recipes.book import RECIPES, recipe
from nwise.recipes.config import (
    Adam,
    ConvNet,
    Digits,
    EmbeddedText,
    Gpt,
    ImageSource,
    Mlp,
    Recipe,
    ResNet,
    Sgd,
    TextSource,
    from_json,
    to_json,
)

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
