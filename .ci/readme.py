"""Run the console block of the README as a newcomer does: in a fresh copy, with a fresh environment.

    make readme    or    python .ci/readme.py [a page with a ```console block]

The copy has the files that git tracks, with uncommitted changes. PYTHON names the interpreter, as for make.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 900  # seconds for a command; the first one installs torch
# Variables of this shell that would bring in another environment, other options of make, or other threads.
HIDDEN = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "OMP_NUM_THREADS")


def commands(page: Path) -> list[str]:
    """Return the commands of a page's first console block, without their comments."""
    block = re.search(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    if block is None:
        raise SystemExit(f"{page} should have a ```console block. Found none.")
    return re.findall(r"^\$ (.*?)(?:\s+# .*)?$", block[1].replace("\\\n", " "), re.M)


def copy_tracked(folder: Path) -> None:
    """Copy the files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():  # else its deletion is not committed yet
            target.write_bytes((ROOT / name).read_bytes())


def run(command: list[str], folder: str, environment: dict[str, str]) -> int | None:
    """Run a command and return its exit code, or None if it was ended at the time limit, with its children."""
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
    try:
        return process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_all(pairs: Iterable[tuple[str, list[str]]], **variables: str) -> int:
    """Run commands, each shown by its text, in a fresh copy; return the number of those that failed.

    Args:
        pairs: text and arguments of each command.
        variables: of their environment; ``{copy}`` stands for the folder of the copy.
    """
    failed = []
    with tempfile.TemporaryDirectory(prefix="nwise-copy-") as folder:
        copy_tracked(Path(folder))
        environment = {name: value for name, value in os.environ.items() if name not in HIDDEN}
        environment |= {name: value.format(copy=folder) for name, value in variables.items()}
        for text, command in pairs:
            began = time.monotonic()
            print(f"$ {text}", flush=True)
            code = run(command, folder, environment)
            result = f"not done after {LIMIT} s" if code is None else f"exit code {code}"
            print(f"[{result}, {time.monotonic() - began:.0f} s]\n", flush=True)
            if code != 0:
                failed.append(f"{text}: {result}")
    print("\n".join(["Failed:", *failed]) if failed else "All commands work.")
    return len(failed)


def main(page: str = "README.md") -> int:
    """Run all commands of a page and return the number of those that failed."""
    pairs, sourced = [], ""  # what `. FILE` does to a shell has to reach the commands after it
    for command in commands(ROOT / page):
        pairs.append((command, ["bash", "-c", f"{sourced}{command}"]))
        if command.startswith(". "):
            sourced += f"{command} && "
    return run_all(pairs)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
