"""The manual: it builds without a warning, its links lead somewhere, its examples and commands are run, all names are in it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest

import nwise
from experiments import manual
from nwise.app import cli
from nwise.app.cli.dispatch import parse
from nwise.app.recipes import recipe
from nwise.app.training import Trainer, new_run
from nwise.schedule.named import BASELINES, ORDERS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "experiments").rglob("README.md")])
PAGES = [page for page in PAGES if "_build" not in page.parts]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


# Pieces that stand for a loop of the reader's own, or for a package that the tests do not need.
_SKETCHES = (
    "for x, y in batches",
    "batch(step)",
    "init_device_mesh",
    "result.period",
    "ages = nwise.staleness",
    "next_tokens",
    "SummaryWriter",
)


# What the first block of a page, a sketch, would have made.
_GIVEN = {
    "processes.md": """
import nwise, torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
pipe = nwise.Pipeline(nwise.split(model, at=["1"]), None, strategy="end-to-end")
"""
}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every block of a page in turn, with the names defined by the blocks before it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if "transformers" in page.read_text():
        pytest.importorskip("transformers").logging.disable_progress_bar()
    names: dict[str, Any] = {}
    exec(_GIVEN.get(page.name, ""), names)
    for i, code in enumerate(blocks(page, "python")):
        if not any(sketch in code for sketch in _SKETCHES):
            exec(compile(code, f"{name(page)}, block {i}", "exec"), names)


def test_documented_logger_logs_what_the_run_records(tmp_path: Path) -> None:
    """A callback of the manual, with a writer like TensorBoard's."""
    names: dict[str, Any] = {}
    exec(blocks(ROOT / "docs" / "looking.md", "python")[-1], names)
    found: dict[tuple[str, int], float] = {}
    writer = SimpleNamespace(add_scalar=lambda name, value, step: found.update({(name, step): value}))
    digits = dataclasses.replace(recipe("digits"), max_steps=24, log_every=8)
    run = new_run(digits, tmp_path)
    Trainer(digits).train(run, (names["TensorBoard"](writer),))
    kinds = set()
    for record in run.metrics():
        kinds.add(record["kind"])
        if record["kind"] == "test":
            assert found["test_accuracy", record["step"]] == record["accuracy"][-1]
        else:
            losses = {k: loss for k, loss in enumerate(record["loss"]) if loss is not None}
            assert {k: found[f"train_loss/stage_{k}", record["step"]] for k in losses} == losses
    assert kinds == {"train", "test"}


