"""Parse a command line, run the command, and turn errors into one sentence and an exit code."""

from __future__ import annotations

import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import tyro

from nwise.app.cli import COMMANDS
from nwise.app.cli.output import BAD_INPUT, CLOSED, FAILED, INTERRUPTED, OK, PARSING, Output, heading, hide_output, note
from nwise.app.recipes import RECIPES, recipe
from nwise.app.training import Run
from nwise.checkpoint import PARTIAL
from nwise.checks import hint
from nwise.runtime.calls import RankError
from nwise.runtime.launch import launched
from nwise.runtime.processes import tell_all

__all__ = ["execute"]

# Commands of 0.2, and what to do instead.
_GONE = {"exits": " Choose thresholds in a script, as `examples/exits.py` does."}


def dispatch(name: str, arguments: list[str]) -> int:
    """Run a command of `nwise`, with the words after its name, and return its exit code."""

    def command() -> Any:
        if name not in COMMANDS:
            meant = _GONE.get(name) or hint(name, COMMANDS)
            raise ValueError(f"A command should be one of {', '.join(COMMANDS)}. Found {name!r}.{meant}")
        if launched() and name != "train":
            raise ValueError(f"`nwise {name}` should be run in one process. Found several; start it without torchrun.")
        if "--log-to" in arguments:
            raise ValueError(f"`nwise {name}` should log by a callback of yours (docs/looking.md). Found `--log-to`.")
        return parse(name, arguments)

    return execute(f"nwise {name}", command)


def execute(program: str, command: Callable[[], Any]) -> int:
    """Make and run a command; print every error as one sentence, and return the exit code.

    Args:
        program: words that start it, for messages.
        command: function that returns an object with ``run(output)``, which returns an exit code, or None if all is done.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(f"{program}: warning: {message}", file=sys.stderr)
            code = int(command().run(Output()) or OK)
            if sys.stdout is not None:  # None if it is closed
                sys.stdout.flush()
            return code
    except KeyboardInterrupt as error:
        tell_all(error)
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except RankError:  # every rank has printed its error
        return FAILED
    except BrokenPipeError:
        hide_output()
        print(f"{program}: the output was closed.", file=sys.stderr)
        return CLOSED
    except (ValueError, TypeError, OSError, ImportError, RecursionError) as error:
        tell_all(error)
        note(f"{heading(program)}: {_sentence(error)}", "red")
        return BAD_INPUT


def _sentence(error: Exception) -> str:
    """Return the text of an error; an error of the operating system itself only names a path."""
    if not isinstance(error, OSError) or error.filename is None or error.errno is None:
        return str(error)
    path = str(error.filename).removesuffix(PARTIAL)
    return f"{path!r} should be a path that can be read and written. Found: {error.strerror}; give another path."


def parse(name: str, arguments: list[str]) -> Any:
    """Return the command with its options, ready to run."""
    kind = resolve_name(f"nwise.app.cli.{COMMANDS[name][0]}:{name.capitalize()}Command")
    options = partial(tyro.cli, kind, prog=f"nwise {name}", args=arguments, config=PARSING)
    if name not in ("train", "compare"):
        return options()
    if name == "train" and (folder := _resume(arguments)) is not None:
        config = Run.open(folder).recipe
        command = options(default=kind(recipe=config.name, config=config))
        if command.recipe != config.name:
            found = f"Found {command.recipe!r}."
            raise ValueError(f"`RECIPE` should be the run's own, {config.name!r}, or be left out. {found}")
        return command
    # The recipe decides the defaults of all other options, and may come after them. So a first parse with a guess finds the
    # recipe: the first word, or any word that is one, unless it is the value of an option. The second has its defaults.
    is_first = bool(arguments) and not arguments[0].startswith("-")
    words = arguments[:1] if is_first else [word for word in arguments if word in RECIPES]
    guess = words[0] if words else "digits"
    command = options(default=kind(recipe="" if words and not is_first else guess, config=recipe(guess)))
    chosen = command.recipe or "digits"
    return command if command.recipe == guess else options(default=kind(recipe=chosen, config=recipe(chosen)))


def _resume(arguments: list[str]) -> Path | None:
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", type=Path, nargs="?")  # tyro complains of a missing value
    return parser.parse_known_args(arguments)[0].resume
