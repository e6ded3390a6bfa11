"""The commands by name, each imported when it is asked for: what one of them needs can take a second to load."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A command.

    Args:
        place: of its class, below `nwise.cli`.
        summary: what `nwise --help` says of it.
    """

    place: str
    summary: str


COMMANDS = {
    "train": Command("training:Train", "Train a recipe, showing loss and accuracy of every head; can be resumed."),
    "compare": Command("training:Compare", "Train several strategies from the same start; a table and a figure."),
    "evaluate": Command(
        "training:Evaluate", "Score a run on its test set: every head, and ensembles of the top n heads."
    ),
    "export": Command("training:Export", "Write the main network alone, heads dropped."),
    "recipes": Command("training:Recipes", "List the recipes."),
    "plan": Command("planning:Plan", "Find the fastest strategy and number of micro-batches for devices and costs."),
    "schedule": Command("drawing:Schedule", "Show orders of work, in the terminal or as a figure, a page, or a trace."),
    "explore": Command("drawing:Explore", "Write a page to explore schedules on."),
    "flow": Command("drawing:Flow", "Draw which loss trains which stage."),
    "bench": Command("beside:bench", "Measure the runtime on virtual devices."),
    "report": Command("report:Report", "Show runs on one page that opens offline."),
    "reproduce": Command("beside:reproduce", "Run an experiment of the paper again, in a copy of the repository."),
}


def command_of(name: str) -> Any:
    """A command's class.

    >>> command_of("train").__name__
    'Train'
    """
    found = resolve_name(f"nwise.cli.{COMMANDS[name].place}")
    return found() if COMMANDS[name].place.startswith("beside:") else found
