"""The commands by name; each is imported only when it runs, because its imports can take a second."""

from __future__ import annotations

import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import nwise

# Module and class of each command, and its line in `nwise --help`.
COMMANDS = {
    "train": (
        "nwise.cli.training:TrainCommand",
        "Train a recipe, showing loss and accuracy of every head; can be resumed.",
    ),
    "compare": (
        "nwise.cli.training:CompareCommand",
        "Train several strategies from the same start; a table and a figure.",
    ),
    "evaluate": (
        "nwise.cli.training:EvaluateCommand",
        "Score a run on its test set: every head, and ensembles of the top n heads.",
    ),
    "exits": ("nwise.cli.exits:ExitsCommand", "Let sure samples leave early: accuracy against work and time."),
    "export": ("nwise.cli.training:ExportCommand", "Write the main network without its heads."),
    "recipes": ("nwise.cli.training:RecipesCommand", "List the recipes."),
    "plan": (
        "nwise.cli.planning:PlanCommand",
        "Find the fastest strategy and number of micro-batches for devices and costs.",
    ),
    "schedule": (
        "nwise.cli.drawing:ScheduleCommand",
        "Show orders of work, in the terminal or as a figure, a page, or a trace.",
    ),
    "explore": ("nwise.cli.drawing:ExploreCommand", "Write a page on which to explore schedules."),
    "flow": ("nwise.cli.drawing:FlowCommand", "Draw which loss trains which stage."),
    "bench": ("benchmarks.runtime.command:Bench", "Measure the runtime on virtual devices."),
    "report": ("nwise.cli.report:ReportCommand", "Show runs on one page that opens offline."),
    "reproduce": ("experiments.__main__:Reproduce", "Rerun an experiment of the paper, in a copy of the repository."),
}


def load_command(name: str) -> Any:
    """Import the class of a command.

    >>> load_command("train").__name__
    'TrainCommand'
    """
    place = COMMANDS[name][0]
    if not place.startswith("nwise."):
        sys.path.insert(0, str(_repository(name, place)))
    return resolve_name(place)


def _repository(name: str, place: str) -> Path:
    """Return the copy of the repository that has a command's module: nwise's own, or the current folder."""
    module = Path(*place.partition(":")[0].split(".")).with_suffix(".py")
    for root in (Path(nwise.__file__).parents[2], Path.cwd()):
        if (root / module).is_file():
            return root
    raise ImportError(
        f"`nwise {name}` should be run in a copy of the repository, which has the experiments and benchmarks with their "
        "records. Found none here; clone it, and `pip install -e .` there."
    )
