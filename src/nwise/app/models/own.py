"""A user's own network, which a function of the user makes."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from nwise.app.models.staged import StagedModel
from nwise.network import Chain
from nwise.process import find_modules_here
from nwise.randomness import derive, seeded


def own(name: str, data: Any, seed: int) -> StagedModel:
    """Call a user's function for a network in stages with its heads; initial values depend on the seed alone.

    Args:
        name: ``module:function``; the module may be in the current folder. The function takes the training data
            (`nwise.app.data.Images` or `Tokens`). It returns two lists: the stages, and heads of all but the last.
        data: the training data.
        seed: the seed.

    Raises:
        ValueError: the name has another form, there is no such function, or it returns something else.
        ImportError: there is no such module.
    """
    find_modules_here()
    try:
        make = resolve_name(name)
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"`model` should be a module and its function, like mine:network. Found {name!r}: {error}."
        ) from error
    with seeded(derive(seed, "initial")):
        made = make(data)
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(f"{name} should return two lists: stages, and heads of all but the last. Found {made!r:.100}.")
    stages: list[Any] = [one if hasattr(one, "pieces") else Chain({f"stage{k}": one}) for k, one in enumerate(made[0])]
    ends = [list(stage.pieces())[-1] for stage in stages[:-1]]
    return StagedModel(stages, list(made[1]), dict(zip(ends, made[1], strict=False)).__getitem__)
