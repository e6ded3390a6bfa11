"""The shape of the house: sizes, import direction, documented names, one voice in errors."""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import nwise
from benchmarks.step_cost.parts import PARTS
from counting import count_running, lines_of_code

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "nwise"
FILES = sorted(SOURCE.rglob("*.py"))

# A file may import those of its own rank and below; data flows from strategy to command line.
RANKS = [
    [
        "compiled",
        "_torch",
        "auxiliary",
        "batchnorm",
        "by_stage",
        "certainty",
        "checks",
        "differences",
        "lazy",
        "losses",
        "machine",
        "microbatch",
        "modes",
        "process",
        "progress",
        "randomness",
        "reference",
        "tensors",
        "terms",
    ],
    ["heads", "network", "strategies"],
    ["flow"],
    ["schedule"],
    ["stage"],
    ["runtime"],
    ["program"],
    ["checking", "findings"],
    ["pipeline"],
    ["capturing", "checkpoint", "compression", "exits", "planning"],
    ["training"],
    ["app"],
    ["__main__"],
]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}


# What a step needs, on torch, numpy and pyzmq alone. Everything else of the library is an add-on, which uses the core's names.
ADD_ONS = {
    "app",
    "capturing",
    "certainty",
    "checkpoint",
    "compression",
    "exits",
    "heads",
    "network",
    "planning",
    "training",
}
ADD_ONS |= {"progress", "__main__", "__init__"}
# Lines of code, without blanks, comments and docstrings. The numbers only go down. A change that
# needs more takes away elsewhere, or says in its commit why the feature is worth its lines.
BUDGETS = {
    "strategies": 342,
    "schedule": 1_963,
    "stage": 532,
    "runtime": 1_962,
    "program": 554,
    "capturing": 311,
    "checkpoint": 943,
    "network": 1_011,
    "planning": 1_294,
    "training": 493,
    "app": 4_941,
    "the core": 7_348,
    "the library": 11_919,
    "import nwise.pipeline: files": 59,
    "import nwise.pipeline: lines": 9_037,
    "warm step: calls": 300,
}


def part(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(file: Path) -> list[str]:
    """Names of the parts of nwise that a file imports at its head."""
    found = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nwise"):
            path = (node.module or "").split(".")
            found += [path[1]] if len(path) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name.split(".")[1] for alias in node.names if alias.name.startswith("nwise.")]
    return found


