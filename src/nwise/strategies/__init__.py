"""Strategies: the rules by which losses train stages.

To add one, write a class with `credit`, and with `pattern`, `examples` and `from_match` if it should have a name. If it has
arguments, make it a frozen dataclass, as those here are.
"""

from functools import partial

from nwise.lazy import submodule
from nwise.strategies.base import Heads, Strategy, strategy
from nwise.strategies.matrices import Blocks, Credit, DeepSupervision, EndToEnd, Geometric, Local, NWise, Rotating
from nwise.strategies.over_time import Delayed, Hogwild

__all__ = [
    "Blocks",
    "Credit",
    "DeepSupervision",
    "Delayed",
    "EndToEnd",
    "Geometric",
    "Heads",
    "Hogwild",
    "Local",
    "NWise",
    "Rotating",
    "Strategy",
    "strategy",
]

__getattr__ = partial(submodule, __name__)
