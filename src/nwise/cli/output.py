"""What commands have in common: exit codes, JSON, options that lie flat."""

from __future__ import annotations

import json
from typing import Any

import tyro

from nwise.training.run import plain

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
UNWRITTEN, STOPPED = 74, 75  # EX_IOERR and EX_TEMPFAIL of sysexits.h

# `--lr`, not `--config.lr`.
FLAT = tyro.conf.arg(name="")
# How every command line is parsed, and completed.
PARSING = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff)


def print_json(value: Any) -> None:
    """One line of JSON; what is not a finite number is null."""
    print(json.dumps(plain(value), allow_nan=False))
