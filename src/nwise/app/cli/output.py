"""Parts that all commands share: exit codes, the console, JSON, settings of tyro."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import tyro
from rich.console import Console

from nwise.app.records import json_line

__all__ = [
    "BAD_INPUT",
    "CLOSED",
    "FAILED",
    "INTERRUPTED",
    "OK",
    "PARSING",
    "STOPPED",
    "UNWRITTEN",
    "Output",
    "print_json",
]

OK = 0
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130  # 128 plus the signal's number, as in a shell
CLOSED = 141
UNWRITTEN = 74  # EX_IOERR and EX_TEMPFAIL of sysexits.h
STOPPED = 75

# tyro's settings for every command.
PARSING = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff)


class Output(Console):
    """Standard output, whose reader may close it, as `head` does.

    Attributes:
        when_closed: function to call once the output is closed, instead of ending the command.
    """

    when_closed: Callable[[], None] | None = None

    def say(self, text: str) -> None:
        """Print text literally, without wrapping or colours."""
        self.print(text, soft_wrap=True, highlight=False, markup=False)

    def on_broken_pipe(self) -> None:
        """Continue silently if there is a `when_closed`, else end the command."""
        hide_output()
        if self.when_closed is None:
            raise BrokenPipeError("the output was closed")
        self.quiet = True
        self.when_closed()


def heading(program: str) -> str:
    """Return the name of a program for its errors, with this process's rank if it is not the first."""
    rank = os.environ.get("RANK", "0")
    return program if rank == "0" else f"{program}, rank {rank}"


def note(text: str, style: str | None = None) -> None:
    """Print text literally to standard error."""
    Console(stderr=True).print(text, style=style, soft_wrap=True, highlight=False, markup=False)


def hide_output() -> None:
    """Redirect a closed standard output to nowhere, or the interpreter would write to it on exit."""
    with suppress(OSError, ValueError):  # in tests it has no descriptor
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)


def print_json(value: Any) -> None:
    """Print one line of JSON; numbers that are not finite become null."""
    print(json_line(value), end="")
