"""The Transformers of full size fit a GPU: the peak of every cell of E6 and E7 by the planner's model, on tensors without memory.

Torch spends seconds to import what such tensors need, and as many on each number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from experiments.e6 import experiment as e6
from experiments.e7 import experiment as e7
from experiments.harness.cell import Cell
from nwise.app.data import Bytes, Tokens
from nwise.app.recipes import Gpt, Recipe
from nwise.app.recipes import recipe as recipe_of
from nwise.app.training.build import measurable
from nwise.app.training.evaluation import slices
from nwise.losses import logits_of
from nwise.planning.allocation import allocated
from nwise.planning.partitions import Piece, stage_costs
from nwise.planning.profiling import profile
from nwise.schedule.ages import strategy_ages
from nwise.schedule.find import method_flows
from nwise.schedule.memory import peak_bytes
from nwise.schedule.named import choose
from nwise.schedule.recompute import recomputing
from nwise.strategies import strategy as parse

LIMIT = 76 * 2**30
META = torch.device("meta")  # where nothing has memory, so results of operators are counted
CELLS = list(dict.fromkeys([*e6.cells("full", 1), *e7.cells("full", 1)]))
LARGE = [
    cell for cell in CELLS if cell.recipe.strategy == "hogwild"
]  # which keeps the activations of whole mini-batches


class _Words(Bytes):
    vocabulary_size = 50257


@contextmanager
def fake() -> Iterator[None]:
    """Make tensors with shapes and without values, which autocast takes for a CPU's."""
    with (
        FakeTensorMode(),
        patch.object(torch.Tensor, "normal_", lambda x, *_, **__: x),  # a second each
        patch.object(nn.Module, "to", lambda module, _: module),  # which they refuse
    ):
        yield


def tokens(model: Gpt, num: int) -> Tokens:
    """Some sequences."""
    return Tokens(torch.zeros(num * model.sequence_length + 1, dtype=torch.int64), model.sequence_length, _Words())


@cache
def pieces(recipe: Recipe) -> list[Piece]:
    """The sizes of the embedding, a block, and the output layers, each with the head behind it."""
    assert isinstance(recipe.model, Gpt)
    m = recipe.microbatches
    with fake():
        network = measurable(recipe, tokens(recipe.model, recipe.batch_size), torch.device("cpu"))
        network = replace(network, optimizer=torch.optim.Adam, device=META)
        return profile(network, (m,), rounds=1).pieces[m]


def peaks(recipe: Recipe, placement: tuple[int, ...], order: str) -> tuple[float, ...]:
    """The peak of every rank."""
    model, m = recipe.model, recipe.microbatches
    assert isinstance(model, Gpt)
    one_block = replace(model, num_stages=1, blocks_per_stage=1)
    embedding, block, output = pieces(replace(recipe_of("lm1b"), model=one_block, microbatches=m))
    starts = [0, *(1 + k * model.blocks_per_stage for k in range(1, model.num_stages))]
    network = [embedding, *[block] * (model.num_stages * model.blocks_per_stage), output]
    flows = method_flows(recipe.strategy, model.num_stages, m)
    costs = stage_costs(network, starts, [turn[0] for turn in flows])
    schedule = choose(order, flows, placement, strategy_ages(parse(recipe.strategy), flows))
    return peak_bytes((recomputing(schedule) if recipe.recompute else schedule).with_costs(costs))


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in LARGE], ids=lambda cell: cell.name)
def test_full_cells_fit_a_gpu(cell: Cell) -> None:
    """Regression: by arithmetic no cell of full size fitted 80 GB, and no test looked at one."""
    (peak,) = peaks(cell.recipe, (0,) * cell.num_stages, "depth-first")
    assert peak < LIMIT


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in LARGE], ids=lambda cell: cell.name)
def test_each_rank_of_full_cells_fits_a_gpu(cell: Cell, m: int) -> None:
    """Also without micro-batches, as the paper's fast methods run; there the logits of a mini-batch alone would take 13 GB."""
    ranks = peaks(replace(cell.recipe, microbatches=m), tuple(range(cell.num_stages)), "best")
    assert len(ranks) == cell.num_stages
    assert max(ranks) < LIMIT


def test_the_readme_says_what_the_papers_hogwild_needs() -> None:
    page = (Path(e7.__file__).parent / "README.md").read_text()
    together = [peaks(cell.recipe, (0,) * cell.num_stages, "depth-first")[0] for cell in LARGE]
    apart = [max(peaks(cell.recipe, tuple(range(cell.num_stages)), "best")) for cell in LARGE]
    for found in (together, apart):
        low, middle, high = (f"{x / 2**30:.0f}" for x in sorted(found))
        assert f"{low}, {middle} and {high} GiB" in page


def test_a_test_of_the_largest_cell_fits_a_gpu() -> None:
    """All heads of six stages are scored together, on twice as many sequences as a mini-batch has."""
    config = next(cell.recipe for cell in CELLS if cell.num_stages == 6)
    assert isinstance(config.model, Gpt)
    size = 2 * config.batch_size
    with fake(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        data = tokens(config.model, size)
        model = config.build(data)
        x, target = data.batch(torch.arange(size))

        def scores(_: None) -> None:
            hidden, outputs = x, []
            for stage, head in zip(model.stages, [*model.heads, None], strict=True):
                hidden = stage(hidden)
                outputs.append(hidden if head is None else head(hidden))
            for some in slices(target.numel(), outputs):
                for output in outputs:
                    logits_of(output, some).float().log_softmax(-1)

        peak = allocated(scores, META).peak
    fixed = sum(p.numel() for part in (*model.stages, *model.heads) for p in part.parameters()) * 4 * 3  # two of Adam
    assert fixed + peak < LIMIT
