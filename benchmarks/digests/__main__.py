"""Compare what two revisions compute, bit for bit, on one machine.

    python -m benchmarks.digests 8ac1ede2

checks the revision out into a folder of its own, runs `driver` of this checkout there and here, and compares the hashes of
gradients after each step, of weights, buffers, losses and the states of random generators, and lists and periods of schedules.
It prints the rows that differ, and ends with 1 if there are any that `GONE` does not name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.runtime.revisions import git

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
Part = Literal["alone", "ranks", "orders"]
Rows = dict[str, Any]

# What differs on purpose, by pattern of the row: features that went, and lines that changed, each with the reason.
GONE = {
    "*hogwild, recompute*": "Hogwild in memory refuses `recompute`: the second forward needed copies of all weights",
}


def digests(source: Path, part: Part, size: int, only: str, problems: int) -> Rows:
    """Return the digests of a checkout, by row; with several ranks a row for each of them."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "PYTHONPATH": f"{source / 'src'}",
            "OMP_NUM_THREADS": "1",
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_CBWR": "AVX2,STRICT",  # otherwise the last bits depend on where memory begins
            "DIGESTS_ONLY": only,
            "DIGESTS_PROBLEMS": str(problems),
        }
        command = [sys.executable]
        if size > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        done = subprocess.run(
            [*command, str(HERE / "driver.py"), part, f"{folder}/out"], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{source}: {done.stderr[-3000:]}")
        found = [json.loads(Path(folder, f"out-{rank}.json").read_text()) for rank in range(size)]
    suffixes = [f", rank {rank} of {size}" if size > 1 else "" for rank in range(size)]
    return {name + end: row for rows, end in zip(found, suffixes, strict=True) for name, row in rows.items()}


def differences(before: Rows, now: Rows) -> Rows:
    """Return what differs, by row: the kinds of values, or both whole rows where one was refused.

    Periods may differ by a thousandth where an order changes; a shorter one is no difference.
    """
    found: Rows = {}
    for name in {**before, **now}:
        old, new = before.get(name, {}), now.get(name, {})
        if kinds := [kind for kind in {**old, **new} if not same(kind, old.get(kind), new.get(kind))]:
            found[name] = {kind: (old.get(kind), new.get(kind)) for kind in kinds} if "refused" in kinds else kinds
    return found


def same(kind: str, old: str | None, new: str | None) -> bool:
    """Return whether a value is as before."""
    if kind in ("period", "best", "bound") and old is not None and new is not None:
        return float(new) <= float(old) * 1.001 and (kind != "bound" or float(new) >= float(old) * 0.999)
    return old == new


def report(found: Rows, total: int, patterns: Mapping[str, str]) -> int:
    """Print the rows that differ; return how many of them no pattern names."""
    reasons = {name: next((why for one, why in patterns.items() if fnmatch(name, one)), "") for name in found}
    for name, kinds in found.items():
        print(
            f"{'meant  ' if reasons[name] else 'DIFFERS'} {name}: {kinds if isinstance(kinds, dict) else ', '.join(kinds)}"
        )
    for why in dict.fromkeys(filter(None, reasons.values())):
        print(f"meant: {why} ({sum(reason == why for reason in reasons.values())} rows)")
    unmeant = sum(not why for why in reasons.values())
    print(f"{total} rows; {total - len(found)} equal, {len(found) - unmeant} differ on purpose, {unmeant} differ.")
    return unmeant


def main(
    revision: str,
    /,
    parts: Sequence[Part] = ("alone", "ranks", "orders"),
    sizes: Sequence[int] = (2, 4),
    only: str = "",
    problems: int = 200,
) -> None:
    """Compare this checkout with a revision.

    Args:
        revision: of git.
        parts: what to compare: one process, several, or schedules.
        sizes: numbers of processes.
        only: text that the names of the rows contain.
        problems: number of random scheduling problems.
    """
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder, "before")
        git("worktree", "add", "--detach", str(there), revision)
        try:
            found: Rows = {}
            total = 0
            for part, size in [(one, size) for one in parts for size in (sizes if one == "ranks" else (1,))]:
                with ThreadPoolExecutor(2 if size == 1 else 1) as pool:
                    runs = [pool.submit(digests, source, part, size, only, problems) for source in (there, ROOT)]
                    before, now = (run.result() for run in runs)
                found |= differences(before, now)
                total += len({**before, **now})
        finally:
            git("worktree", "remove", "--force", str(there))
    sys.exit(bool(report(found, total, GONE)))


if __name__ == "__main__":
    tyro.cli(main)