def test_files_are_short_and_say_what_they_are_for() -> None:
    """At most 400 lines in a file, 60 in a function beside its docstring."""
    offenders = []
    for file in FILES:
        text = file.read_text()
        tree = ast.parse(text)
        if len(text.splitlines()) > 400 or not ast.get_docstring(tree):
            offenders.append(file.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                documented = node.body[0].end_lineno if ast.get_docstring(node) else node.lineno
                if (node.end_lineno or 0) - (documented or 0) > 60:
                    offenders.append(f"{file.name}: {node.name}")
    assert not offenders


def test_files_import_downwards() -> None:
    pairs = [(part(file), name) for file in FILES for name in imports(file) if part(file) != "__init__"]
    assert not [pair for pair in pairs if RANK.get(pair[1], 0) > RANK[pair[0]]]


def documented() -> dict[str, set[str]]:
    """Documented names by module: the ``__all__`` of `nwise` and of the modules in the API pages of the manual."""
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
    modules = {"nwise", *re.findall(r"automodule:: (\S+)", pages)}
    return {module: set(import_module(module).__all__) for module in modules}


def code(file: Path) -> str:
    """Return the Python of a file: a module, the cells of a notebook, or the blocks of a page."""
    text = file.read_text()
    if file.suffix == ".ipynb":
        cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        text = "\n".join("".join(line for line in lines if not line.startswith(("%", "!"))) for lines in cells)
    elif file.suffix == ".md":
        text = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    return text


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """Iterate over all imports of a file from nwise, also inside functions, as module and name."""
    for node in ast.walk(ast.parse(code(file))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "nwise":
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("nwise."))


@pytest.mark.parametrize("where", ["src/nwise/app", "experiments", "benchmarks", "examples", "docs", "README.md"])
def test_outside_the_library_only_documented_names_are_used(where: str) -> None:
    """The border of the library; inside the application its own names are free."""
    known, inside = documented(), where == "src/nwise/app"
    unknown = [
        (str(file.relative_to(ROOT)), module, name)
        for file in (sorted((ROOT / where).rglob("*.*")) if (ROOT / where).is_dir() else [ROOT / where])
        if file.suffix in (".py", ".ipynb", ".md") and "_build" not in file.parts
        for module, name in imported(file)
        if name not in known.get(module, ()) and f"{module}.{name}".rstrip(".") not in known
        if not (inside and f"{module}.".startswith("nwise.app."))
    ]
    assert not unknown


def test_library_knows_no_application_and_needs_torch_numpy_and_pyzmq_alone() -> None:
    """All imports at the head of a file; others are imported when they are used, and an error names their extra."""
    for file in FILES:
        if part(file) in ("app", "__main__"):
            continue
        assert not [module for module, _ in imported(file) if module.startswith("nwise.app")], file
        heads = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [(getattr(node, "module", None) or node.names[0].name).partition(".")[0] for node in heads]
        assert set(names) <= {*sys.stdlib_module_names, "torch", "numpy", "zmq", "nwise"}, file


def test_no_submodule_hides_a_function() -> None:
    """Importing ``nwise.schedule.best`` would replace the function of that name."""
    for found in pkgutil.walk_packages(nwise.__path__, "nwise."):
        if not found.name.endswith("__main__"):
            import_module(found.name)
    for module_name, names in documented().items():
        module = import_module(module_name)
        hidden = [name for name in names if inspect.ismodule(getattr(module, name))]
        assert set(hidden) <= {"heads", "losses"}, module_name


def test_the_core_imports_no_add_on() -> None:
    """Also in no function: what a step needs can be read without the rest."""
    core = [file for file in FILES if part(file) not in ADD_ONS]
    assert len(core) > 50
    offenders = []
    for file in core:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nwise"):
                names = (node.module or "").split(".")[1:2] or [alias.name for alias in node.names]
                offenders += [(file.name, name) for name in names if name in ADD_ONS]
    assert not offenders


def test_lines_of_code_stay_within_their_budgets() -> None:
    sizes = {name: lines_of_code(file for file in FILES if part(file) == name) for name in BUDGETS if name in RANK}
    sizes["the core"] = lines_of_code(file for file in FILES if part(file) not in ADD_ONS)
    sizes["the library"] = lines_of_code(file for file in FILES if part(file) not in ("app", "__main__"))
    sizes |= count_running()
    assert sizes.keys() == BUDGETS.keys()
    assert {name: (size, BUDGETS[name]) for name, size in sizes.items() if size > BUDGETS[name]} == {}


_CALLABLE = """
import importlib, pkgutil, nwise
for found in pkgutil.walk_packages(nwise.__path__, "nwise."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
print([name for name in nwise.__all__ if not callable(getattr(nwise, name)) and name not in ("heads", "losses")])
"""


def test_functions_stay_functions_whatever_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", _CALLABLE], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_module_has_an_import_rank() -> None:
    assert {part(file) for file in FILES} - {"__init__"} == set(RANK)


def test_core_imports_no_distributed_code_or_models() -> None:
    for path in (*SOURCE.glob("strategies/*.py"), *SOURCE.glob("schedule/*.py"), SOURCE / "flow.py"):
        assert "torch.distributed" not in path.read_text()
        assert not {"models", "runtime"} & set(imports(path))


def test_reference_shares_no_code_with_the_fast_path() -> None:
    assert imports(SOURCE / "reference.py") == []


def test_no_module_imports_private_names() -> None:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nwise"):
                assert not [alias.name for alias in node.names if re.match(r"_[^_]", alias.name)], file


# Attributes of modules that many projects use.
NEARLY_PUBLIC = {"_apply", "_buffers", "_modules", "_parameters"}


def private_names_of_torch(code: str) -> list[str]:
    """Imports, chains of attributes that begin with torch, and private attributes of tensors and modules, also as texts."""
    members = {*dir(torch.Tensor), *dir(torch.nn.Module()), "_forward_cls", "_orig_mod", "_torchdynamo_orig_callable"}
    private = {name for name in members if re.match(r"_[^_]", name)} - NEARLY_PUBLIC
    paths = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            paths += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            paths += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            paths += [ast.unparse(node), f"torch.{node.attr}" if node.attr in private and not own else ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.rstrip(".") in private:
            paths.append(f"torch.{node.value}")
    return [path for path in paths if re.match(r"(torch|nn|dist|functional)\b(\.\w+)*\._[^_]", path)]


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._C import Engine",
        "from torch.distributed.distributed_c10d import _get_default_store",
        "torch._C.Engine",
        "nn.modules.batchnorm._BatchNorm",
        "parameter._version",
        "getattr(module, '_orig_mod', None)",
        "name.replace('_orig_mod.', '')",
    ],
)
def test_a_private_name_of_torch_is_seen(code: str) -> None:
    assert private_names_of_torch(code)


