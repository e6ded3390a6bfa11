"""What commands have in common: exit codes, the console, JSON, options that lie flat."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import tyro
from rich.console import Console

from nwise._records import plain

OK, FAILED, BAD_INPUT = 0, 1, 2
INTERRUPTED, CLOSED = 130, 141  # 128 and the number of the signal, as a shell has it
UNWRITTEN, STOPPED = 74, 75  # EX_IOERR and EX_TEMPFAIL of sysexits.h

# `--lr`, not `--config.lr`.
FLAT = tyro.conf.arg(name="")
# How every command line is parsed, and completed.
PARSING = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff)


class Output(Console):
    """Standard output, which its reader may close, as `head` does.

    Attributes:
        when_closed: called once the output is closed, instead of ending the command.
    """

    when_closed: Callable[[], None] | None = None

    def on_broken_pipe(self) -> None:
        """Go on in silence if somebody waits for this, else end the command."""
        hide_output()
        if self.when_closed is None:
            raise BrokenPipeError("the output was closed")
        self.quiet = True
        self.when_closed()


def hide_output() -> None:
    """Let nothing more be written to an output that is closed, not by the interpreter as it ends either."""
    with suppress(OSError, ValueError):  # of tests, it has no descriptor
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)


def print_json(value: Any) -> None:
    """One line of JSON; what is not a finite number is null."""
    print(json.dumps(plain(value), allow_nan=False))
