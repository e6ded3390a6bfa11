"""Count what a reader of the library has to hold in mind: files, lines, imports, and the path of one step.

Run with ``python -m benchmarks.house``; ``--root`` counts another checkout by the same rules.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# Before there was `nwise/app`, the application was these folders and files.
OLD_APPLICATION = ("cli", "data", "recipes", "report", "training", "__main__.py", "_records.py")

# What works out which results a task needs, or when it runs: `needs` of its cotangent, the other end of its message, its call.
LIST_READERS = r"\.needed\b|\bcounterpart\(|\bturn \+ \S*age|\.lists\b|\.calls\b|\.words\b"
AGES = r"(?i)\b(ages?|oldest|delay\w*|pending|drain\w*|stale\w*)\b"

LOAD = """
import json, sys
import nwise.pipeline
files = {getattr(m, "__file__", None) for n, m in sys.modules.items() if n == "nwise" or n.startswith("nwise.")}
print(json.dumps(sorted(f for f in files if f)))
"""

# A warm step of four small stages, two micro-batches, 2-wise. A call is one of a function of the library; it moves if the
# library's function that is nearest above it is in another file.
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
root, files, calls, moves = sys.argv[1], set(), 0, 0
def look(frame, event, arg):
    global calls, moves
    if event == "call" and frame.f_code.co_filename.startswith(root):
        calls += 1
        files.add(frame.f_code.co_filename)
        above = frame.f_back
        while above is not None and not above.f_code.co_filename.startswith(root):
            above = above.f_back
        moves += above is not None and above.f_code.co_filename != frame.f_code.co_filename
sys.setprofile(look)
pipe.step(x, target=y)
sys.setprofile(None)
print(json.dumps({"calls": calls, "moves": moves, "files": len(files)}))
"""


def main() -> None:
    """Print the counts of a checkout, as a table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="the checkout to count")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    found = count(arguments.root.resolve())
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        width = max(map(len, found))
        print("\n".join(f"{name:{width}}  {value}" for name, value in found.items()))


def count(root: Path) -> dict[str, object]:
    """Return every count of a checkout by name.

    Args:
        root: folder with ``src/nwise`` and ``tests``.
    """
    source = root / "src" / "nwise"
    files = sorted(source.rglob("*.py"))
    outside = ("app", "__main__.py") if (source / "app").exists() else OLD_APPLICATION
    application = [file for file in files if file.relative_to(source).parts[0] in outside]
    library = [file for file in files if file not in application]
    core = [f for f in library if f.relative_to(source).parts[0] in ("schedule", "runtime", "stage", "stage.py")]
    loaded = [Path(name) for name in _run(root, LOAD)]
    step = _run(root, STEP, f"{source}{os.sep}")
    lines = [line.strip() for file in library for line in file.read_text().splitlines() if line.strip()]
    folders: dict[str, list[Path]] = {}
    for file in library:
        folder, *inside = file.relative_to(source).parts
        folders.setdefault(folder if inside else "the root", []).append(file)
    return {
        "library: files": len(library),
        "library: lines": _lines(library),
        "application: files": len(application),
        "application: lines": _lines(application),
        "application: lines of code": lines_of_code(application),
        "tests: files": len(list((root / "tests").rglob("*.py"))),
        "tests: lines": _lines((root / "tests").rglob("*.py")),
        "tests: lines of code": lines_of_code((root / "tests").rglob("*.py")),
        "experiments: lines of code": lines_of_code((root / "experiments").rglob("*.py")),
        "benchmarks: lines of code": lines_of_code((root / "benchmarks").rglob("*.py")),
        "schedule, runtime and stage: lines": _lines(core),
        "library: comment lines, percent": round(100 * sum(line.startswith("#") for line in lines) / len(lines), 1),
        "library: lines of code": lines_of_code(library),
        **{f"code in {folder}": lines_of_code(inside) for folder, inside in sorted(folders.items())},
        "import nwise.pipeline: files": len(loaded),
        "import nwise.pipeline: lines": _lines(loaded),
        **{f"warm step: {name}": value for name, value in step.items()},
        "files that read a rank's list": len(_matching(library, LIST_READERS)),
        "files with private names of torch": len([f for f in library if any(_private_torch(ast.parse(f.read_text())))]),
        "files that mention ages": len(_matching(files, AGES)),
        "class names with two meanings": len(_defined_twice(library)),
        "methods of Pipeline": _methods(library, "Pipeline"),
        "methods of Engine": _methods(library, "Engine"),
    }


def _lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


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


def _matching(files: Iterable[Path], pattern: str) -> list[Path]:
    return [file for file in files if re.search(pattern, file.read_text())]


def _private_torch(tree: ast.AST) -> Iterator[str]:
    """Iterate over the private names of torch that a module imports or reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        yield from (name for name in names if re.match(r"torch\.(\w+\.)*_[a-zA-Z]", name))


def _defined_twice(files: Iterable[Path]) -> list[str]:
    classes = Counter(
        node.name
        for file in files
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return [name for name, times in classes.items() if times > 1]


def _methods(files: Iterable[Path], name: str) -> int:
    nodes = (node for file in files for node in ast.parse(file.read_text()).body)
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name]
    return sum(isinstance(node, ast.FunctionDef) for node in classes[0].body)


def _run(root: Path, code: str, *arguments: str) -> Any:
    """Run a program in a fresh interpreter that imports a checkout; return the JSON that it prints."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
