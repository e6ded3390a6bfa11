"""All public names on one page, from signatures and docstrings: ``python docs/reference_page.py`` writes ``reference.md``."""

from __future__ import annotations

import inspect
import re
from enum import Enum
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = (
    "nwise",
    "nwise.heads",
    "nwise.losses",
    "nwise.checkpoint",
    "nwise.exits",
    "nwise.compression",
    "nwise.training",
    "nwise.schedule",
    "nwise.app",
    "nwise.app.models",
    "nwise.app.data",
    "nwise.app.recipes",
)
WITH_METHODS = ("Pipeline", "Checkpoints", "Log", "Strategy", "Schedule")
PAGE = Path(__file__).parent / "reference.md"


def page() -> str:
    """Return the page."""
    lines = [
        "# All public names",
        "",
        "One line for each name: its call with defaults, and what it does. `help(nwise.split)` has arguments, shapes, units,",
        "errors and an example, and so has the [API](api/index.md) of the built manual. `python docs/reference_page.py` writes",
        "this page.",
    ]
    for module in MODULES:
        lines += ["", f"## {module}", "", "| name | what it does |", "|---|---|"]
        for name in sorted(import_module(module).__all__):
            value = getattr(import_module(module), name)
            if inspect.isclass(value) or inspect.isroutine(value):
                lines += _rows(name, value)
    return "\n".join([*lines, ""])


def _rows(name: str, value: Any) -> list[str]:
    """Return the line of a name, and those of its methods where it has any that people call."""
    rows = [f"| `{name}{_arguments(value)}` | {_first_sentence(value)} |"]
    if name in WITH_METHODS:
        for method, found in sorted(inspect.getmembers(value)):
            own = any(method in vars(base) for base in value.__mro__ if base.__module__.startswith("nwise"))
            called = inspect.isroutine(found) or isinstance(found, property | cached_property)
            if own and called and not method.startswith("_"):
                rows.append(f"| `{name}.{method}{_arguments(found)}` | {_first_sentence(found)} |")
    return rows


def _arguments(value: Any) -> str:
    """Return the parameters with their defaults, without types; empty for what is not called."""
    is_plain = inspect.isclass(value) and issubclass(value, Exception | Enum)
    if is_plain or isinstance(value, property | cached_property):
        return ""
    shown = []
    starred = False
    for one in inspect.signature(value).parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not starred:
            shown.append("*")
            starred = True
        starred |= one.kind is one.VAR_POSITIONAL
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        default = "" if one.default is one.empty else f"={_shown(one.default)}"
        shown.append(f"{stars}{one.name}{default}")
    return f"({', '.join(shown)})"


def _shown(default: Any) -> str:
    """Return a default as it would be written."""
    text = getattr(default, "__name__", None) or repr(default)
    return text if re.fullmatch(r"[\w.'\"\-(), ]{0,30}", text) else "..."


def _first_sentence(value: Any) -> str:
    """Return the first sentence of a docstring, on one line."""
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text)[0].replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
