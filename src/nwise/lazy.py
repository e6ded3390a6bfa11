"""Names and submodules of a package that exist without an import, because their first use imports them."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["member", "submodule"]


def submodule(package: str, name: str) -> Any:
    """Import a submodule of a package; a package uses it in ``__getattr__``.

    Args:
        package: full name of the package, or of a module, which has no submodules.
        name: name of the submodule.

    Raises:
        AttributeError: there is no public submodule of this name.

    >>> submodule("nwise", "schedule").__name__
    'nwise.schedule'
    """
    parent = import_module(package)
    if name.startswith("_") or not hasattr(parent, "__path__") or find_spec(f"{package}.{name}") is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return import_module(f"{package}.{name}")


def member(package: str, places: Mapping[str, str], name: str) -> Any:
    """Import a name of a package; a package uses it in ``__getattr__``.

    Args:
        package: full name of the package.
        places: submodule of every name; any other name is that of a submodule.
        name: the name.

    Raises:
        AttributeError: the package has no such name.

    >>> member("nwise.schedule", {"best": "find"}, "best").__module__
    'nwise.schedule.find'
    """
    if name not in places:
        return submodule(package, name)
    value = getattr(import_module(f"{package}.{places[name]}"), name)
    vars(import_module(package))[name] = value  # the next use finds it
    return value


def submodule_names(path: Iterable[str]) -> list[str]:
    """Return the names of the public submodules in a package's ``__path__``."""
    return [module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_")]
