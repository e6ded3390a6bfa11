"""Lower bounds: how short no schedule can be.

    resource        the busiest stage (or link) has to do all its work
    dependency      messages take their way, whatever the stages do
    head-work-tail  between the start of stage a's list and the end of stage b's, all work of a stage s that depends on
                    the one and feeds the other has to fit, plus the way to it and from it (Jackson's preemptive bound)

The third contains the first two. It gives for each turn a matrix of least times from stage a to stage b; the mean of
the longest cycle through it is the bound. It holds for every order and whether or not W and I are fused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nwise.flow import Flow
from nwise.schedule.actions import Action, Kind, forwards, passes
from nwise.schedule.costs import Costs, Prices, prices
from nwise.schedule.lists import counted, held_back, merge, needs, product
from nwise.schedule.orders import NONE, depth_first

Matrix = NDArray[np.float64]

_CLOSE = 1e-9
# Pairs of actions that are compared at most; of larger schedules only cheaper bounds are looked at.
_MOST_EFFORT = 2e8


def resource_bound(flows: Sequence[Sequence[Flow]], costs: Costs) -> float:
    """Work of the busiest stage, or time of the busiest link, in one cycle of mini-batches."""
    num_stages = len(flows[0][0].stages)
    work = [0.0] * num_stages
    down, up = [0.0] * num_stages, [0.0] * num_stages
    sizes = costs.of("message_bytes", num_stages)
    for k, price in enumerate(prices(costs, num_stages)):
        for flow, count in counted(flows):
            stage = flow.stages[k]
            kinds = [*forwards(stage, k, 0), *passes(stage, k, 0, fuse=False)]
            work[k] += count * sum(_least(price, action, flow) for action in kinds)
            down[k] += count * sizes[k] / costs.bandwidth if k < num_stages - 1 else 0.0
            up[k] += count * len(stage.messages) * sizes[k - 1] / costs.bandwidth if k else 0.0
            work[k] += len(flows) * price.update
    return max(*work, *down, *up, *_held_back(flows, costs, num_stages))


def _held_back(flows: Sequence[Sequence[Flow]], costs: Costs, num_stages: int) -> list[float]:
    """Time from a forward that is held back until its activation has been taken."""
    sizes, times = costs.of("message_bytes", num_stages), costs.of("forward", num_stages)
    return [times[k] + costs.overhead + costs.latency + sizes[k] / costs.bandwidth for k in held_back(flows)]


def lower_bound(flows: Sequence[Sequence[Flow]], costs: Costs, enough: float = np.inf) -> float:
    """Time that one cycle of mini-batches takes at the least, in any order.

    Args:
        flows: of every micro-batch, ``[turns][M]``.
        costs: see `Costs`.
        enough: a time that is known to be possible; a bound that meets it is not looked for further. That of large
            schedules is only looked for cheaply, which makes it less sharp.
    """
    known = resource_bound(flows, costs)
    num_stages = len(flows[0][0].stages)
    effort = num_stages**2 * (len(flows[0]) * max(map(_actions, flows[0]))) ** 2
    if len(flows) == 1 and effort < _MOST_EFFORT:
        # A stage with itself is most often the longest cycle, and much less work than all pairs.
        known = max(known, float(np.diag(_least_times(flows[0], costs, pairs=False)).max()))
    if known >= enough * (1 - _CLOSE) or effort * num_stages > _MOST_EFFORT:
        return known
    matrices: dict[tuple[Flow, ...], Matrix] = {}
    least: Matrix | None = None
    for batch in map(tuple, flows):
        if batch not in matrices:
            matrices[batch] = _least_times(batch, costs)
        this = matrices[batch]
        least = this if least is None else (least[:, :, None] + this[None, :, :]).max(axis=1)
    assert least is not None
    return max(known, _longest_cycle(least))


def _actions(flow: Flow) -> int:
    """The most that a stage has to do for a micro-batch."""
    return max(2 + len(stage.messages) + stage.head for stage in flow.stages)


def _least(price: Prices, action: Action, flow: Flow) -> float:
    """The least an action takes: a W that could be fused brings no overhead and no chain."""
    stage = flow.stages[action.stage]
    time = price.of(action, stage, "stored")
    shared = action.kind is Kind.WEIGHT_GRAD and stage.fused is not None
    return time - price.overhead if shared else time


def _least_times(flows: Sequence[Flow], costs: Costs, *, pairs: bool = True) -> Matrix:
    """``[a, b]``: from the start of stage a's list to the end of stage b's, at the least; -inf where nothing leads."""
    ways = _Ways(flows, costs)
    num_stages = len(flows[0].stages)
    heads = ways.heads()
    tails = ways.tails()
    least = np.full((num_stages, num_stages), -np.inf)
    stages = np.array([action.stage for action in ways.actions])
    for s in range(num_stages):
        here = stages == s
        for a in range(num_stages):
            ends = slice(None) if pairs else slice(a, a + 1)
            found = _jackson(heads[here, a], ways.work[here], tails[here, ends])
            least[a, ends] = np.maximum(least[a, ends], found)
    return least


class _Ways:
    """Longest ways through one mini-batch if stages could do any number of things at once."""

    def __init__(self, flows: Sequence[Flow], costs: Costs) -> None:
        self._num_stages = len(flows[0].stages)
        self._prices = prices(costs, self._num_stages)
        self.actions = merge(depth_first(flows, 0, fuse=NONE), [flows])
        place: dict[object, int] = {product(action): i for i, action in enumerate(self.actions)}
        self.work = np.array([_least(self._prices[a.stage], a, flows[a.microbatch]) for a in self.actions])
        self._before = _before(self.actions, place, flows, costs)

    def heads(self) -> Matrix:
        """``[action, a]``: from the start of stage a's list to the action."""
        heads = np.full((len(self.actions), self._num_stages), -np.inf)
        for i, action in enumerate(self.actions):
            heads[i, action.stage] = 0.0
            for other, lag in self._before[i]:
                np.maximum(heads[i], heads[other] + (self.work[other] + lag), out=heads[i])
        return heads

    def tails(self) -> Matrix:
        """``[action, b]``: from the end of the action to the end of stage b's list."""
        tails = np.full((len(self.actions), self._num_stages), -np.inf)
        for i in reversed(range(len(self.actions))):
            k = self.actions[i].stage
            tails[i, k] = max(tails[i, k], self._prices[k].update)
            for other, lag in self._before[i]:
                np.maximum(tails[other], tails[i] + (self.work[i] + lag), out=tails[other])
        return tails


