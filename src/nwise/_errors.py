"""Checks and hints in messages: the closest known name, and the extra that provides a package."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from importlib import import_module
from numbers import Integral
from typing import Any

# Names that other projects use for the same method.
_ALIASES = {
    "e2e": "end-to-end",
    "endtoend": "end-to-end",
    "backprop": "end-to-end",
    "bp": "end-to-end",
    "global": "end-to-end",
    "greedy": "local",
    "layerwise": "local",
    "dgl": "local",
    "zb": "zero-bubble",
    "zero-bubble-h1": "zb-h1",
    "pipedream-flush": "1f1b",
}


def hint(text: str, names: Iterable[str]) -> str:
    """Suggest the closest known name for an unknown one: the end of an error sentence, empty if no name is close.

    >>> hint("digit", ["digits", "lm1b"]), hint("e2e", ["local", "end-to-end"])
    (" Did you mean 'digits'?", " Did you mean 'end-to-end'?")
    """
    known = list(names)
    alias = _ALIASES.get(text.lower())
    close = [alias] if alias in known else difflib.get_close_matches(text, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_at_least(minimum: int, **values: object) -> None:
    """Raise ValueError unless every value is an integer of at least `minimum`.

    >>> check_at_least(1, keep=2, num_stages=4)
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
            raise ValueError(f"`{name}` should be an integer of at least {minimum}. Found {value!r}.")


def check_share(**values: float) -> None:
    """Raise ValueError unless every value is from 0 to below 1.

    >>> check_share(withheld=0.1)
    """
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"`{name}` should be from 0 to below 1. Found {value}.")


def check_optimizer(optimizer: object) -> None:
    """Raise ValueError if an optimizer evaluates the loss itself, in a closure, as LBFGS does."""
    step = inspect.signature(optimizer.step).parameters  # type: ignore[attr-defined]
    if any(p.name == "closure" and p.default is inspect.Parameter.empty for p in step.values()):
        raise ValueError(
            f"`optimizer` should update from `.grad` alone. Found {type(optimizer).__name__}, which evaluates one loss of all "
            "parameters several times a step, and there are several losses; use SGD or Adam."
        )


def needed(module: str, extra: str, what: str) -> Any:
    """Import a module of an optional dependency, or raise ImportError that names the extra of nwise that installs it.

    >>> needed("json", "figures", "A figure").__name__
    'json'
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{what} needs {package}, which is not installed. Install it with `pip install 'nwise[{extra}]'`."
        ) from error
