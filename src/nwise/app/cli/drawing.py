"""Commands that draw gradient flow and schedules."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.text import Text

from nwise.app.cli.costs import parse_costs, read_file
from nwise.app.cli.output import Output, print_json
from nwise.app.recipes import parse_phases
from nwise.app.records import json_line
from nwise.app.report.explore import METHODS, MOST, Choices, explore
from nwise.app.report.figures import check_format, flow_figure
from nwise.app.report.grid import Picture, chrome_trace, legend, schedule_figure, terminal_grid
from nwise.app.report.interchange import read_csv, write_csv
from nwise.checks import check_at_least
from nwise.progress import progress_bar
from nwise.schedule import BASELINES, Schedule
from nwise.schedule.find import method_schedule
from nwise.schedule.named import ORDERS
from nwise.schedule.placement import parse_placement

_FIGURES = (".png", ".svg", ".pdf")
_FORMATS = (*_FIGURES, ".json", ".csv")
_NOT_WITH_CSV = ("strategy", "stages", "microbatches", "order", "ranks", "placement")
_METHODS = f"Strategies, or {', '.join(BASELINES)}, separated by spaces."


@dataclass(frozen=True, kw_only=True)
class FlowCommand:
    """Draw which loss trains which stage, and what crosses each boundary.

    Example: nwise flow --strategy local 2-wise --stages 6 --out flow.png
    """

    strategy: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--strategies"])] = ("local", "2-wise", "end-to-end")
    """Strategies, a panel each, separated by spaces."""
    stages: int = 4
    """Number of stages."""
    out: Path = Path("flow.png")
    """Figure to write (.png, .svg or .pdf)."""

    def run(self, console: Output) -> None:
        check_format(self.out)
        if not self.strategy:
            raise ValueError("`strategy` should name at least one. Found none.")
        if not 1 <= self.stages <= 32:
            raise ValueError(f"`stages` should be from 1 to 32, for the figure to be legible. Found {self.stages}.")
        strategies = [rule for name in self.strategy for _, rule in parse_phases(name)]
        for strategy in strategies:
            strategy.credit(self.stages)  # raises if a matrix has another size
        self.out.parent.mkdir(parents=True, exist_ok=True)
        flow_figure(strategies, self.stages, self.out)
        console.say(f"Figure: {self.out}")


@dataclass(frozen=True, kw_only=True)
class ScheduleCommand:
    """Show the best order of work of strategies and pipelines: in the terminal, as a figure, or as a trace.

    Example: nwise schedule --strategy 2-wise zero-bubble --stages 8 --microbatches 2
    """

    strategy: Annotated[tuple[str, ...], tyro.conf.arg(help=_METHODS)] = ("2-wise",)
    stages: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--devices"])] = (4,)
    """Number of stages; several for several pictures."""
    microbatches: tuple[int, ...] = (2,)
    """Micro-batches in a mini-batch, M; several for several pictures."""
    order: Annotated[str, tyro.conf.arg(help=f"Order of a strategy's work: {', '.join(ORDERS)}.")] = "best"
    costs: tuple[str, ...] = ("paper",)
    """Costs of one micro-batch: paper (a slot for a forward and for each loss's pass, heads free), transformer, a list like
    forward=1,head=0.5,input_grad=1,weight_grad=1,latency=0.1 (per stage: head=0:0.5:0.5:1), or a JSON file."""
    ranks: int | None = None
    """Processes that share the stages; default: one for each."""
    placement: str | None = None
    """Rank of each stage: contiguous, interleaved, v, or like 0,1,1,0; default: the method's."""
    csv: Path | None = None
    """End-to-end schedule to read instead of `strategy`, in the CSV format of torch.distributed.pipelining: a row per rank, cells
    like 3F0."""
    batches: int = 2
    """Mini-batches to draw, starting with an empty pipeline."""
    lists: bool = False
    """Print every rank's list of actions too."""
    out: Path | None = None
    """File to write: .png, .svg, .pdf (figure), .json (trace for ui.perfetto.dev), .csv (torch's)."""
    json: bool = False
    """Print only JSON: lists and numbers."""

    def run(self, console: Output) -> None:
        if self.out is not None:
            if self.out.suffix not in _FORMATS or self.out.is_dir():
                raise ValueError(f"`out` should be a file that ends in {', '.join(_FORMATS)}. Found {str(self.out)!r}.")
            if self.out.suffix in _FIGURES:
                check_format(self.out)
        check_at_least(1, batches=self.batches)
        pictures = list(self._pictures())
        if self.out is not None:
            self._write(pictures, self.out)
        if self.json:
            print_json({"schedules": [_as_json(picture) for picture in pictures], "file": self.out and str(self.out)})
            return
        if self.out is not None:
            console.say(f"Schedule: {self.out}")
        else:
            width = console.width if console.is_terminal else sys.maxsize  # piped output has no width
            for picture in pictures:
                console.print(Text.assemble((picture.title, "bold"), f": {picture.caption}"), soft_wrap=True)
                console.print(terminal_grid(picture, width), end="", soft_wrap=True)
            console.print(legend(pictures), soft_wrap=True)
        for picture in pictures if self.lists else ():
            console.say(f"\n{picture.title}")
            for name, actions in zip(picture.rows, picture.schedule.actions, strict=True):
                console.say(f"{name}: {' '.join(map(str, actions))}")

    def _pictures(self) -> Iterator[Picture]:
        _check_values(self, "strategy", "stages", "microbatches", "costs")
        for costs, schedule, title in self._methods() if self.csv is None else self._from_csv(self.csv):
            size = len(schedule.graph.tasks) / len(schedule.flows) * self.batches
            if size > MOST:
                raise ValueError(
                    f"A picture should have at most {MOST:,} actions. Found {size:,.0f} of {title}; draw fewer stages, "
                    "micro-batches or mini-batches."
                )
            yield Picture(title + (f", costs {costs}" if len(self.costs) > 1 else ""), schedule, self.batches)

    def _methods(self) -> Iterator[tuple[str, Schedule, str]]:
        options: dict[str, Any] = {} if self.ranks is None else {"num_ranks": self.ranks}
        if self.placement is not None:
            options["placement"] = parse_placement(self.placement)
        ranks = "" if self.ranks is None else f" on {self.ranks} ranks"
        for text, stages, m, name in itertools.product(self.costs, self.stages, self.microbatches, self.strategy):
            options |= {"num_stages": stages, "num_microbatches": m, "costs": parse_costs(text)}
            schedule = method_schedule(name, self.order, **options)
            yield text, schedule, f"{name}, A = {stages}{ranks}, M = {m}"

    def _from_csv(self, path: Path) -> Iterator[tuple[str, Schedule, str]]:
        for name in _NOT_WITH_CSV:
            if (given := getattr(self, name)) != getattr(ScheduleCommand, name):
                raise ValueError(
                    f"`{name}` should not be given with `csv`, whose file has one. Found {given!r}; leave it out."
                )
        schedule = read_csv(read_file(path, "csv"), path.stem)
        title = f"{path.name}, A = {schedule.num_stages} on {schedule.num_ranks} ranks, M = {schedule.num_microbatches}"
        for text in self.costs:
            yield text, schedule.with_costs(parse_costs(text)), title

    def _write(self, pictures: list[Picture], out: Path) -> None:
        if out.suffix == ".csv" and len(pictures) > 1:
            raise ValueError(f"A CSV file should have one schedule. Found {len(pictures)}; give one of each option.")
        # Before a folder is made: only end-to-end schedules have this form.
        csv = write_csv(pictures[0].schedule) if out.suffix == ".csv" else ""
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".json":
            out.write_text(json_line(chrome_trace(pictures)))
        elif out.suffix == ".csv":
            out.write_text(csv)
        else:
            schedule_figure(pictures, out)


@dataclass(frozen=True, kw_only=True)
class ExploreCommand:
    """Write a page on which to explore schedules: grid, period, bound and memory by strategy, A, M, costs and latency.

    Example: nwise explore --stages 4 8 --latency 0 0.5 1
    """

    strategy: Annotated[tuple[str, ...], tyro.conf.arg(help=_METHODS)] = METHODS
    stages: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--devices"])] = (2, 4, 8)
    """Numbers of stages, A."""
    microbatches: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of micro-batches, M."""
    costs: tuple[str, ...] = ("transformer", "paper")
    """Costs of a whole mini-batch in one stage, each as for `nwise schedule --costs`."""
    latency: tuple[float, ...] = (0.0, 0.25)
    """Times of a message, in the unit of the costs."""
    out: Path = Path("explore.html")
    """Page to write."""
    json: bool = False
    """Print only JSON: the page's numbers, without the pictures."""

    def run(self, console: Output) -> None:
        _check_values(self, "strategy", "stages", "microbatches", "costs", "latency")
        methods, stages, microbatches = map(_distinct, (self.strategy, self.stages, self.microbatches))
        costs = {text: parse_costs(text) for text in self.costs}
        choices = Choices(methods, stages, microbatches, costs, _distinct(self.latency))
        schedules = explore(choices, self.out, progress_bar("timing schedules"))
        if self.json:
            print_json({"page": str(self.out), "schedules": schedules})
        else:
            console.say(f"Page: {self.out}")


def _distinct(values: Sequence[Any]) -> Sequence[Any]:
    return list(dict.fromkeys(values))


def _check_values(command: object, *names: str) -> None:
    for name in names:
        if not getattr(command, name):
            raise ValueError(f"`{name}` should have at least one value. Found none; give one or leave it out.")


def _as_json(picture: Picture) -> dict[str, Any]:
    schedule = picture.schedule
    return {
        "title": picture.title,
        "order": schedule.order,
        "period": schedule.period,
        "lower_bound": schedule.lower_bound,
        "in_flight": list(schedule.in_flight),
        "utilisation": list(picture.timeline.utilisation),
        "bubble": picture.timeline.bubble,
        "lists": [list(map(str, actions)) for actions in schedule.actions],
    }
