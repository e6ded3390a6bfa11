"""Commands that draw: the flow of gradients, and schedules."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import Progress

import nwise
from nwise.cli.output import OK, print_json
from nwise.report.explore import METHODS, MOST, Choices, explore, listed
from nwise.report.figures import check_format, flow_figure
from nwise.report.grid import Picture, legend, schedule_figure, terminal_grid
from nwise.report.html import check_page
from nwise.report.trace import chrome_trace
from nwise.schedule import Timed
from nwise.schedule.baselines import timed_method
from nwise.schedule.costs import costs_of_text

_FORMATS = (".png", ".svg", ".pdf", ".html", ".json")


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Draw which loss trains which stage, and what crosses each boundary."""

    strategy: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--strategies"])] = ("local", "2-wise", "end-to-end")
    """Which ones, a panel each, separated by spaces."""
    stages: int = 4
    """Number of stages."""
    out: Path = Path("flow.png")
    """Where to draw (.png, .svg or .pdf)."""

    def run(self, console: Console) -> int:
        check_format(self.out)
        if not self.strategy:
            raise ValueError("`strategy` should name at least one. Found none.")
        if not 1 <= self.stages <= 32:
            raise ValueError(f"`stages` should be from 1 to 32, so that they can be drawn. Found {self.stages}.")
        strategies = [nwise.strategy(name) for name in self.strategy]
        for strategy in strategies:
            strategy.credit(self.stages)  # refuses a matrix of another size
        self.out.parent.mkdir(parents=True, exist_ok=True)
        flow_figure(strategies, self.stages, self.out)
        console.print(f"Figure: {self.out}", soft_wrap=True, highlight=False)
        return OK


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Show the best order of work of strategies and pipelines: in the terminal, as a figure, a page, or a trace."""

    strategy: tuple[str, ...] = ("2-wise",)
    """Which ones, separated by spaces: strategies, or gpipe, 1f1b, zb-h1, zero-bubble."""
    stages: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--devices"])] = (4,)
    """Number of stages; several for several pictures."""
    microbatches: tuple[int, ...] = (2,)
    """Micro-batches in a mini-batch, M; several for several pictures."""
    costs: tuple[str, ...] = ("paper",)
    """Of one micro-batch: paper (a slot for a forward and for each loss's pass, heads free), transformer, a list like
    forward=1,head=0.5,input_grad=1,weight_grad=1,latency=0.1 (of stages: head=0:0.5:0.5:1), or a JSON file of it."""
    stored: bool = False
    """Price a W behind an I of the same cotangent as zero-bubble pipelines do, with every layer's cotangent stored; else
    it walks the chain of layers again, as in nwise's own stages."""
    batches: int = 2
    """Mini-batches to draw, from an empty pipeline on."""
    lists: bool = False
    """Print every stage's list of actions too."""
    out: Path | None = None
    """File to write: .png, .svg, .pdf (figure), .html (interactive page), .json (trace for ui.perfetto.dev)."""
    json: bool = False
    """Print lists and numbers as JSON, and nothing else."""

    def run(self, console: Console) -> int:
        if self.out is not None and (self.out.suffix not in _FORMATS or self.out.is_dir()):
            raise ValueError(f"`out` should be a file that ends in {', '.join(_FORMATS)}. Found {str(self.out)!r}.")
        if self.out is not None and self.out.suffix in (".png", ".svg", ".pdf"):
            check_format(self.out)
        if self.batches < 1:
            raise ValueError(f"`batches` should be at least 1. Found {self.batches}.")
        pictures = list(self._pictures())
        if self.out is not None:
            self._write(pictures, self.out)
        if self.json:
            print_json({"schedules": [_as_json(picture) for picture in pictures], "file": self.out and str(self.out)})
        elif self.out is not None:
            console.print(f"Schedule: {self.out}", soft_wrap=True, highlight=False)
        else:
            for picture in pictures:
                console.print(f"[bold]{picture.title}[/]: {picture.caption}", highlight=False, soft_wrap=True)
                # What is piped on has no width.
                width = console.width if console.is_terminal else sys.maxsize
                console.print(terminal_grid(picture, width), end="", soft_wrap=True)
            console.print(legend(pictures), soft_wrap=True)
        if self.lists and not self.json:
            for picture in pictures:
                console.print(f"\n{picture.title}", highlight=False)
                for k, word in enumerate(picture.timed.lists):
                    console.print(f"stage {k}: {' '.join(map(str, word))}", highlight=False, soft_wrap=True)
        return OK

    def _pictures(self) -> Iterator[Picture]:
        many = (self.strategy, self.stages, self.microbatches, self.costs)
        for name, values in zip(("strategy", "stages", "microbatches", "costs"), many, strict=True):
            if not values:
                raise ValueError(f"`{name}` should have at least one value. Found none.")
        for costs, stages, m, name in itertools.product(self.costs, self.stages, self.microbatches, self.strategy):
            timed = self._timed(name, stages, m, costs)
            turns = len(timed.schedule.flows)
            size = sum(map(len, timed.schedule.words)) / turns * self.batches
            if size > MOST:
                raise ValueError(
                    f"A picture should hold at most {MOST:,} actions. Found {size:,.0f} of {name} with {stages} stages; draw "
                    "fewer stages, micro-batches or mini-batches."
                )
            walked = " (walked)" if name.startswith("zero-bubble") and not self.stored else ""
            title = f"{name}{walked}, A = {stages}, M = {m}" + (f", costs {costs}" if len(self.costs) > 1 else "")
            yield Picture(title, timed, self.batches)

    def _timed(self, name: str, num_stages: int, m: int, text: str) -> Timed:
        chains = "stored" if self.stored else "walked"
        return timed_method(name, num_stages=num_stages, num_microbatches=m, costs=costs_of_text(text), chains=chains)

    def _write(self, pictures: list[Picture], out: Path) -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".html":
            listed(pictures, out)
        elif out.suffix == ".json":
            out.write_text(json.dumps(chrome_trace(pictures), allow_nan=False) + "\n")
        else:
            schedule_figure(pictures, out)


@dataclass(frozen=True, kw_only=True)
class Explore:
    """Write a page to explore schedules on: strategy, A, M, costs and latency, to see grid, period, bound, memory, winner."""

    strategy: tuple[str, ...] = METHODS
    """Which ones, separated by spaces: strategies, or gpipe, 1f1b, zb-h1, zero-bubble."""
    stages: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--devices"])] = (2, 4, 8)
    """Numbers of stages, A."""
    microbatches: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of micro-batches, M."""
    costs: tuple[str, ...] = ("transformer", "paper")
    """Of a whole mini-batch in one stage, each as for `nwise schedule --costs`."""
    latency: tuple[float, ...] = (0.0, 0.25)
    """Times of a message, in the unit of the costs."""
    out: Path = Path("explore.html")
    """File to write."""
    json: bool = False
    """Print what is on the page as JSON, without the pictures, and nothing else."""

    def run(self, console: Console) -> int:
        for name in ("strategy", "stages", "microbatches", "costs", "latency"):
            if not getattr(self, name):
                raise ValueError(f"`{name}` should have at least one value. Found none.")
        costs = {text: costs_of_text(text) for text in self.costs}
        choices = Choices(
            tuple(dict.fromkeys(self.strategy)),
            tuple(dict.fromkeys(self.stages)),
            tuple(dict.fromkeys(self.microbatches)),
            costs,
            tuple(dict.fromkeys(self.latency)),
        )
        choices.check()
        check_page(self.out)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("timing schedules")
            found = explore(choices, self.out, lambda done, total: progress.update(task, completed=done, total=total))
        if self.json:
            print_json({"page": str(self.out), "schedules": found})
        else:
            console.print(f"Page: {self.out}", soft_wrap=True, highlight=False)
        return OK


def _as_json(picture: Picture) -> dict[str, Any]:
    timed = picture.timed
    line = picture.timeline
    return {
        "title": picture.title,
        "order": timed.order,
        "period": timed.period,
        "lower_bound": timed.lower_bound,
        "in_flight": list(timed.in_flight),
        "utilisation": list(line.utilisation),
        "bubble": line.bubble,
        "nwise_runs_it": not timed.stores_cotangents,
        "lists": [list(map(str, word)) for word in timed.lists],
    }
