"""The command line. It does not import torch, so `nwise --help` answers at once; a command is imported when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from io import TextIOWrapper

import nwise
from nwise.lazy import submodule

__all__ = ["COMMANDS", "main", "run"]

# Module of each command, whose class is `TrainCommand` and so on, and its line in `nwise --help`.
COMMANDS = {
    "train": ("training", "Train a recipe, showing loss and accuracy of every head; can be resumed."),
    "compare": ("training", "Train several strategies from the same start; a table and a page."),
    "evaluate": ("training", "Score a run on its test set: every head, and ensembles of the top n heads."),
    "export": ("training", "Write the main network without its heads."),
    "recipes": ("training", "List the recipes."),
    "plan": ("planning", "Find the fastest strategy and number of micro-batches for devices and costs."),
    "schedule": ("drawing", "Show orders of work, in the terminal or as a figure or a trace."),
    "explore": ("drawing", "Write a page on which to explore schedules."),
    "flow": ("drawing", "Draw which loss trains which stage."),
    "report": ("report", "Show runs on one page that opens offline."),
    "same": ("report", "Say whether two runs are the same, bit for bit, or where they part."),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit.

    The exit code is 0 if done, 1 if training failed, 2 for bad input, 74 if trained but not fully written, 75 if stopped
    (resumable), 130 if interrupted, and 141 if the output was closed.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the encoding of an output may lack some characters
    try:
        sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))
    except KeyboardInterrupt:  # while the command is imported
        print("nwise: interrupted", file=sys.stderr)
        sys.exit(130)


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _help()
        return 0
    if arguments[0] == "--version":
        print(nwise.__version__)
        return 0
    from nwise.app.cli.dispatch import dispatch

    return dispatch(arguments[0], arguments[1:])


def _help() -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print("[bold]nwise[/] trains networks in stages; each loss's gradient travels through only N of them.\n")
    console.print("usage: nwise COMMAND [OPTIONS]\n", markup=False)
    table = Table(box=None, show_header=False, padding=(0, 2))
    for name, (_, summary) in COMMANDS.items():
        table.add_row(name, summary)
    console.print(table)
    console.print("\n`nwise COMMAND --help` explains a command; `nwise --version` prints the version.", highlight=False)


__getattr__ = partial(submodule, __name__)
