"""A user's own network, which a function of the user makes."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from nwise.app.models.staged import StagedModel
from nwise.network import Chain
from nwise.network.section import Section
from nwise.randomness import derive, seeded


def own(name: str, data: Any, seed: int) -> StagedModel:
    """Call a user's function for a network in stages with its heads; initial values depend on the seed alone.

    Args:
        name: ``module:function``; the module is found as ``python -m`` finds it, so also in the current folder. The function takes
            the training data (`nwise.app.data.Images` or `Tokens`) and returns the stages, and the heads of all but the last.
        data: the training data.
        seed: the seed.

    Raises:
        ValueError: the name has another form, or the function returns something else.
        ImportError: there is no such module or function.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"`model` should be a module and a function, like mine:network. Found {name!r}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    make = getattr(import_module(module), function, None)
    if not callable(make):
        raise ImportError(f"Module {module} should have a function {function!r}. Found none.")
    with seeded(derive(seed, "initial")):
        made = make(data)
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(f"{name} should return two lists: stages, and heads of all but the last. Found {made!r:.100}.")
    stages: list[Any] = [one if isinstance(one, Chain | Section) else Chain({f"stage{k}": one}) for k, one in enumerate(made[0])]
    heads = list(made[1])
    ends = [list(stage.pieces())[-1] for stage in stages[:-1]]
    return StagedModel(stages, heads, dict(zip(ends, heads, strict=True)).__getitem__)