def test_documented_examples_compile() -> None:
    for page in PAGES:
        for code in blocks(page, "python"):
            compile(code, name(page), "exec")


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every ``nwise`` command line of the pages."""
    for page in PAGES:
        for text in blocks(page, "console"):
            for line in text.replace("\\\n", " ").splitlines():
                match = re.match(
                    r"\$ (?:torchrun .*? -m |python -m |docker run .*? )?nwise (\w.*?)(?:\s{2,}#.*| # .*)?$", line
                )
                if match and "RECIPE" not in match[1] and not match[1].startswith("torchrun"):
                    yield name(page), shlex.split(match[1].partition(" > ")[0])


@pytest.mark.parametrize("words", sorted({tuple(words) for _, words in commands()}), ids=" ".join)
def test_documented_commands_parse(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    command, *options = [word for word in words if not word.startswith("runs/*")]
    for option in ("--resume", "--costs"):  # of files that the reader has
        while option in options and options[options.index(option) + 1].startswith(("runs/", "costs.json")):
            at = options.index(option)
            del options[at : at + 2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parse(command, options if command != "report" or options else ["runs"])


def test_documented_commands_are_collected() -> None:
    assert len(list(commands())) > 40


def test_documented_benchmarks_start_from_the_root() -> None:
    """Regression: `python -m benchmarks.runtime` could not import its neighbours; such a script needs `-m`."""
    pattern = r"^(?:\$ |    )(?:\w+=\S+ )*python (?:-m (benchmarks\.[\w.]+)|(benchmarks/[\w/]+)\.py)"
    number = 0
    for page in [*(ROOT / "benchmarks").glob("*/README.md"), *(ROOT / "benchmarks").glob("*/*.py")]:
        for module, path in re.findall(pattern, page.read_text(), re.M):
            script = ROOT / f"{module.replace('.', '/') or path}.py"
            script = script if script.exists() else script.with_suffix("") / "__main__.py"
            assert script.exists(), (name(page), script)
            assert module or not re.search(r"^(from|import) benchmarks\b", script.read_text(), re.M), (name(page), path)
            number += 1
    assert number > 40


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        if target.startswith(("http://", "https://")):
            assert re.fullmatch(r"https://[\w.\-]+(/[\w.\-/%#?=&@+~:,]*)?", target), target
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def test_every_item_of_the_paper_has_a_test_or_a_reason() -> None:
    """An item was different, and no page said so; another named a test that had been renamed."""
    text = (ROOT / "tests" / "paper_items.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (\S+) \| (.+?) \| (.*?) ?\|$", text, re.M)
    assert [int(row[0]) for row in rows] == list(range(1, 150))
    written = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for number, _, _, state, tests, note in rows:
        assert [test for test in re.findall(r"`(test_\w+)`", tests) if f"def {test}(" not in written] == [], number
        assert note or (state == "=" and "`test_" in tests), number
        assert state != "≠" or "stated in [" in note, number
        assert state != "≈" or "[choices](" in note or "no test: " in note, number
    summary = dict(re.findall(r"^\| (\S+) \| [^|]+ \| (\d+) \|$", text, re.M))
    assert Counter(row[3] for row in rows) == Counter({state: int(count) for state, count in summary.items()})


def test_planner_table_matches_planner_output(capsys: pytest.CaptureFixture[str]) -> None:
    [text] = [block for block in blocks(ROOT / "docs" / "choose.md", "console") if "optimal" in block]
    tables = re.split(r"^\$ nwise (.*)$", text, flags=re.M)[1:]
    for command, table in zip(tables[::2], tables[1::2], strict=True):
        assert cli.run([*command.split()]) == 0
        lines = [" ".join(re.sub(r"[│┃]", " ", line).split()) for line in capsys.readouterr().out.splitlines()]
        for row in table.strip().splitlines():
            assert " ".join(row.split()) in lines, row


def test_first_page_has_the_matrix_of_parity() -> None:
    rows = [line for line in (ROOT / "benchmarks/parity/README.md").read_text().splitlines() if line.startswith("|")]
    assert len(rows) > 8
    assert "\n".join(rows) in (ROOT / "docs" / "index.md").read_text()


def test_pages_lose_no_markup() -> None:
    """Regression: seven pairs of stars in the frontier were taken for emphasis, and with them the marks of undecided verdicts."""
    markdown_it = pytest.importorskip("markdown_it", reason="needs the extra 'docs'")
    parser = markdown_it.MarkdownIt("commonmark").enable("table")
    assert _lost(parser, "0.16 nats (0.1 to 0.2)*, and 0.2 (0.1 to 0.3)*.") == [", and 0.2 (0.1 to 0.3)"]
    assert _lost(parser, "a **bold word and \\* a star") == ["a **bold word and * a star"]
    assert {name(page): lost for page in PAGES if (lost := _lost(parser, page.read_text()))} == {}


def _lost(parser: Any, text: str) -> list[str]:
    """Return texts in emphasis that does not begin a word, and texts with marks that have had no effect."""
    lost = []
    for block in parser.parse(text):
        children = block.children or []
        for i, token in enumerate(children):
            before = children[i - 1].content if i and children[i - 1].type == "text" else ""
            if token.type in ("em_open", "strong_open") and re.search(r"[\w)%]$", before):
                lost.append(children[i + 1].content)
            elif token.type == "text" and re.search(r"\*\*|\]\(|`", token.content):
                lost.append(token.content)
    return lost


# Pages for looking things up.
LISTS = ("choices.md", "cut.md", "from-0.2.md", "paper.md", "reference.md")


def words(page: Path) -> int:
    """Count the words of a page, those of code and tables too, without its comments."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.S)
    return sum(re.search(r"\w", word) is not None for word in text.split())


