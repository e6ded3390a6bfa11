"""The completion command."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console

from nwise.cli.commands import COMMANDS, command_of
from nwise.cli.output import OK, PARSING


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a script that completes commands and options in a shell: `source <(nwise completion bash)`."""

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional, tyro.conf.arg(metavar="SHELL")] = "bash"
    """bash or zsh."""

    def run(self, console: Console) -> int:
        del console
        sys.stdout.write(script(self.shell))
        return OK


def script(shell: str) -> str:
    """What the shell reads, as tyro makes it for all commands at once."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(
            {name: command_of(name) for name in COMMANDS},
            prog="nwise",
            args=["--tyro-print-completion", shell],
            config=PARSING,
        )
    return out.getvalue()
