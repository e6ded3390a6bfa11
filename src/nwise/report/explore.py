"""The schedule explorer: a page on which strategies, stages, micro-batches, costs and latency are chosen and seen.

Every combination is timed here; the page only looks them up.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from nwise.report.grid import KIND_COLOURS, KIND_NAMES, Picture, batch_of, farthest_loss
from nwise.report.html import write_page
from nwise.schedule import Timed
from nwise.schedule.baselines import BASELINES, known_method, timed_method
from nwise.schedule.costs import Costs
from nwise.strategies import NWise, Switch
from nwise.strategies import strategy as strategy_of

METHODS = ("2-wise", "local", "2-wise-mean", "3-wise", "4-wise", "end-to-end", *BASELINES)
_END_TO_END = (*BASELINES, "end-to-end")
MOST = 20_000  # actions in one picture
_ACTIONS = 5  # of a stage and micro-batch, about
# As `nwise plan --json` calls them.
_KEYS = {"bound": "lower_bound", "held": "in_flight", "runs": "nwise_runs_it", "busy": "utilisation"}
# Where a schedule is in the lists of methods, stages, micro-batches, costs and latencies.
Place = tuple[int, ...]


@dataclass(frozen=True)
class Choices:
    """What can be chosen on the page.

    Args:
        methods: strategies and pipelines.
        stages: numbers A.
        microbatches: numbers M.
        costs: by name, of a whole mini-batch in one stage.
        latency: times of a message, in the unit of the costs.
        batches: mini-batches that are drawn.
    """

    methods: Sequence[str]
    stages: Sequence[int]
    microbatches: Sequence[int]
    costs: dict[str, Costs]
    latency: Sequence[float]
    batches: int = 2

    def check(self) -> None:
        """Refuse what cannot be drawn before anything is timed.

        Raises:
            ValueError: an odd strategy, costs or latency, or a picture that would be too large.
        """
        size = max(self.stages) * max(self.microbatches) * self.batches * _ACTIONS
        if size > MOST:
            raise ValueError(
                f"A picture should hold at most {MOST:,} actions. Found about {size:,} with {max(self.stages)} stages and "
                f"{max(self.microbatches)} micro-batches; draw fewer."
            )
        for name, stages in product(self.methods, self.stages):
            found = None if name in BASELINES else known_method(name)
            if isinstance(found, Switch):
                raise ValueError(f"`strategy` should not change with time here. Found {name!r}; give its parts.")
            if found is not None:
                _credit(name, stages)
        for text, costs in self.costs.items():
            if costs.latency:
                raise ValueError(f"`costs` should leave the latency to `latency`. Found {text!r}.")
            for stages in self.stages:
                costs.of("forward", stages)
        for latency in self.latency:
            replace(next(iter(self.costs.values())), latency=latency)
        if not self.combinations():
            raise ValueError(
                "`stages` should have a number above N. Found that all of these strategies are end-to-end; add `end-to-end`."
            )

    def combinations(self) -> list[Place]:
        """All that differ from end-to-end."""
        sizes = (self.methods, self.stages, self.microbatches, self.costs, self.latency)
        every = product(*(range(len(values)) for values in sizes))
        return [one for one in every if not self._is_end_to_end(self.methods[one[0]], self.stages[one[1]])]

    def _is_end_to_end(self, method: str, num_stages: int) -> bool:
        if method in _END_TO_END:
            return False
        found = strategy_of(method)
        return isinstance(found, NWise) and found.reduce == "last" and found.n >= num_stages

    def timed(self, place: Place) -> Timed:
        """The schedule of a combination: pipelines as they are, with cotangents stored; strategies as nwise runs them."""
        method, stages, m = self.methods[place[0]], self.stages[place[1]], self.microbatches[place[2]]
        costs = replace(list(self.costs.values())[place[3]].split_in(m), latency=self.latency[place[4]])
        chains: Any = "stored" if method in BASELINES else "walked"
        return timed_method(method, num_stages=stages, num_microbatches=m, costs=costs, chains=chains)


def explore(choices: Choices, path: Path, on_schedule: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """Time every combination and write the page.

    Args:
        choices: what can be chosen.
        path: of the file.
        on_schedule: told after each schedule how many are done, and of how many.

    Returns:
        What the page says of every combination, without the pictures.

    Raises:
        ImportError: plotly is missing.
    """
    choices.check()
    places = choices.combinations()
    entries: dict[Place, Any] = {}
    for done, place in enumerate(places, start=1):
        entries[place] = entry(Picture("", choices.timed(place), choices.batches))
        on_schedule(done, len(places))
    dimensions = {
        "method": choices.methods,
        "stages": choices.stages,
        "microbatches": choices.microbatches,
        "costs": list(choices.costs),
        "latency": choices.latency,
    }
    write_schedules(path, "Schedule explorer", dimensions, entries)
    values = [list(found) for found in dimensions.values()]
    return [
        {
            **{name: values[i][place[i]] for i, name in enumerate(dimensions)},
            **{_KEYS.get(name, name): value for name, value in found.items() if name != "events"},
        }
        for place, found in entries.items()
    ]


def listed(pictures: Sequence[Picture], path: Path) -> None:
    """A page of these schedules only, one choice for each.

    Args:
        pictures: the schedules.
        path: of the file.
    """
    dimensions = {"method": [picture.title for picture in pictures], "microbatches": [""]}
    entries: dict[Place, Any] = {(i, 0): entry(picture) for i, picture in enumerate(pictures)}
    write_schedules(path, "Schedules", dimensions, entries, compared=False)


def write_schedules(
    path: Path, title: str, dimensions: dict[str, Any], entries: dict[Place, Any], *, compared: bool = True
) -> None:
    """The page of schedules by their places in the dimensions.

    Args:
        path: of the file.
        title: of the page.
        dimensions: what can be chosen.
        entries: every schedule.
        compared: whether the page says which is the best, at any number of micro-batches of the same mini-batch.
    """
    own = [name for name in dimensions["method"] if compared and name not in _END_TO_END]
    local = [name for name in own if _is_local(name, max(dimensions["stages"]))]
    numbers = {name for name, values in dimensions.items() if not isinstance(values[0], str)}
    data = {
        "dimensions": dimensions,
        "initial": {name: (len(dimensions[name]) - 1) // 2 for name in numbers},
        "entries": {",".join(map(str, place)): value for place, value in entries.items()},
        "kinds": {kind.value: {"name": KIND_NAMES[kind], "colour": KIND_COLOURS[kind]} for kind in KIND_NAMES},
        "baselines": list(_END_TO_END),
        "local": local,
        "compared": compared,
    }
    write_page(path, title, _BODY.format(title=title), "explore.js", {"schedules": data})


def _is_local(method: str, num_stages: int) -> bool:
    """Whether no gradient crosses a border; its steps are not compared with others'."""
    credit = _credit(method, num_stages)
    return bool(credit.count_nonzero() == credit.diagonal().count_nonzero())


