"""Checks and hints in messages: the closest known name, and the extra that provides a package."""

from __future__ import annotations

import difflib
import inspect
import math
import warnings
from collections.abc import Iterable
from importlib import import_module
from numbers import Integral
from typing import Any

__all__ = ["check_at_least", "check_limits", "check_optimizer", "check_range", "hint", "needed", "warn"]

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


def check_limits(**values: int | None) -> None:
    """Raise ValueError unless every value is an integer of at least 1, or None for no limit.

    >>> check_limits(max_steps=None, train_limit=4)
    """
    check_at_least(1, **{name: value for name, value in values.items() if value is not None})


def check_range(name: str, number: float, high: float = math.inf, *, least: bool = False) -> None:
    """Raise ValueError unless a number is above 0 (with `least`, at least 0) and below `high`.

    >>> check_range("withheld", 0.0, 1, least=True)
    """
    if not (0 < number < high or (least and number == 0)):
        kind = f"number {'of at least' if least else 'above'} 0"
        wanted = f"finite {kind}" if high == math.inf else f"{kind} and below {high:g}"
        raise ValueError(f"`{name}` should be a {wanted}. Found {number}.")


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

    >>> needed("json", "app", "A figure").__name__
    'json'
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = (error.name or module).partition(".")[0]  # `module` may be there, and lack another one
        raise ImportError(
            f"{what} needs {package}, which is not installed. Install it with `pip install 'nwise[{extra}]'`."
        ) from error


def warn(text: str) -> None:
    """Warn at the line, outside the library, that led to the caller."""
    frame = inspect.currentframe()
    level = 1
    while frame is not None and _is_inside(str(frame.f_globals.get("__name__"))):
        frame = frame.f_back
        level += 1
    warnings.warn(text, stacklevel=level)


def _is_inside(module: str) -> bool:
    return module.partition(".")[0] in ("nwise", "torch", "contextlib") and not module.startswith("nwise.app")
