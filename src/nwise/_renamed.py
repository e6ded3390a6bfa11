"""Names of version 0.1, which version 0.3 will not have: each works, with a warning that has the current one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from nwise.lazy import submodule

# Of orders of work, in calls and on the command line.
_ORDERS = {"zero-bubble-lean": "zb-h1"}


def deprecated_names(module: str, renamed: Mapping[str, str], *, stacklevel: int = 2) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that answers the keys of `renamed` with the values, and imports submodules.

    Args:
        module: name of the module.
        renamed: current names by old ones.
        stacklevel: frames from the warning to the user's line; default: 2, if the result is the module's own ``__getattr__``.
    """

    def answer(name: str) -> Any:
        if name not in renamed:
            return submodule(module, name)
        _warn(f"{module}.{name}", f"{module}.{renamed[name]}", stacklevel + 1)
        return getattr(import_module(module), renamed[name])

    return answer


def current_name(name: Any) -> Any:
    """Return the current name for an old one, with a warning; return every other value unchanged.

    >>> current_name("1f1b")
    '1f1b'
    """
    if not isinstance(name, str) or name not in _ORDERS:
        return name
    warnings.warn(f"{name!r} is now {_ORDERS[name]!r}; version 0.3 will refuse it.", DeprecationWarning, stacklevel=3)
    return _ORDERS[name]


def _warn(old: str, new: str, stacklevel: int = 3) -> None:
    text = f"{old} is now {new}; version 0.3 will not have the old name."
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
