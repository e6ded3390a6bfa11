"""Lines of code, and the calls of a warm step."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "nwise"

LOAD = """
import json, sys
import nwise.pipeline
files = {getattr(m, "__file__", None) for n, m in sys.modules.items() if n == "nwise" or n.startswith("nwise.")}
lines = sum(len(open(file).read().splitlines()) for file in files if file)
print(json.dumps({"import nwise.pipeline: files": len(files - {None}), "import nwise.pipeline: lines": lines}))
"""

# A warm step of four small stages, two micro-batches, 2-wise: every call of a function of the library counts.
STEP = """
import json, sys, torch, nwise
from torch import nn
torch.manual_seed(0)
stages = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)]
heads = [nn.Linear(4, 4) for _ in range(3)]
pipe = nwise.Pipeline(stages, [*heads, None], nn.CrossEntropyLoss(), "2-wise", 2)
x, y = torch.randn(8, 4), torch.randint(0, 4, (8,))
for _ in range(20):
    pipe.step(x, target=y)
root, calls = sys.argv[1], 0
def look(frame, event, arg):
    global calls
    calls += event == "call" and frame.f_code.co_filename.startswith(root)
sys.setprofile(look)
pipe.step(x, target=y)
sys.setprofile(None)
print(json.dumps({"warm step: calls": calls}))
"""


def lines_of_code(files: Iterable[Path]) -> int:
    """Return the number of lines that are neither blank nor a comment nor in a docstring."""
    total = 0
    for text in (file.read_text() for file in files):
        documented = set[int]()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                documented |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
        lines = enumerate(map(str.strip, text.splitlines()), 1)
        total += sum(bool(line) and not line.startswith("#") and i not in documented for i, line in lines)
    return total


def count_running() -> dict[str, int]:
    """Count what an import loads, and what a step calls, in fresh interpreters."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent), "OMP_NUM_THREADS": "1"}
    found: dict[str, int] = {}
    for program in (LOAD, STEP):
        command = [sys.executable, "-c", program, f"{SOURCE}{os.sep}"]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        found |= json.loads(done.stdout)
    return found
