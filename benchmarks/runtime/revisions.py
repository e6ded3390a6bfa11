"""Two or more revisions of nwise on the same virtual devices, in turn, so that a machine that is now fast and now slow is as
kind to the one as to the other.

    python -m benchmarks.runtime.revisions --revisions b8ca249 main --stages 8 16 --rounds 4

writes ``records/<name>.jsonl`` anew and prints medians. Every revision is checked out into a folder of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.runtime.bench import Case
from benchmarks.runtime.run import HERE, Record, grouped, spread, write

# The work of every revision, by its own code.
SCRIPT = "import json, sys; from dataclasses import asdict; from benchmarks.runtime.bench import Case, start; "
SCRIPT += "print(json.dumps(asdict(start(Case(**json.loads(sys.argv[1]))))))"


def git(*arguments: str) -> str:
    """Run git and return its output."""
    return subprocess.run(
        ["git", "-C", str(HERE), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def measure(source: Path, case: Case) -> Record:
    """Measure a case by the code of a folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{source}:{source / 'src'}"}
    # Only what differs from the defaults: an old revision may not know every field.
    given = {name: value for name, value in asdict(case).items() if value != getattr(Case, name)}
    command = [sys.executable, "-c", SCRIPT, json.dumps(given)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=source)
    record: Record = json.loads(done.stdout)
    return record


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
        methods: of `python -m benchmarks.runtime.command`.
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
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for revision in revisions:
                git("worktree", "add", "--detach", f"{folder}/{names[revision]}", revision)
            turns = [(n, case, revision) for n in range(rounds) for case in cases for revision in revisions]
            for number, case, revision in track(turns, "revisions", console=Console(stderr=True)):
                result = measure(Path(folder, names[revision]), case)
                records.append({"revision": names[revision], "round": number, **asdict(case), **result})
                write(name, records)
        finally:
            for worktree in Path(folder).iterdir():
                git("worktree", "remove", "--force", str(worktree))
    for (size, method, m, revision), group in grouped(records, "stages", "method", "microbatches", "revision").items():
        console.print(f"A = {size:2d}  {method}  M = {m}  {revision}  {spread(group, 'efficiency', 3)}")


if __name__ == "__main__":
    tyro.cli(main)
