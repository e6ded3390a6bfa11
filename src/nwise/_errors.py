"""What error messages have in common: the closest known name, and the extra that a missing package is in."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module
from typing import Any

# What people write who know the method by another name.
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
    "zb-h1": "zero-bubble-lean",
    "pipedream-flush": "1f1b",
}


def hint(text: str, names: Iterable[str]) -> str:
    """Suggest a name.

    Args:
        text: that is none of the names.
        names: the known ones.

    Returns:
        The end of an error sentence, empty if no name is close.

    >>> hint("digit", ["digits", "lm1b"]), hint("e2e", ["local", "end-to-end"])
    (" Did you mean 'digits'?", " Did you mean 'end-to-end'?")
    """
    known = list(names)
    alias = _ALIASES.get(text.lower())
    close = [alias] if alias in known else difflib.get_close_matches(text, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def needed(module: str, extra: str, what: str) -> Any:
    """Import a module of a package that is not among the hard dependencies.

    Args:
        module: its dotted name.
        extra: of nwise that has the package.
        what: needs it, for the message, such as "A figure".

    Raises:
        ImportError: the package is not installed.

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
