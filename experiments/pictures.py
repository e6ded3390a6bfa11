"""The figures of the paper that are pictures of schedules and flows: no training, nothing random."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from experiments import stale
from experiments.harness import claims as claiming
from experiments.harness.claims import Claim, exact
from experiments.harness.experiment import Experiment, Job, NothingMatches, Result
from experiments.t.timing import steady
from nwise.app.report.figures import flow_figure
from nwise.app.report.grid import Picture, schedule_figure
from nwise.flow import find_flow
from nwise.schedule import PAPER, paper_time
from nwise.schedule.find import method_schedule
from nwise.strategies import EndToEnd, Local, NWise

# Slots per batch without micro-batches, A = 4, as the paper's grid and its table have them.
_SLOTS = {"end-to-end": 8, "hogwild": 2, "1-wise": 2, "2-wise": 4, "3-wise": 6}


class Drawn(Experiment):
    """A figure, and claims about numbers that are counted in it."""

    def __init__(
        self, name: str, title: str, result: Result, draw: Callable[[Path], None], count: Callable[[], list[Claim]]
    ) -> None:
        super().__init__(name, title, [result])
        self._draw, self._count = draw, count

    def reproduce(self, job: Job) -> None:
        if job.only:
            raise NothingMatches(f"`only` should not be given for a picture, which has no cells. Found {job.only}.")
        folder = job.folder / self.name
        folder.mkdir(parents=True, exist_ok=True)
        self._draw(folder / "figure.png")
        self.document(job, f"![{self.title}](figure.png)\n\n{claiming.table(self._count())}")

    def progress(self, job: Job) -> tuple[int, int]:
        return int(self.page(job).exists()), 1

    def claims(self, job: Job) -> list[Claim]:
        return self._count() if self.page(job).exists() else []


def _flows() -> list[Claim]:
    claims = []
    for n in (1, 2, 3):
        crossing = max(len(stage.messages) for stage in find_flow(NWise(n).credit(4)).stages)
        text = f"{n}-wise: {n - 1} gradient messages cross a boundary at most, four stages"
        claims.append(exact(text, "figure 2", crossing, holds=crossing == n - 1, wanted=f"{n - 1}", unit="messages"))
    return claims


def _picture(name: str, num_stages: int, m: int, batches: int) -> Picture:
    schedule = method_schedule(name, num_stages=num_stages, num_microbatches=m, costs=PAPER)
    return Picture(name if m == 1 else f"{name}, M = {m}", schedule, batches)


def _grid() -> list[Claim]:
    claims = []
    for name, slots in _SLOTS.items():
        period = steady(name, 4)
        text = f"{name}: {slots} slots a batch, four stages"
        claims.append(exact(text, "figure 3", period, holds=period == slots, wanted=f"{slots}", unit="slots"))
    return claims


def _microbatch_grids() -> list[Claim]:
    claims = []
    for name, n in (("gpipe", 6), ("3-wise", 3)):
        schedule = method_schedule(name, num_stages=6, num_microbatches=4, costs=PAPER)
        wanted = paper_time(6, 4, n)
        text = f"{name}, M = 4, six stages: the formula's {wanted} slots"
        claims.append(
            exact(text, "figure 9", schedule.period, holds=schedule.period == wanted, wanted=f"{wanted}", unit="slots")
        )
    return claims


STALE = Drawn(
    "stale-gradients",
    "Stale gradients of Hogwild",
    Result("figure 1", "stale gradients of Hogwild", "figure 1"),
    stale.draw,
    stale.claims,
)
FLOW = Drawn(
    "flow",
    "Flow of activations and gradients",
    Result("figure 2", "flow of activations and gradients", "figure 2"),
    lambda path: flow_figure([EndToEnd(), Local(), NWise(2), NWise(3)], 4, path),
    _flows,
)
GRID = Drawn(
    "timing-grid",
    "Timing grid of four steps",
    Result("figure 3", "timing grid of four steps, time per batch", "figure 3"),
    lambda path: schedule_figure([_picture(name, 4, 1, batches=4) for name in _SLOTS], path),
    _grid,
)
MICROBATCH_GRID = Drawn(
    "microbatch-grid",
    "Timing grids with micro-batches",
    Result("figure 9", "micro-batch grids", "figure 9"),
    lambda path: schedule_figure([_picture(name, 6, 4, batches=2) for name in ("gpipe", "3-wise")], path),
    _microbatch_grids,
)

PICTURES = (STALE, FLOW, GRID, MICROBATCH_GRID)
