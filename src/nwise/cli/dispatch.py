"""From the words of a command line to a command that runs and ends in a sentence."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from nwise._errors import current_name, hint
from nwise.cli.commands import COMMANDS, command_of
from nwise.cli.output import BAD_INPUT, CLOSED, FAILED, INTERRUPTED, PARSING, Output, hide_output
from nwise.recipes import recipe
from nwise.runtime.team import tell_all
from nwise.runtime.watch import RankError
from nwise.runtime.world import launched
from nwise.training import Run


def dispatch(name: str, arguments: list[str]) -> int:
    """Run a command and return its exit code.

    Args:
        name: of the command.
        arguments: that follow it.
    """
    try:
        if name not in COMMANDS:
            raise ValueError(f"A command should be one of {', '.join(COMMANDS)}. Found {name!r}.{hint(name, COMMANDS)}")
        if launched() and name != "train":
            raise ValueError(f"`nwise {name}` should be run in one process. Found several; start it without torchrun.")
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(f"nwise {name}: warning: {message}", file=sys.stderr)
            warnings.filterwarnings("default", category=DeprecationWarning, module="nwise")
            code = int(parsed(name, [current_name(word) for word in arguments]).run(Output()))
            sys.stdout.flush()
            return code
    except KeyboardInterrupt as error:
        tell_all(error)
        print(f"nwise {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except RankError:  # every rank has said what it was
        return FAILED
    except BrokenPipeError:
        hide_output()
        print(f"nwise {name}: the output was closed.", file=sys.stderr)
        return CLOSED
    except (ValueError, TypeError, OSError, ImportError, RecursionError) as error:
        tell_all(error)
        rank = os.environ.get("RANK", "0")
        where = f"nwise {name}" if rank == "0" else f"nwise {name}, rank {rank}"
        Console(stderr=True).print(f"{where}: {error}", style="red", soft_wrap=True, highlight=False, markup=False)
        return BAD_INPUT


def parsed(name: str, arguments: list[str]) -> Any:
    """The command with its options, not run."""
    kind = command_of(name)
    # A recipe's name decides the defaults of all other options, so it is looked for first.
    chosen = arguments[0] if arguments and not arguments[0].startswith("-") else "digits"
    folder = _value(arguments, "--resume") if name == "train" else None
    if folder is not None:
        config = Run.open(Path(folder)).recipe
        command = _tyro(kind, name, arguments, kind(recipe=config.name, config=config))
        if command.recipe != config.name:
            raise ValueError(
                f"`RECIPE` should be that of the run, {config.name!r}, or be left out. Found {command.recipe!r}."
            )
        return command
    while True:
        default = kind(recipe=chosen, config=recipe(chosen)) if name in ("train", "compare") else None
        command = _tyro(kind, name, arguments, default)
        if default is None or command.recipe == chosen:
            return command
        chosen = command.recipe


def _value(arguments: list[str], option: str) -> str | None:
    """What an option is given, as ``--option value`` or ``--option=value``."""
    found = None  # the last one holds
    for argument, following in zip(arguments, [*arguments, "-"][1:], strict=True):
        if argument == option and not following.startswith("-"):
            found = following
        if argument.startswith(f"{option}="):
            found = argument.partition("=")[2]
    return found


def _tyro(kind: Callable[..., Any], name: str, arguments: list[str], default: Any) -> Any:
    return tyro.cli(
        kind,
        prog=f"nwise {name}",
        args=arguments,
        **({} if default is None else {"default": default}),
        config=PARSING,
    )
