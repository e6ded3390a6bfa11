"""How long a mini-batch takes on one accelerator a stage, by the timing model.

``PAPER``             the paper's costs without micro-batches: end-to-end 2A slots, N-wise 2N
`network_costs`       honest: F = I = W, heads by their multiplications, a price for every action; every method with its best M
                      and its best order, which for end-to-end is zero-bubble; a W walks the chain of layers again unless an I has
                      kept its cotangents, as every I of end-to-end training does
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import mean

import torch
from torch.utils.flop_counter import FlopCounterMode

from experiments.harness import markdown
from nwise.app import models
from nwise.app.recipes import Gpt, ResNet
from nwise.schedule import PAPER, TRANSFORMER, Costs, DoesNotFit, Schedule, best
from nwise.schedule.clock import durations
from nwise.schedule.find import method_schedule
from nwise.strategies import Strategy

_SIZES = (1, 2, 4, 8, 16)  # M; 32 is of use to longer pipelines than the experiments have


@dataclass(frozen=True, slots=True)
class StepTime:
    """Of a mini-batch.

    Args:
        slots: forwards of a whole mini-batch through one stage.
        num_microbatches: M that it takes.
        peak: most activations kept at once by a stage, in mini-batches' activations of one stage.
    """

    slots: float
    num_microbatches: int
    peak: float


@cache
def network_costs(model: Gpt | ResNet, num_stages: int = 4) -> Costs:
    """Honest costs of a network: every head, with its backward, takes three times what it multiplies going forward.

    Args:
        model: a slot is the forward of its mean stage, the layers that make the network's own output not counted: they are the
            last head.
        num_stages: A.

    >>> model = Gpt(blocks_per_stage=2, width=64, sequence_length=32, head_blocks=1, vocabulary_size=832)
    >>> network_costs(model, 3).head
    (3.0, 3.0, 1.5)
    >>> network_costs(replace(model, head_blocks=0, loss_fraction=0.25), 3).head
    (0.38, 0.38, 0.38)
    >>> network_costs(replace(model, head_blocks=0, head_rank=13), 3).head  # 13 (64 + 832) / (64 * 832) of 1.5
    (0.33, 0.33, 1.5)
    """
    if isinstance(model, Gpt):
        # Multiplications for a token: four matrices of attention, two of four times the width, scores and their use.
        block = 12 * model.width**2 + 2 * model.sequence_length * model.width
        size, rank = model.vocabulary_size or 256, model.head_rank
        vocabulary = model.width * size
        stages: Sequence[float] = [model.blocks_per_stage * block] * num_stages
        # Of a low rank, a head multiplies all tokens by the narrower factor, and a fraction of them by the wider one.
        own = (rank or 0) * model.width + model.loss_fraction * (rank or model.width) * size
        heads: Sequence[float] = [model.head_blocks * block + own] * (num_stages - 1) + [
            model.loss_fraction * vocabulary
        ]
    else:
        stages, heads = _multiplications(models.resnet(model.variant, 10, 32, width_factor=model.width_factor))
    return replace(TRANSFORMER, head=tuple(round(3 * head / mean(stages), 2) for head in heads))


def describe_costs(costs: Costs) -> str:
    """Return the assumptions of `network_costs` and `step_time`, for the note below a table."""
    heads = costs.head if isinstance(costs.head, tuple) else (costs.head,)
    return (
        f"Honest costs: F = I = W = 1 slot. A head with its backward takes time in proportion to its multiplications; the heads "
        f"take {', '.join(f'{head:g}' for head in heads)} slots. An action adds 0.02. Every method runs at its best M, "
        "and end-to-end is zero-bubble. A weight gradient walks the chain of layers again unless an input gradient has kept its "
        "cotangents, as in end-to-end training. Memory: mini-batches' activations that a stage keeps at once; kept cotangents "
        "are not counted."
    )


@torch.no_grad()
def _multiplications(network: models.StagedModel) -> tuple[list[int], list[int]]:
    """Count the multiplications of every stage and head for an image of 32 pixels; the last linear layer is next to nothing."""
    hidden, stages, heads = torch.zeros(1, 3, 32, 32), [], []
    for k, stage in enumerate(network.stages):
        with FlopCounterMode(display=False) as counter:
            hidden = stage.eval()(hidden)
        stages.append(counter.get_total_flops())
        with FlopCounterMode(display=False) as counter:
            if k < len(network.heads):
                network.heads[k].eval()(hidden)
        heads.append(counter.get_total_flops())
    return stages, heads


@cache
def step_time(method: str | Strategy, num_stages: int, costs: Costs, memory: float | None = None) -> StepTime:
    """Return the step time of a method, run in its fastest way.

    Args:
        method: a strategy, or a pipeline of `nwise.schedule.BASELINES`.
        num_stages: A.
        costs: of a whole mini-batch; the paper's are without micro-batches.
        memory: most activations that a stage may keep, in mini-batches' of one stage; default: any.

    Raises:
        DoesNotFit: no M fits the memory.
    """
    name = "zero-bubble" if method == "end-to-end" and costs != PAPER else method
    search = partial(best, name) if isinstance(name, Strategy) else partial(method_schedule, name)

    def find(m: int) -> Schedule:
        return search(num_stages=num_stages, num_microbatches=m, costs=costs.split_in(m), memory=memory)

    sizes = _SIZES if num_stages <= 10 else (*_SIZES, 32)
    result = fastest(find, (1,) if costs == PAPER else sizes)
    if result is None:
        raise DoesNotFit(str(method), 1.0, memory or 0.0)
    schedule, m = result
    return StepTime(schedule.period, m, max(schedule.peak_bytes))


def fastest(find: Callable[[int], Schedule], counts: Iterable[int]) -> tuple[Schedule, int] | None:
    """Return the fastest schedule over numbers of micro-batches, and its M, the smallest of equals; None if nothing fits.

    Args:
        find: function from M to the schedule; raises `DoesNotFit` if it has none within the memory.
        counts: numbers of micro-batches to try.
    """
    options = []
    for m in counts:
        with suppress(DoesNotFit):
            options.append((find(m), m))
    return min(options, key=lambda option: (round(option[0].period, 9), option[1]), default=None)


def slots_text(method: str | Strategy, num_stages: int, costs: Costs, memory: float | None = None) -> str:
    """Return slots a step by honest costs and M, as text; – if nothing fits."""
    try:
        step = step_time(method, num_stages, costs, memory)
    except DoesNotFit:
        return "–"
    return f"{step.slots:.2f} ({step.num_microbatches})"


def work(method: str, num_stages: int, costs: Costs) -> float:
    """Return the work of all stages in a step, in forwards of a stage, by honest costs without micro-batches."""
    costs = replace(costs, overhead=0.0)
    return work_in(method_schedule(method, num_stages=num_stages, num_microbatches=1, costs=costs), costs)


def work_table(methods: Sequence[str], num_stages: int, costs: Costs) -> str:
    """Return a table in Markdown of the work of a step, and how much of it is in heads and in second backward passes."""
    without = replace(costs, head=0.0)
    plain = work("end-to-end", num_stages, without)
    rows = []
    for method in methods:
        total, rest = work(method, num_stages, costs), work(method, num_stages, without)
        rows.append((method, *(f"{number:.2f}" for number in (total, total - rest, rest - plain))))
    return markdown.table(("work of a step, slots over all stages", "all", "heads", "second passes"), rows)


def work_in(schedule: Schedule, costs: Costs) -> float:
    """Return the work of all stages in a step of a schedule, in forwards of a stage.

    Args:
        schedule: the schedule, one stage a rank.
        costs: of a micro-batch.
    """
    return sum(durations(schedule.graph, costs)) / len(schedule.flows)
