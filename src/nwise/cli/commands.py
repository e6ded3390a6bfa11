"""The commands by name."""

from __future__ import annotations

from typing import Any

from nwise.cli.bench import Bench
from nwise.cli.drawing import Explore, Flow, Schedule
from nwise.cli.planning import Plan
from nwise.cli.report import Report
from nwise.cli.reproduce import Reproduce
from nwise.cli.training import Compare, Evaluate, Export, Recipes, Train

COMMANDS: dict[str, Any] = {
    "train": Train,
    "compare": Compare,
    "evaluate": Evaluate,
    "export": Export,
    "recipes": Recipes,
    "plan": Plan,
    "schedule": Schedule,
    "explore": Explore,
    "flow": Flow,
    "bench": Bench,
    "report": Report,
    "reproduce": Reproduce,
}
