"""Commands that train networks, and that score and export trained ones."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.table import Column, Table

from nwise.app.cli.output import FAILED, INTERRUPTED, OK, STOPPED, UNWRITTEN, Output, heading, note, print_json
from nwise.app.recipes import RECIPES, Digits, Recipe, to_json
from nwise.app.recipes.config import FLAT
from nwise.app.records import json_line
from nwise.app.report import compare as comparison
from nwise.app.report.display import display_for, head_name, number, numbers_table, score_cells, write_at_once
from nwise.app.report.html import check_page, plotly
from nwise.app.report.page import report
from nwise.app.report.summary import Summary
from nwise.app.training import CheckpointPolicy, Run, StoppedError, Trainer, evaluate, new_run
from nwise.app.training.run import numbered, versions
from nwise.checkpoint import replacing, save_tensors, under
from nwise.checks import check_at_least
from nwise.process import use_one_thread
from nwise.runtime.launch import variable
from nwise.runtime.processes import tell_all
from nwise.training import NotFiniteError

_TORCH_SUFFIXES = (".pt", ".pth", ".bin")


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a recipe, showing loss and accuracy of every head. Training can be resumed from its run folder.

    Example: nwise train digits --strategy 3-wise --epochs 5
    """

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")] = "digits"
    """Name of a recipe (`nwise recipes` lists them)."""
    runs: Path = Path("runs")
    """Parent folder of the run's folder."""
    timeline: int = 0
    """Number of steps whose timeline to record for `nwise report`; needs several processes (torchrun)."""
    json: bool = False
    """Print only JSON: the final scores."""
    resume: Path | None = None
    """Folder of a run to resume from its newest checkpoint; options change its settings."""
    policy: Annotated[CheckpointPolicy, tyro.conf.arg(name="checkpoint"), tyro.conf.OmitArgPrefixes] = field(
        default_factory=CheckpointPolicy
    )
    config: Annotated[Recipe, FLAT] = field(default_factory=Recipe)

    def run(self, console: Output) -> int:
        resumed = self._resumed_run()
        if self.timeline and resumed is not None:
            raise ValueError("`timeline` should be set when a run starts. Found a run to resume; leave it out.")
        # Errors in configuration or data are raised before a folder is made.
        trainer = Trainer(self.config, None if resumed is None else self.config.load(resumed.tokenizer()))
        _choose_threads(self.config)
        trainer.record_timeline(self.timeline)
        console.when_closed = trainer.stop  # which writes a checkpoint, and prints to stderr how to resume
        is_first = trainer.pipe.processes.is_first  # rank 0 writes and draws for all
        display = display_for(console) if is_first and not self.json else None
        callbacks = (display,) if display else ()
        run = (resumed or new_run(self.config, self.runs)) if is_first else None
        acknowledge = write_at_once if display is None else display.stopping
        try:
            with stopping(trainer, acknowledge if is_first else None):
                restart = self.resume is None
                scores = trainer.train(run, callbacks, self.policy, resume=resumed is not None, allow_restart=restart)
        except StoppedError as error:
            if run is not None:
                lost = f" Not written: {_missing(trainer.unwritten)}." if trainer.unwritten else ""
                note(f"{error}{lost} Resume with `nwise train --resume {run.folder}`.")
            return STOPPED
        except NotFiniteError as error:
            tell_all(error)
            where = "" if run is None else f" See {run.folder / 'post-mortem.json'}."
            note(f"{heading('nwise train')}: {error}{where}")
            return FAILED
        except KeyboardInterrupt as error:
            tell_all(error)
            if run is not None:
                note(f"Interrupted. The weights so far are in {run.folder}; `nwise evaluate {run.folder}` scores them.")
            return INTERRUPTED
        if run is None:
            return OK
        if self.json:
            print_json({"run": str(run.folder), "heads": dataclasses.asdict(scores)["heads"]})
        else:
            console.say(f"Run folder: {run.folder}")
        if not trainer.unwritten:
            return OK
        note(
            f"nwise train: all steps are done, but not everything is written: {_missing(trainer.unwritten)}. Make room, and "
            f"resume from the newest checkpoint with `nwise train --resume {run.folder}`."
        )
        return UNWRITTEN

    def _resumed_run(self) -> Run | None:
        """Return the run to resume: `resume`, or after a restart by torchrun the run that this launch began."""
        if self.resume is not None:
            return Run.open(self.resume)
        return Run.find_restarted(self.runs, self.config) if variable("TORCHELASTIC_RESTART_COUNT") else None


