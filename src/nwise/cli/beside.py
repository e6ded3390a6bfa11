"""Commands whose code lies beside the package, in a copy of the repository: experiments and benchmarks."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import nwise


def reproduce() -> Any:
    """Find the command that runs the paper again."""
    return _beside("reproduce", "experiments.__main__", "Reproduce")


def bench() -> Any:
    """Find the command that measures the runtime."""
    return _beside("bench", "benchmarks.runtime.command", "Bench")


def _beside(command: str, module: str, name: str) -> Any:
    """Import from the repository that nwise was installed from, or that this folder is.

    Raises:
        ImportError: there is none.
    """
    for root in (Path(nwise.__file__).parents[2], Path.cwd()):
        if root.joinpath(*module.split(".")).with_suffix(".py").is_file():
            sys.path.insert(0, str(root))
            return getattr(import_module(module), name)
    raise ImportError(
        f"`nwise {command}` should be run in a copy of the repository, which has the experiments and benchmarks with their "
        "records. Found none here; clone it, and `pip install -e .` there."
    )
