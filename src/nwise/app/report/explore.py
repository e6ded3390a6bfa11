"""The schedule explorer: a page on which to choose strategy, stages, micro-batches, costs and latency.

This module times every combination; the page only looks them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from nwise.app.report.charts import bars, kinds, six_digits
from nwise.app.report.grid import Picture
from nwise.app.report.html import asset, check_page, write_page
from nwise.checks import check_at_least
from nwise.planning.plans import is_late, same_gradients
from nwise.schedule import BASELINES, Costs, Schedule
from nwise.schedule.find import known_method, method_schedule
from nwise.schedule.named import stages_on
from nwise.strategies import EndToEnd, Local, strategy

__all__ = ["Choices", "explore"]

METHODS = (
    "2-wise",
    "local",
    "2-wise-mean",
    "3-wise",
    "4-wise",
    "rotating-2-microbatch",
    "end-to-end",
    "end-to-end-delay-1",
    *BASELINES,
)
_END_TO_END = (*BASELINES, "end-to-end")
MOST = 20_000  # actions in one picture
_ACTIONS = 10  # approximate number per stage and micro-batch in the two mini-batches of a picture
# Indices of a schedule's method, stages, micro-batches, costs and latency in their lists.
Place = tuple[int, ...]


@dataclass(frozen=True)
class Choices:
    """The choices on the page.

    Args:
        methods: names of strategies and pipelines.
        stages: numbers of stages, A.
        microbatches: numbers of micro-batches, M.
        costs: costs of a whole mini-batch in one stage, by name.
        latency: times of a message, in the unit of the costs.
    """

    methods: Sequence[str]
    stages: Sequence[int]
    microbatches: Sequence[int]
    costs: dict[str, Costs]
    latency: Sequence[float]

    def check(self) -> None:
        """Raise early, before any schedule is made, for choices that cannot be drawn.

        Raises:
            ValueError: an invalid strategy, costs or latency, or a picture that would be too large.
        """
        stages = self.stages
        m = max(self.microbatches)
        check_at_least(1, stages=min(stages), microbatches=min(self.microbatches))
        if (size := max(stages) * m * _ACTIONS) > MOST:
            raise ValueError(
                f"A picture should have at most {MOST:,} actions. Found about {size:,} with {max(stages)} stages and {m} "
                "micro-batches; draw fewer."
            )
        for text, costs in self.costs.items():
            if costs.latency:
                raise ValueError(f"`costs` should leave the latency to `latency`. Found {text!r}.")
            for each in stages:
                costs.per_stage("forward", each)
            for latency in self.latency:
                replace(costs, latency=latency)
        if not self.combinations():
            raise ValueError(
                "`stages` should have a number above N for some strategy. Found only strategies that equal end-to-end; add "
                "a larger number of stages, or the strategy `end-to-end`."
            )

    def combinations(self) -> list[Place]:
        """Return all combinations except strategies that are end-to-end under another name.

        Raises:
            ValueError: a strategy is unknown.
        """
        drawn = {
            (i, j)
            for (i, method), (j, stages) in product(enumerate(self.methods), enumerate(self.stages))
            if method in _END_TO_END or not same_gradients(known_method(method), EndToEnd(), stages)
        }
        sizes = (self.methods, self.stages, self.microbatches, self.costs, self.latency)
        return [place for place in product(*(range(len(values)) for values in sizes)) if place[:2] in drawn]

    def time(self, place: Place) -> Schedule:
        method = self.methods[place[0]]
        stages = self.stages[place[1]]
        m = self.microbatches[place[2]]
        costs = replace(list(self.costs.values())[place[3]].split_in(m), latency=self.latency[place[4]])
        size = stages_on(stages, method)
        parts = costs.cut_in(size // stages)
        return method_schedule(method, num_stages=size, num_ranks=stages, num_microbatches=m, costs=parts)


def explore(
    choices: Choices, path: Path, progress: Callable[[list[Place]], Iterable[Place]] = iter
) -> list[dict[str, Any]]:
    """Time every combination and write the page; return its numbers.

    `progress` wraps the list of combinations, for a progress bar.

    Raises:
        ImportError: plotly is missing.
        OSError: the page cannot be written there.
    """
    choices.check()
    check_page(path)
    places = progress(choices.combinations())
    entries: dict[Place, Any] = {place: _make_entry(Picture("", choices.time(place))) for place in places}
    dimensions = {
        "method": choices.methods,
        "stages": choices.stages,
        "microbatches": choices.microbatches,
        "costs": list(choices.costs),
        "latency": choices.latency,
    }
    _write(path, dimensions, entries)
    records = []
    for place, entry in entries.items():
        chosen = {name: values[i] for (name, values), i in zip(dimensions.items(), place, strict=True)}
        records.append(chosen | {name: value for name, value in entry.items() if name not in ("bars", "rows")})
    return records


def _write(path: Path, dimensions: dict[str, Any], entries: dict[Place, Any]) -> None:
    title = "Schedule explorer"
    rules = {name: strategy(name) for name in dimensions["method"] if name not in _END_TO_END}
    # No gradient crosses a boundary, or some are late; the page does not compare such steps with others.
    local = [
        n for n, rule in rules.items() if is_late(rule) or same_gradients(rule, Local(), max(dimensions["stages"]))
    ]
    numbers = [name for name, values in dimensions.items() if not isinstance(values[0], str)]
    data = {
        "dimensions": dimensions,
        "initial": {name: (len(dimensions[name]) - 1) // 2 for name in numbers},
        "entries": {",".join(map(str, place)): value for place, value in entries.items()},
        "kinds": kinds(),
        "baselines": list(_END_TO_END),
        "local": local,
    }
    write_page(path, title, asset("explore.html").format(title=title), "explore.js", data)


def _make_entry(picture: Picture) -> dict[str, Any]:
    schedule = picture.schedule
    return {
        "period": six_digits(schedule.period),
        "lower_bound": six_digits(schedule.lower_bound),
        "optimal": schedule.optimal,
        "order": schedule.order,
        "in_flight": list(schedule.in_flight),
        "rows": picture.rows,
        # A picture's simulation has too few mini-batches for this: the pipeline fills in the first, and empties in the last.
        "utilisation": [six_digits(busy / schedule.period if schedule.period else 0.0) for busy in schedule.busy],
        "bars": bars(picture.events, picture.row, picture.farthest_loss),
    }
