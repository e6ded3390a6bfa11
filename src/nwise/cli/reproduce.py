"""The experiments' command, which lies beside the package and not in it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import nwise


def command() -> Any:
    """Find the command in the copy of the repository that nwise was installed from, or in this folder.

    Raises:
        ImportError: there is none.
    """
    for root in (Path(nwise.__file__).parents[2], Path.cwd()):
        if (root / "experiments" / "harness").is_dir():
            sys.path.insert(0, str(root))
            return import_module("experiments.__main__").Reproduce
    raise ImportError(
        "`nwise reproduce` should be run in a copy of the repository, which has the experiments and their records. Found none "
        "here; clone it, and `pip install -e .` there."
    )