def test_manual_is_short() -> None:
    """What a stranger reads first fits on two screens; the page that reports results has few sentences for each question."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 85
    read = [page for page in (ROOT / "docs").glob("*.md") if page.name not in LISTS]
    assert words(ROOT / "docs" / "works.md") <= 1200
    assert sum(map(words, read)) <= _WORDS


_WORDS = 12_410


def test_list_of_public_names_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import reference_page; print(reference_page.page(), end='')"],
        cwd=ROOT / "docs",
        capture_output=True,
        text=True,
        check=True,
    )
    assert (ROOT / "docs" / "reference.md").read_text() == done.stdout, "python docs/reference_page.py"


def test_pictures_of_the_manual_are_up_to_date() -> None:
    """Regression: two screenshots were of version 0.1. `python -m experiments.manual NAME` makes a picture again."""
    image = pytest.importorskip("PIL.Image")
    for name, sources in manual.SOURCES.items():
        with image.open(ROOT / "docs" / f"{name}.png") as picture:
            assert picture.info["records"] == manual.digest(sources), f"python -m experiments.manual {name}"
    for name in ("report", "explore"):
        with image.open(ROOT / "docs" / f"{name}.png") as picture:
            assert picture.info["version"] == nwise.__version__, f"python -m experiments.manual {name}"
    used = "".join(page.read_text() for page in PAGES)
    assert [path.name for path in (ROOT / "docs").glob("*.png") if f"{path.name})" not in used] == []


def test_manual_lists_every_order() -> None:
    text = (ROOT / "docs" / "processes.md").read_text()
    assert [name for name in ORDERS if f"`{name}`" not in text] == []
    text = (ROOT / "docs" / "api" / "schedule.md").read_text()
    assert f"knows: {', '.join(BASELINES)}." in text


_MODULES = ("nwise", "nwise.app.data", "nwise.app.models", "nwise.app.recipes", "nwise.schedule", "nwise.training")


def test_manual_takes_all_public_names_of_the_packages() -> None:
    """The slow test below looks at the pages that Sphinx makes of this."""
    text = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    every = "\n   :members:\n   :imported-members:\n"
    assert [module for module in _MODULES if f".. automodule:: {module}{every}" not in text] == []
    modules = [importlib.import_module(module) for module in _MODULES]
    missing = [(m.__name__, name) for m in modules for name in m.__all__ if not hasattr(m, name)]
    assert missing == []


@pytest.mark.slow("half a minute; `make docs`, which CI runs, builds the same")
@pytest.mark.timeout(300)
def test_manual_builds_and_has_every_public_name(tmp_path: Path) -> None:
    """Build strictly, as `make docs` does, and find every name of every ``__all__`` in the index."""
    pytest.importorskip("sphinx", reason="needs the extra 'docs'")
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "-c",
        str(ROOT / "docs"),
        str(ROOT),
        str(tmp_path),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    from sphinx.util.inventory import InventoryFile

    index = InventoryFile.loads((tmp_path / "objects.inv").read_bytes(), uri="").data
    documented = {entry for kind, entries in index.items() if kind.startswith("py:") for entry in entries}
    short = {entry.rpartition(".")[2] for entry in documented}
    names = {(module, public) for module in _MODULES for public in importlib.import_module(module).__all__}
    assert [f"{m}.{n}" for m, n in sorted(names) if n not in short and f"{m}.{n}" not in documented] == []
    manual = tmp_path / "docs"
    for page in (ROOT / "docs").glob("*.md"):
        assert (manual / f"{page.stem}.html").exists()
    first = re.search(r'<article.*?<p>.*?<p><a href="([^"]+)"', (manual / "index.html").read_text(), re.S)
    assert first is not None, "the index begins with the explorer"
    assert (manual / first[1]).stat().st_size > 1e5
    pages = [page for page in tmp_path.rglob("*.html") if page.name != "explore.html" and "_modules" not in page.parts]
    broken = [(page.name, link) for page in pages for link in _broken(page)]
    assert not broken


def _broken(page: Path) -> Iterator[str]:
    """Iterate over the links of a page of the built manual that open no page, or no place in it."""
    links = set(re.findall(r'<a [^>]*href="([^"]*)"', page.read_text()))
    for link in sorted(links):
        path, _, place = link.partition("#")
        target = (page.parent / unquote(path)).resolve() if path else page
        if re.match(r"\w+:", link) or "_modules" in path:
            continue
        opens = target.exists() and target.suffix != ".md"
        if not opens or (place and f'id="{place}"' not in target.read_text(errors="replace")):
            yield link


def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run its cells in order, as in a fresh kernel."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    notebook = json.loads((ROOT / "examples" / "own_network.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5
    names: dict[str, Any] = {"__name__": "__main__", "display": lambda *_: None}
    for i, cell in enumerate(cells):
        # A quarter of the steps is enough to learn.
        exec(compile("".join(cell["source"]).replace("steps=400", "steps=100"), f"cell {i}", "exec"), names)
    assert names["quality"]["2-wise"] > 0.8
    assert all(cell["outputs"] or "=" in "".join(cell["source"]) for cell in cells), "it is kept with its outputs"


def test_version_is_in_the_changelog() -> None:
    assert nwise.__version__.partition(".dev")[0] in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow("two starts of a job, half a minute")
@pytest.mark.timeout(300)
def test_slurm_script_requeues_and_resumes(tmp_path: Path) -> None:
    """With stubs for SLURM's commands on one node, a signal requeues the job and the second start finishes the run."""
    (tmp_path / "bin").mkdir()
    for stand_in, body in {
        "srun": 'echo $$ > step; exec "$@"',
        "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "$@" >> requeued; fi',
    }.items():
        (tmp_path / "bin" / stand_in).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / stand_in).chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_NODELIST": "x"}
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **variables, "PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = ["bash", str(ROOT / "examples" / "slurm.sh"), "digits", "--cut", "2", "2", "--epochs", "40"]
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "text": True}
    first = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, **options
    )
    metrics = tmp_path / "runs" / "job-7" / "digits-2-wise-mean-001" / "metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and '"step": 20' in metrics.read_text():
            break
        time.sleep(0.1)
    os.kill(int((tmp_path / "step").read_text()), signal.SIGTERM)
    output, _ = first.communicate(timeout=100)
    assert (tmp_path / "requeued").read_text() == "requeue 7\n", output[-2000:]
    assert '"status": "stopped"' in (metrics.parent / "run.json").read_text()
    done = subprocess.run(command, capture_output=True, check=False, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    assert '"status": "done"' in (metrics.parent / "run.json").read_text()
    assert [folder.name for folder in metrics.parent.parent.iterdir()] == ["digits-2-wise-mean-001"], "it went on"


_RESOLVE = """
import functools, sys
import nwise
for name in sys.argv[1:]:
    try:
        functools.reduce(getattr, name.split(".")[1:], nwise)
    except AttributeError as error:
        print(f"{name}: {error}")
"""


def test_documented_names_exist_after_import_nwise() -> None:
    """Regression: the manual's `nwise.checkpoint.gather_weights(pipe)` was an AttributeError until something imported it."""
    pages = [page for page in PAGES if page.name != "from-0.2.md"]  # which lists names that are gone
    text = "".join(page.read_text() for page in [*pages, *(ROOT / "examples").glob("*.py")])
    found = {name.rstrip(".") for name in re.findall(r"\bnwise\.[a-z_]\w*(?:\.[A-Za-z_]\w*)*", text)}
    names = {name for name in found if name.split(".")[1] not in nwise.__all__} - {"nwise.egg", "nwise.nn", "nwise.md"}
    assert {"nwise.checkpoint.gather_weights", "nwise.schedule.best", "nwise.runtime.compression.Compression"} <= names
    done = subprocess.run([sys.executable, "-c", _RESOLVE, *sorted(names)], capture_output=True, text=True, check=True)
    assert done.stdout == "", done.stdout
    # The order of the names does not matter: each package imports its own submodules.
    packages = [path.parent for path in (ROOT / "src" / "nwise").rglob("__init__.py") if path.parent.name != "cli"]
    modules = [".".join(package.relative_to(ROOT / "src").parts) for package in packages]
    assert [name for name in modules if "__getattr__" not in vars(importlib.import_module(name))] == []


def test_dir_lists_public_names_and_submodules_only() -> None:
    """Regression: `dir(nwise)` showed `Any`, `import_module` and `annotations`."""
    names = {name for name in dir(nwise) if not name.startswith("__")}
    modules = {path.stem for path in (ROOT / "src" / "nwise").iterdir() if re.match(r"[a-z]\w*(\.py)?$", path.name)}
    assert names == {*nwise.__all__, *modules}
    with pytest.raises(AttributeError, match="module 'nwise' has no attribute 'nothing'"):
        nwise.nothing  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'nwise\.runtime' has no attribute 'nothing'"):
        nwise.runtime.nothing  # noqa: B018
