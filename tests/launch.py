"""Starts a script of `tests/ranks` on several processes with torchrun, as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RANKS = Path(__file__).parent / "ranks"


def torchrun(
    num_processes: int, arguments: list[str], *, timeout: float = 200, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python <arguments>`` on every rank; a rank that still runs after `timeout` seconds is a failure."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RANKS.parent), **(environment or {})}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=timeout, env=variables, check=False
    )


def results(num_processes: int, script: str, folder: Path, *arguments: str, **options: Any) -> list[Any]:
    """What each rank wrote, as JSON, into ``<folder>/<rank>.json``; an error of any rank is one here."""
    done = torchrun(num_processes, [str(RANKS / script), str(folder), *arguments], **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]
