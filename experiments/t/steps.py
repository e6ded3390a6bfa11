"""Step times of the paper's Transformers, measured with a process for each stage (figures 7, right, and 10).

    torchrun --nproc-per-node 4 -m experiments t --size full

Every process runs this. The words of a text do not change the time of a step, so the tokens are random.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from experiments.e6.experiment import MEASURED_STEPS, PAPER, settings
from experiments.harness.experiment import Size
from experiments.t.timing import Row, measured_row
from nwise.app.data import Bytes, Tokens
from nwise.app.recipes import Gpt, Recipe
from nwise.app.training import LearningRate, autocast, make_optimizer, make_pipeline, pick_device
from nwise.schedule import PAPER as PAPERS_COSTS
from nwise.schedule.find import method_schedule

_WARM = 3  # steps before the clock starts: the first ones look at what the modules do


Piece = tuple[str, str, int]  # its name, a method, and M


def step_pieces(num_stages: int, microbatches: Sequence[int]) -> list[Piece]:
    """Return what there is to measure with so many stages: the methods of figure 7, and plain N-wise for figure 10."""
    every = dict.fromkeys([*PAPER, *(method.removesuffix("-mean") for method in PAPER)])
    methods = [method for method in every if method == "end-to-end" or int(method[0]) <= num_stages]
    return [(f"{num_stages} processes, {method}, M = {m}", method, m) for method in methods for m in microbatches]


def measure_steps(size: Size, num_stages: int, piece: Piece, steps: int) -> Row:
    """Measure the step time of a method; all processes call it, one for each stage.

    Args:
        size: of the networks.
        num_stages: A.
        piece: what to measure.
        steps: steps to time.
    """
    name, method, m = piece
    seconds = step_seconds(replace(settings(size, num_stages, method), microbatches=m, capture=False), steps)
    model = "gpipe" if method == "end-to-end" else method  # its name among the pipelines
    slots = method_schedule(model, num_stages=num_stages, num_microbatches=m, costs=PAPERS_COSTS).period
    return {"piece": name, **measured_row(MEASURED_STEPS, model, num_stages, m, slots, seconds)}


def step_seconds(recipe: Recipe, steps: int) -> float:
    """Train on random tokens and return the seconds of a step in the steady state, those of the slowest process."""
    assert isinstance(recipe.model, Gpt)
    device, words = pick_device(recipe), Bytes()
    words.vocabulary_size = recipe.model.vocabulary_size or 256
    num_tokens = recipe.batch_size * recipe.model.sequence_length + 1
    stream = torch.randint(words.vocabulary_size, (num_tokens,), generator=torch.Generator().manual_seed(0))
    data = Tokens(stream, recipe.model.sequence_length, words).to(device)
    pipe = make_pipeline(recipe, data, recipe.phases(1)[0][1]).to(device)
    optimizer = make_optimizer(recipe.optimizer, pipe.parameters())
    rate = LearningRate(recipe.optimizer, optimizer, _WARM + steps, recipe.eval_every)
    x, target = data.batch(torch.arange(recipe.batch_size))
    start = 0.0
    for step in range(_WARM + steps):
        if step == _WARM:
            _wait(device)
            start = time.perf_counter()
        with autocast(recipe, device):
            pipe.step(x, target=target)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rate.step()
    _wait(device)
    return max(pipe.processes.gather("seconds", (time.perf_counter() - start) / steps))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
