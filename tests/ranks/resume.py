"""Goes on from a checkpoint with any cut, strategy and number of replicas; writes what it has loaded, and what comes of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nwise
from nwise.checkpoint import Checkpoints
from nwise.network.chain import Chain
from ranks.common import batches, closed, make_optimizer, write

WIDTH = 6


def pipeline(cut: tuple[int, ...], strategy: Any, m: int = 1, **options: Any) -> nwise.Pipeline:
    """Four blocks with dropout and an output layer, cut into stages of so many blocks; heads by where they stand."""
    torch.manual_seed(0)
    blocks: dict[str, nn.Module] = {
        f"blocks.{i}": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.2))
        for i in range(4)
    }
    output = nn.Linear(WIDTH, 4)
    heads = [nn.Linear(WIDTH, 4) for _ in range(4)]
    stages, used, names = [], 0, list(blocks)
    for count in cut:
        stages.append({name: blocks[name] for name in names[used : used + count]})
        used += count
    stages[-1]["output"] = output
    ends = [sum(cut[: k + 1]) for k in range(len(cut) - 1)]
    return nwise.Pipeline(
        [Chain(stage) for stage in stages],
        [heads[end - 1] for end in ends],
        nn.functional.cross_entropy,
        strategy,
        m,
        seed=1,
        **options,
    )


def main(
    source: Path,
    target: Path,
    cut: tuple[int, ...],
    strategy: str,
    optimizer: str,
    steps: int,
    *,
    asynchronous: bool = False,
) -> dict[str, Any]:
    """Resume from `source` if there is a checkpoint; write the state before and after `steps` steps to `target`."""
    torch.set_num_threads(1)
    pipe = pipeline(cut, strategy)
    update = make_optimizer(optimizer, pipe)
    resumed = Checkpoints(source, pipe, update).resume()
    Checkpoints(target / "loaded", pipe, update).save()
    losses = []
    after = Checkpoints(target / "after", pipe, update, asynchronous=asynchronous)
    for x, y in batches(100, WIDTH)[pipe.steps : pipe.steps + steps]:
        losses.append(pipe.step(x, target=y).tolist())
        update.step()
        update.zero_grad()
        if asynchronous:
            after.save()
    if not asynchronous:
        after.save()
    after.wait()
    return {
        "said": None if resumed is None else resumed.changes,
        "losses": losses,
        "steps": pipe.steps,
        "stage": None if pipe.processes.size == 1 else pipe.processes.place,
        "pipe": pipe,
    }


if __name__ == "__main__":  # one run after the other: the start of a process takes longer than a run
    all_found = []
    for at in range(2, len(sys.argv), 6):
        source, target, cut, strategy, optimizer, steps = sys.argv[at : at + 6]
        found = main(Path(source), Path(target), tuple(map(int, cut.split(","))), strategy, optimizer, int(steps))
        all_found.append(closed(found.pop("pipe"), found))
    write(all_found)
