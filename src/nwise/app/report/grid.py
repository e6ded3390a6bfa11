"""Simulated schedules as grids of time: in the terminal, as figures like the paper's, and as traces for ui.perfetto.dev."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from nwise.app.report.figures import COLOURS, new_figure
from nwise.schedule import Kind, Schedule, Timeline, simulate
from nwise.schedule.actions import PASSES
from nwise.schedule.placement import Placement
from nwise.schedule.simulation import Event, Message

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["KIND_COLOURS", "Picture", "legend", "row_names", "schedule_figure", "terminal_grid"]

KIND_COLOURS = {
    Kind.FORWARD: COLOURS[5],
    Kind.RECOMPUTE: "#bcdff4",
    Kind.HEAD: "#bbbbbb",
    Kind.INPUT_GRAD: COLOURS[4],
    Kind.WEIGHT_GRAD: COLOURS[2],
    Kind.BOTH: COLOURS[3],
    Kind.UPDATE: "#222222",
}
_LONGEST = 300  # time axis of a terminal, in units of the shortest action drawn


@dataclass(frozen=True)
class Picture:
    """A schedule to draw.

    Args:
        title: title of the picture.
        schedule: the schedule.
        batches: number of mini-batches, starting with an empty pipeline.
    """

    title: str
    schedule: Schedule
    batches: int = 2

    @property
    def caption(self) -> str:
        """Order, period and bound of the schedule."""
        schedule = self.schedule
        optimal = "which is optimal" if schedule.optimal else f"lower bound {schedule.lower_bound:.6g}"
        return f"order {schedule.order}: {schedule.period:.6g} per mini-batch, {optimal}"

    @cached_property
    def timeline(self) -> Timeline:
        schedule = self.schedule
        cycles = -(-(self.batches + schedule.oldest) // len(schedule.flows))
        return simulate(schedule, cycles=max(1, cycles))

    @cached_property
    def events(self) -> list[Event]:
        """Everything that takes time in the first `batches` mini-batches."""
        return [e for e in self.timeline.events if e.end > e.start and e.batch < self.batches]

    @property
    def rows(self) -> list[str]:
        return row_names(self.schedule.placement)

    def row(self, event: Event) -> int:
        return self.schedule.placement[event.action.stage]

    def name(self, event: Event) -> str:
        """Return the short name of an event: its stage, if a rank has several, its kind and its micro-batch."""
        schedule = self.schedule
        action = event.action
        stage = str(action.stage) if schedule.num_ranks < schedule.num_stages else ""
        return f"{stage}{action.kind.value}{action.microbatch}"

    def farthest_loss(self, event: Event) -> int | None:
        """Return the loss that a backward pass comes from; of several, the farthest."""
        kind, k, m, q, minibatch, _ = event.action
        return self.schedule.flows[minibatch][m].stages[k].cotangent(q).farthest_loss if kind in PASSES else None


def row_names(placement: Placement) -> list[str]:
    """Name the ranks, by their stage if each has one."""
    ranks = range(1 + max(placement))
    if len(ranks) < len(placement):
        return [f"rank {rank}" for rank in ranks]
    return [f"stage {placement.index(rank)}" for rank in ranks]


def terminal_grid(picture: Picture, width: int) -> Text:
    """Draw a row for each rank, cut at a number of characters; time runs to the right, a dot is a wait."""
    events = picture.events
    rows = [f"{name} " for name in picture.rows]
    margin = max(map(len, rows))
    if not events:
        return Text("nothing takes any time\n", "dim")
    # A character stands for a fixed time. The shortest action has room for the longest name and a space, a cell; a wait has one
    # dot in every cell:
    #
    #     stage 0 F0 F1  · W0  · W1
    #     stage 1  · F0 I0 F1 I1 W0
    cell = max(len(picture.name(event)) for event in events) + 1
    last = max(event.end for event in events)
    scale = cell / max(last / _LONGEST, min(event.end - event.start for event in events))
    grid = Text()
    cut = False
    for number, row in enumerate(rows):
        grid.append(row.rjust(margin))
        at = 0
        for event in (e for e in events if picture.row(e) == number):
            begin = round(scale * event.start)
            end = round(scale * event.end)
            if end > max(cell, width - margin - 1):
                cut = True
                break
            grid.append("".join("·" if i % cell == 1 and i < begin - at - 1 else " " for i in range(begin - at)), "dim")
            style = _style(event.action.kind) + (" bold" if event.batch % 2 else "")
            if end > begin:  # else it is too short to draw
                name = picture.name(event)[: end - begin]
                grid.append(name.ljust(end - begin - 1, "─"), style)
                if end - begin > len(name):
                    grid.append(" ")
                at = end
        grid.append("\n")
    if cut:
        grid.append("(cut at the right; a wider terminal or --out FILE shows more)\n", "dim")
    return grid


def legend(pictures: Sequence[Picture]) -> Text:
    """Explain the letters and colours."""
    kinds = [part for kind in _kinds(pictures) for part in ((f" {kind.value} ", _style(kind)), f" {kind.words}  ")]
    return Text.assemble(*kinds, "numbers are micro-batches; every other mini-batch is bold")


def _style(kind: Kind) -> str:
    return f"{'white' if kind is Kind.UPDATE else 'black'} on {KIND_COLOURS[kind]}"


def _kinds(pictures: Sequence[Picture]) -> list[Kind]:
    shown = {event.action.kind for picture in pictures for event in picture.events}
    return [kind for kind in KIND_COLOURS if kind in shown]


def schedule_figure(pictures: Sequence[Picture], path: Path) -> None:
    """Draw grids below each other on one time axis, with micro-batch numbers, as in the paper's figures."""
    from matplotlib.patches import Patch

    if not all(picture.events for picture in pictures):
        raise ValueError("A schedule should take some time to be drawn. Found costs that are all 0; give one above 0.")
    events = [event for picture in pictures for event in picture.events]
    longest = max(event.end for event in events)
    shortest = min(event.end - event.start for event in events if event.action.kind is not Kind.UPDATE)
    width = min(12.0, max(5.0, 0.26 * longest / shortest))
    heights = [0.24 * len(picture.rows) + 0.9 for picture in pictures]
    # If M = 1, all numbers of micro-batches are 0; the grid then numbers mini-batches.
    whole = [picture.schedule.num_microbatches == 1 for picture in pictures]
    with new_figure(width, sum(heights) + 0.75, path) as figure:
        panels = figure.subplots(len(pictures), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, picture, by_batch in zip(panels, pictures, whole, strict=True):
            _draw(axes, picture, longest, width, by_batch=by_batch)
        kinds = _kinds(pictures)
        patches = [Patch(facecolor=KIND_COLOURS[k], edgecolor="#444444", label=f"{k.value}  {k.words}") for k in kinds]
        columns = min(len(kinds), max(2, int(width // 1.9)))
        figure.legend(handles=patches, loc="outside lower center", ncols=columns, frameon=False)
        numbers = "mini-batches" if all(whole) else "micro-batches" + (" (mini-batches if M = 1)" if any(whole) else "")
        explanation = (
            f"time, in the unit of the costs; numbers are {numbers}, small ones the loss that a gradient comes from; "
            "every other mini-batch is hatched"
        )
        lines = textwrap.fill(explanation, int(15 * width), break_on_hyphens=False)
        panels[-1].set_xlabel(lines, fontsize=8, color="#555555")


def _draw(axes: Axes, picture: Picture, longest: float, width: float, *, by_batch: bool) -> None:
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    for event in picture.events:
        k = picture.row(event)
        length = event.end - event.start
        kind = event.action.kind
        look = {"hatch": "///", "alpha": 0.75} if event.batch % 2 else {}
        look |= {"facecolor": KIND_COLOURS[kind], "edgecolor": "#ffffff", "lw": 0.8}
        axes.add_patch(Rectangle((event.start, k - 0.44), length, 0.88, **look))  # type: ignore[arg-type]
        inches = length * width / longest
        if inches > 0.13 and kind is not Kind.UPDATE:
            loss = picture.farthest_loss(event)
            number = event.batch if by_batch else event.action.microbatch
            name = f"{number}" + ("" if inches < 0.24 or loss is None else f"$_{{{loss}}}$")
            axes.text(event.start + length / 2, k, name, ha="center", va="center", fontsize=7, clip_on=True)
    rows = picture.rows
    axes.set(xlim=(0, longest), ylim=(len(rows) - 0.5, -0.5), yticks=range(len(rows)))
    axes.set_yticklabels(rows)
    axes.tick_params(length=2)
    axes.spines[["top", "right"]].set_visible(False)
    caption = picture.caption if width > 7 else picture.caption.split(";")[0]
    axes.annotate(caption, (0, 1), (0, 4), "axes fraction", "offset points", fontsize=8, color="#555555")
    axes.set_title(picture.title, loc="left", fontsize=9.5, fontweight="bold", pad=15)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=max(4, int(2 * width))))


# The format counts microseconds; draw a unit of the costs as a millisecond.
_UNIT = 1000.0


class Process(NamedTuple):
    """A timeline to draw; times are in milliseconds, or in units of the costs."""

    title: str
    placement: Placement
    events: Sequence[Event]
    messages: Sequence[Message]


def chrome_trace(pictures: Iterable[Picture]) -> dict[str, Any]:
    """Make a trace of simulated schedules, with a process for each."""
    return make_trace(
        Process(f"{p.title}; {p.caption}", p.schedule.placement, p.timeline.events, p.timeline.messages)
        for p in pictures
    )


def make_trace(processes: Iterable[Process]) -> dict[str, Any]:
    """Make a trace: complete events (``"X"``) for actions, a thread per rank, flow events (``"s"``, ``"f"``) for messages."""
    trace: list[dict[str, Any]] = []
    for pid, (title, placement, events, messages) in enumerate(processes):
        trace.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": title}})
        for rank, name in enumerate(row_names(placement)):
            trace.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": rank, "args": {"name": name}})
        for e in events:
            kind = e.action.kind.name.lower()
            args = {"micro-batch": e.action.microbatch, "pass": e.cycle}
            times = {"ts": _UNIT * e.start, "dur": _UNIT * (e.end - e.start)}
            where = {"ph": "X", "pid": pid, "tid": placement[e.action.stage]}
            trace.append({"name": str(e.action), "cat": kind, **where, **times, "args": args | {"mini-batch": e.batch}})
        inside = 1e-3  # both ends of an arrow are just inside the actions that the viewer attaches them to
        for number, m in enumerate(messages):
            common = {"name": "message", "cat": "message", "pid": pid, "id": f"{pid}.{number}"}
            trace += [
                {**common, "ph": "s", "tid": placement[m.sender], "ts": _UNIT * m.sent - inside},
                {**common, "ph": "f", "bp": "e", "tid": placement[m.receiver], "ts": _UNIT * m.used + inside},
            ]
    return {"traceEvents": trace, "displayTimeUnit": "ms"}