def test_private_names_of_torch_are_in_one_file() -> None:
    """A new version of torch may change them, so `_torch` says what each does and with which versions it was checked."""
    found = {file.name: names for file in FILES if (names := private_names_of_torch(file.read_text()))}
    assert set(found) == {"_torch.py"}, found


# Functions that look for one object in two places, and keep nothing.
LOOK_AT_IDENTITY = {"copied", "_copied"}


def test_nothing_is_keyed_by_id() -> None:
    """Python reuses an `id` after its object is freed, and a copy carries the ids of the original along."""
    for file in FILES:
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name not in LOOK_AT_IDENTITY:
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
                assert "id" not in [call.func.id for call in calls if isinstance(call.func, ast.Name)], (
                    file,
                    function.name,
                )


def test_public_names_are_sorted_and_documented() -> None:
    assert nwise.__all__ == sorted(nwise.__all__)
    for name in nwise.__all__:
        value = getattr(nwise, name)
        assert inspect.getdoc(value), name
        if inspect.isclass(value):
            for method, member in vars(value).items():
                if not method.startswith("_") and isinstance(member, types.FunctionType | property):
                    inherited = any(hasattr(base, method) for base in value.__mro__[1:])
                    assert inspect.getdoc(member) or inherited, f"{name}.{method}"


def test_slow_tests_say_why() -> None:
    text = {path.name: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    assert not [name for name, code in text.items() if re.search(r"mark\.slow(?!\(\"|\\)", code)]


def test_effects_on_the_process_are_in_one_module() -> None:
    effects = r"mallopt|excepthook =|os\._exit|os\.kill|set_num_threads|os\.environ(\.setdefault|\[[^]]+\] =)|donated_buffer ="
    effects += r"|cuda\.set_device|backends\.cudnn"
    effects += r"|^ *warnings\.filterwarnings|os\.dup2|sys\.path\.insert|signal\.signal\(|atexit\.register"
    text = {file.relative_to(SOURCE): file.read_text() for file in FILES}
    offenders = {str(path) for path, code in text.items() if re.search(effects, code, re.M)}
    application = {"app/cli/output.py", "app/cli/training.py", "app/training/trainer.py"}
    assert offenders == {"process.py", "runtime/launch.py", "runtime/processes.py", *application}, "as `process` says"


def test_parts_of_a_step_that_are_measured_exist() -> None:
    """They moved, and the benchmark that leaves each out failed."""
    for target, replacement in (pair for parts in PARTS.values() for pair in parts.items()):
        with patch(target, replacement):
            pass
