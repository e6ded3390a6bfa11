"""Two or more revisions of nwise on the same virtual devices, in turn, so that a machine that is now fast and now slow is as
kind to the one as to the other.

    python benchmarks/runtime/revisions.py --revisions b8ca249 main --stages 8 16 --rounds 4

writes ``records/<name>.jsonl`` anew and prints medians. Every revision is checked out into a folder of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.progress import track

from nwise.machine import processor
from nwise.runtime.bench import Case

HERE = Path(__file__).parent
# What both revisions are asked to do, by their own code.
SCRIPT = "import json, sys; from dataclasses import asdict; from nwise.runtime.bench import Case, start; "
SCRIPT += "print(json.dumps(asdict(start(Case(**json.loads(sys.argv[1]))))))"


def git(*arguments: str) -> str:
    """What git says."""
    return subprocess.run(
        ["git", "-C", str(HERE), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def measured(source: Path, case: Case) -> dict[str, Any]:
    """A case, by the code of a folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    command = [sys.executable, "-c", SCRIPT, json.dumps(asdict(case))]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(
    revisions: Sequence[str],
    stages: Sequence[int] = (8,),
    methods: Sequence[str] = ("2-wise",),
    microbatches: Sequence[int] = (1, 2),
    mib: float = 0.0,
    rounds: int = 4,
    name: str = "revisions",
) -> None:
    """Measure and write.

    Args:
        revisions: of git.
        stages: numbers of virtual devices.
        methods: of `nwise bench runtime`.
        microbatches: M.
        mib: size of a message.
        rounds: turns of every revision.
        name: of the records.
    """
    console = Console(width=140)
    cases = [
        Case(method=method, stages=size, microbatches=m, message_mib=mib, rounds=1)
        for size in stages
        for method in methods
        for m in microbatches
    ]
    names = {revision: git("rev-parse", "--short", revision) for revision in revisions}
    machine = {"cores": os.cpu_count(), "processor": processor(), "torch": torch.__version__}
    records = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for revision in revisions:
                git("worktree", "add", "--detach", f"{folder}/{names[revision]}", revision)
            turns = [(n, case, revision) for n in range(rounds) for case in cases for revision in revisions]
            for number, case, revision in track(turns, "revisions", console=Console(stderr=True)):
                found = measured(Path(folder, names[revision], "src"), case)
                records.append({"revision": names[revision], "round": number, **asdict(case), **found, **machine})
                (HERE / "records" / f"{name}.jsonl").write_text(
                    "".join(json.dumps(record) + "\n" for record in records)
                )
        finally:
            for made in Path(folder).iterdir():
                git("worktree", "remove", "--force", str(made))
    for case in cases:
        for revision in revisions:
            values = [
                r["efficiency"]
                for r in records
                if r["revision"] == names[revision] and all(r[key] == value for key, value in asdict(case).items())
            ]
            spread = f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"
            console.print(f"A = {case.stages:2d}  {case.method}  M = {case.microbatches}  {names[revision]}  {spread}")


if __name__ == "__main__":
    tyro.cli(main)
