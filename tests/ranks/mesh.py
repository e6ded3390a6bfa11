"""Replicas of stages against one process; ragged batches; a loss that is not finite on one of them; statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import nwise
from nwise.checkpoint import gather_weights
from nwise.runtime.launch import start
from nwise.training.nonfinite import NonFiniteGuard
from ranks.common import DEVICE, RANK, batches, closed, network, trained, write


def values(pipe: nwise.Pipeline) -> dict[str, list[float]]:
    """Every parameter of this process."""
    return {name: p.detach().flatten().tolist() for name, p in pipe.named_parameters()}


def replicas(strategy: str, num_microbatches: int, *, alone: bool = False) -> Any:
    """Two stages in two replicas, each with half of every mini-batch; or alone, with twice the micro-batches."""
    stages, heads = network(2)
    if not alone and RANK % 2:  # replicas that start otherwise are made equal
        for part in (*stages, *heads):
            for p in part.parameters():
                p.data.fill_(7.0)
    m = 2 * num_microbatches if alone else num_microbatches
    pipe = nwise.Pipeline(stages, heads, nn.functional.cross_entropy, strategy, m, seed=1)
    trained(pipe, "sgd", batches(10, sizes=(8, 9, 11)))
    # Gradients of two steps add up, those of the first not twice.
    for x, y in batches(2):
        pipe.step(x, target=y)
    gradients = {name: p.grad.flatten().tolist() for name, p in pipe.named_parameters() if p.grad is not None}
    found = {"values": values(pipe), "gradients": gradients}
    return closed(pipe, found)


class Masked(nn.Linear):
    """Has no class 3: a sample of it has an infinite loss and finite gradients."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input)
        return logits.masked_fill(torch.arange(logits.shape[1], device=logits.device) == 3, -torch.inf)


def left_out(num_stages: int) -> Any:
    """A loss that is not finite on one replica only."""
    torch.manual_seed(0)
    layers = [*(nn.Linear(6, 6) for _ in range(num_stages - 1)), Masked(6, 4)]
    stages = nwise.split(nn.Sequential(*layers), at=[str(k) for k in range(1, num_stages)])
    pipe = nwise.Pipeline(stages, None, nn.functional.cross_entropy, "end-to-end", seed=1).to(DEVICE)
    finite, update = NonFiniteGuard(pipe, "skip"), torch.optim.SGD(pipe.parameters(), lr=0.1)
    left = []
    for target in ([3, 0, 1, 2], [0, 1, 2, 0], [0, 1, 2, 3]):
        finite.remember()
        pipe.step(torch.ones(4, 6, device=DEVICE), target=torch.tensor(target, device=DEVICE))
        left.append(bool(finite()))
        update.step()
        update.zero_grad()
    if pipe.processes.size > 1:  # ranks that have nothing to send take part in the group's making
        found = gather_weights(pipe)
        assert bool(found) == (RANK == 0), "one process of every stage sends"
    return closed(pipe, {"left": left, "values": values(pipe)})


def statistics(*, alone: bool = False) -> Any:
    """Running statistics of deferred batch norm in two replicas; or alone, with two micro-batches."""
    torch.manual_seed(0)
    stages = [nwise.defer_batchnorm(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))), nn.Linear(6, 4)]
    pipe = nwise.Pipeline(stages, None, nn.functional.cross_entropy, "end-to-end", 1 + alone, seed=1).to(DEVICE)
    for x, y in batches(3):
        pipe.step(x, target=y)
    return closed(pipe, {name: b.tolist() for name, b in pipe.named_buffers() if "running" in name})


CASES = [("local", 1), ("2-wise", 2), ("2-wise-mean", 1), ("end-to-end-delay-1", 2)]

if __name__ == "__main__":
    torch.set_num_threads(1)
    start()
    write([*(replicas(*case) for case in CASES), left_out(2), statistics()])