@contextmanager
def stopping(trainer: Trainer, acknowledge: Callable[[str], None] | None) -> Iterator[None]:
    """Let SIGTERM or the first Ctrl-C stop training after the current step and a checkpoint.

    The signal handler says so at once by `acknowledge`, unless it is None.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handler(number: int, frame: object) -> None:
        trainer.stop()
        signal.signal(number, before[number])  # a second signal ends the process at once
        if acknowledge is not None:
            again = "; Ctrl-C again to end now" if number == signal.SIGINT else ""
            acknowledge(f"stopping after this step{again}")

    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _choose_threads(config: Recipe) -> None:
    """Take one thread for the smallest networks, which several make no faster, and six times slower beside other work."""
    if isinstance(config.data, Digits):
        use_one_thread()


def _missing(unwritten: dict[str, str]) -> str:
    return "; ".join(f"{path} ({why})" for path, why in unwritten.items())


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Train several strategies from the same start: a table, and the page of `nwise report`.

    Example: nwise compare digits --strategies local 2-wise end-to-end --epochs 5
    """

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")] = "digits"
    """Name of a recipe (`nwise recipes` lists them)."""
    strategies: tuple[str, ...] = ("local", "2-wise", "end-to-end")
    """Strategies, separated by spaces (`--strategy` is ignored)."""
    seeds: int = 1
    """Number of seeds, from `--seed` on; the table has means and standard deviations."""
    rates: tuple[float, ...] = ()
    """Learning rates, separated by spaces: each strategy takes its best, by a trial with the first seed; default: `--lr`."""
    runs: Path = Path("runs")
    """Parent folder of the runs' folders."""
    page: Path | None = None
    """Page to write; default: report.html beside the runs."""
    json: bool = False
    """Print only JSON: the results."""
    config: Annotated[Recipe, FLAT] = field(default_factory=Recipe)

    def run(self, console: Output) -> int:
        plotly()  # fails early where it is missing
        callbacks = () if self.json else (display_for(console),)
        check_at_least(1, seeds=self.seeds)
        if wrong := [rate for rate in self.rates if not 0 < rate < math.inf]:
            raise ValueError(f"`rates` should be above 0. Found {wrong[0]}.")
        data = self.config.load()
        comparison.check(self.config, self.strategies, data)
        if self.page is not None:
            check_page(self.page)
        _choose_threads(self.config)
        parent = numbered(self.runs, f"compare-{self.config.name}")
        page = self.page or parent / "report.html"
        try:
            results = comparison.compare(self.config, self.strategies, parent, callbacks, data, self.seeds, self.rates)
        except KeyboardInterrupt:
            note(f"Interrupted. The runs so far are in {parent}.")
            return INTERRUPTED
        budget = min(result.curve.slots[-1] for result in results)
        rows = [{**dataclasses.asdict(r), "at_equal_time": r.at_slots(budget)} for r in results]
        record = {"config": to_json(self.config), "versions": versions(), "results": rows, "equal_time_slots": budget}
        (parent / "compare.json").write_text(json_line(record))
        report(Summary.open_all([Path(result.run) for result in results]), page)
        if self.json:
            print_json({**record, "page": str(page)})
            return OK
        lines = []
        for strategy, group in itertools.groupby(results, key=lambda result: result.strategy):
            runs = list(group)
            slots = runs[0].curve.slots[-1] / runs[0].curve.steps[-1]
            qualities = _spread([r.curve.values[-1] for r in runs]), _spread([r.at_slots(budget) for r in runs])
            seconds = number(sum(r.seconds for r in runs), 1)
            lines.append([strategy, f"{runs[0].lr:g}", *qualities, number(slots, 1), seconds])
        kind = "accuracy %" if results[0].kind == "accuracy" else results[0].kind
        title = f"{self.config.name}: test {kind} of the last head"
        console.print(
            numbers_table(title, ("strategy", "rate", "equal steps", "equal time", "slots/step", "seconds"), lines)
        )
        console.say(
            f"Equal time is {budget:,.0f} slots on one accelerator per stage, modelled and not measured: in the paper's timing\n"
            "model a forward takes one slot, each loss's pass through a stage one, and heads none. Between tests quality is\n"
            f"interpolated. Seconds are this machine's, one process doing all stages.\nPage: {page}"
        )
        return OK