def _before(
    actions: Sequence[Action], place: dict[object, int], flows: Sequence[Flow], costs: Costs
) -> list[list[tuple[int, float]]]:
    """Per action those that precede it: what it needs, and, as micro-batches are alike, the one before of its kind."""
    sizes = [size / costs.bandwidth for size in costs.of("message_bytes", len(flows[0].stages))]
    alike = all(flow == flows[0] for flow in flows)
    last: dict[tuple[Kind, int, int | None], int] = {}
    before: list[list[tuple[int, float]]] = []
    for i, action in enumerate(actions):
        k = action.stage
        found = []
        for key in needs(action, [flows]):
            lag = 0.0 if key[1] == k else costs.latency + (sizes[k - 1] if key[1] < k else sizes[k])
            found.append((place[key], lag))
        kind = (action.kind, k, action.message)
        if alike and kind in last:
            found.append((last[kind], 0.0))
        last[kind] = i
        before.append(found)
    return before


def _jackson(heads: Matrix, work: Matrix, tails: Matrix) -> Matrix:
    """For each end b the largest of: least head + work + least tail, over sets of one stage's actions.

    A set that matters holds every action whose head and tail are at least two given numbers.
    """
    known = heads > -np.inf
    if not known.any():
        return np.full(tails.shape[1], -np.inf)
    order = np.argsort(-heads[known], kind="stable")
    heads, work, tails = heads[known][order], work[known][order], tails[known][order]
    inside = tails[:, None, :] >= tails[None, :, :]  # [action, threshold, b]
    load = np.cumsum(work[:, None, None] * inside, axis=0)
    values: Matrix = np.where(inside, heads[:, None, None] + load + tails[None, :, :], -np.inf).max(axis=(0, 1))
    return values


def _longest_cycle(matrix: Matrix) -> float:
    """The largest mean of a cycle (Karp's theorem, with a start that reaches everything)."""
    size = len(matrix)
    walks = [np.zeros(size)]
    for _ in range(size):
        walks.append((walks[-1][:, None] + matrix).max(axis=0))
    with np.errstate(invalid="ignore"):
        means = [(walks[size] - walks[i]) / (size - i) for i in range(size)]
    finite = walks[size] > -np.inf
    least = np.min(np.where(np.isnan(means), np.inf, means), axis=0)
    return float(least[finite].max()) if finite.any() else -np.inf
