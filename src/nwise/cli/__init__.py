"""The command line. It does not import torch, so `nwise --help` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import nwise
from nwise.cli.commands import COMMANDS

__all__ = ["main", "run"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit.

    The exit code is 0 if done, 1 if training failed, 2 for bad input, 74 if trained but not fully written, 75 if stopped
    (resumable), 130 if interrupted, and 141 if the output was closed.
    """
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _help()
        return 0
    if arguments[0] == "--version":
        print(nwise.__version__)
        return 0
    from nwise.cli.dispatch import dispatch

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