def _credit(method: str, num_stages: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about an N above A, which the page says in its own words
        return strategy_of(method).credit(num_stages)


def entry(picture: Picture) -> dict[str, Any]:
    """What the page shows of a schedule; numbers to six digits."""
    timed = picture.timed
    return {
        "period": _short(timed.period),
        "bound": _short(timed.lower_bound),
        "optimal": timed.optimal,
        "order": timed.order,
        "runs": not timed.stores_cotangents,
        "held": list(timed.in_flight),
        "busy": [_short(share) for share in busy(picture)],
        "events": list(_events(picture)),
    }


def busy(picture: Picture) -> list[float]:
    """Share of the steady state that each stage works."""
    line = picture.timeline
    batches = line.cycles * len(picture.timed.schedule.flows)
    work = [0.0] * picture.timed.schedule.num_stages
    for event in line.events:
        work[event.action.stage] += (event.end - event.start) / batches
    return [each / picture.timed.period if picture.timed.period else 0.0 for each in work]


def _events(picture: Picture) -> Iterator[list[Any]]:
    """Kind, stage, micro-batch, loss, mini-batch, begin, length."""
    for event in picture.events:
        kind, stage, m, *_ = event.action
        yield [
            kind.value,
            stage,
            m,
            farthest_loss(event, picture),
            batch_of(event, picture),
            _short(event.start),
            _short(event.end - event.start),
        ]


def _short(number: float) -> float:
    return float(f"{number:.6g}")


_BODY = """
<h1>{title}</h1>
<p>A network is cut into stages, one row each. Time runs to the right; numbers are micro-batches, small ones the loss that a
gradient comes from; every other mini-batch is hatched. Every schedule was found, timed exactly and bounded by nwise.</p>
<div class="choices" id="choices" role="group" aria-label="What to show"></div>
<p id="answer" class="answer" aria-live="polite"></p>
<p id="absent" class="note" hidden></p>
<div id="found">
<div id="grid" class="chart" role="img" aria-label="When each stage does what"></div>
<div class="wide" tabindex="0"><table class="words"><tbody>
<tr><th scope="row">time of a mini-batch, steady</th><td id="period"></td></tr>
<tr><th scope="row">lower bound</th><td id="bound"></td></tr>
<tr><th scope="row">memory: held at most</th><td id="held"></td></tr>
<tr><th scope="row">stages work</th><td id="busy"></td></tr>
<tr><th scope="row">order</th><td id="order"></td></tr>
</tbody></table></div>
</div>
<h2>All of them</h2>
<p class="note"><span class="compared">&#9733; is the winner named above, each method at its best M; local training is not
compared by time. </span>Pipelines are priced with every layer's cotangent stored, as they are built; strategies as nwise's own
stages run them.</p>
<div class="wide" tabindex="0"><table id="methods"><thead><tr>
<th scope="col">method</th><th scope="col">step</th><th scope="col">bound</th><th scope="col">held</th>
<th scope="col">busy</th><th scope="col" class="compared">step at its best M</th>
<th scope="col" class="compared">best M</th><th scope="col">nwise runs it</th></tr></thead><tbody></tbody></table></div>
<p class="note compared">Costs are those of a whole mini-batch in one stage, so that every M does the same work. Times are per
step; what a step achieves is another matter: end-to-end needs the fewest, local training the most.</p>
"""
