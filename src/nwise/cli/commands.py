"""The commands by name, each imported when it is asked for: what one of them needs can take a second to load."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

COMMANDS = {
    "train": "training:Train",
    "compare": "training:Compare",
    "evaluate": "training:Evaluate",
    "export": "training:Export",
    "recipes": "training:Recipes",
    "plan": "planning:Plan",
    "schedule": "drawing:Schedule",
    "explore": "drawing:Explore",
    "flow": "drawing:Flow",
    "bench": "bench:Bench",
    "report": "report:Report",
    "reproduce": "reproduce:Reproduce",
    "completion": "completion:Completion",
}


def command_of(name: str) -> Any:
    """A command's class.

    >>> command_of("train").__name__
    'Train'
    """
    return resolve_name(f"nwise.cli.{COMMANDS[name]}")