def _spread(values: list[float]) -> str:
    """Format a mean, with the standard deviation if there are several values."""
    if len(values) == 1:
        return number(values[0], 2)
    found = torch.tensor(values, dtype=torch.float64)
    return f"{number(float(found.mean()), 2)} ± {number(float(found.std()), 2)}"


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Score a run on its test set: the last head, every head, and ensembles of the top n heads.

    Example: nwise evaluate runs/digits-2-wise-mean-001
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    json: bool = False
    """Print only JSON: the scores."""
    device: str = "auto"
    """Device to run on."""

    def run(self, console: Output) -> None:
        run = Run.open(self.folder)
        pipe, test_data = run.trained(self.device)
        kind = run.recipe.quality
        scores = evaluate(pipe, test_data, 2 * run.recipe.batch_size, ensembles=True)
        if self.json:
            print_json(dataclasses.asdict(scores))
            return
        status = f" ({run.status} at step {pipe.steps})" if run.status != "done" else ""
        console.say(f"{self.folder}{status}: {len(test_data):,} test samples")
        names = [head_name(k, len(scores.heads)) for k in range(len(scores.heads))]
        rows = [(name, *score_cells(score, kind)) for name, score in zip(names, scores.heads, strict=True)]
        table = numbers_table(None, ("head", "loss", kind), rows)
        table.add_section()
        for n, score in enumerate(scores.ensembles[1:], start=2):
            table.add_row(f"mean of the top {n}", *score_cells(score, kind))
        console.print(table)


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Write the main network without its heads, under the names of the unsplit network: safetensors, or torch's format.

    Example: nwise export runs/digits-2-wise-mean-001 --out digits.safetensors
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    out: Path | None = None
    """File to write: .safetensors, or .pt, .pth, .bin for `torch.load`; default: model.safetensors in the run's folder."""

    def run(self, console: Output) -> None:
        run = Run.open(self.folder)
        out = self.out or self.folder / "model.safetensors"
        if out.suffix not in (".safetensors", *_TORCH_SUFFIXES):
            others = ", ".join(_TORCH_SUFFIXES)
            raise ValueError(f"`out` should end in .safetensors, or, for torch.load, in {others}. Found {str(out)!r}.")
        main = under(run.weights(), "model.")
        if out.exists() and not out.is_file():
            raise ValueError(f"`out` should be a file. Found {out}, which is not a file; give another path.")
        if out.resolve() == run.weights_file.resolve():
            raise ValueError(f"`out` should be another file than the run's own weights. Found {out}; rename it.")
        if not main:
            found = "Found none under 'model.'; train again."
            raise ValueError(f"{self.folder} should hold weights of a main network. {found}")
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix in _TORCH_SUFFIXES:
            with replacing(out) as partial, partial.open("wb") as file:
                torch.save(main, file)
        else:
            save_tensors(main, out)
        size = sum(tensor.numel() for tensor in main.values())
        console.say(f"{out}: {len(main)} tensors, {size:,} values")


@dataclass(frozen=True, kw_only=True)
class RecipesCommand:
    """List the recipes.

    Example: nwise recipes --json
    """

    json: bool = False
    """Print only JSON."""

    def run(self, console: Output) -> None:
        rows = [(name, (inspect.getdoc(make) or "").split("\n")[0]) for name, make in RECIPES.items()]
        if self.json:
            print_json([{"name": name, "description": text} for name, text in rows])
            return
        table = Table(Column("recipe", no_wrap=True), "what it trains")
        for row in rows:
            table.add_row(*row)
        console.print(table)
